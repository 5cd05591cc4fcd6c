"""Checks the catalog against its sources: the manifests of the packs, and the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckstore.commit.costs import restore_cost, stored_bytes
from ckstore.encoding.object_writer import version_row
from ckstore.errors import AccessError, CkstoreError
from ckstore.storage import manifest
from ckstore.storage.catalog import VersionRow, key
from ckstore.storage.pack import PackInfo
from ckstore.storage.slots import among

if TYPE_CHECKING:
    from ckstore.objects.records import Record
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.repository import Repository

#: Fields that come from the manifest and never change: `recover` would write the same values.
_FIELDS = (
    "uid", "run", "step", "created", "manifest_offset", "manifest_length", "original_bytes", "stored_bytes",
    "elements", "tensors", "files", "fidelity", "hot", "dropped", "metrics", "source",
)  # fmt: skip


def catalog_problems(repository: Repository, versions: Sequence[StoredVersion]) -> Iterator[str]:
    """Yield a sentence for each contradiction between the catalog and the log or the manifests of `versions`."""
    records: list[dict[str, Any]] = []
    try:
        records = repository.catalog.records()
        yield from repository.catalog.differences()
    except AccessError:
        raise
    except CkstoreError as error:
        yield str(error)
    yield from _packs(repository)
    yield from _places(repository)
    companions = _raw_packs(repository)
    present = {row.number for row in repository.catalog.versions()}
    for version in versions:
        try:
            wrong = _wrong_fields(repository, version, companions, present, records)
            if wrong and repository.catalog.version(version.row.number) != version.row:
                continue  # It was changed since it was looked up.
        except CkstoreError:
            continue  # The check of the version itself reports its unreadable manifest.
        if wrong:
            yield (
                f"The catalog contradicts the manifest of version {version.row.number} ({', '.join(wrong)}); "
                "run `ckstore recover` to rebuild it."
            )


def _wrong_fields(
    repository: Repository,
    version: StoredVersion,
    companions: dict[tuple[int, str], PackInfo],
    present: set[int],
    records: Sequence[Mapping[str, Any]],
) -> list[str]:
    row, document = version.row, version.document
    written_as = _written_as(repository, row)
    commit = written_as, repository.resolver.manifest(row.pack).document.created
    packs = [companions[commit]] if commit in companions else []
    packs.append(PackInfo(row.pack, repository.packs.size(row.pack)))
    expected = version_row(document, packs, repository.packs.find_entry(row.pack, manifest.MEMBER))
    taken = expected.step is not None and repository.catalog.at_step(row.run, expected.step) is not None
    if row.step is None and taken:
        expected = replace(expected, step=None)  # Two versions claim that step; see `ckstore.recovery.recover`.
    if row.parent is not None and expected.parent == _written_as(repository, repository.catalog.version(row.parent)):
        expected = replace(expected, parent=row.parent)
    # Later metrics; the log may be one change ahead.
    added = [item["metrics"] for item in records if item["change"] == "metrics"
             and item["version"] in (row.number, written_as)]  # fmt: skip
    if row.metrics in added:
        expected = replace(expected, metrics=row.metrics)
    wrong = [name for name in _FIELDS if getattr(row, name) != getattr(expected, name)]
    if wrong == ["stored_bytes"] and row.stored_bytes == stored_bytes(version):
        wrong = []  # Objects were stored again since.
    if repository.catalog.references(row.number) != {row.pack, *document.blob_packs()}:
        wrong.append("packs")
    used = repository.catalog.uses(row.number)
    places = repository.catalog.find_objects(map(key, document.objects)).values()
    if any(not among(used.get(pack, ""), [slot]) for pack, slot in places):
        wrong.append("objects")
    if (row.cost, row.depth, row.base) != (expected.cost, expected.depth, expected.base):
        cost, depth = restore_cost(version)  # Objects may have been stored again since, but for a hot version.
        is_right = not row.hot and (row.cost, row.depth, row.base) == (cost, depth, depth == 0)
        wrong += [] if is_right else ["cost"]
    # If its parent was forgotten, a version gets its grandparent, which is older.
    allowed = row.parent is None or row.parent < (expected.parent or 0)
    if row.parent != expected.parent and (expected.parent is None or expected.parent in present or not allowed):
        wrong.append("parent")
    return wrong


def _written_as(repository: Repository, row: VersionRow) -> int:
    """Return the number of a version at its commit; `recover` may have renumbered it."""
    number: int = repository.resolver.manifest(row.pack).document.number
    return number


def _raw_packs(repository: Repository) -> dict[tuple[int, str], PackInfo]:
    """Return the pack of raw objects of each commit, by its number and time."""
    found = {}
    for pack in repository.catalog.packs():
        if pack.kind == "raw":
            try:
                document = repository.resolver.manifest(pack.name).document
                info = PackInfo(pack.name, repository.packs.size(pack.name))
                found[document.number, document.created] = info
            except CkstoreError:
                continue  # Packs are checked separately.
    return found


def _packs(repository: Repository) -> Iterator[str]:
    """Compare the catalog's packs and replaced packs with their manifests."""
    known = {pack.name: pack for pack in repository.catalog.packs()}
    # A killed `gc` may have left a copy next to the next one's: both name the same original.
    former: dict[str, set[str]] = {}
    for name, pack in known.items():
        try:
            document = repository.resolver.manifest(name).document
            size = repository.packs.size(name)
        except CkstoreError:
            continue  # Packs are checked separately.
        for before in document.stands_for:
            former.setdefault(before, set()).add(name)
        if (pack.kind, pack.bytes) != (document.kind, size):
            yield f"The catalog has the wrong data for pack {name} ({pack.bytes} bytes); run `ckstore recover`."
    for name, present in repository.catalog.moved_packs(None).items():
        if present not in known or present not in former.get(name, {present}):
            yield f"The catalog wrongly says that pack {present} replaced {name}; run `ckstore recover`."
    for run in repository.catalog.runs():
        if not run.versions:
            yield f"The catalog has run {run.name} without a version; run `ckstore recover`."


def _places(repository: Repository) -> Iterator[str]:
    """Compare the catalog's places of objects with the manifests."""
    placed, known = repository.catalog.placed_objects(), repository.catalog.bases()
    pack_of = {number: pack for pack, slots in placed.items() for number in slots.values()}
    for pack, slots in placed.items():
        try:
            records = repository.resolver.manifest(pack).document.records
        except CkstoreError:
            continue
        bases = {base for slot in slots if slot < len(records) and (base := records[slot].base) is not None}
        below = {pack_of[number] for number in map(key, bases) if number in pack_of}
        if not known.issuperset((pack, base) for base in below - {pack}):
            yield f"The catalog does not have all packs that pack {pack} depends on; run `ckstore recover`."
        wrong = [slot for slot, number in slots.items() if not _is_at(records, slot, number)]
        if wrong:
            yield f"The catalog has wrong places for {len(wrong)} objects in pack {pack}; run `ckstore recover`."


def _is_at(records: Sequence[Record], slot: int, number: int) -> bool:
    return slot < len(records) and key(records[slot].id) == number
