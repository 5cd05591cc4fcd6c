"""The directory of a payload: its groups, their bins and code lengths, as plain bits.

The same functions write and read: with `cursor[WRITES]` at 1 they write the given value and return it; at 0 they return
the value read. A reader takes zeros beyond the end of its bytes.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import Array, Word, bit_length, counted, inner, int64, uint64

POSITION, WRITES = range(2)
"""Entries of a cursor (int64): the next bit, and whether to write."""

SYMBOLS = 4096
"""The maximal number of symbols of a group."""
CLASSES = 64
"""The number of classes, and so the maximal number of groups."""

GROUP = np.dtype(
    [
        # Contents of the directory: class, first element, number of elements.
        ("label", np.int64), ("start", np.int64), ("count", np.int64),
        # Its kind, below; the value of all elements; bytes of each element that lie in a plane (0, 1, 2 or 4).
        ("kind", np.int64), ("constant", np.int64), ("plane", np.int64),
        # The number of pairs; bits of the numbers without their sign, and of the zero runs.
        ("pairs", np.int64), ("top", np.int64), ("run_top", np.int64),
        # The number of bins of both, 1 for the runs of a dense group; the only symbol that occurs, or -1.
        ("bins", np.int64), ("run_bins", np.int64), ("single", np.int64),
        # The encoder's plan: bits in the streams, maximal bits of an item, first pair; whether symbols are numbers, and
        # whether pairs are extracted. Before planning, `pairs` holds the non-zeros and `top` the bits of whole
        # elements.
        ("bits", np.int64), ("widest", np.int64), ("first_pair", np.int64), ("exact", np.int64), ("paired", np.int64),
    ]
)  # fmt: skip
"""A group."""

DENSE, SPARSE, EQUAL = range(3)
"""Kinds of groups: a symbol for each element; one for each zero run and the value behind it; one value throughout."""

TABLE = SYMBOLS + 1
"""The maximal number of bins of values and runs together."""
LONGEST_RUN = 44
"""The maximal bits of a zero run: the sum of four does not overflow."""

# Not plain integers: numba would compile callees again for every literal.
_0, _1, _2, _4, _6, _7, _8, _12 = (int64(bits) for bits in (0, 1, 2, 4, 6, 7, 8, 12))


@inner
def code_bits(cursor: Array, buffer: Array, bits: int, value: int) -> int:
    """Code the low `bits` bits of a number, lowest first; `buffer` has zeros where they are written."""
    result = int64(0)
    for i in range(bits):
        place = uint64(cursor[POSITION])
        at, shift = place >> uint64(3), place & uint64(7)
        bit = (value >> i) & 1
        if at < uint64(buffer.size):
            if cursor[WRITES]:
                buffer[at] |= bit << shift
            else:
                bit = (int64(buffer[at]) >> int64(shift)) & 1
        elif not cursor[WRITES]:
            bit = _0
        result |= bit << i
        cursor[POSITION] += 1
    return result


@inner
def code_number(cursor: Array, buffer: Array, value: Word) -> Word:
    """Code an unsigned word: seven bits per byte, lowest first; each byte but the last has bit 7 set."""
    result = uint64(0)
    for shift in range(0, 64, 7):
        left = value >> uint64(shift)
        byte = uint64(
            code_bits(cursor, buffer, _8, int64((left & uint64(127)) | (uint64(left > uint64(127)) << uint64(7))))
        )
        result |= (byte & uint64(127)) << uint64(shift)
        if byte < uint64(128):
            break
    return result


@counted
def code_bins(cursor: Array, buffer: Array, top: int, bins: int, lowers: Array, raws: Array) -> tuple[int, int]:
    """Code `top` and a table of `bins` bins, by their least numbers (int64) and raw bits (uint8).

    Returns (top, bins); 0 bins for an impossible table.
    """
    top = code_bits(cursor, buffer, _6, top)
    # Remaining nodes of 2^j numbers, the last one first.
    nodes = np.empty(2 * 64 + 2, np.int64)
    nodes[0] = top
    nodes[1] = top
    left = 2
    lower = int64(-1) << top
    found = int64(0)
    leaves = 0
    while left:
        left -= 1
        node = nodes[left]
        inside = split = _0
        if cursor[WRITES] and found < bins:
            inside = int64(uint64(lowers[found] - lower) < uint64(1) << uint64(node))
            split = inside & int64(raws[found] < node)
        if node and code_bits(cursor, buffer, _1, split):
            nodes[left] = node - 1
            nodes[left + 1] = node - 1
            left += 2
            continue
        if code_bits(cursor, buffer, _1, inside):
            if found == raws.size:
                return top, _0
            lowers[found] = lower
            raws[found] = node
            found += 1
        leaves += 1
        if leaves > 4 * SYMBOLS:
            return top, _0
        lower += int64(1) << node
    return top, found


@kernel
def code_directory(
    cursor: Array, buffer: Array, grouped: bool, count: int, number: int, groups: Array, lowers: Array, raws: Array,
    lengths: Array,
) -> tuple[int, int]:  # fmt: skip
    """Write or read the directory.

    Parameters
    ----------
    cursor, buffer
        Its first bit, and whether to write (int64, 2); its bytes, zeros to write to.
    grouped : bool
        Whether elements have classes; if not, there is one group of `count` elements.
    number, groups : int; GROUP, (CLASSES,)
        The groups in the order of their classes. Reading fills the columns that the directory holds.
    lowers, raws : int64, uint8, (CLASSES, TABLE)
        Smallest numbers and raw bits of the bins of values, followed by those of runs.
    lengths : uint8, (CLASSES, SYMBOLS)
        Code lengths.

    Returns (number of groups, bytes); -1 groups for an impossible directory.
    """
    number = code_bits(cursor, buffer, _7, number) if grouped else int64(count > 0)
    start = 0
    label = int64(-1)
    for index in range(number):
        if index == CLASSES:
            return -1, 0
        group = groups[index]
        before, label, size = label, _0, count
        if grouped:
            label = code_bits(cursor, buffer, _6, group.label)
            size = int64(code_number(cursor, buffer, uint64(group.count)))
        if label <= before or size < 1 or size > count - start:
            return -1, 0
        group.label = label
        group.start = start
        group.count = size
        start += size
        kind = group.kind = code_bits(cursor, buffer, _2, group.kind)
        if not cursor[WRITES]:
            group.plane = 0
        if kind == EQUAL:
            zigzag = code_number(cursor, buffer, uint64((group.constant << 1) ^ (group.constant >> 63)))
            group.constant = int64(zigzag >> uint64(1)) ^ -int64(zigzag & uint64(1))
            continue
        if kind > EQUAL:
            return -1, 0
        if kind == SPARSE:
            group.pairs = int64(code_number(cursor, buffer, uint64(group.pairs)))
            if group.pairs < 0 or group.pairs > size:
                return -1, 0
        else:
            group.plane = (1 << code_bits(cursor, buffer, _2, bit_length(uint64(group.plane)))) >> 1
        group.top, bins = code_bins(cursor, buffer, group.top, group.bins, lowers[index], raws[index])
        stride = int64(1)
        if bins > 0 and kind == SPARSE:
            group.run_top, stride = code_bins(
                cursor, buffer, group.run_top, group.run_bins, lowers[index, bins:], raws[index, bins:]
            )
        symbols = bins * stride
        if symbols < 1 or symbols > SYMBOLS:
            return -1, 0
        group.bins = bins
        group.run_bins = stride
        if code_bits(cursor, buffer, _1, int64(group.single >= 0)):
            group.single = code_bits(cursor, buffer, _12, group.single)
            if group.single >= symbols:
                return -1, 0
        else:
            group.single = -1
            for symbol in range(symbols):
                lengths[index, symbol] = code_bits(cursor, buffer, _4, int64(lengths[index, symbol]))
    used = (cursor[POSITION] + 7) >> 3
    if start != count or used > buffer.size or (used < buffer.size and not cursor[WRITES]):
        return -1, 0
    return number, used
