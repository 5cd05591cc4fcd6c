"""Gc frees bytes that no version needs, and no others: after removals, kills, damage and concurrent changes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from msgspec import UNSET, structs

import ckstore
from ckstore.commit.in_full import store_in_full
from ckstore.errors import CkstoreError, DiskFullError, IntegrityError, LockedError, UsageError
from ckstore.gc import collect as module
from ckstore.gc import plan as garbage
from ckstore.gc import reachability
from ckstore.gc.collect import GcReport
from ckstore.gc.repack import repack
from ckstore.objects.identity import array_name
from ckstore.objects.records import Linear
from ckstore.recovery.recover import recover
from ckstore.storage import durable, root
from ckstore.storage.pack import PackWriter
from tests.catalog_edits import sign, without_triggers
from tests.checkpoints import change_pack, draw, listing, pack_bytes, packs_of, present_packs, scratch, settled, sha256
from tests.format_reader import Reader

pytestmark = pytest.mark.prompt

REPOSITORY = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
STEPS = 9


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture(scope="session")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one run: a moving weight and its moment, a half-precision copy, a constant tensor."""
    directory = tmp_path_factory.mktemp("series")
    generator = torch.Generator().manual_seed(0)
    weight, still = torch.randn(300, 300, generator=generator), torch.randn(280, 256, generator=generator)
    found = []
    for step in range(STEPS):
        found.append(directory / f"step{step}.pt")
        moment = torch.randn(300, 300, generator=generator) * 1e-3
        state = {"w": weight, "exp_avg": moment, "half": weight.bfloat16(), "still": still, "b": weight[0].clone()}
        torch.save({"model": state, "step": step}, found[-1])
        weight = weight + moment
    return found


@pytest.fixture(scope="session")
def filled(series: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of six versions of run a, and one of run b that was forked off a@2."""
    path = tmp_path_factory.mktemp("filled") / "store"
    with ckstore.init(path) as opened:
        for checkpoint in series[:6]:
            opened.ingest(checkpoint, run="a")
        opened.ingest(series[6], run="b", parent="a@2")
        settled(opened)
    return path


@pytest.fixture
def path(filled: Path, directory: Path) -> Path:
    return Path(shutil.copytree(filled, directory / "store"))


@pytest.fixture
def store(path: Path) -> Iterator[ckstore.Store]:
    with ckstore.open(path) as opened:
        yield opened


def check(path: Path, series: list[Path], names: list[str]) -> None:
    """Check that a process with an empty cache finds these versions, and that all of them come back."""
    with ckstore.open(path, "r") as store:
        rows = store._catalog.versions()
        assert sorted(f"{row.run}@{row.step}" for row in rows) == sorted(names)
        assert store.verify().problems == []
        for row in rows:
            store[row.number].checkout(path.parent / "out", force=True)
            assert sha256(path.parent / "out") == sha256(series[row.step or 0])
    if not path.is_dir():
        return
    reader = Reader(path)
    for row in rows:
        [(_, data)] = reader.files(row.number)
        assert data == series[row.step or 0].read_bytes()


def stored(store: ckstore.Store) -> dict[str, bytes]:
    """Return the bytes of every object of the present versions, by id."""
    identities = {
        identity for row in store._catalog.versions() for identity in store[row.number]._stored.document.objects
    }
    records = map(store._repository.resolver.record, identities)
    return {record.id: store._repository.packs.pread(record.pack, *record.at) for record in records}


def test_a_grace_is_no_negative_time(store: ckstore.Store) -> None:
    store.forget("b@6")
    for dry_run in (False, True):
        with pytest.raises(UsageError, match="`grace` must be 0 or more seconds, not -5"):
            store.gc(grace=-5, dry_run=dry_run)
    assert [row.step for row in store.undo().versions] == [6]


# Freed bytes


def test_needed_bytes_are_not_freed(store: ckstore.Store) -> None:
    """In a bucket, raw packs of encoded versions are freed: without a grace they need not wait for readers."""
    before = listing(store.place)
    left = {name: before.pop(name) for name in set(before) if name.removeprefix("packs/") in store._catalog.gone()}
    for dry_run in (True, False):
        assert store.gc(grace=0, dry_run=dry_run) == GcReport(sum(left.values()), files=len(left))
    assert listing(store.place) == before


@pytest.mark.local
def test_a_clean_store_is_not_read_again(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a change may have left garbage, or an unknown file appears, a collection reads no manifest."""
    planned = []
    plan_for = module.plan_for

    def counted(*arguments: Any, **options: Any) -> Any:
        planned.append(arguments)
        return plan_for(*arguments, **options)

    def plans() -> int:
        settled(store)
        planned.clear()
        assert store.gc(dry_run=True) == store.gc() == GcReport()
        return len(planned)

    monkeypatch.setattr(module, "plan_for", counted)
    assert plans() == 0
    store.tag("1", "first")
    store.ingest({"w": torch.ones(300, 300)}, run="b", step=0, hot=1)
    store.encode(["b@0"])
    assert plans() == 0
    store.ingest({"w": torch.zeros(300, 300)}, run="b", step=1, hot=1)
    assert plans() == 0
    stray = Path(store.path) / "packs" / f"{'0' * 40}.zip"
    stray.write_bytes(b"unknown")
    with pytest.raises(IntegrityError, match="not in the catalog"):
        store.gc()
    stray.unlink()
    assert plans() == 0
    with ckstore.open(store.path) as other:
        other.forget(["b@0"])
    assert store.gc(grace=0).removed > 0
    assert plans() == 0
    recover(store.path)
    assert plans() == 2
    assert plans() == 0


@pytest.mark.parametrize("error", [DiskFullError, IntegrityError, None])
def test_a_gc_that_cannot_store_in_full_frees_the_rest(
    path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    """The disk is full, an object is damaged, or objects take more than predicted."""

    def failing(repository: Any, identities: Any, versions: Any, most: int) -> int:
        if error is not None:
            raise error("no")
        files = listing(path)
        assert store_in_full(repository, identities, versions, 1) == 0
        assert listing(path) == files
        return 0

    with ckstore.open(path) as store:
        monkeypatch.setattr(module, "store_in_full", failing)
        store.forget(["a@0..a@2"])
        assert store.gc(dry_run=True).in_full > 0
        before = pack_bytes(path)
        report = store.gc(grace=0)
        assert before - pack_bytes(path) == report.bytes > 0
        assert report.in_full == 0
    check(path, series, ["a@3", "a@4", "a@5", "b@6"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("forgotten", "left"),
    [
        (["a@0"], ["a@1", "a@2", "a@3", "a@4", "a@5", "b@6"]),
        (["a@0..a@2"], ["a@3", "a@4", "a@5", "b@6"]),
        (["a@1", "a@3", "a@5"], ["a@0", "a@2", "a@4", "b@6"]),
        (["a@0..a@5"], ["b@6"]),
        (["b"], ["a@0", "a@1", "a@2", "a@3", "a@4", "a@5"]),
        (["a@0..a@5", "b"], []),
    ],
)
def test_forgotten_versions(path: Path, series: list[Path], forgotten: list[str], left: list[str]) -> None:
    with ckstore.open(path) as store:
        store.forget(forgotten)
        kept, before = stored(store), pack_bytes(path)
        expected = store.gc(dry_run=True)
        assert pack_bytes(path) == before
        report = store.gc(grace=0)
        assert before - pack_bytes(path) == report.bytes > 0
        assert abs(expected.bytes - report.bytes) < 3000 * (1 + report.rewritten)
        assert (expected.removed, expected.rewritten, expected.versions) == (
            report.removed, report.rewritten, report.versions,
        )  # fmt: skip
        again = {identity for identity, data in stored(store).items() if kept[identity] != data}
        assert len(again) == report.in_full == expected.in_full, "the others are the same, byte for byte"
        assert pack_bytes(path) <= sum(row.original_bytes for row in store._catalog.versions())
        assert store.gc(grace=0) == GcReport()
        rows = settled(store)._catalog.versions()
        if not left:
            assert store._repository.packs.list_packs() == store._catalog.packs() == []
    check(path, series, left)
    for lost in (False, True):
        if lost:
            (store.path / "catalog.sqlite").unlink()
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert store._catalog.versions() == rows
            assert store.gc(grace=0) == GcReport()
    check(path, series, left)


def test_superseded_layers_are_freed(path: Path, series: list[Path]) -> None:
    with ckstore.open(path) as store:
        store.rebase(run="a")
        kept = stored(store)
        superseded = store.stats(ledger=True)["ledger"]["superseded"]
        assert superseded > 0.1 * sum(present_packs(store).values())
        report = store.gc()
        assert report.bytes > 0.9 * superseded
        assert store.stats(ledger=True)["ledger"]["superseded"] < 0.02 * sum(present_packs(store).values())
        assert stored(store) == kept
        rows = settled(store)._catalog.versions()
        assert recover(path).problems == []
        assert store._catalog.versions() == rows
    check(path, series, ["a@0", "a@1", "a@2", "a@3", "a@4", "a@5", "b@6"])


def test_a_run_of_forgetting_and_ingesting(path: Path, series: list[Path]) -> None:
    """Packs are rewritten repeatedly; references to their first names are still found."""
    with ckstore.open(path) as store:
        for first in range(5):
            store.forget([f"a@{first}"])
            store.gc()
            check(path, series, [f"a@{step}" for step in range(first + 1, 6)] + ["b@6"])
        assert store.ingest(series[6], run="a").version.parent == 6
        assert not store.ingest(series[5], run="a").is_new
        names = {pack.name for pack in store._catalog.packs()}
        assert store["a@5"]._stored.document.blob_packs() <= names
        written = store._repository.resolver.manifest(store["a@6"]._stored.row.pack).document.described()
        assert written is not None
        assert written.blob_packs() <= names
        rows = settled(store)._catalog.versions()
    (store.path / "catalog.sqlite").unlink()
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert store._catalog.versions() == rows
        store.ingest(series[7], run="a")
    check(path, series, ["a@5", "a@6", "a@7", "b@6"])


def test_a_pack_with_little_garbage_is_left_alone(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.forget(["a@0..a@2"])
    monkeypatch.setattr(garbage, "GARBAGE_SHARE", 2.0)
    assert store.gc(dry_run=True).rewritten == 0
    monkeypatch.setattr(garbage, "GARBAGE_BYTES", 100)
    assert store.gc(dry_run=True).rewritten > 0
    monkeypatch.undo()
    assert store.gc(dry_run=True).rewritten > 0
    monkeypatch.setattr(garbage, "GARBAGE_SHARE", 2.0)
    before = store._catalog.objects()
    store.gc()
    after = store._catalog.objects()
    assert after < before, "no ingest may rely on garbage"
    assert store.verify().problems == []
    # The remaining files can be found again, and are garbage again.
    assert recover(store.place).problems == []
    store.gc()
    assert store._catalog.objects() == after


def test_a_pack_that_was_written_again_is_a_zarr_hierarchy(store: ckstore.Store) -> None:
    store.forget(["a@0..a@2"])
    before = {pack.name for pack in store._catalog.packs()}
    store.gc()
    written = [pack.name for pack in store._catalog.packs() if pack.name not in before]
    assert any(store._repository.resolver.manifest(name).document.stands_for for name in written)
    for name in written:
        document = store._repository.resolver.manifest(name).document
        assert set(document.stands_for) <= before
        with zarr.storage.ZipStore(store.path / "packs" / name, mode="r") as zipped:
            group = zarr.open_group(zipped, mode="r")
            arrays = {array_name(record.id): record for record in document.records}
            assert set(group.array_keys()) <= set(arrays)
            for array, record in [(name, arrays[name]) for name in group.array_keys()]:
                assert group[array][:].size == record.count


@pytest.mark.encoded
def test_the_origin_of_a_coarse_run_is_kept_for_its_next_version(path: Path) -> None:
    with ckstore.open(path) as store:
        for step in range(4):
            weight = draw(300, 256, seed=90) + draw(300, 256, seed=91, scale=1e-2) * step
            store.ingest({"w": weight}, run="c", step=step, policy="coarse")
        store.rebase(["c@3"])
        store.forget(["c@0..c@2"])
        store.gc(grace=0)
        assert store["c@3"].depth == 0
        records = map(store._repository.resolver.record, store["c@3"]._stored.document.objects)
        origins = [record.origin for record in records if isinstance(record, Linear) and record.origin is not None]
        assert origins
        assert all(store._repository.resolver.find(origin) is not None for origin in origins)


@pytest.mark.encoded
def test_versions_that_were_replaced(path: Path, series: list[Path]) -> None:
    """No pack names the replaced version once its own is gone: the log knows each version's parent."""
    with ckstore.open(path) as store:
        store.ingest(series[7], run="a", step=3, replace=True)
        store.rebase(["a@4", "a@5"])
        assert store["a@4"].parent == 3
        store.gc()
        store.forget(["a@3"])
        store.gc()
        rows = settled(store)._catalog.versions()
        assert store["a@4"]._stored.row.pack in packs_of(path)
    (store.path / "catalog.sqlite").unlink()
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert store._catalog.versions() == rows
    check(path, series, ["a@0", "a@1", "a@2", "a@4", "a@5", "b@6"])


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_replaced_version_whose_successor_is_gone_stays_away(
    path: Path, series: list[Path], rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own manifest may be there for long, and no other one says that it was replaced."""
    if not rewritten:
        monkeypatch.setattr(garbage, "GARBAGE_SHARE", 2.0)
        monkeypatch.setattr(garbage, "GARBAGE_BYTES", 1 << 40)
    with ckstore.open(path) as store:
        replaced = store["a@0"]._stored.row.pack
        successor = store.ingest(series[7], run="a", step=0, replace=True).version.pack
        store.forget(["a@0"])
        store.gc(grace=0)
        assert successor not in packs_of(path)
        assert (replaced in packs_of(path)) != rewritten
        rows = settled(store)._catalog.versions()
        assert not any(row.step == 0 for row in rows)
    (store.path / "catalog.sqlite").unlink()
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert store._catalog.versions() == rows


def test_a_store_that_is_read_only(store: ckstore.Store) -> None:
    store.forget(["a@0"])
    with ckstore.open(store.place, "r") as reader:
        assert reader.gc(dry_run=True).bytes > 0
        with pytest.raises(UsageError, match="reading only"):
            reader.gc()


# Files that nothing refers to


def age(file: Path, seconds: float = 7200) -> None:
    os.utime(file, (time.time() - seconds,) * 2)


@pytest.mark.local
def test_packs_and_temporaries_of_killed_processes(store: ckstore.Store, series: list[Path]) -> None:
    kept = set(store._repository.packs.list_packs())
    abandoned(store.path, series[7])
    packs = [store.path / "packs" / info.name for info in store._repository.packs.list_packs() if info not in kept]
    assert len(packs) == 2
    temporary = store.path / "packs" / ".tmp-999999999-00"
    temporary.write_bytes(b"half")
    (store.path / ".tmp-999999999-01").mkdir()
    assert store.gc() == GcReport(), "they may belong to a process on another host"
    for file in (packs[0], temporary):
        age(file)
    assert store.gc(dry_run=True) == GcReport(4, files=1), "the packs of a commit go together"
    assert store.gc() == GcReport(4, files=1)
    age(packs[1])
    freed = sum(pack.stat().st_size for pack in packs)
    assert store.gc(dry_run=True) == GcReport(freed, files=2)
    assert store.gc() == GcReport(freed, files=2)
    assert store.gc(grace=0).files == 1
    assert set(store._repository.packs.list_packs()) == kept
    assert not list(store.path.glob("**/.tmp-*"))
    assert recover(store.place).problems == []


def abandoned(path: Path, checkpoint: Path) -> None:
    """Ingest a checkpoint into run a in a process that is killed between its packs and its commit."""
    script = (
        "import os, sys, ckstore\n"
        "from ckstore.storage.catalog import Catalog\n"
        "Catalog.commit_version = lambda *given, **named: os._exit(9)\n"
        "with ckstore.open(sys.argv[1]) as store: store.ingest(sys.argv[2], run='a')\n"
    )
    command = [sys.executable, "-c", script, str(path), str(checkpoint)]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 9


@pytest.mark.local
def test_an_interrupted_version_can_come_back_until_it_is_removed(path: Path, series: list[Path]) -> None:
    """Its objects stay for as long as `recover` can bring it back."""
    abandoned(path, series[7])
    with ckstore.open(path) as store:
        store.forget(run="a")
        store.gc()
    check(path, series, ["b@6"])
    assert recover(path).problems == []
    check(path, series, ["a@7", "b@6"])
    abandoned(path, series[8])
    with ckstore.open(path) as store:
        store.forget(run="a")
        store.gc(grace=0)
    assert recover(path).problems == []
    check(path, series, ["b@6"])


# Damage


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def refused(store: ckstore.Store, match: str) -> None:
    """Check that nothing is changed, and that the sentence gives the remedy."""
    before, rows, packs = listing(store.place), store._catalog.versions(), store._catalog.packs()
    with pytest.raises(IntegrityError, match=match) as raised:
        store.gc(grace=0)
    assert "\n" not in str(raised.value)
    assert (listing(store.place), store._catalog.versions(), store._catalog.packs()) == (before, rows, packs)


def test_a_damaged_pack_is_not_written_again(path: Path, series: list[Path]) -> None:
    with ckstore.open(path) as store:
        store.forget(["a@0..a@4"])
        rewritten = next(pack for pack in garbage.plan_for(store._repository, 0).rewritten if pack.kind == "encoded")
        whole = change_pack(path, rewritten.name, None)
        change_pack(path, rewritten.name, whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(store, f"{rewritten.name} does not match its name")
        change_pack(path, rewritten.name, whole)
        assert store.gc().rewritten > 0
    check(path, series, ["a@5", "b@6"])


def test_a_lost_pack(store: ckstore.Store) -> None:
    store.forget(["a@3"])
    pack = next(pack for pack in store._catalog.packs() if pack.kind == "encoded")
    change_pack(store.place, pack.name, None)
    refused(store, f"Pack {pack.name} is missing")


@pytest.mark.local
def test_a_version_that_is_not_whole(path: Path) -> None:
    """Its remains may serve a repair; nothing is freed until it is healed or forgotten."""
    with ckstore.open(path) as store:
        pack = store["a@0"]._stored.row.pack
    (path / "packs" / pack).rename(path / "away")
    assert recover(path).problems
    with ckstore.open(path) as store:
        refused(store, r"Version \d+ has lost .* forget the version")
        store.forget([row.number for row in store._catalog.versions() if row.run == "a"])
        refused(store, "Version 7 has lost")
        store.forget(["b"])
        store.gc(grace=0)
        assert store._catalog.packs() == []


@pytest.mark.local
def test_a_damaged_pack_that_recover_left_alone(path: Path) -> None:
    """It may be repaired; as long as it exists, nothing is freed that belongs to it."""
    with ckstore.open(path) as store:
        pack = path / "packs" / store["b@6"]._stored.row.pack
    damage(pack)
    assert recover(path).problems
    with ckstore.open(path) as store:
        refused(store, f"Pack {pack.name} is damaged .* delete the file")
        pack.unlink()
        assert store.gc().removed == 1


@pytest.mark.local
def test_a_catalog_that_has_the_pack_of_a_version_but_not_the_version(path: Path) -> None:
    """Its checksums are right: a program has written it."""
    with without_triggers(path / "catalog.sqlite") as database:
        database.execute("DELETE FROM versions WHERE number = 7")
        sign(database)
    with ckstore.open(path) as store:
        assert store.gc(grace=0) == GcReport()
        store.forget(["a@0"])
        with pytest.raises(IntegrityError, match="Version 7 has a pack, but no row in the catalog, and was not forgot"):
            garbage.plan_for(store._repository, 0, whole=True)
    recover(path)
    with ckstore.open(path) as store:
        assert store["b@6"].number == 7


@pytest.mark.local
def test_a_catalog_that_is_older_than_the_packs(path: Path, series: list[Path], directory: Path) -> None:
    """One that was put back from a copy does not know the versions since: they are no garbage."""
    with ckstore.open(path) as store:
        store.encode()
    shutil.copy(path / "catalog.sqlite", directory / "old.sqlite")
    with ckstore.open(path) as store:
        store.ingest(series[6], run="a")
    shutil.copy(directory / "old.sqlite", path / "catalog.sqlite")
    for file in (path / "packs").iterdir():
        age(file)
    with ckstore.open(path) as store:
        refused(store, "The catalog is older than pack ")
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert store.gc() == GcReport()
    check(path, series, ["a@0", "a@1", "a@2", "a@3", "a@4", "a@5", "a@6", "b@6"])


@pytest.mark.local
def test_a_catalog_that_is_older_than_the_packs_and_goes_on(path: Path, series: list[Path], directory: Path) -> None:
    """Its next versions have the numbers of lost ones, not later ones, which would hide that versions are lost."""
    with ckstore.open(path) as store:
        store.encode()
    shutil.copy(path / "catalog.sqlite", directory / "old.sqlite")
    with ckstore.open(path) as store:
        for name in ("c", "d", "e"):
            store.ingest(series[6], run=name)
        store._catalog.release_number(store._catalog.reserve_number())
    shutil.copy(directory / "old.sqlite", path / "catalog.sqlite")
    for file in (path / "packs").iterdir():
        age(file)
    with ckstore.open(path) as store:
        store.ingest(series[5], run="f", hot=0)
        refused(store, "The catalog is older than pack ")
    with suppress(CkstoreError):
        recover(path)
    with ckstore.open(path) as store:
        assert {"c@6", "d@6", "e@6", "f@5"} <= {f"{row.run}@{row.step}" for row in store._catalog.versions()}


# Crashes


@pytest.mark.local
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_killed_ingest_whose_reservation_a_power_cut_took(path: Path, series: list[Path], goes_on: bool) -> None:
    abandoned(path, series[7])
    for file in (path / "packs").iterdir():
        age(file)
    (path / root.CLAIMS).unlink()
    with ckstore.open(path) as store:
        refused(store, "The catalog is older than pack ")
        if goes_on:
            store.ingest(series[8], run="c")
            assert store.gc().files == 2
    if not goes_on:
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            store["a@7"].checkout(path.parent / "out.pt")
            assert (path.parent / "out.pt").read_bytes() == series[7].read_bytes()


def gc_killed(store: Path, wanted: int) -> int:
    """Run gc in a forked process, which is killed at step `wanted`; return its exit code."""
    child = os.fork()
    if not child:
        try:
            steps = count(1)
            durable.checkpoint = lambda name: os.kill(os.getpid(), signal.SIGKILL) if next(steps) == wanted else None
            with ckstore.open(store) as opened:
                opened.gc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.long
@pytest.mark.local
def test_a_gc_that_is_killed(path: Path, series: list[Path], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is whole at once, after a recovery from the remains, and after the next gc, which finishes."""
    with ckstore.open(path) as store:
        store.forget(["a@0..a@2", "a@4"])
    whole = Path(shutil.copytree(path, directory / "whole" / "store"))
    seen: list[str] = []
    with ckstore.open(whole) as store, monkeypatch.context() as patch:
        patch.setattr(durable, "checkpoint", seen.append)
        report = store.gc()
        assert report.rewritten
        assert report.removed > 1
        finished, rows = pack_bytes(whole), store._catalog.versions()
    check(whole, series, ["a@3", "a@5", "b@6"])
    # Each step when it comes first, when it comes again, and when it comes last.
    places = [[place for place, name in enumerate(seen, 1) if name == step] for step in dict.fromkeys(seen)]
    for wanted in sorted({place for found in places for place in (*found[:2], found[-1])}):
        killed = Path(shutil.copytree(path, directory / f"killed{wanted}" / "store"))
        assert gc_killed(killed, wanted) == KILLED
        recovered = Path(shutil.copytree(killed, directory / f"recovered{wanted}" / "store"))
        if wanted % 2:
            (recovered / "catalog.sqlite").unlink()
        assert recover(recovered).problems == []
        for copy in (killed, recovered):
            with ckstore.open(copy) as store:
                assert store.verify().problems == []
                store.gc()
                assert store._catalog.versions() == rows
                left = pack_bytes(copy) - temporaries(copy)
                # A recovery takes in both a pack and its copy: blobs may lie in the one, layers in the other.
                # The time of a pack that is encoded again compresses to a byte more or less.
                most = 16 if copy is killed else 0.01 * finished
                assert abs(left - finished) < most, seen[wanted - 1]
                assert store.verify().problems == []
        shutil.rmtree(killed.parent)
        shutil.rmtree(recovered.parent)


def temporaries(path: Path) -> int:
    return sum(durable.size_of(file) for file in (path / "packs").glob(".tmp-*"))


# Others at the same time


def interposed(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], after: str = "repack") -> None:
    """Call `action` once, after a pack was copied or garbage was marked, and before the commit."""
    original = getattr(module, after)
    done: list[bool] = []

    def call(*arguments: Any) -> Any:
        result = original(*arguments)
        if not done:
            done.append(True)
            action()
        return result

    monkeypatch.setattr(module, after, call)


def test_an_ingest_that_ends_while_packs_are_copied(
    path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refers to content of a forgotten version, which is garbage by an earlier plan."""

    def ingest() -> None:
        with ckstore.open(path) as other:
            other.ingest(series[1], run="c")
            other.forget(["a@3"])

    with ckstore.open(path) as store:
        store.forget(["a@0..a@2"])
        interposed(monkeypatch, ingest)
        report = store.gc(grace=0)
        assert report.rewritten
    check(path, series, ["a@4", "a@5", "b@6", "c@1"])
    assert recover(path).problems == []
    check(path, series, ["a@4", "a@5", "b@6", "c@1"])


def test_gc_waits_for_a_running_ingest(path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The change waits for it: it relies on content of a forgotten version."""
    waited: list[bool] = []
    process: list[subprocess.Popen[bytes]] = []
    script = (
        "import sys, ckstore\n"
        "from ckstore.commit.change import Change\n"
        "commit = Change.commit_version\n"
        "def waiting(*given, **named):\n"
        "    print('coded', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    return commit(*given, **named)\n"
        "Change.commit_version = waiting\n"
        "with ckstore.open(sys.argv[1]) as store: store.ingest(sys.argv[2], run='c', parent=2)\n"
    )

    def begin() -> None:
        command = [sys.executable, "-c", script, str(path), str(series[3])]
        started = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert started.stdout is not None
        assert started.stdout.readline() == b"coded\n"
        process.append(started)

    def pause(seconds: float) -> None:
        waited.append(True)
        if len(waited) == 3:
            process[0].communicate(b"go\n", timeout=60)

    with ckstore.open(path) as store:
        store.forget(["a@2..a@5", "b"])
        interposed(monkeypatch, begin, "plan_for")
        monkeypatch.setattr(module.time, "sleep", pause)
        store.gc(grace=0)
    assert len(waited) >= 3
    assert process[0].returncode == 0
    check(path, series, ["a@0", "a@1", "c@3"])


def test_a_plan_outlives_a_writer_that_needs_nothing_of_it(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a large store may take longer than the pauses of a training: it is made once."""
    store.forget(["a@0"])
    plans, leases = [], ExitStack()
    other = leases.enter_context(ckstore.open(store.place))
    plan_for = module.plan_for

    def planned(*arguments: Any) -> Any:
        plans.append(plan_for(*arguments))
        if len(plans) == 1:  # It begins after the plan, and ends after the first attempt to commit.
            leases.enter_context(other._catalog.lease("ingest 99"))
        return plans[-1]

    monkeypatch.setattr(module, "plan_for", planned)
    monkeypatch.setattr(reachability, "to_store_in_full", lambda *_: set())
    monkeypatch.setattr(module.time, "sleep", lambda seconds: leases.close())
    assert store.gc(grace=0).bytes > 0
    assert len(plans) == 1


@pytest.mark.long
def test_a_process_that_ingests_all_the_time(path: Path, series: list[Path], directory: Path) -> None:
    """Neither process is refused, whichever is first; everything comes back."""
    script = (
        "import sys, ckstore\n"
        "with ckstore.open(sys.argv[1]) as store:\n"
        "    print('go', flush=True)\n"
        "    for number in range(12):\n"
        "        for path in sys.argv[2:]: store.ingest(path, run='c')\n"
        "        store.forget(run='c')\n"
        "    for path in sys.argv[2:]: store.ingest(path, run='c')\n"
    )
    command = [sys.executable, "-c", script, str(path), *map(str, series[:3])]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        with ckstore.open(path) as store:
            store.forget(["a@0..a@4"])
            while process.poll() is None:
                store.gc(grace=0)
        assert process.returncode == 0
    check(path, series, ["a@5", "b@6", "c@0", "c@1", "c@2"])
    with ckstore.open(path) as store:
        store.gc(grace=0)
    assert recover(path).problems == []
    check(path, series, ["a@5", "b@6", "c@0", "c@1", "c@2"])


def test_two_collections_take_turns(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.forget(["a@0"])
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with store._catalog.lease("gc"), pytest.raises(LockedError, match="now: gc"):
        store.gc()
    with ExitStack() as late:
        interposed(monkeypatch, lambda: late.enter_context(store._catalog.lease("gc")) and None, "plan_for")
        assert store.gc().bytes > 0
        assert len(store._catalog.leases()) == 1


def test_a_writer_that_does_not_end(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.forget(["a@0..a@3"])
    monkeypatch.setattr(reachability, "to_store_in_full", lambda *_: set())
    before = listing(store.place)
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    interposed(monkeypatch, lambda: leases.append(lease.__enter__()))
    leases: list[int] = []
    lease = store._catalog.lease("ingest 9")
    with pytest.raises(LockedError, match="now: ingest 9"):
        store.gc()
    found = listing(store.place)
    assert found.items() >= before.items()
    assert isinstance(store.place, str) or found == before  # In a bucket copies that were put stay until the next `gc`.
    lease.__exit__(None, None, None)
    assert store.gc().bytes > 0
    store.gc(grace=0)
    assert set(packs_of(store.place)) == {pack.name for pack in store._catalog.packs()}


@pytest.mark.local
def test_a_recovery_while_packs_are_copied(path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(path) as store:
        store.forget(["a@0..a@2"])
        interposed(monkeypatch, lambda: recover(path) and None)
        assert store.gc().bytes > 0
        rows = settled(store)._catalog.versions()
        assert recover(path).problems == []
        assert store._catalog.versions() == rows
    check(path, series, ["a@3", "a@4", "a@5", "b@6"])


def test_a_store_that_was_open_before(path: Path, series: list[Path]) -> None:
    """A process goes on whose remembered records have moved or are gone."""
    with ckstore.open(path) as store, ckstore.open(path, "r") as reader:
        version = reader["a@5"]
        tensor = version["model/w"]
        history = reader.run("a")
        assert tensor[:2].shape == (2, 300)
        for step in range(6):
            store[f"a@{step}"].checkout(path.parent / "out", force=True)
        with ckstore.open(path) as other:
            other.forget(["a@0..a@4"])
            assert other.gc(grace=0).rewritten > 0
        reader._repository.reader.cache.clear()
        expected = torch.load(series[5])["model"]["w"]
        assert torch.equal(tensor.torch(), expected)
        version.checkout(path.parent / "out", force=True)
        assert sha256(path.parent / "out") == sha256(series[5])
        assert len(history.versions) == 6
        # Content of a forgotten version, which this process still remembers, at the first attempt.
        store.ingest(series[2], run="c", step=2)
        store.ingest(series[6], run="a")
    check(path, series, ["a@5", "a@6", "b@6", "c@2"])


def test_readers_while_versions_are_forgotten(path: Path, series: list[Path]) -> None:
    failures: list[BaseException] = []
    stop = False

    def read() -> None:
        try:
            with ckstore.open(path, "r", cache_bytes=0) as opened:
                while not stop:
                    opened["a@5"].checkout(path.parent / "read", force=True)
                    assert sha256(path.parent / "read") == sha256(series[5])
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=read)
    thread.start()
    try:
        with ckstore.open(path) as store:
            for step in range(5):
                store.forget([f"a@{step}"])
                store.gc(grace=0)
    finally:
        stop = True
        thread.join()
    assert failures == []


def test_the_log(store: ckstore.Store) -> None:
    uids = [store["a@0"].id, store["b"].id]
    store.forget(["a@0", "b"])
    rows = {pack.name for pack in store._catalog.packs()}
    store.gc()
    forgot, again, collected = store._catalog.log_records()[-3:]
    assert (forgot["change"], forgot["versions"], forgot["uids"]) == ("forget", [1, 7], uids)
    assert (again["change"], again["versions"]) == ("rebase", [2, 4])
    assert collected["change"] == "gc"
    assert set(collected["removed"]) == rows - {pack.name for pack in store._catalog.packs()}
    assert {*collected["written"], *again["packs"]} == {pack.name for pack in store._catalog.packs()} - rows
    assert [number for _, number, _, _ in collected["versions"]] == [1, 7]
    assert store._catalog.collected() >= collected["created"]


def test_a_lease_ends_although_its_end_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gc` in the same process would wait for it."""
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"w": draw(300, 300, seed=step)}, step=step)
        connection = settled(store)._catalog._connection
        execute = connection.execute

        def interrupted(statement: str, *arguments: Any) -> Any:
            if statement.startswith("DELETE FROM leases"):
                monkeypatch.setattr(connection, "execute", execute)
                raise KeyboardInterrupt
            return execute(statement, *arguments)

        monkeypatch.setattr(connection, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.ingest({"w": draw(300, 300, seed=7)}, step=7)
        assert store._catalog.leases() == []
        store.forget([1])
        store.gc(grace=0)
        assert store.verify().problems == []


@pytest.mark.local
def test_two_copies_of_one_pack_are_no_problem(store: ckstore.Store) -> None:
    """Copies of killed runs lie next to the next one's copy, and replace the same pack."""
    store.rebase(["a@5"])
    store.forget(["a@0..a@2"])
    packs = garbage.plan_for(store._repository, 0.0, whole=True).survey.packs.values()
    contents = next(pack for pack in packs if len(pack.slots) > 1 and not pack.wanted)
    copies = [repack(store._repository, contents).pack.name]
    contents.slots.remove(min(contents.slots))
    copies.append(repack(store._repository, contents).pack.name)
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        for present in copies:
            again._catalog.note_moved({contents.name: present})
            assert again.verify().problems == []
        other = next(pack.name for pack in again._catalog.packs() if pack.name not in (contents.name, *copies))
        again._catalog.note_moved({contents.name: other})
        assert f"replaced {contents.name}" in again.verify().problems[0]


def test_recover_takes_the_committed_one_of_several_copies(store: ckstore.Store) -> None:
    """A killed `gc`'s copy may lack objects of later versions; it lies next to the copy of the next `gc`."""
    store.forget(["a@0..a@2"])
    packs = garbage.plan_for(store._repository, 0.0).rewritten
    contents = next(pack for pack in packs if pack.kind == "encoded" and len(pack.wanted) > 1)
    needed = sorted(contents.wanted)
    store.gc()
    present = store._catalog.moved_packs([contents.name])[contents.name]
    manifest = store._repository.resolver.manifest(present)
    for lost in needed:  # each has a name of its own, before or after that of the whole one
        blobs = {name: data for name, data in manifest.blobs.items() if name != lost}
        with PackWriter(store.path, "encoded") as writer:
            document = structs.replace(manifest.document, records=[], version=UNSET)
            writer.add_manifest(document, blobs)
            writer.finish()
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        assert again._catalog.moved_packs([contents.name]) == {contents.name: present}
        assert again.verify().problems == []
        again.gc()


def test_a_rebuilt_catalog_takes_another_plan(filled: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new catalog may find objects in other packs than the one that the plan was made for."""
    shutil.copytree(filled, directory / "store")
    with ckstore.open(directory / "store") as store:
        store.forget(["a@1"])
    assert recover(directory / "store").problems == []
    plans = []

    def planned(*arguments: Any) -> garbage.GcPlan:
        plans.append(garbage.plan_for(*arguments))
        if len(plans) == 1:
            assert recover(directory / "store").problems == []  # Its rows are the same.
        return plans[-1]

    monkeypatch.setattr(module, "plan_for", planned)
    with ckstore.open(directory / "store") as store:
        store.gc(grace=0)
        assert len(plans) == 2
        assert store.verify().problems == []


@pytest.mark.parametrize("read", ["placed_objects", "packs", "versions"])
@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_plan_is_of_one_moment(path: Path, monkeypatch: pytest.MonkeyPatch, read: str, looks: int) -> None:
    """Another process stores objects elsewhere, and is done, after any of the looks at the catalog."""
    with ckstore.open(path) as store, ckstore.open(path) as other:
        catalog = store._repository.catalog
        look = getattr(catalog, read)
        for change in (lambda: other.rebase(["a@2"]), lambda: other.thin(["a@3"]), lambda: other.forget(["a@5"])):
            turns = count(1)

            def looked(*arguments: Any, turns: count[int] = turns, change: Callable[[], object] = change) -> Any:
                found = look(*arguments)
                if next(turns) == looks:
                    change()
                return found

            with monkeypatch.context() as context:
                context.setattr(catalog, read, looked)
                store.gc(grace=0)
            store.gc(grace=0)
            assert store.verify().problems == []


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("forgets", [True, False])
def test_a_pack_and_its_copy_are_both_written_again(
    series: list[Path], directory: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """A recovery takes in the uncommitted copies of a `gc`, and finds objects in either."""
    monkeypatch.setattr(garbage, "GARBAGE_SHARE", 0.0)  # So that each `gc` writes everything again.
    # Which of both names comes first, and so has the objects, depends on the time in them: mostly one try will do.
    for attempt in range(20):
        path = directory / f"store{attempt}"
        with ckstore.init(path) as store:
            for number, checkpoint in enumerate(series):
                store.ingest(checkpoint, run=f"r{number // 3}", hot=1)  # With blobs of the version before.
            store.encode()
            copies = {contents.name: repack(store._repository, contents).pack.name
                      for contents in garbage.plan_for(store._repository, 0.0, whole=True).rewritten}  # fmt: skip
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            if forgets:  # Otherwise the pack is rewritten as the existing copy.
                store.forget([f"r{run}@{3 * run}" for run in range(3)])
            going = {contents.name for contents in garbage.plan_for(store._repository, 0.0, whole=True).rewritten}
        if any({pack, copy} <= going for pack, copy in copies.items()):
            break
    else:
        pytest.fail("No pack and its copy were to be written again.")
    with ckstore.open(path) as store:
        store.gc(grace=0)
        assert store.verify().problems == []
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        assert store.verify().problems == []
        store.gc(grace=0)
    check(path, series, [f"r{step // 3}@{step}" for step in range(9) if step % 3 or not forgets])


def test_a_raw_pack_whose_objects_another_version_encoded_is_garbage(directory: Path) -> None:
    """A `gc` of a store that was clean before looks at it, though its version is still hot."""
    state = {"w": np.random.default_rng(0).standard_normal((300, 64))}
    with ckstore.init(directory / "store") as store:
        store.gc()
        store.ingest(state, run="a", step=1, hot=9)
        assert store.gc(dry_run=True) == store.gc(grace=0) == GcReport()
        store.ingest(state, run="b", step=1, hot=0)
        assert [row.hot for row in store._catalog.versions()] == [True, False]
        assert store.gc().bytes > state["w"].nbytes
        assert store.verify().problems == []
        np.testing.assert_array_equal(store["a@1"]["w"], state["w"])


def test_reports_add_up() -> None:
    report = GcReport(1, removed=2, held=3, until="1")
    report.add(GcReport(4, removed=5, kept=6))
    assert (report, report.held, report.kept, report.until) == (GcReport(5, removed=7), 3, 6, "1")
    report.add(GcReport(held=7, kept=8, until="2"))
    assert (report, report.held, report.kept, report.until) == (GcReport(5, removed=7), 7, 8, "2")
