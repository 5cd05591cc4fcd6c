"""Cuts opaque bytes by their content, so that files that share bytes share objects, wherever the bytes lie.

A part ends before 4 bytes that a hash selects. The parent's cuts are kept where few of the cuts by content agree with
them: equal bytes are then rare, and the bytes are stored as differences to those at the same place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckstore.formats.layout import FileLayout, Source
from ckstore.scanning.scanned import ScannedVersion

#: The least and the most bytes of a part; only the last one may have more. On average a part has twice the least.
LEAST = 1 << 18
MOST = 1 << 21
#: The share of 4-byte words that end a part.
_SHARE = 1 << 18
_MULTIPLIER = np.uint32(0x9E3779B1)
_BELOW = np.uint32((1 << 32) // _SHARE)
_WORD = 4
_BLOCK = 1 << 16
#: Opaque bytes beyond this size stay in large parts, so that the number of objects stays bounded.
_MOST_BYTES = 1 << 32
#: The share of cuts by content that must agree with the parent's.
_AGREEING = 0.5


def plan_cuts(version: ScannedVersion) -> dict[tuple[int, int], list[int]]:
    """Return the first bytes of the parts of each opaque extent, by file and extent."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, file in enumerate(version.files):
        for index in opaque_extents(file.layout):
            extent = file.layout.extents[index]
            cuts = content_cuts(file.source, extent.start, extent.count)
            size, before = version.cuts_before.get((version.prefix(file), extent.path), (0, ()))
            is_alike = len(set(cuts).intersection(before)) >= _AGREEING * len(cuts)
            found[number, index] = list(before) if size == extent.count and not is_alike else cuts
    return found


def opaque_extents(layout: FileLayout) -> list[int]:
    """Return the numbers of the extents that are cut by content: large ones of bytes without tensors."""
    viewed = {tensor.extent for tensor in layout.tensors}
    return [
        index
        for index, extent in enumerate(layout.extents)
        if extent.dtype == "uint8" and MOST < extent.count <= _MOST_BYTES and index not in viewed
    ]


def content_cuts(source: Source, start: int, nbytes: int) -> list[int]:
    """Return the first bytes of the parts of the bytes from `start` on, counted from there; the first one is 0."""
    cuts = [0]
    while nbytes - cuts[-1] > MOST:
        cuts.append(cuts[-1] + _length(source, start + cuts[-1], nbytes - cuts[-1]))
    return cuts


def _length(source: Source, start: int, left: int) -> int:
    """Return the bytes of the part at `start`, where `left` bytes, more than the most, are left."""
    for position in range(LEAST, MOST, _BLOCK):
        selected = _first_selected(source.pread(start + position, min(_BLOCK + _WORD - 1, left - position)))
        if selected is not None:
            return position + selected
    return MOST


def _first_selected(block: bytes) -> int | None:
    """Return the first offset in a block of 4 bytes that the hash selects; None without one."""
    firsts = []
    for offset in range(_WORD):
        words: npt.NDArray[np.uint32] = np.frombuffer(block, "<u4", (len(block) - offset) // _WORD, offset)
        selected = np.flatnonzero(words * _MULTIPLIER < _BELOW)
        if len(selected):
            firsts.append(int(selected[0]) * _WORD + offset)
    return min(firsts, default=None)
