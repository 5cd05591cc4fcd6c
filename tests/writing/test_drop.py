"""Versions that drop tensors: their other tensors, and all other versions, stay unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.commit import costs
from ckstore.errors import ConflictError, IntegrityError, NotFoundError
from ckstore.gc import plan
from ckstore.objects.layouts import check_layout
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from ckstore.storage.root import CATALOG
from ckstore.writing.drop import drop
from tests.checkpoints import pack_bytes, sha256
from tests.format_reader import Reader

OPTIMIZER = ("optimizer/*",)


def state(step: int, *, still: bool = False) -> dict[str, Any]:
    """Return two weights of 300 KB with AdamW's state; with `still` a few moments change from step to step."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"h.{number}": torch.randn(300, 256, generator=generator) + 1e-3 * step for number in range(2)}
    moments = {}
    for number in range(2):
        generator.manual_seed(number if still else 10 * step + number)
        first, second = torch.randn(300, 256, generator=generator), torch.rand(300, 256, generator=generator)
        first[step, :7] += 1
        moments[number] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "epoch": step}


def fill(store: ckstore.Store, count: int, run: str = "a", **options: Any) -> list[Path]:
    paths = []
    for step in range(count):
        paths.append(store.path.parent / f"{run}{step}.pt")
        torch.save(state(step, **options), paths[-1])
        store.ingest(paths[-1], run=run, step=step, max_restore_cost=8, hot=0)
    return paths


def steps(store: ckstore.Store, run: str = "a") -> list[int | None]:
    """Return the steps of versions with dropped tensors."""
    return [row.step for row in store._catalog.versions(run) if row.dropped]


def has_the_rest(version: ckstore.Version, step: int, **options: Any) -> bool:
    found, expected = version.state_dict(), state(step, **options)
    assert list(found) == ["model", "epoch"]
    assert found["epoch"] == step
    return all(torch.equal(found["model"][name], weight) for name, weight in expected["model"].items())


def check(store: ckstore.Store, dropped: list[int], paths: list[Path], **options: Any) -> None:
    """Check that the versions of run a at steps `dropped` are their rest, and the others their files."""
    assert store.verify().problems == []
    assert steps(store) == dropped
    reader = Reader(store.place) if isinstance(store.place, Path) else None
    for row in store._catalog.versions("a"):
        version = store[row.number]
        assert row.step is not None
        assert costs.restore_cost(version._stored) == (row.cost, row.depth)
        files = dict(reader.files(row.number)) if reader else {}
        if row.dropped:
            assert files == {}
            assert version.fidelity == "exact"
            assert has_the_rest(version, row.step, **options)
        else:
            assert [*files.values()] == [paths[row.step].read_bytes()] * (reader is not None)
            version.checkout(store.path.parent / "out", force=True)
            assert sha256(store.path.parent / "out") == sha256(paths[row.step])


@pytest.mark.long
@pytest.mark.parametrize("still", [False, True])
def test_older_versions_lose_it_and_keep_the_rest(directory: Path, still: bool) -> None:
    with ckstore.init(directory / "store") as store:
        paths = fill(store, 6, still=still)
        before = pack_bytes(store.place)
        store.set_policy(Policy(retention=Retention(drop=OPTIMIZER, whole_last=2)), "a")
        predicted = store.retain("a", dry_run=True)
        report = store.retain("a")
        assert predicted.dropped == report.dropped
        assert [(row.step, row.dropped) for row in report.dropped] == [(step, OPTIMIZER) for step in range(4)]
        assert not report.thinned
        check(store, [0, 1, 2, 3], paths, still=still)
        store.gc(grace=0)
        # Where moments barely change, the last version's are stored against the first one's.
        assert pack_bytes(store.place) < (1.01 if still else 0.5) * before
        assert sum(row.stored_bytes for row in store._catalog.versions()) <= 1.01 * pack_bytes(store.place)
        check(store, [0, 1, 2, 3], paths, still=still)
        assert store.retain("a").dropped == []
        rows = store._catalog.versions()
    for lost in (False, True):
        if lost:
            (store.path / CATALOG).unlink()
        assert recover(directory / "store").problems == []
        with ckstore.open(directory / "store") as store:
            assert store._catalog.versions() == rows
            assert store.gc(grace=0).bytes == 0
            check(store, [0, 1, 2, 3], paths, still=still)


def test_protected_versions_stay_whole(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        for step in range(12):
            store.ingest(state(step), run="a", step=step, metrics={"loss": abs(step - 5.0)}, hot=0)
        store.tag("a@1", "mine")
        store.ingest(state(3), run="fork", step=0, parent="a@2", hot=0)
        retention = Retention(exact_every=4, exact_best=("loss:min",), drop=OPTIMIZER, whole_last=2)
        store.set_policy(Policy(retention=retention), "a")
        store.retain()
        assert steps(store) == [3, 6, 7, 9]
        assert steps(store, "fork") == []
        for step in (0, 1, 2, 4, 5, 8, 10, 11):
            kept, expected = store[f"a@{step}"].state_dict()["optimizer"]["state"], state(step)["optimizer"]["state"]
            assert torch.equal(kept[0]["exp_avg"], expected[0]["exp_avg"])
        assert store.verify().problems == []


def test_tensors_shared_with_another_version_stay(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        for step in range(3):
            store.ingest(state(step) | {"optimizer": state(0)["optimizer"]}, run="a", step=step, hot=0)
        drop(store._repository, store._catalog.versions("a")[:2], OPTIMIZER)
        store.gc(grace=0)
        assert steps(store) == [0, 1]
        kept = store["a@2"].state_dict()["optimizer"]["state"][1]["exp_avg"]
        assert torch.equal(kept, state(0)["optimizer"]["state"][1]["exp_avg"])
        assert store.verify().problems == []


@pytest.mark.parametrize("order", ["drop", "thin", "both"])
def test_with_coarse_versions(directory: Path, order: str) -> None:
    with ckstore.init(directory / "store") as store:
        paths = fill(store, 4)
        dropping = Retention(drop=OPTIMIZER, whole_last=1)
        thinning = Retention(exact_last=1)
        both = Retention(exact_last=1, drop=OPTIMIZER)
        for retention in {"drop": [dropping, both], "thin": [thinning, both], "both": [both]}[order]:
            store.set_policy(Policy(retention=retention), "a")
            store.retain("a")
            store.gc(grace=0)
        assert steps(store) == [0, 1, 2]
        assert [row.fidelity for row in store._catalog.versions()] == ["coarse"] * 3 + ["exact"]
        for row in store._catalog.versions()[:3]:
            found, expected = store[row.number].state_dict(), state(row.step or 0)
            assert list(found) == ["model", "epoch"]
            for name, weight in expected["model"].items():
                assert 0 < (found["model"][name] - weight).abs().max() < 0.1
            assert set(store[row.number].deviations()) == {"model/h.0", "model/h.1"}
        store["a@3"].checkout(directory / "out")
        assert sha256(directory / "out") == sha256(paths[3])
        assert store.verify().problems == []
    (store.path / CATALOG).unlink()
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        assert steps(store) == [0, 1, 2]
        assert store.verify().problems == []


def test_only_kept_tensors_become_coarse(directory: Path) -> None:
    """A version stores the same in either order, and a dry run reports the same changes."""
    sizes = []
    for name, globs in (("both", OPTIMIZER), ("nothing", ("*/exp_avg*", "model/*"))):
        with ckstore.init(directory / name) as store:
            fill(store, 3)
            store.set_policy(Policy(retention=Retention(exact_last=1, drop=globs)), "a")
            predicted, report = store.retain("a", dry_run=True), store.retain("a")
            assert [row.step for row in report.dropped] == [row.step for row in predicted.dropped] == [0, 1]
            assert [row.step for row in report.thinned] == [row.step for row in predicted.thinned]
            assert bool(report.thinned) == (name == "both")
            sizes.append(sum(row.stored_bytes for row in store._catalog.versions()[:2]))
    with ckstore.init(directory / "thinned") as store:
        fill(store, 3)
        store.thin(["a@0..a@1"])
        drop(store._repository, store._catalog.versions()[:2], OPTIMIZER)
        assert sum(row.stored_bytes for row in store._catalog.versions()[:2]) == pytest.approx(sizes[0], rel=0.05)


def test_dropping_the_only_coarse_tensors_leaves_an_exact_version(directory: Path) -> None:
    """The rest of such a version is exact: it says so."""
    with ckstore.init(directory / "store") as store:
        counters = {"n": torch.arange(100_000)}
        moments = {"m": torch.randn(300, 256)}
        store.ingest({"model": counters, "optimizer": moments}, run="a", step=0, policy="coarse")
        assert store["a@0"].fidelity == "coarse"
        drop(store._repository, store._catalog.versions(), OPTIMIZER)
        assert store["a@0"].fidelity == store["a@0"].fidelity == "exact"
        assert store.verify().problems == []


def test_a_small_tensor_is_dropped_with_all_of_its_object(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        small = {str(number): {"a": torch.rand(10), "b": torch.rand(10)} for number in range(20)}
        store.ingest({"model": {"w": torch.rand(300, 256)}, "small": small}, run="a", step=0, hot=0)
        assert drop(store._repository, store._catalog.versions(), ["small/*/a"]) == []
        assert len(store["a@0"]) == 41
        [row] = drop(store._repository, store._catalog.versions(), ["small/*/a", "small/*/b"])
        assert row.dropped == ("small/*/a", "small/*/b")
        assert list(store["a@0"]) == ["model/w"]
        assert list(store["a@0"].state_dict()) == ["model"]
        assert store.verify().problems == []


def test_more_is_dropped_later(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        fill(store, 2)
        for globs in (("*/exp_avg",), OPTIMIZER):
            store.set_policy(Policy(retention=Retention(drop=globs, whole_last=1)), "a")
            store.retain("a")
            assert store["a@0"].dropped[-1:] == globs
            assert store.verify().problems == []
        assert store["a@0"].dropped == ("*/exp_avg", *OPTIMIZER)
        assert has_the_rest(store["a@0"], 0)


def test_versions_of_a_run_share_a_layout(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        for step in range(4):
            store.ingest(state(step), run="a", step=step, hot=0)
        drop(store._repository, store._catalog.versions()[:3], OPTIMIZER)
        rows = store._catalog.versions()[:3]
        places = {store[row.number]._stored.document.layout.pack or row.pack for row in rows}
        assert len(places) == 1


def test_versions_without_matching_tensors_are_examined_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.init(directory / "store") as store:
        fill(store, 3)
        store.set_policy(Policy(retention=Retention(drop=("nothing/*",), whole_last=1)), "a")
        assert store.retain("a", dry_run=True).dropped == []
        assert store.retain("a").dropped == []
        monkeypatch.setattr("ckstore.retention.retain.drop", lambda *_, **__: pytest.fail("looked into again"))
        store.retain("a")
        assert steps(store) == []


def test_hot_versions_are_encoded_first(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        store.ingest(state(0), run="a", step=0, hot=3)
        with pytest.raises(ConflictError, match="ckstore encode 1"):
            drop(store._repository, store._catalog.versions(), OPTIMIZER)
        store.ingest(state(1), run="a", step=1, hot=3)
        store.set_policy(Policy(hot=1, retention=Retention(drop=OPTIMIZER, whole_last=1)), "a")
        store.retain("a")
        assert steps(store) == [0]
        assert has_the_rest(store["a@0"], 0)
        assert store["a@1"].hot


def test_packs_that_another_process_moved(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process holds outdated places of a version: another one has freed space."""
    with ckstore.init(directory / "store") as store:
        for step in range(4):
            store.ingest(state(step), run="a", step=step, hot=0)
        drop(store._repository, store._catalog.versions()[:3], ["*/exp_avg"])
        shared = store["a@2"]._stored.document.layout.pack
        assert shared == store["a@1"]._stored.document.layout.pack == store["a@0"]._stored.row.pack
        assert store["a@2"]._stored.layout.units
        with ckstore.open(directory / "store") as other:
            other.forget(["a@0"])
            monkeypatch.setattr(plan, "GARBAGE_SHARE", 0)
            assert other.gc(grace=0).rewritten
            assert shared not in {pack.name for pack in other._catalog.packs()}
        assert [row.step for row in drop(store._repository, store._catalog.versions()[:2], OPTIMIZER)] == [1, 2]
        assert has_the_rest(store["a@1"], 1)
        assert store.verify().problems == []


# Readers of such a version


def test_files_do_not_come_back_and_the_rest_does(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        fill(store, 2)
        drop(store._repository, store._catalog.versions()[:1], OPTIMIZER)
        version = store["a@0"]
        with pytest.raises(
            NotFoundError, match=r"has dropped optimizer/\*, so that a0.pt cannot .* with `format` pt\.$"
        ):
            version.checkout(directory / "out")
        assert not (directory / "out").exists()
        left_out = version.checkout(directory / "out.pt", format="pt")
        assert left_out == []
        assert torch.load(directory / "out.pt").keys() == {"model", "epoch"}
        report = version.salvage(directory / "salvaged")
        assert torch.load(directory / "salvaged.salvaged.pt").keys() == {"model", "epoch"}
        assert list(report.lost_files) == ["a0.pt"]
        with pytest.raises(NotFoundError, match="has dropped"):
            version["optimizer/state/[0]/exp_avg"]
        with pytest.raises(NotFoundError, match="did you mean"):
            version["model/h.00"]
        assert list(version.arrays) == ["model"]
        assert np.array_equal(version["model/h.0"][3], state(0)["model"]["h.0"][3].numpy())
        arrays = store.run("a").arrays
        assert list(arrays["model"]) == ["h.0", "h.1"]
        assert "optimizer/state/[0]/exp_avg" in arrays.attrs["left_out"]["missing"]  # type: ignore[operator]


def test_a_file_of_another_container_lists_the_rest(directory: Path) -> None:
    """It cannot be parsed again, as other files are to find the parts that are bytes."""
    np.savez(directory / "a.npz", model=np.ones((300, 256), "f4"), exp_avg=np.zeros((300, 256), "f4"))
    with ckstore.init(directory / "store") as store:
        row = store.ingest(directory / "a.npz", run="a", step=1, hot=0).version
        drop(store._repository, [row], ["exp_avg"])
        assert store["a@1"].opaque() == {}
        assert list(store["a@1"]) == ["model"]


def test_files_of_a_directory(directory: Path) -> None:
    source = directory / "step0"
    source.mkdir()
    torch.save(state(0)["model"], source / "model.pt")
    torch.save(state(0)["optimizer"], source / "optimizer.pt")
    with ckstore.init(directory / "store") as store:
        store.ingest(source, run="a", hot=0)
        drop(store._repository, store._catalog.versions(), ["optimizer.pt/*"])
        version = store["latest"]
        assert list(version.state_dict()) == ["model.pt"]
        with pytest.raises(NotFoundError, match=r"optimizer.pt cannot be restored.* with `exclude`"):
            version.checkout(directory / "out")
        version.checkout(directory / "out", exclude=["optimizer.pt"])
        assert sha256(directory / "out" / "model.pt") == sha256(source / "model.pt")
        assert version.sha256() == {"model.pt": sha256(source / "model.pt")}
        report = version.salvage(directory / "salvaged")
        assert report.files == ["model.pt"]
        assert sha256(directory / "salvaged" / "model.pt") == sha256(source / "model.pt")
        assert store.verify().problems == []


def test_shards(directory: Path) -> None:
    """In a checkpoint of torch.distributed.checkpoint, whole tensors go, whichever files their shards lie in."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(0), checkpoint_id=directory / "step0", no_dist=True)
    with ckstore.init(directory / "store") as store:
        store.ingest(directory / "step0", run="a", hot=0)
        before = set(store["latest"])
        [row] = drop(store._repository, store._catalog.versions(), ["optimizer/*"])
        assert row.dropped == OPTIMIZER
        version = store["latest"]
        assert {path for path in before if path.startswith("model/")} == set(version)
        assert has_the_rest(version, 0)
        with pytest.raises(NotFoundError, match="has dropped"):
            version.checkout(directory / "out")
        version.checkout(directory / "out.pt", format="pt")
        assert torch.load(directory / "out.pt", weights_only=True).keys() == {"model", "epoch"}
        assert store.verify().problems == []


def test_a_list_keeps_its_places(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        large, others = torch.rand(300, 256), torch.rand(300, 256)
        store.ingest({"parts": [large, others, 3]}, run="a", step=0, hot=0)
        drop(store._repository, store._catalog.versions(), ["parts/[[]0]", "parts/[0]"])
        found = store["a@0"].state_dict()["parts"]
        assert found[0] is None
        assert torch.equal(found[1], others)
        assert found[2] == 3


# Later operations


def test_the_same_file_makes_it_whole_again(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        paths = fill(store, 3)
        store.tag("a@1", "mine")
        drop(store._repository, store._catalog.versions()[:2], OPTIMIZER)
        report = store.ingest(paths[1], run="a", step=1, hot=0)
        assert report.is_new
        assert steps(store) == [0]
        store["mine"].checkout(directory / "out")
        assert sha256(directory / "out") == sha256(paths[1])
        assert not store.ingest(paths[1], run="a", step=1, hot=0).is_new
        assert store.verify().problems == []


def test_a_run_continues_after_a_dropped_version(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        fill(store, 2)
        drop(store._repository, store._catalog.versions(), OPTIMIZER)
        store.gc(grace=0)
        torch.save(state(9), directory / "fork.pt")
        for parent in ("a@0", "auto"):
            number = store.ingest(directory / "fork.pt", run=f"fork{len(parent)}", parent=parent, hot=0).version.number
            store[number].checkout(directory / "out", force=True)
            assert sha256(directory / "out") == sha256(directory / "fork.pt")
        store.rebase()
        store.forget(["a@1"])
        store.gc(grace=0)
        assert has_the_rest(store["a@0"], 0)
        assert store.verify().problems == []


def test_a_layout_with_gaps_is_one_of_a_version_that_dropped_something(directory: Path) -> None:
    with ckstore.init(directory / "store") as store:
        fill(store, 1)
        whole = store["a@0"]._stored.document
        drop(store._repository, store._catalog.versions(), OPTIMIZER)
        layout, document = store["a@0"]._stored.layout, store["a@0"]._stored.document
        check_layout(layout, document)
        with pytest.raises(IntegrityError, match="contradicts itself in units"):
            check_layout(layout, type(document)(**{**_fields(document), "dropped": ()}))
        with pytest.raises(IntegrityError, match="contradicts itself in units"):
            check_layout(layout, whole)


def _fields(document: Any) -> dict[str, Any]:
    return {name: getattr(document, name) for name in document.__slots__}
