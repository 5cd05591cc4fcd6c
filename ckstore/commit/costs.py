"""Restore costs and sizes in the catalog, updated after objects were stored again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from ckstore.commit.dependents import dependent_versions
from ckstore.errors import IntegrityError, NotFoundError
from ckstore.objects.restore_cost import relative_cost
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import Catalog, VersionRow

#: Restore cost, as a multiple of a full restore, depth, and stored bytes: of the version with each number, now and in
#: the row that they replace.
Cost = tuple[float, int, int]
Costs = Mapping[int, tuple[Cost, Cost]]

#: Updates in turn with other processes, which end before.
_TRIES = 10


def update_costs(repository: Repository, moved: Collection[str] | None = None) -> None:
    """Write the current depth, restore cost and size of encoded versions into the catalog.

    With `moved`, only versions that may need one of these objects are read. Repeated until nothing differs: of two
    processes that store objects again at once, neither knows the other's.
    """
    for _ in range(_TRIES):
        repository.resolver.forget()
        rows = repository.catalog.versions() if moved is None else dependent_versions(repository, moved)
        costs = present_costs(repository, rows)
        if not costs:
            return
        write_costs(repository.catalog, costs)


def present_costs(repository: Repository, rows: Sequence[VersionRow]) -> Costs:
    """Return the restore costs, depths and sizes that differ from the catalog's.

    A hot version keeps those of its ingest until it is encoded. It reads every manifest: call it outside of a
    transaction.
    """
    found: dict[int, tuple[Cost, Cost]] = {}
    for row in rows:
        if row.hot:
            continue
        try:
            version = StoredVersion(repository, row)
            current: Cost = (*restore_cost(version), stored_bytes(version))
        except (IntegrityError, NotFoundError):
            continue  # A version with lost objects keeps its old values; `verify` reports it. Others may forget one.
        if current != cost_in(row):
            found[row.number] = current, cost_in(row)
    return found


def write_costs(catalog: Catalog, costs: Costs) -> None:
    """Write restore costs, depths and sizes into the catalog, except where others have written others since."""
    if not costs:
        return

    def change() -> None:
        for number, ((cost, depth, stored), former) in costs.items():
            with suppress(NotFoundError):  # It was forgotten since.
                if cost_in(catalog.version(number)) == former:
                    catalog.update_version(number, cost=cost, depth=depth, base=depth == 0, stored_bytes=stored)

    catalog.commit(change)


def own_bytes(version: StoredVersion, objects: Iterable[str]) -> int:
    """Return the bytes of objects that were written for this version: in packs of its number, of any of its commits."""
    resolver = version.repository.resolver
    records = map(resolver.record, objects)
    return sum(
        record.nbytes for record in records if resolver.manifest(record.pack).document.number == version.row.number
    )


def cost_in(row: VersionRow) -> Cost:
    """Return the costs in a row of the catalog."""
    return row.cost, row.depth, row.stored_bytes


def restore_cost(version: StoredVersion, objects: Iterable[str] | None = None) -> tuple[float, int]:
    """Return the restore cost of a version or some of its objects, as a multiple of a full restore, and the depth."""
    reader = version.repository.reader
    objects = set(version.document.objects if objects is None else objects)
    return relative_cost(reader, objects, version.layout.files)


def stored_bytes(version: StoredVersion) -> int:
    """Return the bytes of a version's own packs, and of its objects that a rebase stored again."""
    row, summary = version.row, version.document.summary
    if row.hot:
        return row.stored_bytes
    own = summary["stored_bytes"] if "stored_bytes" in summary else version.repository.packs.size(row.pack)
    return own + bytes_again(version.repository, version.document.objects)


def bytes_again(repository: Repository, objects: Iterable[str]) -> int:
    """Return the bytes of those objects that a rebase stored again: their packs are of no version."""
    resolver = repository.resolver
    records = [resolver.record(identity) for identity in set(objects)]
    return sum(record.nbytes for record in records if resolver.manifest(record.pack).document.number == 0)
