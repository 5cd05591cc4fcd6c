"""Going back: a version that continues an earlier one of its run supersedes the versions that came after that.

A run goes back if the caller names a parent in it that is not its tip. The versions that were committed after the
parent become superseded. If the parent is superseded itself, it and its ancestors are present again, and the versions
that were committed after the last present one of these become superseded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckstore.storage.catalog import Catalog, VersionRow


class Marks(NamedTuple):
    """The versions that become superseded, and the versions that are present again."""

    superseded: Sequence[VersionRow] = ()
    present: Sequence[VersionRow] = ()


def goes_back(catalog: Catalog, run: str, parent: VersionRow | None) -> bool:
    """Return whether a version with this parent goes back in its run.

    The tip is the version with the highest step, or the one that was committed last.
    """
    if parent is None or parent.run != run:
        return False
    tips = catalog.latest(run), catalog.highest(run)
    return parent.superseded or parent.number not in {tip.number for tip in tips if tip is not None}


def marks_of(catalog: Catalog, run: str, parent: int | None) -> Marks:
    """Return the marks that a run gets when it goes back to a version of it."""
    present: list[VersionRow] = []
    row = None if parent is None else catalog.version(parent)
    while row is not None and row.run == run and row.superseded:
        present.append(row)
        row = None if row.parent is None else catalog.version(row.parent)
    if row is None or row.run != run:
        if not present:
            return Marks()
        row = None
    later = {item.number: item for item in catalog.after(run, 0 if row is None else row.number)}
    for item in present:
        standing = None if item.step is None else catalog.at_step(run, item.step)
        if standing is not None:
            later.setdefault(standing.number, standing)
    return Marks(list(later.values()), present)
