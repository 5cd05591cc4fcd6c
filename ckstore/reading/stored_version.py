"""One stored version, chunk by chunk: its document, the layout of its files, and the values of its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import ConflictError, IntegrityError, NotFoundError
from ckstore.formats.layout import FileLayout, Tensor
from ckstore.formats.paths import listed
from ckstore.formats.skeleton import fill_crcs
from ckstore.formats.sources import CompositeSource
from ckstore.objects.documents import VersionDocument
from ckstore.objects.layouts import LayoutDocument, check_layout
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Patches, Record, check_cut
from ckstore.policy import Fidelity
from ckstore.reading.contents import Contents, Form
from ckstore.repository import Address, Repository, opened
from ckstore.runtime.cached import cached_property
from ckstore.runtime.collector import collection_seldom
from ckstore.storage.catalog import VersionRow

#: Bytes that take no longer than another request. Small packs are fetched along with manifests up to this sum;
#: smaller sets of records are fetched whole, without reading their indexes first.
_SMALL = 4 << 20

#: Bytes of its whole chain that are fetched at once for a full read.
_BEGUN = 8 << 20

#: Size from which the levels of a chain are fetched in pieces, each with those of the other levels.
_PIECE = 1 << 20


def prefetch_manifests(repository: Repository, number: int, *, whole: bool) -> None:
    """Prefetch the manifests of a version's chain; with `whole`, also the first part of its packs."""
    packs, names = repository.packs, repository.catalog.chain_packs(number)
    if not whole:
        repository.resolver.prefetch_manifests(names, _SMALL)
        return
    repository.resolver.prefetch_manifests(names)
    sizes = {}
    for name in names:
        with suppress(IntegrityError):
            sizes[name] = packs.size(name)
    share = min(_BEGUN / max(sum(sizes.values()), 1), 1.0)
    packs.prefetch(_in_turn([(name, 0, int(share * size)) for name, size in sizes.items()]))


def prefetch_chunks(repository: Repository, objects: Sequence[str], places: Iterable[tuple[int, int | None]]) -> None:
    """Prefetch chunks, given as (unit, chunk); all chunks of a unit for None. Later reads raise the errors."""
    packs, reader = repository.packs, repository.reader
    chosen: dict[int, set[int] | None] = {}
    for number, chunk in places:
        if chunk is None:
            chosen[number] = None
        elif (chunks := chosen.setdefault(number, set())) is not None:
            chunks.add(chunk)
    wanted: list[list[tuple[Record, set[int] | None]]] = []
    for number, chunks in chosen.items():
        with suppress(IntegrityError):
            wanted.append([(record, chunks) for record in reader.chains.records(objects[number])])
    indexed = [record for levels in wanted for record, chunks in levels if reader.stored.index_ranges(record, chunks)]
    if sum(record.nbytes for record in indexed) <= _SMALL:
        whole = set(map(id, indexed))
        wanted = [[(record, None if id(record) in whole else cut) for record, cut in levels] for levels in wanted]
    else:
        packs.prefetch(
            (record.pack, *part)
            for levels in wanted
            for record, chunks in levels
            for part in reader.stored.index_ranges(record, chunks)
        )
    with suppress(IntegrityError):
        packs.prefetch(part for levels in wanted for part in _parts(reader, levels))


def _parts(reader: ObjectReader, levels: Sequence[tuple[Record, set[int] | None]]) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of an object's records in the order of reads: indexes, then the first pieces, and so on."""
    parts = [(record.pack, *part) for record, chunks in levels for part in reader.stored.ranges(record, chunks)]
    for record, _ in levels:
        for part in reader.stored.index_ranges(record, ()):
            yield record.pack, *part
    yield from _in_turn(parts)


def _in_turn(parts: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield parts of packs in the order of decoding: the first pieces of all, then the second, and so on."""
    pieces = max((-(-length // _PIECE) for _, _, length in parts), default=0)
    for piece in range(pieces):
        for pack, offset, length in parts:
            first, last = length * piece // pieces, length * (piece + 1) // pieces
            yield pack, offset + first, last - first


T = TypeVar("T")


class ChangedVersionError(ConflictError):
    """Another process changed the values or the tensors of a version while it was read."""


class StoredVersion:
    """Reads a version of a repository; `is_committed` tells whether the catalog has it."""

    #: Whether `read_extent` has other values than `chunk`.
    is_computed = False

    def __init__(self, repository: Repository, row: VersionRow, *, is_committed: bool = True) -> None:
        self._is_committed = is_committed
        self.repository = repository
        self.row = row
        self._reader: ObjectReader | None = None
        # Units whose object has been found to match the layout.
        self._fitting: set[int] = set()
        self._is_prefetched = False
        self._is_wanted_whole = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the id: another process opens the store once."""
        return stored_version, (self.repository.address, self.row.uid, self.row.number)

    @property
    def fidelity(self) -> Fidelity:
        """Fidelity of the values: `exact` or `coarse`."""
        return "coarse" if self.document.fidelity == "coarse" else "exact"

    @property
    def identity(self) -> tuple[str, str, str]:
        """The store's address, the version's id, and the fidelity of the values."""
        return self.repository.address.place, self.row.uid, self.row.fidelity

    def present(self) -> StoredVersion:
        """Return the version as it is now; raise `NotFoundError` if it was forgotten or replaced."""
        rows = self.repository.catalog.with_uid(self.row.uid)
        if not rows:
            raise NotFoundError(f"Version {self.row.number} no longer exists; choose another one.")
        return StoredVersion(self.repository, rows[0])

    def read_by(self, reader: ObjectReader) -> StoredVersion:
        """Return the version read by another reader than the store's, which has a cache of its own."""
        found = StoredVersion(self.repository, self.row)
        found._reader = reader
        return found

    def under(self, names: Mapping[str, str]) -> StoredVersion:
        """Return the version with other paths of its tensors, given by its own ones."""
        found = copy(self)
        vars(found).pop("paths", None)
        vars(found)["numbers"] = {names.get(path, path): number for path, number in self.numbers.items()}
        return found

    @cached_property
    def document(self) -> VersionDocument:
        """The version's document in the manifest."""
        if self.repository.packs.read_price:
            prefetch_manifests(self.repository, self.row.number, whole=self._is_wanted_whole)
        return self.repository.resolver.document(self.row)

    @cached_property
    @collection_seldom()
    def layout(self) -> LayoutDocument:
        """The layout of its files."""
        layout = self._settled(lambda: self.repository.resolver.layout(self.document.layout, self.row.pack))
        check_layout(layout, self.document)
        self.repository.resolver.prefetch(self.document.objects)
        return layout

    @cached_property
    def contents(self) -> Contents:
        """Its tensors, and the places of their elements in units."""
        return Contents(self.document, self.layout)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor by path as text, in the order of the files, without dropped tensors."""
        return self.contents.numbers

    @cached_property
    def paths(self) -> dict[str, tuple[int, Tensor]]:
        """(File number, tensor) by path; for few of many tensors, `place` takes less time."""
        return self.contents.rows(self.numbers)

    def place(self, path: str) -> tuple[int, Tensor]:
        """Return the file number and the layout of a tensor; raise `KeyError` without one."""
        return self.contents.row(self.numbers[path])

    def forms(self) -> dict[str, Form]:
        """Return dtype and shape by path."""
        return self.contents.forms(self.numbers)

    def is_changed(self, file: int) -> bool:
        """Return whether a restored file would differ from the original: values are coarse or dropped."""
        return self.contents.is_changed(file)

    def prefetch(self, places: Iterable[tuple[int, int]] | None = None) -> None:
        """Prefetch chunks, given as (unit, chunk), if reads have a price: few requests fetch them.

        Without `places`, prefetch everything. Errors are raised by the later reads.
        """
        self._is_wanted_whole = places is None
        # The records of a version without units are looked up together.
        if self.repository.packs.read_price and not self._is_prefetched and self.layout.units:
            self._is_prefetched = places is None
            chosen = places if places is not None else ((unit, None) for unit in self.contents.units_in_order())
            prefetch_chunks(self.repository, self.document.objects, chosen)

    def ways_from(self, held: Mapping[int, str | None]) -> dict[int, tuple[list[Patches], list[Record]]]:
        """Return patches to undo and levels to apply, by number of the unit, from objects that the caller holds.

        An id of None means that it holds none. The records are prefetched.
        """
        chains, objects = self.repository.reader.chains, self.document.objects
        found = {
            number: self._settled(partial(chains.between, identity or "", objects[number]))
            for number, identity in held.items()
        }
        if self.repository.packs.read_price:
            records = {record.id: record for undone, applied in found.values() for record in (*undone, *applied)}
            self.repository.packs.prefetch(_in_turn([(one.pack, one.offset, one.nbytes) for one in records.values()]))
        return found

    def read_extent(self, file: int, extent: int, first: int, last: int, *, keep: bool = False) -> memoryview:
        """Return the bytes of elements from `first` to before `last` of an extent; decode only their chunks.

        Chunks that are wanted whole are cached with `keep` alone.
        """
        parts = []
        for number, chunk, start, stop in self.contents.cover(file, extent, first, last):
            length = self.contents.chunk_lengths[number]
            whole = not start and (stop == length or chunk * length + stop == self.layout.units[number].count)
            parts.append(self.chunk(number, chunk, keep=keep or not whole)[start:stop].data.cast("B"))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def chunk(self, number: int, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of a unit, as unsigned integers; read-only.

        With `keep`, they are cached. Without, they may be decoded into `out`, an aligned array of their size and dtype,
        which is then returned.
        """
        look = partial(self._chunk, number, chunk, keep=keep, out=out)
        try:
            try:
                return self._settled(look)
            except IntegrityError:
                if not self._distrust(number):
                    raise
            return self._settled(look)
        except IntegrityError as error:
            raise self._concerning(number, error) from error

    def _settled(self, look: Callable[[], T]) -> T:
        """Return the result of a look at the version; see `CatalogResolver.settled`.

        Raise `ChangedVersionError` if the version has other values or tensors than before.
        """
        while True:
            row = self.row
            try:
                return self.repository.resolver.settled(look)
            except IntegrityError:
                # Another thread may have followed the change since.
                if self.row is row and not self._follow(row):
                    raise

    def _follow(self, row: VersionRow) -> bool:
        """Read a version again that another process has described again; return False if it is unchanged.

        Encoding, moving and rewriting keep values. If exact values or tensors were dropped, earlier and later reads
        would not fit together.
        """
        if not self._is_committed:
            return False
        present = self.repository.catalog.version(row.number)
        if present.described == row.described:
            return False
        again = StoredVersion(self.repository, present)
        before, after = self.document, again.document
        kept = (before.objects, before.dropped, before.links) == (after.objects, after.dropped, after.links)
        if present.uid != row.uid or not kept:
            raise ChangedVersionError(
                f"Version {self.row.number} was thinned, encoded as coarse or replaced; take it from the store again."
            )
        self.row, self.document = present, after
        self._fitting.clear()
        return True

    def _distrust(self, number: int) -> bool:
        """Drop local copies of a unit's packs; return whether to read them again."""
        records = self.repository.reader.chains.records(self.document.objects[number])
        return self.repository.packs.distrust({record.pack for record in records})

    def _concerning(self, number: int, error: IntegrityError) -> IntegrityError:
        """Return an error of a unit, with the names of its tensors or files."""
        return type(error)(f"Version {self.row.number}: {listed(self.contents.names(number))} cannot be read: {error}")

    def _chunk(self, number: int, chunk: int, *, keep: bool, out: Bits | None) -> Bits:
        if number not in self._fitting:
            self._fit(number)
        return (self._reader or self.repository.reader).bits(self.document.objects[number], chunk, keep=keep, out=out)

    def _fit(self, number: int) -> None:
        """Raise `IntegrityError` unless the object of a unit exists and matches the layout."""
        record = self.repository.resolver.record(self.document.objects[number])
        check_cut(record, self.layout.units[number])
        if record.is_exact == (number in self.document.coarse_units):
            raise IntegrityError(f"Object {record.id} has another fidelity than its version; run `ckstore verify`.")
        self._fitting.add(number)

    def require(self, file: int, extent: int | None = None) -> None:
        """Raise `IntegrityError` unless the objects of an extent, or of a file, exist, before memory is allocated."""
        for number in self.contents.units_of(file, extent):
            if number not in self._fitting:
                try:
                    self._settled(partial(self._fit, number))
                except IntegrityError as error:
                    raise self._concerning(number, error) from error

    def skeleton(self, file: int) -> bytes:
        """Return all bytes of a file that are not tensor data."""
        data, crcs = self.blank_skeleton(file), self.crcs(file)
        try:
            return fill_crcs(data, self.layout.files[file], crcs)
        except ValueError as error:
            raise IntegrityError(
                f"The layout of version {self.row.number} has {error}; restore its pack from a copy."
            ) from error

    def check_present(self) -> None:
        """Raise `IntegrityError` if parts of the version are missing; nothing is decoded."""
        for file in range(len(self.document.files)):
            self.skeleton(file)
        for record in self.repository.reader.chains.records(*self.document.objects):
            if record.end > self.repository.packs.size(record.pack):
                raise IntegrityError(f"Pack {record.pack} is too short; restore it from a copy.")

    def blank_skeleton(self, file: int) -> bytes:
        """Return the skeleton with its CRCs as zeros, as it is stored."""
        layout = self.layout.files[file]
        length = layout.size - sum([prod(extent.shape) * ITEM_SIZES[extent.dtype] for extent in layout.extents])
        return self._settled(
            lambda: self.repository.resolver.blob(self.document.files[file].skeleton, self.row.pack, length)
        )

    def crcs(self, file: int) -> list[int]:
        """Return the CRC-32 of each checked range of a file."""
        first, last = self.layout.bounds[2][file : file + 2]
        found: list[int] = np.frombuffer(self.all_crcs, "<u4")[first:last].tolist()
        return found

    @cached_property
    def all_crcs(self) -> bytes:
        """CRC-32 of all checked ranges, file by file, as they are stored."""
        size = 4 * self.layout.bounds[2][-1]
        return self._settled(lambda: self.repository.resolver.blob(self.document.crcs, self.row.pack, size))

    def source(self, file: int, *, gaps: bool = False) -> CompositeSource:
        """Return the original file, composed of its skeleton and of chunks decoded on read.

        With `gaps`, lost or dropped elements become zeros. Raise `InputError` if the layout contradicts itself.
        """
        layout = self.layout.files[file]
        starts = [extent.start for extent in layout.extents]
        sizes = [prod(extent.shape) * ITEM_SIZES[extent.dtype] for extent in layout.extents]

        def read(index: int, offset: int, nbytes: int) -> memoryview:
            size = ITEM_SIZES[layout.extents[index].dtype]
            first = offset // size
            try:
                data = self.read_extent(file, index, first, -(-(offset + nbytes) // size))
            except (IntegrityError, NotFoundError):
                if gaps:
                    return memoryview(bytes(nbytes))
                raise
            return data[offset - first * size :][:nbytes]

        return CompositeSource(self.skeleton(file), zip(starts, sizes, strict=True), layout.size, read)

    def parsed(self, file: int, *, gaps: bool = False) -> FileLayout:
        """Return the layout of a file with its tree, parsed from the skeleton; see `source`."""
        from ckstore.formats.detect import parse

        return parse(self.source(file, gaps=gaps), self.document.files[file].path)


def stored_version(address: Address, uid: str, number: int) -> StoredVersion:
    """Return a version of the store at an address, which this process opens once; errors call it `number`."""
    repository = opened(address)
    rows = repository.catalog.with_uid(uid)
    if not rows:
        repository.catalog.refresh()
        rows = repository.catalog.with_uid(uid)
    if not rows:
        raise NotFoundError(f"Version {number} no longer exists in the store {address.place}; choose another one.")
    return StoredVersion(repository, rows[0])
