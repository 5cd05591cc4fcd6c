"""The header of a payload of integers, before its directory.

A payload, integers little-endian:

=====================  ==============================================================================================
bytes                  content
=====================  ==============================================================================================
1                      format: 1
1                      flags: bits 0-1 log2 of the element's bytes; bits 2-3 log2 of the bytes that hold every value;
                       bit 4 elements have classes; bit 5 streams follow
4                      CRC-32 of the decoded integers and then all other bytes
1 to 7                 count: 128 + k for 2^k; or the number of bytes that follow, and those
4, with classes        CRC-32 of the classes, one byte each
varints, with streams  bytes of the directory, and of streams 0, 1 and 2
rest                   directory; with streams, planes, four streams and eight zero bytes
=====================  ==============================================================================================

Decoded integers are checked in coded order, as the narrowest of 1, 2, 4 or 8 bytes that hold all of them.
Elements with classes are stably sorted by class, and every class is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.errors import IntegrityError
from ckstore.varint import read_varints

FORMAT = 1
GROUPED = 16
STREAMED = 32
PADDING = 8

#: More bytes than any header has.
_LONGEST = 96

DAMAGED = "The payload of integers is damaged: restore it from another copy."


@dataclass
class Header:
    """A payload's header: sizes in bytes, its checksum, the bounds of the directory, and the streams' sizes."""

    width: int
    narrow: int
    grouped: bool
    streamed: bool
    check: int
    count: int
    classes_check: int
    directory: int
    planes: int
    streams: tuple[int, ...]


def read_header(view: memoryview, length: int | None = None) -> Header:
    """Read the bytes before the directory, which `view` begins with; check every length against the payload's size.

    `length` is that size; by default, `view` is the payload.
    """
    length = len(view) if length is None else length
    head = bytes(view[:_LONGEST])
    if len(head) < 7:
        raise IntegrityError(DAMAGED)
    if head[0] != FORMAT:
        raise IntegrityError(
            f"The payload has format {head[0]}, not {FORMAT}: it is damaged, or was written by a later ckstore."
        )
    flags = head[1]
    width, narrow = 1 << (flags & 3), 1 << (flags >> 2 & 3)
    grouped, streamed = bool(flags & GROUPED), bool(flags & STREAMED)
    if flags >= 64 or narrow > width:
        raise IntegrityError(DAMAGED)
    count, at = read_count(head, 6)
    classes_check = 0
    if grouped:
        classes_check = int.from_bytes(_part(head, at, 4), "little")
        at += 4
    sizes = [length - at, 0, 0, 0]
    if streamed:
        try:
            sizes, at = read_varints(head, at, 4)  # Of the directory and of streams 0 to 2.
        except ValueError as error:
            raise IntegrityError(DAMAGED) from error
        if at + sum(sizes) + PADDING > length:
            raise IntegrityError(DAMAGED)
    return Header(
        width, narrow, grouped, streamed, int.from_bytes(head[2:6], "little"), count, classes_check, at, at + sizes[0],
        tuple(sizes[1:]),
    )  # fmt: skip


def _part(head: bytes, at: int, size: int) -> bytes:
    if at + size > len(head):
        raise IntegrityError(DAMAGED)
    return head[at : at + size]


def read_count(head: bytes, at: int) -> tuple[int, int]:
    """Read a number of elements. Return it and its end."""
    first = _part(head, at, 1)[0]
    if first >= 128 + 48 or 6 < first < 128:
        raise IntegrityError(DAMAGED)
    if first >= 128:
        return 1 << first - 128, at + 1
    return int.from_bytes(_part(head, at + 1, first), "little"), at + 1 + first


def overhead_bytes(head: bytes, length: int) -> int:
    """Return the bytes of a payload without coded integers: header, checksums, tables and padding.

    Parameters
    ----------
    head : bytes
        The payload's first 64 bytes, or all of a shorter one.
    length : int
        Bytes of the whole payload.
    """
    header = read_header(memoryview(head), length)
    return header.planes + PADDING if header.streamed else length
