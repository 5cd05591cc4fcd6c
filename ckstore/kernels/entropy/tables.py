"""Decoding tables: the meaning of the next bits of a stream.

A table of 2^b entries is indexed by the next b bits, lowest first. An entry begins with the number of bits that it
takes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.lengths import canonical_codes
from ckstore.kernels.entropy.payload_directory import SPARSE
from ckstore.kernels.entropy.words import Array, Group, clear, counted, inlined, inner, int64, uint64

SYMBOLS = np.dtype([(field, np.int64) for field in ("code", "length", "number", "raw", "run", "run_raw")])
"""Fields of a symbol: its bit-reversed code and the code's length, -1 for a symbol that does not occur; the smallest
number of its bin and the bin's raw bits; the same of a pair's zero run, whose raw bits come first.
"""

SYMBOL, BY_CODE, PAIR = int64(0), int64(1), int64(2)
"""Kinds of the entries of a table (uint64).

`SYMBOL`: bits of the code | symbol << 8. `BY_CODE`, also of 32 bits: bits of code and raw bits | bits of the code << 8
| smallest number << 12. `PAIR`: bits of code and raw bits | run plus one, below 2^16, << 8 | value, of 32 bits, << 32.
"""

UNRESOLVED = 64
"""An entry whose bits do not determine the item, or whose item does not fit it. It takes no bits."""

LOOK = 12
"""Index bits of tables of pairs: their entries fit the first-level cache."""
_MOST_RUN = int64((1 << 16) - 1)
_1, _8, _12, _32 = uint64(1), uint64(8), uint64(12), uint64(32)


@counted
def fill_symbols(group: Group, lowers: Array, raws: Array, lengths: Array, symbols: Array) -> int:
    """Fill the table of symbols (SYMBOLS) of a group, as `code_directory` read it.

    Returns the bits of the longest code, or -1 if the lengths do not form a complete prefix code of at most 12 bits.
    """
    bins, stride = group.bins, group.run_bins
    codes = np.empty(bins * stride, np.uint32)
    clear(codes, codes.size)
    if group.single < 0 and canonical_codes(lengths, bins * stride, codes):
        return -1
    longest = int64(0)
    is_pair = group.kind == SPARSE
    symbol = int64(0)
    for value in range(bins):
        for place in range(bins, bins + stride):
            length = int64(codes[symbol] >> 16)
            longest = max(longest, length)
            symbols[symbol].code = codes[symbol] & 65535
            symbols[symbol].length = length if length or symbol == group.single else -1
            symbols[symbol].number = lowers[value]
            symbols[symbol].raw = raws[value]
            symbols[symbol].run = lowers[place] if is_pair else int64(0)
            symbols[symbol].run_raw = int64(raws[place]) if is_pair else int64(0)
            symbol += 1
    return longest


@inlined
def total_bits(symbols: Array, symbol: int) -> int:
    """Return the bits of a symbol's code and of all raw bits."""
    return symbols[symbol].length + symbols[symbol].run_raw + symbols[symbol].raw


@inner
def resolves(symbols: Array, symbol: int, bits: int) -> bool:
    """Return whether `bits` bits hold all of a pair, its value has at most 31 bits, and its run is below 2^16 - 1."""
    number, run = symbols[symbol].number, symbols[symbol].run
    if total_bits(symbols, symbol) > bits or number < -(1 << 31) or number >= 1 << 31 or run < 0:
        return False
    return run + (1 << symbols[symbol].run_raw) <= _MOST_RUN


@inner
def fill_table(table: Array, bits: int, tells: int, symbols: Array) -> None:
    """Fill the first 2^bits entries of a table of the kind `tells`: `SYMBOL`, `BY_CODE` or `PAIR`."""
    size = _1 << uint64(bits)
    for i in range(symbols.shape[0]):
        length = symbols[i].length
        if length < 0:
            continue
        total = total_bits(symbols, i)
        place = uint64(symbols[i].code) & (size - _1)
        step = _1 << uint64(min(length, bits))
        entry = uint64(length) | (uint64(i) << _8)
        if tells == BY_CODE:
            entry = uint64(total) | (uint64(length) << _8) | (uint64(symbols[i].number) << _12)
        elif tells == PAIR:
            entry = uint64(UNRESOLVED)
            if resolves(symbols, i, bits):
                step = _1 << uint64(total)
                for raw in range(_1 << uint64(symbols[i].raw)):
                    value = uint64(symbols[i].number) + raw
                    entry = uint64(total) | (uint64(symbols[i].run + 1) << _8) | (value << _32)
                    for _ in range(1 << symbols[i].run_raw):
                        for slot in range(place, size, step):
                            table[slot] = entry
                        place += _1 << uint64(length)
                        entry += uint64(256)
                continue
        for slot in range(place, size, step):
            table[slot] = entry
