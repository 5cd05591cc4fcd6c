"""What the catalog says that restoring versions costs, brought up to date after objects were stored otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckstore.errors import IntegrityError
from ckstore.objects.documents import Object
from ckstore.objects.restore_cost import relative_cost
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import Catalog, VersionRow

#: Restore cost, as a multiple of a full one, and depth, by number of the version.
Costs = Mapping[int, tuple[float, int]]


def update_costs(repository: Repository) -> None:
    """Write the present depth and restore cost of every version into the catalog."""
    write_costs(repository.catalog, present_costs(repository, repository.catalog.versions()))


def present_costs(repository: Repository, rows: Sequence[VersionRow]) -> Costs:
    """Restore costs and depths of those versions of which the catalog says otherwise.

    It reads the manifest of every one of them: call it outside of a transaction.
    """
    found = {}
    for row in rows:
        try:
            said = restore_cost(StoredVersion(repository, row))
        except IntegrityError:
            continue  # A version with lost layers keeps what was known of it; `verify` names it.
        if said != (row.cost, row.depth):
            found[row.number] = said
    return found


def write_costs(catalog: Catalog, costs: Costs) -> None:
    """Write restore costs and depths into the catalog, but for versions that were forgotten meanwhile."""
    if not costs:
        return

    def change() -> None:
        there = {row.number for row in catalog.versions()}
        for number, (cost, depth) in costs.items():
            if number in there:
                catalog.update_version(number, cost=cost, depth=depth, base=depth == 0)

    catalog.commit(change)


def restore_cost(version: StoredVersion, objects: Iterable[Object] | None = None) -> tuple[float, int]:
    """What restoring a version, or these objects of it alone, costs as a multiple of a full one, and its depth."""
    reader = version.repository.reader
    objects = set(version.document.objects if objects is None else objects)
    return relative_cost(reader, objects, version.layout.files)
