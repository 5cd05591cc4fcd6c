"""The encoder's input from elements in coded order: facts about groups, numbers to be coded, zero runs.

Only these kernels read the elements in their own width. Planning and writing work on numbers and runs of 64 bits, and
symbols of 16.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.payload_directory import DENSE, EQUAL, SPARSE
from ckstore.kernels.entropy.words import (
    MASKED,
    Array,
    Group,
    bit_length,
    first_bit,
    inner,
    int32,
    int64,
    non_zeros,
    spliced,
    store_2,
    store_4,
    uint64,
)

DENSE_BELOW = 0.1
"""Share of zeros up to which only symbols of single elements are tried."""
SPARSE_ABOVE = 0.5
"""Share of zeros from which only joint symbols of runs and values are tried."""
PLANED_FROM = 1024
"""Minimal number of elements of a group that may have a plane."""
SAMPLE_BLOCK = 32

_SAMPLE_SHARE = 16
_SAMPLE_LEAST, _SAMPLE_MOST = 1024, 4096


@spliced
def _survey(coded: Array, start: int, count: int) -> tuple[int, int, bool]:
    """Return (non-zeros, bits of the largest element without its sign, whether all elements are equal) of a group."""
    # In the elements' own width and in blocks whose count fits 32 bits, so that the compiler vectorises the loop.
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
    return present, bit_length(uint64(union)), different == 0


@inner
def sample_size(group: Group) -> int:
    """Return the number of elements that `survey_groups` samples, a multiple of `SAMPLE_BLOCK`; 0 without planes."""
    count = group.count
    if group.kind != DENSE or group.top < 7 or count < PLANED_FROM or count - group.pairs > DENSE_BELOW * count:
        return 0
    taken = min(max(count // _SAMPLE_SHARE, _SAMPLE_LEAST), _SAMPLE_MOST)
    return int64(taken // SAMPLE_BLOCK * SAMPLE_BLOCK)


@kernel
def survey_groups(coded: Array, groups: Array, number: int, numbers: Array) -> int:
    """Fill `pairs` (the non-zeros), `top`, `kind` and `paired` of the first `number` groups, by their place and size.

    A dense group may still turn out sparse. `coded` is of int8 to int64; `constant` is filled for groups of equal
    elements. Evenly spaced blocks of groups that may have planes are written into `numbers` (int64), at the group's
    first element.

    Returns the bits of the largest element without its sign.
    """
    largest = int64(0)
    for index in range(number):
        group = groups[index]
        start = group.start
        count = group.count
        present, top, equal = _survey(coded, start, count)
        largest = max(largest, top)
        group.pairs = present
        group.top = top
        group.paired = 0
        group.plane = 0
        if equal:
            group.kind = EQUAL
            group.constant = coded[start]
        elif count - present >= SPARSE_ABOVE * count:
            group.kind = SPARSE
            group.paired = 1
        else:
            group.kind = DENSE
            blocks = sample_size(group) // SAMPLE_BLOCK
            for block in range(blocks):
                first = uint64(start + block * (count - SAMPLE_BLOCK) // blocks)
                place = uint64(start + SAMPLE_BLOCK * block)
                for i in range(uint64(SAMPLE_BLOCK)):
                    numbers[place + i] = coded[first + i]
    return largest


@kernel
def take_numbers(coded: Array, groups: Array, number: int, symbols: Array, numbers: Array, planes: Array) -> None:
    """Split the elements of dense groups: planes one after the other into `planes` (uint8), the other bits elsewhere.

    If `exact` is set, the other bits become symbols (uint16), counted from the smallest number on; else they are
    written into `numbers` (int64). Both have the elements' places.
    """
    at = int64(0)
    for index in range(number):
        group = groups[index]
        if group.kind != DENSE:
            continue
        first = uint64(group.start)
        count = uint64(group.count)
        width = group.plane
        low = at
        if width == 1:
            for i in range(count):
                planes[uint64(at) + i] = np.uint8(coded[first + i])
        elif width == 2:
            for i in range(count):
                store_2(planes, uint64(at) + uint64(2) * i, int64(coded[first + i]))
        elif width == 4:
            for i in range(count):
                store_4(planes, uint64(at) + uint64(4) * i, int64(coded[first + i]))
        at = low + width * group.count
        shift = 8 * width
        if group.exact:
            least = int64(1) << group.top
            if coded.itemsize <= 4 and shift < 32:
                for i in range(first, first + count):
                    symbols[i] = np.uint16(int32(int32(coded[i]) >> int32(shift)) + int32(least))
            else:
                for i in range(first, first + count):
                    symbols[i] = np.uint16((int64(coded[i]) >> shift) + least)
        else:
            for i in range(first, first + count):
                numbers[i] = int64(coded[i]) >> shift


@kernel
def extract_pairs(coded: Array, groups: Array, number: int, runs: Array, values: Array) -> None:
    """Write the zero run before every non-zero, and its value (both int64), of the groups that are `paired`.

    Fills `first_pair`.
    """
    pair = uint64(0)
    for index in range(number):
        group = groups[index]
        if not group.paired:
            continue
        group.first_pair = pair
        since = group.start
        end = group.start + group.count
        for at in range(since, end, MASKED):
            if at + MASKED <= end:
                mask = non_zeros(coded, at)
            else:
                mask = uint64(0)
                for i in range(end - at):
                    mask |= uint64(coded[at + i] != 0) << uint64(i)
            while mask:
                place = at + first_bit(mask)
                mask &= mask - uint64(1)
                runs[pair] = place - since
                values[pair] = coded[uint64(place)]
                pair += uint64(1)
                since = place + 1
