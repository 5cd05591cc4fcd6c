"""The encoder's plan: kind, plane, bins and code lengths of every group, by measured cost."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bins import (
    ROW,
    SPLIT_BITS,
    SYMBOLS,
    cell_of,
    choose_bins,
    list_bins,
    set_geometry,
    symbols_of_cells,
    times_log,
)
from ckstore.kernels.entropy.lengths import code_lengths
from ckstore.kernels.entropy.payload_directory import DENSE, SPARSE, TABLE
from ckstore.kernels.entropy.survey import DENSE_BELOW, sample_size
from ckstore.kernels.entropy.words import (
    Array,
    Group,
    clear,
    copy,
    counted,
    inner,
    int64,
    magnitude_bits,
    spliced,
    uint64,
)

CHOOSE_PLANES, PLAN_DENSE, PLAN_PAIRS = range(3)
"""Steps of the plan."""

CELLS = 1 << 16
"""The maximal number of cells of a histogram."""

_TABLE_BITS, _BIN_BITS, _PAIR_BITS = 48.0, 7.0, 6.0
"""Measured bits of a group in the directory, and of each of its symbols."""
_PLANE_SHARE = 0.0003
"""The share by which a plane may enlarge a group."""
_SYMBOL_BITS = 8.0
"""Minimal savings, in bits, of a symbol of the table, and ..."""
_SYMBOL_SHARE = 1 / 8192
"""... as a share of its group's elements: the price of the time that larger tables take."""
_CHANCE_BITS = 6.0
"""Bits that cutting a bin of a sample saves by chance: a cut at random saves half a nat, the best of many more."""
_WELL_CODED = 1.018
"""Ratio of size to entropy from which pairs, which are slower than symbols of single elements, are tried."""
_MANY = 1 << 15
"""Groups of more elements are counted by a sample, one block in `_SHARE`, if their numbers have at most ..."""
_SHARED_BITS = 8
"""... this number of bits without their sign."""
_SHARE, _BLOCK = int64(4), int64(1024)
_FEW = 2048
"""Groups of fewer elements get coarser histograms."""
# Not plain integers: numba would compile callees again for every literal.
_NONE, _FINE, _FINEST, _ALL = int64(0), int64(7), int64(11), int64(SYMBOLS)
_EXACT, _EXACT_IF_FEW, _FINE_IF_FEW = int64(12), int64(6), int64(5)
_MOST_EXACT = int64(15)
_1, _2, _6, _8, _ROW, _TABLE = int64(1), int64(2), int64(6), int64(8), int64(ROW), int64(TABLE)


@inner
def _price(count: int) -> float:
    """Return the minimal savings, in bits, of a symbol in a group of `count` elements."""
    return _SYMBOL_BITS + count * _SYMBOL_SHARE


@inner
def _count_cells(
    numbers: Array, first: int, count: int, top: int, exact: int, geometry: Array, cells: Array, symbols: Array
) -> None:
    """Count numbers (int64) of up to `top` bits by cell, and write their cells into `symbols` (uint16)."""
    if top <= exact:
        least = int64(1) << top
        for i in range(uint64(first), uint64(first + count)):
            cell = uint64(numbers[i] + least)
            symbols[i] = cell
            cells[cell] += 1
        return
    for i in range(uint64(first), uint64(first + count)):
        cell = uint64(cell_of(numbers[i], geometry))
        symbols[i] = cell
        cells[cell] += 1


@inner
def _count_exact(symbols: Array, first: int, count: int, size: int, share: int, cells: Array) -> None:
    """Count symbols below `size` in one block of `share`.

    Small histograms use four tables, because an addition waits for the one before.
    """
    stride = uint64(size if size <= 4096 else 0)
    tables = uint64(4 if stride else 1)
    for i in range(tables * uint64(size)):
        cells[i] = 0
    for block in range(first, first + count, _BLOCK * share):
        end = min(block + _BLOCK, first + count)
        fours = uint64(block + ((end - block) & -4))
        for i in range(uint64(block), fours, uint64(4)):
            cells[symbols[i]] += 1
            cells[stride + symbols[i + uint64(1)]] += 1
            cells[stride * uint64(2) + symbols[i + uint64(2)]] += 1
            cells[stride * uint64(3) + symbols[i + uint64(3)]] += 1
        for i in range(fours, uint64(end)):
            cells[symbols[i]] += 1
    for i in range(stride):
        cells[i] = share * (
            cells[i] + cells[stride + i] + cells[stride * uint64(2) + i] + cells[stride * uint64(3) + i]
        )


@counted
def _best_bins(
    cells: Array, geometry: Array, top: int, deepest: int, price: float, all_occur: int, most: int, splits: Array,
    lowers: Array, raws: Array, counts: Array,
) -> int:  # fmt: skip
    """List the best bins, at most `most`; see `list_bins`. Return their number."""
    floors, losses = np.empty(_2, np.int64), np.empty(_8, np.float64)
    while True:
        choose_bins(cells, geometry, top, deepest, price, SPLIT_BITS, splits, floors, losses)
        bins = list_bins(cells, geometry, top, deepest, all_occur, splits, floors, lowers, raws, counts, most)
        if bins <= most:
            return bins
        price *= 2


@counted
def _set_codes(group: Group, counts: Array, is_pair: int, raws: Array, lengths: Array, costs: Array) -> None:
    """Find a group's code lengths and fill `costs`: bits with its table, and entropy."""
    bins, stride = group.bins, group.run_bins
    group.single, bits = code_lengths(counts, bins * stride, lengths)
    widest = total = used = int64(0)
    entropy = 0.0
    symbol = uint64(0)
    for value in range(bins):
        for run in range(stride):
            count = int64(counts[symbol])
            if count:
                raw = int64(raws[value]) + (int64(raws[bins + run]) if is_pair else int64(0))
                used += 1
                total += count
                bits += count * raw
                entropy += count * raw - times_log(count)
                widest = max(widest, int64(lengths[symbol]) + raw)
            symbol += uint64(1)
    # The counts of a sample are smaller than the number of items.
    scale = (group.pairs if is_pair else group.count) / total
    group.bits = int64(bits * scale)
    group.widest = widest
    costs[0] = bits * scale + _TABLE_BITS + (_PAIR_BITS if is_pair else _BIN_BITS) * used
    costs[1] = (entropy + times_log(total)) * scale


@spliced
def _choose_plane(group: Group, numbers: Array, symbols: Array, geometry: Array, cells: Array, splits: Array) -> int:
    """Return the widest plane that costs next to nothing, by the group's sample."""
    taken = sample_size(group)
    top, count = group.top, group.count
    floors, losses = np.empty(_2, np.int64), np.empty(_8, np.float64)
    fine = _FINE_IF_FEW if count < _FEW or top > _MOST_EXACT else _FINE
    size = set_geometry(top, fine + 1, fine, geometry)
    clear(cells, size)
    _count_cells(numbers, group.start, taken, top, fine + 1, geometry, cells, symbols)
    share = taken / count
    split_bits = _CHANCE_BITS * (1.0 - share) + SPLIT_BITS * share
    bits = choose_bins(cells, geometry, top, fine, _price(count) * share, split_bits, splits, floors, losses)
    for width in (4, 2, 1):
        if 8 * width <= top and losses[width] <= _PLANE_SHARE * bits:
            return width
    return 0


@spliced
def _plan_dense(
    group: Group, symbols: Array, numbers: Array, geometry: Array, cells: Array, splits: Array, lowers: Array,
    raws: Array, lengths: Array, counts: Array, costs: Array,
) -> None:  # fmt: skip
    """Choose bins and code lengths of a dense group; mark it as `paired` if pairs might be smaller."""
    start, count, top = group.start, group.count, group.top
    share = int64(1)
    deepest = _FINE if group.plane or count < _FEW else _FINEST
    if group.exact:
        size = set_geometry(top, _MOST_EXACT, _NONE, geometry)
        if top <= _SHARED_BITS and count > _MANY:
            share = _SHARE
        _count_exact(symbols, start, count, size, share, cells)
    else:
        exact, fine = (_EXACT_IF_FEW, _FINE_IF_FEW) if count < _FEW else (_EXACT, _FINE)
        size = set_geometry(top, exact, fine, geometry)
        clear(cells, size)
        _count_cells(numbers, start, count, top, exact, geometry, cells, symbols)
    group.bins = _best_bins(
        cells, geometry, top, deepest, _price(count), int64(share > 1), _ALL, splits, lowers, raws, counts
    )
    group.run_bins = 1
    _set_codes(group, counts, _NONE, raws, lengths, costs)
    if count - group.pairs > DENSE_BELOW * count and costs[0] > _WELL_CODED * costs[1]:
        group.paired = 1
    if not group.exact:
        table = splits.view(np.uint16)
        symbols_of_cells(geometry, lowers, raws, group.bins, table)
        for i in range(uint64(start), uint64(start + count)):
            symbols[i] = table[symbols[i]]
    costs[0] += 8.0 * group.plane * count
    costs[1] += 8.0 * group.plane * count


@spliced
def _plan_pairs(
    group: Group, runs: Array, values: Array, joints: Array, run_cells: Array, geometry: Array, run_geometry: Array,
    cells: Array, splits: Array, lowers: Array, raws: Array, lengths: Array, counts: Array, costs: Array,
) -> None:  # fmt: skip
    """Plan a group whose pairs are extracted; a dense group becomes sparse if that is smaller."""
    first, pairs = group.first_pair, group.pairs
    longest = largest = int64(0)
    for i in range(uint64(first), uint64(first + pairs)):
        longest |= runs[i]
        largest |= values[i] ^ (values[i] >> 63)
    top, run_top = magnitude_bits(largest), magnitude_bits(longest)
    exact, fine = (_EXACT_IF_FEW, _FINE_IF_FEW) if pairs < _FEW else (_EXACT, _FINE)
    value_cells = cells[: set_geometry(top, exact, fine, geometry)]
    cells_of_runs = cells[value_cells.size :][: set_geometry(run_top, exact, fine, run_geometry)]
    clear(value_cells, value_cells.size)
    clear(cells_of_runs, cells_of_runs.size)
    _count_cells(values, first, pairs, top, exact, geometry, value_cells, joints)
    _count_cells(runs, first, pairs, run_top, exact, run_geometry, cells_of_runs, run_cells)
    price = _price(pairs)
    pair_lowers, pair_raws = np.empty(_TABLE, np.int64), np.empty(_TABLE, np.uint8)
    run_lowers, run_raws = np.empty(_ALL, np.int64), np.empty(_ALL, np.uint8)
    stride, bins = int64(8), int64(8)
    for turn in range(3):
        if turn == 1:
            stride = _best_bins(
                cells_of_runs, run_geometry, run_top, _FINEST, price * min(bins, 16), _NONE, _ALL // bins, splits,
                run_lowers, run_raws, counts,
            )  # fmt: skip
        elif turn == 0 or stride * bins > SYMBOLS:
            bins = _best_bins(
                value_cells, geometry, top, _FINEST, price * 4, _NONE, _ALL // stride, splits, pair_lowers, pair_raws,
                counts,
            )  # fmt: skip
    copy(run_lowers, stride, pair_lowers, bins)
    copy(run_raws, stride, pair_raws, bins)
    symbols = bins * stride
    clear(counts, symbols)
    table = splits.view(np.uint16)
    run_table = table[value_cells.size :]
    symbols_of_cells(geometry, pair_lowers, pair_raws, bins, table)
    symbols_of_cells(run_geometry, run_lowers, run_raws, stride, run_table)
    for i in range(uint64(first), uint64(first + pairs)):
        joint = uint64(table[joints[i]]) * uint64(stride) + uint64(run_table[run_cells[i]])
        joints[i] = joint
        counts[joint] += 1
    before = group.bins, group.run_bins, group.single, group.bits, group.widest
    group.bins, group.run_bins = bins, stride
    pair_lengths = np.empty(symbols, np.uint8)
    pair_costs = np.empty(_2, np.float64)
    _set_codes(group, counts, _1, pair_raws, pair_lengths, pair_costs)
    if group.kind == DENSE and costs[0] <= pair_costs[0]:
        group.bins, group.run_bins, group.single, group.bits, group.widest = before
        return
    group.kind = SPARSE
    group.top, group.run_top = top, run_top
    group.exact = 0
    costs[0], costs[1] = pair_costs[0], pair_costs[1]
    copy(pair_lowers, bins + stride, lowers, _NONE)
    copy(pair_raws, bins + stride, raws, _NONE)
    copy(pair_lengths, symbols, lengths, _NONE)


@kernel
def plan_groups(
    step: int, groups: Array, number: int, symbols: Array, numbers: Array, runs: Array, values: Array, joints: Array,
    run_cells: Array, cells: Array, splits: Array, lowers: Array, raws: Array, lengths: Array, costs: Array,
) -> int:  # fmt: skip
    """Carry out one step of the plan of the first `number` groups; one kernel compiles the code that steps share once.

    `CHOOSE_PLANES` follows `survey_groups`. It fills `plane`, `exact`, and `top` of the bits above a plane, and returns
    the bytes of all planes. `PLAN_DENSE` follows `take_numbers`, and returns the number of `paired` groups: groups that
    have pairs anyway, and groups that pairs might make smaller. If there are any, `PLAN_PAIRS` follows `extract_pairs`.

    Parameters
    ----------
    groups, lowers, raws, lengths
        As for `code_directory`.
    symbols : uint16
        Symbols of dense groups, at their elements' places; filled if `exact` is not set.
    numbers : int64
        Samples of groups that may have planes; then numbers whose symbols are not `exact`.
    runs, values : int64
        Pairs.
    joints, run_cells : uint16
        The former is filled with the symbols of pairs, the latter is scratch.
    cells, splits : int64, (CELLS,); uint8, (2 CELLS,)
        Scratch.
    costs : float64, (CLASSES, 2)
        Filled with estimated bits and entropy in bits.
    """
    geometry = np.empty((_6, _ROW), np.int64)
    run_geometry = np.empty((_6, _ROW), np.int64)
    counts = np.empty(_ALL, np.int64)
    result = int64(0)
    for index in range(number):
        group = groups[index]
        if step == CHOOSE_PLANES and group.kind == DENSE:
            if sample_size(group):
                group.plane = _choose_plane(group, numbers, symbols, geometry, cells, splits)
            group.top = max(group.top - 8 * group.plane, 0)
            group.exact = group.top <= _MOST_EXACT and (group.count >> group.top > 0 or group.top <= 6)
            result += group.plane * group.count
        elif step == PLAN_DENSE:
            costs[index, 0] = 16.0 + group.top
            costs[index, 1] = 0.0
            if group.kind == DENSE:
                _plan_dense(
                    group,
                    symbols,
                    numbers,
                    geometry,
                    cells,
                    splits,
                    lowers[index],
                    raws[index],
                    lengths[index],
                    counts,
                    costs[index],
                )
            result += group.paired
        elif step == PLAN_PAIRS and group.paired:
            _plan_pairs(
                group, runs, values, joints, run_cells, geometry, run_geometry, cells, splits, lowers[index],
                raws[index], lengths[index], counts, costs[index],
            )  # fmt: skip
    return result


@kernel
def measure(groups: Array, number: int) -> tuple[int, int, int]:
    """Return (bytes that one stream may need, bits of all streams, bytes that the directory may need)."""
    room = int64(0)
    bits = int64(0)
    # A bin and the empty ones around it take at most 24 bytes, a code length half a byte, the rest of a group below 64.
    directory = 64 * int64(number) + 1
    for index in range(number):
        group = groups[index]
        if group.kind in (DENSE, SPARSE):
            items = group.count if group.kind == DENSE else group.pairs
            room += (items // 4 + 1) * group.widest
            bits += group.bits
            directory += 24 * (group.bins + group.run_bins) + group.bins * group.run_bins
    return room // 8 + 32, bits, directory
