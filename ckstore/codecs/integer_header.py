"""What stands at the beginning of a payload of integers, before its directory.

A payload, integers little-endian:

=====================  ==============================================================================================
bytes                  content
=====================  ==============================================================================================
1                      format: 1; one more where some group has a plane, two more where some group is adaptive
1                      flags: bits 0-1 log2 of the element's bytes; bits 2-3 log2 of the bytes that hold every value;
                       bit 4 elements have classes; bit 5 streams follow
4                      CRC-32C: without streams, of the decoded integers and then all other bytes; with streams, of
                       all other bytes but the next four
4, with streams        CRC-32C of the decoded integers
1 to 7                 count: 128 + k for 2^k; or the number of bytes that follow, and those
4, with classes        CRC-32C of the classes, one byte each
varints, with streams  bytes of the directory; of the planes, if any; of streams 0, 1 and 2
rest                   directory; planes, if any; with streams, four streams and eight zero bytes
=====================  ==============================================================================================

Decoded integers are checked in coded order, as the narrowest of 1, 2, 4 or 8 bytes that hold all of them.
Elements with classes are stably sorted by class, and every class is a group of its own. Payloads with planes always
have streams, be they empty. Adaptive groups of formats 1 and 2, which earlier versions wrote, are coded otherwise than
those of 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ckstore.errors import IntegrityError

#: What the format's number is made of: the least, what planes add to it, and what adaptive groups add.
FORMAT, PLANED, OUTWARD = 1, 1, 2
GROUPED = 16
STREAMED = 32
PADDING = 8

#: Bytes of the longest varint, and more than any header has.
_VARINT = 9
_LONGEST = 96

DAMAGED = "The payload of integers is damaged: restore it from another copy."


@dataclass
class Header:
    """A payload's header: sizes in bytes, checksums, and where directory, planes and streams begin."""

    planed: bool
    outward: bool
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
    head = bytes(view[:_LONGEST])
    if len(head) < 7:
        raise IntegrityError(DAMAGED)
    added = head[0] - FORMAT
    if not 0 <= added <= PLANED + OUTWARD:
        raise IntegrityError(
            f"The payload has format {head[0]}, not {FORMAT} to {FORMAT + PLANED + OUTWARD}: it is damaged, or was "
            "written by a later ckstore."
        )
    planed, outward = bool(added & PLANED), bool(added & OUTWARD)
    flags = head[1]
    width, narrow = 1 << (flags & 3), 1 << (flags >> 2 & 3)
    grouped, streamed = bool(flags & GROUPED), bool(flags & STREAMED)
    if flags >= 64 or narrow > width or (planed and not streamed):
        raise IntegrityError(DAMAGED)
    check = int.from_bytes(head[2:6], "little")
    at = 6
    data_check = 0
    if streamed:
        data_check = int.from_bytes(head[6:10], "little")
        at = 10
    count, at = read_count(head, at)
    classes_check = 0
    if grouped:
        classes_check = int.from_bytes(_part(head, at, 4), "little")
        at += 4
    end = len(view)
    sizes = [end - at, 0, 0, 0, 0]
    if streamed:
        sizes, at = _read_sizes(head, at, planed)
        end -= PADDING
    planes, streams, first, second, third = accumulate(sizes[1:], initial=at + sizes[0])
    if third > end or planed == (planes == streams):
        raise IntegrityError(DAMAGED)
    return Header(
        planed, outward, width, narrow, grouped, streamed, check, data_check, count, classes_check, at, planes, streams,
        (streams, first, second, third), (first, second, third, end),
    )  # fmt: skip


def _read_sizes(head: bytes, at: int, planed: bool) -> tuple[list[int], int]:
    """Bytes of directory, planes and streams 0 to 2, and where these varints end."""
    sizes = []
    for item in range(5):
        size = 0
        if item != 1 or planed:
            size, at = _read_varint(head, at)
        sizes.append(size)
    return sizes, at


def _part(head: bytes, at: int, size: int) -> bytes:
    if at + size > len(head):
        raise IntegrityError(DAMAGED)
    return head[at : at + size]


def count_bytes(count: int) -> bytes:
    """Write a number of elements; the usual powers of two take one byte."""
    if count and count & (count - 1) == 0:
        return bytes((128 + count.bit_length() - 1,))
    size = (count.bit_length() + 7) // 8
    return bytes((size,)) + count.to_bytes(size, "little")


def read_count(head: bytes, at: int) -> tuple[int, int]:
    """Read a number of elements. Returns it and where it ends."""
    first = _part(head, at, 1)[0]
    if first >= 128 + 48 or 6 < first < 128:
        raise IntegrityError(DAMAGED)
    if first >= 128:
        return 1 << first - 128, at + 1
    return int.from_bytes(_part(head, at + 1, first), "little"), at + 1 + first


def varint(number: int) -> bytes:
    """Write a number, seven bits a byte, lowest first."""
    result = bytearray()
    while number >= 128:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)


def _read_varint(head: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    for end, byte in enumerate(head[at : at + _VARINT], at + 1):
        if byte < 128:
            return number | byte << shift, end
        number |= (byte & 127) << shift
        shift += 7
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
    planed, flags = bool(head[0] - FORMAT & PLANED), head[1]
    if not flags & STREAMED:
        return length
    _, at = read_count(head, 10)
    at += 4 if flags & GROUPED else 0
    sizes, at = _read_sizes(head, at, planed)
    return min(length, at + sizes[0] + PADDING)
