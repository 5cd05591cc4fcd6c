"""What the encoder takes from elements in coded order: facts about groups, numbers to be coded, zero runs.

These kernels alone see the elements in their own width; what plans and writes them sees zigzag numbers of 16 bits
(*numbers*; of 64 bits where they are larger: *wide* ones) and pairs of a zero run and a value.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bytes import store_2
from ckstore.kernels.entropy.directory import (
    ADAPTIVE,
    CONSTANT,
    COUNT,
    DENSE,
    EQUAL,
    FIRST_PAIR,
    FORM,
    KIND,
    OCTAVES,
    PAIRED,
    PAIRS,
    PLANE,
    SPARSE,
    START,
    WIDE,
)
from ckstore.kernels.entropy.masks import MASKED, first_bit, non_zeros
from ckstore.kernels.entropy.planes import store_plane
from ckstore.kernels.entropy.words import Array, Word, bit_length, inner, int32, int64, spliced, uint64, zigzag

SMALL = 512
"""Groups of at most so many non-zeros go into the directory whatever their density."""
SMALL_SPARSE = 2048
"""The same where at most a quarter is non-zero."""
DENSE_BELOW = 0.1
"""Share of zeros up to which only tokens of single elements are tried."""
SPARSE_ABOVE = 0.5
"""Share of zeros from which only joint tokens of runs and values are tried."""
PLANED_FROM = 1024
"""Elements from which a group may have a plane."""
SAMPLE_BLOCK = 32

_FEW_BESIDE_OTHERS = 64
"""The same for large numbers, which take long there, where there are other groups, which share the streams."""
_SAMPLE_SHARE = 16
_SAMPLE_LEAST, _SAMPLE_MOST = 1024, 16384
_EASY_OCTAVES = 10
"""Bits of numbers up to which a quarter of that is enough."""


@spliced
def _survey(coded: Array, start: int, count: int) -> tuple[int, int, bool]:
    """(non-zeros, bits of the largest zigzag number, whether all elements are equal) of a run of signed integers."""
    # In the elements' own width and in blocks whose count fits 32 bits, so that the compiler uses whole vectors.
    narrow = coded.dtype.type
    first = coded[start]
    union = narrow(0)
    different = narrow(0)
    present = int64(0)
    for block in range(start, start + count, 8192):
        here = int32(0)
        for i in range(uint64(block), uint64(min(block + 8192, start + count))):
            value = coded[i]
            here = int32(here + (value != 0))
            union = narrow(union | (value ^ (value >> 63)))
            different = narrow(different | (value ^ first))
        present += here
    octaves = int64(0)
    if present:
        octaves = bit_length(uint64(union)) + 1
    return present, octaves, different == 0


@inner
def sample_size(group: Array) -> int:
    """Elements of a group that `survey_groups` samples, a multiple of `SAMPLE_BLOCK`; 0 where it can have no plane."""
    count = group[COUNT]
    crowded = count - group[PAIRS] <= DENSE_BELOW * count
    if group[KIND] != DENSE or group[OCTAVES] < 8 or count < PLANED_FROM or not crowded:
        return 0
    most = _SAMPLE_MOST // 4 if group[OCTAVES] <= _EASY_OCTAVES else _SAMPLE_MOST
    taken = min(max(count // _SAMPLE_SHARE, _SAMPLE_LEAST), most)
    return int64(taken // SAMPLE_BLOCK * SAMPLE_BLOCK)


@spliced
def _is_few(present: int, octaves: int, count: int, number: int) -> bool:
    """Whether a group goes into the directory: where it stands there bit by bit, which takes time."""
    if number > 1 and octaves > 8:
        return present < _FEW_BESIDE_OTHERS
    return present <= SMALL or (present <= SMALL_SPARSE and 4 * present <= count)


@kernel
def survey_groups(coded: Array, groups: Array, number: int, wide: Array) -> int:
    """Fill PAIRS (the non-zeros), OCTAVES and KIND of the first `number` groups, whose START and COUNT are set.

    A dense group may yet turn out sparse. `coded` is of int8 to int64; CONSTANT is filled where all are equal. Of
    groups that may have planes, zigzag numbers in evenly spaced blocks are written into `wide` (uint64), where the
    group begins.

    Returns the bits of the largest zigzag number.
    """
    largest = int64(0)
    for index in range(number):
        group = groups[index]
        start = group[START]
        count = group[COUNT]
        present, octaves, equal = _survey(coded, start, count)
        largest = max(largest, octaves)
        group[PAIRS] = present
        group[OCTAVES] = octaves
        if equal:
            group[KIND] = EQUAL
            group[CONSTANT] = int64(zigzag(coded[start]))
        elif _is_few(present, octaves, count, number):
            group[KIND] = ADAPTIVE
            group[PAIRED] = 1
        elif count - present >= SPARSE_ABOVE * count:
            group[KIND] = SPARSE
            group[PAIRED] = 1
        else:
            group[KIND] = DENSE
            taken = sample_size(group)
            blocks = taken // SAMPLE_BLOCK
            for block in range(blocks):
                first = uint64(start + block * (count - SAMPLE_BLOCK) // blocks)
                place = uint64(start + SAMPLE_BLOCK * block)
                for i in range(uint64(SAMPLE_BLOCK)):
                    wide[place + i] = zigzag(coded[first + i])
    return largest


@spliced
def _zigzag_32(value: int) -> Word:
    """A zigzag number of 32 bits, in instructions of 32 bits."""
    return np.uint32(np.uint32(value << 1) ^ np.uint32(value >> 31))


@spliced
def _take_apart(coded: Array, first: Word, count: int, width: int, numbers: Array, planes: Array, at: int) -> None:
    """Take zigzag numbers of at most 32 bits apart: a plane of one or two bytes, and the other bits, at most 16."""
    low = uint64(at)
    if width == 1:
        for i in range(uint64(count)):
            number = _zigzag_32(int32(coded[first + i]))
            planes[low + i] = np.uint8(number)
            numbers[first + i] = np.uint16(number >> np.uint32(8))
    else:
        for i in range(uint64(count)):
            number = _zigzag_32(int32(coded[first + i]))
            store_2(planes, low + uint64(2) * i, uint64(number))
            numbers[first + i] = np.uint16(number >> np.uint32(16))


@kernel
def take_numbers(coded: Array, groups: Array, number: int, numbers: Array, wide: Array, planes: Array) -> None:
    """Take the dense groups apart: planes one after the other into `planes` (uint8), the numbers' other bits elsewhere.

    As FORM says, these go into `numbers` (uint16) or `wide` (uint64), where the elements stand in theirs.
    """
    at = int64(0)
    for index in range(number):
        group = groups[index]
        if group[KIND] != DENSE:
            continue
        first = uint64(group[START])
        end = uint64(group[START] + group[COUNT])
        shift = 8 * group[PLANE]
        if 0 < shift < 32 and group[FORM] != WIDE and group[OCTAVES] <= 32:
            _take_apart(coded, first, group[COUNT], group[PLANE], numbers, planes, at)
            at += group[PLANE] * group[COUNT]
            continue
        if shift:
            store_plane(coded, group[START], group[COUNT], group[PLANE], planes, at)
            at += group[PLANE] * group[COUNT]
        if group[FORM] == WIDE:
            for i in range(first, end):
                wide[i] = zigzag(coded[i]) >> uint64(shift)
        elif group[OCTAVES] <= 16 and not shift:
            # In lanes of 16 bits.
            for i in range(first, end):
                value = np.int16(coded[i])
                numbers[i] = np.uint16(np.uint16(value << 1) ^ np.uint16(value >> 15))
        else:
            for i in range(first, end):
                numbers[i] = np.uint16(zigzag(coded[i]) >> uint64(shift))


@kernel
def extract_pairs(
    coded: Array, groups: Array, number: int, few_runs: Array, few_values: Array, runs: Array, values: Array
) -> None:
    """Write the zero run before every non-zero, and its zigzag number less one, of the groups that are PAIRED.

    Those of adaptive groups go into the first two arrays (uint64), those of others into the last two; fills
    FIRST_PAIR.
    """
    few = int64(0)
    many = int64(0)
    for index in range(number):
        group = groups[index]
        if group[PAIRED] and group[KIND] == ADAPTIVE:
            group[FIRST_PAIR] = few
            _extract(coded, group[START], group[COUNT], few_runs, few_values, few)
            few += group[PAIRS]
        elif group[PAIRED]:
            group[FIRST_PAIR] = many
            _extract(coded, group[START], group[COUNT], runs, values, many)
            many += group[PAIRS]


@spliced
def _extract(coded: Array, start: int, count: int, runs: Array, values: Array, first: int) -> None:
    since = uint64(start)
    pair = uint64(first)
    end = uint64(start + count)
    at = uint64(start)
    while at < end:
        if at + uint64(MASKED) <= end:
            mask = non_zeros(coded, at)
        else:
            mask = uint64(0)
            for i in range(end - at):
                mask |= uint64(coded[at + i] != 0) << i
        while mask:
            place = at + first_bit(mask)
            mask &= mask - uint64(1)
            runs[pair] = place - since
            values[pair] = zigzag(coded[place]) - uint64(1)
            pair += uint64(1)
            since = place + uint64(1)
        at += uint64(MASKED)
