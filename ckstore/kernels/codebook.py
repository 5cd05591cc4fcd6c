"""Kernels of the non-uniform quantisers: histograms, assignment to levels, additive values, 16-bit floats.

Every kernel works on one chunk and releases the GIL. Floats are passed as the words (uint32) of float32 values. The
exponent field alone decides whether a value is normal, so that a process that flushes subnormals computes the same
bits. `tests/kernels/reference.py` has the same functions in NumPy.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import counted, int64

#: Low bits that a histogram's bin drops from a word: sign, exponent and six bits of the mantissa are left.
BIN_SHIFT = 17

#: Bins of signed values; the lower half are those of magnitudes.
BINS = 1 << (32 - BIN_SHIFT)

#: The word of an element without a finite value.
NOT_A_NUMBER = 0x7FC00000


@njit(inline="always")
def _field(word: np.uint32) -> np.uint32:
    """Return the exponent field of the word of a float32."""
    return (word >> np.uint32(23)) & np.uint32(255)


@njit(inline="always")
def _single(total: float) -> np.float32:
    """Return a value as float32: at most the largest finite number, and +0 below the smallest normal one."""
    total = np.float64(min(max(total, -3.4028234663852886e38), 3.4028234663852886e38))
    return np.float32(total) if abs(total) >= 1.1754943508222875e-38 else np.float32(0.0)


@counted
def _first_cells(midpoints: np.ndarray) -> np.ndarray:
    """Return the cell (uint8) of the lowest value of each bin, by the leading bits of a word; subnormals count as 0."""
    words = np.arange(BINS).astype(np.uint32) << np.uint32(BIN_SHIFT)
    lowest = (words | ((words >> np.uint32(31)) * np.uint32((1 << BIN_SHIFT) - 1))).view(np.float32)
    cells = np.zeros(BINS, np.uint8)
    cell = 0
    for k in range(BINS):
        # Ascending values: the negative bins from the last to the first, then the others.
        place = BINS - 1 - k if k < BINS // 2 else k - BINS // 2
        field = _field(words[place])
        if field == 255:
            continue
        value = np.float64(lowest[place]) if field != 0 else np.float64(0.0)
        while midpoints[cell] < value:
            cell += 1
        cells[place] = cell
    return cells


@kernel
def nearest(words: np.ndarray, midpoints: np.ndarray, zero: int, out: np.ndarray) -> None:
    """Write the index of each value's cell: the number of `midpoints` below the value.

    `midpoints` are sorted float64 values that end with infinity. A value on a midpoint belongs to the lower cell.
    Subnormal values count as 0; a value that is not finite takes the index `zero`.
    """
    floats = words.view(np.float32)
    cells = _first_cells(midpoints)
    for k in range(words.size):
        field = _field(words[k])
        index = int64(cells[words[k] >> np.uint32(BIN_SHIFT)])
        if field == 255:
            index = zero
        elif field != 0:
            value = np.float64(floats[k])
            while midpoints[index] < value:
                index += 1
        out[k] = np.uint8(index)


@kernel
def add(base: np.ndarray, indices: np.ndarray, centroids: np.ndarray, out: np.ndarray) -> None:
    """Write the words of ``base + centroids[indices]``: one float32 addition, rounded once.

    A base that is subnormal or not finite counts as 0. A sum below 2^-126 becomes +0, and a sum beyond the largest
    finite number becomes that number. Rounding the sum of two float32 numbers to float64 and then to float32 gives the
    sum rounded once, because 53 bits are more than twice 24 plus one.
    """
    bases = base.view(np.float32)
    floats = out.view(np.float32)
    for k in range(base.size):
        field = _field(base[k])
        value = np.float64(bases[k]) if field != 0 and field != 255 else np.float64(0.0)
        floats[k] = _single(value + np.float64(centroids[indices[k]]))


@kernel
def difference(words: np.ndarray, base: np.ndarray, out: np.ndarray) -> None:
    """Write the words of ``value - base``, with the rules of `add`; NaN if the value is not finite."""
    values = words.view(np.float32)
    bases = base.view(np.float32)
    floats = out.view(np.float32)
    for k in range(words.size):
        field, base_field = _field(words[k]), _field(base[k])
        value = np.float64(values[k]) if field != 0 and field != 255 else np.float64(0.0)
        before = np.float64(bases[k]) if base_field != 0 and base_field != 255 else np.float64(0.0)
        floats[k] = _single(value - before)
        if field == 255:
            out[k] = NOT_A_NUMBER


@kernel
def bucket_statistics(words: np.ndarray, counts: np.ndarray, sums: np.ndarray, shift: int) -> None:
    """Add each normal value to the count (int64) and the sum (float64) of its bucket: its word without `shift` bits."""
    floats = words.view(np.float32)
    for k in range(words.size):
        bucket = words[k] >> np.uint32(shift)
        field = _field(words[k])
        if field != 0 and field != 255:
            counts[bucket] += 1
            sums[bucket] += np.float64(floats[k])


@njit(inline="always")
def _rank(word: int, rank: int) -> int:
    """Return the bin of a rank's magnitude; 0 if the value itself is subnormal or 0, -1 if it is not finite."""
    field = _field(word)
    level = int64((rank & np.uint32(0x7FFFFFFF)) >> np.uint32(BIN_SHIFT))
    if field == 0:
        level = 0
    if field == 255:
        level = -1
    return level


@kernel
def rank_counts(words: np.ndarray, ranks: np.ndarray, counts: np.ndarray) -> None:
    """Count the finite values by the bins of their ranks (16,384 counts, int64)."""
    for k in range(words.size):
        level = _rank(words[k], ranks[k])
        if level >= 0:
            counts[level] += 1


@njit(inline="always")
def _side(word: int, sensitivity: int, split: tuple[int, int, int, int]) -> int:
    """Return 1 for a protected element, -1 for a pruned one and 0 for a quantised one.

    `split` has the bins of magnitudes and sensitivities below which elements are pruned, and from which they
    are protected in any case. Values that are subnormal, 0 or not finite are pruned.
    """
    field = _field(word)
    magnitude = int64((word & np.uint32(0x7FFFFFFF)) >> np.uint32(BIN_SHIFT))
    rank = int64((sensitivity & np.uint32(0x7FFFFFFF)) >> np.uint32(BIN_SHIFT))
    side = 0
    if field == 0 or field == 255:
        side = -1
    elif magnitude >= split[2] or rank >= split[3]:
        side = 1
    elif magnitude < split[0] or rank < split[1]:
        side = -1
    return side


@kernel
def level_counts(
    words: np.ndarray, sensitivities: np.ndarray, split: tuple[int, int, int, int], counts: np.ndarray
) -> None:
    """Count the values that are neither pruned nor protected by their bins (32,768 counts, int64)."""
    for k in range(words.size):
        if _side(words[k], sensitivities[k], split) == 0:
            counts[words[k] >> np.uint32(BIN_SHIFT)] += 1


@kernel
def split_indices(
    words: np.ndarray,
    sensitivities: np.ndarray,
    split: tuple[int, int, int, int],
    zero: int,
    aside: int,
    out: np.ndarray,
) -> None:
    """Overwrite the indices of pruned elements with `zero`, and of protected elements with `aside`."""
    for k in range(words.size):
        side = _side(words[k], sensitivities[k], split)
        if side < 0:
            out[k] = zero
        elif side > 0:
            out[k] = aside
