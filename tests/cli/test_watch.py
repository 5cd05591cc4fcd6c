"""`ckstore watch`: complete files are stored, however their writers and the watcher itself die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore as library
from ckstore.intake import watching as watching_module
from ckstore.intake.intake import Intake
from ckstore.policy import Policy, Retention
from tests.checkpoints import sha256, write_safetensors
from tests.test_full_disk import MOUNTED

QUICK = ("--settle", "0.2", "--poll", "0.05")


def array(seed: int, rows: int = 300) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, 256), np.float32)


def save(path: Path, seed: int, rows: int = 300) -> Path:
    """Return a safetensors file that appears as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    write_safetensors(temporary, {"w": ("float32", (rows, 256), array(seed, rows))})
    return temporary.rename(path)


@contextmanager
def watching(place: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A watcher of `runs` in a process of its own, which is killed in the end."""
    command = [sys.executable, "-m", "ckstore", "--store", str(place / ".ckstore"), "watch", str(place / "runs")]
    (place / "runs").mkdir(exist_ok=True)
    child = subprocess.Popen(
        [*command, "--run", "gpt", *QUICK, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for(condition: Callable[[], bool], event: str, seconds: float = 40.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, event
        time.sleep(0.05)


def steps(place: Path) -> list[int | None]:
    with library.open(place / ".ckstore", "r") as store:
        return sorted((row.step for row in store._catalog.versions() if row.run == "gpt"), key=lambda step: step or -1)


def wait_for_steps(place: Path, expected: list[int]) -> None:
    wait_for(lambda: steps(place) == expected, f"not {expected}")


def test_complete_files_are_stored_and_unfinished_ones_are_not(place: Path) -> None:
    runs = place / "runs"
    with watching(place) as watcher:
        save(runs / "step1.safetensors", 1)
        wait_for_steps(place, [1])
        save(runs / "step2.safetensors.tmp", 2)
        save(runs / "tmp-step3.safetensors", 3)
        (runs / "log.txt").write_text("loss 3")
        (runs / "last.safetensors").symlink_to("step1.safetensors")
        save(runs / "step4.safetensors", 4)
        wait_for_steps(place, [1, 4])
        (runs / "step2.safetensors.tmp").rename(runs / "step2.safetensors")
        wait_for_steps(place, [1, 2, 4])
        watcher.send_signal(signal.SIGTERM)
        out, err = watcher.communicate(timeout=60)
        assert watcher.returncode == 0
    assert [line.split()[0] for line in out.splitlines()] == ["gpt@1", "gpt@4", "gpt@2"]
    assert "ckstore:" not in err
    with library.open(place / ".ckstore", "r") as store:
        store["gpt@2"].checkout(place / "out")
        assert sha256(place / "out") == sha256(runs / "step2.safetensors")
        assert store.verify().problems == []


def test_a_writer_that_is_slow_and_one_that_is_killed(place: Path) -> None:
    runs = place / "runs"
    data = save(place / "whole", 5).read_bytes()
    writer = f"""
import sys, time
data = open({str(place / "whole")!r}, "rb").read()
with open(sys.argv[1], "wb", buffering=0) as file:
    for part in range(10):
        file.write(data[part * len(data) // 10 : (part + 1) * len(data) // 10])
        time.sleep(float(sys.argv[2]))
"""
    with watching(place):
        slow = subprocess.Popen([sys.executable, "-c", writer, str(runs / "step5.safetensors"), "0.3"])
        dead = subprocess.Popen([sys.executable, "-c", writer, str(runs / "step6.safetensors"), "0.3"])
        wait_for(lambda: (runs / "step6.safetensors").exists() and (runs / "step6.safetensors").stat().st_size > 0, "6")
        dead.kill()
        dead.wait()
        while slow.poll() is None:
            assert steps(place) == [] or (runs / "step5.safetensors").stat().st_size == len(data)
            time.sleep(0.1)
        wait_for_steps(place, [5])
        time.sleep(0.6)
        assert steps(place) == [5]
        # The half-written file is written again.
        (runs / "step6.safetensors").write_bytes(save(place / "other", 6).read_bytes())
        wait_for_steps(place, [5, 6])


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.0, 0.15, 0.4, 0.8])
def test_killed_and_started_again(place: Path, delay: float) -> None:
    """Nothing is stored twice, and nothing is missing."""
    runs = place / "runs"
    for step in range(1, 9):
        save(runs / f"step{step}.safetensors", step)
    with watching(place) as watcher:
        wait_for(lambda: bool(steps(place)), "the first version")
        time.sleep(delay)
        watcher.kill()
        watcher.wait()
    there = len(steps(place))
    save(runs / "step9.safetensors", 9)
    with watching(place) as watcher:
        wait_for_steps(place, list(range(1, 10)))
        watcher.send_signal(signal.SIGTERM)
        out, _ = watcher.communicate(timeout=60)
        assert watcher.returncode == 0
        assert out.count("unchanged") == 0
        assert len(out.splitlines()) == 9 - there
    with library.open(place / ".ckstore") as store:
        assert len(store._catalog.versions()) == 9
        store.encode()
        assert store.verify().problems == []


def test_an_interrupt_ends_it_as_any_verb(place: Path) -> None:
    save(place / "runs" / "step1.safetensors", 1)
    with watching(place) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith("gpt@1 ")
        watcher.send_signal(signal.SIGINT)
        _, err = watcher.communicate(timeout=60)
        assert watcher.returncode == 130
        assert err.splitlines()[-1] == "ckstore: interrupted; the store is consistent."


def test_an_interrupt_within_a_finaliser_ends_it(ckstore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores exceptions in finalisers, so `KeyboardInterrupt` may reach nobody."""

    def watch(self: library.Store, folders: object, *, stop: threading.Event, **_: object) -> Iterator[None]:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        yield from ()

    monkeypatch.setattr(library.Store, "watch", watch)
    before = signal.getsignal(signal.SIGINT)
    (place / "runs").mkdir()
    found = ckstore("watch", "runs", code=130)
    assert found.err.splitlines()[-1] == "ckstore: interrupted; the store is consistent."
    assert signal.getsignal(signal.SIGINT) is before


def test_many_at_once_are_stored_in_the_order_of_their_steps(ckstore, place: Path) -> None:
    for step in (30, 4, 100, 20, 3):
        save(place / "runs" / f"net_50k_{step}.safetensors", step)
    (place / "runs" / "cut.safetensors").write_bytes((place / "runs" / "net_50k_3.safetensors").read_bytes()[:-9])
    found = ckstore("watch", "runs", "--run", "gpt", "--once", *QUICK)
    assert [line.split()[0] for line in found.out.splitlines()] == [f"gpt@{step}" for step in (3, 4, 20, 30, 100)]
    assert "cut.safetensors is left: " in found.err
    assert "ends within the data" in found.err
    assert "; `ckstore ingest --force` stores its bytes unchanged." in found.err, "`watch` has no such option"
    save(place / "runs" / "net_50k_101.safetensors", 101)
    assert ckstore("watch", "runs", "--run", "gpt", "--once", *QUICK).out.split()[0] == "gpt@101"
    assert ckstore("watch", "runs", "--run", "gpt", "--once", *QUICK).out == ""
    # Not even by a name of another form, or after its policy has forgotten or thinned it.
    with library.open(place / ".ckstore") as store:
        store.set_policy(Policy(hot=0, retention=Retention(exact_last=1, keep_last=2)), "gpt")
        store.retain()
    found = ckstore("watch", "runs", "--run", "gpt", "--once", *QUICK)
    assert found.out == ""
    assert found.err.count("keeps nothing so old") == 4
    assert steps(place) == [100, 101]
    with library.open(place / ".ckstore") as store:
        assert [row.fidelity for row in store._catalog.versions()] == ["coarse", "exact"]


def test_sources_go_once_their_versions_are_compared(ckstore, place: Path) -> None:
    digests = {}
    for step in (1, 2):
        path = save(place / "runs" / f"step{step}.safetensors", step)
        digests[step] = sha256(path)
    hub = place / "runs" / "checkpoint-3"
    save(hub / "model.safetensors", 3)
    (hub / "config.json").write_text("{}")
    (place / "runs" / "notes.txt").write_text("keep me")
    # One was stored by a watcher that was killed before it could remove it.
    ckstore("ingest", "runs/step1.safetensors", "--run", "gpt")
    found = ckstore("watch", "runs", "--run", "gpt", "--once", "--delete-source", *QUICK)
    assert [line.split()[0] for line in found.out.splitlines()] == ["gpt@1", "gpt@2", "gpt@3"]
    assert [path.name for path in (place / "runs").iterdir()] == ["notes.txt"]
    with library.open(place / ".ckstore", "r") as store:
        for step, digest in digests.items():
            store[f"gpt@{step}"].checkout(place / f"out{step}")
            assert sha256(place / f"out{step}") == digest
        store["gpt@3"].checkout(place / "out3")
        assert (place / "out3" / "config.json").read_text() == "{}"


def test_a_source_that_differs_from_the_stored_version_stays(ckstore, place: Path) -> None:
    first = save(place / "runs" / "step1.safetensors", 1)
    ckstore("ingest", first, "--run", "gpt")
    save(place / "runs" / "step1.safetensors", 2)
    found = ckstore("watch", "runs", "--run", "gpt", "--once", "--delete-source", *QUICK)
    assert "holds other content" in found.sentence
    assert first.exists()
    ckstore("policy", "gpt", "--fidelity", "coarse")
    assert "coarse" in ckstore("watch", "runs", "--run", "gpt", "--once", "--delete-source", *QUICK, code=2).sentence
    assert first.exists()


def test_a_version_that_does_not_come_back_leaves_its_source(ckstore, place: Path, monkeypatch) -> None:
    from ckstore.errors import IntegrityError
    from ckstore.intake import intake

    def damaged(*_: object) -> None:
        raise IntegrityError("Its digest is wrong; get it again.")

    path = save(place / "runs" / "step1.safetensors", 1)
    monkeypatch.setattr(intake, "check_restores", damaged)
    ckstore("watch", "runs", "--run", "gpt", "--once", "--delete-source", *QUICK, code=4)
    assert path.exists()


def test_files_that_vanish_or_are_written_over(place: Path) -> None:
    runs = place / "runs"
    with watching(place) as watcher:
        for round in range(5):
            path = save(runs / f"step{round}.safetensors", round)
            time.sleep(0.06 * round)
            path.unlink()
            save(runs / "last.safetensors", 10 + round)
        time.sleep(0.3)
        assert watcher.poll() is None
        shutil.rmtree(runs / "gone", ignore_errors=True)
        save(runs / "step9.safetensors", 9)
        wait_for(lambda: 9 in steps(place), "9")
        watcher.send_signal(signal.SIGTERM)
        watcher.communicate(timeout=60)
        assert watcher.returncode == 0
    with library.open(place / ".ckstore", "r") as store:
        assert store.verify().problems == []


#: Stores a slow input once `go` exists; `seen` has the names of the complete inputs, `slow` once it waits.
SLOW = """
import os, sys, time
from ckstore.cli.program import run
from ckstore.intake import intake
from ckstore.scanning.watched import Watched
ingest, update = intake.ingest, Watched._update
def slowly(repository, source, *given):
    while "slow" in str(source) and not os.path.exists("go"):
        open("slow", "w").close()
        time.sleep(0.05)
    return ingest(repository, source, *given)
def noted(watched, now):
    update(watched, now)
    with open("seen.new", "w") as file:
        print(*(path.name for path, seen in watched._seen.items() if seen.is_complete), file=file)
    os.replace("seen.new", "seen")
intake.ingest, Watched._update = slowly, noted
sys.exit(run(sys.argv[1:]))
"""


def seen(place: Path) -> set[str]:
    """The names of the complete inputs at the last look."""
    return set((place / "seen").read_text().split())


def test_an_input_that_is_overwritten_before_its_turn_is_reported(place: Path) -> None:
    """By rename and in place; the present content is stored at its own step, and nothing at a wrong one."""
    runs = place / "runs"
    runs.mkdir()
    first, second = (save(place / f"other{step}.safetensors", step) for step in (1, 2))
    watcher = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--store", str(place / ".ckstore"), "watch", str(runs), "--run", "gpt", *QUICK],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place,
    )  # fmt: skip
    try:
        wait_for(lambda: (place / "seen").exists(), "the first look")
        torch.save({"w": torch.zeros(90), "step": 50}, runs / "last.pt")  # Ready with the slow one, later in order.
        save(runs / "a-slow-step1.safetensors", 9)
        wait_for(lambda: (place / "slow").exists(), "the slow one")
        # While the slow one is stored: one that is complete, overwritten by rename, and one in place.
        shutil.copy(first, runs / "best.safetensors")
        torch.save({"w": torch.ones(90), "step": 60}, runs / "next.pt")
        os.replace(runs / "next.pt", runs / "last.pt")
        save(runs / "gone-step3.safetensors", 3)
        wait_for(lambda: {"best.safetensors", "gone-step3.safetensors"} <= seen(place), "both")
        (runs / "best.safetensors").write_bytes(second.read_bytes())
        (runs / "gone-step3.safetensors").unlink()
        wait_for(lambda: "gone-step3.safetensors" not in seen(place), "the deletion")
        (place / "go").touch()
        wait_for(lambda: 60 in steps(place), "the present content")
        wait_for(lambda: len(steps(place)) == 3, "all")
        watcher.send_signal(signal.SIGTERM)
        out, err = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
        watcher.communicate()
    assert watcher.returncode == 0, err
    assert sorted(line.split()[0] for line in out.splitlines()) == ["gpt", "gpt@1", "gpt@60"]
    said = sorted(line.removeprefix(f"ckstore: {runs}/") for line in err.splitlines())
    assert said == [
        "best.safetensors is left: a complete checkpoint there was overwritten before it could be stored.",
        "gone-step3.safetensors is left: a complete checkpoint there was deleted before it could be stored.",
        "last.pt is left: a complete checkpoint there was overwritten before it could be stored.",
    ]
    with library.open(place / ".ckstore", "r") as store:
        versions = {row.step: store[row.number] for row in store._catalog.versions()}
        assert float(versions[60]["w"].numpy()[0]) == 1.0
        versions[None].checkout(place / "best")
        assert sha256(place / "best") == sha256(second)


@pytest.mark.parametrize("polling", [True, False])
def test_a_directory_that_is_missing_is_waited_for(place: Path, polling: bool) -> None:
    """Before it exists, and after it was deleted and made again; it is said once each time."""
    runs = place / "runs"
    command = [sys.executable, "-m", "ckstore", "--store", str(place / ".ckstore"), "watch", str(runs), "--run", "gpt"]
    watcher = subprocess.Popen(
        [*command, *(QUICK if polling else QUICK[:2])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert watcher.stderr is not None
        assert watcher.stderr.readline() == f"ckstore: {runs} is missing; waiting for it.\n"
        for step in (1, 2, 3):
            save(runs / f"step{step}.safetensors", step)
            wait_for_steps(place, list(range(1, step + 1)))
            shutil.rmtree(runs)
            if step == 2:
                runs.mkdir()  # At once: the watcher may miss that it was gone.
                time.sleep(0.5 if polling else 1.5)
            else:
                assert watcher.stderr.readline() == f"ckstore: {runs} is missing; waiting for it.\n"
            assert watcher.poll() is None
        watcher.send_signal(signal.SIGTERM)
        out, err = watcher.communicate(timeout=60)
    finally:
        watcher.kill()
        watcher.communicate()
    assert watcher.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["gpt@1", "gpt@2", "gpt@3"]
    assert err in ("", f"ckstore: {runs} is missing; waiting for it.\n")


def test_a_missing_directory_is_an_error_where_nothing_waits(ckstore, place: Path) -> None:
    said = ckstore("watch", "runs", "--once", *QUICK, code=2).sentence
    assert said == "runs is missing; name a directory that can be read."
    assert "is a file" in ckstore("watch", "in/step0.pt", *QUICK, code=2).sentence


_FULL = """
import subprocess, sys
from pathlib import Path
import ckstore
place, runs = Path(sys.argv[1]), Path(sys.argv[2])
command = [sys.executable, "-m", "ckstore", "--store", str(place / "store")]
ckstore.init(place / "store").close()
(place / "filling").write_bytes(bytes(5 << 20))
watcher = subprocess.Popen(
    [*command, "watch", str(runs), "--run", "gpt", "--settle", "0.1", "--poll", "0.05"],
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
)
said = watcher.stderr.readline()
assert "full" in said and "Waiting" in said, said
assert watcher.poll() is None
(place / "filling").unlink()
line = watcher.stdout.readline()
assert line.startswith("gpt@1 "), line
watcher.terminate()
assert watcher.wait(60) == 0
with ckstore.open(place / "store") as store:
    assert store.verify().problems == []
    assert len(store._catalog.versions()) == 1
print("went on")
"""


@pytest.mark.local  # The store is on the disk that is full.
@pytest.mark.skipif(shutil.which("unshare") is None, reason="a file system of its own takes unshare")
def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "step1.safetensors", 1, rows=2000)
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(_FULL)
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", MOUNTED, "sh", str(tmp_path / "disk")]
    done = subprocess.run(
        [*command, sys.executable, str(tmp_path / "script.py"), str(tmp_path / "disk"), str(tmp_path / "runs")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system of its own here: {done.stderr.strip()}")
    assert done.stdout == "went on\n", done.stderr


def test_nothing_heavy_is_imported_before_something_is_encoded(place: Path) -> None:
    script = (
        "import sys\nfrom ckstore.cli.program import run\n"
        f"code = run(['--store', '.ckstore', 'watch', 'runs', '--run', 'gpt', '--once', *{QUICK!r}])\n"
        "print(code, [name for name in ('torch', 'zarr') if name in sys.modules])"
    )
    save(place / "runs" / "step1.safetensors", 1)
    (place / "runs" / "cut.safetensors").write_bytes((place / "runs" / "step1.safetensors").read_bytes()[:-9])
    for stored in (1, 0):  # A hot version takes none of them either.
        done = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[stored:] == ["0 []"], done.stdout


def test_the_system_tells_of_changes(place: Path) -> None:
    pytest.importorskip("watchfiles")
    script = (
        "import sys\nfrom ckstore.intake import watching\nfrom ckstore.cli.program import run\n"
        "watching.SELDOM, watching.POLL = 600.0, 0.1\n"
        "watching._places = lambda folders: [bool(folder.stat()) for folder in folders]\n"  # Inodes are used again.
        "sys.exit(run(['--store', '.ckstore', 'watch', 'runs', '--run', 'gpt', '--settle', '0.2']))"
    )
    (place / "runs").mkdir()
    watcher = subprocess.Popen([sys.executable, "-c", script], cwd=place, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(3.0)
        save(place / "runs" / "step1.safetensors", 1)
        wait_for_steps(place, [1])
        shutil.rmtree(place / "runs")
        (place / "runs").mkdir()
        time.sleep(1.0)
        save(place / "runs" / "step2.safetensors", 2)
        wait_for_steps(place, [1, 2])
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(60) == 0
    finally:
        watcher.kill()
        watcher.communicate()


def test_steps_come_from_names_as_long_as_those_in_files_were_equal(tmp_path: Path) -> None:
    """However many files ago: saves before and after the first epoch have one number."""
    (tmp_path / "saves").mkdir()
    stop = threading.Event()
    with library.init(tmp_path / "store") as store:
        store.set_policy(Policy(retention=Retention(keep_last=5)), "main")
        found = store.watch(tmp_path / "saves", run="main", settle=0.0, poll=0.001, stop=stop)
        for number in range(40):
            torch.save({"w": torch.ones(9) * number, "epoch": max(number - 1, 0)}, tmp_path / f"{number}.pt")
            (tmp_path / f"{number}.pt").rename(tmp_path / "saves" / f"step_{100 * number}.pt")
            item = next(found)
            if number:  # The first file has no other to compare with.
                assert item.version is not None, item
                assert item.version.step == 100 * number
        stop.set()
        assert list(found) == []


def test_a_file_whose_parent_was_forgotten_is_stored_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "saves" / "step_1.safetensors", 1)
    store_input, tries = Intake.store_input, []

    def first_lost(*given: Any, **named: Any) -> Any:
        tries.append(given)
        if len(tries) == 1:
            raise library.NotFoundError("Unknown version 7.")
        return store_input(*given, **named)

    monkeypatch.setattr(Intake, "store_input", first_lost)
    monkeypatch.setattr(watching_module, "_PATIENCE", 0.01)
    with library.init(tmp_path / "store") as store:
        first, second = store.watch(tmp_path / "saves", settle=0.0, poll=0.01, once=True)
    assert isinstance(first.error, library.NotFoundError)
    assert second.version is not None
