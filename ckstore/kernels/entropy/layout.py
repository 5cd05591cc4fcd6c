"""How unsigned numbers become symbols: the fine histogram, the choice of a layout from it, and the layout's tables.

A number u of bit length b lies in *octave* b (octave 0 holds 0). A *layout* says which leading bits of u are the
symbol; the rest are raw bits. It is one uint8 row: `row[0]` is the *floor* f (all octaves up to f share symbol 0,
with f raw bits), `row[1]` the top octave, and `row[1 + b]` the *resolution* of octave b > f: the number of bits after
the leading one that belong to the symbol. Plain symbols, JPEG XL's hybrid unsigned integers, "shift by k" and raw
storage are all layouts.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.words import Array, counted, inner, int64, spliced, uint64

ROW = 66
"""Entries of a layout row."""
SYMBOLS = 4096
"""Largest alphabet."""
EXACT_OCTAVES = 12
"""Octaves of which a fine histogram can count every number."""
FINEST = 11
"""Largest resolution of an octave: 2^11 symbols."""
WIDEST_FLOOR = 63
"""Largest floor: no shift is by 64 bits, and no element has more than 63 raw bits."""
# Not plain integers: numba would compile what takes them once more for every literal.
_ROW = int64(ROW)
_LEVELS = int64(FINEST + 1)
_FINEST_BINS = int64(1 << FINEST)
_NO_RAW = int64(0)
_LOGS = np.zeros(4096)
_LOGS[1:] = np.arange(1, 4096) * np.log2(np.arange(1, 4096))


@inner
def times_log(count: int) -> float:
    """Count * log2(count), 0 for 0."""
    if count < _LOGS.size:
        return float(_LOGS[count])
    return float(count * np.log2(count))


@inner
def log_geometry(exact: int, resolution: int, firsts: Array, levels: Array) -> None:
    """Write the geometry of a fine histogram: every number below 2^exact, above it `resolution` bits of an octave.

    The bins of octave b >= 1 are the 2^levels[b] from `firsts[b]` on (int64 both, ROW); that of octave 0 is bin 0.
    """
    first = int64(1)
    firsts[0] = 0
    levels[0] = 0
    for octave in range(1, ROW - 1):
        firsts[octave] = first
        levels[octave] = octave - 1 if octave <= exact else resolution
        first += 1 << levels[octave]


@spliced
def fine_size(octaves: int, firsts: Array, levels: Array) -> int:
    """Number of bins of a fine histogram of numbers of up to `octaves` bits."""
    return int64(firsts[octaves] + (1 << levels[octaves]))


@spliced
def fold(bins: Array, firsts: Array, levels: Array, top: int, most: int) -> None:
    """Make a fine histogram coarser: at most `most` bits of an octave, bins and geometry in place."""
    first = int64(1)
    for octave in range(1, top + 1):
        old = uint64(firsts[octave])
        excess = uint64(max(levels[octave] - most, 0))
        level = uint64(levels[octave]) - excess
        if excess or uint64(first) != old:
            for i in range(uint64(1) << level):
                total = int64(0)
                for k in range(i << excess, (i + uint64(1)) << excess):
                    total += bins[old + k]
                bins[uint64(first) + i] = total
        firsts[octave] = first
        levels[octave] = int64(level)
        first += 1 << int64(level)


@spliced
def _octave_costs(
    bins: Array, first: int, octave: int, level: int, symbol_bits: float, pyramid: Array, costs: Array, data: Array
) -> int:
    """Fill the cost in bits of an octave's symbols at each resolution up to `level`, with and without their table.

    Its bins are those from `first` on. Returns the number of its elements.
    """
    total = int64(0)
    start = uint64(first)
    for i in range(uint64(1) << uint64(level)):
        pyramid[i] = bins[start + i]
        total += bins[start + i]
    if total == 0:
        return 0
    logged = total < _LOGS.size
    while level > 0:
        # Two sums: an addition to the one would wait for the one before.
        even = odd = 0.0
        used = int64(0)
        for i in range(uint64(1) << uint64(level - 1)):
            left, right = pyramid[uint64(2) * i], pyramid[uint64(2) * i + uint64(1)]
            used += int64(left > 0) + int64(right > 0)
            even += float(_LOGS[uint64(left)]) if logged else times_log(left)
            odd += float(_LOGS[uint64(right)]) if logged else times_log(right)
            pyramid[i] = left + right
        bits = total * (octave - 1.0 - level) - even - odd
        data[octave, level] = bits
        costs[octave, level] = bits + (used + (1 << level) / 16.0) * symbol_bits
        level -= 1
    bits = total * (octave - 1.0) - times_log(total)
    data[octave, 0] = bits
    costs[octave, 0] = bits + (1 + 1 / 16.0) * symbol_bits
    return total


@counted
def measure_octaves(
    bins: Array, firsts: Array, levels: Array, top: int, symbol_bits: float, costs: Array, data: Array, totals: Array
) -> None:
    """Fill what `pick_layout` needs: costs and data (float64, ROW x FINEST + 1), totals (int64, ROW) by octave.

    The cost of a resolution (entropy of the leading bits, raw bits, `symbol_bits` of table for every symbol that
    occurs) does not depend on the other octaves.
    """
    pyramid = np.empty(_FINEST_BINS, np.int64)
    totals[0] = bins[0]
    for octave in range(1, top + 1):
        totals[octave] = _octave_costs(bins, firsts[octave], octave, levels[octave], symbol_bits, pyramid, costs, data)


@counted
def pick_layout(
    costs: Array,
    data: Array,
    totals: Array,
    levels: Array,
    top: int,
    least_raw: int,
    symbol_bits: float,
    limit: int,
    row: Array,
) -> tuple[float, float]:
    """Write into `row` the cheapest layout of at most `limit` symbols, each with at least `least_raw` raw bits.

    `least_raw` is at most `top`. Returns the cost in bits of the data, with and without the symbols' table.
    """
    best_costs = np.empty(_ROW)
    best_data = np.empty(_ROW)
    finest = int64(FINEST)
    while True:
        rest = 0.0
        rest_data = 0.0
        for octave in range(least_raw + 1, top + 1):
            row[1 + octave] = 0
            best_costs[octave] = 0.0
            best_data[octave] = 0.0
            if totals[octave] == 0:
                continue
            best = 1e300
            for level in range(min(min(levels[octave], finest), octave - 1 - least_raw), -1, -1):
                if costs[octave, level] < best:
                    best = costs[octave, level]
                    best_costs[octave] = best
                    best_data[octave] = data[octave, level]
                    row[1 + octave] = level
            rest += best
            rest_data += best_data[octave]
        below = int64(0)
        for octave in range(least_raw):
            below += totals[octave]
        best = 1e300
        chosen = 0.0
        for floor in range(least_raw, min(top, WIDEST_FLOOR) + 1):
            below += totals[floor]
            if floor > least_raw:
                rest -= best_costs[floor]
                rest_data -= best_data[floor]
            low = below * float(floor) - times_log(below)
            if low + symbol_bits + rest < best:
                best = low + symbol_bits + rest
                chosen = low + rest_data
                row[0] = floor
        row[1] = top
        symbols = 1
        for octave in range(int64(row[0]) + 1, top + 1):
            symbols += 1 << row[1 + octave]
        if symbols <= limit or finest == 0:
            total = int64(0)
            for octave in range(top + 1):
                total += totals[octave]
            return best + times_log(total), chosen + times_log(total)
        finest -= 1


@spliced
def choose_layout(
    bins: Array, firsts: Array, levels: Array, top: int, symbol_bits: float, limit: int, row: Array
) -> float:
    """Write into `row` the layout that codes a fine histogram in the fewest bits, with at most `limit` symbols.

    Returns the cost of the data in bits, tables not counted.
    """
    costs = np.empty((_ROW, _LEVELS))
    data = np.empty((_ROW, _LEVELS))
    totals = np.empty(_ROW, np.int64)
    measure_octaves(bins, firsts, levels, top, symbol_bits, costs, data, totals)
    return pick_layout(costs, data, totals, levels, top, _NO_RAW, symbol_bits, limit, row)[1]


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
    symbols = int64(1)
    for octave in range(int64(row[0]) + 1, int64(row[1]) + 1):
        resolution = int64(row[1 + octave])
        for lead in range(1 << resolution):
            leads[symbols] = (1 << resolution) + lead
            raws[symbols] = octave - 1 - resolution
            symbols += 1
    return symbols


@spliced
def symbol_parts(rows: Array, is_pair: bool, leads: Array, raws: Array) -> tuple[int, int]:
    """Fill `symbol_leads` of both parts of a group's symbols: leads[0] and raws[0] of values, [1] of runs.

    The number of an element counts as a run whose value is always 0: the only layout of a dense group, in rows[0], is
    that of runs. Returns the two alphabets.
    """
    values = runs = int64(1)
    leads[0, 0] = 0
    raws[0, 0] = 0
    for part in range(0 if is_pair else 1, 2):
        values = runs
        runs = symbol_leads(rows[part if is_pair else 0], leads[part], raws[part])
    return values, runs


@inner
def merge_counts(bins: Array, firsts: Array, levels: Array, row: Array, counts: Array) -> tuple[int, int]:
    """Sum a fine histogram into the layout's symbols. Returns (alphabet, raw bits of all elements)."""
    floor = int64(row[0])
    counts[0] = bins[0]
    for octave in range(1, floor + 1):
        for i in range(uint64(firsts[octave]), uint64(firsts[octave] + (1 << levels[octave]))):
            counts[0] += bins[i]
    raw_bits = counts[0] * floor
    symbols = int64(1)
    for octave in range(floor + 1, int64(row[1]) + 1):
        chosen = int64(row[1 + octave])
        excess = uint64(levels[octave] - chosen)
        first = uint64(firsts[octave])
        total = int64(0)
        for lead in range(uint64(1) << uint64(chosen)):
            count = int64(0)
            for i in range(first + (lead << excess), first + ((lead + uint64(1)) << excess)):
                count += bins[i]
            counts[uint64(symbols) + lead] = count
            total += count
        raw_bits += total * (octave - 1 - chosen)
        symbols += 1 << chosen
    return symbols, raw_bits
