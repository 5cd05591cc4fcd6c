"""Patches: the elements of a chunk that differ from another's, and their differences.

`ckstore.codecs.patches` has the format. Elements are passed as bytes, so that one compilation serves elements of every
width. A payload may be damaged: every place is checked against the chunk, and every load against the payload's end.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import (
    MASKED,
    Array,
    Word,
    bit_length,
    differing_bytes,
    first_bit,
    inlined,
    inner,
    int64,
    load_2,
    load_4,
    load_word,
    low_bits,
    store_1,
    store_element,
    store_word,
    uint64,
)

BLOCK = int64(64)
"""Numbers of one width."""
PADDING = int64(8)
"""Bytes after the last number that a load may touch."""
_LOADED = int64(57)
"""Maximal bits of a number that one load always holds."""
_LONG = int64(128)
"""Flag of a block's width if it has longer numbers."""
_SHIFTS = int64(31)
"""Maximal low bits of a Rice code."""
_LONGER = int64(16)
"""Extra bits of a number that is longer than its block's width, and half of those of a block with such numbers."""
_LONGEST = int64(56)
"""Bits from which a varint is damaged."""
_0, _1, _3, _7, _63 = uint64(0), uint64(1), uint64(3), uint64(7), uint64(63)


@inlined
def _element(array: Array, size: int, at: int) -> Word:
    if size == 4:
        return load_4(array, at << 2)
    if size == 2:
        return load_2(array, at << 1)
    if size == 1:
        return uint64(array[at])
    return load_word(array, at << 3)


@inlined
def _ordinal(bits: Word, top: Word, is_float: bool) -> Word:
    """Return the order-preserving integer of a float's bits, where `top` is their number less one; keep other bits."""
    if not is_float:
        return bits
    return bits ^ ((_0 - (bits >> top)) | (_1 << top))


@inlined
def _bits_of(ordinal: Word, top: Word, is_float: bool) -> Word:
    """Invert `_ordinal`; bits above `top` are undefined in both."""
    if not is_float:
        return ordinal
    return ordinal ^ ((((ordinal >> top) & _1) - _1) | (_1 << top))


@kernel
def find_changes(after: Array, before: Array, size: int, is_float: bool, places: Array, numbers: Array) -> int:
    """List the elements that differ.

    Parameters
    ----------
    after, before : uint8, (size n,)
        Elements of `size` bytes.
    is_float
        Whether they are floats, which are compared by ordinals.
    places : int32, (n,)
        Filled with the elements' numbers.
    numbers : uint64, (n,)
        Filled with their differences modulo the width, as sign and magnitude less one: 0, 1, 2, 3 for -1, 1, -2, 2.

    Returns their number.
    """
    count = int64(0)
    top = uint64(8 * size - 1)
    unused = _63 - top
    whole = low_bits(uint64(0) - _1, size)
    for first in range(0, after.size, MASKED):
        if after.size - first >= MASKED:
            different = differing_bytes(after, before, first)
        else:
            different = _0
            for i in range(first, after.size):
                different |= uint64(after[i] != before[i]) << uint64(i - first)
        while different:
            byte = first_bit(different) // size * size
            different &= ~(whole << uint64(byte))
            i = (first + byte) // size
            now, then = _element(after, size, i), _element(before, size, i)
            difference = (_ordinal(now, top, is_float) - _ordinal(then, top, is_float)) << unused
            sign = _0 - (difference >> _63)
            numbers[count] = (((((difference ^ sign) - sign) >> unused) - _1) << _1) | (sign & _1 ^ _1)
            places[count] = i
            count += 1
    return count


@inner
def _write_varint(payload: Array, at: int, value: int) -> int:
    while value > 127:
        store_1(payload, at, (value & 127) | 128)
        value >>= 7
        at += 1
    store_1(payload, at, value)
    return at + 1


@inner
def _write_runs(places: Array, count: int, payload: Array, at: int) -> int:
    """Write the places of elements that are mostly adjacent; return the next byte."""
    end = int64(0)
    first = int64(0)
    while first < count:
        last = first + 1
        while last < count and places[last] == places[last - 1] + 1:
            last += 1
        at = _write_varint(payload, at, places[first] - end)
        at = _write_varint(payload, at, last - first - 1)
        end = int64(places[last - 1]) + 1
        first = last
    return at


@inlined
def _put(payload: Array, bit: int, value: Word, bits: int) -> int:
    """Write a number of at most 57 bits, and zeros up to a whole word; return the next bit."""
    before = low_bits(uint64(payload[bit >> 3]), bit & 7)
    store_word(payload, bit >> 3, int64(before | (value << uint64(bit & 7))))
    return bit + bits


@inlined
def _apart(places: Array, i: int) -> int:
    """Return the number of elements between the changed element `i` and the one before."""
    return int64(places[i]) - (int64(places[i - 1]) + 1 if i else int64(0))


@inner
def _rice_bits(places: Array, first: int, last: int, shift: int) -> int:
    """Return the bits of the distances between elements as Rice codes with `shift` low bits."""
    bits = int64(0)
    for i in range(first, last):
        bits += (_apart(places, i) >> shift) + 1 + shift
    return bits


@inner
def _best_shift(places: Array, first: int, last: int) -> int:
    """Return the number of low bits of the shortest Rice codes."""
    total = int64(places[last - 1]) + 1 - (int64(places[first - 1]) + 1 if first else int64(0)) - (last - first)
    guess = bit_length(uint64(total // (last - first)))
    best, least = int64(0), int64(1) << 62
    for shift in range(max(guess - 2, int64(0)), guess + 1):
        bits = _rice_bits(places, first, last, shift)
        if bits < least:
            best, least = shift, bits
    return best


@kernel
def write_patch(places: Array, numbers: Array, count: int, payload: Array) -> int:
    """Write a patch of `count` changes after its checksum; return the next byte.

    `payload` (uint8) has room for 19 bytes a change and 96 more.
    """
    # The size of the runs is known only after writing them: write them at a place that always fits, then move them.
    begin = int64(32)
    runs = int64(1)
    for i in range(1, count):
        runs += places[i] != places[i - 1] + 1
    is_scattered = 2 * runs > count
    span = int64(0) if is_scattered else _write_runs(places, count, payload, begin) - begin
    at = _write_varint(payload, _write_varint(payload, int64(4), count), span)
    for i in range(span):
        payload[at + i] = payload[begin + i]
    at += span
    lengths = np.zeros(65, np.int64)
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        at = _write_block(numbers, first, last, lengths, places, is_scattered, payload, at)
    store_word(payload, at, 0)
    return at + PADDING


@inner
def _write_block(
    numbers: Array,
    first: int,
    last: int,
    lengths: Array,
    places: Array,
    is_scattered: bool,
    payload: Array,
    at: int,
) -> int:
    """Write numbers of one width, the places of scattered elements, and the high bits of longer numbers.

    Return the next byte.
    """
    longest = int64(0)
    for i in range(first, last):
        length = bit_length(numbers[i])
        lengths[length] += 1
        longest = max(longest, length)
    width = longest
    least = width * (last - first)
    longer = more = int64(0)
    for shorter in range(longest - 1, max(longest - 9, int64(-1)), -1):
        more += lengths[shorter + 1]
        bits = shorter * (last - first) + _LONGER * more + (_LONGER >> 1)
        if bits < least:
            width, least, longer = shorter, bits, more
    for i in range(longest + 1):
        lengths[i] = 0
    store_1(payload, at, width | (_LONG if longer else int64(0)))
    at += 1
    shift = int64(0)
    if is_scattered:
        shift = _best_shift(places, first, last)
        store_1(payload, at, shift)
        at += 1
    if longer:
        store_1(payload, at, longer)
        at += 1
    bit = at << 3
    for i in range(first, last):
        number = numbers[i]
        if width > 32:
            bit = _put(payload, bit, low_bits(number, int64(32)), int64(32))
            bit = _put(payload, bit, low_bits(number >> uint64(32), width - 32), width - 32)
        else:
            bit = _put(payload, bit, low_bits(number, width), width)
    if is_scattered:
        for i in range(first, last):
            bit = _put(payload, bit, low_bits(uint64(_apart(places, i)), shift), shift)
        for i in range(first, last):
            zeros = _apart(places, i) >> shift
            while zeros > 56:
                bit = _put(payload, bit, _0, int64(56))
                zeros -= 56
            bit = _put(payload, bit, _1 << uint64(zeros), zeros + 1)
    at = (bit + 7) >> 3
    for i in range(first, last):
        high = numbers[i] >> uint64(width) if longer else _0
        if high:
            store_1(payload, at, i - first)
            store_1(payload, at + 1, int64(high))
            at += 2
    return at


@inlined
def _read_varint(payload: Array, at: int, end: int) -> tuple[int, int]:
    """Return (value, next place), with place -1 if no varint ends before `end`."""
    value = int64(0)
    shift = int64(0)
    while at < end and shift < _LONGEST:
        byte = int64(payload[at])
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    return int64(0), int64(-1)


@inlined
def _add_high_bits(payload: Array, bit: int, end: int, count: int, shift: int, apart: Array) -> int:
    """Add numbers in unary, zeros before a one, to those of `shift` low bits; return the next bit, -1 without ones."""
    i = int64(0)
    begin = bit
    while i < count:
        if bit >> 3 > end:
            return int64(-1)
        word = load_word(payload, bit >> 3) >> uint64(bit & 7)
        if word == _0:
            bit += _LOADED
            continue
        while word and i < count:
            one = bit + first_bit(word)
            apart[i] |= (one - begin) << shift
            begin = one + 1
            word &= word - _1
            i += 1
        bit = begin
    return bit


@inner
def _read_block(
    payload: Array, at: int, end: int, count: int, most: int, numbers: Array, is_scattered: bool, apart: Array
) -> int:
    """Read `count` differences of at most `most` bits, and the numbers of elements before each if it is scattered.

    Return the next byte, -1 if the block is damaged.
    """
    if at >= end:
        return int64(-1)
    width, longer, shift = int64(payload[at]), int64(0), int64(0)
    at += 1
    if is_scattered:
        shift = int64(payload[at])
        at += 1
    if width & _LONG:
        longer = int64(payload[at])
        at += 1
    width &= _LONG - 1
    bit = at << 3
    if width > most or shift > _SHIFTS or longer > count or (bit + count * width) >> 3 > end:
        return int64(-1)
    mask = uint64(0) - _1 if width == 64 else low_bits(uint64(0) - _1, width)
    if width <= _LOADED:
        for i in range(count):
            numbers[i] = (load_word(payload, bit >> 3) >> uint64(bit & 7)) & mask
            bit += width
    else:
        for i in range(count):
            place, skipped = bit >> 3, uint64(bit & 7)
            word = (load_word(payload, place) >> skipped) | ((uint64(payload[place + 8]) << _1) << (_63 - skipped))
            numbers[i] = word & mask
            bit += width
    if is_scattered:
        if (bit + count * shift) >> 3 > end:
            return int64(-1)
        for i in range(count):
            apart[i] = int64(low_bits(load_word(payload, bit >> 3) >> uint64(bit & 7), shift))
            bit += shift
        bit = _add_high_bits(payload, bit, end, count, shift, apart)
        if bit < 0:
            return int64(-1)
    behind = (bit + 7) >> 3
    if behind + 2 * longer > end:
        return int64(-1)
    for _ in range(longer):
        index = int64(payload[behind])
        if index >= count or width > 63:
            return int64(-1)
        numbers[index] |= uint64(payload[behind + 1]) << uint64(width)
        behind += 2
    for i in range(BLOCK):
        sign = (numbers[i] & _1) - _1
        numbers[i] = (((numbers[i] >> _1) + _1) ^ sign) - sign
    return behind


@inlined
def _change(bits: Array, size: int, is_float: bool, element: int, differences: Array, taken: int, many: int) -> None:
    """Add differences to the ordinals of adjacent elements."""
    top = uint64(8 * size - 1)
    for i in range(many):
        value = _ordinal(_element(bits, size, element + i), top, is_float) + differences[taken + i]
        store_element(bits, size, element + i, int64(_bits_of(value, top, is_float)))


@kernel
def apply_patch(payload: Array, bits: Array, size: int, is_float: bool) -> int:
    """Apply a patch to its elements in place; return 0, or 1 if the patch does not fit the chunk.

    Parameters
    ----------
    payload : uint8
        The patch, whose checksum was verified.
    bits : uint8, (size n,)
        The elements that the patch was made against; damaged if 1 is returned.
    size, is_float
        As for `find_changes`.
    """
    end = payload.size - PADDING
    elements = bits.size // size
    count, at = _read_varint(payload, int64(4), end)
    if at < 0 or count < 1:
        return 1
    span, at = _read_varint(payload, at, end)
    if at < 0 or span > end - at:
        return 1
    places = at + span
    block = places
    differences = np.zeros(BLOCK, np.uint64)
    distances = np.zeros(BLOCK, np.int64)
    taken = BLOCK
    element = int64(0)
    while span == 0 and count > 0:
        many = min(BLOCK, count)
        block = _read_block(payload, block, end, many, 8 * size, differences, True, distances)
        if block < 0:
            return 1
        for i in range(many):
            element += distances[i]
            if distances[i] < 0 or element < 0 or element >= elements:
                return 1
            _change(bits, size, is_float, element, differences, i, int64(1))
            element += 1
        count -= many
    while count > 0:
        apart, at = _read_varint(payload, at, places)
        if at < 0:
            return 1
        length, at = _read_varint(payload, at, places)
        element += apart
        length += 1
        if at < 0 or length > elements - element or length > count:
            return 1
        last = element + length
        while element < last:
            if taken == BLOCK:
                block = _read_block(payload, block, end, min(BLOCK, count), 8 * size, differences, False, distances)
                if block < 0:
                    return 1
                taken = int64(0)
            many = min(BLOCK - taken, last - element)
            if size == 4:
                _change(bits, int64(4), is_float, element, differences, taken, many)
            else:
                _change(bits, size, is_float, element, differences, taken, many)
            element += many
            taken += many
            count -= many
    return int64(at != places or block != end)
