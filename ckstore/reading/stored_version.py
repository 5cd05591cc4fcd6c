"""One stored version, chunk by chunk: its document, the layout of its files, and the values of its objects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np

from ckstore.codecs.lattice import PARTS, Bits
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import ConflictError, IntegrityError, NotFoundError
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout, Path, Tensor
from ckstore.formats.paths import listed, path_to_text
from ckstore.formats.shards import join
from ckstore.formats.skeleton import fill_crcs
from ckstore.formats.sources import CompositeSource
from ckstore.objects.documents import LayoutDocument, VersionDocument, check_layout
from ckstore.objects.records import Raw, Record, check_cut
from ckstore.objects.stored_chunks import is_whole
from ckstore.policy import Fidelity
from ckstore.repository import Address, Repository, opened
from ckstore.runtime.cached import cached_property
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.threads import worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack_reader import MissingPackError

#: Bytes that take no longer than another request. Small packs are fetched along with manifests up to this sum;
#: smaller sets of records are fetched whole, without reading their indexes first.
_SMALL = 4 << 20

#: Bytes of its whole chain that are fetched at once for a full read.
_BEGUN = 8 << 20

#: Size from which the levels of a chain are fetched in pieces, each with those of the other levels.
_PIECE = 1 << 20

T = TypeVar("T")


class ChangedVersionError(ConflictError):
    """Another process changed the values or the tensors of a version while it was read."""


class StoredVersion:
    """Reads a version of a repository.

    Parameters
    ----------
    repository
        Repository of the version.
    row
        Row of the version in the catalog.
    is_committed
        Whether the catalog has the version.
    """

    def __init__(self, repository: Repository, row: VersionRow, *, is_committed: bool = True) -> None:
        self._is_committed = is_committed
        self.repository = repository
        self.row = row
        # Units whose object has been found to match the layout.
        self._fitting: set[int] = set()
        self._foreseen = False
        self._is_whole = False

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

    @cached_property
    def document(self) -> VersionDocument:
        """The version's document in the manifest."""
        if self.repository.packs.read_price:
            self._prefetch_packs()
        return self.repository.resolver.document(self.row)

    def _prefetch_packs(self) -> None:
        """Prefetch manifests, and parts that are needed in any case."""
        packs, catalog, resolver = self.repository.packs, self.repository.catalog, self.repository.resolver
        if not self._is_whole:
            resolver.prefetch_manifests(catalog.chain_packs(self.row.number), _SMALL)
            return
        names = catalog.chain_packs(self.row.number)
        resolver.prefetch_manifests(names)
        sizes = {}
        for name in names:
            with suppress(IntegrityError):
                sizes[name] = packs.size(name)
        share = min(_BEGUN / max(sum(sizes.values()), 1), 1.0)
        packs.prefetch(_in_turn([(name, 0, int(share * size)) for name, size in sizes.items()]))

    @cached_property
    @collection_seldom()
    def layout(self) -> LayoutDocument:
        """The layout of its files."""
        layout = self._settled(lambda: self.repository.resolver.layout(self.document.layout, self.row.pack))
        check_layout(layout, self.document)
        self.repository.resolver.prefetch(self.document.objects)
        return layout

    def foresee(self, places: Iterable[tuple[int, int]] | None = None) -> None:
        """Prefetch chunks, given as (unit, chunk), if reads have a price: few requests fetch them.

        Without `places`, prefetch everything. Errors are raised by the later reads.
        """
        packs, reader = self.repository.packs, self.repository.reader
        self._is_whole = places is None
        if not packs.read_price or self._foreseen or not self.layout.units:  # Their records are looked up together.
            return
        self._foreseen = places is None
        chosen: dict[int, set[int] | None] = dict.fromkeys(self._in_order()) if places is None else {}
        for number, chunk in places or ():
            chunks = chosen.setdefault(number, set())
            assert chunks is not None
            chunks.add(chunk)
        wanted: list[list[tuple[Record, set[int] | None]]] = []
        for number, chunks in chosen.items():
            with suppress(IntegrityError):
                records = reader.chains.records(self.document.objects[number])
                wanted.append([(record, chunks) for record in records])
        indexed = [
            record for layers in wanted for record, chunks in layers if reader.stored.index_ranges(record, chunks)
        ]
        if sum(record.end - record.start for record in indexed) <= _SMALL:
            whole = set(map(id, indexed))
            wanted = [[(record, None if id(record) in whole else cut) for record, cut in layers] for layers in wanted]
        else:
            packs.prefetch(
                (record.pack, *part)
                for layers in wanted
                for record, chunks in layers
                for part in reader.stored.index_ranges(record, chunks)
            )
        with suppress(IntegrityError):
            packs.prefetch(part for layers in wanted for part in self._parts(layers))

    def _parts(self, layers: Sequence[tuple[Record, set[int] | None]]) -> Iterator[tuple[str, int, int]]:
        """Yield the parts of an object's records in the order of reads: indexes, then the first pieces, and so on."""
        reader = self.repository.reader
        parts = [(record.pack, *part) for record, chunks in layers for part in reader.stored.ranges(record, chunks)]
        for record, _ in layers:
            for part in reader.stored.index_ranges(record, ()):
                yield record.pack, *part
        yield from _in_turn(parts)

    @cached_property
    def dropped(self) -> frozenset[tuple[int, int]]:
        """(File, extent) of dropped tensors."""
        if not self.document.dropped:
            return frozenset()
        left = {
            (number, index): extent.count
            for number, layout in enumerate(self.layout.files)
            for index, extent in enumerate(layout.extents)
        }
        for unit in self.layout.units:
            for member in unit.members:
                left[member.file, member.extent] -= member.count
        return frozenset(place for place, count in left.items() if count)

    def require_whole(self, files: Iterable[int]) -> None:
        """Raise `NotFoundError` if the version has dropped tensors of one of these files."""
        gone = {file for file, _ in self.dropped}
        for file in files:
            if file in gone:
                globs, path = ", ".join(self.document.dropped), self.document.files[file].path
                besides = ", or leave the file out with `exclude`" if self.document.is_directory else ""
                raise NotFoundError(
                    f"Version {self.row.number} has dropped {globs}, so that {path} cannot be restored; "
                    f"export its other tensors with `format` pt{besides}."
                )

    @cached_property
    def paths(self) -> dict[str, tuple[int, Tensor]]:
        """(File number, tensor) by path as text, in the order of the files, without dropped tensors."""
        found: dict[str, tuple[int, Tensor]] = {}
        shards: dict[str, list[tuple[int, Tensor]]] = {}
        for number, layout in enumerate(self.layout.files):
            prefix = self.prefix(number)
            for tensor in layout.tensors:
                if tensor.box is None:
                    found[path_to_text((*prefix, *tensor.path))] = (number, tensor)
                else:
                    path = path_to_text((*prefix[:-1], *tensor.path))
                    shards.setdefault(path, []).append((number, tensor))
                    found[path] = (number, tensor)
        found |= {path: (parts[0][0], join(parts)) for path, parts in shards.items()}
        if not self.dropped:
            return found
        return {
            path: (file, tensor)
            for path, (file, tensor) in found.items()
            if self.dropped.isdisjoint(tensor.places(file))
        }

    def prefix(self, file: int, tensor: Tensor | None = None) -> Path:
        """Return the prefix of the paths of a file's tensors: its path in a directory, or the shards' directory."""
        path = tuple(self.document.files[file].path.split("/")) if self.document.is_directory else ()
        return path[:-1] if tensor is not None and tensor.shards else path

    @cached_property
    def _named(self) -> dict[tuple[int, int], list[str]]:
        """Paths of the tensors of every (file, extent) with tensors."""
        found: dict[tuple[int, int], list[str]] = {}
        for path, (file, tensor) in self.paths.items():
            for place in tensor.places(file):
                found.setdefault(place, []).append(path)
        return found

    @cached_property
    def _places(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """Ranges of each (file, extent): (first element, unit number, first element in the unit), in parts."""
        places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for number, unit in enumerate(self.layout.units):
            position = 0
            for member in unit.members:
                extent = self.layout.files[member.file].extents[member.extent]
                scale = 2 if extent.dtype in PARTS else 1
                stretch = (member.first * scale, number, position)
                places.setdefault((member.file, member.extent), []).append(stretch)
                position += member.count * scale
        for stretches in places.values():
            stretches.sort()
        return places

    def _in_order(self) -> Iterator[int]:
        """Yield the numbers of the units in the order of the files."""
        for place in sorted(self._places):
            for _, number, _ in self._places[place]:
                yield number

    def read_extent(self, file: int, extent: int, first: int, last: int) -> memoryview:
        """Return the bytes of elements from `first` to before `last` of an extent; decode only their chunks.

        Chunks that are wanted whole are not cached.
        """
        parts = []
        for number, chunk, start, stop in self.cover(file, extent, first, last):
            unit = self.layout.units[number]
            whole = stop - start == min(unit.chunk, unit.count - chunk * unit.chunk)
            parts.append(self.chunk(number, chunk, keep=not whole)[start:stop].data.cast("B"))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def mapped(self, file: int, *, checked: bool = False) -> dict[int, memoryview]:
        """Return the extents of a file that are stored unencoded in one piece, by number: views of mapped packs.

        Writes to a view change neither the pack nor other views. With `checked`, damaged extents are left out, so that
        reading them raises an error with their names; otherwise no checksums are compared.
        """
        packs: dict[str, memoryview] = {}
        whole: dict[int, bool] = {}
        found = {}
        for extent, cut in enumerate(self.layout.files[file].extents):
            stretches = self._places.get((file, extent), [])
            if len(stretches) != 1 or (file, extent) in self.dropped:
                continue
            _, number, position = stretches[0]
            record = self.repository.resolver.record(self.document.objects[number])
            if isinstance(record, Raw):
                try:
                    if record.pack not in packs:
                        packs[record.pack] = self.repository.packs.mapped(record.pack)
                except MissingPackError:  # Another process compacts the version: read it as it is then.
                    self.repository.resolver.forget()
                    return {}
                start = record.offset + position * ITEM_SIZES[record.dtype]
                view = packs[record.pack][start : start + cut.nbytes]
                if len(view) != cut.nbytes:
                    raise IntegrityError(f"Pack {record.pack} is too short; restore it from a copy.")
                if checked and number not in whole:
                    whole[number] = is_whole(record, packs[record.pack], worker_count())
                if whole.get(number, True):
                    found[extent] = view
        return found

    def cover(self, file: int, extent: int, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the parts of units that cover the elements from `first` to before `last` of an extent, in order.

        Yields
        ------
        tuple
            Number of the unit, number of the chunk, and first and last position of the part within that chunk, in
            elements of the unit.
        """
        cut = self.layout.files[file].extents[extent]
        scale = 2 if cut.dtype in PARTS else 1
        first, last = first * scale, last * scale
        if first >= last:
            return
        stretches = self._held(file, extent)
        index = bisect_right(stretches, first, key=lambda stretch: stretch[0]) - 1
        while first < last:
            begin, number, position = stretches[index]
            length = self.layout.units[number].chunk
            end = stretches[index + 1][0] if index + 1 < len(stretches) else cut.count * scale
            stop = min(last, end)
            low, high = position + first - begin, position + stop - begin
            for chunk in range(low // length, -(-high // length)):
                start = chunk * length
                yield number, chunk, max(low - start, 0), min(high - start, length)
            first = stop
            index += 1

    def stretches(self, file: int, extent: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (first, last) of an extent, each in one chunk of one object."""
        cut = self.layout.files[file].extents[extent]
        scale = 2 if cut.dtype in PARTS else 1
        stretches = self._held(file, extent)
        for index, (begin, number, position) in enumerate(stretches):
            chunk = self.layout.units[number].chunk
            end = stretches[index + 1][0] if index + 1 < len(stretches) else cut.count * scale
            first = begin
            while first < end:
                last = min(end, first + chunk - (position + first - begin) % chunk)
                yield first // scale, last // scale
                first = last

    def _held(self, file: int, extent: int) -> list[tuple[int, int, int]]:
        """Return the ranges of an extent; raise `NotFoundError` if the version has dropped it."""
        if (file, extent) in self.dropped:
            self.require_whole([file])
        return self._places.get((file, extent), [])

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

        Raises
        ------
        ChangedVersionError
            The version has other values or tensors than before.
        IntegrityError
            A part is lost or damaged.
        NotFoundError
            The version was forgotten.
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
        kept = before.objects == after.objects
        if present.uid != row.uid or not kept or before.dropped != after.dropped:
            raise ChangedVersionError(
                f"Version {self.row.number} was thinned, encoded as coarse or replaced during the read; read it again."
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
        return type(error)(f"Version {self.row.number}: {listed(self.names(number))} cannot be read: {error}")

    def names(self, number: int) -> list[str]:
        """Return the paths of a unit's tensors, or of its files if it has none."""
        files = {self.document.files[member.file].path for member in self.layout.units[number].members}
        return self.tensors_of(number) or sorted(files)

    def tensors_of(self, number: int) -> list[str]:
        """Return the paths of the tensors with elements in a unit."""
        members = dict.fromkeys((member.file, member.extent) for member in self.layout.units[number].members)
        return list(dict.fromkeys(path for place in members for path in self._named.get(place, ())))

    def _chunk(self, number: int, chunk: int, *, keep: bool, out: Bits | None) -> Bits:
        if number not in self._fitting:
            self._fit(number)
        return self.repository.reader.bits(self.document.objects[number], chunk, keep=keep, out=out)

    def _fit(self, number: int) -> None:
        """Raise `IntegrityError` unless the object of a unit exists and matches the layout."""
        record = self.repository.resolver.record(self.document.objects[number])
        check_cut(record, self.layout.units[number])
        if record.is_exact == (number in self.document.coarse_units):
            raise IntegrityError(f"Object {record.id} has another fidelity than its version; run `ckstore verify`.")
        self._fitting.add(number)

    def require(self, file: int, extent: int) -> None:
        """Raise `IntegrityError` unless the objects of an extent exist, before memory is allocated."""
        for _, number, _ in self._places.get((file, extent), ()):
            if number not in self._fitting:
                try:
                    self._settled(partial(self._fit, number))
                except IntegrityError as error:
                    raise self._concerning(number, error) from error

    def is_changed(self, file: int) -> bool:
        """Return whether a restored file would differ from the original: values are coarse or dropped."""
        if any(place[0] == file for place in self.dropped):
            return True
        units = self.layout.units
        return any(member.file == file for unit in self.document.coarse_units for member in units[unit].members)

    def skeleton(self, file: int) -> bytes:
        """Return all bytes of a file that are not tensor data."""
        data, crcs = self.blank_skeleton(file), self.crcs(file)
        try:
            return fill_crcs(data, self.layout.files[file], crcs)
        except ValueError as error:
            raise IntegrityError(
                f"The layout of version {self.row.number} has {error}; restore its pack from a copy."
            ) from error

    def blank_skeleton(self, file: int) -> bytes:
        """Return the skeleton with its CRCs as zeros, as it is stored."""
        layout = self.layout.files[file]
        length = layout.size - sum([prod(extent.shape) * ITEM_SIZES[extent.dtype] for extent in layout.extents])
        return self._settled(
            lambda: self.repository.resolver.blob(self.document.files[file].skeleton, self.row.pack, length)
        )

    def crcs(self, file: int) -> list[int]:
        """Return the CRC-32 of each checked range of a file."""
        counts = [len(layout.checked) for layout in self.layout.files]
        blob = self._settled(lambda: self.repository.resolver.blob(self.document.crcs, self.row.pack, 4 * sum(counts)))
        before = sum(counts[:file])
        return [int(crc) for crc in np.frombuffer(blob, "<u4")[before : before + counts[file]]]

    def source(self, file: int, *, gaps: bool = False) -> CompositeSource:
        """Return the original file, composed of its skeleton and of chunks decoded on read.

        Parameters
        ----------
        file
            Number of the file.
        gaps
            Replace lost or dropped elements by zeros.

        Raises
        ------
        InputError
            The layout contradicts itself.
        """
        layout = self.layout.files[file]
        extents = [(extent.start, prod(extent.shape) * ITEM_SIZES[extent.dtype]) for extent in layout.extents]

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

        return CompositeSource(self.skeleton(file), extents, layout.size, read)

    def parsed(self, file: int, *, gaps: bool = False) -> FileLayout:
        """Return the layout of a file with its tree, parsed from the skeleton; see `source`."""
        return parse(self.source(file, gaps=gaps), self.document.files[file].path)


def _in_turn(parts: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield parts of packs in the order of decoding: the first pieces of all, then the second, and so on."""
    pieces = max((-(-length // _PIECE) for _, _, length in parts), default=0)
    for piece in range(pieces):
        for pack, offset, length in parts:
            first, last = length * piece // pieces, length * (piece + 1) // pieces
            yield pack, offset + first, last - first


def stored_version(address: Address, uid: str, number: int) -> StoredVersion:
    """Return a version of the store at an address, which this process opens once.

    Raises
    ------
    NotFoundError
        The version no longer exists; the message calls it `number`.
    """
    repository = opened(address)
    rows = repository.catalog.with_uid(uid)
    if not rows:
        repository.catalog.refresh()
        rows = repository.catalog.with_uid(uid)
    if not rows:
        raise NotFoundError(f"Version {number} no longer exists in the store {address.place}; choose another one.")
    return StoredVersion(repository, rows[0])
