"""Reads the directory of a zip archive with stored entries, and says where each entry's data and CRCs lie.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3. Only sizes and places are read; entries are not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckstore.errors import InputError
from ckstore.formats.layout import Source

LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_MAX_COMMENT = 65535
_MAX_DIRECTORY_BYTES = 1 << 29
_ENCRYPTED = 0x1
_HAS_DESCRIPTOR = 0x8
_SATURATED = 0xFFFFFFFF


class NoDirectoryError(InputError):
    """The archive has no directory: it is cut off, or was never a zip."""


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry of an archive.

    Attributes
    ----------
    name
        As the directory gives it.
    start, size
        Place and number of bytes of the data as stored.
    crc
        CRC-32 of the data.
    crc_positions
        Where the file holds it: local header or data descriptor, and directory.
    plain
        Whether the data is stored as it is: neither compressed nor encrypted.
    """

    name: str
    start: int
    size: int
    crc: int
    crc_positions: tuple[int, ...]
    plain: bool

    @property
    def stop(self) -> int:
        """Offset behind the last byte of the data."""
        return self.start + self.size


def read_directory(source: Source) -> list[ZipEntry]:
    """All entries of an archive in the order of its directory.

    Raises
    ------
    NoDirectoryError
        Where the file does not end with a directory.
    InputError
        Where directory and entries contradict each other: places outside of the file, overlapping entries, names or
        CRCs that differ, a name that occurs twice.
    """
    count, offset, size, limit = _find_directory(source)
    if size > _MAX_DIRECTORY_BYTES:
        raise InputError("the directory of the archive is absurdly large")
    if offset + size > limit:
        raise InputError("the directory of the archive does not lie where its end record says")
    data = source.pread(offset, size)
    entries: list[ZipEntry] = []
    spans: list[tuple[int, int, str]] = []
    names: set[str] = set()
    position = 0
    while position < size:
        if position + _CENTRAL.size > size or data[position : position + 4] != b"PK\x01\x02":
            raise InputError("the directory of the archive is damaged")
        entry, header, position = _read_entry(source, data, position, offset)
        if entry.name in names:
            raise InputError(f"the archive holds {entry.name} twice")
        names.add(entry.name)
        entries.append(entry)
        spans.append((header, entry.stop, entry.name))
    if len(entries) != count:
        raise InputError("the directory of the archive is damaged: it holds another number of entries than it claims")
    spans.sort()
    for (_, stop, name), (start, _, following) in zip(spans, [*spans[1:], (offset, 0, "the directory")], strict=True):
        if stop > start:
            raise InputError(f"{name} and {following} overlap in the archive")
    return entries


def _find_directory(source: Source) -> tuple[int, int, int, int]:
    """Number of entries, offset, size, and where the directory must have ended."""
    length = min(source.size, _END.size + _MAX_COMMENT)
    tail = source.pread(source.size - length, length)
    found = len(tail) - _END.size + 1
    while True:
        found = tail.rfind(b"PK\x05\x06", 0, found + 3) if found > 0 else -1
        if found < 0:
            raise NoDirectoryError("the archive has no directory at its end: the file is cut off")
        _, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(tail, found)
        if found + _END.size + comment == len(tail):
            break
    end = source.size - length + found
    limit = end
    located = end - _LOCATOR_64.size
    if located >= 0:
        magic, locator_disk, end_64, disks = _LOCATOR_64.unpack(source.pread(located, _LOCATOR_64.size))
        if magic == b"PK\x06\x07":
            if end_64 + _END_64.size > located or locator_disk or disks > 1:
                raise InputError("the end record of the archive is damaged")
            limit = end_64
            record = _END_64.unpack(source.pread(end_64, _END_64.size))
            if record[0] != b"PK\x06\x06":
                raise InputError("the end record of the archive is damaged")
            large = record[4], record[5], record[6], record[7], record[8], record[9]
            small = disk, first_disk, here, count, size, offset
            full = 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, _SATURATED, _SATURATED
            for one, other, saturated in zip(large, small, full, strict=True):
                if other not in (saturated, one):
                    raise InputError("the two end records of the archive contradict each other")
            disk, first_disk, here, count, size, offset = large
    if disk or first_disk or here != count:
        raise InputError("the archive is spread over several files")
    return count, offset, size, limit


def _read_entry(source: Source, data: bytes, position: int, base: int) -> tuple[ZipEntry, int, int]:
    """The entry described at `position` of the directory, the offset of its header, the position of the next."""
    fields = _CENTRAL.unpack_from(data, position)
    flags, method, crc, stored, size = fields[3], fields[4], fields[7], fields[8], fields[9]
    name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
    start = position + _CENTRAL.size
    stop = start + name_length + extra_length + comment_length
    if stop > len(data):
        raise InputError("the directory of the archive is damaged")
    raw_name = data[start : start + name_length]
    name = raw_name.decode("utf-8", "surrogateescape")
    wide = _SATURATED in (size, stored, header)
    if wide:
        extra = data[start + name_length : start + name_length + extra_length]
        size, stored, header = _wide(extra, size, stored, header, name)
    plain = method == 0 and not flags & _ENCRYPTED
    if plain and size != stored:
        raise InputError(f"the archive gives {name} two sizes")
    if header + _LOCAL.size + name_length > source.size:
        raise InputError(f"{name} lies beyond the end of the file")
    local_data = source.pread(header, _LOCAL.size + name_length)
    local = _LOCAL.unpack_from(local_data)
    if local[0] != LOCAL_MAGIC or local_data[_LOCAL.size :] != raw_name or local[9] != name_length:
        raise InputError(f"the header of {name} does not agree with the directory of the archive")
    if local[2] != flags or local[3] != method:
        raise InputError(f"the header of {name} does not agree with the directory of the archive")
    begin = header + _LOCAL.size + name_length + local[10]
    if begin + stored > source.size:
        raise InputError(f"{name} reaches beyond the end of the file")
    if flags & _HAS_DESCRIPTOR:
        crc_place = _descriptor(source, begin + stored, stored, size, name)
    else:
        crc_place = header + 14
        if local[7] not in (stored, _SATURATED) or local[8] not in (size, _SATURATED):
            raise InputError(f"the header of {name} does not agree with the directory of the archive")
    if int.from_bytes(source.pread(crc_place, 4), "little") != crc:
        raise InputError(f"the archive holds two different CRCs for {name}")
    positions = (crc_place, base + position + 16)
    return ZipEntry(name, begin, stored, crc, positions, plain), header, stop


def _wide(extra: bytes, size: int, stored: int, header: int, name: str) -> tuple[int, int, int]:
    """Sizes and offset from the zip64 field; only those that do not fit into 32 bits are in it, in this order."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1 and position + length <= len(extra):
            left = extra[position : position + length]
            values = []
            for value in (size, stored, header):
                if value == _SATURATED:
                    if len(left) < 8:
                        raise InputError(f"the directory of the archive is damaged at {name}")
                    value, left = int.from_bytes(left[:8], "little"), left[8:]
                values.append(value)
            return values[0], values[1], values[2]
        position += length
    raise InputError(f"the directory of the archive is damaged at {name}")


def _descriptor(source: Source, position: int, stored: int, size: int, name: str) -> int:
    """Where the CRC of a data descriptor lies; its signature is optional and its sizes have 4 or 8 bytes."""
    data = source.pread(position, min(24, source.size - position))
    for skip in (4, 0):
        if skip and data[:4] != _DESCRIPTOR_MAGIC:
            continue
        for form in ("<2L", "<2Q"):
            if len(data) >= skip + 4 + struct.calcsize(form) and struct.unpack_from(form, data, skip + 4) == (
                stored,
                size,
            ):
                return position + skip
    raise InputError(f"the sizes behind the data of {name} do not agree with the directory of the archive")
