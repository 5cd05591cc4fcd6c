"""Which settings a quantiser takes: the smallest ones whose loss of quality is tolerated, in few evaluations.

After Inshrinkerator's search (Agrawal et al., SoCC 2024), on one assumption: neither quality nor size rises as a
setting becomes more aggressive along an axis of the search space, so what is beyond a failure has failed as well. Pure
logic; evaluating, which is what costs, and writing, which tells the size, are the caller's.

first   bisect a diagonal of the cube; what is neither beyond its first failure nor within its last success is left
        in smaller cubes; take that of the smallest corner, until no corner is smaller than the best found
later   the last choice by the other metric and by its own; if neither will do, what is a few steps gentler, the
        smallest first, until one does; else as if for the first time
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from ckstore.codecs.schemes.dynaquant import EMBEDDING_LEVELS, LEVELS, METRICS, PROTECT, PRUNE, DynaQuantSettings
from ckstore.errors import UsageError

#: A later search looks at what is at most so many steps gentler than the last choice, along all axes together.
STEPS = 2

Settings = TypeVar("Settings")
Position = tuple[int, ...]


class Axis(NamedTuple):
    """The values along one axis, from the gentlest to the most aggressive, or (`ordered` false) of no order."""

    values: tuple[Any, ...]
    ordered: bool = True


class Box(NamedTuple):
    """A part of a cube: all positions from its gentlest corner to its most aggressive one."""

    gentle: Position
    aggressive: Position

    def diagonal(self) -> list[Position]:
        """Positions from the one corner to the other, a step at a time along the longest axis."""
        longest = max(map(int.__sub__, self.aggressive, self.gentle))
        return [
            tuple(
                low + round(step * (high - low) / max(longest, 1))
                for low, high in zip(self.gentle, self.aggressive, strict=True)
            )
            for step in range(longest + 1)
        ]

    def without(self, failed: Position) -> list[Box]:
        """What is left without the positions from `failed` on, as boxes that share none."""
        left = []
        gentle = self.gentle
        for axis, (low, place) in enumerate(zip(self.gentle, failed, strict=True)):
            if place > low:
                left.append(Box(gentle, _with(self.aggressive, axis, place - 1)))
                gentle = _with(gentle, axis, place)
        return left


@dataclass(frozen=True)
class Cube(Generic[Settings]):
    """A search space.

    Attributes
    ----------
    axes
        At least one.
    build
        Makes settings of a value from each axis; settings that differ compare unequal.
    """

    axes: tuple[Axis, ...]
    build: Callable[..., Settings]

    @cached_property
    def settings(self) -> dict[Position, Settings]:
        """The settings at each position, which is an index into each axis."""
        spans = [range(len(axis.values)) for axis in self.axes]
        return {
            position: self.build(*(axis.values[index] for axis, index in zip(self.axes, position, strict=True)))
            for position in product(*spans)
        }

    def find(self, settings: Settings) -> Position:
        """Position of settings; raises `UsageError` where they are none of the cube's."""
        for position, candidate in self.settings.items():
            if candidate == settings:
                return position
        raise UsageError(f"{settings} is not a point of the search space: search without a last choice.")

    def reaches(self, gentle: Position, aggressive: Position) -> bool:
        """Whether one position is nowhere more aggressive than another, and the same where there is no order."""
        return all(
            one <= other if axis.ordered else one == other
            for axis, one, other in zip(self.axes, gentle, aggressive, strict=True)
        )

    def boxes(self) -> list[Box]:
        """The whole cube: a box for each choice along the axes without order."""
        return [
            Box(
                gentle,
                tuple(max(i, len(a.values) - 1) if a.ordered else i for a, i in zip(self.axes, gentle, strict=True)),
            )
            for gentle in product(*([0] if axis.ordered else range(len(axis.values)) for axis in self.axes))
        ]

    def others(self, position: Position) -> list[Position]:
        """The positions that differ along the axes without order alone."""
        spans = [
            [index] if axis.ordered else range(len(axis.values))
            for axis, index in zip(self.axes, position, strict=True)
        ]
        return [other for other in product(*spans) if other != position]

    def gentler(self, position: Position, steps: int) -> list[Position]:
        """The positions that are gentler by at most so many steps, along all ordered axes together."""
        spans = [
            range(max(index - steps, 0), index + 1) if axis.ordered else [index]
            for axis, index in zip(self.axes, position, strict=True)
        ]
        return [other for other in product(*spans) if 0 < sum(position) - sum(other) <= steps]


@dataclass(frozen=True, slots=True)
class Found(Generic[Settings]):
    """What a search comes to.

    Attributes
    ----------
    settings
        The smallest ones found within the tolerance; the gentlest of all where none was.
    degradation
        What `evaluate` said of them.
    accepted
        Whether they are within the tolerance. Where not, store exactly.
    evaluations
        How often `evaluate` was called.
    """

    settings: Settings
    degradation: float
    accepted: bool
    evaluations: int


def dynaquant_cube(metrics: tuple[str, ...] = METRICS) -> Cube[DynaQuantSettings]:
    """The paper's cube: levels, share pruned, share protected, pruned by which metric, and levels of embeddings."""
    axes = Axis(LEVELS), Axis(PRUNE), Axis(PROTECT), Axis(metrics, ordered=False), Axis(EMBEDDING_LEVELS)
    return Cube(axes, DynaQuantSettings)


def ladder(qualities: Sequence[Settings]) -> Cube[Settings]:
    """A search space of one dimension, from the gentlest quality to the most aggressive one, each of them once."""
    return Cube((Axis(tuple(qualities)),), lambda quality: quality)


def search(
    evaluate: Callable[[Settings], float],
    size: Callable[[Settings], float],
    epsilon: float,
    cube: Cube[Settings],
    last: Settings | None = None,
    foresee: Callable[[Sequence[Settings]], None] = lambda settings: None,
) -> Found[Settings]:
    """Find the smallest settings whose degradation is at most `epsilon`.

    Parameters
    ----------
    evaluate
        The degradation of quality under settings; NaN fails.
    size
        Bytes under settings, as they are really written; asked once of each, and of few.
    epsilon
        What is tolerated.
    cube
        The search space.
    last
        The settings chosen last time: nothing more aggressive is chosen, but where nothing near them will do.
    foresee
        Called before `evaluate` with what that will be asked for now, and may be next: what is evaluated ahead changes
        nothing of what is found.

    Raises
    ------
    UsageError
        If `last` is no point of the cube.
    """
    probe = _Probe(evaluate, size, epsilon, cube, foresee)
    if last is not None:
        probe.follow(cube.find(last))
    if probe.best is None:
        probe.conquer()
    chosen = cube.boxes()[0].gentle if probe.best is None else probe.best
    return Found(cube.settings[chosen], probe.degradations[chosen], probe.best is not None, len(probe.degradations))


class _Probe(Generic[Settings]):
    """The evaluations of one search, and what follows from them."""

    def __init__(
        self,
        evaluate: Callable[[Settings], float],
        size: Callable[[Settings], float],
        epsilon: float,
        cube: Cube[Settings],
        foresee: Callable[[Sequence[Settings]], None],
    ) -> None:
        self.degradations: dict[Position, float] = {}
        self.best: Position | None = None
        self._evaluate = evaluate
        self._size = size
        self._sizes: dict[Position, float] = {}
        self._epsilon = epsilon
        self._cube = cube
        self._foresee = foresee

    def follow(self, last: Position) -> None:
        """Try the last choice, by the other metric first, and then what is a few steps gentler."""
        choices = [*self._cube.others(last), last]
        for number, choice in enumerate(choices):
            self.foresee(choices[number:])
            self.passes(choice)
        if self.best is not None:
            return
        # Of choices that are equally bad the last one stays.
        nearest = min(reversed(choices), key=self._badness)
        gentler = sorted(self._cube.gentler(nearest, STEPS), key=self.size)
        for number, choice in enumerate(gentler):
            self.foresee(gentler[number:])
            if self.passes(choice):
                return

    def conquer(self) -> None:
        """Find the smallest position of all that passes."""
        boxes = self._cube.boxes()
        while boxes:
            if len(boxes) > 1 or self.best is not None:
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
        """Whether the settings there are within the tolerance; evaluated once, where no other position tells."""
        told = self._told(position)
        if told is not None:
            return told
        self.degradations[position] = self._evaluate(self._cube.settings[position])
        passed = self.degradations[position] <= self._epsilon
        if passed and (self.best is None or self.size(position) < self.size(self.best)):
            self.best = position
        return passed

    def foresee(self, positions: Sequence[Position]) -> None:
        """Say which positions are asked for next, in this order, but for those of which the answer is known."""
        self._foresee([self._cube.settings[position] for position in positions if self._told(position) is None])

    def _told(self, position: Position) -> bool | None:
        """What the evaluations so far tell of a position."""
        if position in self.degradations:
            return self.degradations[position] <= self._epsilon
        for other, degradation in self.degradations.items():
            passed = degradation <= self._epsilon
            if self._cube.reaches(*((position, other) if passed else (other, position))):
                return passed
        return None

    def size(self, position: Position) -> float:
        """The size under the settings there."""
        if position not in self._sizes:
            self._sizes[position] = self._size(self._cube.settings[position])
        return self._sizes[position]

    def _bisect(self, way: Sequence[Position]) -> int:
        """How many positions of a way pass, where all before one that passes do."""
        low, high = 0, len(way)
        while low < high:
            middle = (low + high) // 2
            self.foresee([way[place] for place in _middles(low, high)])
            if self.passes(way[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _badness(self, position: Position) -> tuple[bool, float]:
        degradation = self.degradations.get(position, math.nan)
        return math.isnan(degradation), degradation


def _middles(low: int, high: int) -> list[int]:
    """The places where a bisection may look, the next one first, then those after either answer, and so on."""
    spans = [(low, high)]
    for low, high in spans:
        if low < high:
            middle = (low + high) // 2
            spans += [(middle + 1, high), (low, middle)]
    return [(low + high) // 2 for low, high in spans if low < high]


def _with(position: Position, axis: int, index: int) -> Position:
    return (*position[:axis], index, *position[axis + 1 :])
