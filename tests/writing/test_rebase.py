"""Rebase: its rows in the catalog, and when it applies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.commit import change as commit
from ckstore.commit import costs, in_full
from ckstore.encoding.budget import BUDGET, PLANNED
from ckstore.errors import NotFoundError
from ckstore.recovery.recover import recover
from ckstore.storage.catalog import Catalog
from ckstore.writing import rebase
from tests.checkpoints import pack_bytes, settled


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """Four versions of one run, each stored against the one before."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((300, 300)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as opened:
        for step in range(4):
            opened.ingest({"w": values}, run="a", step=step, max_restore_cost=9)
            values = values + (1e-3 * generator.standard_normal((300, 300))).astype(np.float32)
        opened.encode()
        assert [row.depth for row in settled(opened)._catalog.versions()] == [0, 1, 2, 3]
        yield opened


def test_versions_that_follow_a_rebased_one_cost_less(store: ckstore.Store) -> None:
    before = {row.number: row.cost for row in store._catalog.versions()}
    packs = {pack.name for pack in store._catalog.packs()}
    store.rebase(["a@2"])
    rows = store._catalog.versions()
    assert [row.depth for row in rows] == [0, 1, 0, 1]
    assert [row.base for row in rows] == [True, False, True, False]
    assert [row.cost < before[row.number] for row in rows] == [False, False, True, True]
    for row in rows:
        assert costs.restore_cost(store[row.number]._stored) == (row.cost, row.depth)
    new = {pack.name for pack in store._catalog.packs()} - packs
    [record] = [record for record in store._catalog.log_records() if record["change"] == "rebase"]
    assert set(record["packs"]) == new != set()


def test_costs_follow_a_thinning_during_a_rebase(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither knows the objects that the other stores again, and the last one to commit corrects the costs."""
    present = in_full.present_costs

    def present_before_the_other(*arguments: Any) -> costs.Costs:
        found = present(*arguments)
        with ckstore.open(store.path) as other:
            other.thin(["a@1"])
        return found

    monkeypatch.setattr(in_full, "present_costs", present_before_the_other)
    store.rebase(["a@2"])
    assert store.verify().problems == []


def test_stored_bytes_follow(store: ckstore.Store) -> None:
    """`log` says how many bytes a version takes, before and after the superseded ones go."""
    store.rebase(["a@2", "a@3"])
    rows = store._catalog.versions()
    assert sum(row.stored_bytes for row in rows) == pytest.approx(pack_bytes(store.place), rel=0.01)
    assert store.verify().problems == []
    freed = store.gc().bytes
    after = store._catalog.versions()
    assert sum(row.stored_bytes for row in after) == pytest.approx(pack_bytes(store.place), rel=0.01)
    assert sum(row.stored_bytes for row in rows) - sum(row.stored_bytes for row in after) == pytest.approx(
        freed, rel=0.01
    )
    assert store.verify().problems == []
    recover(store.place)
    assert store._catalog.versions() == after


def test_costs_that_others_have_written_since_stay(store: ckstore.Store) -> None:
    catalog = store._catalog
    catalog.update_version(3, cost=7.0)
    catalog.update_version(4, cost=8.0)
    found = costs.present_costs(store._repository, catalog.versions())
    assert set(found) == {3, 4}
    catalog.update_version(4, cost=9.0)
    costs.write_costs(catalog, found)
    assert catalog.version(3).cost < 2
    assert catalog.version(4).cost == 9.0


def test_others_may_write_while_costs_are_taken(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of a long run take long: every manifest is decoded. Versions forgotten in between stay forgotten."""
    restore_cost, taken = costs.restore_cost, []

    def interposed(version: Any) -> tuple[float, int]:
        if not taken:
            with Catalog(store.path, "a", timeout=0.05) as other:
                other.forget_versions([4])
        taken.append(version.row.number)
        return restore_cost(version)

    monkeypatch.setattr(costs, "restore_cost", interposed)
    store.rebase(["a@2"])
    assert taken[:2] == [3, 4], "version 2 needs no object that moved"
    assert taken[2:] == [3], "after the commit, since others may have moved objects, too"
    assert [row.depth for row in store._catalog.versions()] == [0, 1, 0]


@pytest.mark.parametrize("change", ["thin", "forget"])
def test_a_version_that_others_change_before_it_is_looked_at(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The versions that exist by then are stored in full; a forgotten one is reported."""
    beyond, changed = rebase._beyond, []

    def late(*arguments: Any) -> Any:
        if not changed:
            changed.append(change)
            with ckstore.open(store.place) as other:
                getattr(other, change)(["a@3"])
                other.gc(grace=0)
        return beyond(*arguments)

    monkeypatch.setattr(rebase, "_beyond", late)
    if change == "thin":
        store.rebase(["a@3"])
        assert store["a@3"].fidelity == "coarse"
        assert store["a@3"].depth == 0
    else:
        with pytest.raises(NotFoundError, match="version 4"):
            store.rebase(["a@3"])
    assert store.verify().problems == []


def test_places_and_costs_change_at_once(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store._catalog.versions()

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(commit, "write_costs", fail)
    with pytest.raises(ZeroDivisionError):
        store.rebase(["a@2"])
    monkeypatch.undo()
    assert store._catalog.versions() == before
    assert store.verify().problems == []
    store.rebase(["a@2"])
    assert store.verify().problems == []


@pytest.mark.parametrize("shape", [(10,), (20_000,)], ids=["alone", "with a constant tensor"])
def test_a_level_costs_something_however_little_it_holds(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Packs are opened for it: the chains of small checkpoints end, too."""
    generator = np.random.default_rng(0)
    weights, frozen = generator.normal(size=2000), generator.normal(size=shape).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(40):
            store.ingest({"w": weights, "frozen": frozen}, run="r", step=step, hot=0)
            weights[step] += 1
        rows = store._catalog.versions()
        assert 1 < max(row.depth for row in rows) < 15
        # Another level would exceed the plan, which rests on estimated sizes.
        level, most = rows[1].cost - rows[0].cost, max(row.cost for row in rows)
        assert PLANNED * BUDGET - level < most <= PLANNED * BUDGET


def test_a_version_that_was_hot_when_it_was_looked_up(tmp_path: Path) -> None:
    """The process remembers that the object is raw; another one has encoded it since."""
    pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": values}, run="a", step=0)
        [identity] = store["a@0"]._stored.document.objects
        assert store._repository.resolver.record(identity).kind == "raw"
        with ckstore.open(store.place) as other:
            other.encode()
        assert store.rebase(["a@0"]).objects == 0
        np.testing.assert_array_equal(store["a@0"].state_dict()["w"], values)


def test_a_hot_version_is_read_from_the_object_that_another_has_encoded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    first = generator.normal(size=70_000)
    second = first + generator.normal(size=70_000) * 1e-4
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"a": first}, run="q", step=0, hot=0)
        store.ingest({"a": second}, run="r", step=0, hot=2)
        store.ingest({"a": second}, run="q", step=1, hot=0)
        assert store["q@1"].depth == 1
        store.rebase()
        for name in ("r@0", "q@1"):
            np.testing.assert_array_equal(store[name].state_dict()["a"], second)
        store.encode()
        np.testing.assert_array_equal(store["r@0"].state_dict()["a"], second)
        assert store.verify().problems == []
