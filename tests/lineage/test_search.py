"""The configuration search against exhaustive search, on random monotone qualities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.schemes.dynaquant import LEVELS, PROTECT, PRUNE, DynaQuantSettings
from ckstore.errors import UsageError
from ckstore.lineage.search import MOST_EVALUATIONS, Axis, Cube, dynaquant_cube, ladder, search

CUBE = dynaquant_cube()


def monotone(seed: int, cube: Cube[Any] = CUBE) -> Callable[[Any], float]:
    """A degradation that never falls along an ordered axis, between 0 and about 1, with steps and plateaus."""
    rng = np.random.default_rng(seed)
    shape = [len(axis.values) for axis in cube.axes]
    table = rng.random(shape) * (rng.random(shape) < 0.3)
    for number, axis in enumerate(cube.axes):
        if axis.ordered:
            table = np.cumsum(table, axis=number)
    table /= max(table.max(), 1e-9)
    return lambda settings: float(table[cube.find(settings)])


def smallest(evaluate: Callable[[Any], float], epsilon: float, cube: Cube[Any] = CUBE) -> float | None:
    sizes = [cube.size(settings) for settings in cube.settings.values() if evaluate(settings) <= epsilon]
    return min(sizes, default=None)


def counted(evaluate: Callable[[Any], float]) -> tuple[Callable[[Any], float], list[Any]]:
    calls: list[Any] = []

    def call(settings: Any) -> float:
        calls.append(settings)
        return evaluate(settings)

    return call, calls


def test_the_papers_cube_has_216_points():
    assert len(CUBE.settings) == 216
    assert CUBE.settings[0, 0, 0, 0] == DynaQuantSettings(32, 0.0, 0.01, "magnitude")
    assert CUBE.settings[5, 5, 2, 1] == DynaQuantSettings(4, 0.5, 0.0005, "sensitivity")
    first, second = CUBE.diagonals()
    assert first[0] == (0, 0, 0, 0)
    assert first[-1] == (5, 5, 2, 0)
    assert second[-1] == (5, 5, 2, 1)


@given(st.integers(0, 2**32 - 1), st.floats(-0.1, 1.1))
def test_the_first_search_finds_the_smallest_that_is_tolerated(seed, epsilon):
    evaluate, calls = counted(monotone(seed))
    found = search(evaluate, epsilon, CUBE)
    best = smallest(monotone(seed), epsilon)
    assert found.accepted == (best is not None)
    assert found.evaluations == len(calls) == len(set(calls)), "nothing is evaluated twice"
    assert found.degradation == monotone(seed)(found.settings)
    if best is None:
        assert found.settings == CUBE.settings[0, 0, 0, 0]
    else:
        assert CUBE.size(found.settings) == best
    assert found.evaluations <= 60


@given(st.integers(0, 2**32 - 1), st.floats(-0.1, 1.1), st.integers(0, 215))
def test_later_searches_are_short_and_never_more_aggressive(seed, epsilon, place):
    position, last = list(CUBE.settings.items())[place]
    evaluate, calls = counted(monotone(seed))
    found = search(evaluate, epsilon, CUBE, last)
    assert found.evaluations == len(calls) <= MOST_EVALUATIONS
    assert all(one <= other for one, other in zip(CUBE.find(found.settings)[:3], position[:3], strict=True))
    assert found.accepted == (found.degradation <= epsilon)
    if monotone(seed)(last) <= epsilon:
        assert found.settings == last
        assert found.evaluations == 1
    elif not found.accepted:
        assert monotone(seed)(CUBE.settings[0, 0, 0, position[3]]) > epsilon


@given(st.integers(0, 2**32 - 1))
def test_a_run_that_becomes_sensitive_is_followed(seed):
    """The tolerance shrinks from version to version; every search begins at the last choice."""
    evaluate = monotone(seed)
    found = search(evaluate, 1.0, CUBE)
    assert CUBE.find(found.settings)[:3] == (5, 5, 2), "everything is tolerated at first"
    for epsilon in (0.8, 0.5, 0.2, 0.1, 0.05):
        found = search(evaluate, epsilon, CUBE, found.settings)
        assert found.evaluations <= MOST_EVALUATIONS
        assert found.accepted == (found.degradation <= epsilon)


def test_degradation_that_is_not_a_number_fails():
    found = search(lambda settings: float("nan"), 1.0, CUBE, CUBE.settings[3, 3, 1, 0])
    assert not found.accepted
    assert found.settings == CUBE.settings[0, 0, 0, 0]
    assert found.evaluations <= MOST_EVALUATIONS


@pytest.mark.parametrize("size", [1, 2, 7, 130, 2000])
def test_a_ladder_is_bisected(size):
    steps = ladder([f"q{number}" for number in range(size)])
    for limit in sorted({-1, 0, min(1, size - 1), size // 3, max(size - 2, 0), size - 1}):
        found = search(lambda name, limit=limit: float(int(name[1:]) > limit), 0.0, steps)
        assert found.accepted == (limit >= 0)
        assert found.settings == f"q{max(limit, 0)}"
        assert found.evaluations <= size.bit_length() + 1
        later = search(lambda name, limit=limit: float(int(name[1:]) > limit), 0.0, steps, f"q{size - 1}")
        assert later.accepted == found.accepted
        assert later.settings == found.settings
        assert later.evaluations <= MOST_EVALUATIONS


def test_evaluations_that_contradict_themselves_end_all_the_same():
    rng = np.random.default_rng(1)
    for last in (None, DynaQuantSettings(LEVELS[4], PRUNE[4], PROTECT[2])):
        for _ in range(50):
            evaluate, calls = counted(lambda settings: float(rng.random()))
            found = search(evaluate, 0.3, CUBE, last)
            assert len(calls) == len(set(calls)) == found.evaluations
            assert found.accepted == (found.degradation <= 0.3)
            if last is not None:
                assert found.evaluations <= MOST_EVALUATIONS


def test_settings_that_are_no_point_of_the_cube_are_refused():
    with pytest.raises(UsageError, match="search space"):
        search(lambda settings: 0.0, 1.0, CUBE, DynaQuantSettings(5))


def test_axes_without_order_alone_are_tried_one_by_one():
    cube = Cube((Axis(("a", "b", "c"), ordered=False),), str, lambda name: {"a": 3.0, "b": 1.0, "c": 2.0}[name])
    assert search(lambda name: float(name == "b"), 0.0, cube).settings == "c"
    assert search(lambda name: float(name != "a"), 0.0, cube, "b").settings == "a"
