"""Arrays of the sizes of chunks and objects whose memory is reused once it is free.

Memory that the C library returns to the system must be mapped page by page again, and zeroed: for an array of 2^18
floats that takes as long as decoding it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

#: Arrays with fewer or more bytes are allocated as usual.
_LEAST, _MOST = 1 << 16, 1 << 25

#: Memory of at least this size is a mapping of its own: deleted between other arrays of the C library, it would leave
#: a hole there. Systems limit the number of mappings (Linux: 65,530).
_MAPPED = 1 << 19

#: Arrays begin with a line of the cache: a store of a whole vector that crosses lines takes twice as long.
_LINE = 64

#: Bytes that are kept: an encoded ingest of a file of 268 MB frees 225 MB.
_KEPT = 256 << 20

#: Memory and the address of its use.
Memory = tuple[npt.NDArray[np.uint8], int]

#: Free memory by the binary logarithm of its size. Appending and popping are atomic.
_free: dict[int, list[Memory]] = {size: [] for size in range(_LEAST.bit_length() - 1, 26)}


class Block:
    """Memory and, as `base`, the owner of arrays in it: it is reused after the last of them is deleted."""

    __slots__ = ("__array_interface__", "_memory", "_size", "nbytes")

    def __init__(self, size: int, memory: Memory, dtype: np.dtype[Any], count: int) -> None:
        self._size = size
        self._memory = memory
        self.nbytes = 1 << size
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": dtype.str,
            "data": (self._memory[1], False),
        }

    # At the end of the process, this module's names may be deleted before the last array.
    def __del__(self, free: dict[int, list[Memory]] = _free, kept: int = _KEPT) -> None:
        free[self._size].append(self._memory)
        while sum([len(same) << size for size, same in free.items()]) > kept:
            most = max(free, key=lambda size: len(free[size]) << size)  # Of a size that is perhaps no longer used.
            del free[most][:1]


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised one-dimensional array of `count` elements; for plain numbers only."""
    wanted = np.dtype(dtype)
    nbytes = count * wanted.itemsize
    if not _LEAST <= nbytes <= _MOST:
        return np.empty(count, wanted)
    size = (nbytes - 1).bit_length()
    try:
        memory = _free[size].pop()
    except IndexError:
        memory = _new(1 << size)
    return np.asarray(Block(size, memory, wanted, count))


def _new(nbytes: int) -> Memory:
    if nbytes >= _MAPPED:
        with suppress(OSError):
            mapped = np.frombuffer(mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY), np.uint8)
            return mapped, mapped.ctypes.data
    memory = np.empty(nbytes + _LINE, np.uint8)
    address = memory.ctypes.data
    return memory, address + -address % _LINE


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array contiguous and aligned, as kernels take it."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))
