"""A run that goes on from an earlier version of its own: the versions after that one are superseded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError


def state(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.random.default_rng(seed).standard_normal((40, 40)).astype("f4")}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """Steps 4, 8 and 12 of the run `gpt`, as versions 1 to 3."""
    with ckstore.init(tmp_path / "store") as made:
        for step in (4, 8, 12):
            made.ingest(state(step), run="gpt", step=step)
        yield made


def superseded(store: ckstore.Store) -> list[int]:
    return [version.number for version in store.versions() if version.superseded]


def rows(store: ckstore.Store) -> list[tuple[Any, ...]]:
    return [(row.number, row.uid, row.run, row.step, row.parent, row.superseded) for row in store._catalog.versions()]


def is_whole(store: ckstore.Store) -> None:
    """Check that the store has no fault, and that a recovery gives the same rows, with and without the catalog."""
    path, before, problems = Path(store.path), rows(store), store.verify().problems
    assert problems == []
    names = {name: store[name].number for name in ("latest", "gpt", "gpt@latest")}
    for lost in (False, True):
        store.close()
        if lost:
            (path / "catalog.sqlite").unlink()
        assert ckstore.recover(path).problems == []
        with ckstore.open(path) as again:
            assert rows(again) == before
            assert {name: again[name].number for name in names} == names
            assert again.verify().problems == []


def test_the_versions_after_the_parent_are_superseded(store: ckstore.Store) -> None:
    version = store.ingest(state(1), run="gpt", step=6, parent="gpt@4").version
    assert (version.parent, version.superseded, superseded(store)) == (1, False, [2, 3])
    for name in ("latest", "gpt", "gpt@latest"):
        assert store[name].number == version.number
    # A default parent is the new tip.
    assert store.ingest(state(2), run="gpt", step=7).version.parent == version.number
    assert superseded(store) == [2, 3]
    is_whole(store)


def test_steps_of_superseded_versions_are_free(store: ckstore.Store) -> None:
    new = store.ingest(state(1), run="gpt", step=8, parent="gpt@4").version
    assert (store["gpt@8"].number, store[2].step, store[store[2].id].number) == (new.number, 8, 2)
    # A step that only a superseded version has means that version.
    assert store["gpt@12"].number == 3
    assert store.ingest(state(2), run="gpt", step=12).is_new
    assert store["gpt@12"].number == 5
    is_whole(store)


def test_the_step_of_an_ancestor_is_taken(store: ckstore.Store) -> None:
    with pytest.raises(ConflictError, match="holds other content as version 1"):
        store.ingest(state(1), run="gpt", step=4, parent="gpt@8")
    assert superseded(store) == []


def test_a_replaced_version_is_forgotten_and_the_others_are_superseded(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4", replace=True)
    assert [(version.number, version.superseded) for version in store.versions()] == [(1, False), (3, True), (4, False)]
    is_whole(store)


@pytest.mark.parametrize("parent", [None, "gpt@12", "auto"])
def test_the_tip_or_no_parent_supersedes_nothing(store: ckstore.Store, parent: str | None) -> None:
    store.ingest(state(1), run="gpt", step=16, parent=parent)
    store.ingest(state(4), run="gpt", step=20, parent="auto")
    assert superseded(store) == []


def test_the_version_with_the_highest_step_is_a_tip(store: ckstore.Store) -> None:
    """Earlier steps may be stored later; then the run goes on from its highest one."""
    store.ingest(state(6), run="gpt", step=6)
    store.ingest(state(1), run="gpt", step=16, parent="gpt@12")
    assert superseded(store) == []


def test_a_parent_in_another_run_supersedes_nothing(store: ckstore.Store) -> None:
    store.ingest(state(1), run="tuned", step=8, parent="gpt@4")
    assert (superseded(store), store["latest"].name) == ([], "tuned@8")


def test_going_back_to_a_superseded_version(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.ingest(state(2), run="gpt", step=12)
    version = store.ingest(state(3), run="gpt", step=16, parent=2).version
    # Version 3 came after version 2 on the first branch.
    assert (version.parent, superseded(store)) == (2, [3, 4, 5])
    assert (store["gpt@8"].number, store["gpt@12"].number, store["gpt"].number) == (2, 5, version.number)
    is_whole(store)


def test_equal_content_at_a_step_of_the_run_is_not_stored_again(store: ckstore.Store) -> None:
    assert not store.ingest(state(8), run="gpt", step=8, parent="gpt@4").is_new
    assert superseded(store) == []
    first = store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    again = store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    assert (again.is_new, again.version.number) == (False, first.version.number)
    # The content of a superseded version is a new version of the present branch.
    third = store.ingest(state(12), run="gpt", step=12)
    assert (third.is_new, third.version.parent) == (True, first.version.number)
    is_whole(store)


def test_versions_without_steps(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            store.ingest(state(seed), run="gpt")
        store.ingest(state(9), run="gpt", parent=1)
        assert (superseded(store), store["gpt"].number) == ([2, 3], 4)
        assert store.ingest(state(2), run="gpt").is_new
        assert not store.ingest(state(9), run="gpt").is_new
        is_whole(store)


def test_if_the_new_branch_is_forgotten_the_old_one_stays_superseded(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.forget("gpt@8")
    assert (store["gpt"].number, superseded(store)) == (1, [2, 3])
    store.forget(1)
    assert store["gpt"].number == 3
    # Only superseded versions are left: the next version makes its parent present.
    assert store.ingest(state(2), run="gpt", step=16).version.parent == 3
    assert superseded(store) == []
    is_whole(store)
