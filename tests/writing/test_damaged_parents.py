"""After damage and a recovery: versions are healed by ingesting their content again, and runs go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ckstore
from ckstore.errors import CkstoreError, ConflictError, IntegrityError
from ckstore.recovery.recover import recover
from tests.checkpoints import change_pack, flip


def weights(step: int) -> npt.NDArray[np.float32]:
    """Return weights that move a little with every step."""
    values = np.random.default_rng(0).standard_normal((300, 300)) * 0.02
    for number in range(step):
        values += np.random.default_rng(number + 1).standard_normal((300, 300)) * 1e-3
    return values.astype(np.float32)


def state(step: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return a weight and a moment."""
    return {"w": weights(step), "exp_avg": weights(step + 7)}


def objects_pack(store: ckstore.Store, spec: str) -> str:
    """Store the objects of a version again, in a pack without its manifest unless they are in full; return the pack."""
    store.rebase([spec])
    store.gc(grace=0)
    own = store[spec]._stored.row.pack
    packs = {store._repository.resolver.record(identity).pack for identity in store[spec]._stored.document.objects} - {
        own
    }
    return packs.pop() if packs else own


def own_pack(store: ckstore.Store, spec: str) -> str:
    """Return the pack of objects, layout and manifest that a version was committed with."""
    return store[spec]._stored.row.pack


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of three versions, each stored against the one before."""
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest(state(step), run="a", step=step)
        store.encode()
        assert [row.depth for row in store._catalog.versions()] == [0, 1, 2]
    return tmp_path / "store"


def spoil(path: Path, which: Callable[[ckstore.Store, str], str], spec: str) -> None:
    """Damage a pack of a version, then recover."""
    with ckstore.open(path) as store:
        pack = which(store, spec)
    flip(path, pack, lambda length: length // 2)
    recover(path)


def comes_back(store: ckstore.Store, spec: str | int, step: int) -> bool:
    expected = state(step)
    return all(np.asarray(store[spec][name][:]).tobytes() == value.tobytes() for name, value in expected.items())


def test_ingesting_the_same_content_again_heals_a_version(path: Path) -> None:
    spoil(path, objects_pack, "a@1")
    with ckstore.open(path) as store:
        with pytest.raises(CkstoreError):
            store["a@1"]["w"][:]
        report = store.ingest(state(1), run="a", step=1)
        assert report.is_new
        assert comes_back(store, "a@1", 1)
        assert not store.ingest(state(1), run="a", step=1).is_new
        # Objects stored against the version come back with it.
        assert store.ingest(state(2), run="a", step=2).version.step == 2
        assert comes_back(store, "a@2", 2)
        assert store.verify().problems == []


def test_a_tag_follows_the_version_that_is_healed(path: Path) -> None:
    with ckstore.open(path) as store:
        store.tag("a@1", "best")
        store.tag("a@0", "first")
    spoil(path, objects_pack, "a@1")
    with ckstore.open(path) as store:
        number = store.ingest(state(1), run="a", step=1).version.number
        assert store._catalog.tags() == {"best": number, "first": 1}
        assert comes_back(store, "best", 1)
    recover(path)
    with ckstore.open(path) as store:
        assert store._catalog.tags() == {"best": number, "first": 1}


def test_the_latest_version_is_healed_after_the_parent_it_had(path: Path) -> None:
    spoil(path, objects_pack, "a@2")
    with ckstore.open(path) as store:
        before = store["a@2"]._stored.row
        row = store.ingest(state(2), run="a", step=2).version
        assert (row.parent, before.parent) == (2, 2)
        assert comes_back(store, "a@2", 2)


def test_other_content_still_needs_replace(path: Path) -> None:
    spoil(path, objects_pack, "a@2")
    with ckstore.open(path) as store, pytest.raises(ConflictError):
        store.ingest(state(9), run="a", step=2)


def test_a_version_whose_pack_was_cut_short_or_is_gone_is_not_taken_for_whole(path: Path) -> None:
    with ckstore.open(path) as store:
        pack = objects_pack(store, "a@2")
    data = change_pack(path, pack, None)
    change_pack(path, pack, data[:100])
    with ckstore.open(path) as store, pytest.raises(IntegrityError):
        store.ingest(state(2), run="a", step=2)
    change_pack(path, pack, None)
    with ckstore.open(path) as store, pytest.raises(IntegrityError):
        store.ingest(state(2), run="a", step=2)
    change_pack(path, pack, data)
    with ckstore.open(path) as store:
        assert not store.ingest(state(2), run="a", step=2).is_new


@pytest.mark.long
@pytest.mark.parametrize("which", [objects_pack, own_pack])
@pytest.mark.parametrize("lost", ["a@0", "a@1", "a@2"])
def test_a_run_goes_on_after_any_loss(path: Path, which: Callable[[ckstore.Store, str], str], lost: str) -> None:
    """A parent's values, their bases, the origin of the run, layout and skeleton."""
    spoil(path, which, lost)
    with ckstore.open(path) as store:
        for step in (3, 4):
            report = store.ingest(state(step), run="a", step=step)
            assert comes_back(store, report.version.number, step)
    recover(path)
    with ckstore.open(path) as store:
        assert comes_back(store, "a@3", 3)
        assert comes_back(store, "a@4", 4)


def test_a_lost_ancestor_of_a_parent_in_full(path: Path) -> None:
    with ckstore.open(path) as store:
        store.rebase(["a@2"])
    spoil(path, own_pack, "a@0")
    with ckstore.open(path) as store:
        row = store.ingest(state(3), run="a", step=3).version
        assert comes_back(store, row.number, 3)
        store.encode()
        assert comes_back(store, row.number, 3)
        assert store["a@3"].depth == 1, "the parent can be decoded, so it is used"
