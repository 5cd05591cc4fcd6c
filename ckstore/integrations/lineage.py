"""Versions that trainings resume from: the parents of the versions that they save next."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from ckstore.errors import NotFoundError
from ckstore.formats.facts import facts_of_mapping
from ckstore.steps import step_of_value

if TYPE_CHECKING:
    from ckstore.storage.rows import VersionRow
    from ckstore.store import Store
    from ckstore.version import Version
    from ckstore.writing.ingest import IngestReport


class _Point(NamedTuple):
    """A version that was loaded, the number of the store's latest version then, and whether a training resumed."""

    row: VersionRow
    last: int
    is_certain: bool


class Lineage:
    """The versions that the trainings of a process were resumed from.

    The first version that a run gets after such a load has the loaded version as its parent. So the run goes back to
    it, and later versions are kept as superseded ones.
    """

    def __init__(self) -> None:
        self._points: dict[str, list[_Point]] = {}
        self._saved: set[str] = set()
        self._origin: _Point | None = None
        self.position: VersionRow | None = None

    def note(self, store: Store, version: Version, *, is_certain: bool = True) -> None:
        """Note that a version was loaded: certainly to resume from it, or perhaps for a comparison."""
        row = version._stored.row
        latest = store._catalog.latest()
        point = _Point(row, row.number if latest is None else latest.number, is_certain)
        if is_certain:
            self._origin, self.position = point, row
            self._points[row.run] = [point]
        else:
            self._points.setdefault(row.run, []).append(point)

    def parent(self, store: Store, run: str, step: int | None, *, replaces: bool = False) -> VersionRow | None:
        """Return the parent of the next version of a run; None for its latest version.

        Of several versions that were loaded, it is the one with the highest step up to that of the next version. A load
        for a comparison in the middle of a training counts only if the training really goes back: not if the next
        version replaces one.
        """
        catalog = store._catalog
        latest, highest = catalog.latest(run), catalog.highest(run)
        if latest is None or highest is None:
            return _present(store, self.position)
        goes_on = run in self._saved and step is not None and highest.step is not None and step > highest.step
        is_back = not (replaces or goes_on)
        rows = [
            point.row
            for point in self._points.get(run, ())
            if latest.number <= point.last and (is_back or point.is_certain) and _is_before(point, step)
        ]
        if rows:
            return _present(store, max(rows, key=lambda row: -1 if row.step is None else row.step))
        return self._next_to(store, run, latest)

    def follow(self, report: IngestReport) -> None:
        """Note a version that was saved: the next one continues it."""
        row = report.version
        self._saved.add(row.run)
        if self.position is not None and self.position.run == row.run:
            self.position = row
        point = next(iter(self._points.pop(row.run, [])), self._origin)
        if point is not None and not report.is_new:
            # The content was saved at this step before: the training is as far as that version.
            self._points[row.run] = [point._replace(row=row)]

    def has_left(self, row: VersionRow) -> bool:
        """Return whether a version was saved after the one that was resumed, before the training went back."""
        origin = self._origin
        return (
            origin is not None
            and row.number <= origin.last
            and None not in (row.step, origin.row.step)
            and (row.step or 0) > (origin.row.step or 0)
        )

    def _next_to(self, store: Store, run: str, latest: VersionRow) -> VersionRow | None:
        """Return the parent in a run next to the resumed one: its version of the resumed step, or the last before."""
        origin = self._origin
        if origin is None or origin.row.step is None or latest.number > origin.last or run == origin.row.run:
            return None
        return store._catalog.below(run, min(origin.row.step, sys.maxsize - 1) + 1)


def _is_before(point: _Point, step: int | None) -> bool:
    """Return whether a version may be the parent of one at a step."""
    if step is None or point.row.step is None:
        return True
    return point.row.step < step or (point.is_certain and point.row.step == step)


def _present(store: Store, row: VersionRow | None) -> VersionRow | None:
    """Return a version's present row; None if it is gone."""
    try:
        return None if row is None else store._catalog.version(row.number)
    except NotFoundError:
        return None


#: By the store's place.
_LINEAGES: dict[str, Lineage] = {}


def lineage_of(store: Store) -> Lineage:
    """Return the lineage of this process's trainings in a store, where a load and a save share no object."""
    return _LINEAGES.setdefault(str(store.place), Lineage())


def has_loaded(store: Store | str | os.PathLike[str]) -> bool:
    """Return whether this process has loaded versions of a store, given as such or by its place."""
    return str(getattr(store, "place", store)) in _LINEAGES


def ingest_next(store: Store, state: Any, *, run: str, step: int | None, replace: bool, **options: Any) -> IngestReport:
    """Store a version after the one that this process has resumed the run from, as by `Store.ingest`."""
    lineage = lineage_of(store)
    at = facts_of_mapping(state).get("step") if step is None else step_of_value(step)
    parent = lineage.parent(store, run, at, replaces=replace)
    after = None if parent is None else parent.number
    report = store.ingest(state, run=run, step=step, parent=after, replace=replace, **options)
    lineage.follow(report)
    return report
