"""The adaptive binary arithmetic coder of a payload's directory: carry-less, 32 bits, 16-bit chances with counts.

The same functions write and read: with `coder[MODE]` at 1 they code the value they are given and return it, at 0 they
return what they decode. A reader takes zeros beyond the end of its bytes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy_words import Array, Word, inlined, inner, int64, uint64

LOW, HIGH, CODE, POSITION, MODE = range(5)
"""Entries of a coder's state (int64)."""

SLOWEST = int64(255)
"""Most decisions that a chance remembers."""
LEAST = int64(48)
"""Smallest chance of 65536, of either decision."""
_SHARES: Array = np.array([65536 // (seen + 2) for seen in range(256)])

State = tuple[int, int, int, int]
"""(low, high, code, position) of the coder."""


@inlined
def step(state: State, mode: int, buffer: Array, odds: Array, context: int, bit: int) -> tuple[State, int]:
    """Code one binary decision under the adaptive odds of `context`.

    The state is (low, high, code, position): a tuple stays in registers. Returns the state and the decision.
    """
    low, high, code, position = state
    # An unsigned index: a signed one makes the compiler join both loads, which then wait for both stores.
    place = uint64(context)
    chance = int64(odds[place, 0])
    seen = int64(odds[place, 1])
    reach = high - low
    middle = low + (reach >> 16) * chance + (((reach & 65535) * chance) >> 16)
    if not mode:
        bit = int64(code <= middle)
    if bit:
        high = middle
    else:
        low = middle + 1
    target = int64(65536) if bit else int64(0)
    chance += ((target - chance) * int64(_SHARES[uint64(seen)])) >> 16
    odds[place, 0] = min(max(chance, LEAST), 65536 - LEAST)
    odds[place, 1] = min(seen + 1, SLOWEST)
    return _shift(low, high, code, position, mode, buffer), bit


@inlined
def step_even(state: State, mode: int, buffer: Array, bit: int) -> tuple[State, int]:
    """Code one binary decision evenly."""
    low, high, code, position = state
    middle = low + ((high - low) >> 1)
    if not mode:
        bit = int64(code <= middle)
    if bit:
        high = middle
    else:
        low = middle + 1
    return _shift(low, high, code, position, mode, buffer), bit


@inlined
def _shift(low: int, high: int, code: int, position: int, mode: int, buffer: Array) -> State:
    """Move the bytes that low and high share out of the state."""
    while (low ^ high) < (1 << 24):
        if mode:
            if position < buffer.size:
                buffer[position] = low >> 24
        else:
            code = (code << 8) & 0xFFFFFFFF
            if position < buffer.size:
                code |= int64(buffer[position])
        position += 1
        low = (low << 8) & 0xFFFFFFFF
        high = ((high << 8) & 0xFFFFFFFF) | 255
    return low, high, code, position


@inner
def step_raw(state: State, mode: int, buffer: Array, bits: int, value: Word) -> tuple[State, Word]:
    """Code the low `bits` bits of a word evenly, highest first: eight at a time where the interval is wide enough."""
    result = uint64(0)
    left = bits
    while left:
        low, high, code, position = state
        if high - low >= 1 << 24:
            part = min(left, 8)
            left -= part
            unit = (high - low) >> part
            last = (1 << part) - 1
            piece = int64(value >> uint64(left)) & last
            if not mode:
                piece = min((code - low) // unit, last)
            result = (result << uint64(part)) | uint64(piece)
            low += unit * piece
            if piece < last:
                high = low + unit - 1
            state = _shift(low, high, code, position, mode, buffer)
        else:
            left -= 1
            state, bit = step_even(state, mode, buffer, int64(value >> uint64(left)) & 1)
            result = (result << uint64(1)) | uint64(bit)
    return state, result


@inner
def code_bit(coder: Array, buffer: Array, odds: Array, context: int, bit: int) -> int:
    """Code one binary decision under the adaptive odds of `context`."""
    state = (coder[LOW], coder[HIGH], coder[CODE], coder[POSITION])
    state, bit = step(state, coder[MODE], buffer, odds, context, bit)
    coder[LOW], coder[HIGH], coder[CODE], coder[POSITION] = state
    return bit


@kernel
def start_coder(coder: Array, buffer: Array, odds: Array, mode: int) -> None:
    """Begin to write (mode 1) or to read (mode 0) `buffer`: even odds, whole interval."""
    for context in range(odds.shape[0]):
        odds[context, 0] = 32768
        odds[context, 1] = 0
    coder[LOW] = 0
    coder[HIGH] = 0xFFFFFFFF
    coder[CODE] = 0
    coder[POSITION] = 0
    coder[MODE] = mode
    if not mode:
        for i in range(4):
            coder[CODE] = (coder[CODE] << 8) | (int64(buffer[i]) if i < buffer.size else 0)
        coder[POSITION] = 4


@kernel
def finish_writing(coder: Array, buffer: Array) -> int:
    """Write the fewest bytes that lie in the last interval; a reader takes zeros beyond the end. Returns the size."""
    position = coder[POSITION]
    for size in range(5):
        unit = 32 - 8 * size
        value = ((coder[LOW] + (1 << unit) - 1) >> unit) << unit
        if value <= coder[HIGH]:
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
    state = (coder[LOW], coder[HIGH], coder[CODE], coder[POSITION])
    state, result = step_raw(state, coder[MODE], buffer, bits, value)
    coder[LOW], coder[HIGH], coder[CODE], coder[POSITION] = state
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
