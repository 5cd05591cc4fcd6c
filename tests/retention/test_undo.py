"""Forgotten versions come back as they were, until a collection frees them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Retention
from ckstore.errors import ConflictError, NotFoundError
from ckstore.gc import kept
from ckstore.recovery.recover import recover
from ckstore.repository import Repository
from ckstore.retention import forget
from ckstore.retention.encoder import BackgroundEncoder
from tests.checkpoints import settled


def values(step: int, run: int = 0) -> np.ndarray:
    """Return the weights of a step, which change a little from step to step."""
    found = np.random.default_rng(run).standard_normal(20_000).astype(np.float32)
    for number in range(step):
        found = found + 0.01 * np.random.default_rng(100 + number).standard_normal(20_000).astype(np.float32)
    return found.reshape(100, 200)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """A store of five versions of a run."""
    with ckstore.init(tmp_path / "store") as store:
        for step in range(5):
            store.ingest({"w": values(step)}, run="a", step=step, metrics={"loss": 1.0 / (step + 1)})
        settled(store)
        yield store


def check(store: ckstore.Store, steps: list[int]) -> None:
    """Check that a run has some steps, all of them exact, each the child of the one before."""
    rows = store._catalog.versions("a") if steps else []
    assert ("a" in [run.name for run in store._catalog.runs()]) is bool(steps)
    assert [row.step for row in rows] == steps
    assert [row.parent for row in rows] == [None, *(row.number for row in rows)][: len(rows)]
    for row in rows:
        assert row.step is not None
        np.testing.assert_array_equal(store[row.number]["w"][:], values(row.step))
        assert row.metrics["loss"] == 1.0 / (row.step + 1)
    assert store.verify().problems == []


@pytest.mark.parametrize("steps", [[0], [1, 2], [4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("collects", [False, True])
def test_forgotten_versions_come_back(store: ckstore.Store, steps: list[int], collects: bool) -> None:
    before = store._catalog.versions()
    store.forget([f"a@{step}" for step in steps])
    check(store, [step for step in range(5) if step not in steps])
    if collects:
        assert store.gc().kept > 0
    assert [row.step for row in store.undo().versions] == steps
    check(store, list(range(5)))
    after = store._catalog.versions()
    assert [(row.number, row.uid, row.metrics) for row in after] == [
        (row.number, row.uid, row.metrics) for row in before
    ]
    with pytest.raises(NotFoundError, match="Nothing to undo"):
        store.undo()


def test_each_call_undoes_the_change_before(store: ckstore.Store) -> None:
    for step in (3, 1, 2):
        store.forget(f"a@{step}")
    assert store.log(forgotten=True).values("step") == [1, 2, 3]
    for step in (2, 1, 3):
        assert [row.step for row in store.undo().versions] == [step]
    check(store, list(range(5)))


@pytest.mark.local
def test_a_recovery_keeps_what_can_be_undone(store: ckstore.Store) -> None:
    store.forget("a@1")
    store.forget("a@2")
    store.undo()
    path = store.path
    for _ in range(2):
        store.close()
        (path / "catalog.sqlite").unlink()
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            check(store, [0, 2, 3, 4] if 1 not in store.run("a").steps else list(range(5)))
            if 1 not in store.run("a").steps:
                store.undo()
                check(store, list(range(5)))


def test_they_are_garbage_after_the_grace_time(store: ckstore.Store) -> None:
    store.forget(["a@1", "a@2"])
    report = store.gc()
    left = datetime.fromisoformat(report.until) - datetime.fromisoformat(store._catalog.log_records()[-1]["created"])
    assert report.bytes == 0
    assert left <= timedelta(days=7)
    with mock.patch.object(kept, "datetime", wraps=datetime) as clock:
        clock.now.side_effect = lambda zone: datetime.now(zone) + timedelta(days=7, minutes=1)
        freed = store.gc()
    assert freed.bytes > 0.5 * report.kept
    assert freed.kept == 0
    check(store, [0, 3, 4])
    with pytest.raises(NotFoundError):
        store.undo()


@pytest.mark.local  # A bucket is never full.
def test_a_full_disk_ends_the_grace_time(store: ckstore.Store) -> None:
    store.forget(["a@1", "a@2"])
    with mock.patch.object(kept, "disk_usage", return_value=mock.Mock(free=1000)):
        assert store.gc().bytes > 0
    check(store, [0, 3, 4])


@pytest.mark.parametrize("by", ["prune", "policy"])
def test_versions_that_leave_for_good(store: ckstore.Store, by: str) -> None:
    if by == "prune":
        assert (store.forget(["a@0", "a@1"], prune=True).freed or 0) > 0
    else:
        store.set_policy(Policy(retention=Retention(keep_last=3)), "a")
        assert store.retain("a").freed > 0
    with pytest.raises(NotFoundError):
        store.undo()
    check(store, [2, 3, 4])


def test_a_policy_does_not_collect_for_kept_versions_in_vain(store: ckstore.Store) -> None:
    store.set_policy(Policy(retention=Retention(keep_last=9)), "a")
    store.forget(["a@1", "a@2"])
    store.gc()
    with mock.patch("ckstore.retention.retain.gc") as collected:
        store.retain("a")
    assert collected.call_count == (0 if store._catalog.is_only else 1)


def test_a_version_at_the_step_since(store: ckstore.Store) -> None:
    store.forget(["a@1", "a@2"])
    store.ingest({"w": values(9)}, run="a", step=2)
    settled(store)
    with pytest.raises(ConflictError, match="a@2 is version 6 now"):
        store.undo()
    store.forget(6, prune=True)
    store.undo()
    check(store, list(range(5)))


def test_a_damaged_version_does_not_stop_a_collection(store: ckstore.Store) -> None:
    store.forget(["a@1", "a@2"])
    with mock.patch("ckstore.gc.reachability.present_form", side_effect=ckstore.IntegrityError("damaged")):
        assert store.gc().bytes > 0
    with pytest.raises(NotFoundError):
        store.undo()
    check(store, [0, 3, 4])


def test_a_sent_version_comes_back_and_may_be_sent(store: ckstore.Store, tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "other") as other:
        other.pull(store, ["a@3"])
        other.forget("a@3")
        assert [row.step for row in other.pull(store, ["a@3"]).forgotten] == [3]
        other.undo()
        assert [row.step for row in other.pull(store, ["a@3"]).there] == [3]


def test_a_base_was_freed_before_a_version_comes_back(store: ckstore.Store) -> None:
    store.forget("a@1")
    store.forget("a@0", prune=True)
    [row] = store.undo().versions
    assert (row.depth, row.base) == (0, True)
    check(store, [1, 2, 3, 4])


@pytest.mark.local
def test_a_child_is_encoded_while_its_parent_is_forgotten(store: ckstore.Store) -> None:
    with mock.patch.object(BackgroundEncoder, "begin"):
        store.ingest({"w": values(5)}, run="a", step=5, metrics={"loss": 1.0 / 6}, policy=Policy(hot=1))
    assert store["a@5"].hot
    store.forget("a@4")
    store.encode()
    check(store, [0, 1, 2, 3, 5])
    store.undo()
    check(store, list(range(6)))
    path = store.path
    store.close()
    assert recover(path).problems == []
    with ckstore.open(path) as store:
        check(store, list(range(6)))


def test_objects_move_while_a_version_is_forgotten(store: ckstore.Store) -> None:
    """Thinning and rebasing move the objects of the others, and collections rewrite packs."""
    store.forget("a@2")
    store.thin("a@1", prune=True)
    store.rebase("a@3")
    store.gc()
    store.undo()
    np.testing.assert_array_equal(store["a@2"]["w"][:], values(2))
    assert store.verify().problems == []


@pytest.mark.parametrize("collects", [False, True])
def test_thinned_versions_become_exact_again(store: ckstore.Store, collects: bool) -> None:
    """Those of one call together, also after a collection, and if others were stored against them."""
    store.thin("a@3")
    store.thin(["a@0", "a@1"])
    assert store.log(forgotten=True).values("step") == [0, 1, 3]
    if collects:
        report = store.gc()
        assert report.kept > 0
        assert report.until
    assert [row.step for row in store.undo().versions] == [0, 1]
    assert [row.fidelity for row in store._catalog.versions()] == ["exact"] * 3 + ["coarse", "exact"]
    assert [row.step for row in store.undo().versions] == [3]
    check(store, list(range(5)))
    with pytest.raises(NotFoundError, match="Nothing to undo"):
        store.undo()
    store.gc(grace=0)
    check(store, list(range(5)))


@pytest.mark.local
def test_a_recovery_keeps_what_was_thinned_and_undone(store: ckstore.Store) -> None:
    store.thin(["a@1", "a@2"])
    store.undo()
    store.thin("a@2")
    path = store.path
    for undone in (False, True):
        store.close()
        (path / "catalog.sqlite").unlink()
        assert recover(path).problems == []
        store = ckstore.open(path)
        assert store["a@2"].fidelity == ("exact" if undone else "coarse")
        if not undone:
            assert store.verify().problems == []
            store.undo()
        check(store, list(range(5))) if undone else None
    store.close()


def test_exact_values_are_garbage_after_the_grace_time(store: ckstore.Store) -> None:
    store.thin("a@1..a@2")
    report = store.gc()
    assert report.bytes < report.kept
    assert store.gc(grace=0).bytes > 0.5 * report.kept
    with pytest.raises(NotFoundError):
        store.undo()
    assert [row.fidelity for row in store._catalog.versions()] == ["exact", "coarse", "coarse", "exact", "exact"]
    assert store.verify().problems == []


@pytest.mark.parametrize("by", ["prune", "policy", "forget"])
def test_versions_that_are_thinned_for_good(store: ckstore.Store, by: str) -> None:
    if by == "prune":
        assert store.thin(["a@0", "a@1"], prune=True).freed > 0
    elif by == "policy":
        store.set_policy(Policy(retention=Retention(exact_last=3)), "a")
        store.retain("a")
    else:
        store.thin(["a@0", "a@1"])
        store.forget(["a@0", "a@1"], prune=True)
    with pytest.raises(NotFoundError):
        store.undo()
    assert store.verify().problems == []


def test_a_thinning_that_another_process_undoes_first(store: ckstore.Store) -> None:
    store.forget("a@4")
    store.thin("a@1")
    make_exact = forget._make_exact

    def later(repository: Repository) -> object:
        make_exact(repository)  # By the other process.
        return make_exact(repository)

    with mock.patch.object(forget, "_make_exact", later):
        assert [row.step for row in store.undo().versions] == [4]
    store.thin("a@1")
    with mock.patch.object(forget, "_make_exact", later), pytest.raises(NotFoundError, match="Nothing to undo"):
        store.undo()
    check(store, list(range(5)))


def test_a_thinned_version_is_forgotten_and_both_are_undone(store: ckstore.Store) -> None:
    store.thin("a@1")
    store.forget("a@1")
    store.gc()
    assert store.undo().versions[0].fidelity == "coarse"
    assert store.undo().versions[0].fidelity == "exact"
    check(store, list(range(5)))
