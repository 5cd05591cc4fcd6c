"""Which settings a quantiser takes: the most aggressive ones whose loss of quality is tolerated, in few evaluations.

After Inshrinkerator's search (Agrawal et al., SoCC 2024). It rests on one assumption, that quality never rises as a
setting becomes more aggressive along an axis of the search space: what is beyond a failure has failed as well. Pure
logic; evaluating, which is what costs, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from ckstore.codecs.schemes.dynaquant import LEVELS, METRICS, PROTECT, PRUNE, DynaQuantSettings
from ckstore.errors import UsageError

#: Evaluations that one search after the first may take.
MOST_EVALUATIONS = 12

Settings = TypeVar("Settings")
Position = tuple[int, ...]


class Axis(NamedTuple):
    """The values along one axis, from the gentlest to the most aggressive, or (`ordered` false) of no order."""

    values: tuple[Any, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Cube(Generic[Settings]):
    """A search space.

    Attributes
    ----------
    axes
        At least one.
    build
        Makes settings of a value from each axis; settings that differ compare unequal.
    size
        Stored size of settings, in any unit; it falls along each ordered axis.
    """

    axes: tuple[Axis, ...]
    build: Callable[..., Settings]
    size: Callable[[Settings], float]

    @cached_property
    def settings(self) -> dict[Position, Settings]:
        """The settings at each position, which is an index into each axis."""
        spans = [range(len(axis.values)) for axis in self.axes]
        return {
            position: self.build(*(axis.values[index] for axis, index in zip(self.axes, position, strict=True)))
            for position in product(*spans)
        }

    @cached_property
    def sizes(self) -> dict[Position, float]:
        """The stored size at each position."""
        return {position: self.size(settings) for position, settings in self.settings.items()}

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

    def diagonals(self) -> list[list[Position]]:
        """For each choice along the axes without order, the positions from the gentlest corner to the opposite one."""
        longest = max((len(axis.values) for axis in self.axes if axis.ordered), default=1)
        loose = [[0] if axis.ordered else range(len(axis.values)) for axis in self.axes]
        return [
            [
                tuple(
                    round(step * (len(axis.values) - 1) / max(longest - 1, 1)) if axis.ordered else index
                    for axis, index in zip(self.axes, choice, strict=True)
                )
                for step in range(longest)
            ]
            for choice in product(*loose)
        ]

    def neighbours(self, position: Position) -> list[Position]:
        """Positions at most one step gentler along each axis, whatever they are where there is no order."""
        near = [
            range(max(index - 1, 0), index + 1) if axis.ordered else range(len(axis.values))
            for axis, index in zip(self.axes, position, strict=True)
        ]
        return list(product(*near))

    def retreat(self, position: Position) -> list[Position]:
        """The way from the gentlest corner to the position, all ordered axes at once, a step at a time."""
        way = [position]
        while any(index for axis, index in zip(self.axes, way[-1], strict=True) if axis.ordered):
            pairs = zip(self.axes, way[-1], strict=True)
            way.append(tuple(max(index - 1, 0) if axis.ordered else index for axis, index in pairs))
        return way[::-1]


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


def dynaquant_cube() -> Cube[DynaQuantSettings]:
    """The paper's cube: levels, share pruned, share protected, and by which metric."""
    return Cube(
        (Axis(LEVELS), Axis(PRUNE), Axis(PROTECT), Axis(METRICS, ordered=False)),
        DynaQuantSettings,
        lambda settings: settings.nominal_bits,
    )


def ladder(qualities: Sequence[Settings]) -> Cube[Settings]:
    """A search space of one dimension, from the gentlest quality to the most aggressive one, each of them once."""
    steps = tuple(qualities)
    return Cube((Axis(steps),), lambda quality: quality, lambda quality: -steps.index(quality))


def search(
    evaluate: Callable[[Settings], float], epsilon: float, cube: Cube[Settings], last: Settings | None = None
) -> Found[Settings]:
    """Find the smallest settings whose degradation is at most `epsilon`.

    The first search of a run is exhaustive, but guided: the cube's diagonals are bisected, then whatever is smaller
    than the best settings so far and not beyond a failure is tried, the middle one first. A later search keeps the
    last choice where it still does; else it looks at the neighbours that are nowhere more aggressive, and where none
    of them does either, bisects the way to the gentlest corner: at most 12 evaluations, for axes of up to 2,000 values.

    Parameters
    ----------
    evaluate
        The degradation of quality under settings; NaN fails.
    epsilon
        What is tolerated.
    cube
        The search space.
    last
        The settings chosen last time.

    Raises
    ------
    UsageError
        If `last` is no point of the cube.
    """
    probe = _Probe(evaluate, epsilon, cube)
    if last is None:
        for diagonal in cube.diagonals():
            probe.bisect(diagonal)
        probe.exhaust(cube.settings, len(cube.settings))
        gentlest = cube.diagonals()[0][0]
    else:
        position = cube.find(last)
        way = cube.retreat(position)
        gentlest = way[0]
        if not probe.passes(position):
            # The neighbour one step gentler along all axes begins the retreat.
            probe.exhaust(cube.neighbours(position), MOST_EVALUATIONS - 1 - (len(way) - 1).bit_length())
            if probe.best is None:
                probe.bisect(way[:-1])
    chosen = gentlest if probe.best is None else probe.best
    return Found(cube.settings[chosen], probe.degradations[chosen], probe.best is not None, len(probe.degradations))


class _Probe(Generic[Settings]):
    """The evaluations of one search, and what follows from them."""

    def __init__(self, evaluate: Callable[[Settings], float], epsilon: float, cube: Cube[Settings]) -> None:
        self.degradations: dict[Position, float] = {}
        self.best: Position | None = None
        self._evaluate = evaluate
        self._epsilon = epsilon
        self._cube = cube

    def passes(self, position: Position) -> bool:
        """Whether the settings there are within the tolerance; evaluated once."""
        if position not in self.degradations:
            self.degradations[position] = self._evaluate(self._cube.settings[position])
        passed = self.degradations[position] <= self._epsilon
        sizes = self._cube.sizes
        if passed and (self.best is None or sizes[position] < sizes[self.best]):
            self.best = position
        return passed

    def bisect(self, way: Sequence[Position]) -> None:
        """Find the last position of a way that passes, where all before it do."""
        low, high = 0, len(way)
        while low < high:
            middle = (low + high) // 2
            if self.passes(way[middle]):
                low = middle + 1
            else:
                high = middle

    def exhaust(self, positions: Iterable[Position], most: int) -> None:
        """Find the smallest position that passes, in at most so many evaluations."""
        open_positions = sorted(positions, key=lambda position: self._cube.sizes[position])
        for _ in range(most):
            open_positions = [position for position in open_positions if self._is_open(position)]
            if not open_positions:
                return
            self.passes(open_positions[len(open_positions) // 2])

    def _is_open(self, position: Position) -> bool:
        """Whether the position would be smaller than the best, is untried and not beyond a failure."""
        sizes = self._cube.sizes
        if position in self.degradations or (self.best is not None and sizes[position] >= sizes[self.best]):
            return False
        return not any(
            degradation > self._epsilon and self._cube.reaches(failed, position)
            for failed, degradation in self.degradations.items()
        )
