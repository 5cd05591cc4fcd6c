"""Decoded chunks that stay at hand, up to a number of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.runtime.blocks import Block, empty
from ckstore.runtime.lru import Lru


class ChunkCache:
    """Decoded chunks by (id, index), least recently used ones dropped beyond `limit` bytes; safe for threads.

    What lies in much more memory than it takes is copied, since it would keep all of that.
    """

    def __init__(self, limit: int) -> None:
        self._chunks: Lru[tuple[str, int], npt.NDArray[Any]] = Lru(limit, _held)

    @property
    def limit(self) -> int:
        """Bytes that are kept at most."""
        return self._chunks.limit

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._chunks.weight

    @property
    def identities(self) -> set[str]:
        """Ids of the objects that chunks are kept of."""
        return {identity for identity, _ in self._chunks}

    def get(self, key: tuple[str, int]) -> npt.NDArray[Any] | None:
        """The array, or None."""
        return self._chunks.get(key)

    def drop(self, key: tuple[str, int]) -> None:
        """Forget a chunk, if it is here: its memory is used again."""
        self._chunks.drop(key)

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()

    def put(self, key: tuple[str, int], array: npt.NDArray[Any]) -> None:
        """Keep `array`, which nobody may write to from here on."""
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
    """Bytes that stay in memory as long as `array` does."""
    owner: Any = array
    while not isinstance(owner, Block):
        below = owner.base if isinstance(owner, np.ndarray) else owner.obj if isinstance(owner, memoryview) else None
        if below is None:
            return memoryview(owner).nbytes
        owner = below
    return owner.nbytes
