"""Finds records by id: in the catalog, then in the manifest of the pack that the catalog names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import RLock
from typing import Any

from ckstore.documents import BlobRef, VersionDocument
from ckstore.errors import IntegrityError
from ckstore.records import ContentRecord, LatticeRecord, Record, record_from_json
from ckstore.storage import manifest
from ckstore.storage.catalog import Catalog, VersionRow, key
from ckstore.storage.delta import expand_against
from ckstore.storage.pack_reader import PackReader

#: Manifests that stay decoded.
_MANIFESTS = 128


class Manifest:
    """One pack's decoded manifest: its document, its blobs and its records by slot."""

    def __init__(self, pack: str, document: dict[str, Any], blobs: dict[str, bytes]) -> None:
        self.pack = pack
        self.document = document
        self.blobs = blobs
        self._records: dict[int, Record] = {}

    def record(self, slot: int) -> Record:
        """The record in a slot; raises `IntegrityError` where there is none."""
        record = self._records.get(slot)
        if record is None:
            try:
                record = record_from_json(self.document["records"][slot], self.pack)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise IntegrityError(f"Pack {self.pack} has no record {slot}; run `ckstore recover`.") from error
            self._records[slot] = record
        return record


class CatalogResolver:
    """Records of committed objects, and of those that an ingest under way has written but not committed.

    Parameters
    ----------
    catalog
        The index.
    packs
        The bytes.
    """

    def __init__(self, catalog: Catalog, packs: PackReader) -> None:
        self.catalog = catalog
        self.packs = packs
        self._lock = RLock()
        self._lattices: dict[str, LatticeRecord] = {}
        self._contents: dict[str, ContentRecord | None] = {}
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()

    def manifest(self, pack: str) -> Manifest:
        """The manifest of a pack."""
        with self._lock:
            found = self._manifests.get(pack)
            if found is not None:
                self._manifests.move_to_end(pack)
                return found
            entry = self.packs.find_entry(pack, manifest.MEMBER)
            found = Manifest(pack, *manifest.decode_manifest(self.packs.pread(pack, entry.offset, entry.length)))
            self._manifests[pack] = found
            while len(self._manifests) > _MANIFESTS:
                self._manifests.popitem(last=False)
            return found

    def document(self, row: VersionRow) -> VersionDocument:
        """What the manifest says of a version; `IntegrityError` where it is not the version of the catalog's row."""
        said = self.manifest(row.pack).document.get("version")
        document = None if said is None else VersionDocument.from_json(said)
        if document is None or (document.uid, document.number) != (row.uid, row.number):
            raise IntegrityError(f"The catalog takes another version for version {row.number}; run `ckstore recover`.")
        return document

    def blob(self, ref: BlobRef, pack: str) -> bytes:
        """The bytes of a blob that a manifest in `pack` names."""
        place = ref.within(pack)
        assert place.pack is not None
        try:
            packed = self.manifest(place.pack).blobs[place.name]
        except KeyError as error:
            raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.") from error
        against = None if place.against is None else self.blob(place.against, pack)
        return expand_against(packed, against)

    def add(self, records: Iterable[Record]) -> None:
        """Make records known that the catalog does not have yet."""
        with self._lock:
            for record in records:
                if isinstance(record, LatticeRecord):
                    self._lattices[record.id] = record
                else:
                    self._contents[record.id] = record

    def forget(self) -> None:
        """Drop everything remembered, because the catalog may have changed."""
        with self._lock:
            self._lattices.clear()
            self._contents.clear()

    def known(self, contents: Iterable[str]) -> dict[str, str]:
        """Lattice ids by content id, for those contents that the store can restore exactly."""
        wanted = list(contents)
        self.prefetch(wanted, wanted)
        found = {}
        for content in wanted:
            exact = self.content(content)
            if exact is not None:
                found[content] = exact.lattice
            elif content in self._lattices:
                found[content] = content
        return found

    def prefetch(self, lattices: Iterable[str], contents: Iterable[str]) -> None:
        """Look many ids up at once; those that the store does not have stay unknown."""
        with self._lock:
            wanted = {identity: key(identity) for identity in lattices if identity not in self._lattices}
            places = self.catalog.find_lattices(wanted.values())
            for identity, number in wanted.items():
                record = self._at(places.get(number))
                if isinstance(record, LatticeRecord) and record.id == identity:
                    self._lattices[identity] = record
            wanted = {identity: key(identity) for identity in contents if identity not in self._contents}
            places = self.catalog.find_contents(wanted.values())
            for identity, number in wanted.items():
                found = self._at(places.get(number))
                is_it = isinstance(found, ContentRecord) and found.id == identity
                self._contents[identity] = found if is_it and isinstance(found, ContentRecord) else None

    def lattice(self, identity: str) -> LatticeRecord:
        """The record of a lattice id."""
        record = self.known_lattice(identity)
        if record is None:
            raise IntegrityError(f"The store has lost object {identity}; run `ckstore recover`, then `ckstore verify`.")
        return record

    def known_lattice(self, identity: str) -> LatticeRecord | None:
        """The record of a lattice id; None where the store has none."""
        if identity not in self._lattices:
            self.prefetch([identity], [])
        return self._lattices.get(identity)

    def content(self, identity: str) -> ContentRecord | None:
        """The record of a content id's exact layer; None where there is none."""
        if identity not in self._contents:
            self.prefetch([], [identity])
        return self._contents[identity]

    def _at(self, place: tuple[str, int] | None) -> Record | None:
        return None if place is None else self.manifest(place[0]).record(place[1])
