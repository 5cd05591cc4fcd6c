"""Planes: the low bytes of the zigzag numbers of dense groups, stored raw beside the streams.

Where the low 8, 16 or 32 bits of a group's numbers are raw bits in nearly every symbol, a copy of them costs a small
part of what coding them does. Splitting leaves the signed integer of the number's other bits in the element's place,
which is then coded like any other; joining puts both together again.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.bytes import store_2, store_4
from ckstore.kernels.entropy.words import Array, spliced, uint64, zigzag


@spliced
def store_plane(coded: Array, start: int, count: int, width: int, planes: Array, at: int) -> None:
    """Write the low `width` bytes of some elements' zigzag numbers into `planes` (uint8) from byte `at` on."""
    first = uint64(start)
    if width == 1:
        for i in range(uint64(count)):
            planes[uint64(at) + i] = np.uint8(zigzag(coded[first + i]))
    elif width == 2:
        for i in range(uint64(count)):
            store_2(planes, uint64(at) + uint64(2) * i, zigzag(coded[first + i]))
    elif width == 4:
        for i in range(uint64(count)):
            store_4(planes, uint64(at) + uint64(4) * i, zigzag(coded[first + i]))
