"""Two operations on one store whose steps a seed shuffles: their outcome equals that of one after the other.

A sample that `CKSTORE_DEATHS_SEED` chooses; with `CKSTORE_DEATHS=all` every pair of operations under several seeds,
with a death and without. The number of interleavings is printed.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckstore.errors import CkstoreError
from ckstore.recovery.recover import recover
from tests.interleaving import interleaved
from tests.points_of_death import DIED, REFUSED
from tests.test_points_of_death import ALL, OPERATIONS, SEED, pristine, state, without_uids

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]

__all__ = ["pristine"]

PAIRS = list(itertools.combinations(OPERATIONS, 2)) + [(name, name) for name in OPERATIONS]
#: Interleavings of a pair where all are asked for, half of them with a death; of the sample; the last step of a death.
SEEDS, SAMPLE, STEPS = 4, 6, 60


def sample() -> list[tuple[str, str, int]]:
    """Return pairs and seeds; an odd seed is that of a death."""
    if ALL:
        return [(*pair, seed) for pair in PAIRS for seed in range(SEEDS)]
    chosen = random.Random(SEED)
    beside_recover = [pair for pair in PAIRS if "recover" in pair]
    pairs = [chosen.choice(beside_recover) for _ in range(SAMPLE // 2)] + chosen.sample(PAIRS, SAMPLE // 2)
    return [(*pair, chosen.randrange(1000)) for pair in pairs]


def copied(pristine: Path, label: str) -> Path:
    place = pristine.parent / label
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(pristine, place)
    return place


@pytest.fixture(scope="module")
def after(pristine: Path) -> Callable[..., Any]:
    """Return the state after some operations, one after the other; a refused one changes nothing."""
    known: dict[tuple[str, ...], Any] = {}

    def found(*names: str) -> Any:
        if names not in known:
            path = copied(pristine, "sequence")
            for name in names:
                try:
                    OPERATIONS[name](path)
                except CkstoreError:
                    assert len(names) > 1, name
            known[names] = without_uids(state(path))
        return known[names]

    return found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_operations_at_once(pristine: Path, after: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    tried = turns = deaths = refusals = 0
    for first, second, seed in sample():
        path = copied(pristine, "shared")
        dies = random.Random(seed).randint(1, STEPS) if seed % 2 else 0
        codes = interleaved(OPERATIONS[first], OPERATIONS[second], path, seed, dies)
        where = f"{first}, {second}, seed {seed}, death at {dies}: exits {codes[:2]}"
        assert codes[0] in (0, REFUSED), where
        assert codes[1] in (0, REFUSED, DIED), where
        allowed = [after(first, second), after(second, first)]
        allowed += [after(first)] * (codes[1] != 0) + [after(second)] * (codes[0] != 0)
        allowed += [after()] * (codes[0] != 0 and codes[1] != 0)
        for _ in range(2):
            found = without_uids(state(path))
            assert found in allowed, f"{where}: {found}"
            assert recover(path).problems == [], where
        tried += 1
        turns += codes[2]
        deaths += codes[1] == DIED
        refusals += codes[:2].count(REFUSED)
    assert turns > tried, "they take turns"
    with capsys.disabled():
        print(f"\n{tried} interleavings, {turns} turns, {deaths} deaths, {refusals} refusals")
