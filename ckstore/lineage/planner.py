"""Chooses an encoding for each object of a version: fewest bytes within the restore budget.

A pure function of a table of sizes and costs; it touches no file and no array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store an object: the bytes that it adds to the store, and the restore cost of its whole chain.

    An option that `is_base` ends the chain: objects stored against it begin a new chain.
    """

    name: str
    stored: float
    cost: float
    is_base: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """The options of one object, at least one.

    `debt` is the bytes that earlier versions of it spent above their cheapest option since the last base.
    """

    options: tuple[Option, ...]
    debt: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen option of an object, and the debt that it passes on."""

    option: Option
    debt: float


def choose(table: Sequence[Candidates], allowed: float) -> list[Choice]:
    """Choose one option for each object so that the costs add up to at most `allowed`, at the fewest bytes.

    First every object takes its smallest option. While the sum of costs is above `allowed`, the planner makes the
    exchange that saves most cost per byte, along each object's lower convex hull of (cost, stored). This is the greedy
    solution of the Lagrangian, at most one exchange above the optimum. If even the cheapest options do not fit, they
    are taken.

    A rebase pays off only later. An object's debt grows by the bytes that each choice overpays. Once it reaches the
    extra bytes of a base over the smallest option, the object becomes a base (the rule of the ski rental, at most twice
    the bytes of an offline optimum).
    """
    hulls = [_hull(candidates.options) for candidates in table]
    position = [0] * len(table)
    total = sum(hull[0].cost for hull in hulls)
    exchanges: list[tuple[float, int, int]] = []
    for index, hull in enumerate(hulls):
        for step in range(1, len(hull)):
            saved = hull[step - 1].cost - hull[step].cost
            paid = hull[step].stored - hull[step - 1].stored
            exchanges.append((paid / saved, index, step))
    for _, index, step in sorted(exchanges):
        if total <= allowed:
            break
        hull = hulls[index]
        total += hull[step].cost - hull[step - 1].cost
        position[index] = step
    choices = []
    for candidates, hull, place in zip(table, hulls, position, strict=True):
        option = hull[place]
        smallest = hull[0]
        debt = candidates.debt + option.stored - smallest.stored
        bases = [other for other in candidates.options if other.is_base]
        if bases and not option.is_base:
            base = min(bases, key=lambda other: other.stored)
            if debt > 0 and debt >= base.stored - smallest.stored:
                option = base
        choices.append(Choice(option, 0.0 if option.is_base else debt))
    return choices


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of (cost, stored), from the smallest to the cheapest."""
    ordered = sorted(options, key=lambda option: (option.stored, option.cost))
    hull: list[Option] = []
    for option in ordered:
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) >= 2 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.stored - first.stored) / (first.cost - second.cost)
