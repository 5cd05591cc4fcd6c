"""What stands at the beginning of a payload of integers, before its directory.

A payload, integers little-endian:

=====================  ==============================================================================================
bytes                  content
=====================  ==============================================================================================
1                      format: 2 where some group has a plane, else 1
1                      flags: bits 0-1 log2 of the element's bytes; bits 2-3 log2 of the bytes that hold every value;
                       bit 4 elements have classes; bit 5 streams follow
4                      CRC-32C: without streams, of the decoded integers and then all other bytes; with streams, of
                       all other bytes but the next four
4, with streams        CRC-32C of the decoded integers
1 to 9                 count: 128 + k for 2^k; or the number of bytes that follow, and those
4, with classes        CRC-32C of the classes, one byte each
varints, with streams  bytes of the directory; in format 2, of the planes; of streams 0, 1 and 2
rest                   directory; in format 2, planes; with streams, four streams and eight zero bytes
=====================  ==============================================================================================

Decoded integers are checked in coded order, as the narrowest of 1, 2, 4 or 8 bytes that hold all of them.
Elements with classes are stably sorted by class, and every class is a group of its own. Format 2 always has streams,
be they empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.errors import IntegrityError

FORMAT = 1
PLANED = 2
GROUPED = 16
STREAMED = 32
PADDING = 8
DAMAGED = "The payload of integers is damaged: restore it from another copy."


@dataclass
class Header:
    """A payload's header: sizes in bytes, checksums, and where directory, planes and streams begin."""

    planed: bool
    width: int
    narrow: int
    grouped: bool
    streamed: bool
    check: int
    data_check: int
    count: int
    classes_check: int
    directory: int
    planes: int
    streams: int
    stream_starts: tuple[int, ...]
    stream_ends: tuple[int, ...]


def read_header(view: memoryview) -> Header:
    """Read what stands before the directory; every length is checked against the payload's size."""
    if len(view) < 7:
        raise IntegrityError(DAMAGED)
    if view[0] not in (FORMAT, PLANED):
        raise IntegrityError(
            f"The payload has format {view[0]}, not {FORMAT} or {PLANED}: it is damaged, or was written by a later "
            "ckstore."
        )
    planed = view[0] == PLANED
    flags = view[1]
    width, narrow = 1 << (flags & 3), 1 << (flags >> 2 & 3)
    grouped, streamed = bool(flags & GROUPED), bool(flags & STREAMED)
    if flags >= 64 or narrow > width or (planed and not streamed):
        raise IntegrityError(DAMAGED)
    check = int.from_bytes(view[2:6], "little")
    at = 6
    data_check = 0
    if streamed:
        data_check = int.from_bytes(view[6:10], "little")
        at = 10
    count, at = read_count(view, at)
    classes_check = 0
    if grouped:
        classes_check = int.from_bytes(_part(view, at, 4), "little")
        at += 4
    end = len(view)
    sizes = [end - at, 0, 0, 0, 0]
    if streamed:
        sizes, at = _read_sizes(view, at, planed)
        end -= PADDING
    bounds = [at + sum(sizes[: i + 1]) for i in range(5)]
    if bounds[4] > end or planed == (sizes[1] == 0):
        raise IntegrityError(DAMAGED)
    return Header(
        planed, width, narrow, grouped, streamed, check, data_check, count, classes_check, at, bounds[0], bounds[1],
        tuple(bounds[1:]), (*bounds[2:], end),
    )  # fmt: skip


def _read_sizes(view: memoryview, at: int, planed: bool) -> tuple[list[int], int]:
    """Bytes of directory, planes and streams 0 to 2, and where these varints end."""
    sizes = []
    for item in range(5):
        size = 0
        if item != 1 or planed:
            size, at = _read_varint(view, at)
        sizes.append(size)
    return sizes, at


def _part(view: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(view):
        raise IntegrityError(DAMAGED)
    return view[at : at + size]


def count_bytes(count: int) -> bytes:
    """Write a number of elements; the usual powers of two take one byte."""
    if count and count & (count - 1) == 0:
        return bytes((128 + count.bit_length() - 1,))
    size = (count.bit_length() + 7) // 8
    return bytes((size,)) + count.to_bytes(size, "little")


def read_count(view: memoryview, at: int) -> tuple[int, int]:
    """Read a number of elements. Returns it and where it ends."""
    first = _part(view, at, 1)[0]
    if first >= 128 + 48 or 6 < first < 128:
        raise IntegrityError(DAMAGED)
    if first >= 128:
        return 1 << first - 128, at + 1
    return int.from_bytes(_part(view, at + 1, first), "little"), at + 1 + first


def varint(number: int) -> bytes:
    """Write a number, seven bits a byte, lowest first."""
    result = bytearray()
    while number >= 128:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = _part(view, at, 1)[0]
        number |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            return number, at
        if shift > 56:
            raise IntegrityError(DAMAGED)


def overhead_bytes(head: bytes, length: int) -> int:
    """Bytes of a payload that are no coded integers: header, checksums, tables and padding.

    Parameters
    ----------
    head : bytes
        The payload's first 64 bytes, or all of a shorter one.
    length : int
        Bytes of the whole payload.
    """
    planed, flags = head[0] == PLANED, head[1]
    if not flags & STREAMED:
        return length
    _, at = read_count(memoryview(head), 10)
    at += 4 if flags & GROUPED else 0
    sizes, at = _read_sizes(memoryview(head), at, planed)
    return min(length, at + sizes[0] + PADDING)
