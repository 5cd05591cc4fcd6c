"""A cache of decoded chunks, limited in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.runtime.blocks import Block, empty
from ckstore.runtime.lru import Lru


class ChunkCache:
    """Decoded chunks by (id, index). Beyond `limit` bytes the least recently used are evicted. Safe for threads.

    An array that would keep a much larger buffer alive is copied first.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: Lru[tuple[str, int], npt.NDArray[Any]] = Lru(limit, _held)

    @property
    def limit(self) -> int:
        """Most bytes that are kept."""
        return self._chunks.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._chunks.limit = limit

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._chunks.weight

    @property
    def identities(self) -> set[str]:
        """Ids of the objects with cached chunks."""
        return {identity for identity, _ in self._chunks}

    def get(self, key: tuple[str, int]) -> npt.NDArray[Any] | None:
        """Return the chunk, or None."""
        return self._chunks.get(key)

    def drop(self, key: tuple[str, int]) -> None:
        """Evict a chunk if it is cached: its memory will be overwritten."""
        self._chunks.drop(key)

    def clear(self) -> None:
        """Evict everything."""
        self._chunks.clear()

    def put(self, key: tuple[str, int], array: npt.NDArray[Any]) -> None:
        """Cache `array` and make it read-only."""
        array.flags.writeable = False
        if array.nbytes > self.limit:
            return
        if _held(array) > 2 * array.nbytes:
            own = empty(array.size, array.dtype)
            own[...] = array
            array = own
            array.flags.writeable = False
        self._chunks.put(key, array)


def _held(array: npt.NDArray[Any]) -> int:
    """Return the bytes of memory that `array` keeps alive."""
    owner: Any = array
    while not isinstance(owner, Block):
        below = owner.base if isinstance(owner, np.ndarray) else owner.obj if isinstance(owner, memoryview) else None
        if below is None:
            return memoryview(owner).nbytes
        owner = below
    return owner.nbytes
