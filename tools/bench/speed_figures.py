"""Figures of the speed benchmark: what was measured and how far it spreads, beside its goal; as JSON and back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import floor, log10
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Spread:
    """Median of some numbers, and their first and third quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Of at least one number."""
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*statistics.quantiles(numbers, n=4, method="inclusive"))

    def __str__(self) -> str:
        if self.low == self.high:
            return digits(self.median)
        return f"{digits(self.median)} ({digits(self.low)} to {digits(self.high)})"


@dataclass(frozen=True)
class Timing:
    """One run: seconds on the clock, and of the processors, those of child processes included."""

    seconds: float
    processor: float


@dataclass(frozen=True)
class Rate:
    """How fast bytes went: GB (10^9 bytes) a second on the clock, and median processor seconds a GB."""

    speed: Spread
    processor: float

    @classmethod
    def of(cls, timings: Sequence[Timing], nbytes: int) -> Self:
        """Of runs over `nbytes` bytes each."""
        gigabytes = nbytes / 1e9
        return cls(
            Spread.of([gigabytes / timing.seconds for timing in timings]),
            statistics.median(timing.processor for timing in timings) / gigabytes,
        )


@dataclass(frozen=True)
class Goal:
    """What a figure is to be: at least, or less than, a value."""

    sense: Literal[">=", "<"]
    value: float

    def reached(self, figure: float) -> bool:
        """Whether a figure is what it is to be."""
        return figure >= self.value if self.sense == ">=" else figure < self.value

    def __str__(self) -> str:
        return f"{'≥' if self.sense == '>=' else '<'} {self.value:g}"


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes
    ----------
    what
        What was measured.
    figure, unit
        The figure that is judged: a ratio of speeds (`x`) where there is something to compare with.
    goal
        What it is to be; None for what is shown for scale.
    place
        Name of the file system that it was measured on, or empty.
    rate
        How fast the bytes of the checkpoint went.
    against, against_rate
        What it is compared with, and how fast that was in the same rounds.
    shrinks
        Original bytes over stored bytes, where something is stored.
    """

    what: str
    figure: Spread
    unit: str
    goal: Goal | None = None
    place: str = ""
    rate: Rate | None = None
    against: str = ""
    against_rate: Rate | None = None
    shrinks: float | None = None

    @classmethod
    def compared(
        cls,
        what: str,
        mine: Sequence[Timing],
        against: str,
        theirs: Sequence[Timing],
        nbytes: int,
        *,
        goal: Goal | None = None,
        place: str = "",
        shrinks: float | None = None,
    ) -> Self:
        """A speed over that of something else, round by round."""
        ratios = [other.seconds / own.seconds for own, other in zip(mine, theirs, strict=True)]
        rates = Rate.of(mine, nbytes), Rate.of(theirs, nbytes)
        return cls(what, Spread.of(ratios), "x", goal, place, rates[0], against, rates[1], shrinks)

    @property
    def reached(self) -> bool | None:
        """Whether the median reaches the goal; None without one."""
        return None if self.goal is None else self.goal.reached(self.figure.median)


@dataclass(frozen=True)
class Plot:
    """Curves of points (x, y) by label.

    Attributes
    ----------
    name
        Part of the file's name.
    title, horizontal, vertical
        What stands above it, and along the axes.
    curves
        The points.
    logarithmic
        Whether the horizontal axis is; the vertical one begins at 0.
    """

    name: str
    title: str
    horizontal: str
    vertical: str
    curves: dict[str, list[tuple[float, float]]]
    logarithmic: bool = False


@dataclass(frozen=True)
class Section:
    """What one part of the benchmark found.

    Attributes
    ----------
    key
        Its name on the command line.
    title, about
        What the document calls it, and what was compared with what.
    lines, plots
        The figures.
    tables
        Tables that are printed as they are, after the lines: head and rows of each.
    notes
        Sentences below the tables: what was left out, and why.
    measured, options, machine
        When (ISO date), with which options, and on what: a fact a line.
    """

    key: str
    title: str
    about: str
    lines: list[Line] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: str = ""
    options: str = ""
    machine: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As containers of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        lines = [_line(line) for line in document["lines"]]
        plots = []
        for plot in document["plots"]:
            curves = {label: [(x, y) for x, y in points] for label, points in plot["curves"].items()}
            plots.append(Plot(**{**plot, "curves": curves}))
        return cls(**{**document, "lines": lines, "plots": plots})


def _line(document: dict[str, Any]) -> Line:
    goal = document["goal"]
    return Line(
        **{
            **document,
            "figure": Spread(**document["figure"]),
            "goal": None if goal is None else Goal(**goal),
            "rate": _rate(document["rate"]),
            "against_rate": _rate(document["against_rate"]),
        }
    )


def _rate(document: dict[str, Any] | None) -> Rate | None:
    return None if document is None else Rate(Spread(**document["speed"]), document["processor"])


def digits(number: float) -> str:
    """A number with three significant digits."""
    if number == 0:
        return "0"
    places = 2 - floor(log10(abs(number)))
    rounded = round(number, places)
    # What was rounded up to the next power of ten has one digit more before the point.
    return f"{rounded:,.{max(0, 2 - floor(log10(abs(rounded))))}f}"
