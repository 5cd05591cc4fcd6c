"""The directory of a payload: its groups, their bins and code lengths.

A table of forty code lengths must not cost more than a few bytes in a chunk of six hundred bytes. So all but planes and
streams are coded by one adaptive binary coder. As there, the same functions write and read.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bins import SYMBOLS
from ckstore.kernels.entropy.coder import MODE, code_bit, code_raw, code_tree, finish_writing, start_coder
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.words import Array, Word, bit_length, counted, inner, int64, uint64

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

# Contexts. Not plain integers: numba would compile callees again for every literal.
_KIND = int64(0)
_PRESENT = _KIND + 4
_NUMBER = _PRESENT + 2
_TOP = _NUMBER + 3 * 128
_SPLIT = _TOP + 2 * 64
_SINGLE = _SPLIT + 2 * 16
_ZERO = _SINGLE + 2
_SAME = _ZERO + 8
_SIGN = _SAME + 6
_MORE = _SIGN + 6
_PLANE = _MORE + 2 * 16
_OCCURS = _PLANE + 4
CONTEXTS = int(_OCCURS) + 4

_0, _1, _2, _6, _7 = int64(0), int64(1), int64(2), int64(6), int64(7)


@inner
def code_number(coder: Array, buffer: Array, odds: Array, which: int, value: Word) -> Word:
    """Code an unsigned word: bit length in a tree of contexts, then raw bits."""
    octave = code_tree(coder, buffer, odds, _NUMBER + 128 * which, _7, bit_length(value))
    if octave > 64:
        return uint64(0)
    if octave < 2:
        return uint64(octave)
    top = uint64(1) << uint64(octave - 1)
    return top | code_raw(coder, buffer, octave - 1, value)


@counted
def code_bins(
    coder: Array, buffer: Array, odds: Array, which: int, top: int, bins: int, lowers: Array, raws: Array
) -> tuple[int, int]:
    """Code `top` and a table of `bins` bins, by their least numbers (int64) and raw bits (uint8).

    Returns (top, bins); 0 bins for an impossible table.
    """
    top = code_tree(coder, buffer, odds, _TOP + 64 * which, _6, top)
    # Remaining nodes of 2^j numbers, the last one first.
    nodes = np.empty(2 * 64 + 2, np.int64)
    nodes[0] = top
    nodes[1] = top
    left = 2
    lower = int64(-1) << top
    found = int64(0)
    leaves = 0
    occurs = int64(0)
    before = top
    while left:
        left -= 1
        node = nodes[left]
        inside = split = _0
        if coder[MODE] and found < bins:
            inside = int64(uint64(lowers[found] - lower) < uint64(1) << uint64(node))
            split = inside & int64(raws[found] < node)
        context = _SPLIT + 16 * which + min(max(node - before, -2), 13) + 2
        if node and code_bit(coder, buffer, odds, context, split):
            nodes[left] = node - 1
            nodes[left + 1] = node - 1
            left += 2
            continue
        occurs = code_bit(coder, buffer, odds, _OCCURS + 2 * which + occurs, inside)
        if occurs:
            if found == raws.size:
                return top, _0
            lowers[found] = lower
            raws[found] = node
            found += 1
        leaves += 1
        if leaves > 4 * SYMBOLS:
            return top, _0
        before = node
        lower += int64(1) << node
    return top, found


@inner
def code_lengths(coder: Array, buffer: Array, odds: Array, lengths: Array, symbols: int, stride: int) -> int:
    """Code the lengths of an alphabet; of a product alphabet in rows of `stride` above 1. Return 0 or 1."""
    joint = int64(stride > 1)
    last = int64(6)
    turn = int64(0)
    for symbol in range(symbols):
        left = int64(0)
        above = int64(0)
        corner = int64(0)
        column = symbol % stride if joint else symbol
        if column:
            left = int64(lengths[symbol - 1])
        if joint and symbol >= stride:
            above = int64(lengths[symbol - stride])
            if column:
                corner = int64(lengths[symbol - stride - 1])
        near = 2 * int64(left > 0) + int64(above > 0)
        if not code_bit(coder, buffer, odds, _ZERO + 4 * joint + near, int64(lengths[symbol] > 0)):
            lengths[symbol] = 0
            continue
        guess = last
        if left and above and corner:
            guess = left + above - corner
        elif left:
            guess = left
        elif above:
            guess = above + 1
        guess = min(max(guess, 1), LONGEST)
        difference = int64(lengths[symbol]) - guess
        if code_bit(coder, buffer, odds, _SAME + 3 * joint + turn, int64(difference != 0)):
            negative = code_bit(coder, buffer, odds, _SIGN + 3 * joint + turn, int64(difference < 0))
            size = abs(difference)
            steps = int64(1)
            while steps < 12 and code_bit(coder, buffer, odds, _MORE + 16 * joint + steps, int64(size > steps)):
                steps += 1
            difference = -steps if negative else steps
            turn = 1 + negative
        else:
            difference = _0
            turn = _0
        length = guess + difference
        if length < 1 or length > LONGEST:
            return 1
        lengths[symbol] = length
        last = length
    return 0


@kernel
def code_directory(
    coder: Array, buffer: Array, odds: Array, writes: bool, grouped: bool, count: int, groups: Array, lowers: Array,
    raws: Array, lengths: Array,
) -> tuple[int, int]:  # fmt: skip
    """Write or read the directory.

    Parameters
    ----------
    coder, buffer, odds
        State of the coder (int64, 5), its bytes, its contexts (int32, CONTEXTS x 2).
    writes : bool
        Whether to write into `buffer`, or to read from it.
    grouped : bool
        Whether elements have classes; if not, there is one group of `count` elements.
    groups : GROUP, (CLASSES,)
        The groups in the order of their classes. Reading fills the columns that the directory holds.
    lowers, raws : int64, uint8, (CLASSES, TABLE)
        Smallest numbers and raw bits of the bins of values, followed by those of runs.
    lengths : uint8, (CLASSES, SYMBOLS)
        Code lengths.

    Returns (number of groups, bytes written); -1 groups for an impossible directory.
    """
    start_coder(coder, buffer, odds, int64(writes))
    number = 0
    start = 0
    before = 0
    for group_class in range(CLASSES if grouped else min(count, 1)):
        if grouped:
            here = int64(groups[number].label == group_class and groups[number].count > 0) if writes else 0
            before = code_bit(coder, buffer, odds, _PRESENT + before, here)
            if not before:
                continue
        group = groups[number]
        size = int64(code_number(coder, buffer, odds, _0, uint64(group.count))) if grouped else count
        if size < 0 or size > count - start:
            return -1, 0
        group.label = group_class
        group.start = start
        group.count = size
        start += size
        kind = code_tree(coder, buffer, odds, _KIND, _2, group.kind)
        group.kind = kind
        if not writes:
            group.plane = 0
        if kind == EQUAL:
            zigzag = uint64((group.constant << 1) ^ (group.constant >> 63))
            zigzag = code_number(coder, buffer, odds, _2, zigzag)
            group.constant = int64(zigzag >> uint64(1)) ^ -int64(zigzag & uint64(1))
            number += 1
            continue
        if kind > EQUAL:
            return -1, 0
        if kind == SPARSE:
            group.pairs = int64(code_number(coder, buffer, odds, _1, uint64(group.pairs)))
            if group.pairs < 0 or group.pairs > size:
                return -1, 0
        if kind == DENSE:
            group.plane = (1 << code_tree(coder, buffer, odds, _PLANE, _2, bit_length(uint64(group.plane)))) >> 1
        group.top, bins = code_bins(coder, buffer, odds, _0, group.top, group.bins, lowers[number], raws[number])
        stride = int64(1)
        if bins > 0 and kind == SPARSE:
            group.run_top, stride = code_bins(
                coder, buffer, odds, _1, group.run_top, group.run_bins, lowers[number, bins:], raws[number, bins:]
            )
        if bins < 1 or stride < 1 or bins * stride > SYMBOLS:
            return -1, 0
        group.bins = bins
        group.run_bins = stride
        if code_bit(coder, buffer, odds, _SINGLE, int64(group.single >= 0)):
            group.single = int64(code_raw(coder, buffer, int64(12), uint64(group.single)))
            if group.single >= bins * stride:
                return -1, 0
        else:
            group.single = -1
            if code_lengths(coder, buffer, odds, lengths[number], bins * stride, stride):
                return -1, 0
        number += 1
    if start != count:
        return -1, 0
    return number, finish_writing(coder, buffer) if writes else 0
