"""Hot versions: written unencoded, restored like any other, and encoded to the result of an immediate encoding."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import ckstore
from ckstore.commit.change import Change
from ckstore.errors import IntegrityError, NotFoundError, UsageError
from ckstore.objects import units
from ckstore.objects.layouts import LayoutDocument
from ckstore.policy import Policy
from ckstore.reading.stored_version import StoredVersion
from ckstore.recovery.recover import recover
from ckstore.repository import Repository
from ckstore.retention import encoder as encoder_module
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.retention.forget import forget
from ckstore.storage import durable
from ckstore.version import Version
from ckstore.writing import encode as encode_module
from ckstore.writing.encode import due
from ckstore.writing.thin import thin
from tests.checkpoints import draw, flip, pack_bytes, present_packs, scratch, settled, write_safetensors
from tests.children import held, in_child

STEPS = 4
#: How often an encoding is killed.
KILLS = int(os.environ.get("CKSTORE_KILLS", "2"))


def state(step: int) -> dict[str, Any]:
    """Return moving weights, moments, short floats, tied and frozen weights, a bundle of small tensors, values."""
    weight = draw(700, 512)
    for number in range(1, step + 1):
        weight = weight + draw(700, 512, seed=number, scale=1e-3)
    model = {
        "weight": weight, "tied": weight, "half": weight[:300].bfloat16(), "frozen": draw(300, 512, seed=99),
        "bias": torch.ones(7) * step, "mask": torch.arange(5) > step,
    }  # fmt: skip
    return {"model": model, "optimizer": {0: {"exp_avg": draw(700, 512, seed=80 + step, scale=1e-4)}}, "step": step}


def files(directory: Path, count: int = STEPS) -> list[Path]:
    paths = []
    for step in range(count):
        paths.append(directory / f"step{step}.pt")
        torch.save(state(step), paths[-1])
    return paths


def raw_packs(store: ckstore.Store) -> list[str]:
    return sorted(name for name in present_packs(store) if name.endswith(".raw.zip"))


def check(store: ckstore.Store, paths: list[Path], run: str = "r") -> None:
    """Check that everything comes back, nothing is wrong, and the catalog equals the one that `recover` makes."""
    assert store.verify().problems == []
    for step, path in enumerate(paths):
        target = store.path.parent / "restored"
        store[f"{run}@{step}"].checkout(target)
        assert target.read_bytes() == path.read_bytes()
        target.unlink()


def without_hot(row: Any) -> Any:
    return replace(row, hot=False, pack="", manifest_offset=0, manifest_length=0, created="", uid="")


def test_a_hot_version_is_whole_at_once(directory: Path) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            row = store.ingest(path, run="r", step=step, hot=STEPS).version
            assert (row.hot, row.fidelity, row.depth, row.base) == (True, "exact", 0, True)
            version, before = store[row.number], [*store._catalog.versions()][-2:-1]
            known = {identity for other in before for identity in store[other.number]._stored.document.objects}
            objects = zip(version._stored.document.objects, version._stored.layout.units, strict=True)
            shared = [unit for identity, unit in objects if identity in known]
            assert bool(shared) == bool(step), "the frozen layer is stored once"
            expected = path.stat().st_size - sum(unit.nbytes for unit in shared)
            assert row.stored_bytes == pytest.approx(expected, rel=0.02)
        check(store, paths)
        version = store["r@2"]
        np.testing.assert_array_equal(version["model/weight"][3:5, 7], state(2)["model"]["weight"][3:5, 7].numpy())
        loaded = version.state_dict()
        assert loaded["model"]["tied"].data_ptr() == loaded["model"]["weight"].data_ptr()
        assert store.gc(grace=0).removed == 0
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        assert [row.hot for row in store._catalog.versions()] == [True] * STEPS
        check(store, paths)


@pytest.mark.local
def test_plain_zarr_shows_raw_values(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(state(1), run="r", step=1, hot=1)
        [pack] = raw_packs(store)
        shown = zarr.open_group(zarr.storage.ZipStore(store.path / "packs" / pack, mode="r"), mode="r")
        arrays = [np.asarray(array[:]) for name, array in shown.arrays() if name != "manifest"]
    weight = state(1)["model"]["weight"].numpy().ravel()
    assert any(array.dtype == np.float32 and np.array_equal(array, weight) for array in arrays)


def test_raw_arrays_can_be_mapped(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        document = store[store.ingest(state(1), hot=1).version.number]._stored.document
        for identity in document.objects:
            record = store._repository.resolver.record(identity)
            assert record.kind == "raw"
            assert record.offset % 64 == 0


def test_a_mapped_state_dict(directory: Path) -> None:
    path = directory / "step.pt"
    saved = state(2) | {"conj": torch.tensor([1 + 2j, 3j]).conj(), "large": draw(2100, 2100), "none": torch.zeros(0, 3)}
    torch.save(saved, path)
    expected = torch.load(path, weights_only=False)
    with ckstore.init(directory / "store") as store:
        store.ingest(path, run="r", step=2, hot=1)
        before = memory_of_files()
        first, second = (store["r@2"].state_dict(mmap=True) for _ in range(2))
        assert "raw.zip" not in before
        assert "raw.zip" in memory_of_files()
        for found in (first, second):
            assert str(found) == str(expected)
            assert all(torch.equal(found[name], expected[name]) for name in ("conj", "large", "none"))
        assert first["model"]["weight"].data_ptr() == first["model"]["tied"].data_ptr()
        first["model"]["weight"].zero_()
        assert torch.equal(second["model"]["weight"], expected["model"]["weight"])
        assert store.verify().problems == []
        store.ingest(state(3), run="r", step=3, hot=1)
        store.encode(["r@2"])
        store.gc(grace=0)
        assert torch.equal(second["model"]["half"], expected["model"]["half"])
        assert str(store["r@2"].state_dict(mmap=True)) == str(expected)


def test_a_mapped_state_dict_can_be_checked(directory: Path) -> None:
    expected = state(1)
    with ckstore.init(directory / "store") as store:
        version = store[store.ingest(expected, run="r", step=1, hot=1).version.number]
        checked = version.state_dict(mmap="checked")
        assert "raw.zip" in memory_of_files()
        assert str(checked) == str(version.state_dict()) == str(expected)
        [pack] = raw_packs(store)
        offset = (store.path / "packs" / pack).read_bytes().index(expected["model"]["frozen"].numpy().tobytes())
        with (store.path / "packs" / pack).open("r+b") as file:
            file.seek(offset + 4)
            bits = file.read(1)[0]
            file.seek(offset + 4)
            file.write(bytes([bits ^ 1]))
        assert not torch.equal(version.state_dict(mmap=True)["model"]["frozen"], expected["model"]["frozen"])
        for mmap in (False, "checked"):
            with pytest.raises(IntegrityError, match="model/frozen cannot be read"):
                version.state_dict(mmap=mmap)
        with pytest.raises(UsageError, match="`mmap` takes True, False or \"checked\", not 'check'"):
            version.state_dict(mmap="check")


def memory_of_files() -> str:
    """Return the files that are mapped into this process."""
    return Path("/proc/self/maps").read_text()


def test_encoding_equals_an_immediate_ingest(directory: Path) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store, ckstore.init(directory / "cold") as cold:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=STEPS, metrics={"loss": step})
            cold.ingest(path, run="r", step=step, hot=0, metrics={"loss": step})
        store.tag("r@1", "best")
        before = store._catalog.versions()
        report = store.encode()
        assert report.versions == [row.number for row in before]
        after = store._catalog.versions()
        assert [row.uid for row in after] == [row.uid for row in before]
        assert [row.created for row in after] == [row.created for row in before]
        assert raw_packs(store) == []
        assert not any(row.hot for row in after)
        for row, other in zip(after, cold._catalog.versions(), strict=True):
            assert row.stored_bytes == pytest.approx(other.stored_bytes, abs=64)
            assert without_hot(replace(row, stored_bytes=0)) == without_hot(replace(other, stored_bytes=0))
            assert store._repository.resolver.document(row).objects == cold._repository.resolver.document(other).objects
        assert len(present_packs(store)) == len(present_packs(cold))
        assert store._catalog.tags() == {"best": 2}
        check(store, paths)
        left = pack_bytes(store.place) - sum(present_packs(store).values())  # In a bucket, for others to read on.
        assert store.gc(grace=0).bytes == left
        assert store.encode().versions == []
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        # Costs are those of the model; a recovery computes them again.
        assert [replace(row, cost=0.0) for row in store._catalog.versions()] == [
            replace(row, cost=0.0) for row in after
        ]
        check(store, paths)


def test_the_latest_stays_hot_and_the_others_are_encoded_behind(directory: Path) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=1)
        deadline = time.monotonic() + 60
        # A pack's file goes once the catalog has gone without it.
        while (due(store._repository, "r", keep=1) or len(raw_packs(store)) > 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [row.hot for row in store._catalog.versions()] == [False] * (STEPS - 1) + [True]
        assert len(raw_packs(store)) == 1
        check(store, paths)


def test_a_script_that_opens_the_store_each_time_does_not_pile_up_raw_packs(directory: Path) -> None:
    for step, path in enumerate(files(directory, 6)):
        with ckstore.open(directory / "store", create=True) as store:
            store.ingest(path, run="r", step=step, hot=1)
            assert len(raw_packs(store)) <= 3


def test_unchanged_tensors_are_not_written_again(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        row = store.ingest({**state(0), "step": 1}, run="r", step=1, hot=1).version
        assert row.stored_bytes < 20_000
        assert store[row.number]._stored.document.objects == store["r@0"]._stored.document.objects
        assert not row.hot  # Nothing of it is raw.


def test_versions_that_share_raw_objects(directory: Path) -> None:
    """Forks hold the same objects raw; whichever is encoded first, the other one stays whole."""
    for fidelity in ("exact", "coarse"):
        for order in ([1, 2, 3], [2, 1, 3], [3, 2, 1]):
            path = directory / f"{fidelity}{''.join(map(str, order))}"
            with ckstore.init(path) as store:
                for number, run in enumerate(("a", "b", "c")):
                    store.ingest({**state(1), "step": number}, run=run, step=1, hot=1, policy=fidelity)
                for number in order:
                    store.encode([number])
                    assert store.verify().problems == []
                    for other in store._catalog.versions():
                        if other.hot:
                            loaded = store[other.number].state_dict()["model"]["weight"]
                            assert torch.equal(loaded, state(1)["model"]["weight"])
                store.gc(grace=0)
                assert raw_packs(store) == []
                assert store.verify().problems == []


def test_a_raw_pack_goes_although_hot_versions_share_its_objects(directory: Path) -> None:
    """The frozen layer is encoded by then; else the first checkpoint would stay unencoded next to the last one."""
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            store.ingest(state(step), run="r", step=step, hot=9)
        for step in range(3):
            assert len(raw_packs(store)) == 3 - step
            store.encode([f"r@{step}"])
            assert store.verify().problems == []
        assert raw_packs(store) == []


@pytest.mark.parametrize("fidelity", ["exact", "coarse"])
@pytest.mark.parametrize("again", [False, True])
def test_objects_shared_with_an_encoded_version_stay(directory: Path, fidelity: str, again: bool) -> None:
    """An object that is raw for one version, and encoded for a later one, outlives the first one's raw pack."""
    store = ckstore.init(directory / "store")
    store.set_policy(Policy(fidelity, hot=1), "a")  # type: ignore[arg-type]
    store.ingest(state(1), run="a", step=1)
    store.ingest(state(1), run="b", step=1, hot=0)
    if again:
        store.close()
        store = ckstore.open(directory / "store")
    with store:
        store.encode(run="a")
        assert raw_packs(store) == []
        assert store.verify().problems == []
        assert torch.equal(store["b@1"].state_dict()["model"]["half"], state(1)["model"]["half"])


def test_the_layout_that_versions_share_is_parsed_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state(0), state(0) | {"model": state(1)["model"]}]
    parsed: list[bytes] = []
    decode = LayoutDocument.decode

    def counted(data: bytes) -> LayoutDocument:
        parsed.append(data)
        return decode(data)

    monkeypatch.setattr(LayoutDocument, "decode", counted)
    with ckstore.init(directory / "store") as store:
        for step, held in enumerate(states):
            store.ingest(held, run="r", step=step, hot=STEPS)
        store.encode()
        assert store.verify().problems == []
        assert len(parsed) == len(set(parsed)) == 1


def test_a_hot_version_under_a_coarse_policy_becomes_coarse(directory: Path) -> None:
    with ckstore.init(directory / "store") as store, ckstore.init(directory / "cold") as cold:
        store.set_policy(Policy("coarse", hot=1), "r")
        for step in range(3):
            row = store.ingest(state(step), run="r", step=step).version
            assert (row.hot, row.fidelity) == (True, "exact")
            cold.ingest(state(step), run="r", step=step, policy="coarse")
        store.encode()
        assert [row.fidelity for row in store._catalog.versions()] == ["coarse"] * 3
        assert raw_packs(store) == []
        for step in range(3):
            mine, other = store[f"r@{step}"], cold[f"r@{step}"]
            assert [item.relative for item in mine.deviations().values()] == pytest.approx(
                [item.relative for item in other.deviations().values()], rel=1e-6
            )
        assert store.verify().problems == []
    assert recover(directory / "store").problems == []


def test_a_version_that_follows_a_hot_one_encodes_it_first(directory: Path) -> None:
    paths = files(directory, 3)
    with ckstore.init(directory / "store") as store:
        store.ingest(paths[0], run="r", step=0, hot=2)
        store.ingest(paths[1], run="r", step=1, hot=2)
        row = store.ingest(paths[2], run="r", step=2, hot=0).version
        assert (row.depth, [other.hot for other in store._catalog.versions()]) == (2, [False] * 3)
        check(store, paths)


@pytest.mark.parametrize("hot", [0, STEPS])
def test_a_version_keeps_its_own_budget_with_objects_of_a_larger_one(directory: Path, hot: int) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=hot, max_restore_cost=9)
        weight = {"weight": state(STEPS - 1)["model"]["weight"], "more": torch.ones(3)}
        store.ingest(weight, run="r", step=STEPS, hot=hot, max_restore_cost=1.01)
        store.encode()
        assert store._catalog.versions()[-1].cost <= 1.011
        assert max(row.cost for row in store._catalog.versions()) > 1.1  # The others are as deep as they may be.
        check(store, paths)


def test_thinning_forgetting_and_freeing_hot_versions(directory: Path) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=STEPS)
        assert [item.version.number for item in store.thin([2], dry_run=True).versions] == [2]
        store.thin([2])
        assert [row.fidelity for row in store._catalog.versions()] == ["exact", "coarse", "exact", "exact"]
        assert [row.hot for row in store._catalog.versions()] == [False, False, True, True]
        assert store.rebase(max_restore_cost=1.0).versions is not None
        store.forget([3])
        store.gc(grace=0)
        assert len(raw_packs(store)) == 1
        assert store.verify().problems == []
        store.encode()
        assert store.verify().problems == []
        store["r@3"].checkout(directory / "out.pt")
        assert (directory / "out.pt").read_bytes() == paths[3].read_bytes()


def test_a_flipped_bit_of_a_raw_object_is_found(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(state(1), run="r", step=1, hot=1)
        [pack] = raw_packs(store)
        flip(store.place, pack, lambda length: length // 2)
        assert any("does not match its name" in problem for problem in store.verify().problems)
        with pytest.raises(IntegrityError):
            store["r@1"].state_dict()
        with pytest.raises(IntegrityError):
            store.encode()
        assert [row.hot for row in store._catalog.versions()] == [True]


def test_a_setting_that_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="hot versions"):
        Policy(hot=-1)


_ENCODES = """
import sys, ckstore
with ckstore.open(sys.argv[1]) as store:
    store.encode([])
    print("begun", flush=True)
    store.encode()
    print("done", flush=True)
"""


def encoding(store: Path) -> subprocess.Popen[bytes]:
    """Return a process that begins to encode all versions right now."""
    child = subprocess.Popen([sys.executable, "-c", _ENCODES, str(store)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    return child


@pytest.fixture(scope="module")
def hot() -> Iterator[tuple[Path, list[Path], float]]:
    """A store of hot versions, their files, and the seconds that a process takes to encode them."""
    with scratch() as directory:
        paths = files(directory)
        with ckstore.init(directory / "store") as store:
            for step, path in enumerate(paths):
                store.ingest(path, run="r", step=step, hot=STEPS)
        shutil.copytree(directory / "store", directory / "copy")
        with encoding(directory / "copy") as child:
            began = time.monotonic()
            assert child.stdout is not None
            assert child.stdout.readline() == b"done\n"
            yield directory / "store", paths, time.monotonic() - began


@pytest.mark.local
@pytest.mark.parametrize("seed", range(KILLS))
def test_killed_while_encoding(hot: tuple[Path, list[Path], float], directory: Path, seed: int) -> None:
    """At a random moment: nothing is lost, leftovers can be collected, and another process goes on."""
    store, paths, seconds = hot
    place = Path(shutil.copytree(store, directory / "store"))
    chance = random.Random(seed)
    with encoding(place) as child:
        time.sleep(chance.uniform(0, seconds))
        child.kill()
    with ckstore.open(place) as opened:
        check(opened, paths)
        if chance.random() < 0.5:
            opened.gc(grace=0)
            check(opened, paths)
        opened.encode()
        check(opened, paths)
        assert not any(row.hot for row in opened._catalog.versions())


def test_files_of_all_kinds(directory: Path) -> None:
    """One without checksums, one that is no checkpoint, a directory, an empty state dict, and one without tensors."""
    write_safetensors(directory / "model.safetensors", {"w": ("float32", (300, 512), draw(300, 512).numpy())})
    (directory / "notes.txt").write_text("nothing of interest")
    (directory / "hf").mkdir()
    write_safetensors(
        directory / "hf" / "model.safetensors", {"w": ("float32", (300, 512), draw(300, 512, seed=1).numpy())}
    )
    (directory / "hf" / "config.json").write_text("{}")
    np.savez(directory / "arrays.npz", a=np.arange(300_000), empty=np.zeros(0))
    with ckstore.init(directory / "store") as store:
        for step, name in enumerate(("model.safetensors", "notes.txt", "hf", "arrays.npz")):
            store.ingest(directory / name, run="r", step=step, hot=9, verify=True, allow_empty=True)
        store.ingest({}, run="r", step=9, hot=9, allow_empty=True)
        store.ingest({"epoch": 1}, run="r", step=10, hot=9, allow_empty=True)
        assert store["r@10"].state_dict() == {"epoch": 1}
        assert store.verify().problems == []
        store.encode()
        assert store["r@10"].state_dict() == {"epoch": 1}
        assert store.verify().problems == []
        for step, name in enumerate(("model.safetensors", "notes.txt", "arrays.npz")):
            step += step == 2
            store[f"r@{step}"].checkout(directory / "out")
            assert (directory / "out").read_bytes() == (directory / name).read_bytes()
            (directory / "out").unlink()
    assert recover(directory / "store").problems == []


def test_a_store_of_many_small_objects(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALL", 100)
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            store.ingest({f"{name}": draw(20, 30, seed=name + step) for name in range(50)}, run="r", step=step, hot=3)
        store.encode()
        assert store.verify().problems == []
        for step in range(3):
            loaded = store[f"r@{step}"].state_dict()
            assert all(torch.equal(loaded[f"{name}"], draw(20, 30, seed=name + step)) for name in range(50))


def test_a_version_that_becomes_due_while_another_is_encoded_is_encoded_too(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(directory / "store") as store:
        for step in range(2):
            store.ingest(state(step), run="a", hot=9)
        encoder = BackgroundEncoder(store._repository)
        begun = encode_module.encode

        def encode(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is encoder._thread and len(store._catalog.versions()) == 2:
                store.ingest(state(2), run="a", hot=9)
                encoder.begin("a", 1)
            return begun(*args, **options)

        monkeypatch.setattr(encoder_module, "encode", encode)
        encoder.begin("a", 1)
        while encoder._thread is not None:
            time.sleep(0.01)
        assert [row.hot for row in store._catalog.versions()] == [False, False, True]


def test_an_encoding_can_be_left(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        for step in range(2):
            store.ingest(state(step), run="a", hot=9)
        before = raw_packs(store)
        encoder = BackgroundEncoder(store._repository)
        encoder.pause()
        encoder.begin("a", 1)
        time.sleep(0.2)
        assert [row.hot for row in store._catalog.versions()] == [True, True]
        encoder.close(finish=False)
        assert [row.hot for row in store._catalog.versions()] == [True, True]
        assert raw_packs(store) == before
        assert list((store.path / "packs").glob("*tmp*")) == []
        assert store.verify().problems == []


@pytest.mark.parametrize("place", ["StoredVersion", "store_objects", "describe_encoded"])
def test_a_concurrently_forgotten_or_encoded_version_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        for step in range(3):
            store.ingest(state(step), run="a", step=step, hot=9)
        before = getattr(encode_module, place)
        gone = iter([lambda: other.forget(["a@0"]), lambda: other.encode(["a@1"])])

        def late(*args: Any, **options: Any) -> Any:
            next(gone, lambda: None)()
            return before(*args, **options)

        rows = due(store._repository, "a", keep=0)
        monkeypatch.setattr(encode_module, place, late)
        assert encode_module.encode(store._repository, rows[:1]).versions == []
        assert encode_module.encode(store._repository, rows).versions == [3]
        assert [row.hot for row in store._catalog.versions()] == [False, False]
        assert store.verify().problems == []


def test_two_threads_may_encode_a_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that one has written, but not committed, are not objects of the store for the other."""
    before = encode_module.describe_encoded
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            store.ingest(state(step), run="a", step=step, hot=9)
        thread = threading.Thread(target=store.encode, args=(["a@0"],))

        def late(*args: Any, **options: Any) -> Any:
            if thread.ident is None:
                thread.start()
                thread.join()
            return before(*args, **options)

        monkeypatch.setattr(encode_module, "describe_encoded", late)
        assert store.encode(["a@0"]).versions == []
        assert [row.hot for row in store._catalog.versions()] == [False, True, True]
        assert store.verify().problems == []
        for step in range(3):
            assert store[f"a@{step}"].state_dict()["model"]["frozen"].equal(state(step)["model"]["frozen"])


@pytest.mark.parametrize("moment", ["before", "after"])
def test_objects_that_another_process_encodes_are_not_encoded_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    paths = files(directory)
    torch.save({**state(STEPS), "model": state(STEPS - 1)["model"]}, directory / "still.pt")
    paths.append(directory / "still.pt")
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=9)
        rows = store._catalog.versions()
        with Repository(directory / "store") as other:
            for row in rows:
                Version(StoredVersion(other, row)).state_dict()  # The objects' records are raw ones, for this process.
            store.encode([row.number for row in rows[:-1]])
            if moment == "after":  # The other process comes first after the encoding has looked.
                forget = other.resolver.forget
                forgotten = iter([lambda: None])
                monkeypatch.setattr(other.resolver, "forget", lambda: next(forgotten, forget)())
            assert encode_module.encode(other, rows[-1:]).versions == [rows[-1].number]
        check(store, paths)
        assert store.gc(grace=0).removed == 0
        check(store, paths)


def test_raw_values_of_a_version_that_is_not_committed_yet_stay(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `recover` that comes between a version's two packs knows the raw one without the version."""
    with ckstore.init(directory / "store") as store:
        for step in (0, 1):
            store.ingest(state(step), run="a", step=step, hot=9)
    named = durable.checkpoint
    steps = iter([lambda: (recover(directory / "store"), store.encode(["a@0"]))])

    def between(name: str) -> None:
        named(name)
        if name == "pack-renamed" and threading.current_thread() is threading.main_thread():
            next(steps, lambda: None)()

    monkeypatch.setattr(durable, "checkpoint", between)
    with ckstore.open(directory / "store") as store:
        with ckstore.open(directory / "store") as other:
            other.ingest(state(2), run="b", step=2, hot=9)
        monkeypatch.undo()
        assert next(steps, None) is None
        assert store.verify().problems == []
        assert store["b@2"].state_dict()["model"]["weight"].equal(state(2)["model"]["weight"])


def test_a_raw_pack_that_gc_rewrote_is_deleted_with_its_last_version(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(state(1), run="a", step=1, hot=9)
        store.ingest({"model": state(1)["model"]}, run="b", step=1, hot=9)
        forget(store._repository, store._catalog.versions("a"), for_good=True)  # Objects of both stay in its pack.
        before = raw_packs(store)
        assert store.gc(grace=0).rewritten == 1
        assert raw_packs(store) != before
        store.encode()
        assert raw_packs(store) == []
        assert store._catalog.moved_packs(None) == {}
        assert store.verify().problems == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_version_that_is_encoded_while_another_one_is_thinned(
    directory: Path, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    paths = files(directory)
    with ckstore.init(directory / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=2)
        before = store._catalog.versions()
        store.encode()
        if forgotten:
            store.forget(["r@3"])
            store.gc(grace=0)
        with Repository(directory / "store") as other:
            rows = iter([before])  # As they were before the other process came in.
            versions = other.catalog.versions
            monkeypatch.setattr(other.catalog, "versions", lambda run=None: next(rows, None) or versions(run))
            assert [item.version.number for item in thin(other, before[:1], Policy("coarse")).versions] == [1]
        store._repository.resolver.forget()
        assert store.verify().problems == []


@pytest.mark.parametrize("elsewhere", ["encoded", "thinned"])
def test_a_version_that_is_described_elsewhere_since_its_row_was_read(directory: Path, elsewhere: str) -> None:
    path = files(directory)[0]
    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        row = store.ingest(path, run="r", step=1, hot=9 if elsewhere == "encoded" else 0).version
        if elsewhere == "encoded":
            other.encode()
        else:
            other.thin([1])
            other.gc(grace=0)
        assert row.pack not in {pack.name for pack in other._catalog.packs()}
        version = Version(StoredVersion(store._repository, row))
        if elsewhere == "encoded":
            version.checkout(directory / "out")
            assert (directory / "out").read_bytes() == path.read_bytes()
        else:
            assert version.fidelity == "coarse"
            assert version.state_dict().keys() == {"model", "optimizer", "step"}
        other.forget([1])
        other.gc(grace=0)
        with pytest.raises(NotFoundError, match="Unknown version 1"):
            Version(StoredVersion(store._repository, replace(row, pack="0" * 40 + ".zip"))).state_dict()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("seconds", [0, 0.05, 0.2])
def test_a_failing_program_reports_its_error_alone(directory: Path, seconds: float) -> None:
    program = """
import sys, time
import numpy as np
import ckstore
weights = np.random.default_rng(0).standard_normal((2, 500, 600), np.float32)
store = ckstore.open(sys.argv[1])
for step in range(4):
    store.ingest({"w": weights[0] + step * weights[1]}, run="r", step=step, hot=1)
time.sleep(float(sys.argv[2]))
raise LookupError("the loop is broken")
"""
    with ckstore.init(directory / "store") as store:
        command = [sys.executable, "-c", program, str(store.place), str(seconds)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    with ckstore.open(directory / "store") as store:
        assert [row.step for row in store._catalog.versions()] == [0, 1, 2, 3]
        assert store.verify().problems == []
        store.encode()
        assert store.verify().problems == []


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_forked_child_encodes_with_a_store_of_its_own(directory: Path) -> None:
    """The parent's thread and its locks do not exist in the child."""
    with ckstore.init(directory / "store") as store:
        for step in range(2):
            store.ingest(state(step), run="a", step=step, hot=1)
        encoder = settled(store)._taking()._encoder
        assert encoder is not None
        assert encoder._opened is not None
        upcoming = state(2)  # Torch's own threads are the parent's.

        def work() -> None:
            store.ingest(upcoming, run="a", step=2, hot=1)
            while store["a@1"].hot:
                time.sleep(0.05)
            store.close()

        with held(encoder._opened.reader._lock):
            assert in_child(work) == 0
        assert [row.hot for row in store._catalog.versions()] == [False, False, True]
        assert store.verify().problems == []


def test_a_raw_pack_that_another_encoding_removes_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        for run in ("a", "b"):
            other.ingest(state(len(run)), run=run, step=1, hot=1)
        names = raw_packs(store)
        other.encode(run="a")
        monkeypatch.setattr(store._repository.catalog, "former_raw_packs", lambda number: names)
        assert store.encode(run="b").versions == [2]
        assert raw_packs(store) == []
        assert store.verify().problems == []


def test_an_ingest_refers_to_nothing_that_is_encoded_just_now(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncommitted bytes of an encoding are invisible to other processes."""
    with ckstore.init(directory / "store") as store:
        for step in range(2):
            store.ingest(state(step), run="a", hot=9)
        encoder = BackgroundEncoder(store._repository)
        finish = Change.finish

        def ingest_first(self: Change, *args: Any, **options: Any) -> None:
            if options.get("again") and len(store._catalog.versions()) == 2:
                store.ingest(state(2), run="a", hot=9)
            finish(self, *args, **options)

        monkeypatch.setattr(Change, "finish", ingest_first)
        encoder.begin("a", 1)
        while (thread := encoder._thread) is not None:
            thread.join(0.1)
        encoder.close()
        assert [row.hot for row in store._catalog.versions()] == [False, False, True]
        assert store.verify().problems == []


@pytest.mark.local
def test_a_version_that_is_saved_while_another_thread_looks_stays_hot(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest versions and the hot ones are read by two queries."""
    store.ingest(state(0), run="r", step=0, hot=9)
    catalog = store._catalog
    read = type(catalog._connection).rows
    reader = threading.get_ident()

    def rows(connection: Any, query: str, *rest: Any, **named: Any) -> Any:
        found = read(connection, query, *rest, **named)
        if threading.get_ident() == reader and ("LIMIT" in query or "v.hot" in query):
            monkeypatch.undo()
            store.ingest(state(1), run="r", step=1, hot=9)
        return found

    monkeypatch.setattr(type(catalog._connection), "rows", rows)
    assert catalog.hot_sizes("r", 9) == {}
    assert [row.hot for row in catalog.versions()] == [True, True]
