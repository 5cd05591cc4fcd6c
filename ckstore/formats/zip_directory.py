"""Reads the directory of a zip archive with stored entries: the places of each entry's data and CRCs.

Only sizes and places are read, not the entries.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from operator import le
from typing import Any

from msgspec import Struct

from ckstore.errors import InputError
from ckstore.formats.layout import Source
from ckstore.formats.sources import PartSource
from ckstore.runtime.checksum import crc32
from ckstore.runtime.zip_records import (
    CENTRAL,
    CENTRAL_CRC,
    CENTRAL_MAGIC,
    DESCRIPTOR_MAGIC,
    END,
    END_64,
    END_64_MAGIC,
    END_MAGIC,
    FULL,
    FULL_COUNT,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR_64,
    LOCATOR_64_MAGIC,
    STORED,
)

#: The maximal bytes of the record of an archive's first entry whose name is useful.
FIRST_RECORD = 512
#: The maximal number of archives of one file.
MAX_ARCHIVES = 1_000_000
_READ_BYTES = 1 << 20
_MAX_COMMENT = 65535
_MAX_DIRECTORY_BYTES = 1 << 29
_ENCRYPTED = 0x1
#: Forms of the sizes after an entry's data.
_SIZES = struct.Struct("<2L"), struct.Struct("<2Q")


class NoDirectoryError(InputError):
    """The archive has no directory: it is cut off, or was never a zip."""


class ZipEntry(Struct, frozen=True, gc=False):
    """One entry of an archive: place, size and CRC-32 of its data as stored.

    `crc_positions` are the places of the CRC in the file: local header or data descriptor, and directory. A `plain`
    entry is neither compressed nor encrypted.
    """

    name: str
    start: int
    size: int
    crc: int
    crc_positions: tuple[int, ...]
    plain: bool

    @property
    def stop(self) -> int:
        """The offset after the last byte of the data."""
        return self.start + self.size


def starts_like_zip(head: bytes) -> bool:
    """Return whether a file begins like a zip archive."""
    return head[:4] == LOCAL_MAGIC


def first_name(head: bytes) -> str:
    """Return the name of the first entry of an archive that begins with `head`, without its directory."""
    length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + length].decode("utf-8", "replace")


def follows_others(source: Source) -> bool:
    """Return whether the archive whose directory ends a file begins in the middle of it, after other archives."""
    begin = _beginning(source)
    return begin is not None and begin > 0


def archive_starts(source: Source) -> list[int]:
    """Return the beginnings of the archives that make up a file, without gaps and comments.

    Empty for any other file.
    """
    starts: list[int] = []
    stop = source.size
    while stop:
        # Other endings would be searched for an end record again and again.
        ends = stop >= END.size and source.pread(stop - END.size, 4) == END_MAGIC
        begin = _beginning(PartSource(source, 0, stop)) if ends else None
        if begin is None or len(starts) == MAX_ARCHIVES:
            return []
        starts.append(begin)
        stop = begin
    return starts[::-1]


def _beginning(source: Source) -> int | None:
    """Return the beginning of the archive whose directory ends a file; None without one."""
    try:
        end, record = _find_end(source)
    except NoDirectoryError:
        return None
    located = end - LOCATOR_64.size
    begin = end - record[5] - record[6]
    if located >= END_64.size:
        magic, _, end_64, _ = LOCATOR_64.unpack(source.pread(located, LOCATOR_64.size))
        if magic == LOCATOR_64_MAGIC:
            begin = located - END_64.size - end_64
    return begin if 0 <= begin < end and source.pread(begin, min(4, source.size - begin)) == LOCAL_MAGIC else None


def check_crc(source: Source, entry: ZipEntry) -> None:
    """Raise `InputError` unless the data of a plain entry has the archive's CRC."""
    crc = 0
    for start in range(entry.start, entry.stop, _READ_BYTES):
        crc = crc32(source.pread(start, min(_READ_BYTES, entry.stop - start)), crc)
    if crc != entry.crc:
        raise InputError(f"the CRC of {entry.name} is wrong")


def read_directory(source: Source) -> list[ZipEntry]:
    """Return all entries of an archive in the order of its directory; raise `NoDirectoryError` without one.

    Raises `InputError` if directory and entries contradict each other: places outside of the file, overlapping entries,
    different names or CRCs, a duplicate name.
    """
    count, offset, size, limit = _find_directory(source)
    if size > _MAX_DIRECTORY_BYTES:
        raise InputError("the directory of the archive is implausibly large")
    if offset + size > limit:
        raise InputError("the archive and its end record disagree about the place of the directory")
    data = source.pread(offset, size)
    entries: list[ZipEntry] = []
    headers: list[int] = []
    names: set[str] = set()
    position = 0
    while position < size:
        if position + CENTRAL.size > size or data[position : position + 4] != CENTRAL_MAGIC:
            raise InputError("the directory of the archive is damaged")
        entry, header, position = _read_entry(source, data, position, offset)
        if entry.name in names:
            raise InputError(f"the archive holds {entry.name} twice")
        names.add(entry.name)
        entries.append(entry)
        headers.append(header)
    if len(entries) != count:
        raise InputError("the directory of the archive is damaged: its number of entries is wrong")
    stops = [entry.start + entry.size for entry in entries]
    if all(map(le, stops, [*headers[1:], offset])):
        return entries
    spans = sorted(zip(headers, stops, [entry.name for entry in entries], strict=True))
    for (_, stop, name), (start, _, following) in pairwise([*spans, (offset, 0, "the directory")]):
        if stop > start:
            raise InputError(f"{name} and {following} overlap in the archive")
    return entries


def _find_directory(source: Source) -> tuple[int, int, int, int]:
    """Return the number of entries, offset, size, and the required end of the directory."""
    end, (_, disk, first_disk, here, count, size, offset, _) = _find_end(source)
    limit = end
    located = end - LOCATOR_64.size
    if located >= 0:
        magic, locator_disk, end_64, disks = LOCATOR_64.unpack(source.pread(located, LOCATOR_64.size))
        if magic == LOCATOR_64_MAGIC:
            if end_64 + END_64.size > located or locator_disk or disks > 1:
                raise InputError("the end record of the archive is damaged")
            limit = end_64
            record = END_64.unpack(source.pread(end_64, END_64.size))
            if record[0] != END_64_MAGIC:
                raise InputError("the end record of the archive is damaged")
            large = record[4], record[5], record[6], record[7], record[8], record[9]
            small = disk, first_disk, here, count, size, offset
            full = FULL_COUNT, FULL_COUNT, FULL_COUNT, FULL_COUNT, FULL, FULL
            for one, other, saturated in zip(large, small, full, strict=True):
                if other not in (saturated, one):
                    raise InputError("the two end records of the archive contradict each other")
            disk, first_disk, here, count, size, offset = large
    if disk or first_disk or here != count:
        raise InputError("the archive is spread over several files")
    return count, offset, size, limit


def _find_end(source: Source) -> tuple[int, tuple[Any, ...]]:
    """Return the place of the end record of an archive, and the record."""
    # Mostly there is no comment, and a file may consist of thousands of archives.
    if source.size >= END.size:
        record = END.unpack(source.pread(source.size - END.size, END.size))
        if record[0] == END_MAGIC and record[7] == 0:
            return source.size - END.size, record
    length = min(source.size, END.size + _MAX_COMMENT)
    tail = source.pread(source.size - length, length)
    found = len(tail) - END.size + 1
    while True:
        found = tail.rfind(END_MAGIC, 0, found + 3) if found > 0 else -1
        if found < 0:
            raise NoDirectoryError("the archive has no directory at its end: the file is cut off")
        record = END.unpack_from(tail, found)
        if found + END.size + record[7] == len(tail):
            return source.size - length + found, record


def _read_entry(source: Source, data: bytes, position: int, base: int) -> tuple[ZipEntry, int, int]:
    """Return the entry at `position` of the directory, the offset of its header, the position of the next."""
    # Not by names: there may be very many entries.
    fields = CENTRAL.unpack_from(data, position)
    _, _, _, flags, method, _, _, crc, stored, size, name_length, extra_length, comment_length, _, _, _, header = fields
    start = position + CENTRAL.size
    extra_start = start + name_length
    stop = extra_start + extra_length + comment_length
    if stop > len(data):
        raise InputError("the directory of the archive is damaged")
    raw_name = data[start:extra_start]
    name = raw_name.decode("utf-8", "surrogateescape")
    if FULL in (size, stored, header):
        extra = data[extra_start : extra_start + extra_length]
        size, stored, header = _wide(extra, size, stored, header, name)
    plain = method == STORED and not flags & _ENCRYPTED
    if plain and size != stored:
        raise InputError(f"the archive gives {name} two sizes")
    if header + LOCAL.size + len(raw_name) > source.size:
        raise InputError(f"{name} lies beyond the end of the file")
    local_data = source.pread(header, LOCAL.size + len(raw_name))
    magic, _, *kind, _, _, own_crc, own_stored, own_size, own_length, skipped = LOCAL.unpack_from(local_data)
    described = [LOCAL_MAGIC, flags, method, name_length]
    if [magic, *kind, own_length] != described or local_data[LOCAL.size :] != raw_name:
        raise InputError(f"the header of {name} does not agree with the directory of the archive")
    begin = header + LOCAL.size + len(raw_name) + skipped
    if begin + stored > source.size:
        raise InputError(f"{name} reaches beyond the end of the file")
    if flags & HAS_DESCRIPTOR:
        crc_place, own_crc = _descriptor(source, begin + stored, stored, size, name)
    else:
        crc_place = header + 14
        if own_stored not in (stored, FULL) or own_size not in (size, FULL):
            raise InputError(f"the header of {name} does not agree with the directory of the archive")
    if own_crc != crc:
        raise InputError(f"the archive holds two different CRCs for {name}")
    positions = (crc_place, base + position + CENTRAL_CRC)
    return ZipEntry(name, begin, stored, crc, positions, plain), header, stop


def _wide(extra: bytes, size: int, stored: int, header: int, name: str) -> tuple[int, int, int]:
    """Return sizes and offset from the zip64 field; it has only values beyond 32 bits, in this order."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1 and position + length <= len(extra):
            left = extra[position : position + length]
            values = []
            for value in (size, stored, header):
                if value == FULL:
                    if len(left) < 8:
                        raise InputError(f"the directory of the archive is damaged at {name}")
                    value, left = int.from_bytes(left[:8], "little"), left[8:]
                values.append(value)
            return values[0], values[1], values[2]
        position += length
    raise InputError(f"the directory of the archive is damaged at {name}")


def _descriptor(source: Source, position: int, stored: int, size: int, name: str) -> tuple[int, int]:
    """Return the place of a data descriptor's CRC, and the CRC.

    Its signature is optional, and its sizes have 4 or 8 bytes.
    """
    data = source.pread(position, min(24, source.size - position))
    for skip in (4, 0):
        if skip and data[:4] != DESCRIPTOR_MAGIC:
            continue
        for form in _SIZES:
            if len(data) >= skip + 4 + form.size and form.unpack_from(data, skip + 4) == (stored, size):
                return position + skip, int.from_bytes(data[skip : skip + 4], "little")
    raise InputError(f"the sizes after the data of {name} do not agree with the directory of the archive")
