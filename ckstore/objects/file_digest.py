"""The BLAKE3 of a file whose bytes several processes have: each gives the nodes of the tree above its bytes.

stretch = stretch_of(data, start)           # a process: the nodes of whole leaves, and the bytes around them
digest  = FileDigest(); digest.add(...)     # another: bytes and stretches in the order of the file
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckstore.kernels.tree import LEAF, chunk_values, largest_trees, parent_values, root_value
from ckstore.runtime.scratch import scratch

Bytes = npt.NDArray[np.uint8]
Nodes = npt.NDArray[np.uint32]

#: Trees of a stretch at most: two of each size.
_TREES = 128


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file in short: those before its first whole leaf and after its last one, and nodes between.

    A node has the logarithm of the number of its leaves, and its value. Trees are as large as their places allow.
    """

    before: bytes
    nodes: tuple[tuple[int, bytes], ...]
    after: bytes


def stretch_of(data: Bytes, start: int) -> Stretch:
    """Return bytes that lie at byte `start` of a file, in short."""
    first, last = -(-start // LEAF), (start + data.size) // LEAF
    if first >= last:
        return Stretch(data.tobytes(), (), b"")
    low, high = first * LEAF - start, last * LEAF - start
    values = scratch("leaves", 8 * (last - first), np.uint32).reshape(-1, 8)
    chunk_values(np.ascontiguousarray(data[low:high]), first, values)
    return Stretch(data[:low].tobytes(), _trees(values, first), data[high:].tobytes())


def _trees(values: Nodes, first: int) -> tuple[tuple[int, bytes], ...]:
    """Return the roots of the largest aligned trees above leaves, in order; overwrite the leaves' values."""
    nodes, levels = np.empty((_TREES, 8), np.uint32), np.empty(_TREES, np.uint8)
    count = largest_trees(values, first, nodes, levels)
    return tuple((level, node.tobytes()) for level, node in zip(levels[:count].tolist(), nodes, strict=False))


class FileDigest:
    """The BLAKE3 of a file, from its bytes and stretches in order. Bytes come last."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._leaves = 0
        self._rest = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes; the last leaf stays until more follow."""
        self._rest += data
        count = (len(self._rest) - 1) // LEAF
        if count > 0:
            values = np.empty((count, 8), np.uint32)
            chunk_values(np.frombuffer(bytes(self._rest[: count * LEAF]), np.uint8), self._leaves, values)
            del self._rest[: count * LEAF]
            for value in values:
                self._append(0, value.tobytes())

    def add_stretch(self, stretch: Stretch) -> None:
        """Add a stretch at its place in the file."""
        self.add(stretch.before)
        if stretch.nodes:
            if self._rest:  # A whole leaf that more follows.
                value = np.empty((1, 8), np.uint32)
                chunk_values(np.frombuffer(bytes(self._rest), np.uint8), self._leaves, value)
                self._rest.clear()
                self._append(0, value.tobytes())
            for level, node in stretch.nodes:
                self._append(level, node)
        self.add(stretch.after)

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal, as `b3sum` prints it."""
        above = np.frombuffer(b"".join(self._nodes), np.uint32)
        value = np.empty(8, np.uint32)
        root_value(np.frombuffer(bytes(self._rest), np.uint8), self._leaves, above, value)
        return value.tobytes().hex()

    def _append(self, level: int, node: bytes) -> None:
        """Add a tree, and join it with those of its size before it."""
        self._leaves += 1 << level
        count = self._leaves >> level
        while count % 2 == 0:
            pair = np.frombuffer(self._nodes.pop() + node, np.uint32).reshape(1, 16)
            value = np.empty((1, 8), np.uint32)
            parent_values(pair, value)
            node, count = value.tobytes(), count // 2
        self._nodes.append(node)
