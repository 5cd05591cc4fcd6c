"""Finds records by id: in the catalog, then in the manifest of the pack that the catalog names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any, TypeVar

from ckstore.errors import IntegrityError
from ckstore.objects.documents import MANIFEST, BlobRef, LayoutDocument, VersionDocument
from ckstore.objects.records import ContentRecord, LatticeRecord, Record, record_from_json
from ckstore.objects.skeleton_delta import expand_against
from ckstore.runtime.forks import Lock, in_child
from ckstore.runtime.lru import Lru
from ckstore.storage import manifest
from ckstore.storage.catalog import Catalog, VersionRow, key
from ckstore.storage.pack_reader import MissingPackError, PackReader

#: Decoded manifests and layouts in the cache: most versions of a run share one layout.
_MANIFESTS = 128
_LAYOUTS = 2
#: Bytes at the end of a pack that usually contain its manifest.
_END = 64 << 10

#: Concurrent changes of the store that may fail one lookup before the object counts as lost.
_CHANGES = 8

T = TypeVar("T")


class Manifest:
    """One pack's decoded manifest: its document, its blobs and its records by slot."""

    def __init__(self, pack: str, document: dict[str, Any], blobs: dict[str, bytes]) -> None:
        self.pack = pack
        self.document = document
        self.blobs = blobs
        self._records: dict[int, Record] = {}

    def record(self, slot: int) -> Record:
        """Return the record in a slot; raise `IntegrityError` if it is empty."""
        record = self._records.get(slot)
        if record is None:
            records = self.document["records"]
            if not 0 <= slot < len(records):
                raise IntegrityError(f"Pack {self.pack} has no record {slot}; run `ckstore recover`.")
            record = record_from_json(records[slot], self.pack)
            self._records[slot] = record
        return record


class CatalogResolver:
    """Records of committed objects, and of objects that a running ingest has written.

    Parameters
    ----------
    catalog
        The catalog of the store.
    packs
        The packs of the store.
    """

    def __init__(self, catalog: Catalog, packs: PackReader) -> None:
        self.catalog = catalog
        self.packs = packs
        self._lock = Lock()
        self._lattices: dict[str, LatticeRecord] = {}
        self._contents: dict[str, ContentRecord | None] = {}
        self._under_way: dict[object, list[Record]] = {}
        self._looking = local()
        self._generation = 0
        self._forgotten = 0
        self._collected = catalog.collected()
        self._manifests: Lru[str, Manifest] = Lru(_MANIFESTS)
        self._layouts: Lru[bytes, LayoutDocument] = Lru(_LAYOUTS)
        in_child(self._begin_child)

    @property
    def generation(self) -> int:
        """A number that changes whenever records may have changed."""
        return self._generation

    def settled(self, look: Callable[[], T]) -> T:
        """Return the result of `look`, a function that reads the store by names and ids.

        A concurrent change may fail a lookup: it moves an object between two steps, or before a step that uses a cached
        record. So a failed lookup is repeated with empty caches. The failure is a loss only if the store did not change
        since the lookup began. Of nested lookups the outermost is repeated.

        Raises
        ------
        IntegrityError
            An object is lost or damaged.
        """
        if getattr(self._looking, "began", False):
            return look()
        self._looking.began = True
        try:
            with suppress(IntegrityError):
                return look()
            for _ in range(_CHANGES):
                self.catalog.refresh()
                self.forget()
                state = self.catalog.state()
                try:
                    return look()
                except IntegrityError:
                    self.catalog.refresh()
                    if self.catalog.state() == state:
                        raise
            return look()
        finally:
            self._looking.began = False

    def manifest(self, pack: str) -> Manifest:
        """Return the manifest of a pack, or of the pack that replaced it in a `gc`."""
        return self.settled(partial(self._moved_manifest, pack))

    def _moved_manifest(self, pack: str) -> Manifest:
        try:
            return self._manifest(pack)
        except MissingPackError:
            present = self.catalog.moved_packs([pack]).get(pack)
            if present is None:
                raise
            return self._manifest(present)

    def _manifest(self, pack: str) -> Manifest:
        with self._lock:  # One thread decodes a manifest; the others wait for it.
            found = self._manifests.get(pack)
            if found is None:
                try:
                    found = self._read_manifest(pack)
                except MissingPackError:
                    raise
                except IntegrityError:
                    if not self.packs.distrust([pack]):
                        raise
                    found = self._read_manifest(pack)
                self._manifests.put(pack, found)
            return found

    def prefetch_manifests(self, names: Iterable[str], besides: int = 0) -> None:
        """Announce the packs whose manifests will be read, if reads have a price: their ends are fetched together.

        The smallest packs are fetched whole, up to `besides` bytes in total, since their objects will be needed, too.
        """
        if not self.packs.read_price:
            return
        known, sizes = set(self._manifests), {}
        for name in names:
            with suppress(IntegrityError):
                if name not in known or besides:
                    sizes[name] = self.packs.size(name)
        offsets = self.catalog.manifest_offsets(list(sizes))
        parts = []
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
            end = max(size - offsets.get(name, size - _END), 0)
            length = size if size <= besides else min(end, size)
            besides -= length
            parts.append((name, size - length, length))
        self.packs.prefetch(parts)

    def _read_manifest(self, pack: str) -> Manifest:
        entry = self.packs.find_entry(pack, manifest.MEMBER)
        data = self.packs.pread(pack, entry.offset, entry.length)
        return Manifest(pack, *manifest.decode_manifest(data, MANIFEST))

    def document(self, row: VersionRow) -> VersionDocument:
        """Return the document of a version, with the current names of packs.

        If another process has written a new document since the row was read, return that.

        Raises
        ------
        IntegrityError
            The document belongs to another version than the catalog's row.
        NotFoundError
            The version was forgotten since.
        """
        return self.settled(partial(self._document, row))

    def _document(self, row: VersionRow) -> VersionDocument:
        try:
            document = self._described(row)
        except IntegrityError:
            present = self.catalog.version(row.number)
            if present.pack == row.pack or present.uid != row.uid:
                raise
            return self._document(present).elsewhere(present.pack)
        names = document.blob_packs()
        moved = self.catalog.moved_packs(names) if names else {}
        return document.with_packs(moved) if moved else document

    def _described(self, row: VersionRow) -> VersionDocument:
        """Return the document in the manifest of the row's pack."""
        stored = self.manifest(row.pack).document.get("version")
        # If two versions claim one number, `recover` gives one of them another number and another id.
        document = None if stored is None else replace(VersionDocument.from_json(stored), number=row.number)
        if document is None or document.uid != row.uid:
            raise IntegrityError(f"The catalog lists another version as version {row.number}; run `ckstore recover`.")
        return document

    def blob(self, ref: BlobRef, pack: str, length: int | None = None) -> bytes:
        """Return the bytes of a blob that a manifest in `pack` names.

        Raises
        ------
        IntegrityError
            The blob is lost or damaged, or does not have the expected `length`.
        """
        return self.settled(partial(self._blob, ref, pack, length))

    def _blob(self, ref: BlobRef, pack: str, length: int | None) -> bytes:
        place = ref.within(pack)
        assert place.pack is not None
        try:
            packed = self.manifest(place.pack).blobs[place.name]
        except KeyError as error:
            raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.") from error
        against = None if place.against is None else self.blob(place.against, pack)
        return expand_against(packed, against, length)

    def layout(self, ref: BlobRef, pack: str) -> LayoutDocument:
        """Return the layout in a blob. It is shared: callers must not change it.

        Raises
        ------
        IntegrityError
            The blob is lost or damaged.
        """
        data = self.blob(ref, pack)
        found = self._layouts.get(data)
        return self._layouts.put(data, LayoutDocument.decode(data)) if found is None else found

    def add(self, records: Iterable[Record]) -> None:
        """Add records that the catalog does not have yet."""
        with self._lock:
            for record in records:
                if isinstance(record, LatticeRecord):
                    self._lattices[record.id] = record
                else:
                    self._contents[record.id] = record
            self._generation += 1  # Last: it invalidates chains that mix old and new records.

    @contextmanager
    def under_way(self) -> Iterator[Callable[[Iterable[Record]], None]]:
        """Yield a function like `add`; the last records that it was given survive `forget` within the context."""
        token = object()

        def hold(records: Iterable[Record]) -> None:
            with self._lock:
                held = self._under_way[token] = list(records)
                self.add(held)

        try:
            yield hold
        finally:
            with self._lock:
                self._under_way.pop(token, None)

    def forget(self) -> None:
        """Empty the caches because the catalog may have changed; records in flight stay."""
        with self._lock:
            self._lattices.clear()
            self._contents.clear()
            self._generation += 1
            self._forgotten += 1
            for records in self._under_way.values():
                self.add(records)

    def _begin_child(self) -> None:
        """Forget the uncommitted records of the parent process."""
        self._under_way.clear()
        self.forget()

    def notice_collection(self) -> None:
        """Empty the caches if `gc` has moved objects since; close the files of removed packs."""
        collected = self.catalog.collected()
        with self._lock:
            changed = collected != self._collected
            self._collected = collected
        if changed:
            self.forget()
            self.packs.close()

    def known(self, contents: Iterable[str]) -> dict[str, str]:
        """Return lattice ids by content id, for the contents that the store has encoded exactly."""
        return self.stored(contents)[0]

    def stored(self, contents: Iterable[str]) -> tuple[dict[str, str], set[str]]:
        """Return the same, and the set of contents that only hot versions have."""
        wanted = list(contents)
        self.notice_collection()
        lattices, exact = self._lookup(wanted, wanted)
        found: dict[str, str] = {}
        raw = set()
        for content in wanted:
            record = exact[content]
            if record is not None:
                found[content] = record.lattice
            elif content in lattices and lattices[content].is_raw:
                raw.add(content)
            elif content in lattices:
                found[content] = content
        return found, raw

    def prefetch(self, lattices: Iterable[str], contents: Iterable[str]) -> None:
        """Look up many ids at once, and their chains level by level; absent ids are ignored.

        If a pack is lost, stop: later lookups resolve each id separately.
        """
        self.notice_collection()
        coarse, exact = set(lattices), set(contents)
        seen: set[str] = set()
        while coarse or exact:
            seen |= coarse | exact
            try:
                found, layers = self._lookup(coarse, exact)
            except IntegrityError:
                return
            above = [layer for layer in layers.values() if layer is not None]
            coarse = {record.base for record in found.values() if record.base is not None}
            coarse |= {layer.lattice for layer in above}
            exact = {layer.parent for layer in above if layer.parent is not None}
            coarse -= seen
            exact -= seen

    def _lookup(
        self, lattices: Iterable[str], contents: Iterable[str]
    ) -> tuple[dict[str, LatticeRecord], dict[str, ContentRecord | None]]:
        """Return the records of many ids; cache them unless `forget` was called during the lookup.

        The catalog is queried without the lock: a thread that holds the catalog may be waiting for the lock.
        """
        with self._lock:
            forgotten = self._forgotten
            coarse = {identity: self._lattices.get(identity) for identity in lattices}
            exact: dict[str, ContentRecord | None] = {}
            wanted = {}
            for identity in contents:
                if identity in self._contents:
                    exact[identity] = self._contents[identity]
                else:
                    wanted[identity] = key(identity)
        missing = {identity: key(identity) for identity, record in coarse.items() if record is None}
        placed = self._placed(self.catalog.find_lattices, missing)
        coarse |= {identity: found for identity, found in placed.items() if isinstance(found, LatticeRecord)}
        placed = self._placed(self.catalog.find_contents, wanted)
        exact |= {identity: found if isinstance(found, ContentRecord) else None for identity, found in placed.items()}
        known = {identity: record for identity, record in coarse.items() if record is not None}
        with self._lock:
            if forgotten == self._forgotten:
                # Records that an ingest added during the lookup are newer.
                for identity, lattice in known.items():
                    self._lattices.setdefault(identity, lattice)
                for identity, content in exact.items():
                    if self._contents.get(identity) is None:
                        self._contents[identity] = content
        return known, exact

    def lattice(self, identity: str) -> LatticeRecord:
        """Return the record of a lattice id, or of the current lattice of a content id that was stored raw before."""
        return self._lattices.get(identity) or self.settled(partial(self._lattice, identity))

    def _lattice(self, identity: str) -> LatticeRecord:
        record = self._lattices.get(identity) or self.known_lattice(identity)
        if record is None:
            content = self.content_now(identity)
            record = None if content is None else self.known_lattice(content.lattice)
        if record is None:
            raise IntegrityError(f"The store has lost object {identity}; run `ckstore recover`, then `ckstore verify`.")
        return record

    def known_lattices(self, identities: Iterable[str]) -> set[str]:
        """Return the lattice ids that the store has encoded."""
        return {identity for identity, record in self._lookup(identities, [])[0].items() if not record.is_raw}

    def known_lattice(self, identity: str) -> LatticeRecord | None:
        """Return the record of a lattice id, or None."""
        record = self._lattices.get(identity)
        return self._lookup([identity], [])[0].get(identity) if record is None else record

    def content(self, identity: str) -> ContentRecord | None:
        """Return the record of a content id's exact layer, or None."""
        try:
            return self._contents[identity]
        except KeyError:
            return self._lookup([], [identity])[1][identity]

    def content_now(self, identity: str) -> ContentRecord | None:
        """Return the same, ignoring a cached absence: an object that was raw may have been encoded since."""
        with self._lock:
            if self._contents.get(identity) is None:
                self._contents.pop(identity, None)
        return self.content(identity)

    def _placed(
        self, find: Callable[[Iterable[int]], dict[int, tuple[str, int]]], wanted: dict[str, int]
    ) -> dict[str, Record | None]:
        """Return the records of ids, given with their keys, in the catalog's slots; None for other ids."""
        if not wanted:
            return {}
        try:
            records = self._at(find(wanted.values()))
        except MissingPackError:
            # `gc` removed a pack after the catalog was queried.
            records = self._at(find(wanted.values()))
        found = {identity: records.get(number) for identity, number in wanted.items()}
        # Two ids may share a key.
        return {
            identity: record if record is not None and record.id == identity else None
            for identity, record in found.items()
        }

    def _at(self, places: dict[int, tuple[str, int]]) -> dict[int, Record]:
        self.prefetch_manifests({pack for pack, _ in places.values()})
        return {number: self._manifest(pack).record(slot) for number, (pack, slot) in places.items()}
