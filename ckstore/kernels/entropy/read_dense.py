"""Decode the symbols of dense groups, one per element, in the faster of two ways.

Numbers of few bits are decoded as strings of up to three by one table lookup. The four streams are decoded in parallel
into separate buffers, each at its own pace, and interleaved into elements afterwards. In a block all streams reach the
same number of elements; the last ones are decoded one by one. Other numbers are decoded one per lookup, in the order of
the elements.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.tables import BY_CODE, LOOK, fill_strings, fill_table, total_bits
from ckstore.kernels.entropy.words import (
    Array,
    Word,
    bit_length,
    counted,
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
BLOCK = 8192
"""Numbers of each stream that are decoded as strings at a time."""
STRIDE = BLOCK + 8
"""Places of a stream: four of them are written at once, whatever the number."""
_AHEAD = 28
"""Maximal bits of a number whose next load need not wait for its length: twice that and 7 fit a word."""
_SEVERAL = 4096
"""Minimal number of elements that repays the making of a table of strings."""
_SHORT = 7 << LONGEST
"""Bits of a number, times 2^12, below which strings are faster than one number per lookup."""
_SMALL = 15
"""Bits of a number without its sign that fit a string."""
_TURN_BITS = 4 * LOOK + LONGEST + _SMALL + 16
"""Maximal bits that a turn of strings takes from a stream: four lookups, and one number more."""
_TURN = 4 * 3 + 1
"""Maximal numbers of a turn."""
_LOOK, _4 = int64(LOOK), int64(4)
_1, _2, _3, _7, _8, _63, _64, _255 = (
    uint64(1),
    uint64(2),
    uint64(3),
    uint64(7),
    uint64(8),
    uint64(63),
    uint64(64),
    uint64(255),
)
_LAST = uint64(1 << 63)


@inlined
def next_bits(buffer: Array, position: Word) -> Word:
    """Return the next 57 bits of a stream. Bit 63 is set, so that its later place shows the number of bits taken."""
    return (load_word(buffer, position >> _3) >> (position & _7)) | _LAST


@inlined
def bits_taken(word: Word) -> Word:
    """Return the number of bits that were shifted out of a word of `next_bits`."""
    return uint64(64 - bit_length(word))


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
def _read_ahead(turns: int, buffer: Array, positions: Array, table: Array, numbers: Array, first: int) -> None:
    """Take turns of four numbers of at most `_AHEAD` bits by a `BY_CODE` table."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    w0 = load_word(buffer, p0 >> _3) >> (p0 & _7)
    w1 = load_word(buffer, p1 >> _3) >> (p1 & _7)
    w2 = load_word(buffer, p2 >> _3) >> (p2 & _7)
    w3 = load_word(buffer, p3 >> _3) >> (p3 & _7)
    mask = uint64(table.size - 1)
    for at in range(uint64(first), uint64(first + 4 * turns), uint64(4)):
        w0, p0 = _ahead(buffer, w0, p0, table, mask, numbers, at)
        w1, p1 = _ahead(buffer, w1, p1, table, mask, numbers, at + _1)
        w2, p2 = _ahead(buffer, w2, p2, table, mask, numbers, at + _2)
        w3, p3 = _ahead(buffer, w3, p3, table, mask, numbers, at + _3)
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3


@inner
def _read_singles(
    buffer: Array, positions: Array, limit: int, widest: int, table: Array, numbers: Array, count: int
) -> int:
    """Decode `count` numbers of at most 43 bits. Return 0, or 1 if a stream ends too early."""
    done = int64(0)
    if widest <= _AHEAD:
        rows = count >> 2
        for stream in range(4):
            # The last number may end beyond the limit: only its load must not begin there.
            rows = min(rows, (limit - positions[stream]) // max(widest, 1) + 1 if positions[stream] <= limit else 0)
        _read_ahead(rows, buffer, positions, table, numbers, int64(0))
        done = 4 * rows
    for i in range(done, count):
        if positions[i & 3] > limit:
            return 1
        numbers[i], positions[i & 3] = _take_one(buffer, uint64(positions[i & 3]), table)
    return 0


@inlined
def _look(word: Word, at: Word, table: Array, scratch: Array) -> tuple[Word, Word, Word]:
    """Take the numbers that one lookup resolves. Return (word, end of the stream's numbers, entry)."""
    entry = table[word & uint64((1 << LOOK) - 1)]
    store_word(scratch, at << _1, entry >> uint64(16))
    return word >> (entry & _63), at + ((entry >> _8) & _3), entry


@inner
def _take_turns(
    turns: int, buffer: Array, positions: Array, ends: Array, table: Array, singles: Array, scratch: Array
) -> None:
    """Take turns of four lookups in every stream; numbers that these do not resolve are taken one by one."""
    p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
    a0, a1, a2, a3 = uint64(ends[0]), uint64(ends[1]), uint64(ends[2]), uint64(ends[3])
    e0 = e1 = e2 = e3 = uint64(0)
    for _ in range(turns):
        w0 = next_bits(buffer, p0)
        w1 = next_bits(buffer, p1)
        w2 = next_bits(buffer, p2)
        w3 = next_bits(buffer, p3)
        for _ in range(4):
            w0, a0, e0 = _look(w0, a0, table, scratch)
            w1, a1, e1 = _look(w1, a1, table, scratch)
            w2, a2, e2 = _look(w2, a2, table, scratch)
            w3, a3, e3 = _look(w3, a3, table, scratch)
        p0 += bits_taken(w0)
        p1 += bits_taken(w1)
        p2 += bits_taken(w2)
        p3 += bits_taken(w3)
        # An unresolved entry takes no bits, so the last lookup finds it again.
        if (e0 | e1 | e2 | e3) & _64:
            if e0 & _64:
                scratch[a0], p0 = _take_one(buffer, p0, singles)
                a0 += _1
            if e1 & _64:
                scratch[a1], p1 = _take_one(buffer, p1, singles)
                a1 += _1
            if e2 & _64:
                scratch[a2], p2 = _take_one(buffer, p2, singles)
                a2 += _1
            if e3 & _64:
                scratch[a3], p3 = _take_one(buffer, p3, singles)
                a3 += _1
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    ends[0], ends[1], ends[2], ends[3] = a0, a1, a2, a3


@counted
def _read_strings(
    buffer: Array, positions: Array, limit: int, table: Array, singles: Array, scratch: Array, count: int
) -> int:
    """Decode `count` numbers of every stream into its part of `scratch`. Return 1 if a stream ends too early."""
    ends = np.empty(_4, np.int64)
    for stream in range(4):
        ends[stream] = stream * STRIDE
    turns = int64(1)
    while turns > 0:
        turns = int64(BLOCK)
        for stream in range(4):
            turns = min(turns, (stream * STRIDE + count - ends[stream]) // _TURN)
            turns = min(turns, (limit - positions[stream]) // _TURN_BITS)
        if turns > 0:
            _take_turns(turns, buffer, positions, ends, table, singles, scratch)
    for stream in range(4):
        for at in range(ends[stream], stream * STRIDE + count):
            if positions[stream] > limit:
                return 1
            scratch[at], positions[stream] = _take_one(buffer, uint64(positions[stream]), singles)
    return 0


@inner
def _weave(scratch: Array, first: int, count: int, numbers: Array) -> None:
    """Interleave `count` numbers of each stream, from number `first` on, into the order of the elements (int64)."""
    s0 = scratch[first:]
    s1 = scratch[first + STRIDE :]
    s2 = scratch[first + 2 * STRIDE :]
    s3 = scratch[first + 3 * STRIDE :]
    for i in range(uint64(count)):
        numbers[uint64(4) * i] = s0[i]
        numbers[uint64(4) * i + _1] = s1[i]
        numbers[uint64(4) * i + _2] = s2[i]
        numbers[uint64(4) * i + _3] = s3[i]


@inner
def place_numbers(
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
    buffer: Array, positions: Array, limit: int, top: int, symbols: Array, longest: int, singles: Array, table: Array,
    scratch: Array, numbers: Array, plane: int, width: int, coded: Array, size: int, start: int, count: int,
) -> int:  # fmt: skip
    """Decode a group of numbers of at most 32 bits. Return 0, or 1 if a stream ends too early."""
    fill_table(singles, longest, BY_CODE, symbols)
    mean = int64(0)
    least, widest = int64(64), int64(0)
    for symbol in range(symbols.shape[0]):
        if symbols[symbol].length >= 0:
            total = total_bits(symbols, symbol)
            mean += total << (LONGEST - symbols[symbol].length)
            least = min(least, total)
            widest = max(widest, total)
    done = int64(0)
    if count >= _SEVERAL and top <= _SMALL and mean < _SHORT and least > 0:
        fill_strings(table, _LOOK, singles)
        while done + 4 <= count:
            rows = min((count - done) >> 2, BLOCK)
            if _read_strings(buffer, positions, limit, table, singles, scratch, rows):
                return 1
            for first in range(0, rows, PLACED // 4):
                taken = min(rows - first, PLACED // 4)
                _weave(scratch, first, taken, numbers)
                at = done + 4 * first
                place_numbers(numbers, 4 * taken, buffer, plane + width * at, width, coded, size, start + at)
            done += 4 * rows
    while done < count:
        taken = min(count - done, PLACED)
        if _read_singles(buffer, positions, limit, widest, singles, numbers, taken):
            return 1
        place_numbers(numbers, taken, buffer, plane + width * done, width, coded, size, start + done)
        done += taken
    return 0
