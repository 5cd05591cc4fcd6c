"""Small packs are joined in segments: few files, in which every verb finds them."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckstore
from ckstore.checking.ledger import ledger
from ckstore.commit import join as joining
from ckstore.commit.join import join, join_due
from ckstore.errors import IntegrityError
from ckstore.storage import durable
from ckstore.storage.zip_stream import ZipStream
from tests.checkpoints import settled

pytestmark = [pytest.mark.local, pytest.mark.prompt]

COUNT = 6


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "COUNT", COUNT)


def weights(step: int) -> npt.NDArray[np.float32]:
    values = np.random.default_rng(0).standard_normal((30, 256), np.float32)
    return values + 1e-3 * np.random.default_rng(step).standard_normal((30, 256), np.float32)


def made(place: Path, versions: int, *, joined: bool = True) -> Path:
    with ckstore.init(place) as store:
        for step in range(versions):
            store.ingest({"w": weights(step)}, run="a", step=step, hot=0)
        while joined and join_due(store._repository):
            pass
    return place


def files(place: Path) -> tuple[int, int]:
    """Return the numbers of segments, and of packs in files of their own."""
    names = [path.name for path in (place / "packs").iterdir()]
    segments = sum(name.endswith(".segment.zip") for name in names)
    return segments, len(names) - segments


def segment(place: Path) -> Path:
    [found] = (place / "packs").glob("*.segment.zip")
    return found


def check(place: Path, steps: Any) -> None:
    with ckstore.open(place) as store:
        assert store.verify().problems == []
        assert [row.step for row in store._catalog.versions()] == list(steps)
        for step in steps:
            assert np.array_equal(store[f"a@{step}"]["w"][:], weights(step))
        assert sum(ledger(store._repository).values()) == sum(
            path.stat().st_size for path in place.rglob("*") if path.is_file()
        )


def test_a_long_run_has_few_files(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3 * COUNT + 2):
            store.ingest({"w": weights(step)}, run="a", step=step)
        settled(store)
        assert store._catalog.version(1).hot is False
    segments, single = files(tmp_path / "store")
    assert segments == 3
    assert single <= COUNT + 2, "of the others, and of the hot version"
    check(tmp_path / "store", range(3 * COUNT + 2))


def test_packs_in_segments_take_little_more(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT)
    with ckstore.open(place) as store:
        packs = sum(pack.bytes for pack in store._catalog.packs())
    assert segment(place).stat().st_size < packs + 170 * COUNT


def test_every_verb_finds_packs_in_segments(tmp_path: Path) -> None:
    place = made(tmp_path / "store", 2 * COUNT + 1)
    assert files(place) == (2, 1)
    check(place, range(2 * COUNT + 1))
    with ckstore.open(place) as store, ckstore.init(tmp_path / "other") as other:
        assert not store.push(other).failed
        store["a@3"].checkout(tmp_path / "out")
        store["a@2"].salvage(tmp_path / "salvaged")
        store.thin("a@1")
        store.tag("a@4", "best")
        assert store.gc() == ckstore.GcReport() or files(place)[0] == 2
    check(tmp_path / "other", range(2 * COUNT + 1))


@pytest.mark.parametrize("loses_catalog", [False, True])
def test_recover_reads_segments(loses_catalog: bool, tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT + 1)
    if loses_catalog:
        (place / "catalog.sqlite").unlink()
    report = ckstore.recover(place)
    assert (report.versions, report.packs, report.problems) == (COUNT + 1, COUNT + 1, [])
    check(place, range(COUNT + 1))


def test_a_reader_follows_packs_into_a_segment(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT, joined=False)
    with ckstore.open(place, "r") as reader, ckstore.open(place) as writer:
        slices = [reader[f"a@{step}"]["w"] for step in range(COUNT)]
        assert np.array_equal(slices[0][:], weights(0))
        assert join_due(writer._repository)
        for step in range(COUNT):
            assert np.array_equal(slices[step][:], weights(step))
        before = segment(place)
        writer.forget(["a@5"])
        writer.gc()
        assert segment(place) != before, "written again"
        reader._repository.packs.close()
        for step in range(COUNT - 1):
            assert np.array_equal(reader[f"a@{step}"]["w"][:], weights(step))


def test_gc_writes_a_segment_again_without_its_garbage(tmp_path: Path) -> None:
    place = made(tmp_path / "store", 2 * COUNT)
    size = sum(path.stat().st_size for path in (place / "packs").iterdir())
    with ckstore.open(place) as store:
        store.forget([f"a@{step}" for step in range(COUNT, 2 * COUNT)])
        report = store.gc()
        assert report.removed == COUNT
        left = sum(path.stat().st_size for path in (place / "packs").iterdir())
        assert report.bytes == size - left
        assert store.gc().bytes == 0
    assert files(place) == (1, 0)
    check(place, range(COUNT))


def test_a_removed_pack_in_a_segment_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = made(tmp_path / "store", COUNT)
    monkeypatch.setattr("ckstore.gc.collect.GARBAGE_SHARE", 1.0)
    before = segment(place)
    with ckstore.open(place) as store:
        store.forget(["a@5"])
        report = store.gc()
        assert (report.removed, report.bytes) == (1, 0)
        assert store.gc() == ckstore.GcReport()
    assert segment(place) == before
    check(place, range(COUNT - 1))
    for _ in range(2):
        (place / "catalog.sqlite").unlink()
        assert ckstore.recover(place).problems == []
        check(place, range(COUNT - 1))
    # The rebuilt catalog has the pack again, and an ingest may use its objects.
    with ckstore.open(place) as store:
        store.ingest({"w": weights(5)}, run="a", step=5, hot=0)
    (place / "catalog.sqlite").unlink()
    assert ckstore.recover(place).problems == []
    check(place, range(COUNT))


@pytest.mark.parametrize("joined", [False, True])
def test_gc_with_a_catalog_from_a_copy_deletes_no_segment(joined: bool, tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT, joined=joined)
    copy = (place / "catalog.sqlite").read_bytes()
    with ckstore.open(place) as store:
        for step in range(COUNT, 2 * COUNT):
            store.ingest({"w": weights(step)}, run="a", step=step, hot=0)
        while join_due(store._repository):
            pass
    (place / "catalog.sqlite").write_bytes(copy)
    with ckstore.open(place) as store, pytest.raises(IntegrityError):
        store.gc(grace=0)
    assert files(place) == (2, 0)
    assert ckstore.recover(place).problems == []
    check(place, range(2 * COUNT))


def test_gc_with_a_catalog_older_than_a_segment_removes_no_pack(tmp_path: Path) -> None:
    place = made(tmp_path / "store", 3, joined=False)
    copy = (place / "catalog.sqlite").read_bytes()
    with ckstore.open(place) as store:
        for step in range(3, COUNT):
            store.ingest({"w": weights(step)}, run="a", step=step, hot=0)
        assert join(store._repository, [pack.name for pack in store._catalog.packs()][3:])
    (place / "catalog.sqlite").write_bytes(copy)
    with ckstore.open(place) as store:
        store.ingest({"w": weights(99)}, run="b", hot=0)
        store.forget(["a@0", "a@1", "a@2"])
        for dry_run in (True, False):
            with pytest.raises(IntegrityError, match="lacks packs"):
                store.gc(dry_run=dry_run)
    ckstore.recover(place)
    with ckstore.open(place) as store:
        for step in range(3, COUNT):
            assert np.array_equal(store[f"a@{step}"]["w"][:], weights(step))


def test_an_open_store_notices_another_segment_in_its_place(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT)
    path = segment(place)
    good = path.read_bytes()
    with ckstore.open(place, "r") as store:
        assert np.array_equal(store["a@0"]["w"][:], weights(0))
        path.write_bytes(good[: len(good) // 2])
        with pytest.raises(IntegrityError):
            store["a@5"]["w"][:]
        path.unlink()
        path.write_bytes(good)
        assert np.array_equal(store["a@5"]["w"][:], weights(5))
        assert store.verify().problems == []


def test_recover_takes_an_intact_pack_of_two(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT)
    other = place / "packs" / f"{'f' * 40}.segment.zip"
    shutil.copy(segment(place), other)
    with ckstore.open(place) as store:
        found = store._catalog.segment_of(store._catalog.version(3).pack)
    assert found is not None
    flip(other, found.offset + 200)
    assert ckstore.recover(place).versions == COUNT
    with ckstore.open(place) as store:
        assert np.array_equal(store["a@2"]["w"][:], weights(2))


class Death(BaseException):
    pass


def die_at(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def checkpoint(reached: str) -> None:
        if reached == step:
            raise Death

    monkeypatch.setattr(durable, "checkpoint", checkpoint)


@pytest.mark.long
@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize(
    "step", ["segment-written", "segment-renamed", "before-commit", "after-commit", "pack-removed", "segment-removed"]
)
def test_a_join_that_ends(step: str, recovers: bool, tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT, joined=False)
    with ckstore.open(place) as store, pytest.MonkeyPatch.context() as patched:
        if step == "segment-removed":
            join_due(store._repository)
            store.forget(["a@5"])
        die_at(step, patched)
        with pytest.raises(Death):
            store.gc() if step == "segment-removed" else join_due(store._repository)
    if recovers:
        assert ckstore.recover(place).problems == []
    steps = range(COUNT - (step == "segment-removed"))
    check(place, steps)
    with ckstore.open(place) as store:
        store.gc(grace=0)
        join(store._repository, store._catalog.small_packs(COUNT))
    segments, single = files(place)
    assert segments <= 1 + (step == "pack-removed")
    assert single == 0
    check(place, steps)


def test_of_two_that_join_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = made(tmp_path / "store", COUNT, joined=False)
    with ckstore.open(place) as store, ckstore.open(place) as other:
        read_back: Callable[..., None] = joining._read_back

        def late(*arguments: Any) -> None:
            monkeypatch.setattr(joining, "_read_back", read_back)
            read_back(*arguments)
            assert join_due(other._repository)

        monkeypatch.setattr(joining, "_read_back", late)
        assert not join_due(store._repository)
    assert files(place) == (1, 0)
    check(place, range(COUNT))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_damaged_pack_in_a_segment_is_named_and_replaced_by_a_copy(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT, joined=False)
    shutil.copytree(place / "packs", tmp_path / "copies")
    with ckstore.open(place) as store:
        join_due(store._repository)
        pack = store._catalog.version(3).pack
        found = store._catalog.segment_of(pack)
        assert found is not None
        flip(segment(place), found.offset + 200)
        problems = store.verify().problems
        assert any(pack in problem for problem in problems)
        assert any(segment(place).name in problem for problem in problems)
        assert np.array_equal(store["a@1"]["w"][:], weights(1))
        with pytest.raises(IntegrityError):
            store["a@2"]["w"][:]
        shutil.copy(tmp_path / "copies" / pack, place / "packs" / pack)
        assert np.array_equal(store["a@2"]["w"][:], weights(2))
        store.gc()
        assert (place / "packs" / pack).exists(), "the only intact copy"
    for _ in range(2):
        with ckstore.open(place) as store:
            assert np.array_equal(store["a@2"]["w"][:], weights(2))
        ckstore.recover(place)


def test_a_damaged_directory_of_a_segment_loses_nothing(tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT)
    flip(segment(place), -30)
    with ckstore.open(place) as store:
        assert np.array_equal(store["a@2"]["w"][:], weights(2))
        [problem] = store.verify().problems
        assert segment(place).name in problem
    (place / "catalog.sqlite").unlink()
    report = ckstore.recover(place)
    assert report.versions == COUNT
    assert len(report.problems) == 1
    with ckstore.open(place) as store:
        assert np.array_equal(store["a@2"]["w"][:], weights(2))


@pytest.mark.parametrize("damage", ["cut", "empty", "directory", "header"])
def test_a_segment_of_a_hostile_store(damage: str, tmp_path: Path) -> None:
    place = made(tmp_path / "store", COUNT)
    path = segment(place)
    data = path.read_bytes()
    if damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "header":
        path.write_bytes(data.replace(b".zip", b".zap"))
    else:
        path.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    with ckstore.open(place) as store:
        assert store.verify().problems
    report = ckstore.recover(place)
    assert report.problems
    with ckstore.open(place) as store:
        for row in store._catalog.versions():
            assert np.array_equal(store[row.number]["w"][:], weights(row.step or 0))


def test_gc_frees_space_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = made(tmp_path / "store", 2 * COUNT)
    before = {path.name for path in (place / "packs").iterdir()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(ZipStream, "_put", full)
    with ckstore.open(place) as store:
        store.forget([f"a@{step}" for step in range(COUNT - 1, 2 * COUNT)])
        assert store.gc().bytes > 0
    [left] = (place / "packs").iterdir()
    assert left.name in before, "it could not be written again"
    check(place, range(COUNT - 1))
