"""Reading the tokens of dense groups, one for each element, in the fastest way that their codes allow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckstore.kernels.entropy.bytes import load_2, load_4, store_1, store_2, store_4, store_8, store_element
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.read_numbers import AHEAD, TURN, read_ahead, read_evens, read_singles, read_wholes
from ckstore.kernels.entropy.read_strings import BLOCK, STRIDE, read_strings, weave
from ckstore.kernels.entropy.tables import (
    BY_CODE,
    BYTE,
    LENGTH,
    LOOK,
    NUMBER,
    ONE,
    RAW,
    SYMBOL,
    fill_strings,
    fill_table,
    resolves,
    total_bits,
)
from ckstore.kernels.entropy.words import Array, Word, inlined, inner, int64, load_word, read_bits, spliced, uint64

PLACED = 4096
"""Numbers that are read before they are placed."""
_FEW, _SEVERAL, _MANY = 1024, 8192, 1 << 15
"""Elements from which a table is worth its making.

Of whole numbers of equal length; of others, and of strings of up to four; of strings of up to two, and of the largest.
"""
_LOOK = int64(LOOK)
_TINY = 4 << LONGEST
"""Bits of a number, times 2^12, below which strings of four are faster than those of two."""
_SHORT = 7 << LONGEST
"""Bits of a number, times 2^12, below which a table of strings is faster than one number by each look."""
_LARGE = 1 << LONGEST >> 6
_UNRESOLVED = 1 << LONGEST >> 8
"""Share of numbers, times 2^12, up to which what a table does not resolve costs little time."""
_TURN_BITS = 4 * (LONGEST + 32)
"""Most bits that a turn of numbers takes from a stream."""
_1, _2, _4, _7, _8 = uint64(1), uint64(2), uint64(4), uint64(7), uint64(8)
_15, _31, _32, _255 = uint64(15), uint64(31), uint64(32), uint64(255)


@inlined
def _joined(number: Word, shift: Word, low: Word) -> Word:
    """Integer of the zigzag number number << (shift + 1) | low; no bit moves right across the elements' width."""
    return uint64(int64((number << shift) | (low >> _1)) ^ -int64(low & _1))


@inlined
def _whole(number: Word) -> Word:
    """The same where there is no plane."""
    return uint64(int64(number >> _1) ^ -int64(number & _1))


def _placer(size: int, store: Callable[[Array, Word, Word], None]) -> Callable[..., None]:
    """What writes elements of `size` bytes."""
    step = uint64(size)

    @spliced
    def place(numbers: Array, count: int, buffer: Array, plane: int, width: int, coded: Array, start: int) -> None:
        first = uint64(size * start)
        low = uint64(plane)
        if width == 0:
            for i in range(uint64(count)):
                store(coded, first + step * i, _whole(uint64(numbers[i])))
        elif width == 1:
            for i in range(uint64(count)):
                store(coded, first + step * i, _joined(uint64(numbers[i]), _7, uint64(buffer[low + i])))
        elif width == 2:
            for i in range(uint64(count)):
                store(coded, first + step * i, _joined(uint64(numbers[i]), _15, load_2(buffer, low + _2 * i)))
        else:
            for i in range(uint64(count)):
                store(coded, first + step * i, _joined(uint64(numbers[i]), _31, load_4(buffer, low + _4 * i)))

    return place


_place_1, _place_2, _place_4, _place_8 = (
    _placer(1, store_1),
    _placer(2, store_2),
    _placer(4, store_4),
    _placer(8, store_8),
)


@inner
def place_numbers(
    numbers: Array, count: int, buffer: Array, plane: int, width: int, coded: Array, size: int, start: int
) -> None:
    """Write the integers of zigzag numbers, whose low `width` bytes stand in a plane from byte `plane` on.

    They are the elements of `size` bytes from `start` on of `coded`, which is given as bytes.
    """
    if size == 1:
        _place_1(numbers, count, buffer, plane, width, coded, start)
    elif size == 2:
        _place_2(numbers, count, buffer, plane, width, coded, start)
    elif size == 4:
        _place_4(numbers, count, buffer, plane, width, coded, start)
    else:
        _place_8(numbers, count, buffer, plane, width, coded, start)


@inner
def _place_one(number: Word, buffer: Array, plane: int, width: int, coded: Array, size: int, at: int) -> None:
    value = _whole(number)
    if width:
        shift = uint64(8 * width)
        value = _joined(number, shift - _1, load_4(buffer, uint64(plane)) & ((_1 << shift) - _1))
    store_element(coded, size, uint64(at), value)


@inner
def _read_wide(
    buffer: Array,
    positions: Array,
    limit: int,
    table: Array,
    symbols: Array,
    plane: int,
    width: int,
    coded: Array,
    size: int,
    start: int,
    count: int,
) -> int:
    """Read elements of any width one by one, by a table of symbols. Returns 0, or 1 where a stream ends too early."""
    for i in range(count):
        position = positions[i & 3]
        if position > limit:
            return 1
        entry = table[(load_word(buffer, position >> 3) >> uint64(position & 7)) & uint64(table.size - 1)]
        symbol = entry >> _8
        position += int64(entry & _255)
        number = uint64(symbols[symbol, NUMBER]) | read_bits(buffer, position, limit, symbols[symbol, RAW])
        positions[i & 3] = position + symbols[symbol, RAW]
        _place_one(number, buffer, plane + width * i, width, coded, size, start + i)
    return 0


@inner
def _read_numbers(
    buffer: Array,
    positions: Array,
    limit: int,
    widest: int,
    bits: int,
    even: bool,
    table: Array,
    narrow: Array,
    singles: Array,
    numbers: Array,
    count: int,
) -> int:
    """Read `count` numbers below 2^32, of at most `widest` bits. Returns 0, or 1 where a stream ends too early.

    `bits` is what the table of whole numbers is looked up by (`table` where all are of so many bits, else `narrow`),
    or 0 where there is none.
    """
    done = int64(0)
    while done < count:
        turns = (count - done) // TURN if bits else int64(0)
        rows = (count - done) >> 2
        for stream in range(4):
            if positions[stream] > limit:
                return 1
            turns = min(turns, (limit - positions[stream]) // _TURN_BITS)
            # The last number may end beyond the limit: only its load must not begin there.
            rows = min(rows, (limit - positions[stream]) // max(widest, 1) + 1)
        if turns:
            if even:
                left = read_evens(turns, bits, buffer, positions, table, numbers, done)
            else:
                left = read_wholes(turns, bits, buffer, positions, narrow, numbers, done)
            done += TURN * (turns - left)
            if left:
                read_singles(TURN, buffer, positions, singles, numbers, done)
                done += TURN
        elif rows and widest <= AHEAD:
            read_ahead(rows, buffer, positions, singles, numbers, done)
            done += 4 * rows
        else:
            size = 4 * rows if rows else count - done
            read_singles(size, buffer, positions, singles, numbers, done)
            done += size
    return 0


@inner
def _survey(symbols: Array, bits: int) -> tuple[int, int, int, int, int]:
    """What the codes of a group say about its numbers.

    Returns bits of a number on average; share of those that `bits` bits do not resolve or that are not below 256;
    share of those that `LOOK` bits do not resolve (all times 2^12); least and most bits.
    """
    mean, large, unresolved = int64(0), int64(0), int64(0)
    least, most = int64(128), int64(0)
    for symbol in range(symbols.shape[0]):
        length = symbols[symbol, LENGTH]
        if length >= 0:
            share = (1 << LONGEST) >> length
            total = total_bits(symbols, symbol)
            mean += share * total
            unresolved += share if total > LOOK else 0
            large += 0 if resolves(symbols, symbol, bits, BYTE) else share
            least = min(least, total)
            most = max(most, total)
    return mean, large, unresolved, least, most


@spliced
def read_dense(
    buffer: Array,
    positions: Array,
    limit: int,
    top: int,
    symbols: Array,
    longest: int,
    singles: Array,
    table: Array,
    strings: Array,
    scratch: Array,
    numbers: Array,
    plane: int,
    width: int,
    coded: Array,
    size: int,
    start: int,
    count: int,
) -> int:
    """Read a group of tokens. Returns 0, or 1 where a stream ends too early."""
    singles = singles[: 1 << longest]
    if top > 32:
        fill_table(singles, longest, SYMBOL, symbols)
        return _read_wide(buffer, positions, limit, singles, symbols, plane, width, coded, size, start, count)
    fill_table(singles, longest, BY_CODE, symbols)
    narrow = table.view(np.uint32)
    bits = _LOOK if count >= _MANY else _LOOK - 2
    mean, large, unresolved, least, most = _survey(symbols, bits)
    even = least == most and most <= LONGEST
    tiny = mean <= _TINY
    done = int64(0)
    if count >= (_SEVERAL if tiny else _MANY) and large <= _LARGE and 0 < mean < _SHORT and (tiny or not even):
        twos = narrow
        if tiny:
            bits = min(bits, int64(LONGEST))
            twos = narrow[:0]
            fill_strings(table, bits, symbols, strings)
        else:
            fill_strings(narrow, bits, symbols, strings)
        while done + 4 <= count:
            rows = min((count - done) >> 2, BLOCK)
            listed = read_strings(buffer, positions, limit, bits, twos, table, singles, scratch, strings, rows)
            if listed < 0:
                return 1
            for first in range(0, rows, PLACED // 4):
                taken = min(rows - first, PLACED // 4)
                weave(scratch, first, taken, numbers)
                at = done + 4 * first
                place_numbers(numbers, 4 * taken, buffer, plane + width * at, width, coded, size, start + at)
            for k in range(listed):
                place = int64(strings[k] >> _32)
                at = done + 4 * (place % STRIDE) + place // STRIDE
                number = strings[k] & uint64(0xFFFFFFFF)
                _place_one(number, buffer, plane + width * at, width, coded, size, start + at)
            done += 4 * rows
    bits = min(most, _LOOK)
    if unresolved > _UNRESOLVED or count - done < (_FEW if even else _SEVERAL):
        bits = int64(0)
    if bits and even:
        fill_table(table, bits, ONE, symbols)
    elif bits:
        fill_table(narrow, bits, ONE, symbols)
    while done < count:
        taken = min(count - done, PLACED)
        if _read_numbers(buffer, positions, limit, most, bits, even, table, narrow, singles, numbers, taken):
            return 1
        place_numbers(numbers, taken, buffer, plane + width * done, width, coded, size, start + done)
        done += taken
    return 0
