"""Thinned versions give up their bytes and come back within their bounds; all others come back bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckstore
from ckstore.commit import costs
from ckstore.commit.change import Change
from ckstore.errors import CkstoreError, ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.objects.records import Linear, Record
from ckstore.reading.stored_version import StoredVersion
from ckstore.recovery.recover import recover
from ckstore.storage import durable
from ckstore.storage.catalog import Catalog
from ckstore.storage.pack import PackWriter
from ckstore.writing import thin as module
from ckstore.writing.thin import ThinReport
from tests.checkpoints import (
    change_pack,
    contents,
    described,
    draw,
    listing,
    lose_catalog,
    pack_bytes,
    packs_of,
    settled,
    sha256,
    write_safetensors,
)
from tests.coarse_checks import check_deviations, loaded, same_bits
from tests.format_reader import Reader

REPOSITORY = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
STEPS = 7


def state(step: int) -> dict[str, Any]:
    """Return a moving weight, a sparsely changing one, both moments, both short floats, tied and frozen weights."""
    weight, sparse = draw(280, 256), draw(300, 256, seed=50)
    for number in range(1, step + 1):
        weight = weight + draw(280, 256, seed=number, scale=1e-2)
        sparse = sparse + draw(300, 256, seed=50 + number, scale=1e-2) * (draw(300, 256, seed=number) > 1)
    model = {
        "weight": weight, "sparse": sparse, "tied": sparse, "half": weight.bfloat16(), "short": weight[:260].half(),
        "frozen": draw(260, 256, seed=99), "small": weight[:40].clone(), "norm": torch.ones(256) * (1 + step),
    }  # fmt: skip
    second = torch.exp2(draw(280, 1, seed=5) * 3 + draw(1, 256, seed=6) * 3 + draw(280, 256, seed=70 + step) - 30)
    moments = {"exp_avg": draw(280, 256, seed=80 + step, scale=1e-4), "exp_avg_sq": second}
    return {"model": model, "optimizer": {0: moments}, "step": step, "seen": torch.tensor(step)}


@pytest.fixture(scope="session")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("series")
    paths = [directory / f"step{step}.pt" for step in range(STEPS)]
    for step, path in enumerate(paths):
        torch.save(state(step), path)
    return paths


@pytest.fixture(scope="session")
def filled(series: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of six versions of run a, and one of run b that was forked off a@2."""
    return six_and_one(series, tmp_path_factory.mktemp("filled") / "store")


@pytest.fixture(scope="session")
def generous(series: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a generous budget: long chains, which cost much where objects are this small."""
    return six_and_one(series, tmp_path_factory.mktemp("generous") / "store", budget=9)


def six_and_one(series: list[Path], path: Path, budget: float | None = None) -> Path:
    with ckstore.init(path) as opened:
        for checkpoint in series[:6]:
            opened.ingest(checkpoint, run="a", max_restore_cost=budget)
        opened.ingest(series[6], run="b", parent="a@2", max_restore_cost=budget, hot=0)
        settled(opened)
    return path


@pytest.fixture(scope="session")
def short(series: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A store of three versions of run a with few tensors, and their files: for tests with many faults."""
    directory = tmp_path_factory.mktemp("short")
    paths = [directory / f"step{step}.pt" for step in range(3)]
    with ckstore.init(directory / "store") as opened:
        for step, path in enumerate(paths):
            torch.save({name: state(step)["model"][name] for name in ("sparse", "half")}, path)
            opened.ingest(path, run="a")
        settled(opened)
    return directory / "store", paths


@pytest.fixture
def path(filled: Path, directory: Path) -> Path:
    return Path(shutil.copytree(filled, directory / "store"))


@pytest.fixture
def store(path: Path) -> Iterator[ckstore.Store]:
    with ckstore.open(path) as opened:
        yield opened


@pytest.fixture
def chained(generous: Path, directory: Path) -> Iterator[ckstore.Store]:
    with ckstore.open(shutil.copytree(generous, directory / "store")) as opened:
        yield opened


def restored(path: Path, *, by_format: bool = False) -> dict[str, str]:
    """Return the SHA-256 of every version's restore, by a process with an empty cache, and by the format alone."""
    found = {}
    with ckstore.open(path, "r") as store:
        assert store.verify().problems == []
        rows = store._catalog.versions()
        for row in rows:
            store[row.number].checkout(path.parent / "out", force=True)
            found[f"{row.run}@{row.step}"] = sha256(path.parent / "out")
    reader = Reader(path) if by_format and isinstance(store.place, Path) else None  # It reads directories.
    for row in rows if reader is not None else []:
        assert reader is not None
        [(_, data)] = reader.files(row.number)
        (path.parent / "out").write_bytes(data)
        assert sha256(path.parent / "out") == found[f"{row.run}@{row.step}"]
    return found


def outlasts(path: Path, series: list[Path], thinned: set[str]) -> None:
    """Check that in any operation thinned versions come back as they did at first, others as they went in."""
    first = restored(path)
    for name, digest in first.items():
        assert (digest == sha256(series[int(name[2:])])) == (name not in thinned), name
    with ckstore.open(path) as store:
        rows = store._catalog.versions()
        said = {row.number: store[row.number].deviations() for row in rows}
        assert {f"{row.run}@{row.step}" for row in rows if row.fidelity == "coarse"} == thinned
        assert all(costs.restore_cost(store[row.number]._stored) == (row.cost, row.depth) for row in rows)
        store.gc(grace=0)
        assert [row.uid for row in store._catalog.versions()] == [row.uid for row in rows]
        rows = store._catalog.versions()
    assert restored(path) == first
    for lost in (False, True):
        if lost:
            lose_catalog(path)
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert store._catalog.versions() == rows
            assert {row.number: store[row.number].deviations() for row in rows} == said
            assert store.gc(grace=0).bytes == 0
    assert restored(path, by_format=True) == first


def objects(store: ckstore.Store, number: int) -> list[Record]:
    """Return the records of a version's objects."""
    store._repository.resolver.forget()
    return list(map(store._repository.resolver.record, store[number]._stored.document.objects))


# Removed and kept bytes


@pytest.mark.long
def test_most_of_a_versions_own_bytes_go(gpt_run: list[Path], directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        for path in gpt_run:
            store.ingest(path, run="gpt")
        store.encode()
        rows = settled(store)._catalog.versions("gpt")
        for row in (rows[-1], rows[2]):
            before = pack_bytes(store.place)
            report = store.thin([row.number])
            assert [item.version for item in report.versions] == [row]
            assert pack_bytes(store.place) - before >= report.added > 0
            gone = store.gc(grace=0).bytes
            assert report.freed <= gone <= report.freed + 200_000
            assert before - pack_bytes(store.place) >= 0.89 * row.stored_bytes
        thinned = {rows[-1].number: gpt_run[-1], rows[2].number: gpt_run[2]}
        for number, path in zip([row.number for row in rows], gpt_run, strict=True):
            store[number].checkout(directory / "out", force=True)
            assert (sha256(directory / "out") == sha256(path)) == (number not in thinned)
            if number in thinned:
                check_deviations(store[number], loaded(path), loaded(directory / "out"))
        assert store.verify().problems == []


SELECTIONS = [
    ["a@0"], ["a@3"], ["a@5", "b@6"], ["a@1", "a@2", "a@4"], ["a@2"], ["a@0..a@5", "b"],
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("chosen", SELECTIONS, ids=" ".join)
def test_others_come_back_as_they_went_in(path: Path, series: list[Path], chosen: list[str]) -> None:
    with ckstore.open(path) as store:
        before = store._catalog.versions()
        report = store.thin(chosen)
        names = {f"{item.version.run}@{item.version.step}" for item in report.versions}
        assert report.skipped == []
        expected = report.freed
        stay = ("number", "uid", "run", "step", "parent", "created", "original_bytes", "elements", "files", "source")
        for row, was in zip(store._catalog.versions(), before, strict=True):
            assert [getattr(row, name) for name in stay] == [getattr(was, name) for name in stay]
        total = pack_bytes(path)
        store.gc(grace=0)
        assert total - pack_bytes(path) >= 0.9 * expected
    outlasts(path, series, names)


@pytest.mark.parametrize("names", [["a@0"], ["a@3"], ["a@1..a@4"]], ids=" ".join)
def test_deviations_are_bounds(store: ckstore.Store, series: list[Path], directory: Path, names: list[str]) -> None:
    report = store.thin(names)
    for item in report.versions:
        version = store[item.version.number]
        version.checkout(directory / "out", force=True)
        before, after = loaded(series[version.step or 0]), loaded(directory / "out")
        check_deviations(version, before, after)
        said = version.deviations()
        assert {"model/weight", "model/half", "model/short", "model/small", "optimizer/[0]/exp_avg_sq"} <= said.keys()
        assert not {"model/norm", "seen"} & said.keys()
        assert item.max_abs == max(off.max_abs for off in said.values())
        assert item.relative == pytest.approx(max(off.relative for off in said.values()))
        assert bool((after["optimizer/[0]/exp_avg_sq"] > 0).all())
        assert same_bits(after["model/tied"], after["model/sparse"])


def test_views_hold_restored_values(store: ckstore.Store, directory: Path) -> None:
    store.thin(["a@3"])
    store["a@3"].checkout(directory / "out")
    after = loaded(directory / "out")
    arrays = store["a@3"].arrays
    for name in ("model/weight", "model/short", "optimizer/[0]/exp_avg"):
        assert np.array_equal(arrays[name][...], after[name].numpy())
        assert np.array_equal(store.run("a").arrays[name][3], after[name].numpy())
    assert same_bits(store["a@3"]["model/half"].torch(), after["model/half"])


def test_options_keep_versions_exact(path: Path, series: list[Path]) -> None:
    with ckstore.open(path) as store:
        store.tag("a@3", "best")
        report = store.thin(["a@0..a@5"], keep_every=2, keep_tagged=True)
        assert [item.version.step for item in report.versions] == [1, 5]
        report = store.thin(run="a", keep_last=2, keep_tagged=True)
        assert [item.version.step for item in report.versions] == [0, 2]
        assert report.skipped == [2]
    outlasts(path, series, {"a@0", "a@1", "a@2", "a@5"})


def test_a_tagged_version_stays_exact(path: Path, series: list[Path]) -> None:
    """The version is refused before anything is done, with the remedy that `forget` names."""
    with ckstore.open(path) as store:
        store.ingest(series[6], run="b", step=9, parent="a@5", hot=1)
        store.tag("a@3", "best")
        before, rows = listing(store.place), store._catalog.versions()
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match=r"Version 4 is tagged best.*`ckstore tag --delete best`"):
                store.thin(["a@1..a@4", "b@9"], dry_run=dry_run)
        assert (listing(store.place), store._catalog.versions()) == (before, rows)
        store.untag("best")
        assert [item.version.step for item in store.thin(["a@1..a@3"]).versions] == [1, 2, 3]
        store.tag("a@3", "best")
        assert store.thin(["a@3"]).skipped == [4]


@pytest.mark.long
def test_a_tag_that_is_set_while_the_version_is_thinned(
    path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tag() -> None:
        with ckstore.open(path) as other:
            other.tag("a@3", "best")

    interposed(monkeypatch, tag)
    with ckstore.open(path) as store, pytest.raises(ConflictError, match="is tagged best"):
        store.thin(["a@3"])
    outlasts(path, series, set())


def test_thinning_again_does_nothing(store: ckstore.Store) -> None:
    store.thin(["a@2", "a@3"])
    files, rows = listing(store.place), store._catalog.versions()
    assert store.thin(["a@2..a@3"]) == ThinReport(skipped=[3, 4])
    assert (listing(store.place), store._catalog.versions()) == (files, rows)


@pytest.mark.long
def test_one_after_the_other_is_as_good_as_at_once(path: Path, series: list[Path], directory: Path) -> None:
    """A version whose parent was thinned before, one whose child was, and one between two."""
    other = Path(shutil.copytree(path, directory / "other" / "store"))
    with ckstore.open(path) as store:
        at_once = store.thin(["a@1..a@3"])
        store.gc(grace=0)
    with ckstore.open(other) as store:
        for name in ("a@3", "a@1", "a@2"):
            store.thin([name])
            store.gc(grace=0)
    assert len(at_once.versions) == 3
    outlasts(path, series, {"a@1", "a@2", "a@3"})
    outlasts(other, series, {"a@1", "a@2", "a@3"})
    assert pack_bytes(other) < 1.1 * pack_bytes(path)


# Objects that others share, and bases


def test_children_are_stored_again_and_their_children_stay(chained: ckstore.Store) -> None:
    """Objects stored against a version that stays are left alone, though that version is stored again."""
    store = chained
    child, grandchild = store["a@4"].number, store["a@5"].number
    others = [row.number for row in store.versions() if row.number != store["a@3"].number]
    before = {number: objects(store, number) for number in others}
    assert any(record.kind == "delta" for record in before[child])
    report = store.thin(["a@3"])
    after = {number: objects(store, number) for number in others}
    pairs = [pair for number in others for pair in zip(before[number], after[number], strict=True)]
    moved = {one.id for one, other in pairs if (one.pack, one.offset) != (other.pack, other.offset)}
    assert len(moved) == report.reanchored > 0
    assert after[grandchild] == before[grandchild]


@pytest.mark.long
def test_shared_objects_stay_for_the_other_version(path: Path, series: list[Path], directory: Path) -> None:
    with ckstore.open(path) as store:
        twin = store.ingest(series[3], run="c").version
        assert twin.stored_bytes < 20_000
        report = store.thin(["a@3"])
        assert (report.freed, report.reanchored) == (0, 0)
        assert store["a@3"].fidelity == "coarse"
        store["c@3"].checkout(directory / "twin")
        assert sha256(directory / "twin") == sha256(series[3])
        assert store.gc(grace=0).bytes < 1000
        assert store.thin(["c@3"]).freed > 300_000
    outlasts(path, series, {"a@3", "c@3"})


def test_a_frozen_object_is_deleted_with_the_last_version_that_claims_it(store: ckstore.Store) -> None:
    """Given up by all others, it can be had from any that keeps it."""

    def frozen() -> Record | None:
        store._repository.resolver.forget()
        return store._repository.resolver.find(identity)

    [number] = [n for n, unit in enumerate(store["a@0"]._stored.layout.units) if unit.key.endswith("frozen")]
    identity = store["a@0"]._stored.document.objects[number]
    store.thin(["a@0..a@4", "b"])
    store.gc(grace=0)
    assert frozen() is not None
    assert "model/frozen" in store["a@2"].deviations()
    assert torch.equal(store["a@5"]["model/frozen"].torch(), state(5)["model"]["frozen"])
    store.thin(["a@5"])
    store.gc(grace=0)
    assert frozen() is None


def test_a_whole_run_keeps_its_coarse_chain(store: ckstore.Store) -> None:
    """Moments of one thinned version are stored against those of the other."""
    store.thin(run="a")
    rows = store._catalog.versions("a")
    # The rounding of a weight is stored against that.
    assert [row.depth > 1 for row in rows] == [False, True, True, True, True, True]
    assert sum(row.stored_bytes for row in rows) < sum(row.original_bytes for row in rows) / 8


def test_versions_between_exact_ones_keep_a_coarse_chain(store: ckstore.Store) -> None:
    """Objects of an exact parent are no bases of coarse ones."""
    store.thin(["a@1", "a@3", "a@5"])
    first, *others = (coarse_weights(store, step) for step in (1, 3, 5))
    assert len(first) == 6
    roundings = {path for path, record in first.items() if isinstance(record, Linear) and record.cast}
    assert roundings == {"model/half"}
    for before, after in zip([first, *others], others, strict=False):
        for path in after.keys() - roundings:
            assert before[path].id in (after[path].base, after[path].id), path


def coarse_weights(store: ckstore.Store, step: int) -> dict[str, Record]:
    """Records of the coarse weights of a version of run a, by key of their units."""
    store._repository.resolver.forget()
    version = store[f"a@{step}"]._stored
    numbers = [number for number in version.document.coarse_units if version.layout.units[number].role == "weight"]
    return {
        version.layout.units[number].key: store._repository.resolver.record(version.document.objects[number])
        for number in numbers
    }


# Life goes on


@pytest.mark.long
def test_the_same_file_makes_it_exact_again(path: Path, series: list[Path], directory: Path) -> None:
    with ckstore.open(path) as store:
        for collected in (False, True):
            store.thin(["a@3"])
            if collected:
                store.gc(grace=0)
            assert not store.ingest(series[3], run="a", policy="coarse").is_new
            store.tag("a@3", "best")
            row = store.ingest(series[3], run="a").version
            assert (row.fidelity, row.parent, store["best"].number) == ("exact", 3, row.number)
            assert (row.stored_bytes > 100_000) == collected
            store.untag("best")
            store["a@3"].checkout(directory / "again", force=True)
            assert sha256(directory / "again") == sha256(series[3])
    outlasts(path, series, set())


@pytest.mark.long
@pytest.mark.parametrize("collected", [False, True], ids=["before gc", "after gc"])
def test_a_run_goes_on_after_a_thinned_version(path: Path, series: list[Path], collected: bool) -> None:
    with ckstore.open(path) as store:
        store.thin(["a@4", "a@5"])
        if collected:
            store.gc(grace=0)
        exact = store.ingest(series[6], run="a", verify=True).version
        assert (exact.parent, exact.fidelity) == (6, "exact")
        torch.save(state(7), path.parent / "step7.pt")
        store.thin(["a@6"])
        coarse = store.ingest(path.parent / "step7.pt", run="a", verify=True, policy="coarse").version
        assert coarse.parent == exact.number
        assert coarse.depth > 0
        assert coarse.stored_bytes < exact.original_bytes / 10
    outlasts(path, [*series, path.parent / "step7.pt"], {"a@4", "a@5", "a@6", "a@7"})


def test_with_forgotten_and_rebased_versions(path: Path, series: list[Path]) -> None:
    """Versions between a lossless one and a removed one may be claimed by nobody."""
    with ckstore.open(path) as store:
        store.forget(["a@3"])
        report = store.thin(["a@0"])
        assert report.reanchored > 0
        before = pack_bytes(path)
        store.gc(grace=0)
        assert before - pack_bytes(path) >= 0.9 * report.freed
        store.rebase(["a@5"])
        store.thin(["a@4"])
    outlasts(path, series, {"a@0", "a@4"})


# Whatever the values


@pytest.mark.long
def test_runs_of_other_kinds(
    bf16_run: list[Path], cnn_run: list[Path], frozen_run: list[Path], ema_run: list[Path], directory: Path
) -> None:
    with ckstore.init(directory / "store") as store:
        for name, files in (("bfloat16", bf16_run), ("cnn", cnn_run), ("frozen", frozen_run), ("ema", ema_run)):
            for path in files[:3]:
                store.ingest(path, run=name)
            rows = settled(store)._catalog.versions(name)
            dry = store.thin([rows[0].number, rows[1].number], dry_run=True)
            before = pack_bytes(store.place)
            report = store.thin([rows[0].number, rows[1].number])
            assert report == dry
            store.gc(grace=0)
            assert pack_bytes(store.place) < before, name
            for row, path in zip(store._catalog.versions(name), files, strict=False):
                store[row.number].checkout(directory / "out", force=True)
                assert (sha256(directory / "out") == sha256(path)) == (row.fidelity == "exact")
                if row.fidelity == "coarse" and path.suffix == ".pt":
                    check_deviations(store[row.number], loaded(path), loaded(directory / "out"))
        assert store.verify().problems == []


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": lambda weight: weight.index_put((torch.tensor(7), torch.tensor(7)), torch.tensor(float("nan"))),
    "infinity": lambda weight: weight.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("-inf"))),
    "outlier": lambda weight: weight.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(3e38)),
    "complex": lambda weight: torch.complex(weight, weight * 0.5),
    "half infinity": lambda weight: weight.half().index_put(
        (torch.tensor(0), torch.tensor(0)), torch.tensor(float("inf"), dtype=torch.float16)
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_values_that_no_lattice_holds_stay_exact(directory: Path, kind: str) -> None:
    """A number that is none, one beyond all integers, and complex ones; that version's other tensors become coarse."""
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            weight = draw(300, 256) + draw(300, 256, seed=1 + step, scale=1e-3)
            odd = ODD[kind](weight) if step else weight
            if kind == "complex":
                odd = ODD[kind](weight)
            torch.save({"odd": odd, "plain": weight * 3}, directory / f"{step}.pt")
            store.ingest(directory / f"{step}.pt", run="r", step=step)
        store.thin(run="r")
        store.gc(grace=0)
        for step in (1, 2):
            assert store[f"r@{step}"].deviations().keys() == {"plain"}
            exact = torch.load(directory / f"{step}.pt")["odd"]
            assert same_bits(store[f"r@{step}"]["odd"].torch(), exact)
        assert store.verify().problems == []


def test_a_version_that_keeps_all_keeps_its_bases(directory: Path) -> None:
    """The weights of a diverged run stay exact, so they are stored again when their parent's go."""
    weight = draw(300, 256)
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            weight = weight + draw(300, 256, seed=step, scale=1e-3) * (draw(300, 256, seed=step) > 2)
            if step == 1:
                weight[3] = float("nan")
            torch.save({"w": weight}, directory / f"{step}.pt")
            store.ingest(directory / f"{step}.pt", run="r", step=step)
        report = store.thin(run="r")
        assert ([item.version.step for item in report.versions], report.skipped) == ([0], [2, 3])
        before = pack_bytes(store.place)
        store.gc(grace=0)
        assert before - pack_bytes(store.place) >= 0.9 * report.freed > 0
    lose_catalog(directory / "store")
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        assert store.verify().problems == []
        for step in (1, 2):
            store[f"r@{step}"].checkout(directory / "out", force=True)
            assert sha256(directory / "out") == sha256(directory / f"{step}.pt")


def test_files_of_every_kind(directory: Path) -> None:
    """Directories, safetensors and legacy files become coarse; a file without a lossy tensor is skipped."""
    tree = directory / "tree"
    tree.mkdir()
    weight = draw(300, 256)
    write_safetensors(tree / "model.safetensors", {"w": ("float32", (300, 256), weight.numpy())})
    (tree / "config.json").write_text("{}")
    (tree / "link").symlink_to("config.json")
    torch.save({"w": weight.double()}, directory / "legacy.pt", _use_new_zipfile_serialization=False)
    (directory / "opaque.bin").write_bytes(np.random.default_rng(0).bytes(100_000))
    torch.save({"norm": torch.ones(70)}, directory / "small.pt")
    with ckstore.init(directory / "store") as store:
        for name in ("tree", "legacy.pt", "opaque.bin", "small.pt"):
            store.ingest(directory / name, run=name, allow_empty=True)
        report = store.thin(["tree", "legacy.pt", "opaque.bin", "small.pt"])
        assert ([item.version.run for item in report.versions], report.skipped) == (["tree", "legacy.pt"], [3, 4])
        store.gc(grace=0)
        assert store.verify().problems == []
        store["tree"].checkout(directory / "out")
        assert {n: said for n, said in described(directory / "out").items() if n != "model.safetensors"} == {
            n: said for n, said in described(tree).items() if n != "model.safetensors"
        }
        assert store["tree"].deviations().keys() == {"model.safetensors/w"}
        for name in ("opaque.bin", "small.pt"):
            store[name].checkout(directory / f"{name}.out")
            assert sha256(directory / f"{name}.out") == sha256(directory / name)
        off = store["legacy.pt"].deviations()["w"]
        assert float((store["legacy.pt"]["w"].torch() - weight.double()).abs().max()) <= off.max_abs < 0.1


# Dry runs


@pytest.mark.long
@pytest.mark.parametrize(("mode", "chosen"), [("r", ["a@3"]), ("a", ["a@0..a@4"]), ("r", ["a@0..a@5", "b"])])
def test_a_dry_run_predicts_the_report_and_changes_nothing(path: Path, mode: Any, chosen: list[str]) -> None:
    with ckstore.open(path) as store:
        store.encode()  # The dry run of a hot version is about its unencoded bytes.
    before = contents(path)
    seen: list[str] = []
    with ckstore.open(path, mode) as store:
        with mock.patch.object(durable, "checkpoint", seen.append):
            expected = store.thin(chosen, dry_run=True)
        assert expected.versions
        assert store.verify().problems == []
        with mock.patch.object(durable, "checkpoint", seen.append):
            assert store.thin(chosen, dry_run=True) == expected
    assert not {"log-written", "before-commit", "after-commit", "pack-put", "record-put"} & set(seen)
    assert contents(path) == before
    with ckstore.open(path) as store:
        assert store.thin(chosen) == expected
        freed = store.gc(grace=0).bytes
    assert abs(freed - expected.freed) < 0.02 * freed + 60_000


def test_a_dry_run_needs_no_place_in_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: Path, *arguments: Any, **options: Any) -> Any:
        assert not Path(target).is_relative_to(path)
        return original(target, *arguments, **options)

    original = os.mkdir
    monkeypatch.setattr(os, "mkdir", refuse)
    with ckstore.open(path, "r") as store:
        assert store.thin(run="a", dry_run=True).freed > 0
        with pytest.raises(UsageError, match="reading only"):
            store.thin(run="a")


def test_a_dry_run_while_a_version_is_encoded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing keeps others from it: the raw pack goes between two looks."""
    present, encoded = StoredVersion.check_present, []

    def late(*arguments: Any) -> None:
        if not encoded:
            with ckstore.open(directory / "store") as other:
                encoded.append(other.encode().versions)
        present(*arguments)

    monkeypatch.setattr(StoredVersion, "check_present", late)
    with ckstore.init(directory / "store") as store:
        store.ingest({"w": draw(300, 256)}, run="a", step=0)
        assert [item.version.number for item in store.thin(["a@0"], dry_run=True).versions] == [1]
        assert encoded == [[1]]
        assert store.thin(["a@0"], dry_run=True) == store.thin(["a@0"])


# Damage, crashes and others at the same time


def unchanged(store: ckstore.Store) -> Callable[[], bool]:
    rows, files = store._catalog.versions(), listing(store.place)
    return lambda: store._catalog.versions() == rows and listing(store.place) == files


def lose(path: Path, *, flipped: bool) -> tuple[str, bytes]:
    """Lose the pack of the largest object of version 4, or flip a bit of it; return its name and former bytes."""
    with ckstore.open(path) as store:
        largest = max(objects(store, 4), key=lambda record: record.nbytes)
    whole = change_pack(path, largest.pack, None)
    if flipped:
        data = bytearray(whole)
        data[largest.offset + 100] ^= 8
        change_pack(path, largest.pack, bytes(data))
    return largest.pack, whole


@pytest.mark.long
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_version_is_refused(path: Path, series: list[Path], damage: str) -> None:
    pack, whole = lose(path, flipped=damage == "flipped")
    with ckstore.open(path) as store:
        same = unchanged(store)
        for dry_run in (True, False):
            with pytest.raises(IntegrityError) as raised:
                store.thin(["a@3"], dry_run=dry_run)
            assert "\n" not in str(raised.value)
            assert same()
        assert store._catalog.leases() == []
    change_pack(path, pack, whole)
    with ckstore.open(path) as store:
        assert store.thin(["a@3"]).versions
    outlasts(path, series, {"a@3"})


@pytest.mark.long
def test_versions_before_a_damaged_one_are_thinned(path: Path, series: list[Path]) -> None:
    """Each in a commit of its own; costs are those of the present objects."""
    pack, whole = lose(path, flipped=True)
    with ckstore.open(path) as store, pytest.raises(IntegrityError):
        store.thin(["a@1..a@4"])
    change_pack(path, pack, whole)
    outlasts(path, series, {"a@1", "a@2"})


class Crash(BaseException):
    """The process dies."""


@pytest.mark.long
def test_a_thinning_that_dies_at_any_checkpoint(short: tuple[Path, list[Path]], directory: Path) -> None:
    """The store is whole then, and stays so in any next operation; the next thinning finishes."""
    path, files = short
    whole = Path(shutil.copytree(path, directory / "whole" / "store"))
    seen: list[str] = []
    with ckstore.open(whole) as store, mock.patch.object(durable, "checkpoint", seen.append):
        store.thin(["a@0", "a@1"])
        rows = store._catalog.versions()
    first = restored(whole)
    # Costs are a record, too, of a remote store.
    assert (seen.count("log-written"), seen.count("record-put")) in ((2, 0), (0, 3))
    places = [[place for place, name in enumerate(seen, 1) if name == step] for step in dict.fromkeys(seen)]
    for wanted in sorted({place for found in places for place in (*found[:2], found[-1])}):
        copy = Path(shutil.copytree(path, directory / f"copy{wanted}" / "store"))  # A URL is one store's.
        count = 0

        def stop(step: str, wanted: int = wanted) -> None:
            nonlocal count
            count += 1
            if count == wanted:
                raise Crash

        store = ckstore.open(copy)
        dead = (
            mock.patch.object(durable, "checkpoint", stop),
            mock.patch("ckstore.commit.change.remove_uncommitted"),
        )
        # Nor does a process that is gone write costs.
        with suppress(Crash), dead[0], dead[1], mock.patch.object(module, "update_costs"):
            store.thin(["a@0", "a@1"])
        with ckstore.open(copy, "r") as there:  # The process that died may not know its own commit.
            done = {f"{row.run}@{row.step}" for row in there._catalog.versions() if row.fidelity == "coarse"}
        with mock.patch.object(durable, "is_running", return_value=False), store._catalog.lease("begin"):
            pass
        # A pack that was complete may come back with the catalog.
        recovered = Path(shutil.copytree(copy, directory / f"recovered{wanted}" / "store"))
        lose_catalog(recovered)
        assert recover(recovered).problems == []
        found = restored(copy)
        assert found == {
            name: (first if name in done else {name: sha256(files[int(name[2:])])})[name] for name in first
        }
        for place in (copy, recovered):
            with ckstore.open(place) as again:
                again.thin(["a@0", "a@1"])
                assert [(row.number, row.fidelity, row.cost, row.depth) for row in again._catalog.versions()] == [
                    (row.number, row.fidelity, row.cost, row.depth) for row in rows
                ], seen[wanted - 1]
                again.gc(grace=0)
            assert restored(place) == first
            shutil.rmtree(place)


THIN = """
import os, signal, sys
import ckstore
from ckstore.storage import durable
def stop(name):
    if name in sys.argv[2:]:
        os.kill(os.getpid(), signal.SIGKILL)
with ckstore.open(sys.argv[1]) as store:
    lease = store._catalog.lease
    def leased(purpose):
        durable.checkpoint = stop
        return lease(purpose)
    store._catalog.lease = leased
    store.thin(["a@0", "a@1"])
"""


@pytest.mark.parametrize("steps", [["pack-renamed"], ["log-written", "record-put"]], ids=" ".join)
def test_a_thinning_that_is_killed(short: tuple[Path, list[Path]], directory: Path, steps: list[str]) -> None:
    """The last step before the commit has another name in a bucket."""
    path = Path(shutil.copytree(short[0], directory / "store"))
    done = subprocess.run([sys.executable, "-c", THIN, str(path), *steps], cwd=REPOSITORY, check=False)
    assert done.returncode == KILLED
    with ckstore.open(path) as store:
        assert store._catalog.leases() == []
    assert restored(path) == {f"a@{step}": sha256(file) for step, file in enumerate(short[1])}
    with ckstore.open(path) as store:
        assert len(store.thin(["a@0", "a@1"]).versions) == 2
        assert store.gc(grace=0).bytes > 0
    outlasts(path, short[1], {"a@0", "a@1"})


@pytest.mark.parametrize("part", [0, 3, 6, 10, 14])
def test_a_full_disk(chained: ckstore.Store, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = chained
    same = unchanged(store)
    calls = 0

    def failing(original: Any) -> Any:
        def call(self: PackWriter, *arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1 + part:
                raise durable.full_error(store.path, 1)
            return original(self, *arguments, **named)

        return call

    for place in (PackWriter._claim, PackWriter._add, PackWriter._add_member):
        monkeypatch.setattr(PackWriter, place.__name__, failing(place))
    with pytest.raises(CkstoreError, match="No space"):
        store.thin(["a@3"])
    monkeypatch.undo()
    assert same()
    assert store._catalog.leases() == []
    assert len(store.thin(["a@3"]).versions) == 1
    assert store.verify().problems == []


def test_an_fsync_that_fails(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    same = unchanged(store)

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkstoreError, match="No space"):
        store.thin(["a@3"])
    monkeypatch.undo()
    assert same()
    assert store.verify().problems == []


def test_a_commit_that_fails_leaves_no_packs(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = packs_of(store.place)

    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Catalog, "replace_version", fail)
    with pytest.raises(ZeroDivisionError):
        store.thin(["a@3"])
    monkeypatch.undo()
    collect_uncommitted(store)
    assert packs_of(store.place) == packs
    assert store["a@3"].fidelity == "exact"
    assert recover(store.place).problems == []
    assert store["a@3"].fidelity == "exact"


def collect_uncommitted(store: ckstore.Store) -> None:
    """Packs of an uncommitted change stay in a bucket until `gc`: others may have put the same ones."""
    if isinstance(store.place, str):
        store.gc(grace=0)


def interposed(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Do something between the plan of a thinning and its commit."""
    original, done = module._Thinning._commit, []

    def call(self: Any, *arguments: Any) -> None:
        if not done:
            done.append(True)
            action()
        original(self, *arguments)

    monkeypatch.setattr(module._Thinning, "_commit", call)


@pytest.mark.long
def test_a_concurrently_forgotten_version(path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        with ckstore.open(path) as other:
            other.forget(["a@2"])

    interposed(monkeypatch, forget)
    with ckstore.open(path) as store:
        packs = packs_of(path)
        with pytest.raises(NotFoundError):
            store.thin(["a@2"])
        left = set(packs_of(path)) - set(packs)
        collect_uncommitted(store)
        assert not left & set(packs_of(path))
        assert store._catalog.leases() == []
    assert "a@2" not in restored(path)
    outlasts(path, series, set())


@pytest.mark.long
def test_a_concurrent_ingest_keeps_its_claims(path: Path, series: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingest claims content of the version that is thinned, and another one is stored against that."""

    def ingest() -> None:
        with ckstore.open(path) as other:
            other.ingest(series[3], run="c")
            other.ingest(series[5], run="d", parent="c@3")

    interposed(monkeypatch, ingest)
    with ckstore.open(path) as store:
        store.thin(["a@3"])
        store.gc(grace=0)
    outlasts(path, series, {"a@3"})


def test_packs_that_were_moved_before_the_lease(path: Path, series: list[Path]) -> None:
    """Between the choice of versions and the lease another process has freed space."""
    with ckstore.open(path) as store:
        rows = [store["a@3"]._stored.row]
        with ckstore.open(path) as other:
            other.forget(["a@0..a@2"])
            other.gc(grace=0)
        report = module.thin(store._repository, rows, module.Policy("coarse"))
        assert len(report.versions) == 1
        assert report.versions[0].version == rows[0] or report.versions[0].version.uid == rows[0].uid
    outlasts(path, series, {"a@3"})


def test_the_log(store: ckstore.Store) -> None:
    before = {pack.name for pack in store._catalog.packs()}
    store.thin(["a@2", "a@3"])
    *_, one, other = store._catalog.log_records()
    assert [(record["change"], record["version"]) for record in (one, other)] == [("thin", 3), ("thin", 4)]
    assert {pack.name for pack in store._catalog.packs()} - before == {*one["packs"], *other["packs"]}


def test_every_byte_is_accounted_for(store: ckstore.Store) -> None:
    assert store.thin(["a@0", "a@4"]).reanchored > 0
    for _ in range(2):
        stats = store.stats(ledger=True)
        files = sum(size for _, _, size in store._repository.packs.files())
        assert sum(stats["ledger"].values()) == stats["stored_bytes"] == files
        store.gc(grace=0)


@pytest.mark.parametrize("name", ["a@0", "a@1", "a@2", "a@3", "a@4"])
def test_a_killed_thinning_leaves_no_wrong_cost(
    chained: ckstore.Store, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs of versions that are stored against the thinned one change with its commit."""
    before = {row.number: row.cost for row in chained._catalog.versions()}
    with monkeypatch.context() as killed:
        killed.setattr(module, "update_costs", lambda *_: sys.exit(1))
        with pytest.raises(SystemExit):
            chained.thin([name])
    assert chained.verify().problems == []
    rows = chained._catalog.versions()
    costs.update_costs(chained._repository)
    assert chained._catalog.versions() == rows
    assert {row.number: row.cost for row in rows} != before


def test_each_commit_of_a_killed_thinning_has_its_costs(
    chained: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Change.commit_again
    for after in range(2):
        left = iter(range(after + 1))

        def killed(self: Change, *arguments: Any, left: Iterator[int] = left, **named: Any) -> None:
            commit(self, *arguments, **named)
            if next(left, None) is None:
                sys.exit(1)

        with monkeypatch.context() as patched:
            patched.setattr(module, "update_costs", lambda *_: None)
            patched.setattr(Change, "commit_again", killed)
            with pytest.raises(SystemExit):
                chained.thin(run="a")
        assert chained.verify().problems == []
