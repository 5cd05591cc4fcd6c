"""The adaptive binary arithmetic coder of a payload's directory: carry-less, 32 bits, 16-bit chances with counts.

The same functions write and read. With `coder[MODE]` at 1 they code the given value and return it; at 0 they return the
decoded value. A reader takes zeros beyond the end of its bytes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy.words import Array, Word, inner, int64, spliced, uint64

LOW, REACH, OFFSET, POSITION, MODE = range(5)
"""Entries of a coder's state (int64).

The interval is from LOW to LOW + REACH, both included; the code of a reader is LOW + OFFSET.
"""

SLOWEST = int64(255)
"""The maximal number of decisions that a chance remembers."""
LEAST = int64(48)
"""Smallest chance of 65536, of either decision."""
_SHARES: Array = np.array([65536 // (seen + 2) for seen in range(256)])


@spliced
def _split(coder: Array, buffer: Array, middle: int, bit: int) -> int:
    """Code one decision: 1 for offsets up to `middle`. Move out the bytes that both ends of the interval share."""
    low, reach, offset, position, mode = coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION], coder[MODE]
    if not mode:
        bit = int64(offset <= middle)
    if bit:
        reach = middle
    else:
        low += middle + 1
        offset -= middle + 1
        reach -= middle + 1
    while (low ^ (low + reach)) < (1 << 24):
        offset = (offset << 8) & 0xFFFFFFFF
        if position < buffer.size:
            if mode:
                buffer[uint64(position)] = low >> 24
            else:
                offset |= int64(buffer[uint64(position)])
        position += 1
        low = (low << 8) & 0xFFFFFFFF
        reach = (reach << 8) | 255
    coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION] = low, reach, offset, position
    return bit


@inner
def code_bit(coder: Array, buffer: Array, odds: Array, context: int, bit: int) -> int:
    """Code one binary decision under the adaptive odds of `context`."""
    place = uint64(context)
    chance = int64(odds[place, 0])
    seen = int64(odds[place, 1])
    bit = _split(coder, buffer, (coder[REACH] * chance) >> 16, bit)
    chance += (((bit << 16) - chance) * int64(_SHARES[uint64(seen)])) >> 16
    odds[place, 0] = min(max(chance, LEAST), 65536 - LEAST)
    odds[place, 1] = min(seen + 1, SLOWEST)
    return bit


@inner
def code_raw(coder: Array, buffer: Array, bits: int, value: Word) -> Word:
    """Code the low `bits` bits of an unsigned word evenly, highest first."""
    result = uint64(0)
    for left in range(bits - 1, -1, -1):
        bit = _split(coder, buffer, coder[REACH] >> 1, int64(value >> uint64(left)) & 1)
        result = (result << uint64(1)) | uint64(bit)
    return result


@inner
def code_tree(coder: Array, buffer: Array, odds: Array, context: int, bits: int, value: int) -> int:
    """Code a number of `bits` bits, each conditioned on the bits before it: 2^bits contexts."""
    node = int64(1)
    for i in range(bits - 1, -1, -1):
        node = 2 * node + code_bit(coder, buffer, odds, context + node, (value >> i) & 1)
    return node - (1 << bits)


@spliced
def start_coder(coder: Array, buffer: Array, odds: Array, mode: int) -> None:
    """Begin to write (mode 1) or to read (mode 0) `buffer`: even odds, whole interval."""
    for context in range(odds.shape[0]):
        odds[context, 0] = 32768
        odds[context, 1] = 0
    coder[LOW] = 0
    coder[REACH] = 0xFFFFFFFF
    coder[OFFSET] = 0
    coder[POSITION] = 0
    coder[MODE] = mode
    if not mode:
        for i in range(4):
            coder[OFFSET] = (coder[OFFSET] << 8) | (int64(buffer[i]) if i < buffer.size else 0)
        coder[POSITION] = 4


@spliced
def finish_writing(coder: Array, buffer: Array) -> int:
    """Write the fewest bytes that lie in the last interval; a reader takes zeros beyond the end. Return the size."""
    position = coder[POSITION]
    for size in range(5):
        unit = 32 - 8 * size
        value = ((coder[LOW] + (1 << unit) - 1) >> unit) << unit
        if value <= coder[LOW] + coder[REACH]:
            for i in range(size):
                if position < buffer.size:
                    buffer[position] = (value >> (24 - 8 * i)) & 255
                position += 1
            break
    while position > 0 and position <= buffer.size and buffer[position - 1] == 0:
        position -= 1
    return position
