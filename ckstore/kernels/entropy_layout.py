"""How unsigned numbers become symbols: the fine histogram, the choice of a layout from it, and the layout's tables.

A number u of bit length b lies in *octave* b (octave 0 holds 0). A *layout* says which leading bits of u are the
symbol; the rest are raw bits. It is one uint8 row: `row[0]` is the *floor* f (all octaves up to f share symbol 0,
with f raw bits), `row[1]` the top octave, and `row[1 + b]` the *resolution* of octave b > f: the number of bits after
the leading one that belong to the symbol. Plain symbols, JPEG XL's hybrid unsigned integers, "shift by k" and raw
storage are all layouts.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_words import Array, bit_length, inner, int64, uint64

ROW = 66
"""Entries of a layout row."""
SYMBOLS = 4096
"""Largest alphabet."""
EXACT_OCTAVES = 12
"""Octaves of which the fine histogram counts every number."""
FINEST = 11
"""Largest resolution of an octave: 2^11 symbols."""
WIDEST_FLOOR = 63
"""Largest floor: no shift is by 64 bits, and no element has more than 63 raw bits."""
_LOGS = np.zeros(4096)
_LOGS[1:] = np.arange(1, 4096) * np.log2(np.arange(1, 4096))


@inner
def times_log(count: int) -> float:
    """Count * log2(count), 0 for 0."""
    if count < 4096:
        return float(_LOGS[count])
    return float(count * np.log2(count))


@inner
def fine_resolution(width: int) -> int:
    """Resolution of the fine histogram above the exact octaves, for numbers of `width` bits."""
    return 11 if width <= 16 else 7


@inner
def fine_size(octaves: int, resolution: int) -> int:
    """Number of bins of the fine histogram of numbers of up to `octaves` bits."""
    if octaves <= EXACT_OCTAVES:
        return 1 << octaves
    return (1 << EXACT_OCTAVES) + ((octaves - EXACT_OCTAVES) << resolution)


@inner
def fine_bin(number: int, resolution: int) -> int:
    """Bin of a number: itself below 2^12, else octave and leading bits."""
    if number < (1 << EXACT_OCTAVES):
        return int64(number)
    octave = bit_length(number)
    lead = int64(number >> uint64(octave - 1 - resolution)) & ((1 << resolution) - 1)
    return (1 << EXACT_OCTAVES) + ((octave - 1 - EXACT_OCTAVES) << resolution) + lead


@inner
def octave_bins(octave: int, resolution: int) -> tuple[int, int]:
    """First bin of an octave >= 1, and the binary logarithm of its number of bins."""
    if octave <= EXACT_OCTAVES:
        return 1 << (octave - 1), octave - 1
    return (1 << EXACT_OCTAVES) + ((octave - 1 - EXACT_OCTAVES) << resolution), resolution


@inner
def choose_layout(bins: Array, top: int, resolution: int, symbol_bits: float, limit: int, row: Array) -> float:
    """Write into `row` the layout that codes a fine histogram in the fewest bits, with at most `limit` symbols.

    Octave by octave, since the cost of a resolution (entropy of the leading bits, raw bits, `symbol_bits` of table
    for every symbol that occurs) does not depend on the other octaves. Returns the cost of the data in bits, tables
    not counted.
    """
    scratch = np.empty(1 << FINEST, np.int64)
    cost = np.zeros(ROW)
    data = np.zeros(ROW)
    octave_count = np.zeros(ROW, np.int64)
    finest = FINEST
    while True:
        octave_count[0] = bins[0]
        for octave in range(1, top + 1):
            first, level = octave_bins(octave, resolution)
            row[1 + octave] = 0
            cost[octave] = 0.0
            data[octave] = 0.0
            total = 0
            for i in range(1 << level):
                scratch[i] = bins[first + i]
                total += scratch[i]
            octave_count[octave] = total
            if total == 0:
                continue
            best = 1e300
            while True:
                bits = 0.0
                used = 0
                for i in range(1 << level):
                    if scratch[i]:
                        bits -= times_log(scratch[i])
                        used += 1
                bits += total * (octave - 1.0 - level)
                price = bits + (used + (1 << level) / 16.0) * symbol_bits
                if level <= finest and price < best:
                    best = price
                    cost[octave] = best
                    data[octave] = bits
                    row[1 + octave] = level
                if level == 0:
                    break
                level -= 1
                for i in range(1 << level):
                    scratch[i] = scratch[2 * i] + scratch[2 * i + 1]
        rest = 0.0
        rest_data = 0.0
        for octave in range(1, top + 1):
            rest += cost[octave]
            rest_data += data[octave]
        below = 0
        best = 1e300
        best_data = 0.0
        for floor in range(min(top, WIDEST_FLOOR) + 1):
            below += octave_count[floor]
            if floor:
                rest -= cost[floor]
                rest_data -= data[floor]
            low = below * float(floor) - times_log(below)
            if low + symbol_bits + rest < best:
                best = low + symbol_bits + rest
                best_data = low + rest_data
                row[0] = floor
        row[1] = top
        symbols = 1
        for octave in range(int64(row[0]) + 1, top + 1):
            symbols += 1 << row[1 + octave]
        if symbols <= limit or finest == 0:
            total = 0
            for octave in range(top + 1):
                total += octave_count[octave]
            return best_data + times_log(total)
        finest -= 1


@inner
def layout_tables(row: Array, shifts: Array, offsets: Array) -> int:
    """Fill two int64 tables by octave: symbol = offsets[b] + (u >> shifts[b]). Returns the size of the alphabet."""
    floor = int64(row[0])
    symbols = 1
    for octave in range(ROW - 1):
        if octave <= floor:
            shifts[octave] = floor
            offsets[octave] = 0
        elif octave <= row[1]:
            resolution = int64(row[1 + octave])
            shifts[octave] = octave - 1 - resolution
            offsets[octave] = symbols - (1 << resolution)
            symbols += 1 << resolution
        else:
            shifts[octave] = 0
            offsets[octave] = 0
    return symbols


@inner
def symbol_leads(row: Array, leads: Array, raws: Array) -> int:
    """Fill for every symbol what decodes it: u = leads[s] << raws[s] | raw bits (int64 both). Returns the alphabet."""
    leads[0] = 0
    raws[0] = row[0]
    symbols = 1
    for octave in range(int64(row[0]) + 1, int64(row[1]) + 1):
        resolution = int64(row[1 + octave])
        for lead in range(1 << resolution):
            leads[symbols] = (1 << resolution) + lead
            raws[symbols] = octave - 1 - resolution
            symbols += 1
    return symbols


@inner
def merge_counts(bins: Array, row: Array, resolution: int, counts: Array) -> tuple[int, int]:
    """Sum a fine histogram into the layout's symbols. Returns (alphabet, raw bits of all elements)."""
    floor = int64(row[0])
    counts[0] = bins[0]
    for octave in range(1, floor + 1):
        first, level = octave_bins(octave, resolution)
        for i in range(1 << level):
            counts[0] += bins[first + i]
    raw_bits = counts[0] * floor
    symbols = 1
    for octave in range(floor + 1, int64(row[1]) + 1):
        first, level = octave_bins(octave, resolution)
        chosen = int64(row[1 + octave])
        width = 1 << (level - chosen)
        for lead in range(1 << chosen):
            count = 0
            for i in range(width):
                count += bins[first + lead * width + i]
            counts[symbols] = count
            raw_bits += count * (octave - 1 - chosen)
            symbols += 1
    return symbols, raw_bits


@inner
def widest_raw(row: Array) -> int:
    """Most raw bits of any symbol of a layout."""
    widest = int64(row[0])
    for octave in range(int64(row[0]) + 1, int64(row[1]) + 1):
        widest = max(widest, octave - 1 - int64(row[1 + octave]))
    return widest
