"""The adaptive binary arithmetic coder of a payload's directory: carry-less, 32 bits, 16-bit chances with counts.

The same functions write and read: with `coder[MODE]` at 1 they code the value they are given and return it, at 0 they
return what they decode. A reader takes zeros beyond the end of its bytes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import Array, Word, inlined, inner, int64, uint64

LOW, REACH, OFFSET, POSITION, MODE = range(5)
"""Entries of a coder's state (int64).

The interval is from LOW to LOW + REACH, both included; the code that is read is LOW + OFFSET.
"""

SLOWEST = int64(255)
"""Most decisions that a chance remembers."""
LEAST = int64(48)
"""Smallest chance of 65536, of either decision."""
_SHARES: Array = np.array([65536 // (seen + 2) for seen in range(256)])

State = tuple[int, int, int, int]
"""(low, reach, offset, position) of the coder."""


@inlined
def step(state: State, mode: int, buffer: Array, odds: Array, context: int, bit: int) -> tuple[State, int]:
    """Code one binary decision under the adaptive odds of `context`.

    The state is a tuple, which stays in registers. Returns the state and the decision.
    """
    # An unsigned index: a signed one makes the compiler join both loads, which then wait for both stores.
    place = uint64(context)
    chance = int64(odds[place, 0])
    seen = int64(odds[place, 1])
    state, bit = _split(state, mode, buffer, (state[1] * chance) >> 16, bit)
    chance += (((bit << 16) - chance) * int64(_SHARES[uint64(seen)])) >> 16
    odds[place, 0] = min(max(chance, LEAST), 65536 - LEAST)
    odds[place, 1] = min(seen + 1, SLOWEST)
    return state, bit


@inlined
def _split(state: State, mode: int, buffer: Array, middle: int, bit: int) -> tuple[State, int]:
    """Code one decision: 1 for offsets up to `middle`."""
    low, reach, offset, position = state
    if not mode:
        bit = int64(offset <= middle)
    above = 0 if bit else middle + 1
    return _shift(low + above, middle if bit else reach - above, offset - above, position, mode, buffer), bit


@inlined
def step_even(state: State, mode: int, buffer: Array, bit: int) -> tuple[State, int]:
    """Code one binary decision evenly."""
    return _split(state, mode, buffer, state[1] >> 1, bit)


@inlined
def _shift(low: int, reach: int, offset: int, position: int, mode: int, buffer: Array) -> State:
    """Move the bytes that both ends of the interval share out of the state."""
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
    return low, reach, offset, position


@inlined
def step_raw(state: State, mode: int, buffer: Array, bits: int, value: Word) -> tuple[State, Word]:
    """Code the low `bits` bits of a word evenly, highest first: eight at a time where the interval is wide enough."""
    result = uint64(0)
    left = bits
    while left:
        low, reach, offset, position = state
        if reach >= 1 << 24:
            part = min(left, 8)
            left -= part
            unit = reach >> part
            last = (1 << part) - 1
            piece = int64(value >> uint64(left)) & last
            if not mode:
                piece = min(int64(uint64(offset) // uint64(unit)), last)
            result = (result << uint64(part)) | uint64(piece)
            above = unit * piece
            reach = unit - 1 if piece < last else reach - above
            state = _shift(low + above, reach, offset - above, position, mode, buffer)
        else:
            left -= 1
            state, bit = step_even(state, mode, buffer, int64(value >> uint64(left)) & 1)
            result = (result << uint64(1)) | uint64(bit)
    return state, result


@inner
def code_bit(coder: Array, buffer: Array, odds: Array, context: int, bit: int) -> int:
    """Code one binary decision under the adaptive odds of `context`."""
    state = (coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION])
    state, bit = step(state, coder[MODE], buffer, odds, context, bit)
    coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION] = state
    return bit


@kernel
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


@kernel
def finish_writing(coder: Array, buffer: Array) -> int:
    """Write the fewest bytes that lie in the last interval; a reader takes zeros beyond the end. Returns the size."""
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


@inner
def code_raw(coder: Array, buffer: Array, bits: int, value: Word) -> Word:
    """Code the low `bits` bits of an unsigned word evenly, highest first."""
    state = (coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION])
    state, result = step_raw(state, coder[MODE], buffer, bits, value)
    coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION] = state
    return result


@inner
def code_tree(coder: Array, buffer: Array, odds: Array, context: int, bits: int, value: int) -> int:
    """Code a number of at most seven bits, each but the seventh under the bits before it."""
    node = int64(1)
    for i in range(bits - 1, -1, -1):
        bit = (value >> i) & 1
        if node < 64:
            bit = code_bit(coder, buffer, odds, context + node, bit)
        else:
            bit = int64(code_raw(coder, buffer, int64(1), uint64(bit)))
        node = 2 * node + bit
    return node - (1 << bits)
