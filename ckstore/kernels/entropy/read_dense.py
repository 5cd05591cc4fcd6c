"""Decode the symbols of dense groups, one per element and table lookup, in the order of the elements."""

from __future__ import annotations

from ckstore.kernels.entropy.tables import BY_CODE, fill_table, total_bits
from ckstore.kernels.entropy.words import (
    Array,
    Word,
    inlined,
    inner,
    int64,
    load_2,
    load_4,
    load_word,
    low_bits,
    spliced,
    store_1,
    store_2,
    store_4,
    store_word,
    uint64,
)

PLACED = 2048
"""Numbers that are decoded before they are placed."""
_AHEAD = 28
"""Maximal bits of a number whose next load need not wait for its length: twice that and 7 fit a word."""
_1, _2, _3, _4, _7, _8, _63, _255 = (uint64(number) for number in (1, 2, 3, 4, 7, 8, 63, 255))


@inlined
def _number_of(word: Word, entry: Word) -> int:
    """Return the number at the low end of a word, by its entry of a `BY_CODE` table."""
    return (int64(entry) >> 32) + int64(low_bits(word, int64(entry & _255)) >> ((entry >> _8) & _63))


@inlined
def _take_one(buffer: Array, position: Word, table: Array) -> tuple[int, Word]:
    """Return (number, position after it) of a number of at most 57 bits by a `BY_CODE` table."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    entry = table[word & uint64(table.size - 1)]
    return _number_of(word, entry), position + (entry & _255)


@inlined
def _ahead(
    buffer: Array, word: Word, position: Word, table: Array, mask: Word, numbers: Array, at: Word
) -> tuple[Word, Word]:
    after = load_word(buffer, position >> _3)
    entry = table[word & mask]
    numbers[at] = _number_of(word, entry)
    bits = entry & _255
    return after >> (((position & _7) + bits) & _63), position + bits


@inner
def _read_ahead(turns: int, buffer: Array, positions: Array, table: Array, numbers: Array) -> None:
    """Take turns of four numbers of at most `_AHEAD` bits by a `BY_CODE` table."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    w0 = load_word(buffer, p0 >> _3) >> (p0 & _7)
    w1 = load_word(buffer, p1 >> _3) >> (p1 & _7)
    w2 = load_word(buffer, p2 >> _3) >> (p2 & _7)
    w3 = load_word(buffer, p3 >> _3) >> (p3 & _7)
    mask = uint64(table.size - 1)
    for at in range(uint64(0), uint64(4 * turns), uint64(4)):
        w0, p0 = _ahead(buffer, w0, p0, table, mask, numbers, at)
        w1, p1 = _ahead(buffer, w1, p1, table, mask, numbers, at + _1)
        w2, p2 = _ahead(buffer, w2, p2, table, mask, numbers, at + _2)
        w3, p3 = _ahead(buffer, w3, p3, table, mask, numbers, at + _3)
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3


@inner
def _read_numbers(
    buffer: Array, positions: Array, limit: int, widest: int, table: Array, numbers: Array, count: int
) -> int:
    """Decode `count` numbers of at most 43 bits. Return 0, or 1 if a stream ends too early."""
    done = int64(0)
    if widest <= _AHEAD:
        rows = count >> 2
        for stream in range(4):
            # The last number may end beyond the limit: only its load must not begin there.
            rows = min(rows, (limit - positions[stream]) // max(widest, 1) + 1 if positions[stream] <= limit else 0)
        _read_ahead(rows, buffer, positions, table, numbers)
        done = 4 * rows
    for i in range(done, count):
        if positions[i & 3] > limit:
            return 1
        numbers[i], positions[i & 3] = _take_one(buffer, uint64(positions[i & 3]), table)
    return 0


@inner
def _place(
    numbers: Array, count: int, buffer: Array, plane: int, width: int, coded: Array, size: int, start: int
) -> None:
    """Write integers: their low `width` bytes come from the plane at byte `plane`, their other bits from `numbers`.

    They are the elements of `size` bytes from `start` on of `coded`, passed as bytes. `numbers` is overwritten.
    """
    low = uint64(plane)
    if width == 1:
        for i in range(uint64(count)):
            numbers[i] = (numbers[i] << 8) | int64(buffer[low + i])
    elif width == 2:
        for i in range(uint64(count)):
            numbers[i] = (numbers[i] << 16) | int64(load_2(buffer, low + _2 * i))
    elif width == 4:
        for i in range(uint64(count)):
            numbers[i] = (numbers[i] << 32) | int64(load_4(buffer, low + uint64(4) * i))
    at = uint64(size * start)
    if size == 1:
        for i in range(uint64(count)):
            store_1(coded, at + i, numbers[i])
    elif size == 2:
        for i in range(uint64(count)):
            store_2(coded, at + _2 * i, numbers[i])
    elif size == 4:
        for i in range(uint64(count)):
            store_4(coded, at + uint64(4) * i, numbers[i])
    else:
        for i in range(uint64(count)):
            store_word(coded, at + _8 * i, numbers[i])


@spliced
def read_dense(
    buffer: Array, positions: Array, limit: int, symbols: Array, longest: int, table: Array, numbers: Array, plane: int,
    width: int, coded: Array, size: int, start: int, count: int,
) -> int:  # fmt: skip
    """Decode a group of numbers of at most 32 bits. Return 0, or 1 if a stream ends too early."""
    fill_table(table, longest, BY_CODE, symbols)
    widest = int64(0)
    for symbol in range(symbols.shape[0]):
        if symbols[symbol].length >= 0:
            widest = max(widest, total_bits(symbols, symbol))
    for done in range(0, count, PLACED):
        taken = min(count - done, PLACED)
        if _read_numbers(buffer, positions, limit, widest, table, numbers, taken):
            return 1
        _place(numbers, taken, buffer, plane + width * done, width, coded, size, start + done)
    return 0
