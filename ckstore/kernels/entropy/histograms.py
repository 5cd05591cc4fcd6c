"""The encoder's histograms of numbers, direct and wide ones."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.layout import EXACT_OCTAVES, ROW, fine_size
from ckstore.kernels.entropy.words import (
    Array,
    bit_length,
    counted,
    inner,
    int64,
    load_word,
    spliced,
    store_word,
    uint64,
)

TABLE_BITS = 16
"""Bits of the numbers that have a table of their own."""
MOST_JOINED = 4
"""Most numbers that are joined in one."""
_JOINED_BITS = 14
"""Most bits of a joined number: its tables still stay near the processor."""
_TABLES = 4
"""Tables of a histogram that take turns: an addition to the place of the one before would wait for it."""
_BLOCK = 1024
_ROW = int64(ROW)


@spliced
def has_table(octaves: int, count: int) -> bool:
    """Whether so many numbers of so many bits are worth a table of all numbers."""
    return octaves <= EXACT_OCTAVES or (octaves <= TABLE_BITS and count >> octaves > 0)


@spliced
def join_numbers(numbers: Array, first: int, count: int, bits: int) -> int:
    """Join numbers of few bits that follow each other in a stream, in place. Returns how many make one.

    The joined numbers take the places of the first ones; the last ones that make no whole item stay where they are.
    """
    joined = int64(1)
    while bits and joined < MOST_JOINED:
        wide = 2 * joined * bits
        if wide > _JOINED_BITS or count >> wide < 4:
            break
        for i in range(count // (8 * joined)):
            low = load_word(numbers, first + 8 * i)
            high = load_word(numbers, first + 8 * i + 4)
            store_word(numbers, first + 4 * i, low | (high << uint64(joined * bits)))
        joined *= 2
    return joined


@spliced
def _split_bins(bins: Array, bits: int) -> None:
    """Make the histogram of pairs of joined numbers, of `bits` bits each, one of the numbers."""
    size = uint64(1) << uint64(bits)
    lows = np.empty(int64(size), np.int64)
    highs = np.empty(int64(size), np.int64)
    for low in range(size):
        lows[low] = 0
    for high in range(size):
        total = int64(0)
        for low in range(size):
            count = bins[high * size + low]
            lows[low] += count
            total += count
        highs[high] = total
    for i in range(size):
        bins[i] = lows[i] + highs[i]


@spliced
def count_joined(numbers: Array, first: int, count: int, joined: int, octaves: int, share: int, bins: Array) -> None:
    """Histogram of direct numbers of which `joined` make one; of about 1 / `share` of them, times `share`."""
    items = count // (4 * joined) * 4
    count_direct(numbers, first, items if joined > 1 else count, joined * octaves, share, bins)
    for part in (2, 1):
        if part < joined:
            _split_bins(bins, part * octaves)
    if share > 1:
        for i in range(uint64(1) << uint64(octaves)):
            bins[i] *= share
    if joined > 1:
        for i in range(uint64(first + joined * items), uint64(first + count)):
            bins[numbers[i]] += 1


@inner
def count_direct(numbers: Array, first: int, count: int, octaves: int, share: int, bins: Array) -> None:
    """Histogram of numbers of at most `octaves` bits (uint16), in several tables where there are enough of them.

    With `share` above 1, of one block in so many.
    """
    size = uint64(1) << uint64(octaves)
    tables = uint64(_TABLES if octaves <= EXACT_OCTAVES and count >= 8 << octaves else 1)
    stride = size if tables > uint64(1) else uint64(0)
    for i in range(tables * size):
        bins[i] = 0
    for block in range(first, first + count, _BLOCK * share):
        end = min(block + _BLOCK, first + count)
        fours = uint64(block + (end - block & -4))
        for i in range(uint64(block), fours, uint64(4)):
            bins[numbers[i]] += 1
            bins[stride + numbers[i + uint64(1)]] += 1
            bins[stride * uint64(2) + numbers[i + uint64(2)]] += 1
            bins[stride * uint64(3) + numbers[i + uint64(3)]] += 1
        for i in range(fours, uint64(end)):
            bins[numbers[i]] += 1
    for table in range(uint64(1), tables):
        for i in range(size):
            bins[i] += bins[table * size + i]


@counted
def count_wide(numbers: Array, first: int, count: int, octaves: int, firsts: Array, levels: Array, bins: Array) -> None:
    """Fine histogram of wide numbers (uint64), through a table of octaves instead of branches."""
    for i in range(uint64(fine_size(octaves, firsts, levels))):
        bins[i] = 0
    shifts = np.empty(_ROW, np.uint64)
    offsets = np.empty(_ROW, np.uint64)
    shifts[0] = 0
    offsets[0] = 0
    for octave in range(1, octaves + 1):
        shifts[octave] = octave - 1 - levels[octave]
        offsets[octave] = firsts[octave] - (1 << levels[octave])
    for i in range(uint64(first), uint64(first + count)):
        octave = uint64(bit_length(numbers[i]))
        bins[offsets[octave] + (numbers[i] >> shifts[octave])] += 1
