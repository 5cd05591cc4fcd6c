"""Forgotten versions that `undo` can bring back: a collection keeps their bytes for a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from shutil import disk_usage
from typing import TYPE_CHECKING

from ckstore.commit.naming import policy_of
from ckstore.storage.manifest import MEMBER
from ckstore.storage.reserve import LITTLE
from ckstore.storage.rows import VersionRow

if TYPE_CHECKING:
    from ckstore.policy import Retention
    from ckstore.repository import Repository

#: Seconds for which forgotten versions are kept, unless the disk is too full for another version.
GRACE = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Kept:
    """The forgotten versions that are kept, those before, and the earliest time at which one is kept no longer.

    `rows` are those of each record of the log, by its number; `expired` the numbers of the others.
    """

    rows: dict[int, list[VersionRow]] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)
    until: str = ""


def kept(repository: Repository, grace: float | None) -> Kept:
    """Return the forgotten versions that a collection keeps for a number of seconds, by default `GRACE`.

    A version may be present again, if its undoing is being committed.
    """
    found = Kept()
    undoable = repository.catalog.undoable()
    if not undoable:
        return found
    if grace is None:
        grace = 0.0 if is_short(repository) else GRACE
    now = datetime.now(UTC)
    until = ""
    for record in undoable:
        ends = datetime.fromisoformat(record["created"]) + timedelta(seconds=min(grace, 1e9))
        if ends <= now:
            found.expired.append(record["sequence"])
            continue
        found.rows[record["sequence"]] = record["rows"]
        ending = ends.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        until = min(until or ending, ending)
    return replace(found, until=until)


def present_form(repository: Repository, row: VersionRow) -> VersionRow:
    """Return a row of a forgotten version with the present place of its manifest: its pack may have been rewritten."""
    moved = repository.catalog.moved_packs([row.pack]).get(row.pack)
    if moved is None:
        return row
    entry = repository.packs.find_entry(moved, MEMBER)
    return replace(row, pack=moved, manifest_offset=entry.offset, manifest_length=entry.length)


def excess(repository: Repository, retention: Retention | None = None) -> int:
    """Return the bytes of packs beyond the limit of the store's policy or another one; 0 without one."""
    most = (retention or policy_of(repository.catalog, "").retention).max_bytes
    return 0 if most is None else repository.catalog.totals().bytes - most


def is_short(repository: Repository) -> bool:
    """Return whether the store exceeds the limit of its policy, or the disk lacks the room for another version."""
    if excess(repository) > 0:
        return True
    if not repository.catalog.is_only:
        return False
    last = repository.catalog.latest()
    return disk_usage(repository.path).free < max(LITTLE, 0 if last is None else last.original_bytes)
