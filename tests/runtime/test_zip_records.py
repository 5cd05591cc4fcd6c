"""The records of zip files: long fields from the very numbers on that short ones cannot hold, and read back."""

from __future__ import annotations

import pytest

from ckstore.runtime.zip_records import (
    CENTRAL,
    END,
    END_64,
    FULL,
    FULL_COUNT,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCATOR_64,
    STORED,
    Member,
    Style,
    central_record,
    descriptor,
    end_records,
    local_record,
    read_central,
    read_local,
)

PLAIN = Style(20, 0, 33, 3, 0)
STREAMED = Style(0, HAS_DESCRIPTOR, 0, 0, 0)


def member(size: int, offset: int = 7) -> Member:
    return Member(b"name", STORED, 0x12345678, size, size, offset)


@pytest.mark.parametrize(("size", "offset"), [(5, 7), (FULL - 1, FULL - 1), (FULL, 7), (5, FULL), (FULL + 9, FULL + 1)])
def test_a_directory_holds_long_fields_for_large_values(size: int, offset: int) -> None:
    record = central_record(PLAIN, member(size, offset))
    fields = read_central(b"x" + record, 1)
    long = [number for number in (size, size, offset) if number >= FULL]
    assert (fields.size, fields.packed, fields.offset) == (min(size, FULL), min(size, FULL), min(offset, FULL))
    assert fields.crc == 0x12345678
    assert (fields.made_by, fields.version) == ((3 << 8 | 45, 45) if long else (3 << 8 | 20, 20))
    extra = record[CENTRAL.size + 4 :]
    assert fields.extra_length == len(extra) == (4 + 8 * len(long) if long else 0)
    assert [int.from_bytes(extra[at : at + 8], "little") for at in range(4, len(extra), 8)] == long


@pytest.mark.parametrize(("size", "extra"), [(FULL - 1, b""), (FULL, b"\1\0\x10\0" + 2 * FULL.to_bytes(8, "little"))])
def test_a_local_record_holds_sizes(size: int, extra: bytes) -> None:
    record = local_record(PLAIN, member(size), b"XX\0\0")
    fields = read_local(record)
    assert (fields.crc, fields.packed, fields.size) == (0x12345678, size, size)
    assert record[LOCAL.size :] == b"name" + extra + b"XX\0\0"


@pytest.mark.parametrize(("size", "length"), [(FULL - 1, 16), (FULL, 24)])
def test_sizes_follow_streamed_data(size: int, length: int) -> None:
    fields = read_local(local_record(STREAMED, member(size)))
    assert (fields.crc, fields.packed, fields.size, fields.extra_length) == (0, 0, 0, 0)
    assert len(descriptor(0x12345678, size)) == length


@pytest.mark.parametrize(
    ("count", "start", "length", "long"),
    [(FULL_COUNT - 1, 5, 5, False), (FULL_COUNT, 5, 5, True), (1, FULL - 1, 5, False), (1, FULL, 5, True)],
)
def test_an_end_is_long_where_a_number_is(count: int, start: int, length: int, long: bool) -> None:
    records = end_records(count, start, length)
    assert len(records) == END.size + (END_64.size + LOCATOR_64.size if long else 0)
    assert END.unpack(records[-END.size :])[4] == count
