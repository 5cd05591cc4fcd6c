"""Rebase: stores the objects of old versions in full, so that restoring them needs no other version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckstore.commit.in_full import store_in_full
from ckstore.encoding.budget import checked_budget
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import cost
from ckstore.objects.restore_cost import LEVEL, assembly_work
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage.catalog import VersionRow

if TYPE_CHECKING:
    from ckstore.objects.reader import ObjectReader
    from ckstore.repository import Repository


#: Attempts while other processes change the versions.
_TRIES = 3
#: Tolerance for rounded costs.
_ROUNDING = 1.001


@dataclass(slots=True)
class RebaseReport:
    """Result of a rebase, or a prediction.

    Attributes
    ----------
    versions
        Numbers of the versions that exceeded the budget.
    objects
        Number of objects that were stored in full.
    bytes
        Bytes that were added, 0 in a prediction; `gc` frees the superseded objects.
    beyond
        Numbers of the versions that still exceed the budget: objects of the schemes `lc` and `factors`, sums, cannot
        be stored in full.

    Examples
    --------
    >>> store.rebase("gpt@300", dry_run=True).versions
    [3]
    """

    versions: list[int]
    objects: int = 0
    bytes: int = 0
    beyond: list[int] = field(default_factory=list)


def rebase(
    repository: Repository, versions: Sequence[StoredVersion], *, budget: float | None = None, dry_run: bool = False
) -> RebaseReport:
    """Store objects of `versions` in full until each version costs at most `budget` times a full restore.

    Without a `budget`, every object is stored in full. A `dry_run` changes nothing, and counts the versions over budget
    and the objects to store. Raise `NotFoundError` if a version was forgotten since.
    """
    budget = None if budget is None else checked_budget(budget)
    for _ in range(_TRIES):
        try:
            return _rebase(repository, versions, budget, dry_run=dry_run)
        except IntegrityError:
            repository.catalog.refresh()
            rows = [repository.catalog.version(version.row.number) for version in versions]
            if all(row.described == version.row.described for row, version in zip(rows, versions, strict=True)):
                raise
            # Others have changed a version since it was looked up: its objects may have been removed.
            repository.resolver.forget()
            versions = [StoredVersion(repository, row) for row in rows]
    return _rebase(repository, versions, budget, dry_run=dry_run)


def _rebase(
    repository: Repository, versions: Sequence[StoredVersion], budget: float | None, *, dry_run: bool
) -> RebaseReport:
    chosen: set[str] = set()
    numbers, beyond = [], []
    for version in versions:
        wanted, is_within = _beyond(repository.reader, version, budget, chosen)
        if wanted:
            numbers.append(version.row.number)
            chosen |= wanted
        if not is_within:
            beyond.append(version.row.number)
    report = RebaseReport(numbers, len(chosen), beyond=beyond)
    if dry_run or not chosen:
        return report
    with repository.catalog.lease("rebase"):
        report.bytes = store_in_full(repository, chosen, numbers)
    return report


def within_budget(repository: Repository, row: VersionRow, budget: float) -> VersionRow:
    """Rebase a version that was just encoded if it exceeds its budget; return its row.

    Objects that it shares with other versions were planned for their budgets, not for this one's.
    """
    if row.cost <= budget * _ROUNDING:
        return row
    rebase(repository, [StoredVersion(repository, row)], budget=budget)
    return repository.catalog.version(row.number)


def _beyond(
    reader: ObjectReader, version: StoredVersion, budget: float | None, chosen: set[str]
) -> tuple[set[str], bool]:
    """Return the objects of a version to store in full, and whether the version is within the budget then.

    The objects that save most come first. Sums cannot be stored in full.
    """
    records = [reader.resolver.record(identity) for identity in sorted(set(version.document.objects))]
    depth = {record.id: reader.chains.depth(record) for record in records}
    fixed = cost(assembly_work(version.layout.files))
    full = {record.id: cost(record.alone_work) for record in records}
    spent = {
        record.id: full[record.id] if record.id in chosen else cost(reader.chains.work(record)) for record in records
    }
    allowed = (budget or 0.0) * (fixed + sum(cost(record.full_work) for record in records))
    total = fixed + sum(spent.values())
    wanted: set[str] = set()
    sums = {record.id for record in records if record.is_sum and depth[record.id] > 0}
    left = sorted(depth.keys() - chosen, key=lambda identity: (depth[identity], identity))
    for identity in sorted(depth, key=lambda identity: (full[identity] - spent[identity], identity)):
        while left and left[-1] in wanted:
            left.pop()
        if total + (LEVEL * depth[left[-1]] if left else 0.0) <= allowed:
            break
        if identity not in chosen and identity not in sums and depth[identity] > 0:
            wanted.add(identity)
            total += full[identity] - spent[identity]
    deepest = max((depth[identity] for identity in sums), default=0)
    return wanted, not sums or total + LEVEL * deepest <= allowed * _ROUNDING
