"""Patches: the few elements of a chunk that differ from another chunk of the same values.

The size of a level that changes little follows its changes: a patch is applied to the other chunk's bits, in place.

A patch; numbers of more than one byte are little-endian:

======  ==========================================================================================================
bytes   content
======  ==========================================================================================================
4       CRC-32 of all other bytes
varint  elements that differ, at least one
varint  bytes of the places of runs; 0 if the elements are isolated, whose places are in the blocks
        for each run of elements two varints, the number of elements between it and the run before (or the chunk's
        begin), and its length less 1
        for every 64 of the elements, and the rest of them, a block of numbers
8       zeros
======  ==========================================================================================================

The number of an element is twice the magnitude less 1 of its difference, and one more if that is positive. A block:

======  ==========================================================================================================
bytes   content
======  ==========================================================================================================
1       width w: bits of a number, and 128 more if there are longer numbers
0 or 1  if the elements are isolated: k, at most 31
0 or 1  if there are longer numbers: how many
        the low w bits of all numbers, the first in the lowest bits of the first byte
        for each isolated element the low k bits of g, the number of elements between it and the one before (or the
        chunk's begin); then for each g >> k zeros and a one
        zeros up to a whole byte
        for each longer number a byte, its place in the block, and another, its bits above the low w bits
======  ==========================================================================================================

The difference of floats is that of their ordinals, of other elements that of their bits, modulo the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import IntegrityError
from ckstore.runtime.blocks import aligned
from ckstore.runtime.checksum import crc32
from ckstore.runtime.scratch import scratch

Array = npt.NDArray[Any]

_CHECKSUM = 4
_PADDING = 8

DAMAGED = "The patch is damaged: restore it from another copy."


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """The elements of a chunk that differ from another's, valid until this thread's next search.

    `places` (int32) are their numbers, ascending, and `numbers` (uint64) their differences as they are stored.
    """

    places: Array
    numbers: Array

    def patch(self) -> bytes | None:
        """Return the patch; None without changes."""
        if not self.places.size:
            return None
        from ckstore.kernels.patches import write_patch

        payload = scratch("patch", 19 * self.places.size + 96, np.uint8)
        size = write_patch(self.places, self.numbers, self.places.size, payload)
        body = payload[_CHECKSUM:size]
        return crc32(body).to_bytes(_CHECKSUM, "little") + body.tobytes()


def find_changes(after: Array, before: Array, *, is_float: bool) -> ChangedElements:
    """Compare two chunks of elements bit by bit; raise `IntegrityError` if their sizes differ."""
    from ckstore.kernels import patches as kernels

    if (after.size, after.itemsize) != (before.size, before.itemsize):
        raise IntegrityError(
            f"{after.size} values do not fit {before.size} to compare with; run `ckstore verify` to find the object."
        )
    places = scratch("patch-places", after.size, np.int32)
    numbers = scratch("patch-numbers", after.size, np.uint64)
    count = kernels.find_changes(_bytes(after), _bytes(before), after.itemsize, is_float, places, numbers)
    return ChangedElements(places[:count], numbers[:count])


def apply_patch(payload: memoryview, bits: Array, *, is_float: bool, is_undone: bool = False) -> None:
    """Turn the chunk that a patch was made against into its target, in place, or the target into that chunk.

    Raise `IntegrityError` if the patch is damaged or does not fit the chunk; `bits` is undefined then.
    """
    from ckstore.kernels import patches as kernels

    body = payload[_CHECKSUM:]
    if len(body) < 2 + _PADDING or crc32(body) != int.from_bytes(payload[:_CHECKSUM], "little"):
        raise IntegrityError(DAMAGED)
    data, elements = aligned(np.frombuffer(payload, np.uint8)), bits.view(np.uint8)
    if kernels.apply_patch(data, elements, bits.itemsize, is_float, is_undone):
        raise IntegrityError(DAMAGED)


def _bytes(array: Array) -> Array:
    return aligned(array).view(np.uint8)
