"""Decode the joint symbols of zero runs and values of sparse groups, and numbers of any width one by one."""

from __future__ import annotations

from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.tables import LOOK, PAIR, UNRESOLVED, fill_table, resolves, total_bits
from ckstore.kernels.entropy.words import (
    Array,
    Word,
    bit_length,
    inlined,
    inner,
    int64,
    load_word,
    low_bits,
    read_bits,
    spliced,
    store_element,
    uint64,
)

_LOADABLE = 56
"""Maximal bits of a pair that one load always holds."""
_FEW = 1024
"""Minimal number of pairs that repays the making of a table of short pairs."""
_UNRESOLVED = 1 << LONGEST >> 4
"""Share of unresolved pairs, times 2^12, up to which that table is faster."""
_TURN_PAIRS = 20
_TURN_BITS = 3 * LOOK + _LOADABLE
"""Maximal number of pairs of a turn, and maximal bits that it takes from a stream."""
_LOOK = int64(LOOK)
_3, _7, _8, _63, _255 = (uint64(number) for number in (3, 7, 8, 63, 255))
_LAST = uint64(1 << 63)


@inlined
def _next_bits(buffer: Array, position: Word) -> Word:
    """Return the next 57 bits of a stream. Bit 63 is set, so that its later place shows the number of bits taken."""
    return (load_word(buffer, position >> _3) >> (position & _7)) | _LAST


@inlined
def _bits_taken(word: Word) -> Word:
    """Return the number of bits that were shifted out of a word of `_next_bits`."""
    return uint64(64 - bit_length(word))


@inlined
def _take_pair(buffer: Array, position: Word, table: Array, symbols: Array) -> tuple[int, int, Word]:
    """Return (run plus one, value, position after it) of a pair of at most `_LOADABLE` bits."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    entry = table[word & uint64(table.size - 1)]
    symbol = entry >> _8
    run_raw = uint64(symbols[symbol].run_raw)
    raw = uint64(symbols[symbol].raw)
    word >>= entry & _63
    run = symbols[symbol].run + int64(low_bits(word, int64(run_raw)))
    number = symbols[symbol].number + int64(low_bits(word >> run_raw, int64(raw)))
    return run + 1, number, position + (entry & _63) + run_raw + raw


@inlined
def _take_four(
    buffer: Array, p0: Word, p1: Word, p2: Word, p3: Word, table: Array, symbols: Array, coded: Array, size: int,
    at: int, end: int,
) -> tuple[Word, Word, Word, Word, int]:  # fmt: skip
    """Take a pair of every stream and write its value. Return the positions and the next place, -1 beyond `end`."""
    r0, v0, p0 = _take_pair(buffer, p0, table, symbols)
    r1, v1, p1 = _take_pair(buffer, p1, table, symbols)
    r2, v2, p2 = _take_pair(buffer, p2, table, symbols)
    r3, v3, p3 = _take_pair(buffer, p3, table, symbols)
    if min(min(r0, r1), min(r2, r3)) < 1:
        return p0, p1, p2, p3, int64(-1)
    r0 += at
    r1 += r0
    r2 += r1
    r3 += r2
    # Runs are below 2^44: the last place bounds the others.
    if r3 > end:
        return p0, p1, p2, p3, int64(-1)
    store_element(coded, size, r0 - 1, v0)
    store_element(coded, size, r1 - 1, v1)
    store_element(coded, size, r2 - 1, v2)
    store_element(coded, size, r3 - 1, v3)
    return p0, p1, p2, p3, r3


@inner
def _read_fours(
    buffer: Array, positions: Array, limit: int, short: bool, table: Array, codes: Array, symbols: Array, coded: Array,
    size: int, at: int, end: int, pairs: int,
) -> tuple[int, int]:  # fmt: skip
    """Take turns of pairs of at most `_LOADABLE` bits of every stream, by a `PAIR` table if `short`.

    Returns (number of pairs taken or -1, next place).
    """
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    mask = uint64((1 << LOOK) - 1)
    most = limit - _TURN_BITS if short else limit
    turn = int64(_TURN_PAIRS if short else 4)
    taken = int64(0)
    while taken + turn <= pairs and int64(max(max(p0, p1), max(p2, p3))) <= most:
        resolved = short
        if short:
            w0 = _next_bits(buffer, p0)
            w1 = _next_bits(buffer, p1)
            w2 = _next_bits(buffer, p2)
            w3 = _next_bits(buffer, p3)
            for _ in range(4):
                e0 = table[w0 & mask]
                e1 = table[w1 & mask]
                e2 = table[w2 & mask]
                e3 = table[w3 & mask]
                if (e0 | e1 | e2 | e3) & uint64(UNRESOLVED):
                    resolved = False
                    break
                r0 = at + int64((e0 >> _8) & uint64(0xFFFF))
                r1 = r0 + int64((e1 >> _8) & uint64(0xFFFF))
                r2 = r1 + int64((e2 >> _8) & uint64(0xFFFF))
                r3 = r2 + int64((e3 >> _8) & uint64(0xFFFF))
                if r3 > end:
                    return int64(-1), at
                store_element(coded, size, r0 - 1, int64(e0) >> 32)
                store_element(coded, size, r1 - 1, int64(e1) >> 32)
                store_element(coded, size, r2 - 1, int64(e2) >> 32)
                store_element(coded, size, r3 - 1, int64(e3) >> 32)
                at = r3
                taken += 4
                w0 >>= e0 & _63
                w1 >>= e1 & _63
                w2 >>= e2 & _63
                w3 >>= e3 & _63
            p0 += _bits_taken(w0)
            p1 += _bits_taken(w1)
            p2 += _bits_taken(w2)
            p3 += _bits_taken(w3)
        if not resolved:
            p0, p1, p2, p3, at = _take_four(buffer, p0, p1, p2, p3, codes, symbols, coded, size, at, end)
            taken += 4
            if at < 0:
                return int64(-1), at
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    return taken, at


@inner
def are_short(symbols: Array, items: int) -> bool:
    """Return whether a `PAIR` table is the fastest way to read that many items."""
    unresolved = int64(0)
    for i in range(symbols.shape[0]):
        if symbols[i].length >= 0 and not resolves(symbols, i, _LOOK):
            unresolved += (1 << LONGEST) >> symbols[i].length
    return items >= _FEW and unresolved <= _UNRESOLVED


@spliced
def read_pairs(
    buffer: Array, positions: Array, limit: int, short: bool, symbols: Array, codes: Array, table: Array, coded: Array,
    size: int, at: int, end: int, pairs: int,
) -> tuple[int, int]:  # fmt: skip
    """Decode most of the pairs into zeroed elements; `codes` is a `SYMBOL` table.

    Returns (number of pairs decoded or -1, next place).
    """
    widest = int64(0)
    for i in range(symbols.shape[0]):
        widest = max(widest, total_bits(symbols, i))
    done = int64(0)
    if widest <= _LOADABLE:
        if short:
            fill_table(table, _LOOK, PAIR, symbols)
            done, at = _read_fours(buffer, positions, limit, True, table, codes, symbols, coded, size, at, end, pairs)
        if done >= 0:
            more, at = _read_fours(
                buffer, positions, limit, False, table, codes, symbols, coded, size, at, end, pairs - done
            )
            done = done + more if more >= 0 else more
    return done, at


@inner
def read_any(
    buffer: Array, positions: Array, limit: int, table: Array, symbols: Array, plane: int, width: int, coded: Array,
    size: int, first: int, items: int, at: int, end: int,
) -> int:  # fmt: skip
    """Decode pairs or numbers of any width one by one by a `SYMBOL` table. Return 0 or 1."""
    for i in range(first, items):
        position = positions[i & 3]
        if position > limit:
            return 1
        entry = table[(load_word(buffer, position >> 3) >> uint64(position & 7)) & uint64(table.size - 1)]
        symbol = entry >> _8
        position += int64(entry & _255)
        run = symbols[symbol].run + int64(read_bits(buffer, position, limit, symbols[symbol].run_raw))
        position += symbols[symbol].run_raw
        number = symbols[symbol].number + int64(read_bits(buffer, position, limit, symbols[symbol].raw))
        positions[i & 3] = position + symbols[symbol].raw
        if run < 0 or run >= end - at:
            return 1
        at += run
        if width:
            low = load_word(buffer, plane + width * i) & ((uint64(1) << uint64(8 * width)) - uint64(1))
            number = (number << (8 * width)) | int64(low)
        store_element(coded, size, at, number)
        at += 1
    return 0
