"""Reading numbers that are mostly below 256 and take few bits: strings of up to four by one look into a table.

The four streams are read side by side into bytes of their own, each at its own pace, and woven into elements
afterwards. In a block all come to the same number of elements, the last ones one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckstore.kernels.entropy.bytes import store_2, store_4
from ckstore.kernels.entropy.read_numbers import bits_taken, next_bits, take_one
from ckstore.kernels.entropy.words import Array, Word, counted, inlined, inner, int64, uint64

BLOCK = 16384
"""Numbers of each stream that are read at a time."""
STRIDE = BLOCK + 32
"""Bytes from one stream's to the next one's: all bytes of an entry are written, whatever their number."""
_4 = int64(4)
LARGE = 4 * BLOCK
"""Room for the numbers above 255 of a block."""
_TURN_BITS = 96
"""Most bits that a turn takes from a stream: four looks of 13 bits, and one number of 12 + 32 bits."""
_1, _2, _3, _8, _61, _63, _64, _255 = (
    uint64(1),
    uint64(2),
    uint64(3),
    uint64(8),
    uint64(61),
    uint64(63),
    uint64(64),
    uint64(255),
)


@inner
def _take_one(
    buffer: Array, position: Word, at: Word, singles: Array, scratch: Array, large: Array, listed: int
) -> tuple[Word, Word, int]:
    """Take one number of a stream. Returns (its position, the end of its bytes, how many large ones are listed)."""
    number, position = take_one(buffer, position, singles)
    scratch[at] = number & _255
    if number > _255:
        large[listed] = (at << uint64(32)) | number
        listed += 1
    return position, at + _1, listed


@inlined
def _look_two(word: Word, at: Word, table: Array, mask: Word, scratch: Array) -> tuple[Word, Word, Word]:
    """Take what one look at a table of uint32 resolves. Returns (word, end of the stream's bytes, entry)."""
    entry = uint64(table[word & mask])
    store_2(scratch, at, entry >> _8)
    return word >> (entry & _63), at + (entry >> uint64(30)), entry


@inlined
def _look_four(word: Word, at: Word, table: Array, mask: Word, scratch: Array) -> tuple[Word, Word, Word]:
    """The same with a table of uint64."""
    entry = table[word & mask]
    store_4(scratch, at, entry >> _8)
    return word >> (entry & _63), at + (entry >> _61), entry


def _turner(look: Callable[..., tuple[Word, Word, Word]]) -> Callable[..., int]:
    """What takes turns of four looks at every stream; numbers that these do not resolve are taken one by one."""

    @inner
    def take(
        turns: int,
        bits: int,
        buffer: Array,
        positions: Array,
        ends: Array,
        table: Array,
        singles: Array,
        scratch: Array,
        large: Array,
        listed: int,
    ) -> int:
        p0, p1, p2, p3 = uint64(positions[0]), uint64(positions[1]), uint64(positions[2]), uint64(positions[3])
        a0, a1, a2, a3 = uint64(ends[0]), uint64(ends[1]), uint64(ends[2]), uint64(ends[3])
        e0 = e1 = e2 = e3 = uint64(0)
        mask = (_1 << uint64(bits)) - _1
        for _ in range(turns):
            w0 = next_bits(buffer, p0)
            w1 = next_bits(buffer, p1)
            w2 = next_bits(buffer, p2)
            w3 = next_bits(buffer, p3)
            for _ in range(4):
                w0, a0, e0 = look(w0, a0, table, mask, scratch)
                w1, a1, e1 = look(w1, a1, table, mask, scratch)
                w2, a2, e2 = look(w2, a2, table, mask, scratch)
                w3, a3, e3 = look(w3, a3, table, mask, scratch)
            p0 += bits_taken(w0)
            p1 += bits_taken(w1)
            p2 += bits_taken(w2)
            p3 += bits_taken(w3)
            # An unresolved entry takes nothing: once met, it is what the last look meets as well.
            if (e0 | e1 | e2 | e3) & _64:
                if e0 & _64:
                    p0, a0, listed = _take_one(buffer, p0, a0, singles, scratch, large, listed)
                if e1 & _64:
                    p1, a1, listed = _take_one(buffer, p1, a1, singles, scratch, large, listed)
                if e2 & _64:
                    p2, a2, listed = _take_one(buffer, p2, a2, singles, scratch, large, listed)
                if e3 & _64:
                    p3, a3, listed = _take_one(buffer, p3, a3, singles, scratch, large, listed)
        positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
        ends[0], ends[1], ends[2], ends[3] = a0, a1, a2, a3
        return listed

    return take


_take_twos = _turner(_look_two)
_take_fours = _turner(_look_four)


@counted
def read_strings(
    buffer: Array,
    positions: Array,
    limit: int,
    bits: int,
    twos: Array,
    fours: Array,
    singles: Array,
    scratch: Array,
    large: Array,
    count: int,
) -> int:
    """Read `count` numbers of every stream, at most `BLOCK`.

    Parameters
    ----------
    twos, fours : uint32, uint64
        Tables of `fill_strings`, looked up by `bits` bits: the first one, or the second if that is empty.
    singles : uint64
        A table of `BY_CODE`.
    scratch : uint8, (4 STRIDE,)
        Filled with the streams' numbers, each from a quarter's beginning on.
    large : uint64, (LARGE,)
        Filled with the numbers above 255, of which `scratch` has the low byte: place there << 32 | number.

    Returns how many numbers `large` lists, or -1 where a stream ends too early.
    """
    # Four looks and one number more.
    most = 9 if twos.size else 17
    ends = np.empty(_4, np.int64)
    for stream in range(4):
        ends[stream] = stream * STRIDE
    listed = int64(0)
    while True:
        turns = int64(BLOCK)
        for stream in range(4):
            turns = min(turns, (stream * STRIDE + count - ends[stream]) // most)
            turns = min(turns, (limit - positions[stream]) // _TURN_BITS)
        if turns <= 0:
            break
        if twos.size:
            listed = _take_twos(turns, bits, buffer, positions, ends, twos, singles, scratch, large, listed)
        else:
            listed = _take_fours(turns, bits, buffer, positions, ends, fours, singles, scratch, large, listed)
    for stream in range(4):
        position, at = uint64(positions[stream]), uint64(ends[stream])
        while at < uint64(stream * STRIDE + count):
            if position > uint64(limit):
                return -1
            position, at, listed = _take_one(buffer, position, at, singles, scratch, large, listed)
        positions[stream] = position
    return listed


@inner
def weave(scratch: Array, first: int, count: int, numbers: Array) -> None:
    """Put `count` numbers of each stream from the `first` on into the order of the elements (uint32)."""
    s0 = scratch[first:]
    s1 = scratch[first + STRIDE :]
    s2 = scratch[first + 2 * STRIDE :]
    s3 = scratch[first + 3 * STRIDE :]
    for i in range(uint64(count)):
        numbers[uint64(4) * i] = s0[i]
        numbers[uint64(4) * i + _1] = s1[i]
        numbers[uint64(4) * i + _2] = s2[i]
        numbers[uint64(4) * i + _3] = s3[i]
