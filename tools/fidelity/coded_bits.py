"""Measures changes of levels in the codings of Inshrinkerator's ablation: no store holds them, nothing decodes them.

The store's coder takes the levels of the base as classes and codes runs of zeros: the same rearrangement and runs, in
fewer bits on all late pairs but those without a change (`docs/decisions.md`).
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import Indices

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


class CodedBits(NamedTuple):
    """Sizes in bits of the differences between two versions' indices in the three codings of the paper's ablation."""

    huffman: int
    run_lengths: int
    rearranged: int


def coded_bits(indices: Indices, base: Indices, levels: int) -> CodedBits:
    """Return the size of ``(base - n) mod levels`` in the paper's codings, with code tables.

    The codings are plain Huffman codes, Huffman codes of run lengths (`run_lengths`), and the latter with the elements
    rearranged by their level in the base, each group with its own runs and table.
    """
    changes = np.remainder(base.astype(np.int64) - indices, levels)
    order = np.argsort(base, kind="stable")
    groups = np.split(changes[order], np.flatnonzero(np.diff(base[order])) + 1)
    return CodedBits(
        huffman_bits(changes),
        huffman_bits(run_lengths(changes)),
        sum(huffman_bits(run_lengths(group)) for group in groups),
    )


def run_lengths(values: Array) -> Counts:
    """Return runs in the paper's form: each value negated; a run of more than one as its positive length before it.

    Examples
    --------
    >>> import numpy as np
    >>> run_lengths(np.array([0, 0, 0, 5, 2, 2])).tolist()
    [3, 0, -5, 2, -2]
    """
    if not values.size:
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    lengths = np.diff(np.append(starts, values.size))
    pairs = np.stack((lengths, -values[starts].astype(np.int64)), axis=1)
    written: Counts = pairs[np.stack((lengths > 1, np.ones(starts.size, bool)), axis=1)]
    return written


def huffman_bits(symbols: Array) -> int:
    """Return the bits of the symbols in their own Huffman code, and of its table.

    A table's entry is a code length in 5 bits and the distance to the symbol before it in Elias' gamma code.
    """
    values, counts = np.unique(symbols, return_counts=True)
    if not values.size:
        return 0
    distances = np.diff(values, prepend=values[0] - 1 - abs(int(values[0])))
    table = int((5 + 2 * np.floor(np.log2(distances)) + 1).sum())
    heap = counts.tolist()
    if len(heap) == 1:
        return table + int(heap[0])
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return table + total
