"""The plan of pairs: sparse groups, and what adaptive ones are estimated at."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.costs import FEW, copy, set_codes, symbol_price, widest_item
from ckstore.kernels.entropy.directory import (
    ADAPTIVE,
    BITS,
    COUNT,
    DENSE,
    FIRST_PAIR,
    FORM,
    JOINED,
    JOINT,
    KIND,
    LOOSE,
    PAIRED,
    PAIRS,
    RUN_BITS,
    RUN_SYMBOLS,
    SINGLE,
    SPARSE,
    SYMBOL_COUNT,
    WIDEST,
)
from ckstore.kernels.entropy.histograms import count_direct, count_wide, has_table
from ckstore.kernels.entropy.layout import (
    EXACT_OCTAVES,
    ROW,
    SYMBOLS,
    choose_layout,
    fine_size,
    layout_tables,
    log_geometry,
    times_log,
)
from ckstore.kernels.entropy.words import Array, bit_length, int64, spliced, uint64

# Not plain integers: numba would compile what takes them once more for every literal.
_FINE = int64(7)
_COARSE_EXACT, _COARSE = int64(6), int64(5)
_EXACT = int64(EXACT_OCTAVES)
_ALL = int64(SYMBOLS)
_2, _ROW = int64(2), int64(ROW)
_NO_SHARE = int64(1)
_JOINED_FROM = 2048
"""Pairs from which a table of all joint numbers is worth its making."""


@spliced
def _few_bits(count: int, pairs: int, values: Array, first: int) -> float:
    """Estimate the bits of an adaptive group: the places of its pairs, the octaves of their values, and raw bits."""
    octaves = np.empty(_ROW, np.int64)
    for octave in range(ROW):
        octaves[octave] = 0
    bits = times_log(count) - times_log(count - pairs)
    for i in range(uint64(first), uint64(first + pairs)):
        octaves[bit_length(values[i])] += 1
    for octave in range(ROW):
        bits += octaves[octave] * max(octave - 1, 0) - times_log(octaves[octave])
    return bits


@spliced
def _count_joint(
    runs: Array, values: Array, joints: Array, first: int, pairs: int, run_octaves: int, value_octaves: int,
    bins: Array, run_bins: Array, value_bins: Array,
) -> None:  # fmt: skip
    """Join pairs into numbers, and fill the histograms of these, of runs and of values."""
    for i in range(uint64(first), uint64(first + pairs)):
        joints[i] = (values[i] << uint64(run_octaves)) | runs[i]
    count_direct(joints, first, pairs, run_octaves + value_octaves, _NO_SHARE, bins)
    size = uint64(1) << uint64(run_octaves)
    for run in range(size):
        run_bins[run] = 0
    for value in range(uint64(1) << uint64(value_octaves)):
        total = int64(0)
        for run in range(size):
            count = bins[value * size + run]
            run_bins[run] += count
            total += count
        value_bins[value] = total


@spliced
def _choose_layouts(
    run_bins: Array, value_bins: Array, firsts: Array, levels: Array, run_octaves: int, value_octaves: int, pairs: int,
    rows: Array, shifts: Array, offsets: Array,
) -> tuple[int, int]:  # fmt: skip
    """Choose the layouts of runs and values, and make their tables. Returns the two sizes of alphabets."""
    price = symbol_price(pairs)
    run_symbols = value_symbols = int64(8)
    for turn in range(3):
        if turn == 1:
            used = min(value_symbols, 16)
            choice = run_bins, run_octaves, used * price, _ALL // value_symbols
        elif turn == 0 or run_symbols * value_symbols > SYMBOLS:
            choice = value_bins, value_octaves, 4 * price, _ALL // run_symbols
        else:
            break
        part = turn & 1
        bins, octaves, symbol_bits, limit = choice
        choose_layout(bins, firsts, levels, octaves, symbol_bits, limit, rows[part])
        symbols = layout_tables(rows[part], shifts[part], offsets[part])
        if part:
            run_symbols = symbols
        else:
            value_symbols = symbols
    return run_symbols, value_symbols


@spliced
def _count_symbols(
    runs: Array, values: Array, first: int, pairs: int, shifts: Array, offsets: Array, run_symbols: int, counts: Array
) -> int:
    """Count the joint symbols of pairs. Returns their raw bits."""
    raw_bits = int64(0)
    for i in range(uint64(first), uint64(first + pairs)):
        run_octave = uint64(bit_length(runs[i]))
        value_octave = uint64(bit_length(values[i]))
        run_symbol = offsets[1, run_octave] + int64(runs[i] >> uint64(shifts[1, run_octave]))
        value_symbol = offsets[0, value_octave] + int64(values[i] >> uint64(shifts[0, value_octave]))
        raw_bits += shifts[1, run_octave] + shifts[0, value_octave]
        counts[uint64(value_symbol * run_symbols + run_symbol)] += 1
    return raw_bits


@spliced
def _merge_joint(
    bins: Array, run_octaves: int, value_octaves: int, shifts: Array, offsets: Array, run_symbols: int, counts: Array
) -> int:
    """The same, from the histogram of joint numbers."""
    raw_bits = int64(0)
    size = uint64(1) << uint64(run_octaves)
    for value in range(uint64(1) << uint64(value_octaves)):
        octave = bit_length(value)
        row = (offsets[0, octave] + int64(value >> uint64(shifts[0, octave]))) * run_symbols
        for run in range(size):
            count = bins[value * size + run]
            if count:
                run_octave = bit_length(run)
                symbol = row + offsets[1, run_octave] + int64(run >> uint64(shifts[1, run_octave]))
                counts[uint64(symbol)] += count
                raw_bits += count * (shifts[0, octave] + shifts[1, run_octave])
    return raw_bits


@spliced
def plan_pairs(
    groups: Array,
    number: int,
    few_values: Array,
    runs: Array,
    values: Array,
    joints: Array,
    bins: Array,
    rows: Array,
    lengths: Array,
    costs: Array,
) -> None:
    """Plan the groups whose pairs are extracted: dense ones that do better so become sparse. See `plan_groups`."""
    firsts = np.empty(_ROW, np.int64)
    levels = np.empty(_ROW, np.int64)
    counts = np.empty(_ALL, np.int64)
    shifts = np.empty((_2, _ROW), np.int64)
    offsets = np.empty((_2, _ROW), np.int64)
    pair_rows = np.empty((_2, _ROW), np.uint8)
    pair_lengths = np.empty(_ALL, np.uint8)
    for index in range(number):
        group = groups[index]
        if not group[PAIRED]:
            continue
        first = group[FIRST_PAIR]
        pairs = group[PAIRS]
        if group[KIND] == ADAPTIVE:
            costs[index, 1] = _few_bits(group[COUNT], pairs, few_values, first)
            costs[index, 0] = 24.0 + costs[index, 1]
            continue
        longest = uint64(0)
        largest = uint64(0)
        for i in range(uint64(first), uint64(first + pairs)):
            longest |= runs[i]
            largest |= values[i]
        run_octaves = bit_length(longest)
        value_octaves = bit_length(largest)
        is_joint = pairs >= _JOINED_FROM and max(run_octaves, value_octaves) <= EXACT_OCTAVES
        is_joint = is_joint and has_table(run_octaves + value_octaves, pairs)
        if pairs < FEW and max(run_octaves, value_octaves) > EXACT_OCTAVES:
            log_geometry(_COARSE_EXACT, _COARSE, firsts, levels)
        else:
            log_geometry(_EXACT, _FINE, firsts, levels)
        run_bins = np.empty(fine_size(run_octaves, firsts, levels), np.int64)
        value_bins = np.empty(fine_size(value_octaves, firsts, levels), np.int64)
        if is_joint:
            _count_joint(runs, values, joints, first, pairs, run_octaves, value_octaves, bins, run_bins, value_bins)
        else:
            count_wide(runs, first, pairs, run_octaves, firsts, levels, run_bins)
            count_wide(values, first, pairs, value_octaves, firsts, levels, value_bins)
        run_symbols, value_symbols = _choose_layouts(
            run_bins, value_bins, firsts, levels, run_octaves, value_octaves, pairs, pair_rows, shifts, offsets
        )
        symbols = run_symbols * value_symbols
        for symbol in range(uint64(symbols)):
            counts[symbol] = 0
        if is_joint:
            raw_bits = _merge_joint(bins, run_octaves, value_octaves, shifts, offsets, run_symbols, counts)
        else:
            raw_bits = _count_symbols(runs, values, first, pairs, shifts, offsets, run_symbols, counts)
        before = group[SYMBOL_COUNT], group[SINGLE], group[BITS]
        bits, entropy = set_codes(group, counts, symbols, raw_bits, pair_lengths)
        if group[KIND] == DENSE and costs[index, 0] <= bits:
            group[SYMBOL_COUNT], group[SINGLE], group[BITS] = before
            continue
        group[KIND] = SPARSE
        group[FORM] = JOINT if is_joint else LOOSE
        group[JOINED] = 1
        group[RUN_BITS] = run_octaves
        group[RUN_SYMBOLS] = run_symbols
        group[WIDEST] = widest_item(group, pair_rows, pair_lengths)
        costs[index, 0] = bits
        costs[index, 1] = entropy
        copy(pair_rows[0], rows[index, 0])
        copy(pair_rows[1], rows[index, 1])
        copy(pair_lengths[:symbols], lengths[index])
