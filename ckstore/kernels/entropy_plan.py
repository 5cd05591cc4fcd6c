"""The encoder's plan: for every group its kind, layouts and code lengths, by measured cost."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_directory import (
    ADAPTIVE,
    BITS,
    CONSTANT,
    COUNT,
    DENSE,
    EQUAL,
    FIRST_PAIR,
    KIND,
    PAIRS,
    RUN_SYMBOLS,
    SINGLE,
    SPARSE,
    START,
    SYMBOL_COUNT,
    WIDEST,
)
from ckstore.kernels.entropy_layout import (
    EXACT_OCTAVES,
    ROW,
    SYMBOLS,
    choose_layout,
    fine_bin,
    fine_resolution,
    fine_size,
    layout_tables,
    merge_counts,
    octave_bins,
    times_log,
    widest_raw,
)
from ckstore.kernels.entropy_lengths import code_lengths
from ckstore.kernels.entropy_words import Array, bit_length, inner, int32, int64, kernel, uint64, zigzag

SMALL = 512
"""Groups of at most so many non-zeros go into the directory whatever their density."""
SMALL_SPARSE = 2048
"""The same where at most a quarter is non-zero."""
# Not plain integers: numba would compile what takes them once more for every literal.
_FINE = int64(7)
_ALL = int64(SYMBOLS)
_TABLES = 4
"""Tables of a histogram that take turns: an addition to the place of the one before would wait for it."""
_SYMBOL_BITS = 8.0
"""Bits that a symbol of the table must save, and ..."""
_SYMBOL_SHARE = 1 / 8192
"""... as a share of its group's elements: what the time for larger tables is worth."""
_DENSE_BELOW = 0.1
"""Share of zeros up to which only tokens of single elements are tried."""
_SPARSE_ABOVE = 0.5
"""Share of zeros from which only joint tokens of runs and values are tried."""
_WELL_CODED = 1.018
"""Between the two: size against entropy from which the former are not enough, and the latter, slower ones are tried."""


@inner
def _symbol_bits(count: int) -> float:
    return _SYMBOL_BITS + count * _SYMBOL_SHARE


@inner
def survey(coded: Array, start: int, count: int) -> tuple[int, int, bool]:
    """(non-zeros, bits of the largest zigzag number, whether all elements are equal) of a run of signed integers."""
    # In the elements' own width and in blocks whose count fits 32 bits, so that the compiler uses whole vectors.
    narrow = coded.dtype.type
    first = coded[start]
    union = narrow(0)
    different = narrow(0)
    present = int64(0)
    for block in range(start, start + count, 8192):
        here = int32(0)
        for i in range(uint64(block), uint64(min(block + 8192, start + count))):
            value = coded[i]
            here = int32(here + (value != 0))
            union = narrow(union | (value ^ (value >> 63)))
            different = narrow(different | (value ^ first))
        present += here
    octaves = int64(0)
    if present:
        octaves = bit_length(uint64(union)) + 1
    return present, octaves, different == 0


@inner
def extract_pairs(coded: Array, start: int, count: int, runs: Array, values: Array, first: int) -> None:
    """Write the zero run before every non-zero, and its zigzag number less one, from `first` on."""
    # Without a branch: zeros write too, into the place of the next pair (hence room for one more).
    since = uint64(start)
    pair = uint64(first)
    for i in range(uint64(start), uint64(start + count)):
        number = zigzag(coded[i])
        runs[pair] = i - since
        values[pair] = number - uint64(1)
        present = uint64(number != uint64(0))
        pair += present
        since = i + uint64(1) if present else since


@inner
def _small_histogram(coded: Array, start: int, count: int, octaves: int) -> Array:
    """Histogram of zigzag numbers below 2^12; few elements are not worth several tables."""
    size = 1 << octaves
    stride = uint64(size if count >= 8 * size else 0)
    bins = np.zeros(_TABLES * size if stride else size, np.int64)
    for i in range(uint64(start), uint64(start + (count & -4)), uint64(4)):
        bins[zigzag(coded[i])] += 1
        bins[stride + zigzag(coded[i + uint64(1)])] += 1
        bins[stride * uint64(2) + zigzag(coded[i + uint64(2)])] += 1
        bins[stride * uint64(3) + zigzag(coded[i + uint64(3)])] += 1
    for i in range(uint64(start + (count & -4)), uint64(start + count)):
        bins[zigzag(coded[i])] += 1
    return _folded(bins, size)


@inner
def _large_histogram(coded: Array, start: int, count: int, octaves: int, resolution: int) -> Array:
    """Fine histogram of zigzag numbers, through a table of octaves instead of branches."""
    shifts = np.zeros(ROW, np.uint64)
    offsets = np.zeros(ROW, np.uint64)
    for octave in range(EXACT_OCTAVES + 1, ROW - 1):
        shifts[octave] = octave - 1 - resolution
        offsets[octave] = octave_bins(octave, resolution)[0] - (1 << resolution)
    bins = np.zeros(fine_size(octaves, resolution), np.int64)
    for i in range(uint64(start), uint64(start + count)):
        number = zigzag(coded[i])
        octave = bit_length(number)
        bins[offsets[octave] + (number >> shifts[octave])] += 1
    return bins


@inner
def _number_histogram(numbers: Array, first: int, count: int, octaves: int) -> Array:
    size = fine_size(octaves, _FINE)
    bins = np.zeros(_TABLES * size, np.int64)
    place = int64(0)
    for i in range(uint64(first), uint64(first + count)):
        bins[uint64(place + fine_bin(numbers[i], _FINE))] += 1
        place = place + size if place + size < bins.size else 0
    return _folded(bins, size)


@inner
def _folded(bins: Array, size: int) -> Array:
    """Sum the tables of a histogram into the first."""
    for table in range(1, bins.size // size):
        for i in range(size):
            bins[i] += bins[table * size + i]
    return bins[:size]


@inner
def _used(counts: Array, symbols: int) -> int:
    used = 0
    for symbol in range(symbols):
        used += counts[symbol] > 0
    return used


@inner
def _entropy(counts: Array, symbols: int) -> float:
    total = 0
    bits = 0.0
    for symbol in range(symbols):
        total += counts[symbol]
        bits -= times_log(counts[symbol])
    return bits + times_log(total)


@inner
def _plan_dense(
    coded: Array, group: Array, octaves: int, width: int, row: Array, lengths: Array
) -> tuple[float, float]:
    """Plan tokens for a group. Returns (bits with table, entropy of the tokens and their raw bits)."""
    resolution = fine_resolution(width)
    if octaves <= EXACT_OCTAVES:
        bins = _small_histogram(coded, group[START], group[COUNT], octaves)
    else:
        bins = _large_histogram(coded, group[START], group[COUNT], octaves, resolution)
    choose_layout(bins, octaves, resolution, _symbol_bits(group[COUNT]), _ALL, row)
    counts = np.empty(SYMBOLS, np.int64)
    symbols, raw_bits = merge_counts(bins, row, resolution, counts)
    single, code_bits = code_lengths(counts, symbols, lengths)
    group[SYMBOL_COUNT] = symbols
    group[SINGLE] = single
    group[BITS] = code_bits + raw_bits
    return code_bits + raw_bits + 2.0 * _used(counts, symbols), _entropy(counts, symbols) + raw_bits


@inner
def _plan_sparse(
    runs: Array, values: Array, group: Array, octaves: int, rows: Array, lengths: Array
) -> tuple[float, float]:
    """Plan joint tokens for a group whose pairs are extracted. Returns (bits with table, entropy with raw bits)."""
    pairs = group[PAIRS]
    first = group[FIRST_PAIR]
    longest = uint64(0)
    largest = uint64(0)
    for i in range(first, first + pairs):
        longest |= runs[i]
        largest |= values[i]
    run_octaves = bit_length(longest)
    value_octaves = bit_length(largest)
    run_bins = _number_histogram(runs, first, pairs, run_octaves)
    value_bins = _number_histogram(values, first, pairs, value_octaves)
    symbol_bits = _symbol_bits(pairs)
    choose_layout(value_bins, value_octaves, _FINE, 4 * symbol_bits, _ALL // 8, rows[0])
    shifts = np.empty((2, ROW), np.int64)
    offsets = np.empty((2, ROW), np.int64)
    value_symbols = layout_tables(rows[0], shifts[0], offsets[0])
    used = min(value_symbols, 16)
    choose_layout(run_bins, run_octaves, _FINE, used * symbol_bits, _ALL // value_symbols, rows[1])
    run_symbols = layout_tables(rows[1], shifts[1], offsets[1])
    if run_symbols * value_symbols > SYMBOLS:
        choose_layout(value_bins, value_octaves, _FINE, 4 * symbol_bits, _ALL // run_symbols, rows[0])
        value_symbols = layout_tables(rows[0], shifts[0], offsets[0])
    symbols = run_symbols * value_symbols
    counts = np.zeros(_TABLES * symbols, np.int64)
    place = int64(0)
    raw_bits = 0
    for i in range(first, first + pairs):
        run_octave = bit_length(runs[i])
        value_octave = bit_length(values[i])
        run_symbol = offsets[1, run_octave] + int64(runs[i] >> uint64(shifts[1, run_octave]))
        value_symbol = offsets[0, value_octave] + int64(values[i] >> uint64(shifts[0, value_octave]))
        raw_bits += shifts[1, run_octave] + shifts[0, value_octave]
        counts[uint64(place + value_symbol * run_symbols + run_symbol)] += 1
        place = place + symbols if place + symbols < counts.size else 0
    counts = _folded(counts, symbols)
    single, code_bits = code_lengths(counts, symbols, lengths)
    group[SYMBOL_COUNT] = symbols
    group[RUN_SYMBOLS] = run_symbols
    group[SINGLE] = single
    group[BITS] = code_bits + raw_bits
    return code_bits + raw_bits + 2.0 * _used(counts, symbols), _entropy(counts, symbols) + raw_bits


@inner
def _copy(source: Array, target: Array) -> None:
    for i in range(source.size):
        target[i] = source[i]


@kernel
def plan_groups(
    coded: Array,
    width: int,
    groups: Array,
    number: int,
    rows: Array,
    lengths: Array,
    runs: Array,
    values: Array,
    summary: Array,
) -> int:
    """Choose kind, layouts and code lengths of the first `number` groups, whose START and COUNT are set.

    Parameters
    ----------
    coded : int32 or int64
        Elements in coded order, of `width` significant bits.
    groups, rows, lengths, runs, values
        As for `code_directory`; `runs` and `values` have room for a pair an element.
    summary : float64, (3,)
        Filled with estimated bits, entropy in bits, bits in the streams.

    Returns the number of pairs extracted.
    """
    cursor = int64(0)
    estimate = 0.0
    entropy = 0.0
    streamed = 0.0
    spare_lengths = np.empty(SYMBOLS, np.uint8)
    spare_row = np.empty(ROW, np.uint8)
    for index in range(number):
        group = groups[index]
        start = group[START]
        count = group[COUNT]
        present, octaves, equal = survey(coded, start, count)
        if equal:
            group[KIND] = EQUAL
            group[CONSTANT] = int64(zigzag(coded[start]))
            estimate += 16 + octaves
            continue
        group[PAIRS] = present
        if present <= SMALL or (present <= SMALL_SPARSE and 4 * present <= count):
            group[KIND] = ADAPTIVE
            group[FIRST_PAIR] = cursor
            extract_pairs(coded, start, count, runs, values, cursor)
            cursor += present
            spread = times_log(count) - times_log(present) - times_log(count - present)
            bins = np.zeros(fine_size(octaves, _FINE), np.int64)
            for i in range(group[FIRST_PAIR], cursor):
                bins[fine_bin(values[i] + uint64(1), _FINE)] += 1
            bits = choose_layout(bins, octaves, _FINE, 0.0, _ALL, spare_row)
            entropy += spread + bits
            estimate += 24 + spread + bits
            continue
        zeros = 1.0 - present / count
        cost = 1e300
        group_entropy = 0.0
        if zeros < _SPARSE_ABOVE:
            group[KIND] = DENSE
            cost, group_entropy = _plan_dense(coded, group, octaves, width, rows[index, 0], lengths[index])
            dense_bits = group[BITS]
            dense_symbols = group[SYMBOL_COUNT]
            dense_single = group[SINGLE]
        if zeros > _DENSE_BELOW and cost > _WELL_CODED * group_entropy:
            if zeros < _SPARSE_ABOVE:
                _copy(lengths[index], spare_lengths)
                _copy(rows[index, 0], spare_row)
            group[FIRST_PAIR] = cursor
            extract_pairs(coded, start, count, runs, values, cursor)
            sparse_cost, sparse_entropy = _plan_sparse(runs, values, group, octaves, rows[index], lengths[index])
            if sparse_cost < cost:
                group[KIND] = SPARSE
                cursor += present
                cost = sparse_cost
                group_entropy = sparse_entropy
            else:
                _copy(spare_lengths, lengths[index])
                _copy(spare_row, rows[index, 0])
                group[BITS] = dense_bits
                group[SYMBOL_COUNT] = dense_symbols
                group[SINGLE] = dense_single
                group[RUN_SYMBOLS] = 0
        estimate += cost
        entropy += group_entropy
        streamed += group[BITS]
        # The widest element or pair: what room the streams need.
        longest = 0
        for symbol in range(group[SYMBOL_COUNT]):
            longest = max(longest, int64(lengths[index, symbol]))
        group[WIDEST] = longest + widest_raw(rows[index, 0])
        if group[KIND] == SPARSE:
            group[WIDEST] += widest_raw(rows[index, 1])
    summary[0] = estimate
    summary[1] = entropy
    summary[2] = streamed
    return cursor
