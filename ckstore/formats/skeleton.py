"""The pieces of a file in order, skeleton and extents; fills in the skeleton's checksums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckstore.formats.layout import FileLayout, Source
from ckstore.runtime.checksum import crc32


class Piece(NamedTuple):
    """A stretch of a file from byte `start` to before `stop`: the extent of that number, or (-1) of the skeleton."""

    extent: int
    start: int
    stop: int


def pieces(layout: FileLayout) -> Iterator[Piece]:
    """Yield every byte of the file once, in file order, as stretches of the skeleton and extents."""
    position = 0
    for index, extent in enumerate(layout.extents):
        if extent.start > position:
            yield Piece(-1, position, extent.start)
        yield Piece(index, extent.start, extent.stop)
        position = extent.stop
    if position < layout.size:
        yield Piece(-1, position, layout.size)


def stored_crcs(source: Source, layout: FileLayout) -> list[int]:
    """Return the container's CRC-32 for each of `layout.checked`.

    The parser has verified that all places of one hold the same value.
    """
    return [int.from_bytes(source.pread(checked.positions[0], 4), "little") for checked in layout.checked]


def fill_crcs(skeleton: bytes, layout: FileLayout, crcs: list[int]) -> bytes:
    """Return the skeleton with `crcs[i]` at every place of `layout.checked[i]`: the inverse of the zeroing.

    Raises `ValueError` if a place is not in the skeleton.
    """
    filled = bytearray(skeleton)
    for index, offset in crc_offsets(layout):
        if not 0 <= offset <= len(filled) - 4:
            raise ValueError("a checksum outside of its file")
        filled[offset : offset + 4] = crcs[index].to_bytes(4, "little")
    return bytes(filled)


def crc_offsets(layout: FileLayout) -> Iterator[tuple[int, int]]:
    """Yield (index of the check, offset in the skeleton) of every stored CRC."""
    places = sorted((place, index) for index, checked in enumerate(layout.checked) for place in checked.positions)
    before = number = 0
    for place, index in places:
        while number < len(layout.extents) and layout.extents[number].start <= place:
            before += layout.extents[number].nbytes
            number += 1
        yield index, place - before


class Checks:
    """CRC-32 of the checked stretches of a file, computed while the file is read in order; see `results`."""

    def __init__(self, layout: FileLayout) -> None:
        self._order = sorted(range(len(layout.checked)), key=lambda index: layout.checked[index].start)
        self._checked = layout.checked
        self._next = 0
        self._begun: list[int] = []
        self.results = [0] * len(layout.checked)

    def update(self, start: int, block: bytes | memoryview) -> None:
        """Process the block that begins at byte `start`."""
        stop = start + len(block)
        view = memoryview(block)
        while self._next < len(self._order) and self._checked[self._order[self._next]].start < stop:
            self._begun.append(self._order[self._next])
            self._next += 1
        for index in self._begun:
            low, high = max(self._checked[index].start, start), min(self._checked[index].stop, stop)
            if low < high:
                self.results[index] = crc32(view[low - start : high - start], self.results[index])
        self._begun = [index for index in self._begun if self._checked[index].stop > stop]
