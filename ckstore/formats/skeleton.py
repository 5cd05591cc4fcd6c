"""The pieces of a file in order, skeleton and extents; fills in the skeleton's checksums."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import FileLayout, Source
from ckstore.runtime.checksum import crc32

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


#: Stretches of a block that are checked one by one, at most: more are small.
_MANY = 64


class Piece(NamedTuple):
    """A stretch of a file from byte `start` to before `stop`: the extent of that number, or (-1) of the skeleton."""

    extent: int
    start: int
    stop: int


def pieces(layout: FileLayout) -> Iterator[Piece]:
    """Yield every byte of the file once, in file order, as stretches of the skeleton and extents."""
    position = 0
    for index, extent in enumerate(layout.extents):
        start, stop = extent.start, extent.start + prod(extent.shape) * ITEM_SIZES[extent.dtype]
        if start > position:
            yield Piece(-1, position, start)
        yield Piece(index, start, stop)
        position = stop
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
    import numpy as np

    numbers, offsets = crc_offsets(layout)
    if not offsets.size:
        return skeleton
    if not 0 <= offsets.min() <= offsets.max() <= len(skeleton) - 4:
        raise ValueError("a checksum outside of its file")
    filled = np.frombuffer(skeleton, np.uint8).copy()
    filled[offsets[:, None] + np.arange(4)] = np.array(crcs, "<u4")[numbers].view(np.uint8).reshape(-1, 4)
    return filled.tobytes()


def crc_offsets(layout: FileLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of the check, and the offset in the skeleton, of every stored CRC, in the file's order."""
    import numpy as np

    places = np.array([place for checked in layout.checked for place in checked.positions], np.int64)
    counts = [len(checked.positions) for checked in layout.checked]
    order = np.argsort(places, kind="stable")
    starts = np.array([extent.start for extent in layout.extents], np.int64)
    sizes = [prod(extent.shape) * ITEM_SIZES[extent.dtype] for extent in layout.extents]
    before = np.cumsum([0, *sizes], dtype=np.int64)[np.searchsorted(starts, places, "right")]
    return np.repeat(np.arange(len(counts)), counts)[order], (places - before)[order]


class Checks:
    """CRC-32 of the checked stretches of a file, computed while the file is read in order; see `results`."""

    def __init__(self, layout: FileLayout) -> None:
        starts, self._stops = [one.start for one in layout.checked], [one.stop for one in layout.checked]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)
        self._starts = [starts[number] for number in self._order]
        self._next = 0
        #: The place in the order of each stretch that goes on.
        self._begun: list[int] = []
        self.results = [0] * len(starts)

    def update(self, start: int, block: bytes | memoryview) -> None:
        """Process the block that begins at byte `start`."""
        stop = start + len(block)
        first, self._next = self._next, bisect_left(self._starts, stop, self._next)
        begun, results = [*self._begun, *range(first, self._next)], self.results
        # A part of bytes takes less time than one of a view.
        data = bytes(block) if len(begun) > _MANY else memoryview(block)
        self._begun = []
        for place in begun:
            number, low = self._order[place], self._starts[place]
            high = self._stops[number]
            part = data[max(low - start, 0) : max(high - start, 0)]
            if part:
                results[number] = crc32(part, results[number])
            if high > stop:
                self._begun.append(place)
