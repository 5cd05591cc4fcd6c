"""The plan of dense groups: planes, layouts and code lengths."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.costs import FEW, count_used, set_codes, symbol_price, widest_item
from ckstore.kernels.entropy.directory import (
    COUNT,
    DENSE,
    DIRECT,
    FORM,
    JOINED,
    KIND,
    OCTAVES,
    PAIRED,
    PAIRS,
    PLANE,
    START,
    WIDE,
    WIDEST,
)
from ckstore.kernels.entropy.histograms import TABLE_BITS, count_joined, count_wide, has_table, join_numbers
from ckstore.kernels.entropy.layout import (
    EXACT_OCTAVES,
    FINEST,
    ROW,
    SYMBOLS,
    fold,
    log_geometry,
    measure_octaves,
    merge_counts,
    pick_layout,
)
from ckstore.kernels.entropy.lengths import code_lengths
from ckstore.kernels.entropy.survey import DENSE_BELOW, sample_size
from ckstore.kernels.entropy.words import Array, int64, spliced, uint64

# Not plain integers: numba would compile what takes them once more for every literal.
_FINE = int64(7)
_COARSE_EXACT, _COARSE = int64(6), int64(5)
_EXACT = int64(EXACT_OCTAVES)
_ALL = int64(SYMBOLS)
_NO_RAW = int64(0)
_ROW = int64(ROW)
_LEVELS = int64(FINEST + 1)
_PLANE_PRICE = 1.0003
"""How much larger a group may become by its plane."""
_STORED_BITS = 3.0
"""Bits of a symbol's price that the table takes in the directory."""
_CHANCE_BITS = 1.75
"""Bits that a symbol of a sample saves by chance: splitting one at random saves half a nat, the best of many more."""
_MANY = 1 << 15
"""Groups of more elements are counted by a sample, one block in `_SHARE`, if it tells enough of them."""
_SHARE = int64(4)
_COUNTED_BY_SHARE = 10
"""Bits of the numbers of such groups."""
_BITS_PER_SYMBOL = 2400
"""Least size of such a sample for each symbol: what it does not tell of the symbol's chance costs 0.03 % of that."""
_WELL_CODED = 1.018
"""Size against entropy from which tokens of single elements are not enough, and pairs, which are slower, are tried."""


@spliced
def _completed(counts: Array, symbols: int, bits: float) -> bool:
    """Give symbols that a sample lacks a count of 1; false where its `bits` are too few for so many symbols."""
    used = count_used(counts, symbols)
    if symbols * _BITS_PER_SYMBOL > bits or symbols - used > 4 + used // 16:
        return False
    for symbol in range(uint64(symbols)):
        counts[symbol] = max(counts[symbol], 1)
    return True


@spliced
def _widest_plane(
    bins: Array, firsts: Array, levels: Array, octaves: int, symbol_bits: float, stored: float, exact: bool,
    costs: Array, data: Array, totals: Array, counts: Array, lengths: Array, row: Array,
) -> int:  # fmt: skip
    """Bytes of the widest plane that costs next to nothing, from measured octaves; the last three are overwritten.

    Layouts are chosen by `symbol_bits` a symbol. They are compared by the `stored` ones of these that count in bytes,
    and if `exact` by the lengths of real codes: those of few symbols are further from their entropy.
    """
    least = 0.0
    for width in (0, 4, 2, 1):
        raw = int64(8 * width)
        if raw <= octaves:
            cost, bits = pick_layout(costs, data, totals, levels, octaves, raw, symbol_bits, _ALL, row)
            cost = bits + stored * (cost - bits) / symbol_bits
            if exact:
                symbols, raw_bits = merge_counts(bins, firsts, levels, row, counts)
                _, code_bits = code_lengths(counts, symbols, lengths)
                cost = code_bits + raw_bits + stored * count_used(counts, symbols)
            if width == 0:
                least = cost
            elif cost <= _PLANE_PRICE * least:
                return width
    return 0


@spliced
def choose_planes(groups: Array, number: int, wide: Array, bins: Array) -> int:
    """Fill PLANE and FORM of the dense groups: as much in planes as costs next to nothing.

    `wide` (uint64) holds the samples of `survey_groups`; `bins` (int64) is room for a histogram, 2^TABLE_BITS.

    Returns the bytes of all planes.
    """
    plane_bytes = int64(0)
    firsts = np.empty(_ROW, np.int64)
    levels = np.empty(_ROW, np.int64)
    costs = np.empty((_ROW, _LEVELS))
    data = np.empty((_ROW, _LEVELS))
    totals = np.empty(_ROW, np.int64)
    counts = np.empty(_ALL, np.int64)
    lengths = np.empty(_ALL, np.uint8)
    row = np.empty(_ROW, np.uint8)
    for index in range(number):
        group = groups[index]
        count = group[COUNT]
        octaves = group[OCTAVES]
        taken = sample_size(group)
        if taken:
            if count < FEW or octaves > TABLE_BITS + 1:
                log_geometry(_COARSE_EXACT, _COARSE, firsts, levels)
            else:
                log_geometry(_FINE, _FINE, firsts, levels)
            count_wide(wide, group[START], taken, octaves, firsts, levels, bins)
            share = taken / count
            chance = _CHANCE_BITS * (1.0 - share)
            symbol_bits = chance + symbol_price(count) * share
            measure_octaves(bins, firsts, levels, octaves, symbol_bits, costs, data, totals)
            stored = chance + _STORED_BITS * share
            group[PLANE] = _widest_plane(
                bins,
                firsts,
                levels,
                octaves,
                symbol_bits,
                stored,
                count >= FEW,
                costs,
                data,
                totals,
                counts,
                lengths,
                row,
            )
        octaves = max(octaves - 8 * group[PLANE], 0)
        group[FORM] = DIRECT if has_table(octaves, count) else WIDE
        plane_bytes += group[PLANE] * count
    return plane_bytes


@spliced
def plan_dense(
    groups: Array,
    number: int,
    numbers: Array,
    wide: Array,
    bins: Array,
    rows: Array,
    lengths: Array,
    costs: Array,
) -> int:
    """Choose layouts and code lengths of the dense groups among the first `number`.

    Parameters
    ----------
    groups, rows, lengths
        As for `code_directory`. A group is marked as PAIRED where pairs might do better.
    numbers, wide
        As `take_numbers` left them; numbers may be joined.
    bins
        As for `choose_planes`.
    costs : float64, (64, 2)
        Filled with estimated bits and entropy in bits, of the groups in which all elements are equal too.

    Returns how many groups are PAIRED.
    """
    paired = int64(0)
    counts = np.empty(_ALL, np.int64)
    firsts = np.empty(_ROW, np.int64)
    levels = np.empty(_ROW, np.int64)
    octave_costs = np.empty((_ROW, _LEVELS))
    octave_data = np.empty((_ROW, _LEVELS))
    totals = np.empty(_ROW, np.int64)
    for index in range(number):
        group = groups[index]
        costs[index, 0] = 16.0 + group[OCTAVES]
        costs[index, 1] = 0.0
        if group[KIND] != DENSE:
            paired += group[PAIRED]
            continue
        row = rows[index, 0]
        start = group[START]
        count = group[COUNT]
        octaves = max(group[OCTAVES] - 8 * group[PLANE], 0)
        symbol_bits = symbol_price(count)
        joined = int64(1)
        if group[FORM] == DIRECT:
            joined = join_numbers(numbers, start, count, octaves)
        group[JOINED] = joined
        share = _SHARE if octaves <= _COUNTED_BY_SHARE and count > _MANY else int64(1)
        while True:
            if group[FORM] == DIRECT:
                log_geometry(int64(TABLE_BITS), _FINE, firsts, levels)
                count_joined(numbers, start, count, joined, octaves, share, bins)
            else:
                if count < FEW:
                    log_geometry(_COARSE_EXACT, _COARSE, firsts, levels)
                else:
                    log_geometry(_EXACT, _FINE, firsts, levels)
                count_wide(wide, start, count, octaves, firsts, levels, bins)
            fold(bins, firsts, levels, octaves, _FINE if group[PLANE] or count < FEW else int64(FINEST))
            measure_octaves(bins, firsts, levels, octaves, symbol_bits, octave_costs, octave_data, totals)
            _, data = pick_layout(octave_costs, octave_data, totals, levels, octaves, _NO_RAW, symbol_bits, _ALL, row)
            symbols, raw_bits = merge_counts(bins, firsts, levels, row, counts)
            if share == 1 or _completed(counts, symbols, (data + 8.0 * group[PLANE] * count) / share):
                break
            share = int64(1)
        bits, entropy = set_codes(group, counts, symbols, raw_bits, lengths[index])
        group[WIDEST] = widest_item(group, rows[index], lengths[index])
        plane_bits = 8.0 * group[PLANE] * count
        costs[index, 0] = bits + plane_bits
        costs[index, 1] = entropy + plane_bits
        if count - group[PAIRS] > DENSE_BELOW * count and bits > _WELL_CODED * entropy:
            group[PAIRED] = 1
            paired += 1
    return paired
