"""Reading zero runs and values: the joint tokens of sparse groups, and the pairs of adaptive ones."""

from __future__ import annotations

from collections.abc import Callable

from ckstore.kernels.entropy.bytes import store_1, store_2, store_4, store_8, store_element
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.read_numbers import bits_taken, next_bits
from ckstore.kernels.entropy.tables import (
    BYTE,
    LENGTH,
    LOOK,
    NUMBER,
    PAIR,
    RAW,
    RUN,
    RUN_RAW,
    SYMBOL,
    fill_table,
    resolves,
    total_bits,
)
from ckstore.kernels.entropy.words import (
    Array,
    Word,
    inlined,
    inner,
    int64,
    load_word,
    low_bits,
    read_bits,
    spliced,
    uint64,
    unzigzag,
)

_LOADABLE = 56
"""Most bits of a pair that one load is sure to hold."""
_LOOK = int64(LOOK)
"""Bits that the table of short pairs is looked up by."""
_SHORT = int64(BYTE - 1)
"""Values of a pair, as zigzag numbers less one, that fit eight bits."""
_FEW = 1024
"""Pairs below which a table of short pairs is not worth its making."""
_UNRESOLVED = 1 << LONGEST >> 4
"""Share of pairs, times 2^12, up to which that table is faster where it does not resolve them."""
_TURN_PAIRS = 20
_TURN_BITS = 3 * LOOK + _LOADABLE
"""Most pairs of a turn of `_read_short`, and most bits that it takes from a stream."""
_1, _2, _3, _7, _8, _16, _63, _64, _255 = (
    uint64(1),
    uint64(2),
    uint64(3),
    uint64(7),
    uint64(8),
    uint64(16),
    uint64(63),
    uint64(64),
    uint64(255),
)


@inlined
def _take_pair(buffer: Array, position: Word, table: Array, symbols: Array) -> tuple[Word, Word, Word]:
    """(run plus one, value, position behind it) of a pair of at most `_LOADABLE` bits."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    entry = table[word & uint64(table.size - 1)]
    symbol = entry >> _8
    run_raw = uint64(symbols[symbol, RUN_RAW])
    raw = uint64(symbols[symbol, RAW])
    word >>= entry & _63
    run = uint64(symbols[symbol, RUN]) + low_bits(word, int64(run_raw))
    number = uint64(symbols[symbol, NUMBER]) + low_bits(word >> run_raw, int64(raw))
    return run + _1, uint64(unzigzag(number + _1)), position + (entry & _63) + run_raw + raw


@spliced
def _store_four(
    coded: Array, size: int, p0: Word, p1: Word, p2: Word, p3: Word, v0: Word, v1: Word, v2: Word, v3: Word
) -> None:
    """Write four elements of `size` bytes, each in the place before the one given."""
    if size == 1:
        store_1(coded, p0 - _1, v0)
        store_1(coded, p1 - _1, v1)
        store_1(coded, p2 - _1, v2)
        store_1(coded, p3 - _1, v3)
    elif size == 2:
        store_2(coded, (p0 - _1) << _1, v0)
        store_2(coded, (p1 - _1) << _1, v1)
        store_2(coded, (p2 - _1) << _1, v2)
        store_2(coded, (p3 - _1) << _1, v3)
    elif size == 4:
        store_4(coded, (p0 - _1) << _2, v0)
        store_4(coded, (p1 - _1) << _2, v1)
        store_4(coded, (p2 - _1) << _2, v2)
        store_4(coded, (p3 - _1) << _2, v3)
    else:
        store_8(coded, (p0 - _1) << _3, v0)
        store_8(coded, (p1 - _1) << _3, v1)
        store_8(coded, (p2 - _1) << _3, v2)
        store_8(coded, (p3 - _1) << _3, v3)


@inlined
def _value(entry: Word) -> Word:
    return uint64(int64(entry << uint64(48)) >> 56)


def _short_reader(narrow: bool) -> Callable[..., tuple[int, Word, int]]:
    """What takes pairs by a table of `PAIR`. Most elements are *narrow*, of one byte, and worth a copy of the loop."""

    @inner
    def read(
        pairs: int,
        buffer: Array,
        positions: Array,
        limit: int,
        table: Array,
        codes: Array,
        symbols: Array,
        coded: Array,
        size: int,
        at: Word,
        end: Word,
    ) -> tuple[int, Word, int]:
        p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
        mask = uint64((1 << LOOK) - 1)
        most = limit - _TURN_BITS
        taken = int64(0)
        while taken + _TURN_PAIRS <= pairs and int64(max(max(p0, p1), max(p2, p3))) <= most:
            w0 = next_bits(buffer, p0)
            w1 = next_bits(buffer, p1)
            w2 = next_bits(buffer, p2)
            w3 = next_bits(buffer, p3)
            resolved = True
            for _ in range(4):
                e0 = uint64(table[w0 & mask])
                e1 = uint64(table[w1 & mask])
                e2 = uint64(table[w2 & mask])
                e3 = uint64(table[w3 & mask])
                if (e0 | e1 | e2 | e3) & _64:
                    resolved = False
                    break
                r0 = at + (e0 >> _16)
                r1 = r0 + (e1 >> _16)
                r2 = r1 + (e2 >> _16)
                r3 = r2 + (e3 >> _16)
                if r3 > end:
                    return taken, at, 1
                _store_four(
                    coded, _1 if narrow else size, r0, r1, r2, r3, _value(e0), _value(e1), _value(e2), _value(e3)
                )
                at = r3
                taken += 4
                w0 >>= e0 & _63
                w1 >>= e1 & _63
                w2 >>= e2 & _63
                w3 >>= e3 & _63
            p0 += bits_taken(w0)
            p1 += bits_taken(w1)
            p2 += bits_taken(w2)
            p3 += bits_taken(w3)
            if not resolved:
                r0, v0, p0 = _take_pair(buffer, p0, codes, symbols)
                r1, v1, p1 = _take_pair(buffer, p1, codes, symbols)
                r2, v2, p2 = _take_pair(buffer, p2, codes, symbols)
                r3, v3, p3 = _take_pair(buffer, p3, codes, symbols)
                r0 += at
                r1 += r0
                r2 += r1
                r3 += r2
                # Runs are below 2^44: the last place bounds the others.
                if r3 > end:
                    return taken, at, 1
                _store_four(coded, _1 if narrow else size, r0, r1, r2, r3, v0, v1, v2, v3)
                at = r3
                taken += 4
        positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
        return taken, at, 0

    return read


_read_narrow = _short_reader(True)
"""Take most of the pairs by a table of `PAIR`, those that it does not resolve by their codes.

Returns (how many were taken, next place, 0 or 1).
"""

_read_short = _short_reader(False)
"""The same for elements of any size."""


@inner
def _read_loaded(
    turns: int,
    buffer: Array,
    positions: Array,
    limit: int,
    table: Array,
    symbols: Array,
    coded: Array,
    size: int,
    at: Word,
    end: Word,
) -> tuple[Word, int]:
    """Take turns of four pairs of at most `_LOADABLE` bits by a table of `SYMBOL`. Returns (next place, 0 or 1)."""
    most = uint64(limit)
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    for _ in range(turns):
        if max(max(p0, p1), max(p2, p3)) > most:
            return at, 1
        r0, v0, p0 = _take_pair(buffer, p0, table, symbols)
        r1, v1, p1 = _take_pair(buffer, p1, table, symbols)
        r2, v2, p2 = _take_pair(buffer, p2, table, symbols)
        r3, v3, p3 = _take_pair(buffer, p3, table, symbols)
        r0 += at
        r1 += r0
        r2 += r1
        r3 += r2
        # Runs are below 2^44: the last place bounds the others.
        if r3 > end:
            return at, 1
        _store_four(coded, size, r0, r1, r2, r3, v0, v1, v2, v3)
        at = r3
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    return at, 0


@inner
def _read_any(
    buffer: Array,
    positions: Array,
    limit: int,
    table: Array,
    symbols: Array,
    coded: Array,
    size: int,
    first: int,
    pairs: int,
    at: int,
    end: int,
) -> int:
    """Read pairs of any width one by one by a table of `SYMBOL`. Returns 0 or 1."""
    for i in range(first, pairs):
        position = positions[i & 3]
        if position > limit:
            return 1
        entry = table[(load_word(buffer, position >> 3) >> uint64(position & 7)) & uint64(table.size - 1)]
        symbol = entry >> _8
        position += int64(entry & _255)
        run = symbols[symbol, RUN] + int64(read_bits(buffer, position, limit, symbols[symbol, RUN_RAW]))
        position += symbols[symbol, RUN_RAW]
        number = uint64(symbols[symbol, NUMBER]) | read_bits(buffer, position, limit, symbols[symbol, RAW])
        positions[i & 3] = position + symbols[symbol, RAW]
        if run >= end - at:
            return 1
        store_element(coded, size, uint64(at + run), uint64(unzigzag(number + _1)))
        at += run + 1
    return 0


@spliced
def read_sparse(
    buffer: Array,
    positions: Array,
    limit: int,
    symbols: Array,
    longest: int,
    codes: Array,
    table: Array,
    coded: Array,
    size: int,
    start: int,
    count: int,
    pairs: int,
) -> int:
    """Read joint tokens into the zeroed elements of a group. Returns 0, or 1 where streams and directory disagree."""
    codes = codes[: 1 << longest]
    fill_table(codes, longest, SYMBOL, symbols)
    widest = int64(0)
    unresolved = int64(0)
    for i in range(symbols.shape[0]):
        if symbols[i, LENGTH] >= 0:
            widest = max(widest, total_bits(symbols, i))
            if not resolves(symbols, i, _LOOK, _SHORT):
                unresolved += (1 << LONGEST) >> symbols[i, LENGTH]
    at = uint64(start)
    end = uint64(start + count)
    done = int64(0)
    short = pairs >= _FEW and unresolved <= _UNRESOLVED
    if short and widest <= _LOADABLE:
        fill_table(table, _LOOK, PAIR, symbols)
        if size == 1:
            done, at, wrong = _read_narrow(pairs, buffer, positions, limit, table, codes, symbols, coded, size, at, end)
        else:
            done, at, wrong = _read_short(pairs, buffer, positions, limit, table, codes, symbols, coded, size, at, end)
        if wrong:
            return 1
    if widest <= _LOADABLE:
        turns = (pairs - done) >> 2
        at, wrong = _read_loaded(turns, buffer, positions, limit, codes, symbols, coded, size, at, end)
        done += 4 * turns
        if wrong:
            return 1
    return _read_any(buffer, positions, limit, codes, symbols, coded, size, done, pairs, int64(at), start + count)


@inner
def place_pairs(runs: Array, values: Array, first: int, pairs: int, coded: Array, size: int, start: int) -> None:
    """Write the pairs of an adaptive group into its zeroed elements; the directory has checked that they fit."""
    at = uint64(start)
    for i in range(uint64(first), uint64(first + pairs)):
        at += runs[i]
        store_element(coded, size, at, uint64(unzigzag(values[i] + _1)))
        at += _1
