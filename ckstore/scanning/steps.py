"""Infers the steps of several inputs from differences among their names, or among their contents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ckstore.errors import InputError
from ckstore.formats.facts import DECIMAL, step_of
from ckstore.runtime.local_path import local_path
from ckstore.scanning.inputs import natural, open_path, step_inside

#: Sources of steps: names, contents, or the order of the names.
StepSource = Literal["name", "content", "order"]

_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Planned:
    """An input of an ingest and its place.

    Attributes
    ----------
    path
        Path of the file or directory.
    step, step_from
        The step and its source; None without one.
    run
        Name of the run; empty for an input that is left out.
    note
        The reason for leaving it out, or a warning.
    refused
        Whether its ingest fails; the `note` is the error.

    Examples
    --------
    >>> np.save("net_1.npy", np.zeros(4))
    >>> store.plan(["net_1.npy"], run="net", step_from="name")
    [Planned(path=PosixPath('net_1.npy'), step=1, step_from='name', run='net', note='', refused=False)]
    """

    path: Path
    step: int | None = None
    step_from: StepSource | None = None
    run: str = ""
    note: str = ""
    refused: bool = False


def plan_steps(
    paths: Sequence[Path],
    source: StepSource | None = None,
    *,
    first: int = 0,
    force: bool = False,
    known: Mapping[Path, int | None] = MappingProxyType({}),
) -> list[Planned]:
    """Return several inputs with their steps, in order of step; those without a step come last, by name.

    By default steps come from the contents, if these are distinct among all inputs that have any. Otherwise they are
    the number that differs among all names. Otherwise each input's step comes from its contents, or else from its name.
    `source` says where all steps come from; `first` is the first one if that is the order.

    An unreadable input has no step from its contents, and a note. Inputs in `known` have that step in their
    contents, and are not opened. With `force`, damaged files count as opaque bytes.
    """
    inputs = sorted(paths, key=lambda path: natural(path.name))
    if source == "order":
        return [Planned(path, first + index, "order") for index, path in enumerate(inputs)]
    errors: dict[Path, str] = {}
    inferred = (
        [None] * len(inputs) if source == "name" else [_infer(path, known, errors, force=force) for path in inputs]
    )
    named = [None] * len(inputs) if source == "content" else steps_of_names([_name(path) for path in inputs])
    if source is None and not _differ(inferred) and _differ(named) and None not in named:
        inferred = [None] * len(inputs)
    planned = [
        Planned(
            path,
            named[index] if inferred[index] is None else inferred[index],
            _source(inferred[index], named[index]),
            note=errors.get(path, ""),
            refused=path in errors,
        )
        for index, path in enumerate(inputs)
    ]
    return sorted(planned, key=lambda item: (item.step is None, item.step or 0))


def steps_of_names(names: Sequence[str]) -> list[int | None]:
    """Return the step in each of several names: the differing number, if they differ only in numbers.

    Of several such numbers it is the one that is called a step (`step_of`), else the last one. Names that differ
    otherwise are treated one by one.

    Examples
    --------
    >>> steps_of_names(["checkpoint_50sims_1.pth.tar", "checkpoint_50sims_100.pth.tar"])
    [1, 100]
    >>> steps_of_names(["weights.01-1.53.h5", "weights.02-0.90.h5"])
    [1, 2]
    """
    alone = [step_of(name) for name in names]
    parts = [_DIGITS.split(DECIMAL.sub("", name)) for name in names]
    if _differ(alone) or len({tuple(part[::2]) for part in parts}) > 1:
        return alone
    numbers = list(zip(*(part[1::2] for part in parts), strict=True))
    for column in reversed(numbers):
        steps = [int(number) for number in column]
        if len(set(steps)) == len(names) and max(steps) < 1 << 63:
            return list(steps)
    return alone


def _name(path: Path) -> str:
    return path.name or path.resolve().name


def _infer(path: Path, known: Mapping[Path, int | None], errors: dict[Path, str], *, force: bool) -> int | None:
    if path in known:
        return known[path]
    try:
        scanned = open_path(local_path(path), force=force, is_one=force)
        scanned.close()
        return step_inside(scanned)
    except (InputError, OSError) as error:
        errors[path] = str(error)
        return None


def _source(inferred: int | None, named: int | None) -> StepSource | None:
    return "content" if inferred is not None else "name" if named is not None else None


def _differ(steps: Sequence[int | None]) -> bool:
    """Return whether there are steps, and they are distinct."""
    known = [step for step in steps if step is not None]
    return bool(known) and len(set(known)) == len(known)
