"""Reading the numbers of a group in the order of its elements, one by each look into a table.

All functions take whole turns of the four streams and move `positions` (int64, 4); the caller checks that no load lies
beyond the payload. `numbers` (uint32) is filled from `first` on.
"""

from __future__ import annotations

from collections.abc import Callable

from ckstore.kernels.entropy.tables import OVERLONG
from ckstore.kernels.entropy.words import Array, Word, bit_length, inlined, inner, int64, load_word, low_bits, uint64

AHEAD = 28
"""Most bits of a number for which the next load need not wait for its length: twice that and 7 fit a word."""

TURN = int64(16)
"""Numbers of a turn of `read_wholes` and `read_evens`."""

_1, _2, _3, _4 = uint64(1), uint64(2), uint64(3), uint64(4)
_7, _8, _63, _255 = uint64(7), uint64(8), uint64(63), uint64(255)
_LAST = uint64(1 << 63)


@inlined
def next_bits(buffer: Array, position: Word) -> Word:
    """The next 57 bits of a stream. Bit 63 is set: what is left of it tells how many were taken."""
    return (load_word(buffer, position >> _3) >> (position & _7)) | _LAST


@inlined
def bits_taken(word: Word) -> Word:
    """How many bits of a word of `next_bits` were shifted out; 64 for too many."""
    return uint64(64 - bit_length(word))


def _reader(even: bool) -> Callable[[int, int, Array, Array, Array, Array, int], int]:
    @inner
    def read(turns: int, bits: int, buffer: Array, positions: Array, table: Array, numbers: Array, first: int) -> int:
        p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
        length = uint64(bits)
        mask = (_1 << length) - _1
        at = uint64(first)
        while turns > 0:
            w0 = next_bits(buffer, p0)
            w1 = next_bits(buffer, p1)
            w2 = next_bits(buffer, p2)
            w3 = next_bits(buffer, p3)
            for _ in range(4):
                e0 = uint64(table[w0 & mask])
                e1 = uint64(table[w1 & mask])
                e2 = uint64(table[w2 & mask])
                e3 = uint64(table[w3 & mask])
                numbers[at] = e0 >> _8
                numbers[at + _1] = e1 >> _8
                numbers[at + _2] = e2 >> _8
                numbers[at + _3] = e3 >> _8
                w0 >>= length if even else e0 & _63
                w1 >>= length if even else e1 & _63
                w2 >>= length if even else e2 & _63
                w3 >>= length if even else e3 & _63
                at += _4
            t0 = length * _4 if even else bits_taken(w0)
            t1 = length * _4 if even else bits_taken(w1)
            t2 = length * _4 if even else bits_taken(w2)
            t3 = length * _4 if even else bits_taken(w3)
            if max(max(t0, t1), max(t2, t3)) >= uint64(OVERLONG):
                break
            p0 += t0
            p1 += t1
            p2 += t2
            p3 += t3
            turns -= 1
        positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
        return turns

    return read


read_wholes = _reader(False)
"""Take turns of sixteen numbers by a table of `ONE`, looked up by `bits` bits, as long as it resolves them.

Returns how many turns are left; the next one is not resolved wholly.
"""

read_evens = _reader(True)
"""The same where every number takes `bits` bits: no look waits for the one before."""


@inlined
def number_of(word: Word, entry: Word) -> Word:
    """The number at the low end of a word, by its entry of a table of `BY_CODE`."""
    return (entry >> uint64(32)) + (low_bits(word, int64(entry & _255)) >> ((entry >> _8) & _63))


@inlined
def _ahead(
    buffer: Array, word: Word, position: Word, table: Array, mask: Word, numbers: Array, at: Word
) -> tuple[Word, Word]:
    after = load_word(buffer, position >> _3)
    entry = table[word & mask]
    numbers[at] = number_of(word, entry)
    bits = entry & _255
    return after >> (((position & _7) + bits) & _63), position + bits


@inner
def read_ahead(turns: int, buffer: Array, positions: Array, table: Array, numbers: Array, first: int) -> None:
    """Take turns of four numbers of at most `AHEAD` bits by a table of `BY_CODE`."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    w0 = load_word(buffer, p0 >> _3) >> (p0 & _7)
    w1 = load_word(buffer, p1 >> _3) >> (p1 & _7)
    w2 = load_word(buffer, p2 >> _3) >> (p2 & _7)
    w3 = load_word(buffer, p3 >> _3) >> (p3 & _7)
    mask = uint64(table.size - 1)
    for at in range(uint64(first), uint64(first + 4 * turns), _4):
        w0, p0 = _ahead(buffer, w0, p0, table, mask, numbers, at)
        w1, p1 = _ahead(buffer, w1, p1, table, mask, numbers, at + _1)
        w2, p2 = _ahead(buffer, w2, p2, table, mask, numbers, at + _2)
        w3, p3 = _ahead(buffer, w3, p3, table, mask, numbers, at + _3)
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3


@inlined
def take_one(buffer: Array, position: Word, table: Array) -> tuple[Word, Word]:
    """(number, position behind it) of a number of at most 57 bits by a table of `BY_CODE`."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    entry = table[word & uint64(table.size - 1)]
    return number_of(word, entry), position + (entry & _255)


@inner
def read_singles(count: int, buffer: Array, positions: Array, table: Array, numbers: Array, first: int) -> None:
    """Take `count` numbers of at most 57 bits."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    at = uint64(first)
    for _ in range(count >> 2):
        numbers[at], p0 = take_one(buffer, p0, table)
        numbers[at + _1], p1 = take_one(buffer, p1, table)
        numbers[at + _2], p2 = take_one(buffer, p2, table)
        numbers[at + _3], p3 = take_one(buffer, p3, table)
        at += _4
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    for stream in range(count & 3):
        numbers[at + uint64(stream)], p0 = take_one(buffer, uint64(positions[stream]), table)
        positions[stream] = p0
