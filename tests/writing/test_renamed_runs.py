"""A run gets another name: everything else about its versions stays, also in copies and after a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Retention
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.recovery.recover import recover
from tests.checkpoints import settled


def values(step: int) -> np.ndarray:
    """Return the weights of a step."""
    return np.random.default_rng(step).standard_normal((100, 200)).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """A store of three versions of a run and a fork of it."""
    with ckstore.init(tmp_path / "store") as store:
        store.set_policy(Policy(retention=Retention(keep_last=9)), "a")
        for step in range(3):
            store.ingest({"w": values(step)}, run="a", step=step)
        store.ingest({"w": values(7)}, run="fork", step=7, parent="a@1")
        store.tag("a@2", "best")
        settled(store)
        yield store


def check(store: ckstore.Store, steps: list[int]) -> None:
    """Check that the run has the other name and these steps, and all else as before."""
    run = store.run("b")
    assert run.steps == steps
    for version in run:
        assert version.step is not None
        np.testing.assert_array_equal(version["w"][:], values(version.step))
    assert "a" not in [row.name for row in store._catalog.runs()]
    assert store["best"].name == "b@2"
    assert store._catalog.resolve("fork@7").parent == store._catalog.resolve("b@1").number
    assert store._catalog.policies().keys() == {"b"}
    assert store.verify().problems == []


def test_a_run_has_another_name(store: ckstore.Store) -> None:
    before = [(row.number, row.uid, row.step, row.parent) for row in store._catalog.versions("a")]
    assert store.rename_run("a", "b").name == "b"
    assert [(row.number, row.uid, row.step, row.parent) for row in store._catalog.versions("b")] == before
    check(store, [0, 1, 2])
    store.ingest({"w": values(3)}, run="b", step=3)
    settled(store)
    assert store["b@3"].parent == store["b@2"].number
    check(store, [0, 1, 2, 3])
    store.rename_run("b", "c")
    store.rename_run("c", "b")
    store.encode()
    store.rebase("b@2")
    store.gc(grace=0)
    check(store, [0, 1, 2, 3])


def test_hot_versions_are_renamed(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"w": values(step)}, run="a", step=step)
        settled(store)
        store.rename_run("a", "b")
        assert store["b@1"].hot
        assert store.verify().problems == []
        store.encode()
        assert store.verify().problems == []


def test_names_that_are_taken_or_unknown(store: ckstore.Store) -> None:
    for name, error in (("fork", ConflictError), ("best", UsageError), ("17", UsageError), ("a", ConflictError)):
        with pytest.raises(error):
            store.rename_run("a", name)
    with pytest.raises(NotFoundError, match="near: fork"):
        store.rename_run("forks", "b")
    assert [row.name for row in store._catalog.runs()] == ["a", "fork"]


@pytest.mark.local
def test_a_recovery_keeps_the_name(store: ckstore.Store) -> None:
    store.rename_run("a", "b")
    store.ingest({"w": values(9)}, run="a", step=9)
    settled(store)
    path = store.path
    for catalog in (True, False):
        store.close()
        if not catalog:
            (path / "catalog.sqlite").unlink()
        assert recover(path).problems == []
        store = ckstore.open(path)
        assert store.run("b").steps == [0, 1, 2]
        assert store.run("a").steps == [9]
        assert store.verify().problems == []
    store.close()


@pytest.mark.local
def test_a_recovery_keeps_the_name_though_its_record_is_lost(store: ckstore.Store) -> None:
    """The current catalog has it; then the log has it again."""
    store.rename_run("a", "b")
    for step in range(3):
        store.ingest({"w": values(step + 5)}, run="a", step=step)
    settled(store)
    path = store.path
    store.close()
    (lost,) = (file for file in (path / "log").iterdir() if '"rename"' in file.read_text())
    lost.unlink()
    for catalog in (True, False):
        if not catalog:
            (path / "catalog.sqlite").unlink()
        recover(path)
        with ckstore.open(path) as opened:
            assert opened.run("b").steps == [0, 1, 2]
            assert opened.run("a").steps == [0, 1, 2]
            assert not [problem for problem in opened.verify().problems if "log" not in problem.lower()]


def test_forgotten_versions_come_back_under_the_name(store: ckstore.Store) -> None:
    store.forget("a@0")
    store.thin("a@1")
    store.rename_run("a", "b")
    assert store.log("b", forgotten=True).values("step") == [0, 1]
    store.undo()
    store.undo()
    check(store, [0, 1, 2])
    place = store.place
    store.close()
    assert recover(place).problems == []
    with ckstore.open(place) as store:
        check(store, [0, 1, 2])


def test_a_copy_has_the_name(store: ckstore.Store, tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "other") as other:
        other.pull(store, run="a")
        store.rename_run("a", "b")
        store.ingest({"w": values(3)}, run="b", step=3)
        settled(store)
        assert [row.step for row in other.pull(store, run="b").there] == [0, 1, 2]
        assert other.run("a").steps == [0, 1, 2]  # As it came.
        assert other._catalog.resolve("b@3").parent == other._catalog.resolve("a@2").number
    with ckstore.init(tmp_path / "third") as third:
        third.pull(store)
        store.tag("b@2", "best")
        third.tag("b@2", "best")
        assert third.run("b").steps == [0, 1, 2, 3]
        assert third["b@2"].id == store["b@2"].id
        assert third.verify().problems == []
        place = third.place
    assert recover(place).problems == []
    with ckstore.open(place) as third:
        assert third.run("b").steps == [0, 1, 2, 3]
