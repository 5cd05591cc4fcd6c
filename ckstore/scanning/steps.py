"""Infers the steps of several inputs from differences among their names, or among their contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ckstore.errors import InputError
from ckstore.runtime.local_path import local_path
from ckstore.scanning.inputs import open_path, step_inside, unused_step
from ckstore.steps import NamedStep, differ, natural, steps_of_names

#: Sources of steps: names, contents, or the order of the names.
StepSource = Literal["name", "content", "order"]


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
    tags
        Tags of its version.

    Examples
    --------
    >>> np.save("net_1.npy", np.zeros(4))
    >>> store.plan(["net_1.npy"], run="net", step_from="name")
    [Planned(path=PosixPath('net_1.npy'), step=1, step_from='name', run='net', note='', refused=False, tags=())]
    """

    path: Path
    step: int | None = None
    step_from: StepSource | None = None
    run: str = ""
    note: str = ""
    refused: bool = False
    tags: tuple[str, ...] = ()


def plan_steps(
    paths: Sequence[Path],
    source: StepSource | None = None,
    *,
    first: int = 0,
    force: bool = False,
    known: Mapping[Path, int | None] = MappingProxyType({}),
    distinct: bool | None = None,
) -> list[Planned]:
    """Return several inputs with their steps, in order of step; those without a step come last, by name.

    By default steps come from the contents, if these are distinct among all inputs that have any. Otherwise they are
    the number that differs among all names. Otherwise each input's step comes from its contents, or else from its name.
    `source` says where all steps come from; `first` is the first one if that is the order.

    An unreadable input has no step from its contents, and a note. Inputs in `known` have that step in their
    contents, and are not opened. With `force`, damaged files count as opaque bytes. `distinct` tells whether steps from
    contents are distinct, where the inputs are some of many.
    """
    inputs = sorted(paths, key=lambda path: natural(path.name))
    if source == "order":
        return [Planned(path, first + index, "order") for index, path in enumerate(inputs)]
    errors: dict[Path, str] = {}
    nothing = [(None, "")] * len(inputs)
    inside = nothing if source == "name" else [_infer(path, known, errors, force=force) for path in inputs]
    inferred = [step for step, _ in inside]
    named = [NamedStep(None)] * len(inputs) if source == "content" else steps_of_names([_name(path) for path in inputs])
    by_name = [found.step for found in named]
    distinct = differ(inferred) if distinct is None else distinct
    if source is None and not distinct and differ(by_name) and None not in by_name:
        inferred = [None] * len(inputs)
    planned = []
    for path, step, (_, wrong), name in zip(inputs, inferred, inside, named, strict=True):
        chosen = name.step if step is None else step
        unused = unused_step(wrong, name.unused if chosen is None else "")
        note = errors.get(path, unused)
        planned.append(Planned(path, chosen, _source(step, name.step), note=note, refused=path in errors))
    return sorted(planned, key=lambda item: (item.step is None, item.step or 0))


def _name(path: Path) -> str:
    return path.name or path.resolve().name


def _infer(
    path: Path, known: Mapping[Path, int | None], errors: dict[Path, str], *, force: bool
) -> tuple[int | None, str]:
    if path in known:
        return known[path], ""
    try:
        scanned = open_path(local_path(path), force=force, is_one=force)
        scanned.close()
        return step_inside(scanned)
    except (InputError, OSError) as error:
        errors[path] = str(error)
        return None, ""


def _source(inferred: int | None, named: int | None) -> StepSource | None:
    return "content" if inferred is not None else "name" if named is not None else None
