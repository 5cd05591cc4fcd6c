"""What groups cost: the price of a symbol, code lengths, the widest item."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.directory import BITS, KIND, SINGLE, SPARSE, SYMBOL_COUNT
from ckstore.kernels.entropy.layout import SYMBOLS, symbol_parts, times_log
from ckstore.kernels.entropy.lengths import code_lengths
from ckstore.kernels.entropy.words import Array, counted, inner, int64, spliced, uint64

# Not plain integers: numba would compile what takes them once more for every literal.
_2, _ALL = int64(2), int64(SYMBOLS)
_SYMBOL_BITS = 8.0
"""Bits that a symbol of the table must save, and ..."""
_SYMBOL_SHARE = 1 / 8192
"""... as a share of its group's elements: what the time for larger tables is worth."""
FEW = 2048
"""Groups of fewer elements get coarser histograms."""


@spliced
def symbol_price(count: int) -> float:
    """Bits that a symbol must save in a group of so many elements."""
    return _SYMBOL_BITS + count * _SYMBOL_SHARE


@spliced
def count_used(counts: Array, symbols: int) -> int:
    """Number of symbols that occur."""
    used = int64(0)
    for symbol in range(uint64(symbols)):
        used += int64(counts[symbol] > 0)
    return used


@spliced
def _entropy(counts: Array, symbols: int) -> float:
    total = int64(0)
    bits = 0.0
    for symbol in range(uint64(symbols)):
        total += counts[symbol]
        bits -= times_log(counts[symbol])
    return bits + times_log(total)


@counted
def set_codes(group: Array, counts: Array, symbols: int, raw_bits: int, lengths: Array) -> tuple[float, float]:
    """Find a group's code lengths. Returns (bits with table, entropy of the tokens and their raw bits)."""
    single, code_bits = code_lengths(counts, symbols, lengths)
    group[SYMBOL_COUNT] = symbols
    group[SINGLE] = single
    group[BITS] = code_bits + raw_bits
    return code_bits + raw_bits + 2.0 * count_used(counts, symbols), _entropy(counts, symbols) + raw_bits


@counted
def widest_item(group: Array, rows: Array, lengths: Array) -> int:
    """Most bits of any item of a group whose KIND and SINGLE are set, with these layouts and code lengths."""
    leads = np.empty((_2, _ALL), np.int64)
    raws = np.empty((_2, _ALL), np.int64)
    values, runs = symbol_parts(rows, group[KIND] == SPARSE, leads, raws)
    widest = int64(0)
    symbol = int64(0)
    for value in range(uint64(values)):
        for run in range(uint64(runs)):
            length = int64(lengths[uint64(symbol)])
            if length > 0 or symbol == group[SINGLE]:
                widest = max(widest, length + raws[0, value] + raws[1, run])
            symbol += 1
    return widest


@inner
def copy(source: Array, target: Array) -> None:
    """Copy one array into another, which may be longer."""
    for i in range(uint64(source.size)):
        target[i] = source[i]
