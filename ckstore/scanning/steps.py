"""Which steps several inputs are at: by what differs among their names, or among what they say of themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ckstore.errors import InputError
from ckstore.formats import step_of
from ckstore.scanning.source import told_step

#: What steps are taken from: names, contents, or the order of the names.
StepSource = Literal["name", "content", "order"]

_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Planned:
    """An input, the step that it will be stored at, and what told that; None where nothing did."""

    path: Path
    step: int | None
    source: StepSource | None


def plan_steps(
    paths: Sequence[Path],
    source: StepSource | None = None,
    *,
    first: int = 0,
    force: bool = False,
    known: Mapping[Path, int | None] = MappingProxyType({}),
) -> list[Planned]:
    """Several inputs with their steps, in their order; those without a step come last, by name.

    By default steps are what the contents say, if these differ among all inputs that say any; else the number that
    differs among all names; else what each content, or else each name, says.

    Parameters
    ----------
    paths
        Files or directories. What cannot be read has no step here; its ingest says why.
    source
        Where steps come from, whatever the others say.
    first
        The first step where they come from the order.
    force
        As for the ingest: damaged files count as opaque bytes.
    known
        What contents tell; files that are not in it are opened.
    """
    inputs = sorted(paths, key=lambda path: natural(path.name))
    if source == "order":
        return [Planned(path, first + index, "order") for index, path in enumerate(inputs)]
    told = [None] * len(inputs) if source == "name" else [_told(path, known, force=force) for path in inputs]
    named = [None] * len(inputs) if source == "content" else steps_of_names([_name(path) for path in inputs])
    if source is None and not _differ(told) and _differ(named) and None not in named:
        told = [None] * len(inputs)
    planned = [
        Planned(path, named[index] if told[index] is None else told[index], _source(told[index], named[index]))
        for index, path in enumerate(inputs)
    ]
    return sorted(planned, key=lambda item: (item.step is None, item.step or 0))


def steps_of_names(names: Sequence[str]) -> list[int | None]:
    """The step in each of several names: the number that differs among them all, where they differ in numbers alone.

    Of several such numbers the one that is called a step (`step_of`), else the last one. Names that differ otherwise
    are taken one by one.

    Examples
    --------
    >>> steps_of_names(["checkpoint_50sims_1.pth.tar", "checkpoint_50sims_100.pth.tar"])
    [1, 100]
    """
    alone = [step_of(name) for name in names]
    parts = [_DIGITS.split(name) for name in names]
    if _differ(alone) or len({tuple(part[::2]) for part in parts}) > 1:
        return alone
    numbers = list(zip(*(part[1::2] for part in parts), strict=True))
    for column in reversed(numbers):
        steps = [int(number) for number in column]
        if len(set(steps)) == len(names) and max(steps) < 1 << 63:
            return list(steps)
    return alone


def natural(name: str) -> list[tuple[bool, int, str]]:
    """What names are sorted by so that `step9` comes before `step10`.

    Examples
    --------
    >>> sorted(["step10", "step9", "a"], key=natural)
    ['a', 'step9', 'step10']
    """
    parts = _DIGITS.split(name)
    return [(False, int(part), "") if index % 2 else (True, 0, part) for index, part in enumerate(parts)]


def _name(path: Path) -> str:
    return path.name or path.resolve().name


def _told(path: Path, known: Mapping[Path, int | None], *, force: bool) -> int | None:
    if path in known:
        return known[path]
    with suppress(InputError, OSError):
        return told_step(path, force=force)
    return None


def _source(told: int | None, named: int | None) -> StepSource | None:
    return "content" if told is not None else "name" if named is not None else None


def _differ(steps: Sequence[int | None]) -> bool:
    """Whether steps are told, and no two are the same."""
    known = [step for step in steps if step is not None]
    return bool(known) and len(set(known)) == len(known)
