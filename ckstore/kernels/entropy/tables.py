"""Tables by which a decoder finds out what the next bits of a stream stand for.

A table of 2^b entries (uint64 or uint32) is looked up by the next b bits, lowest first. What takes fewer bits stands in
it as often as these can go on, so a table grows by doubling: at size 2^l the entries of l bits are put in, then all are
copied into the upper half. An entry begins with the number of bits that it takes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.layout import symbol_leads
from ckstore.kernels.entropy.lengths import LONGEST, canonical_codes
from ckstore.kernels.entropy.words import Array, Word, counted, inlined, inner, int64, uint64

CODE, LENGTH, NUMBER, RAW, RUN, RUN_RAW = range(6)
"""Columns of the table of symbols (int64).

Bit-reversed code and its length, -1 where the symbol does not occur; the number (of a pair: its value less one) without
raw bits, and how many these are; the same of a pair's zero run, whose raw bits come first.
"""
COLUMNS = 6

# Not plain integers: numba would compile what takes them once more for every literal.
SYMBOL, BY_CODE, ONE, PAIR = int64(0), int64(1), int64(2), int64(3)
"""What the entries of a table tell.

`SYMBOL`: bits of the code | symbol << 8. `BY_CODE`: bits of code and raw bits | bits of the code << 8 | number without
raw bits, below 2^32, << 32. `ONE`: bits of code and raw bits | number, below 2^24, << 8. `PAIR`: bits of code and raw
bits | value, of eight bits, << 8 | run plus one, below 2^16, << 16.
"""

UNRESOLVED = 64
"""An entry whose bits do not tell what they stand for, or something that has no place in it. It takes none."""

OVERLONG = 63
"""The same in tables of `ONE`, as the number of bits that it takes: more than four looks do otherwise."""

LOOK = 13
"""Most bits that a table is looked up by: four looks fit a load, and its entries the first cache."""

STRINGS = 4 << LONGEST
"""More than there are strings of up to three numbers that take 12 bits together, or single ones that take 13."""

BYTE = int64(256)
"""Numbers below fit a byte; of a pair, which are those of values less one, the ones below 255 fit eight bits."""
_LEVELS = int64(16)
_PARTS, _ENDS = int64(2), int64(LOOK + 1)
_RUNS, _NUMBERS = int64((1 << 16) - 1), int64(1 << 24)
_SECOND_BYTE = uint64(0xFF00)
_0, _1, _2, _3, _8, _16, _32, _40, _61 = (
    uint64(0),
    uint64(1),
    uint64(2),
    uint64(3),
    uint64(8),
    uint64(16),
    uint64(32),
    uint64(40),
    uint64(61),
)


@counted
def fill_symbols(rows: Array, run_symbols: int, lengths: Array, single: int, symbols: Array) -> int:
    """Fill the table of symbols (int64, symbols x COLUMNS) of a group.

    The other parameters are the group's, as `code_directory` read them; `run_symbols` is 0 for dense groups. Returns
    the bits of the longest code, or -1 where the lengths are no complete prefix code of at most 12 bits.
    """
    size = symbols.shape[0]
    codes = np.empty(size, np.uint32)
    leads = np.empty((_PARTS, size), np.int64)
    raws = np.empty((_PARTS, size), np.int64)
    for symbol in range(uint64(size)):
        codes[symbol] = 0
        raws[0, symbol] = 0
        raws[1, symbol] = 0
    if single < 0 and canonical_codes(lengths, size, codes):
        return -1
    symbol_leads(rows[0], leads[0], raws[0])
    if run_symbols:
        symbol_leads(rows[1], leads[1], raws[1])
    longest = int64(0)
    stride = max(run_symbols, 1)
    for symbol in range(size):
        value = symbol // stride
        run = symbol % stride
        length = int64(codes[symbol] >> 16)
        longest = max(longest, length)
        symbols[symbol, CODE] = codes[symbol] & 65535
        symbols[symbol, LENGTH] = length if length or symbol == single else -1
        symbols[symbol, RAW] = raws[0, value]
        symbols[symbol, NUMBER] = int64(uint64(leads[0, value]) << uint64(raws[0, value]))
        symbols[symbol, RUN_RAW] = raws[1, run] if run_symbols else 0
        symbols[symbol, RUN] = leads[1, run] << raws[1, run] if run_symbols else 0
    return longest


@inlined
def total_bits(symbols: Array, symbol: int) -> int:
    """Bits of a symbol's code and of all raw bits."""
    return symbols[symbol, LENGTH] + symbols[symbol, RUN_RAW] + symbols[symbol, RAW]


@inlined
def resolves(symbols: Array, symbol: int, bits: int, end: int) -> bool:
    """Whether `bits` bits hold all of a symbol, and its numbers are below `end`, its runs below 2^16 - 1."""
    number = symbols[symbol, NUMBER]
    last = number + (1 << min(symbols[symbol, RAW], 32))
    last_run = symbols[symbol, RUN] + (1 << min(symbols[symbol, RUN_RAW], 32))
    return total_bits(symbols, symbol) <= bits and number >= 0 and last <= end and last_run <= _RUNS


@inner
def _double(table: Array, level: int) -> None:
    """Copy the first 2^(level - 1) entries behind themselves."""
    half = (_1 << uint64(level)) >> _1
    for i in range(half):
        table[half + i] = table[i]


@counted
def fill_table(table: Array, bits: int, tells: int, symbols: Array) -> None:
    """Fill the first 2^bits entries of a table; see `BY_CODE` and the others for what it is to tell."""
    size = symbols.shape[0]
    levels = np.empty(size, np.int64)
    ends = np.empty(_LEVELS + 1, np.int64)
    for level in range(_LEVELS + 1):
        ends[level] = 0
    most = _NUMBERS if tells == ONE else BYTE - 1
    for i in range(size):
        level = _LEVELS - 1
        if symbols[i, LENGTH] >= 0:
            level = min(symbols[i, LENGTH], bits)
            if tells >= ONE and resolves(symbols, i, bits, most):
                level = total_bits(symbols, i)
        levels[i] = level
        ends[level + 1] += 1
    for level in range(_LEVELS):
        ends[level + 1] += ends[level]
    order = np.empty(size, np.int64)
    for i in range(size):
        order[ends[levels[i]]] = i
        ends[levels[i]] += 1
    first = int64(0)
    for level in range(bits + 1):
        _double(table, level)
        for k in range(first, ends[level]):
            i = order[k]
            length = uint64(symbols[i, LENGTH])
            place = uint64(symbols[i, CODE]) & ((_1 << uint64(bits)) - _1)
            if tells == BY_CODE:
                table[place] = uint64(total_bits(symbols, i)) | (length << _8) | (uint64(symbols[i, NUMBER]) << _32)
            elif tells == SYMBOL:
                table[place] = length | (uint64(i) << _8)
            elif not resolves(symbols, i, bits, most):
                table[place] = OVERLONG if tells == ONE else UNRESOLVED
            else:
                for raw in range(1 << symbols[i, RAW]):
                    number = uint64(symbols[i, NUMBER] + raw)
                    if tells == PAIR:
                        number += _1
                        number = (number >> _1) ^ (_0 - (number & _1))
                        number = (number & uint64(255)) | (uint64(symbols[i, RUN] + 1) << _8)
                    entry = uint64(level) | (number << _8)
                    for _ in range(1 << symbols[i, RUN_RAW]):
                        table[place] = entry
                        place += _1 << length
                        entry += _1 << _16
        first = ends[level]


@counted
def fill_strings(table: Array, bits: int, symbols: Array, strings: Array) -> None:
    """Fill the first 2^bits entries of a table with strings of numbers below 256.

    Entries of uint64 (at most 2^12) are bits | up to four numbers << 8, one in each byte | how many << 61; those of
    uint32 (at most 2^13) are bits | up to two numbers << 8 | how many << 30. `strings` (uint64, STRINGS) is scratch.
    """
    # A string's word is its entry of 64 bits, with the bits that stand for it from bit 40 on. Those that another number
    # may follow are listed, in the order of their bits.
    wide = table.itemsize == 8
    most = uint64(4 if wide else 2)
    mask = (_1 << uint64(bits)) - _1
    numbers = np.empty(BYTE, np.uint64)
    ends = np.empty(_ENDS, np.uint64)
    string_ends = np.empty(_ENDS, np.uint64)
    listed = _0
    at = _0
    for level in range(bits + 1):
        _double(table, level)
        for i in range(symbols.shape[0]):
            length = symbols[i, LENGTH]
            total = total_bits(symbols, i)
            if length < 0 or (total != level and min(length, bits) != level):
                continue
            if not resolves(symbols, i, bits, BYTE):
                if min(length, bits) == level:
                    table[uint64(symbols[i, CODE]) & mask] = UNRESOLVED
            elif total == level:
                for raw in range(1 << symbols[i, RAW]):
                    place = uint64(symbols[i, CODE] + (raw << length))
                    number = (uint64(symbols[i, NUMBER] + raw) << _8) | (place << _40)
                    numbers[listed] = number
                    listed += _1
                    strings[at] = uint64(level) + number + (_1 << _61)
                    table[place] = _entry(strings[at], wide)
                    at += _1
        ends[level] = listed
        for part in range(1, level):
            rest = uint64(level - part)
            for i in range(string_ends[part - 1], string_ends[part]):
                longer = strings[i] + rest + (_1 << _61)
                count = longer >> _61
                for k in range(ends[rest - _1], ends[rest]):
                    number = numbers[k]
                    string = longer + ((number & _SECOND_BYTE) << ((count - _1) << _3))
                    string += (number >> _40) << (uint64(part) + _40)
                    table[(string >> _40) & mask] = _entry(string, wide)
                    strings[at] = string
                    at += uint64(count < most)
        string_ends[level] = at


@inlined
def _entry(string: Word, wide: bool) -> Word:
    return string if wide else (string & uint64(0xFFFFFF)) | (string >> _61 << uint64(30))
