"""A saver stores its state as it was at the call, reports failures, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.policy import Policy, Retention
from ckstore.saving import staging
from ckstore.saving.saver import Saver
from tests.equality import assert_same, storage_of

REPOSITORY = Path(__file__).parents[2]


def is_running(process: int) -> bool:
    """Return whether the process runs: a zombie does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def process_of(saver: Saver) -> int:
    """Return the id of the saver's process, once it has started."""
    while saver._process is None:
        time.sleep(0.01)
    return saver._process.pid


def state(step: int, size: int = 300) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(size, size, generator=generator), "step": step}


def test_the_saved_state_is_that_at_the_call(store: ckstore.Store) -> None:
    model = torch.nn.Linear(200, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = []
    futures = []
    with store.saver("gpt") as saver:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            futures.append(saver.save(live, metrics={"loss": np.float32(step / 2)}, config={"step": step}))
            expected.append({"model": {key: value.clone() for key, value in live["model"].items()}, "step": step})
    for step, future in enumerate(futures):
        row = future.result(0).version
        assert (row.run, row.step, row.metrics) == ("gpt", step, {"loss": step / 2, "config": {"step": step}})
        found = store[f"gpt@{step}"].state_dict()
        assert_same({key: found[key] for key in ("model", "step")}, expected[step])
        assert set(found["optimizer"]["state"]) == {0, 1}
    assert store.verify().problems == []


def test_tied_and_scattered_tensors_stay_tied_and_scattered(store: ckstore.Store) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    live = {
        "base": base,
        "tied": base[2:5],
        "transposed": torch.randn(40, 50).t(),
        "with holes": torch.randn(40, 50)[::3, ::7],
        "broadcast": torch.ones(1).expand(5),
        "conj": torch.randn(4, 4, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.randn(1000).bfloat16(),
        "array": np.arange(20.0).reshape(4, 5).T,
        "big-endian": np.arange(5, dtype=">f4"),
        ("a", 1): {"nested": [1, None, (2.5, "text")]},
    }
    with store.saver() as saver:
        saver.save(live, step=1)
    store.ingest(live, run="other", step=1, hot=1)
    found, plain = store["main@1"].state_dict(), store["other@1"].state_dict()
    assert storage_of(found["base"]) == storage_of(found["tied"])
    for key in live:
        if isinstance(plain[key], np.ndarray):
            np.testing.assert_array_equal(found[key], plain[key], strict=True)
        else:
            assert_same(found[key], plain[key], str(key))
    assert store["main@1"].original_bytes == store["other@1"].original_bytes
    assert store["main@1"]._stored.document.files[0].blake3 == store["other@1"]._stored.document.files[0].blake3


def test_unstorable_values_are_named_before_anything_is_staged(store: ckstore.Store) -> None:
    class Config:
        pass

    with store.saver() as saver:
        with pytest.raises(ckstore.UsageError, match="at a/c"):
            saver.save({"a": {"c": Config()}})
        with pytest.raises(ckstore.UsageError, match="Metrics must be plain"):
            saver.save({}, metrics={"loss": torch.ones(1)})
        with pytest.raises(ckstore.UsageError, match="A step must be an integer"):
            saver.save({}, step=1.5)  # type: ignore[arg-type]
        with pytest.raises(ckstore.UsageError, match='`busy` takes "wait" or "skip", not'):
            saver.save({}, busy="no")  # type: ignore[arg-type]
        assert saver._areas[0].nbytes == 0
    assert store._catalog.versions() == []


def test_an_error_is_raised_by_the_future_and_the_next_save(store: ckstore.Store) -> None:
    saver = store.saver("a")
    first = saver.save(state(1))
    first.result()
    other = saver.save({"w": torch.zeros(3), "step": 1})
    assert isinstance(other.exception(), ckstore.ConflictError)
    with pytest.raises(ckstore.ConflictError):
        saver.save(state(2))
    saver.save(state(3))  # It goes on after that.
    saver.save({"w": torch.zeros(3), "step": 1})
    with pytest.raises(ckstore.ConflictError):
        saver.close()
    saver.close()
    assert [row.step for row in store._catalog.versions()] == [1, 3]
    with pytest.raises(ckstore.UsageError, match="The saver is closed"):
        saver.save(state(4))


def test_a_callback_that_saves_or_closes_does_not_block(store: ckstore.Store) -> None:
    refused: list[str] = []

    def callback(future: Any) -> None:
        for call in (lambda: saver.save({"w": torch.zeros(5)}, step=1), saver.close):
            with pytest.raises(ckstore.UsageError, match="callback can neither save nor close") as caught:
                call()
            refused.append(str(caught.value))

    with store.saver("a") as saver:
        future = saver.save({"w": torch.zeros(3_000_000)}, step=0)
        future.add_done_callback(callback)
        future.result()
    assert len(refused) == 2
    assert [row.step for row in store._catalog.versions()] == [0]


def test_a_callback_that_wants_to_exit_ends_nothing(store: ckstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.saver("a") as saver:
        saver.save({"w": torch.zeros(3_000_000)}, step=0).add_done_callback(lambda _: sys.exit(3))
        saver.save({"w": torch.ones(5)}, step=1).result(60)
    assert "The callback of a save raised SystemExit(3)" in caplog.text
    assert [row.step for row in store._catalog.versions()] == [0, 1]


def test_replacing(store: ckstore.Store) -> None:
    with store.saver("a") as saver:
        saver.save(state(1))
        saver.save({"w": torch.zeros(3), "step": 1}, replace=True)
    assert store["a@1"].state_dict()["w"].shape == (3,)


def test_one_save_is_in_flight_and_one_is_staged(store: ckstore.Store) -> None:
    with store.saver("a") as saver:
        os.kill(process_of(saver), signal.SIGSTOP)
        futures = [saver.save(state(1)), saver.save(state(2))]
        skipped = saver.save(state(3), busy="skip")
        assert skipped.cancelled()
        assert skipped in wait([skipped], timeout=10).done
        waiting = threading.Thread(target=lambda: futures.append(saver.save(state(4))))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert not any(future.done() for future in futures)
        os.kill(process_of(saver), signal.SIGCONT)
        waiting.join()
    assert [row.step for row in store._catalog.versions()] == [1, 2, 4]


def test_a_second_copy_is_waited_for_where_there_is_no_memory_for_it(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.saver("a") as saver:
        first = saver.save(state(1))
        first.result()
        monkeypatch.setattr(staging, "available", lambda: 0)
        os.kill(process_of(saver), signal.SIGSTOP)
        saver.save(state(2))
        assert saver.save(state(3), busy="skip").cancelled()
        os.kill(process_of(saver), signal.SIGCONT)
        saver.save(state(4))
        assert [area.nbytes > 0 for area in saver._areas] == [True, False]
    assert [row.step for row in store._catalog.versions()] == [1, 2, 4]


def test_memory_that_is_not_there_is_refused(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = r"needs 0.27 GB in addition, but only 0.20 GB of memory are left; save less"
    with store.saver("a") as saver:
        monkeypatch.setattr(staging, "available", lambda: 200_000_000)
        with pytest.raises(ckstore.UsageError, match=sentence):
            saver.save(state(1))
        monkeypatch.undo()
        saver.save(state(1))
    monkeypatch.setattr(staging, "available", lambda: 200_000_000)
    before = threading.active_count()
    with pytest.raises(ckstore.UsageError, match=sentence):
        store.saver("b", nbytes=10_000)
    with pytest.raises(ckstore.UsageError, match=sentence):
        store.saver("a")  # The run's latest version says how much it will be.
    assert threading.active_count() == before


def test_memory_is_had_at_once_where_the_size_is_known(store: ckstore.Store) -> None:
    with store.saver("a", nbytes=1_000_000) as saver:
        assert saver._areas[0].nbytes >= 1_000_000
        saver.save(state(1))
    with store.saver("a") as saver:
        before = saver._areas[0].nbytes
        assert before >= 360_000
        saver.save(state(2))
        assert saver._areas[0].nbytes == before
        saver.save(state(3, size=600))  # Larger ones are staged, too.
    assert [row.step for row in store._catalog.versions()] == [1, 2, 3]
    assert store["a@3"].state_dict()["w"].equal(state(3, size=600)["w"])


def test_no_garbage_collection_runs_while_a_state_is_copied(store: ckstore.Store) -> None:
    """Nor at once afterwards: temporary objects of the copy are gone by then."""
    collected = []
    many = {str(number): {"a": [number], "b": torch.zeros(2)} for number in range(2000)}
    before = gc.get_threshold()
    with store.saver("a") as saver:
        saver.save(many, step=0).result()
        gc.collect()  # The next full one is far off.
        saver.save(many, step=1).result()
        gc.collect(1)  # A full one empties free lists, so that the next objects would be counted as new.
        gc.callbacks.append(lambda phase, info: collected.append(phase))
        try:
            saver.save(many, step=2)
        finally:
            gc.callbacks.pop()
    assert collected == []
    assert gc.get_threshold() == before


def test_bad_arguments(store: ckstore.Store) -> None:
    with pytest.raises(ckstore.UsageError, match="cannot name a run"):
        store.saver("a@1")
    with pytest.raises(ckstore.UsageError, match="`run` takes a text, not 3"):
        store.saver(3)  # type: ignore[arg-type]
    with pytest.raises(ckstore.UsageError, match="`workers` must be 1 or more, not 0"):
        store.saver("a", workers=0)
    with ckstore.open(store.place, "r") as reading, pytest.raises(ckstore.UsageError, match="for reading only"):
        reading.saver("a")


def test_older_versions_are_encoded_while_nothing_is_saved(store: ckstore.Store) -> None:
    with store.saver("a") as saver:
        for step in range(3):
            saver.save(state(step))
        until = time.monotonic() + 150
        while [row.hot for row in store._catalog.versions()] != [False, False, True]:
            assert time.monotonic() < until
            store["a@0"].state_dict()
            time.sleep(0.05)
    assert store.verify().problems == []
    for step in range(3):
        assert store[f"a@{step}"].state_dict()["w"].equal(state(step)["w"])


def test_the_policy_is_applied_while_nothing_is_saved(store: ckstore.Store) -> None:
    store.set_policy(Policy(retention=Retention(exact_last=2, keep_last=4)), "a")
    with store.saver("a") as saver:
        for step in range(6):
            saver.save(state(step), step=step).result()
        deadline = time.monotonic() + 60
        while [row.fidelity for row in store._catalog.versions("a")] != ["coarse", "coarse", "exact", "exact"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert [row.step for row in store._catalog.versions("a")] == [2, 3, 4, 5]
    for step in (4, 5):
        assert_same(store[f"a@{step}"].state_dict(), state(step))
    assert store.verify().problems == []


def test_a_killed_process_fails_its_saves(store: ckstore.Store) -> None:
    saver = store.saver("a")
    first = saver.save(state(1))
    first.result()
    os.kill(process_of(saver), signal.SIGSTOP)
    second = saver.save(state(2))
    os.kill(process_of(saver), signal.SIGKILL)
    with pytest.raises(ckstore.CkstoreError, match=r"process has died \(exit code -9\)"):
        second.result(30)
    for _ in range(2):
        with pytest.raises(ckstore.CkstoreError, match="Make a new saver"):
            saver.save(state(3))
    with pytest.raises(ckstore.CkstoreError, match="process has died"):
        saver.close()
    with store.saver("a") as saver:
        saver.save(state(3))
    assert [row.step for row in store._catalog.versions()] == [1, 3]


def test_an_error_of_the_program_is_not_hidden_by_one_of_the_saver(
    store: ckstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with store.saver("a") as saver:
            saver.save({"w": torch.zeros(3), "step": 1})
            raise ZeroDivisionError

    store.ingest(state(1), run="a", hot=1)
    with pytest.raises(ZeroDivisionError):
        train()
    assert "A save failed: a@1" in caplog.text


def test_closing_ends_the_process_and_gives_the_memory_back(store: ckstore.Store) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    saver = store.saver("a")
    saver.save(state(1))
    process = process_of(saver)
    saver.close()
    saver.close()
    assert not is_running(process)
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_no_saver(store: ckstore.Store) -> None:
    with store.saver("a") as saver:
        child = os.fork()
        if not child:
            code = 1
            try:
                saver.close()
                saver.save(state(1))
            except ckstore.UsageError:
                code = 0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        saver.save(state(2))
    assert [row.step for row in store._catalog.versions()] == [2]


def test_a_process_that_another_thread_forks_at_the_start(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, copies = subprocess.Popen, []

    def started(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        copies.append(os.dup(process.stdin.fileno()))  # As it has one.
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    with store.saver("a") as saver:
        future = saver.save(state(1))
        done = wait([future], timeout=30).done
        for copy in copies:
            os.close(copy)
        assert done == {future}


def script(text: str, *arguments: object) -> subprocess.Popen[str]:
    """Return a program without ``if __name__ == "__main__"``."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_the_last_save_of_a_script_that_closes_nothing_is_stored(store: ckstore.Store) -> None:
    program = script(
        """
        import sys, torch, ckstore
        print("begun", flush=True)
        saver = ckstore.open(sys.argv[1]).saver("a")
        saver.save({"w": torch.ones(300, 300), "step": 7})
        """,
        store.place,
    )
    assert program.communicate(timeout=120)[0] == "begun\n"
    assert program.returncode == 0
    assert [row.step for row in store._catalog.versions()] == [7]


@pytest.mark.long
@pytest.mark.parametrize("has_own_handler", [False, True])
def test_sigterm_ends_a_program_after_its_next_save(store: ckstore.Store, has_own_handler: bool) -> None:
    program = script(
        """
        import signal, sys, time, torch, ckstore
        if sys.argv[2] == "True":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        saver = ckstore.open(sys.argv[1]).saver("a")
        saver.save({"w": torch.ones(3), "step": 0}).result()
        print("begun", flush=True)
        step = 1
        while not saver.is_stopping:
            time.sleep(0.01)
        saver.save({"w": torch.ones(300, 300), "step": 1})
        print("never", flush=True)
        """,
        store.place,
        has_own_handler,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "begun\n"
    program.terminate()
    assert program.communicate(timeout=120)[0] == ""
    assert program.returncode == (3 if has_own_handler else -signal.SIGTERM)
    assert [row.step for row in store._catalog.versions()] == ([0] if has_own_handler else [0, 1])


def test_sigterm_that_no_save_followed_has_its_effect_at_the_end(store: ckstore.Store) -> None:
    program = script(
        """
        import os, signal, sys, ckstore
        with ckstore.open(sys.argv[1]).saver("a") as saver:
            saver.save({"step": 0}, allow_empty=True)
            os.kill(os.getpid(), signal.SIGTERM)
            print(saver.is_stopping, flush=True)
        print("never", flush=True)
        """,
        store.place,
    )
    assert program.communicate(timeout=120)[0] == "True\n"
    assert program.returncode == -signal.SIGTERM
    assert [row.step for row in store._catalog.versions()] == [0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["counted", "data", "array", "scattered", "columns"])
def test_a_state_that_changes_while_it_is_staged_is_refused(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Torch counts no change through `Tensor.data` or by a fused optimiser, and nothing counts changes of an array."""
    large = torch.randn(3000, 1000)
    values: dict[str, Any] = {
        "array": large.numpy(), "scattered": large[::2, ::2], "columns": large.numpy().T[::3]
    }  # fmt: skip
    live = {"first": torch.ones(300), "w": values.get(kind, large)}
    stage = staging.Area.stage

    def train(area: staging.Area, packed: staging.Packed) -> None:
        if kind == "counted":
            large[0, 0] += 1
        else:  # A writer that has come to some part of it, and to none of its ends.
            large.data[1000:1400] += 1
        stage(area, packed)

    monkeypatch.setattr(staging.Area, "stage", train)
    with store.saver("a") as saver:
        with pytest.raises(ckstore.InputError, match="The tensor at w changed while it was read"):
            saver.save(live, step=1)
        monkeypatch.undo()
        saver.save(live, step=1)
    assert [row.step for row in store._catalog.versions()] == [1]


def test_the_process_needs_no_torch() -> None:
    code = """
    import sys
    sys.modules["torch"] = None
    from ckstore.saving import process
    from ckstore.retention import encoder
    from ckstore.writing import ingest
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=REPOSITORY)
