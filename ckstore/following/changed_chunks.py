"""Chunks of a version, decoded from those of another version in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.following.written_files import Part, read_at
from ckstore.objects.file_digest import Bytes
from ckstore.reading.stored_version import StoredVersion

if TYPE_CHECKING:
    from ckstore.codecs.lattice import Bits
    from ckstore.objects.records import Patches, Record

#: A stretch of a file: the file's number, first byte, number of bytes.
Stretch = tuple[int, int, int]

#: Alignment of chunks in memory, in bytes.
_ALIGNMENT = 64


class ChangedChunks:
    """The chunks of a version's units that differ from those in open files.

    `held` are the ids of the objects in the files by number of the unit, `ways` lead from there to the version's.
    """

    def __init__(
        self,
        version: StoredVersion,
        files: Mapping[int, int],
        held: Mapping[int, str],
        ways: Mapping[int, tuple[Sequence[Patches], Sequence[Record]]],
    ) -> None:
        self._reader = version.repository.reader.in_passing()
        self._version = version.read_by(self._reader)
        self._units = version.layout.units
        self._files = files
        self._ways = ways
        self._patched = {number for number in held if all(level.base is not None for level in ways[number][1])}

    def numbers(self) -> list[tuple[int, int]]:
        """Return the chunks of units that differ as (unit, chunk)."""
        return [
            (number, chunk)
            for number, way in self._ways.items()
            if any(way)  # Otherwise the files have the object already.
            for chunk in range(-(-self._units[number].count // self._units[number].chunk))
        ]

    def nbytes(self, item: tuple[int, int]) -> int:
        """Return the bytes of memory that a chunk takes at most."""
        unit = self._units[item[0]]
        return -(-unit.chunk * ITEM_SIZES[unit.dtype] // _ALIGNMENT) * _ALIGNMENT

    def read(self, items: Sequence[tuple[int, int]], memory: Bytes) -> list[Part]:
        """Fill memory with chunks; return the places of their bytes in files, without chunks that do not differ."""
        parts, end = [], 0
        for number, chunk in items:
            size, place = ITEM_SIZES[self._units[number].dtype], -(-end // _ALIGNMENT) * _ALIGNMENT
            stretches = list(_of_chunk(stretches_of(self._version, number), self._units[number].chunk * size, chunk))
            stop = place + sum(nbytes for _, _, nbytes in stretches)
            if self._fill(number, chunk, memory[place:stop].view(f"u{size}"), stretches):
                end = place
                for file, first, nbytes in stretches:
                    parts.append((file, first, end, end + nbytes))
                    end += nbytes
        return parts

    def _fill(self, number: int, chunk: int, values: Bits, stretches: Sequence[Stretch]) -> bool:
        """Fill an array with a chunk; return whether it differs."""
        way, found = self._ways[number], None
        if number in self._patched:
            if not self._reader.changes(way, chunk):
                return False
            read_at(values.data.cast("B"), [(self._files[file], first, nbytes) for file, first, nbytes in stretches])
            try:
                found = self._reader.led(way, chunk, values)
            except IntegrityError:  # The file was changed, and kept its size and time.
                found = None
        if found is None:
            found = self._version.chunk(number, chunk, keep=False, out=values)
        if found is not values:
            values.flags.writeable = True
            values[...] = found
        return True


def stretches_of(version: StoredVersion, number: int) -> list[Stretch]:
    """Return the stretches of files with the bytes of a unit, in order."""
    found = []
    for member in version.layout.units[number].members:
        extent = version.layout.files[member.file].extents[member.extent]
        size = ITEM_SIZES[extent.dtype]
        found.append((member.file, extent.start + member.first * size, member.count * size))
    return found


def _of_chunk(stretches: Sequence[Stretch], length: int, chunk: int) -> Iterator[Stretch]:
    """Yield the parts of a unit's stretches in one of its chunks of `length` bytes."""
    start, stop, position = chunk * length, (chunk + 1) * length, 0
    for file, first, nbytes in stretches:
        low, high = max(start - position, 0), min(stop - position, nbytes)
        if low < high:
            yield file, first + low, high - low
        position += nbytes
