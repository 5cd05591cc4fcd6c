"""Arrays of the sizes of chunks and objects whose memory is reused once it is free.

Memory that the C library returns to the system must be mapped page by page again, and zeroed: for an array of 2^18
floats that takes as long as decoding it.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

#: Arrays with fewer or more bytes are allocated as usual.
_LEAST, _MOST = 1 << 16, 1 << 25

#: Bytes that are kept of each size up to that of a chunk, whose binary logarithm is at most ...
_KEPT = 16 << 20
_CHUNK = 22

#: ... and bytes of all larger sizes together: the objects that an ingest holds while it reads, plans and encodes.
_KEPT_OBJECTS = 96 << 20

#: Free memory, and its address, by the binary logarithm of its size. Appending and popping are atomic.
_free: dict[int, list[tuple[npt.NDArray[np.uint8], int]]] = {size: [] for size in range(_LEAST.bit_length() - 1, 26)}


class Block:
    """Memory and, as `base`, the owner of arrays in it: it is reused after the last of them is deleted."""

    __slots__ = ("__array_interface__", "_memory", "_size", "nbytes")

    def __init__(self, size: int, dtype: np.dtype[Any], count: int) -> None:
        self._size = size
        try:
            self._memory = _free[size].pop()
        except IndexError:
            # A mapping of its own: deleted between other arrays of the C library, it would leave a hole there.
            try:
                memory = np.frombuffer(mmap.mmap(-1, 1 << size, access=mmap.ACCESS_COPY), np.uint8)
            except OSError as error:
                raise MemoryError(f"There are no {1 << size:,} bytes of memory.") from error
            self._memory = memory, memory.ctypes.data
        self.nbytes = 1 << size
        self.__array_interface__ = {
            "version": 3,
            "shape": (count,),
            "typestr": dtype.str,
            "data": (self._memory[1], False),
        }

    # At the end of the process, this module's names may be deleted before the last array.
    def __del__(
        self,
        free: dict[int, list[tuple[npt.NDArray[np.uint8], int]]] = _free,
        kept: int = _KEPT,
        chunk: int = _CHUNK,
        kept_objects: int = _KEPT_OBJECTS,
    ) -> None:
        same = free[self._size]
        if self._size <= chunk:
            is_kept = len(same) << self._size < kept
        else:
            is_kept = sum([len(free[size]) << size for size in free if size > chunk]) + self.nbytes <= kept_objects
        if is_kept:
            same.append(self._memory)


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised one-dimensional array of `count` elements; for plain numbers only."""
    wanted = np.dtype(dtype)
    nbytes = count * wanted.itemsize
    if not _LEAST <= nbytes <= _MOST:
        return np.empty(count, wanted)
    return np.asarray(Block((nbytes - 1).bit_length(), wanted, count))


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array contiguous and aligned, as kernels take it."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))
