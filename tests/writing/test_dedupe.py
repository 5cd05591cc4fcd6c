"""Content that the store holds already costs next to nothing, and deltas find their tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckstore
from ckstore.errors import ConflictError
from ckstore.policy import Policy
from ckstore.storage.catalog import VersionRow
from ckstore.writing.tuning import Search
from tests.checkpoints import draw, listing, moving, sha256

pytestmark = pytest.mark.encoded

#: The least cost of a version: its manifest and the frames around it.
OVERHEAD = 6_000


def comes_back(store: ckstore.Store, number: int, path: Path) -> bool:
    out = store.path.parent / "out"
    store[number].checkout(out, force=True)
    return sha256(out) == sha256(path)


def test_the_same_tensor_several_times_in_one_version(store: ckstore.Store, directory: Path) -> None:
    """Tied in the file, copied in the file, and the same values as another file's."""
    weight = torch.randn(300, 300)
    torch.save({"w": weight}, directory / "one.pt")
    single = store.ingest(directory / "one.pt", run="one").version
    other = ckstore.init(directory / "other")
    torch.save({"w": weight, "tied": weight, "ema": weight.clone(), "sd": {"w": weight.clone()}}, directory / "many.pt")
    many = other.ingest(directory / "many.pt").version
    assert many.original_bytes > 2.9 * single.original_bytes
    assert many.stored_bytes < single.stored_bytes + OVERHEAD
    assert comes_back(other, 1, directory / "many.pt")
    other.close()


def test_a_directory_is_the_same_only_with_its_directories_and_modes(store: ckstore.Store, directory: Path) -> None:
    tree = directory / "tree"
    (tree / "sub").mkdir(parents=True)
    torch.save({"w": torch.randn(30, 30)}, tree / "w.pt")
    assert store.ingest(tree, run="a", step=0).is_new
    assert not store.ingest(tree, run="a", step=0).is_new
    with pytest.raises(ConflictError):
        store.ingest(tree / "w.pt", run="a", step=0)
    (tree / "w.pt").chmod(0o600 if (tree / "w.pt").stat().st_mode & 0o777 != 0o600 else 0o640)
    with pytest.raises(ConflictError):
        store.ingest(tree, run="a", step=0)
    assert store.ingest(tree, run="a", step=0, replace=True).is_new
    (tree / "sub").chmod(0o700 if (tree / "sub").stat().st_mode & 0o777 != 0o700 else 0o750)
    with pytest.raises(ConflictError):
        store.ingest(tree, run="a", step=0)
    (tree / "another").mkdir()
    assert store.ingest(tree, run="a", step=0, replace=True).is_new
    (tree / "another").rmdir()
    with pytest.raises(ConflictError):
        store.ingest(tree, run="a", step=0)


def test_the_same_content_in_another_version_run_and_format(store: ckstore.Store, directory: Path) -> None:
    weights = {"w": torch.randn(300, 300), "v": torch.randn(70_000), "half": torch.randn(66_000).to(torch.bfloat16)}
    torch.save(weights, directory / "a.pt")
    torch.save({"model": {name: tensor.clone() for name, tensor in weights.items()}}, directory / "b.ckpt")
    save_file(weights, directory / "c.safetensors")
    store.ingest(directory / "a.pt", run="a", step=1)
    for run, step, name in [("a", 2, "a.pt"), ("b", 1, "a.pt"), ("c", 1, "b.ckpt"), ("d", 1, "c.safetensors")]:
        row = store.ingest(directory / name, run=run, step=step).version
        assert row.stored_bytes < OVERHEAD
        assert comes_back(store, row.number, directory / name)
    assert store._catalog.objects() == 3
    assert store.verify().problems == []


def test_a_rerun_of_the_same_ingest(store: ckstore.Store, directory: Path) -> None:
    tree = directory / "checkpoint-5"
    tree.mkdir()
    torch.save({"w": torch.randn(300, 300), "step": 5}, directory / "file.pt")
    save_file({"w": torch.randn(300, 300)}, tree / "model.safetensors")
    (tree / "config.json").write_text("{}")
    first = [store.ingest(directory / "file.pt", run="a"), store.ingest(tree, run="b")]
    assert [report.is_new for report in first] == [True, True]
    files = listing(store.place)
    again = [store.ingest(directory / "file.pt", run="a"), store.ingest(tree, run="b")]
    assert [report.is_new for report in again] == [False, False]
    assert [report.version for report in again] == [report.version for report in first]
    assert listing(store.place) == files
    assert len(store._catalog.versions()) == 2
    (tree / "config.json").write_text("{ }")
    with pytest.raises(ckstore.errors.ConflictError):
        store.ingest(tree, run="b")
    replaced = store.ingest(tree, run="b", replace=True)
    assert replaced.is_new
    assert replaced.version.stored_bytes < OVERHEAD
    assert [row.number for row in store._catalog.versions("b")] == [replaced.version.number]


def test_a_trained_run_with_a_frozen_backbone(store: ckstore.Store, frozen_run: list[Path]) -> None:
    """In the trained test run, every version after the first costs its trainable part at most."""
    rows = [store.ingest(path, run="frozen").version for path in frozen_run]
    contents = [set(store[row.number]._stored.document.objects) for row in rows]
    for before, after, row in zip(contents, contents[1:], rows[1:], strict=False):
        units = dict(
            zip(store[row.number]._stored.document.objects, store[row.number]._stored.layout.units, strict=True)
        )
        moved = sum(unit.nbytes for identity, unit in units.items() if identity not in before)
        assert after & before, "the backbone is the same objects"
        assert row.stored_bytes < 1.2 * moved + OVERHEAD


def test_another_storage_layout(store: ckstore.Store, shared_data: Path, directory: Path) -> None:
    """The last file has separate storages where the others share one; it is stored against them all the same."""
    paths = sorted((shared_data / "lightning_a").iterdir())
    rows = [store.ingest(path, run="l").version for path in paths]
    with ckstore.init(directory / "alone") as other:
        alone = [other.ingest(path, run=path.name).version for path in paths]
    assert all(row.stored_bytes < 0.9 * single.stored_bytes for row, single in zip(rows[1:], alone[1:], strict=True))
    last = store[rows[-1].number]
    bases = [store._repository.resolver.record(identity).base for identity in last._stored.document.objects]
    weights = {unit.key: base for unit, base in zip(last._stored.layout.units, bases, strict=True) if unit.count > 1000}
    assert any("state_dict" in key and base is not None for key, base in weights.items())
    assert store.verify().problems == []


def test_another_training_under_the_same_names(store: ckstore.Store, directory: Path) -> None:
    """Another training under the same names: a base, and no larger than it would be alone."""
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        weight = torch.randn(400, 400) * (1 + 3 * seed)
        for step in range(2):
            paths.append(directory / f"{seed}-{step}.pt")
            torch.save({"w": weight.clone()}, paths[-1])
            weight += 1e-3 * torch.randn(400, 400)
    rows: list[VersionRow] = [store.ingest(path, run="a", step=step).version for step, path in enumerate(paths)]
    with ckstore.init(directory / "alone") as other:
        alone = other.ingest(paths[2]).version
    assert [row.depth for row in rows] == [0, 1, 0, 1]
    assert rows[2].base
    assert rows[2].stored_bytes < 1.02 * alone.stored_bytes
    assert all(comes_back(store, row.number, path) for row, path in zip(rows, paths, strict=True))


def test_a_fork(store: ckstore.Store, directory: Path) -> None:
    """A run that begins at another's version is stored against that one."""
    torch.manual_seed(0)
    weight = torch.randn(400, 400)
    torch.save({"w": weight}, directory / "base.pt")
    torch.save({"w": weight + 1e-3 * torch.randn(400, 400)}, directory / "fork.pt")
    base = store.ingest(directory / "base.pt", run="a").version
    found = store.ingest(directory / "fork.pt", run="b").version
    with ckstore.init(directory / "alone") as other:
        alone = other.ingest(directory / "fork.pt", run="b").version
    with ckstore.init(directory / "other") as other:
        other.ingest(directory / "base.pt", run="a")
        fork = other.ingest(directory / "fork.pt", run="b", parent="a").version
        assert fork.parent == base.number
        assert fork.depth == 1
        assert fork.stored_bytes < 0.85 * alone.stored_bytes
        # Times and random names take more or less in the compressed manifest.
        assert (found.parent, found.stored_bytes) == (fork.parent, pytest.approx(fork.stored_bytes, abs=64))
        assert comes_back(other, fork.number, directory / "fork.pt")


def quality(value: float) -> dict[str, Any]:
    return {"policy": Policy("coarse", quality=value)}


def largest(error: float) -> dict[str, Any]:
    return {"policy": Policy("coarse", max_abs_error=error)}


@pytest.mark.parametrize(
    ("first", "then", "is_new"),
    [
        (quality(4.0), quality(4.0), False),
        (quality(4.0), quality(8.0), False),
        (quality(4.0), quality(1.0), True),
        (quality(4.0), largest(1e-4), True),
        (largest(1e-4), largest(1e-4), False),
        (largest(1e-4), largest(1e-3), False),
        (largest(1e-4), {"policy": Policy("coarse", max_rel_error=1e-4)}, True),
        (largest(1e-4), largest(1e-5), True),
        (largest(1e-4), {"policy": "exact"}, True),
        ({"policy": "exact"}, largest(1e-5), False),
        (quality(4.0), {"search": Search(lambda _: 1.0, 0.1)}, True),
    ],
)
def test_the_same_content_is_stored_again_where_it_is_to_be_more_faithful(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], is_new: bool
) -> None:
    with ckstore.init(tmp_path / "store") as store:
        before = store.ingest(moving(1), run="a", step=1, **first).version
        store.tag(before.number, "best")
        report = store.ingest(moving(1), run="a", step=1, **then)
        assert report.is_new == is_new
        assert [row.number for row in store._catalog.versions()] == [report.version.number]
        assert store["best"].number == report.version.number
        policy = then.get("policy")
        if isinstance(policy, Policy) and policy.max_abs_error is not None:
            errors = [item.max_abs for item in store["best"].deviations().values()]
            assert max(errors, default=0.0) <= policy.max_abs_error


@pytest.mark.parametrize("hot", [0, None])
def test_content_without_a_step_is_stored_once_in_a_run(tmp_path: Path, hot: int | None) -> None:
    with ckstore.init(tmp_path / "store") as store:
        weights = {"w": draw(300, 256)}
        numbers = [store.ingest(weights, run="a", metrics={f"m{index}": index}, hot=hot) for index in range(3)]
        assert [(report.version.number, report.is_new) for report in numbers] == [(1, True), (1, False), (1, False)]
        assert store[1].metrics == {"m0": 0, "m1": 1, "m2": 2}
        changed = {"w": draw(300, 256, seed=1)}
        assert store.ingest(changed, run="a", hot=hot).is_new
        assert not store.ingest(weights, run="a", hot=hot).is_new
        assert store.ingest(weights, run="b", hot=hot).is_new
        assert store.ingest(weights, run="a", step=5, hot=hot).is_new
        assert [version.name for version in store.versions()] == ["a", "a", "b", "a@5"]
        assert store.verify().problems == []
