"""Checks the catalog against its sources: the manifests of the packs, and the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckstore.commit.costs import restore_cost, stored_bytes
from ckstore.encoding.object_writer import version_row
from ckstore.errors import AccessError, CkstoreError, FormatVersionError
from ckstore.storage import manifest
from ckstore.storage.catalog import key
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


def store_problems(repository: Repository) -> Iterator[str]:
    """Yield a sentence for each contradiction between the catalog and the log, and for each run without a version."""
    try:
        yield from repository.catalog.differences()
    except (AccessError, FormatVersionError):
        raise
    except CkstoreError as error:
        yield str(error)
    yield from _moved_problems(repository)
    for run in repository.catalog.runs():
        if not run.versions:
            yield f"The catalog has run {run.name} without a version; run `ckstore recover`."


class CatalogCheck:
    """Compares the catalog with manifests, some packs after others, each with its versions."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        catalog = repository.catalog
        self._metrics: dict[int, list[Any]] = {}
        self._runs: set[tuple[str, str]] = set()
        with suppress(CkstoreError):  # `store_problems` reports it.
            for record in catalog.log_records():
                if record["change"] == "metrics":
                    self._metrics.setdefault(record["version"], []).append(record["metrics"])
                elif record["change"] == "rename":
                    self._runs.update((uid, record["run"]) for uid in record["uids"])
        self._companions = _raw_packs(repository)
        self._rows = {row.number: row for row in catalog.versions()}
        self._steps = {(row.run, row.step) for row in self._rows.values() if not row.superseded}
        self._placed, self._bases = catalog.placed_objects(), catalog.bases()
        self._places = {number: (pack, slot) for pack, slots in self._placed.items() for slot, number in slots.items()}
        self._known = {pack.name: pack for pack in catalog.packs()}
        self._uses: dict[int, dict[str, tuple[str, int]]] = {}

    def expect(self, versions: Sequence[StoredVersion]) -> None:
        """Look up many versions at once, before `problems` is asked for them one by one."""
        self._uses = self._repository.catalog.uses([version.row.number for version in versions])

    def problems(self, packs: Iterable[str], versions: Sequence[StoredVersion]) -> Iterator[str]:
        """Yield a sentence for each contradiction between the catalog and some packs, or the manifests of versions."""
        for name in packs:
            if (pack := self._known.get(name)) is not None:
                yield from self._pack_problems(pack)
        for version in versions:
            try:
                wrong = self._wrong_fields(version)
                if wrong and self._repository.catalog.version(version.row.number) != version.row:
                    continue  # It was changed since it was looked up.
            except CkstoreError:
                continue  # The check of the version itself reports its unreadable manifest.
            if wrong:
                yield (
                    f"The catalog contradicts the manifest of version {version.row.number} ({', '.join(wrong)}); "
                    "run `ckstore recover` to rebuild it."
                )

    def _pack_problems(self, pack: PackInfo) -> Iterator[str]:
        """Compare a pack's row, its former names and the places of its objects with its manifest."""
        try:
            document = self._repository.resolver.manifest(pack.name).document
            size = self._repository.packs.size(pack.name)
        except CkstoreError:
            return  # Packs are checked separately.
        if (pack.kind, pack.bytes) != (document.kind, size):
            yield f"The catalog has the wrong data for pack {pack.name} ({pack.bytes} bytes); run `ckstore recover`."
        records, slots = document.records, self._placed.get(pack.name, {})
        bases = {base for slot in slots if slot < len(records) and (base := records[slot].base) is not None}
        below = {self._places[number][0] for number in map(key, bases) if number in self._places}
        if not self._bases.issuperset((pack.name, base) for base in below - {pack.name}):
            yield f"The catalog does not have all packs that pack {pack.name} depends on; run `ckstore recover`."
        wrong = [slot for slot, number in slots.items() if not _is_at(records, slot, number)]
        if wrong:
            yield f"The catalog has wrong places for {len(wrong)} objects in pack {pack.name}; run `ckstore recover`."

    def _wrong_fields(self, version: StoredVersion) -> list[str]:
        """Return the names of a version's wrong facts in the catalog."""
        repository, row, document = self._repository, version.row, version.document
        catalog, packs = repository.catalog, repository.packs
        # At its commit; `recover` may have renumbered it.
        written_as = repository.resolver.number_of(row.pack)
        commit = written_as, repository.resolver.manifest(row.pack).document.created
        own = [self._companions[commit]] if commit in self._companions else []
        own.append(PackInfo(row.pack, packs.size(row.pack)))
        expected = version_row(document, own, packs.find_entry(row.pack, manifest.MEMBER))
        if (row.uid, row.run) in self._runs:
            expected = replace(expected, run=row.run)
        if row.step is None and expected.step is not None and (row.run, expected.step) in self._steps:
            expected = replace(expected, step=None)  # Two versions claim that step; see `ckstore.recovery.recover`.
        parent = None if row.parent is None else self._rows.get(row.parent) or catalog.version(row.parent)
        if parent is not None and expected.parent == repository.resolver.number_of(parent.pack):
            expected = replace(expected, parent=row.parent)
        # Later metrics; the log may be one change ahead.
        if row.metrics in [item for number in {row.number, written_as} for item in self._metrics.get(number, ())]:
            expected = replace(expected, metrics=row.metrics)
        wrong = [name for name in _FIELDS if getattr(row, name) != getattr(expected, name)]
        if wrong == ["stored_bytes"] and row.stored_bytes == stored_bytes(version):
            wrong = []  # Objects were stored again since.
        used = self._uses.get(row.number) or catalog.uses([row.number])[row.number]
        if {name for name, (_, has_blobs) in used.items() if has_blobs} != {row.pack, *document.blob_packs()}:
            wrong.append("packs")
        places = [self._places[number] for number in map(key, document.objects) if number in self._places]
        if any(not among(used.get(pack, ("", 0))[0], [slot]) for pack, slot in places):
            wrong.append("objects")
        if (row.cost, row.depth, row.base) != (expected.cost, expected.depth, expected.base):
            cost, depth = restore_cost(version)  # Objects may have been stored again since, but for a hot version.
            is_right = not row.hot and (row.cost, row.depth, row.base) == (cost, depth, depth == 0)
            wrong += [] if is_right else ["cost"]
        # If its parent was forgotten, a version gets its grandparent, which is older.
        allowed = row.parent is None or row.parent < (expected.parent or 0)
        is_older = expected.parent is not None and expected.parent not in self._rows and allowed
        if row.parent != expected.parent and not is_older:
            wrong.append("parent")
        return wrong


def _moved_problems(repository: Repository) -> Iterator[str]:
    """Compare the new names of rewritten packs with the former ones in their manifests."""

    def stands_for(pack: str) -> Sequence[str] | None:
        try:
            return repository.resolver.manifest(pack).document.stands_for
        except CkstoreError:
            return None  # Packs are checked separately.

    moved = repository.catalog.moved_packs(None)
    known = {pack.name for pack in repository.catalog.packs()} if moved else set()
    for name, present in moved.items():
        is_wrong = present not in known
        if not is_wrong and name not in (stands_for(present) or ()):
            # A killed `gc` may have left a copy next to the next one's: both name the same original.
            is_wrong = any(name in (stands_for(other) or ()) for other in known - {present})
        if is_wrong:
            yield f"The catalog wrongly says that pack {present} replaced {name}; run `ckstore recover`."


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


def _is_at(records: Sequence[Record], slot: int, number: int) -> bool:
    return slot < len(records) and key(records[slot].id) == number
