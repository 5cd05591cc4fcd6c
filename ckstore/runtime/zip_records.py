"""The records of zip files: around the bytes of a member, in the directory, and at the end.

Source: PKWARE's APPNOTE 6.3.10, sections 4.3, 4.4 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR_64 = struct.Struct("<4sLQL")

LOCAL_MAGIC = b"PK\3\4"
CENTRAL_MAGIC = b"PK\1\2"
END_MAGIC = b"PK\5\6"
END_64_MAGIC = b"PK\6\6"
LOCATOR_64_MAGIC = b"PK\6\7"
DESCRIPTOR_MAGIC = b"PK\7\10"

STORED, DEFLATED = 0, 8
#: Flag of members with checksum and sizes after their bytes.
HAS_DESCRIPTOR = 0x8

#: Values of short fields whose number is in a long field: of sizes and offsets, and of counts.
FULL, FULL_COUNT = 0xFFFFFFFF, 0xFFFF
#: Sizes and offsets from here on need long fields.
LIMIT = FULL
#: Version of the format with long fields.
_VERSION_64 = 45
_ZIP64 = 1
#: Long fields of size and packed size.
_LONG = struct.Struct("<2H2Q")
#: Extra field that zip tools use as padding for alignment.
_PADDING = 0xD935

#: Offset of the checksum in a member's record of the directory.
CENTRAL_CRC = 16


class Style(NamedTuple):
    """The common properties of an archive's members.

    `version` is that of the format which members without long fields need. With `HAS_DESCRIPTOR` in `flags`, local
    records have no checksum and no sizes. `date` is the date and time in the form of MS-DOS, `system` the one that
    defines `attributes`, those of each file.
    """

    version: int
    flags: int
    date: int
    system: int
    attributes: int


class Member(NamedTuple):
    """One file of an archive: `packed` bytes for `size`, after a local record at `offset`."""

    name: bytes
    method: int
    crc: int
    packed: int
    size: int
    offset: int


class CentralFields(NamedTuple):
    """The fields of `CENTRAL`; the last lengths are those of the following name, extra fields and comment."""

    magic: bytes
    made_by: int
    version: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    size: int
    name_length: int
    extra_length: int
    comment_length: int
    disk: int
    internal: int
    external: int
    offset: int


class LocalFields(NamedTuple):
    """The fields of `LOCAL`."""

    magic: bytes
    version: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    size: int
    name_length: int
    extra_length: int


def read_central(data: bytes, place: int) -> CentralFields:
    """Parse a directory's record at an offset of `data`, which must hold `CENTRAL.size` bytes from there on."""
    return CentralFields._make(CENTRAL.unpack_from(data, place))


def read_local(data: bytes) -> LocalFields:
    """Parse the record at the beginning of `data`, which must have `LOCAL.size` bytes."""
    return LocalFields._make(LOCAL.unpack_from(data))


def local_record(style: Style, member: Member, extra: bytes = b"", align: int = 1) -> bytes:
    """Return the record before a member's bytes, with further extra fields if given, and one that aligns the bytes."""
    large = max(member.size, member.packed) >= LIMIT
    version = _VERSION_64 if large else style.version
    if style.flags & HAS_DESCRIPTOR:
        crc = packed = size = 0
    else:
        crc, packed, size = member.crc, member.packed, member.size
        if large:
            extra = _long_fields(size, packed) + extra
            packed = size = FULL
    end = member.offset + LOCAL.size + len(member.name) + len(extra)
    if end % align:
        extra += struct.pack("<2H", _PADDING, length := -(end + 4) % align) + bytes(length)
    head = (version, style.flags, member.method, 0, style.date, crc, packed, size, len(member.name), len(extra))
    return LOCAL.pack(LOCAL_MAGIC, *head) + member.name + extra


def packed_size(extra: bytes) -> int:
    """Return the packed size in the long fields that `local_record` writes; 0 without them."""
    tag, length, _, packed = _LONG.unpack(extra[: _LONG.size].ljust(_LONG.size, b"\0"))
    return int(packed) if (tag, length) == (_ZIP64, 16) else 0


def descriptor(crc: int, size: int) -> bytes:
    """Return the record after the bytes of a stored member with `HAS_DESCRIPTOR`."""
    return struct.pack("<4sL2Q" if size >= LIMIT else "<4s3L", DESCRIPTOR_MAGIC, crc, size, size)


def central_record(style: Style, member: Member) -> bytes:
    """Return a member's record in the directory."""
    numbers = member.size, member.packed, member.offset
    extra, version = b"", style.version
    if max(numbers) >= LIMIT:
        extra, version = _long_fields(*[number for number in numbers if number >= LIMIT]), _VERSION_64
    size, packed, offset = map(min, numbers, repeat(FULL))
    head = (style.system << 8 | version, version, style.flags, member.method, 0, style.date, member.crc, packed, size)
    tail = (len(member.name), len(extra), 0, 0, 0, style.attributes, offset)
    return CENTRAL.pack(CENTRAL_MAGIC, *head, *tail) + member.name + extra


def directory(style: Style, members: Iterable[Member], start: int) -> bytes:
    """Return the directory of members, which begins at `start`, and the records after it."""
    records = [central_record(style, member) for member in members]
    data = b"".join(records)
    return data + end_records(len(records), start, len(data))


def end_records(count: int, start: int, length: int) -> bytes:
    """Return the records after a directory of `count` members and `length` bytes, from `start` on."""
    long = b""
    if count >= FULL_COUNT or max(start, length) >= LIMIT:
        head = (END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, length, start)
        long = END_64.pack(END_64_MAGIC, *head) + LOCATOR_64.pack(LOCATOR_64_MAGIC, 0, start + length, 1)
    short = min(count, FULL_COUNT)
    return long + END.pack(END_MAGIC, 0, 0, short, short, min(length, FULL), min(start, FULL), 0)


def _long_fields(*numbers: int) -> bytes:
    return struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers)
