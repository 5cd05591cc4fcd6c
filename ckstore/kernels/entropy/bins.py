"""Bins that turn signed numbers into symbols: their choice from a histogram, and the histogram's cells.

The numbers from -2^top to 2^top - 1 are cut into *bins* of 2^raw numbers each, and every bin begins at a multiple of
its size. A number is coded as the symbol of its bin and `raw` raw bits. Bins are the leaves of a binary tree over the
numbers: a node of 2^j numbers is a bin or has two halves. Empty bins have no symbol.

Histograms have *cells*: the numbers of `o` bits without their sign make an octave, of either sign, and each octave has
2^level cells of the same size. All numbers of small octaves have cells of their own.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.words import Array, clear, counted, inner, int64, magnitude_bits, spliced, uint64

ROW = 64
"""Octaves: 0 to 63 bits."""
SYMBOLS = 4096
"""The maximal number of symbols of a group."""
LEVEL, FIRST, SHIFT, OFFSET = 0, 1, 3, 4
"""Rows of a geometry (int64, 6 x ROW), by octave: log2 of its cells; their first cell (two rows: numbers from 0 on, and
below 0); the right shift of a number and the offset added to it to make its cell (two rows)."""

SPLIT_BITS = 3.0
"""Bits that a table of bins grows by where a bin is cut into two."""
_LOGS = np.zeros(4096)
_LOGS[1:] = np.arange(1, 4096) * np.log2(np.arange(1, 4096))
# Not plain integers: numba would compile callees again for every literal.
_2, _ROW = int64(2), int64(ROW)


@inner
def times_log(count: int) -> float:
    """Count * log2(count), 0 for 0."""
    if count < _LOGS.size:
        return float(_LOGS[uint64(count)])
    return float(count * np.log2(count))


@inner
def set_geometry(top: int, exact: int, fine: int, geometry: Array) -> int:
    """Fill a geometry of numbers of up to `top` bits: every number of at most `exact`, 2^fine cells in larger octaves.

    Returns the number of cells.
    """
    cells = int64(0)
    for place in range(-top - 1, top + 1):
        sign = int64(place < 0)
        octave = -place - 1 if sign else place
        level = max(octave - 1, 0) if octave <= exact else min(octave - 1, fine)
        geometry[LEVEL, octave] = level
        geometry[FIRST + sign, octave] = cells
        geometry[SHIFT, octave] = max(octave - 1, 0) - level
        least = (1 << level) if octave else 0
        geometry[OFFSET + sign, octave] = cells + (2 << level if octave else 1) if sign else cells - least
        cells += 1 << level
    return cells


@inner
def cell_of(number: int, geometry: Array) -> int:
    """Return the cell of a number."""
    octave = uint64(magnitude_bits(number))
    return geometry[OFFSET + int64(number < 0), octave] + (number >> geometry[SHIFT, octave])


@spliced
def _octave_cost(
    cells: Array, first: int, level: int, octave: int, deepest: int, price: float, split_bits: float, counts: Array,
    costs: Array, splits: Array, losses: Array,
) -> tuple[float, int]:  # fmt: skip
    """Return the bits of the best bins of an octave of 2^level cells, cut at most `deepest` times, and its count.

    Node h of the tree has the halves 2h and 2h + 1; its root is 1. `splits` marks the nodes that are cut. The savings
    of cuts of nodes with whole bytes of raw bits are added to `losses`.
    """
    fold = uint64(level - deepest)
    total = int64(0)
    start = uint64(first)
    raw = max(octave - 1, 0) - deepest
    for i in range(uint64(1) << uint64(deepest)):
        count = int64(0)
        for cell in range(start + (i << fold), start + ((i + uint64(1)) << fold)):
            count += cells[cell]
        counts[i] = count
        costs[i] = count * raw - times_log(count) + price if count else 0.0
        total += count
    root = uint64(2) * start
    splits[root + uint64(1)] = 0
    depth = deepest
    while depth > 0 and total:
        depth -= 1
        raw += 1
        node = root + (uint64(1) << uint64(depth))
        for i in range(uint64(1) << uint64(depth)):
            count = counts[uint64(2) * i] + counts[uint64(2) * i + uint64(1)]
            counts[i] = count
            cost = 0.0
            split = 0
            if count:
                cost = count * raw - times_log(count) + price
                both = costs[uint64(2) * i] + costs[uint64(2) * i + uint64(1)] + split_bits
                if both < cost:
                    if raw & 7 == 0:
                        losses[uint64(raw >> 3)] += cost - both
                    cost = both
                    split = 1
            costs[i] = cost
            splits[node + i] = split
    return (costs[0] if total else 0.0), total


@counted
def choose_bins(
    cells: Array, geometry: Array, top: int, deepest: int, price: float, split_bits: float, splits: Array,
    floors: Array, losses: Array,
) -> float:  # fmt: skip
    """Find the bins that code a histogram in the fewest bits.

    Parameters
    ----------
    cells : int64
        The histogram.
    geometry, top
        As for `set_geometry`.
    deepest
        Maximal number of cuts of an octave.
    price, split_bits
        Minimal savings, in bits, of a symbol and of a cut.
    splits : uint8, twice the cells
        Filled with the trees of the octaves, at twice the octave's first cell.
    floors : int64, (2,)
        Filled with the octaves, of numbers from 0 on and below 0, up to which all numbers are one bin.
    losses : float64, (8,)
        Filled with the bits that bins lose if all have at least one, two, … bytes of raw bits, as far as cells show.

    Returns the bits of all numbers, and the minimal savings of their symbols.
    """
    counts = np.empty(1 << deepest, np.int64)
    costs = np.empty(1 << deepest, np.float64)
    clear(losses, losses.size)
    all_bits = 0.0
    total = int64(0)
    for sign in range(2):
        below = int64(0)
        bits = 0.0
        for octave in range(top + 1):
            level = geometry[LEVEL, octave]
            first = geometry[FIRST + sign, octave]
            cost, count = _octave_cost(
                cells, first, level, octave, min(level, deepest), price, split_bits, counts, costs, splits, losses
            )
            below += count
            bits += cost + (split_bits if count else 0.0)
            whole = below * octave - times_log(below) + price if below else 0.0
            if whole <= bits:
                bits = whole
                floors[sign] = octave
            elif octave & 7 == 0:
                losses[octave >> 3] += whole - bits
        all_bits += bits
        total += below
    return all_bits + times_log(total)


@spliced
def list_bins(
    cells: Array, geometry: Array, top: int, deepest: int, all_occur: int, splits: Array, floors: Array, lowers: Array,
    raws: Array, counts: Array, most: int,
) -> int:  # fmt: skip
    """List the non-empty bins that `choose_bins` found: smallest number (int64), raw bits (uint8), count (int64).

    With `all_occur`, also list the empty bins, with one more in each count. Returns the number of bins; if it exceeds
    `most`, the last ones are not written.
    """
    bins = int64(0)
    cell = int64(0)
    lower = int64(-1) << top
    for place in range(-top - 1, top + 1):
        sign = int64(place < 0)
        octave = -place - 1 if sign else place
        if octave < floors[sign]:
            continue
        is_floor = octave == floors[sign]
        level = geometry[LEVEL, octave]
        limit = int64(0) if is_floor else min(level, deepest)
        first = 2 * geometry[FIRST + sign, octave]
        depth = int64(0)
        node = int64(1)
        while node:
            while depth < limit and splits[uint64(first + node)]:
                node *= 2
                depth += 1
            raw = octave if is_floor else octave - 1 - depth
            end = cell + (1 << (level - depth))
            if is_floor:
                end = geometry[FIRST, 0] if sign else geometry[FIRST, octave] + (1 << level)
            count = all_occur
            for i in range(uint64(cell), uint64(end)):
                count += cells[i]
            if count:
                if bins < most:
                    lowers[bins], raws[bins], counts[bins] = lower, raw, count
                bins += 1
            cell = end
            lower += int64(1) << raw
            while node & 1 and node:
                node >>= 1
                depth -= 1
            node += int64(node > 0)
    return bins


@inner
def symbols_of_cells(geometry: Array, lowers: Array, raws: Array, bins: int, table: Array) -> None:
    """Fill a table of symbols by cell."""
    for symbol in range(bins):
        first = cell_of(lowers[symbol], geometry)
        last = cell_of(lowers[symbol] + ((int64(1) << int64(raws[symbol])) - 1), geometry)
        for cell in range(uint64(first), uint64(last + 1)):
            table[cell] = symbol
