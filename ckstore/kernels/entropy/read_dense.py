"""Decode the symbols of dense groups, one per element and table lookup, in the order of the elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckstore.kernels.entropy.tables import BY_CODE, fill_table, total_bits
from ckstore.kernels.entropy.words import (
    Array,
    Group,
    Word,
    inlined,
    inner,
    int64,
    load_2,
    load_4,
    load_word,
    spliced,
    store_1,
    store_2,
    store_4,
    store_word,
    uint64,
)

PLACED = 512
"""Numbers that are taken before they are placed: they and the table stay in the first-level cache."""
_PAIRED = 28
"""Maximal bits of numbers that are loaded in pairs: twice that and 7 fit a word."""
_SHORT_TOP, _SHORT_ALL = 19, 31
"""Maximal bits, without the sign, of numbers above their planes, and of whole integers, that 32-bit entries serve."""
_1, _2, _3, _4, _7, _8, _63, _255 = (uint64(number) for number in (1, 2, 3, 4, 7, 8, 63, 255))


@inlined
def _take_two(buffer: Array, position: Word, table: Array, mask: Word, words: Array, entries: Array, at: Word) -> Word:
    """Take the numbers `at` and `at + 4` from a stream: keep the bits that begin with each, and its entry."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    first = table[word & mask]
    words[at], entries[at] = word, first
    word >>= uint64(first) & _63
    second = table[word & mask]
    words[at + _4], entries[at + _4] = word, second
    return position + (uint64(first) & _255) + (uint64(second) & _255)


@inner
def _take_turns(turns: int, buffer: Array, positions: Array, table: Array, words: Array, entries: Array) -> None:
    """Take turns of eight numbers of at most `_PAIRED` bits, two from each stream."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    mask = uint64(table.size - 1)
    for at in range(uint64(0), uint64(8 * turns), _8):
        p0 = _take_two(buffer, p0, table, mask, words, entries, at)
        p1 = _take_two(buffer, p1, table, mask, words, entries, at + _1)
        p2 = _take_two(buffer, p2, table, mask, words, entries, at + _2)
        p3 = _take_two(buffer, p3, table, mask, words, entries, at + uint64(3))
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3


@inlined
def _take_one(buffer: Array, position: Word, table: Array, mask: Word, words: Array, entries: Array, at: Word) -> Word:
    """Take the number `at` from a stream, likewise."""
    word = load_word(buffer, position >> _3) >> (position & _7)
    entry = table[word & mask]
    words[at], entries[at] = word, entry
    return position + (uint64(entry) & _255)


@inner
def _take_wide_turns(turns: int, buffer: Array, positions: Array, table: Array, words: Array, entries: Array) -> None:
    """Take turns of four numbers, one from each stream."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    mask = uint64(table.size - 1)
    for at in range(uint64(0), uint64(4 * turns), _4):
        p0 = _take_one(buffer, p0, table, mask, words, entries, at)
        p1 = _take_one(buffer, p1, table, mask, words, entries, at + _1)
        p2 = _take_one(buffer, p2, table, mask, words, entries, at + _2)
        p3 = _take_one(buffer, p3, table, mask, words, entries, at + uint64(3))
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3


@inner
def _take(
    buffer: Array, positions: Array, limit: int, widest: int, table: Array, words: Array, entries: Array, count: int
) -> int:
    """Take `count` numbers of at most 43 bits. Return 0, or 1 if a stream ends too early."""
    each = 2 if widest <= _PAIRED else 1
    turns = count // (4 * each)
    for stream in range(4):
        # The last numbers may end beyond the limit: only their load must not begin there.
        left = limit - positions[stream]
        turns = min(turns, left // max(each * widest, 1) + 1 if left >= 0 else int64(0))
    if each == 2:
        _take_turns(turns, buffer, positions, table, words, entries)
    else:
        _take_wide_turns(turns, buffer, positions, table, words, entries)
    for i in range(4 * each * turns, count):
        position = positions[i & 3]
        if position > limit:
            return 1
        word = load_word(buffer, position >> 3) >> uint64(position & 7)
        entry = table[word & uint64(table.size - 1)]
        words[i], entries[i] = word, entry
        positions[i & 3] = position + (int64(entry) & 255)
    return 0


@inlined
def _number_of(word: Any, entry: Any, kind: Callable[[Any], Any]) -> Any:
    """Return the number that a word begins with, by its entry; all of one kind of integers, which is vectorised."""
    length = kind(kind(entry >> kind(8)) & kind(15))
    raw = kind(kind(entry & kind(255)) - length)
    mask = kind(kind(kind(1) << raw) - kind(1))
    return kind(kind(entry >> kind(12)) + kind(kind(word >> length) & mask))


@inner
def _place(
    words: Array, entries: Array, count: int, buffer: Array, plane: int, width: int, coded: Array, size: int, start: int
) -> None:
    """Write integers: their low `width` bytes come from the plane at byte `plane`, their other bits from `words`.

    They are the elements of `size` bytes from `start` on of `coded`, passed as bytes. `words` is overwritten.
    """
    kind = words.dtype.type
    low = uint64(plane)
    at = uint64(size * start)
    if width == 2 and size == 4:  # Most float32.
        for i in range(uint64(count)):
            number = _number_of(words[i], entries[i], kind)
            store_4(coded, at + _4 * i, kind(number << kind(16)) | kind(load_2(buffer, low + _2 * i)))
        return
    for i in range(uint64(count)):
        words[i] = _number_of(words[i], entries[i], kind)
    if width == 1:
        for i in range(uint64(count)):
            words[i] = (words[i] << 8) | int64(buffer[low + i])
    elif width == 2:
        for i in range(uint64(count)):
            words[i] = (words[i] << 16) | int64(load_2(buffer, low + _2 * i))
    elif width == 4:
        for i in range(uint64(count)):
            words[i] = (words[i] << 32) | int64(load_4(buffer, low + _4 * i))
    if size == 1:
        for i in range(uint64(count)):
            store_1(coded, at + i, words[i])
    elif size == 2:
        for i in range(uint64(count)):
            store_2(coded, at + _2 * i, words[i])
    elif size == 4:
        for i in range(uint64(count)):
            store_4(coded, at + _4 * i, words[i])
    else:
        for i in range(uint64(count)):
            store_word(coded, at + _8 * i, words[i])


@inner
def _read(
    buffer: Array, positions: Array, limit: int, group: Group, symbols: Array, longest: int, table: Array,
    words: Array, entries: Array, plane: int, coded: Array, size: int,
) -> int:  # fmt: skip
    fill_table(table, longest, BY_CODE, symbols)
    widest = int64(0)
    for symbol in range(symbols.shape[0]):
        if symbols[symbol].length >= 0:
            widest = max(widest, total_bits(symbols, symbol))
    width, count = group.plane, group.count
    for done in range(0, count, PLACED):
        taken = min(count - done, PLACED)
        if _take(buffer, positions, limit, widest, table, words, entries, taken):
            return 1
        _place(words, entries, taken, buffer, plane + width * done, width, coded, size, group.start + done)
    return 0


@spliced
def read_dense(
    buffer: Array, positions: Array, limit: int, group: Group, symbols: Array, longest: int, work: Array, plane: int,
    coded: Array, size: int,
) -> int:  # fmt: skip
    """Decode a group of numbers of at most 32 bits. Return 0, or 1 if a stream ends too early.

    The scratch `work` (uint64) has room for a table and twice `PLACED`.
    """
    codes = int64(1) << longest
    if group.top <= _SHORT_TOP and group.top + 8 * group.plane <= _SHORT_ALL:
        halves = work.view(np.int32)
        return _read(
            buffer, positions, limit, group, symbols, longest, halves[:codes], halves[codes : codes + PLACED],
            halves[codes + PLACED :], plane, coded, size,
        )  # fmt: skip
    wholes = work.view(np.int64)
    return _read(
        buffer, positions, limit, group, symbols, longest, wholes[:codes], wholes[codes : codes + PLACED],
        wholes[codes + PLACED :], plane, coded, size,
    )  # fmt: skip
