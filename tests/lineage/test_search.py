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
from ckstore.lineage.search import STEPS, Axis, Box, Cube, dynaquant_cube, ladder, search

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
    places = {settings: position for position, settings in cube.settings.items()}
    return lambda settings: float(table[places[settings]])


def sizes_of(seed: int, cube: Cube[Any] = CUBE) -> Callable[[Any], float]:
    """Sizes that never rise along an ordered axis, and that no formula tells."""
    rises = monotone(seed + 1, cube)
    return lambda settings: 1000 - 900 * rises(settings)


def smallest(evaluate: Callable[[Any], float], size: Callable[[Any], float], epsilon: float) -> float | None:
    return min((size(settings) for settings in CUBE.settings.values() if evaluate(settings) <= epsilon), default=None)


def counted(function: Callable[[Any], float]) -> tuple[Callable[[Any], float], list[Any]]:
    calls: list[Any] = []

    def call(settings: Any) -> float:
        calls.append(settings)
        return function(settings)

    return call, calls


def test_the_papers_cube_has_432_points():
    assert len(CUBE.settings) == 432
    assert CUBE.settings[0, 0, 0, 0, 0] == DynaQuantSettings(32, 0.0, 0.01, "magnitude", 32)
    assert CUBE.settings[5, 5, 2, 1, 1] == DynaQuantSettings(4, 0.5, 0.0005, "sensitivity", 16)
    assert CUBE.boxes() == [Box((0, 0, 0, metric, 0), (5, 5, 2, metric, 1)) for metric in range(2)]
    diagonal = CUBE.boxes()[1].diagonal()
    assert (diagonal[0], diagonal[-1], len(diagonal)) == ((0, 0, 0, 1, 0), (5, 5, 2, 1, 1), 6)


@given(st.integers(0, 2**32 - 1))
def test_the_rest_of_a_box_does_not_reach_beyond_a_position(seed):
    rng = np.random.default_rng(seed)
    box = CUBE.boxes()[0]
    failed = tuple(int(rng.integers(high + 1)) for high in box.aggressive)

    def inside(part: Box) -> list[tuple[int, ...]]:
        return [
            place
            for place in CUBE.settings
            if CUBE.reaches(part.gentle, place)
            and all(index <= high for index, high in zip(place, part.aggressive, strict=True))
            and place[3] == 0
        ]

    left = [place for part in box.without(failed) for place in inside(part)]
    assert sorted(left) == sorted(place for place in inside(box) if not CUBE.reaches(failed, place))


@given(st.integers(0, 2**32 - 1), st.floats(-0.1, 1.1))
def test_the_first_search_finds_the_smallest_that_is_tolerated(seed, epsilon):
    evaluate, calls = counted(monotone(seed))
    size, written = counted(sizes_of(seed))
    found = search(evaluate, size, epsilon, CUBE)
    best = smallest(monotone(seed), sizes_of(seed), epsilon)
    assert found.accepted == (best is not None)
    assert found.evaluations == len(calls) == len(set(calls)), "nothing is evaluated twice"
    assert len(written) == len(set(written)), "nothing is written twice for its size"
    assert found.degradation == monotone(seed)(found.settings)
    if best is None:
        assert found.settings == CUBE.settings[0, 0, 0, 0, 0]
    else:
        assert sizes_of(seed)(found.settings) == best
    assert found.evaluations <= len(CUBE.settings) // 4


@given(st.integers(0, 2**32 - 1), st.floats(-0.1, 1.1), st.integers(0, 431))
def test_later_searches_go_on_from_the_last_choice(seed, epsilon, place):
    position, last = list(CUBE.settings.items())[place]
    evaluate, calls = counted(monotone(seed))
    found = search(evaluate, sizes_of(seed), epsilon, CUBE, last)
    assert found.evaluations == len(calls) == len(set(calls))
    assert found.accepted == (found.degradation <= epsilon)
    other = CUBE.settings[CUBE.others(position)[0]]
    assert calls[:2] == [other, last], "the other metric comes first"
    kept = [settings for settings in (last, other) if monotone(seed)(settings) <= epsilon]
    if kept:
        assert found.evaluations == 2
        assert sizes_of(seed)(found.settings) == min(map(sizes_of(seed), kept))
        return
    better = min((last, other), key=monotone(seed))
    near = [CUBE.settings[one] for one in CUBE.gentler(CUBE.find(better), STEPS)]
    tolerated = [settings for settings in near if monotone(seed)(settings) <= epsilon]
    if tolerated:
        assert sizes_of(seed)(found.settings) == min(map(sizes_of(seed), tolerated))
        assert set(calls[2:]) <= set(near)
        passed = [settings for settings in calls if monotone(seed)(settings) <= epsilon]
        assert passed == calls[-1:], "the first that is tolerated ends it: it is the smallest"
    else:
        best = smallest(monotone(seed), sizes_of(seed), epsilon)
        assert found.accepted == (best is not None), "nothing is given up before all has been searched"
        assert best is None or sizes_of(seed)(found.settings) == best


def test_neighbours_are_gentler_by_a_few_steps():
    near = CUBE.gentler((3, 2, 0, 1, 1), 2)
    assert len(near) == 3 + 5
    assert (3, 2, 0, 1, 1) not in near
    assert all(CUBE.reaches(one, (3, 2, 0, 1, 1)) and 1 <= 7 - sum(one) <= 2 for one in near)
    assert CUBE.gentler((0, 0, 0, 1, 0), 2) == []


def test_bytes_decide_and_not_the_bits_of_the_levels():
    """Of two settings that are tolerated the one that is written in fewer bytes, though it has more levels."""
    cube: Cube[Any] = Cube((Axis((16, 8)), Axis((0.0, 0.3))), lambda levels, prune: (levels, prune))
    degradations = {(16, 0.0): 0.0, (8, 0.0): 0.01, (16, 0.3): 0.01, (8, 0.3): 1.0}
    for sizes in ({(8, 0.0): 70, (16, 0.3): 60}, {(8, 0.0): 60, (16, 0.3): 70}):
        written = {(16, 0.0): 100, (8, 0.3): 50} | sizes
        for last in (None, (8, 0.3)):
            found = search(degradations.__getitem__, written.__getitem__, 0.05, cube, last)
            assert written[found.settings] == 60


@given(st.integers(0, 2**32 - 1))
def test_a_run_that_becomes_sensitive_is_followed(seed):
    """The tolerance shrinks from version to version; every search begins at the last choice."""
    evaluate, size = monotone(seed), sizes_of(seed)
    found = search(evaluate, size, 1.0, CUBE)
    assert size(found.settings) == smallest(evaluate, size, 1.0), "everything is tolerated at first"
    for epsilon in (0.8, 0.5, 0.2, 0.1, 0.05):
        found = search(evaluate, size, epsilon, CUBE, found.settings)
        assert found.accepted == (found.degradation <= epsilon)
        assert found.accepted == (smallest(evaluate, size, epsilon) is not None)


def test_degradation_that_is_not_a_number_fails():
    found = search(lambda settings: float("nan"), sizes_of(0), 1.0, CUBE, CUBE.settings[3, 3, 1, 0, 1])
    assert not found.accepted
    assert found.settings == CUBE.settings[0, 0, 0, 0, 0]
    assert found.evaluations <= 2 + 3 * STEPS**2 + 8


@pytest.mark.parametrize("size", [1, 2, 7, 130, 2000])
def test_a_ladder_is_bisected(size):
    steps = ladder([f"q{number}" for number in range(size)])
    for limit in sorted({-1, 0, min(1, size - 1), size // 3, max(size - 2, 0), size - 1}):

        def evaluate(name: str, limit: int = limit) -> float:
            return float(int(name[1:]) > limit)

        def bytes_of(name: str) -> float:
            return size - float(name[1:])

        found = search(evaluate, bytes_of, 0.0, steps)
        assert found.accepted == (limit >= 0)
        assert found.settings == f"q{max(limit, 0)}"
        assert found.evaluations <= size.bit_length() + 1
        later = search(evaluate, bytes_of, 0.0, steps, f"q{size - 1}")
        assert later.accepted == found.accepted
        assert later.settings == found.settings
        assert later.evaluations <= size.bit_length() + 1 + STEPS + 1


@given(st.floats(0.2, 3), st.floats(-20, 0), st.floats(-12, -4), st.booleans())
def test_a_model_finds_the_same_in_fewer_evaluations(power, loss, tolerance, stairs):
    """Three evaluations if the model is right, at most six whatever the true growth is; a bisection takes four."""
    qualities = [number / 2 for number in range(13)]

    def evaluate(octaves: float) -> float:
        return 2.0 ** (loss + power * (np.floor(octaves) if stairs else octaves))

    plain, modelled = (
        search(evaluate, lambda octaves: -octaves, 2.0**tolerance, ladder(qualities, growth)) for growth in (None, 1.0)
    )
    assert (modelled.settings, modelled.accepted) == (plain.settings, plain.accepted)
    assert modelled.evaluations <= (3 if 1.9 < power < 2.1 and not stairs else 6)


def test_evaluations_that_contradict_themselves_end_all_the_same():
    rng = np.random.default_rng(1)
    for last in (None, DynaQuantSettings(LEVELS[4], PRUNE[4], PROTECT[2], embedding_levels=16)):
        for _ in range(50):
            evaluate, calls = counted(lambda settings: float(rng.random()))
            found = search(evaluate, lambda settings: float(rng.random()), 0.3, CUBE, last)
            assert len(calls) == len(set(calls)) == found.evaluations
            assert found.accepted == (found.degradation <= 0.3)


def test_settings_that_are_no_point_of_the_cube_are_refused():
    with pytest.raises(UsageError, match="search space"):
        search(lambda settings: 0.0, lambda settings: 1.0, 1.0, CUBE, DynaQuantSettings(5))


def test_axes_without_order_alone_are_tried_one_by_one():
    sizes = {"a": 3.0, "b": 1.0, "c": 2.0}
    cube = Cube((Axis(("a", "b", "c"), ordered=False),), str)
    assert search(lambda name: float(name == "b"), sizes.__getitem__, 0.0, cube).settings == "c"
    assert search(lambda name: float(name != "a"), sizes.__getitem__, 0.0, cube, "b").settings == "a"


@pytest.mark.parametrize("bytes_of_a", [2.0, 1.0])
def test_nothing_is_evaluated_that_cannot_be_smaller(bytes_of_a: float) -> None:
    cube = Cube((Axis(("a", "b"), ordered=False),), str)
    evaluate, calls = counted(lambda name: 0.0)
    search(evaluate, {"a": bytes_of_a, "b": 1.0}.__getitem__, 0.0, cube)
    assert calls == ["b" if bytes_of_a > 1 else "a"]


def test_nothing_is_written_where_all_of_a_ladder_fails() -> None:
    size, written = counted(float)
    assert not search(lambda place: 1.0, size, 0.0, ladder(range(9))).accepted
    assert written == []


@pytest.mark.parametrize(("power", "loss", "stair"), [(2.61, -19.98, 0.5), (1.0, -11.5, 2.0)])
def test_a_model_takes_its_growth_from_two_degradations_that_differ(power: float, loss: float, stair: float) -> None:
    """A growth of a half, or of none between two equal ones, would take four or five evaluations."""

    def evaluate(octaves: float) -> float:
        return 2.0 ** (loss + power * stair * (octaves // stair))

    found = search(evaluate, lambda octaves: -octaves, 2.0**-8, ladder([number / 2 for number in range(13)], 1.0))
    assert found.evaluations == 3


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
def test_evaluated_settings_are_prefetched_without_changing_the_result(seed, epsilon, later):
    """Each evaluation is the first of the settings prefetched right before it."""
    evaluate, size = monotone(seed), sizes_of(seed)
    last = CUBE.settings[3, 3, 1, 0, 1] if later else None
    prefetched: list[Any] = []

    def prefetch(settings: Any) -> None:
        prefetched[:] = settings

    def asked(settings: Any) -> float:
        assert settings == prefetched[0]
        assert len(set(prefetched)) == len(prefetched)
        return evaluate(settings)

    found = search(asked, size, epsilon, CUBE, last, prefetch)
    assert found == search(evaluate, size, epsilon, CUBE, last)


@pytest.mark.parametrize(
    ("epsilon", "found"), [(0.05, [0.0, 1e-320, 1e-320, 1.0]), (1e-17, [0.0, 1e-20, 1e-20, 1e308])]
)
def test_degradations_of_any_size_have_a_model(epsilon: float, found: list[float]) -> None:
    """Their quotients with the tolerance overflow and underflow."""
    result = search(lambda place: found[place], lambda place: -place, epsilon, ladder(range(4), 1.0))
    assert (result.settings, result.accepted) == (2, True)
