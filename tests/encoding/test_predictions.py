"""Predictions: estimated sizes are reused for later versions, until actual sizes deviate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.encoding.exact import ObjectEncoder
from ckstore.lineage.predictions import CHANGE, EXCESS, MOST_VERSIONS, SLACK, Predictions
from tests.checkpoints import draw, scratch

STEPS = 12

#: Chains may be long.
BUDGET = 9


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch() as path:
        yield path


def state(step: int, scale: float = 1e-3) -> dict[str, Any]:
    """A weight that moves by `scale` a step, and a moment that forgets the step before by a tenth."""
    weight, moment = draw(500, 512), torch.zeros(500, 512)
    for number in range(1, step + 1):
        gradient = draw(500, 512, seed=number)
        moment = 0.9 * moment + 0.1 * gradient
        weight = weight + scale * gradient
    return {"weight": weight, "moment": moment}


def stored(store: ckstore.Store, states: list[dict[str, Any]], first: int = 0) -> list[int]:
    """Bytes of each of some versions; all are there afterwards, bit for bit."""
    sizes = []
    for step, values in enumerate(states, first):
        row = store.ingest(values, run="r", step=step, hot=0, budget=BUDGET).version
        sizes.append(row.stored_bytes)
        restored = store[row.number].state_dict()
        assert all(torch.equal(restored[name], values[name]) for name in values)
    return sizes


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records events from now on: `estimated` for each sampled object."""
    made: list[str] = []
    for name in ("_estimate_linear", "_estimate_ordinal"):
        before = getattr(ObjectEncoder, name)

        def counted(*args: Any, before: Any = before) -> Any:
            made.append("estimated")
            return before(*args)

        monkeypatch.setattr(ObjectEncoder, name, counted)
    return made


def test_valid_predictions_are_not_estimated_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [state(step) for step in range(STEPS)]
    made = calls(monkeypatch)
    with ckstore.init(directory / "kept") as store:
        kept = stored(store, states)
        costs = [row.cost for row in store.catalog.versions()]
    assert len(made) < 1.5 * STEPS
    monkeypatch.setattr(ObjectEncoder, "remember", lambda *_: None)
    made.clear()
    with ckstore.init(directory / "fresh") as store:
        fresh = stored(store, states)
    assert len(made) == 2 * STEPS
    assert sum(kept) < 1.003 * sum(fresh)
    assert max(costs) <= BUDGET


def test_an_object_far_above_its_prediction_is_planned_again_before_it_is_stored(directory: Path) -> None:
    states = [state(step) for step in range(STEPS)]
    other = {name: draw(500, 512, seed=90 + number) * 100 for number, name in enumerate(("weight", "moment"))}
    with ckstore.init(directory / "store") as store, ckstore.init(directory / "alone") as alone:
        stored(store, states)
        (size,) = stored(store, [other], STEPS)
        (in_full,) = stored(alone, [other])
        assert size <= 1.01 * in_full
        # The next version is stored against it, and has predictions again.
        after = [{name: value + draw(500, 512, seed=5, scale=1e-2) for name, value in other.items()}]
        assert stored(store, after, STEPS + 1)[0] < size
        assert store.verify().problems == []


def test_an_object_below_its_prediction_is_estimated_the_next_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [state(step) for step in range(STEPS)]
    quiet = [
        {name: value + draw(500, 512, seed=7 + n, scale=1e-6) for name, value in states[-1].items()} for n in (1, 2)
    ]
    with ckstore.init(directory / "store") as store:
        stored(store, states)
        (first,) = stored(store, quiet[:1], STEPS)
        made = calls(monkeypatch)
        (second,) = stored(store, quiet[1:], STEPS + 1)
        assert len(made) == 2  # The version before was smaller than predicted.
        assert second < first


def test_a_factor_is_found_each_time(directory: Path) -> None:
    """A moment without gradients decays by a factor: once it gets gradients, the factor is gone, and comes back."""
    rng = np.random.default_rng(1)
    moment = rng.normal(size=300_000).astype(np.float32)
    with ckstore.init(directory / "store") as store:
        sizes = []
        for step in range(9):
            moving = 3 <= step < 6
            moment = (moment * np.float32(0.9) + moving * rng.normal(size=moment.size)).astype(np.float32)
            sizes += stored(store, [{"moment": torch.from_numpy(moment.copy())}], step)
        assert max(sizes[1:3] + sizes[7:]) < min(sizes[3:6]) / 5


def test_sizes_by_place() -> None:
    known = Predictions({("delta", 0): 5.0, ("delta", 1): 7.0, ("delta", 4): 8.0, ("base", 0): 9.0})
    assert known.at(["delta"], [0, 1, 9]) == {**known.sizes, ("delta", 9): 8.0}
    assert known.at(["context"], [0]) is None
    assert Predictions({("delta", 0): 5.0}).at(["delta"], [0, 1]) is None
    assert Predictions({("delta", 0): 5.0, ("delta", 1): 5.0}).at(["delta"], [2]) is None


def test_sizes_hold_for_longer_each_time_that_they_are_found_again() -> None:
    known, lasts = Predictions({("natural", 0): 1e5}), []
    for _ in range(5):
        known = known.found({("natural", 0): 1e5})
        lasts.append(known.lasts)
    assert lasts == [1, 3, 7, 15, 15]
    assert MOST_VERSIONS == 15


def test_sizes_that_change_do_not_hold() -> None:
    known = Predictions({("natural", 0): 1e5, ("natural", 1): 1e5}, lasts=3)
    assert known.found({("natural", 0): 1e5 * (1 + 0.9 * CHANGE), ("natural", 1): 2e5}).lasts == 7
    assert known.found({("natural", 0): 1e5 * (1 + 1.1 * CHANGE)}).lasts == 0


def test_how_long_sizes_hold() -> None:
    known = Predictions({("delta", 0): 1e5}, lasts=3).after([(1.03e5, 1e5)])
    for left in (3, 2, 1):
        assert known.left == left
        known = known.after([(1.03e5, 1e5)])
    assert known.left == 0


def test_when_sizes_no_longer_hold() -> None:
    first = Predictions({}, lasts=2).after([(1.03e5, 1e5), (1e6, 1e6)])
    for change, left in ((1 + 0.9 * SLACK, 1), (1 + 1.1 * SLACK, 0), (1 - 1.1 * SLACK, 0)):
        assert first.after([(1.03e5 * change, 1e5), (1e6, 1e6)]).left == left
    assert first.is_exceeded([(1.03e5, 1e5), (1e6 + 1.11e6 * EXCESS + 2e3, 1e6)])
    assert not first.is_exceeded([(1.03e5, 1e5), (1e6 + 1.1e6 * EXCESS, 1e6)])
    assert not Predictions({}).is_exceeded([(9e9, 1e5)])
