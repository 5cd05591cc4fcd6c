"""Finds a quantiser's settings: the smallest ones with a tolerated loss of quality, in few evaluations.

After Inshrinkerator's search (Agrawal et al., SoCC 2024), on one assumption: neither quality nor size rises as a
setting becomes more aggressive along an axis of the search space, so every position beyond a failure fails as well.
Pure logic: the caller evaluates settings, which is the expensive part, and writes them to measure the size.

first   bisect a diagonal of the cube, where a ladder's model of the degradation says; divide the positions neither
        beyond its first failure nor within its last success into smaller cubes; continue with the one of the smallest
        corner, until no corner is smaller than the best position
later   try the last choice with the other metric and with its own; if both fail, try the positions a few steps
        gentler, the smallest first, until one passes; else search as for the first time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from ckstore.codecs.schemes.dynaquant import EMBEDDING_LEVELS, LEVELS, METRICS, PROTECT, PRUNE, DynaQuantSettings
from ckstore.errors import UsageError
from ckstore.runtime.cached import cached_property

#: Evaluations from which a model that has not found the end is given up.
_MODELLED = 4

#: Maximal steps, along all axes together, by which a later search first tries gentler settings than the last choice.
STEPS = 2

Settings = TypeVar("Settings")
Position = tuple[int, ...]


class Axis(NamedTuple):
    """The values along one axis, from the gentlest to the most aggressive, or unordered (`ordered` false)."""

    values: tuple[Any, ...]
    ordered: bool = True


class Box(NamedTuple):
    """A part of a cube: all positions from its gentlest corner to its most aggressive one."""

    gentle: Position
    aggressive: Position

    def diagonal(self) -> list[Position]:
        """Return the positions from one corner to the other, a step at a time along the longest axis."""
        longest = max(map(int.__sub__, self.aggressive, self.gentle))
        return [
            tuple(
                low + round(step * (high - low) / max(longest, 1))
                for low, high in zip(self.gentle, self.aggressive, strict=True)
            )
            for step in range(longest + 1)
        ]

    def without(self, failed: Position) -> list[Box]:
        """Return disjoint boxes of the positions that remain without those from `failed` on."""
        left = []
        gentle = self.gentle
        for axis, (low, place) in enumerate(zip(self.gentle, failed, strict=True)):
            if place > low:
                left.append(Box(gentle, _with(self.aggressive, axis, place - 1)))
                gentle = _with(gentle, axis, place)
        return left


@dataclass(frozen=True)
class Cube(Generic[Settings]):
    """A search space of one axis or more; `build` makes settings of a value from each, all different.

    `growth` is the binary logarithm of the factor by which the degradation grows with each position of a ladder, where
    a model predicts it.
    """

    axes: tuple[Axis, ...]
    build: Callable[..., Settings]
    growth: float | None = None

    @cached_property
    def settings(self) -> dict[Position, Settings]:
        """The settings at each position, an index into each axis."""
        spans = [range(len(axis.values)) for axis in self.axes]
        return {
            position: self.build(*(axis.values[index] for axis, index in zip(self.axes, position, strict=True)))
            for position in product(*spans)
        }

    def find(self, settings: Settings) -> Position:
        """Return the position of settings; raise `UsageError` if the cube does not contain them."""
        for position, candidate in self.settings.items():
            if candidate == settings:
                return position
        raise UsageError(f"{settings} is not a point of the search space: search without a last choice.")

    def reaches(self, gentle: Position, aggressive: Position) -> bool:
        """Return whether one position is nowhere more aggressive than another, and equal on unordered axes."""
        return all(
            one <= other if axis.ordered else one == other
            for axis, one, other in zip(self.axes, gentle, aggressive, strict=True)
        )

    def boxes(self) -> list[Box]:
        """Return the whole cube: a box for each choice along the unordered axes."""
        return [
            Box(
                gentle,
                tuple(max(i, len(a.values) - 1) if a.ordered else i for a, i in zip(self.axes, gentle, strict=True)),
            )
            for gentle in product(*([0] if axis.ordered else range(len(axis.values)) for axis in self.axes))
        ]

    def others(self, position: Position) -> list[Position]:
        """Return the positions that differ along the unordered axes alone."""
        spans = [
            [index] if axis.ordered else range(len(axis.values))
            for axis, index in zip(self.axes, position, strict=True)
        ]
        return [other for other in product(*spans) if other != position]

    def gentler(self, position: Position, steps: int) -> list[Position]:
        """Return the positions that are gentler by at most `steps`, along all ordered axes together."""
        spans = [
            range(max(index - steps, 0), index + 1) if axis.ordered else [index]
            for axis, index in zip(self.axes, position, strict=True)
        ]
        return [other for other in product(*spans) if 0 < sum(position) - sum(other) <= steps]


@dataclass(frozen=True, slots=True)
class Found(Generic[Settings]):
    """The result of a search: the smallest settings within the tolerance, and the number of evaluations.

    If none was within it, `accepted` is false and the settings are the gentlest of all: store exactly.
    """

    settings: Settings
    degradation: float
    accepted: bool
    evaluations: int


def dynaquant_cube(metrics: tuple[str, ...] = METRICS) -> Cube[DynaQuantSettings]:
    """Return the paper's cube: levels, shares pruned and protected, pruning metric, and levels of embeddings."""
    axes = Axis(LEVELS), Axis(PRUNE), Axis(PROTECT), Axis(metrics, ordered=False), Axis(EMBEDDING_LEVELS)
    return Cube(axes, DynaQuantSettings)


def ladder(qualities: Sequence[Settings], growth: float | None = None) -> Cube[Settings]:
    """Return a search space of one dimension, from the gentlest to the most aggressive quality, without duplicates."""
    return Cube((Axis(tuple(qualities)),), lambda quality: quality, growth)


def search(
    evaluate: Callable[[Settings], float],
    size: Callable[[Settings], float],
    epsilon: float,
    cube: Cube[Settings],
    last: Settings | None = None,
    prefetch: Callable[[Sequence[Settings]], None] = lambda settings: None,
) -> Found[Settings]:
    """Find the smallest settings whose degradation is at most `epsilon`.

    `evaluate` returns the degradation, NaN for a failure. `size` returns the bytes as actually written; it is called
    once per settings, and for few. Of settings more aggressive than the `last` choice, some are chosen only if all
    nearby ones fail. `prefetch` is called before `evaluate` with the settings that are evaluated next or may follow;
    evaluating ahead does not change the result. Raise `UsageError` if the cube does not contain `last`.
    """
    probe = _Probe(evaluate, size, epsilon, cube, prefetch)
    if last is not None:
        probe.follow(cube.find(last))
    if probe.best is None:
        probe.conquer()
    chosen = cube.boxes()[0].gentle if probe.best is None else probe.best
    return Found(cube.settings[chosen], probe.degradations[chosen], probe.best is not None, len(probe.degradations))


class _Probe(Generic[Settings]):
    """The evaluations of one search, and their conclusions."""

    def __init__(
        self,
        evaluate: Callable[[Settings], float],
        size: Callable[[Settings], float],
        epsilon: float,
        cube: Cube[Settings],
        prefetch: Callable[[Sequence[Settings]], None],
    ) -> None:
        self.degradations: dict[Position, float] = {}
        self.best: Position | None = None
        self._evaluate = evaluate
        self._size = size
        self._sizes: dict[Position, float] = {}
        self._epsilon = epsilon
        self._cube = cube
        self._prefetch = prefetch

    def follow(self, last: Position) -> None:
        """Try the last choice, with the other metric first, and then gentler positions."""
        choices = [*self._cube.others(last), last]
        for number, choice in enumerate(choices):
            self.prefetch(choices[number:])
            self.passes(choice)
        if self.best is not None:
            return
        # Of equally bad choices the last one wins.
        nearest = min(reversed(choices), key=self._badness)
        gentler = sorted(self._cube.gentler(nearest, STEPS), key=self.size)
        for number, choice in enumerate(gentler):
            self.prefetch(gentler[number:])
            if self.passes(choice):
                return

    def conquer(self) -> None:
        """Find the smallest position that passes."""
        boxes = self._cube.boxes()
        while boxes:
            if len(boxes) > 1:
                boxes.sort(key=lambda box: self.size(box.aggressive))
            box = boxes.pop(0)
            if self.best is not None and self.size(box.aggressive) >= self.size(self.best):
                return
            diagonal = box.diagonal()
            passed = self._bisect(diagonal)
            if passed < len(diagonal):
                boxes += [
                    part
                    for part in box.without(diagonal[passed])
                    if not (passed and self._cube.reaches(part.aggressive, diagonal[passed - 1]))
                ]

    def passes(self, position: Position) -> bool:
        """Return whether the settings there pass; evaluate them once if no other position implies the answer."""
        told = self._known(position)
        if told is not None:
            return told
        self.degradations[position] = self._evaluate(self._cube.settings[position])
        passed = self.degradations[position] <= self._epsilon
        if passed and (self.best is None or self.size(position) < self.size(self.best)):
            self.best = position
        return passed

    def prefetch(self, positions: Sequence[Position]) -> None:
        """Announce the next positions, in this order, except those with a known answer."""
        self._prefetch([self._cube.settings[position] for position in positions if self._known(position) is None])

    def _known(self, position: Position) -> bool | None:
        """Return the answer that the evaluations so far imply for a position."""
        if position in self.degradations:
            return self.degradations[position] <= self._epsilon
        for other, degradation in self.degradations.items():
            passed = degradation <= self._epsilon
            if self._cube.reaches(*((position, other) if passed else (other, position))):
                return passed
        return None

    def size(self, position: Position) -> float:
        """Return the size under the settings there."""
        if position not in self._sizes:
            self._sizes[position] = self._size(self._cube.settings[position])
        return self._sizes[position]

    def _bisect(self, way: Sequence[Position]) -> int:
        """Return the number of passing positions of a way; all before a passing position pass."""
        low, high = 0, len(way)
        while low < high:
            place = self._likely(way, low, high)
            self.prefetch([way[other] for other in dict.fromkeys((place, *_middles(low, high)))])
            if self.passes(way[place]):
                low = place + 1
            else:
                high = place
        return low

    def _likely(self, way: Sequence[Position], low: int, high: int) -> int:
        """Return the last place from `low` to before `high` that passes by the model, or the middle one."""
        middle = (low + high) // 2
        told = [
            (math.log2(self._epsilon) - math.log2(self.degradations[position]), place)
            for place, position in enumerate(way)
            if self._epsilon > 0 and 0 < self.degradations.get(position, 0.0) < math.inf
        ]
        if self._cube.growth is None or not told or len(told) >= _MODELLED:
            return middle
        told.sort(key=lambda one: abs(one[0]))
        growth = self._cube.growth
        if len(told) > 1 and told[0][0] != told[1][0]:
            growth = max((told[1][0] - told[0][0]) / (told[0][1] - told[1][1]), growth / 2)
        return min(max(told[0][1] + math.floor(told[0][0] / growth), low), high - 1)

    def _badness(self, position: Position) -> tuple[bool, float]:
        degradation = self.degradations.get(position, math.nan)
        return math.isnan(degradation), degradation


def _middles(low: int, high: int) -> list[int]:
    """Return places that a bisection may evaluate: the next one first, then those after either answer, and so on."""
    spans = [(low, high)]
    for low, high in spans:
        if low < high:
            middle = (low + high) // 2
            spans += [(middle + 1, high), (low, middle)]
    return [(low + high) // 2 for low, high in spans if low < high]


def _with(position: Position, axis: int, index: int) -> Position:
    return (*position[:axis], index, *position[axis + 1 :])
