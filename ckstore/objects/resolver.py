"""Finds records by id: in the catalog, then in the manifest of the pack that the catalog names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import local
from typing import TypeVar

from msgspec.structs import replace

from ckstore.errors import IntegrityError
from ckstore.objects.blobs import expand_against
from ckstore.objects.documents import BlobRef, ManifestDocument, VersionDocument
from ckstore.objects.layouts import LayoutDocument
from ckstore.objects.records import Patches, Raw, Record, check_cut
from ckstore.runtime.forks import Lock, in_child
from ckstore.runtime.lru import Lru
from ckstore.storage import manifest
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.pack_reader import MissingPackError, PackReader
from ckstore.storage.rows import checked_keys, keys

#: Decoded manifests and layouts in the cache: most versions of a run share one layout.
_MANIFESTS = 128
_LAYOUTS = 2
#: Numbers of packs' versions in the cache: more than there are hot versions.
_NUMBERS = 4096
#: Bytes of expanded blobs in the cache: a blob and the one that it is a delta against.
_BLOBS = 4 << 20
#: Bytes at the end of a pack that usually contain its manifest.
_END = 64 << 10

#: Number of cached records, and how many times the largest lookup they may be instead, for long chains.
_RECORDS, _LOOKUPS = 2048, 32

#: Concurrent changes of the store that may fail one lookup before the object counts as lost.
_CHANGES = 8

T = TypeVar("T")


class Manifest:
    """One pack's decoded manifest: its document, its blobs and its records by slot."""

    def __init__(self, pack: str, document: ManifestDocument, blobs: dict[str, bytes]) -> None:
        self.pack = pack
        self.document = document
        self.blobs = blobs
        self._records: dict[int, Record] = {}
        self._shortcuts = {patches.id: patches for patches in document.shortcuts}

    def shortcut(self, identity: str) -> Patches | None:
        """Return patches of an object's predecessor that lead to it, if the pack has any besides its record."""
        patches = self._shortcuts.get(identity)
        return None if patches is None else patches.placed(self.pack)

    def record(self, slot: int) -> Record:
        """Return the record in a slot; raise `IntegrityError` if it is empty."""
        record = self._records.get(slot)
        if record is None:
            records = self.document.records
            if not 0 <= slot < len(records):
                raise IntegrityError(f"Pack {self.pack} has no record {slot}; run `ckstore recover`.")
            record = records[slot].placed(self.pack)
            self._records[slot] = record
        return record


class CatalogResolver:
    """Records of committed objects, and of objects that a running ingest has written."""

    def __init__(self, catalog: Catalog, packs: PackReader) -> None:
        self.catalog = catalog
        self.packs = packs
        self._lock = Lock()
        self._records: dict[str, Record] = {}
        self._largest_lookup = 0
        # Records that the catalog will never have, until `forget`.
        self._added: dict[str, Record] = {}
        self._under_way: dict[object, list[Record]] = {}
        self._looking = local()
        self._generation = 0
        self._forgotten = 0
        self._collected = catalog.collected()
        self._manifests: Lru[str, Manifest] = Lru(_MANIFESTS)
        self._numbers: Lru[str, int] = Lru(_NUMBERS)
        self._layouts: Lru[bytes, LayoutDocument] = Lru(_LAYOUTS)
        self._blobs: Lru[BlobRef, bytes] = Lru(_BLOBS)
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
            try:
                return look()
            except IntegrityError:
                pass
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

    def number_of(self, pack: str) -> int:
        """Return the number of the version that a pack was written for."""
        found = self._numbers.get(pack)
        return self._numbers.put(pack, self.manifest(pack).document.number) if found is None else found

    def _moved_manifest(self, pack: str) -> Manifest:
        try:
            return self._manifest(pack)
        except MissingPackError:
            present = self.catalog.moved_packs([pack]).get(pack)
            if present is None:
                raise
            return self._manifest(present)

    def _manifest(self, pack: str) -> Manifest:
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
        # Without the lock: opening a pack may ask the catalog, whose holder may wait for the lock.
        entry = self.packs.find_entry(pack, manifest.MEMBER)
        data = self.packs.pread(pack, entry.offset, entry.length)
        with self._lock:  # One thread decodes a manifest; the others wait for it.
            found = self._manifests.get(pack)
            return found or self._manifests.put(pack, Manifest(pack, *manifest.decode_manifest(data, ManifestDocument)))

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
        document = self.manifest(row.pack).document.described()
        if document is None or document.uid != row.uid:
            raise IntegrityError(f"The catalog lists another version as version {row.number}; run `ckstore recover`.")
        # If two versions claim one number, `recover` gives one of them another number and another id.
        return replace(document, number=row.number)

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
        expanded = self._blobs.get(place)
        if expanded is not None and length in (None, len(expanded)):
            return expanded
        try:
            packed = self.manifest(place.pack).blobs[place.name]
        except KeyError as error:
            raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.") from error
        against = None if place.against is None else self.blob(place.against, pack)
        expanded = expand_against(packed, against, length)
        return self._blobs.put(place, expanded, len(expanded))

    def layout(self, ref: BlobRef, pack: str) -> LayoutDocument:
        """Return the layout in a blob. It is shared: callers must not change it."""
        data = self.blob(ref, pack)
        found = self._layouts.get(data)
        return self._layouts.put(data, LayoutDocument.decode(data)) if found is None else found

    def add(self, records: Iterable[Record]) -> None:
        """Add records that the catalog does not have, until `forget`."""
        with self._lock:
            self._added.update((record.id, record) for record in records)
            self._put(self._added.values())

    def _put(self, records: Iterable[Record]) -> None:
        self._records.update((record.id, record) for record in records)
        self._generation += 1  # Last: it invalidates chains that mix old and new records.

    @contextmanager
    def under_way(self) -> Iterator[Callable[[Iterable[Record]], None]]:
        """Yield a function that adds records which the catalog does not have yet.

        The last records that it was given survive `forget` within the context.
        """
        token = object()

        def hold(records: Iterable[Record]) -> None:
            with self._lock:
                held = self._under_way[token] = list(records)
                self._put(held)

        try:
            yield hold
        finally:
            with self._lock:
                self._under_way.pop(token, None)

    def forget(self) -> None:
        """Empty the caches because the catalog may have changed; records in flight stay."""
        with self._lock:
            self._added.clear()
            self._blobs.clear()
            self._forgotten += 1
            self._drop_records()

    def _drop_records(self) -> None:
        """Drop all records that the catalog has."""
        self._records.clear()
        self._put(self._added.values())
        for records in self._under_way.values():
            self._put(records)

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

    def known(self, identities: Iterable[str]) -> set[str]:
        """Return the ids among `identities` of objects that the store has encoded."""
        self.notice_collection()
        return self.stored(identities)[0]

    def stored(self, identities: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the ids of encoded objects, and those of objects that only hot versions have.

        Objects that another thread has not committed yet count as absent: its change may fail. Call `notice_collection`
        first, once for many calls under one lease.
        """
        found = self._lookup(identities)
        with self._lock:
            held = {record.id for records in self._under_way.values() for record in records}
        if late := held & found.keys():
            placed = self._placed(late)
            found = {identity: record for identity, record in found.items() if identity not in late} | placed
        raw = {identity for identity, record in found.items() if isinstance(record, Raw)}
        return found.keys() - raw, raw

    def prefetch(self, identities: Iterable[str]) -> None:
        """Look up many ids at once, and their chains level by level; absent ids are ignored.

        If a pack is lost, stop: later lookups resolve each id separately.
        """
        wanted = {identity for identity in identities if identity not in self._records}
        if wanted:
            self.notice_collection()
        seen: set[str] = set()
        while wanted:
            seen |= wanted
            try:
                found = self._lookup(wanted)
            except IntegrityError:
                return
            wanted = {record.base for record in found.values() if record.base is not None} - seen

    def _lookup(self, identities: Iterable[str]) -> dict[str, Record]:
        """Return the records of many ids; cache them unless `forget` was called during the lookup.

        The catalog is queried without the lock: a thread that holds the catalog may be waiting for the lock.
        """
        wanted = list(identities)
        with self._lock:
            forgotten = self._forgotten
            found = {identity: self._records[identity] for identity in wanted if identity in self._records}
        placed = self._placed([identity for identity in wanted if identity not in found])
        with self._lock:
            if forgotten == self._forgotten:
                # Records that an ingest added during the lookup are newer.
                self._largest_lookup = max(self._largest_lookup, len(placed))
                if len(self._records) > max(_RECORDS, _LOOKUPS * self._largest_lookup):
                    self._drop_records()
                for identity, record in placed.items():
                    self._records.setdefault(identity, record)
        return found | placed

    def record(self, identity: str) -> Record:
        """Return the record of an id; raise `IntegrityError` if it is lost."""
        return self._records.get(identity) or self.settled(partial(self._record, identity))

    def _record(self, identity: str) -> Record:
        record = self.find(identity)
        if record is None:
            raise IntegrityError(f"The store has lost object {identity}; run `ckstore recover`, then `ckstore verify`.")
        return record

    def shortcut(self, record: Record) -> Patches | None:
        """Return sound patches that also lead to an object, from another one; None without any."""
        with suppress(IntegrityError):
            patches = self._manifest(record.pack).shortcut(record.id) if record.pack else None
            if patches is not None:
                check_cut(patches, record)
            return patches
        return None

    def find(self, identity: str) -> Record | None:
        """Return the record of an id, or None."""
        return self._records.get(identity) or self._lookup([identity]).get(identity)

    def _placed(self, identities: Collection[str]) -> dict[str, Record]:
        """Return the records of ids in the catalog's slots; leave out other ids.

        Raise `CkstoreError` for an id that shares its key with another one in the store.
        """
        if not identities:
            return {}
        find, wanted = self.catalog.find_objects, keys(identities)
        try:
            records = self._at(find(wanted.values()))
        except MissingPackError:
            # `gc` removed a pack after the catalog was queried.
            records = self._at(find(wanted.values()))
        found = {}
        for identity, number in wanted.items():
            record = records.get(number)
            if record is not None and record.id == identity:
                found[identity] = record
            elif record is not None:  # The catalog is damaged, or the ids share their key.
                checked_keys((record.id, identity))
        return found

    def check_keys(self, identities: Collection[str]) -> None:
        """Raise `CkstoreError` if an id shares its key with another one in the store, which may be damaged."""
        try:
            self._placed(identities)
        except IntegrityError:
            for one in identities:
                with suppress(IntegrityError):
                    self._placed([one])

    def _at(self, places: dict[int, tuple[str, int]]) -> dict[int, Record]:
        self.prefetch_manifests({pack for pack, _ in places.values()})
        return {number: self._manifest(pack).record(slot) for number, (pack, slot) in places.items()}
