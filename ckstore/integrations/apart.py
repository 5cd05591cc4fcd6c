"""Runs for files that a library saves at one step: each path keeps its own version."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from ckstore.errors import ConflictError
from ckstore.storage.names import suggested

if TYPE_CHECKING:
    from ckstore.integrations.lineage import Lineage
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store
    from ckstore.writing.ingest import IngestReport

#: A value in a file's name, such as `val_loss=0.25`, and a number with a decimal point.
_VALUES = re.compile(r"[^\W\d][\w.]*=-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\d+\.\d+")
#: Longest part of a run's name that comes from a file's name, in characters.
_LONGEST = 60
#: Limit of the number of files at one step whose names differ only in numbers.
_MOST = 100


class TakenError(ConflictError):
    """A run has the content of a file already, under the name of another file."""


def series_of(path: str | os.PathLike[str], *numbers: int | None) -> str:
    """Return the part of a file's name that its series shares: without values, and without numbers such as the step.

    If nothing is left, it is the name of the directory.

    Examples
    --------
    >>> series_of("ema-00400.pt", 400), series_of("best/epoch=1-step=8.ckpt", 8), series_of("rank1.pt", 8)
    ('ema', 'best', 'rank1')
    """
    place = PurePath(path)
    return _shared(place.stem, numbers) or _shared(place.parent.name, numbers) or "other"


def _shared(name: str, numbers: tuple[int | None, ...]) -> str:
    left = re.sub(r"\d+", lambda found: "" if int(found[0]) in numbers else found[0], _VALUES.sub("", name))
    plain = "".join(letter if letter.isprintable() and letter not in "@/" else "-" for letter in left)
    return re.sub(r"([-_. ])[-_. ]+", r"\1", plain).strip("-_. ")[:_LONGEST]


def runs_for(run: str, path: str | os.PathLike[str], *numbers: int | None, mark: str = "") -> list[str]:
    """Return the runs that may take a file: the run itself, then runs below it that are named after the file's series.

    Examples
    --------
    >>> runs_for("lit", "out/ema.ckpt")[:4]
    ['lit', 'lit/ema', 'lit/out-ema', 'lit/ema-2']
    """
    series, above = series_of(path, *numbers), _shared(PurePath(path).parent.name, numbers)
    below = [series] if above in ("", series) else [series, f"{above}-{series}"]
    below += [f"{series}-{number}" for number in range(2, _MOST)]
    return [run, *(suggested(f"{run}/{mark}{name}", "run") for name in below)]


def store_apart(
    store: Store,
    runs: Sequence[str],
    step: int | None,
    ingest: Callable[[str, int | None, bool], IngestReport],
    *,
    holds: Callable[[VersionRow], bool],
    home: str = "",
    settled: bool = True,
    lineage: Lineage | None = None,
) -> IngestReport:
    """Store a file in the first of several runs that has room for it at its step.

    A version at that step is replaced only if it is the one that the file's path held. If the training goes back to
    an earlier version, the versions after that are superseded instead.

    Parameters
    ----------
    runs
        The names of runs from `runs_for`.
    step
        The step; None if the file has none.
    ingest
        Stores the file in a run, after the parent of a number if one is given, and replaces the version at the step
        or not. It may raise `TakenError`.
    holds
        Whether a version is the one that the path held.
    home
        The run of that version. It is tried first if it is one of `runs`.
    settled
        Whether a series stays with the second run, its own, once that exists.
    lineage
        The versions that the training was resumed from.
    """
    catalog = store._catalog
    order = [home, *runs] if home in runs else list(runs)
    if settled and catalog.latest(runs[1]) is not None:
        order.remove(runs[0])
    for run in order:
        if run in catalog.tags():
            continue
        is_new = run != runs[0] and catalog.latest(run) is None
        if is_new:
            _take_policy(store, runs[0], run)
            parent = None if step is None else catalog.at_step(runs[0], step)
        else:
            parent = None if lineage is None else lineage.parent(store, run, step)
        report = _stored(store, run, step, parent, ingest, lambda row: holds(row) and not _is_kept(row, lineage))
        if report is not None:
            if lineage is not None:
                lineage.follow(report)
            return report
    raise ConflictError(f"{runs[0]} and {len(runs) - 1} runs below it are taken at step {step}; give a new run.")


def _stored(
    store: Store,
    run: str,
    step: int | None,
    parent: VersionRow | None,
    ingest: Callable[[str, int | None, bool], IngestReport],
    holds: Callable[[VersionRow], bool],
) -> IngestReport | None:
    """Store a file in a run; return None if its step is taken there."""
    existing = None if step is None else store._catalog.at_step(run, step)
    is_behind = existing is not None and parent is not None and (parent.superseded or parent.number < existing.number)
    for replace in (False, True):
        if existing is not None and not (holds(existing) if replace else is_behind):
            continue
        try:
            return ingest(run, None if parent is None else parent.number, replace)
        except TakenError:
            return None
        except ConflictError:
            # A tagged version is not replaced, and another process may have taken the step.
            existing = None if step is None else store._catalog.at_step(run, step)
            if existing is None:
                raise
    return None


def _is_kept(row: VersionRow, lineage: Lineage | None) -> bool:
    """Return whether a version was saved before the training went back behind it."""
    return lineage is not None and lineage.has_left(row)


def _take_policy(store: Store, first: str, run: str) -> None:
    """Give a new run the policy of the run that it lies below."""
    policy = store.policies().get(first)
    if policy is not None:
        store.set_policy(policy, run)
