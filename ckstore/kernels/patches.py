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

BLOCK = int64(32)
"""Numbers of one width."""
PADDING = int64(8)
"""Bytes after the last number that a load may touch."""
_LOADED = int64(57)
"""Maximal bits of a number that one load always holds."""
_FAR = int64(255)
"""Elements between two that differ, each a byte, from which a varint holds the number of further ones."""
_LONGER = int64(16)
"""Extra bits of a number that is longer than its block's width."""
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


@inner
def _write_elements(places: Array, count: int, payload: Array, at: int) -> int:
    """Write the places of elements that are mostly isolated; return the next byte."""
    end = int64(0)
    for i in range(count):
        apart = int64(places[i]) - end
        store_1(payload, at, min(apart, _FAR))
        at += 1
        if apart >= _FAR:
            at = _write_varint(payload, at, apart - _FAR)
        end = int64(places[i]) + 1
    return at


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
    if 2 * runs > count:
        scattered = int64(1)
        at = _write_elements(places, count, payload, begin)
    else:
        scattered = int64(0)
        at = _write_runs(places, count, payload, begin)
    span = at - begin
    at = _write_varint(payload, _write_varint(payload, int64(4), count), (span << 1) | scattered)
    for i in range(span):
        payload[at + i] = payload[begin + i]
    at += span
    lengths = np.zeros(65, np.int64)
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        at = _write_block(numbers, first, last, lengths, payload, at)
    store_word(payload, at, 0)
    return at + PADDING


@inner
def _write_block(numbers: Array, first: int, last: int, lengths: Array, payload: Array, at: int) -> int:
    """Write numbers of one width, and the high bits of longer numbers; return the next byte."""
    longest = int64(0)
    for i in range(first, last):
        length = bit_length(numbers[i])
        lengths[length] += 1
        longest = max(longest, length)
    width = longest
    least = width * (last - first)
    longer = int64(0)
    for shorter in range(longest - 1, max(longest - 9, int64(-1)), -1):
        longer += lengths[shorter + 1]
        bits = shorter * (last - first) + _LONGER * longer
        if bits < least:
            width, least = shorter, bits
    for i in range(longest + 1):
        lengths[i] = 0
    word = _0
    filled = int64(0)
    place = at + 2
    for i in range(first, last):
        number = low_bits(numbers[i], width) if width < 64 else numbers[i]
        word |= number << uint64(filled)
        filled += width
        if filled >= 64:
            store_word(payload, place, word)
            place += 8
            filled -= 64
            word = (number >> _1) >> uint64(width - filled - 1) if filled else _0
    store_word(payload, place, word)
    place += (filled + 7) >> 3
    store_1(payload, at, width)
    longer = int64(0)
    if width < 64:
        for i in range(first, last):
            high = numbers[i] >> uint64(width)
            if high:
                store_1(payload, place, i - first)
                store_1(payload, place + 1, int64(high))
                place += 2
                longer += 1
    store_1(payload, at + 1, longer)
    return place


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


@inner
def _read_block(payload: Array, at: int, end: int, count: int, most: int, numbers: Array) -> int:
    """Read `count` differences of at most `most` bits; return the next byte, -1 if they are damaged."""
    if at + 2 > end:
        return int64(-1)
    width, longer = int64(payload[at]), int64(payload[at + 1])
    bit = (at + 2) << 3
    behind = (bit + count * width + 7) >> 3
    if width > most or longer > count or behind + 2 * longer > end:
        return int64(-1)
    mask = uint64(0) - _1 if width == 64 else low_bits(uint64(0) - _1, width)
    if width <= _LOADED:
        for i in range(count):
            numbers[i] = (load_word(payload, bit >> 3) >> uint64(bit & 7)) & mask
            bit += width
    else:
        for i in range(count):
            place, shift = bit >> 3, uint64(bit & 7)
            word = (load_word(payload, place) >> shift) | ((uint64(payload[place + 8]) << _1) << (_63 - shift))
            numbers[i] = word & mask
            bit += width
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
    scattered = span & 1
    span >>= 1
    if at < 0 or span > end - at:
        return 1
    places = at + span
    block = places
    differences = np.zeros(BLOCK, np.uint64)
    taken = BLOCK
    element = int64(0)
    while scattered and count > 0:
        many = min(BLOCK, count)
        block = _read_block(payload, block, end, many, 8 * size, differences)
        if block < 0:
            return 1
        for i in range(many):
            if at >= places:
                return 1
            apart = int64(payload[at])
            at += 1
            if apart == _FAR:
                more, at = _read_varint(payload, at, places)
                if at < 0:
                    return 1
                apart += more
            element += apart
            if element >= elements:
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
                block = _read_block(payload, block, end, min(BLOCK, count), 8 * size, differences)
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
