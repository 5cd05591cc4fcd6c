"""Context order: elements stably sorted by class, so that elements that behave alike become neighbours, and back.

Where few classes have nearly all elements, these are moved in whole vectors, if the processor has what it takes. Else
the elements are taken in four quarters at once, each with cursors of its own: one cursor's next value waits for the
last one, four do not wait for each other.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.directory import CLASS, COLUMNS, COUNT, START
from ckstore.kernels.entropy.masks import MASKED, count_bits, equals, first_bit
from ckstore.kernels.entropy.vectors import BLOCK, compress, expand, sorts_vectors
from ckstore.kernels.entropy.words import Array, Word, int64, load_word, spliced, uint64

CLASSES = 64
"""Number of classes."""

QUARTERS = 4
"""Stretches that are sorted side by side; the last one takes what is left over."""

_BLOCK = 4096
# Not plain integers: numba would compile what takes them once more for every literal.
_QUARTERS, _VALUES = int64(QUARTERS), int64(256)
_EIGHT, _BYTE = uint64(8), uint64(255)
_COMMON = int64(32)
"""Classes of at least 1 / 32 of all elements are common."""
_MOST_BYTES = int64(28)
"""Bytes of one element of each common class up to which vectors are faster."""


@spliced
def _meet(classes: Array, block: int, met: Array, is_met: Array, number: int) -> int:
    """Add the classes of a block that are met for the first time to the `number` met so far. Returns how many are."""
    for at in range(uint64(block), uint64(block + _BLOCK)):
        group_class = classes[at]
        if not is_met[group_class]:
            is_met[group_class] = 1
            met[uint64(number)] = group_class
            number += 1
    return number


@spliced
def _count_equal(classes: Array, block: int, group_class: int) -> int:
    count = int64(0)
    for at in range(uint64(block), uint64(block + _BLOCK), uint64(MASKED)):
        count += count_bits(equals(classes, at, group_class))
    return count


@kernel
def class_counts(classes: Array, counts: Array, cursors: Array) -> int:
    """Count the elements of each class, and find where each quarter's first element of it stands in coded order.

    Parameters
    ----------
    classes : (n,) uint8
    counts : (64,) int64
        Filled in.
    cursors : (4, 64) int64
        Filled in.

    Returns
    -------
    int
        1 where a class is out of range, else 0.
    """
    wide = np.empty((_QUARTERS, _VALUES), np.int64)
    met = np.empty(_VALUES, np.uint8)
    is_met = np.empty(_VALUES, np.uint8)
    for value in range(256):
        is_met[value] = 0
        for part in range(QUARTERS):
            wide[part, value] = 0
    number = int64(0)
    quarter = classes.size // QUARTERS
    for part in range(QUARTERS):
        start = part * quarter
        end = start + quarter if part + 1 < QUARTERS else classes.size
        whole = start + ((end - start) & -_BLOCK)
        for block in range(start, whole, _BLOCK):
            # One class after the other, 64 elements at once, until all elements are accounted for.
            left = int64(_BLOCK)
            i = int64(0)
            while left:
                if i == number:
                    number = _meet(classes, block, met, is_met, number)
                here = _count_equal(classes, block, met[i])
                wide[part, met[i]] += here
                left -= here
                i += 1
        for at in range(uint64(whole), uint64(end)):
            wide[part, classes[at]] += 1
    place = 0
    for group_class in range(256):
        first = place
        for part in range(QUARTERS):
            if group_class < CLASSES:
                cursors[part, group_class] = place
            place += wide[part, group_class]
        if group_class < CLASSES:
            counts[group_class] = place - first
        elif place != first:
            return 1
    return 0


@kernel
def group_classes(counts: Array, groups: Array) -> int:
    """Begin the table of groups (int64, 64 x COLUMNS): one for each class that occurs. Returns their number."""
    for index in range(CLASSES):
        for column in range(COLUMNS):
            groups[index, column] = 0
    number = 0
    start = int64(0)
    for group_class in range(CLASSES):
        count = counts[group_class]
        if count:
            groups[number, CLASS] = group_class
            groups[number, START] = start
            groups[number, COUNT] = count
            start += count
            number += 1
    return number


@spliced
def _put(value: int, group_class: Word, part: int, cursors: Array, coded: Array) -> None:
    place = uint64(cursors[part, group_class])
    coded[place] = value
    cursors[part, group_class] = int64(place + uint64(1))


@spliced
def _common_classes(starts: Array, ends: Array, total: int, size: int, kinds: Array) -> int:
    """Fill in the classes (uint8) that have at least 1 / `_COMMON` of all elements.

    Returns their number; 0 where vectors of elements of `size` bytes would take longer than one after the other.
    """
    number = int64(0)
    covered = int64(0)
    for kind in range(ends.size):
        count = ends[kind] - starts[kind]
        if _COMMON * count >= total:
            kinds[number] = kind
            number += 1
            covered += count
    return number if size * number <= _MOST_BYTES and 8 * covered >= 7 * total else int64(0)


@spliced
def _rest(size: int, at: int) -> Word:
    """A bit for each of the last elements, which make no whole block."""
    return (uint64(1) << uint64(size - at)) - uint64(1)


@spliced
def _compress_all(
    values: Array, classes: Array, kinds: Array, number: int, cursors: Array, ends: Array, coded: Array
) -> None:
    size = int64(classes.size)
    for at in range(0, size, BLOCK):
        if at + BLOCK <= size:
            left = compress(values, classes, at, kinds, number, cursors, ends, coded)
        else:
            left = _rest(size, at)
        while left:
            place = uint64(at) + first_bit(left)
            left &= left - uint64(1)
            kind = classes[place]
            coded[uint64(cursors[kind])] = values[place]
            cursors[kind] += 1


@kernel
def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; moves the cursors of `class_counts`."""
    if sorts_vectors():
        # The first quarter's cursors are those of all elements.
        starts = cursors[0]
        ends = np.empty(CLASSES, np.int64)
        for kind in range(CLASSES - 1):
            ends[kind] = starts[kind + 1]
        ends[CLASSES - 1] = classes.size
        kinds = np.empty(CLASSES, np.uint8)
        number = _common_classes(starts, ends, int64(classes.size), int64(values.itemsize), kinds)
        if number:
            _compress_all(values, classes, kinds, number, starts, ends, coded)
            return
    # Eight classes to a load: loads that a store might have to feed are what this loop spends its time on.
    quarter = classes.size // QUARTERS
    eights = quarter & -8
    for i in range(0, eights, 8):
        for part in range(QUARTERS):
            at = part * quarter + i
            word = load_word(classes, at)
            for k in range(uint64(8)):
                _put(values[uint64(at) + k], word & _BYTE, part, cursors, coded)
                word >>= _EIGHT
    for part in range(QUARTERS):
        for at in range(uint64(part * quarter + eights), uint64((part + 1) * quarter)):
            _put(values[at], uint64(classes[at]), part, cursors, coded)
    for at in range(uint64(QUARTERS * quarter), uint64(classes.size)):
        _put(values[at], uint64(classes[at]), QUARTERS - 1, cursors, coded)


@spliced
def _expand_all(
    values: Array, classes: Array, kinds: Array, number: int, cursors: Array, ends: Array, coded: Array
) -> int:
    wrong = int64(0)
    size = int64(classes.size)
    for at in range(0, size, BLOCK):
        if at + BLOCK <= size:
            left = expand(values, classes, at, kinds, number, cursors, ends, coded)
        else:
            left = _rest(size, at)
        while left:
            place = uint64(at) + first_bit(left)
            left &= left - uint64(1)
            kind = classes[place]
            cursor = cursors[kind]
            # Where a class has more elements than its group, the last one is taken again.
            none = int64(cursor >= ends[kind])
            values[place] = coded[uint64(cursor - none)]
            cursors[kind] = cursor + 1 - none
            wrong |= none
    return wrong


@kernel
def to_natural_order(padded: Array, margin: int, classes: Array, groups: Array, number: int, values: Array) -> int:
    """Undo `to_coded_order`.

    Parameters
    ----------
    padded : (n + 2 margin,)
        The elements in coded order, between margins of at least n / 2 + 1 elements of any content.
    classes : (n,) uint8
    groups, number
        As `code_directory` read them; their counts add up to n.
    values : (n,), of the dtype of `padded`
        Filled in.

    Returns
    -------
    int
        1 where there are not as many elements of each class as `groups` says, else 0.
    """
    fronts = np.empty(_VALUES, np.int64)
    backs = np.empty(_VALUES, np.int64)
    for kind in range(_VALUES):
        fronts[kind] = margin
        backs[kind] = margin
    for index in range(number):
        fronts[groups[index, CLASS]] = margin + groups[index, START]
        backs[groups[index, CLASS]] = margin + groups[index, START] + groups[index, COUNT]
    wrong = int64(0)
    common = int64(0)
    if sorts_vectors():
        kinds = np.empty(_VALUES, np.uint8)
        common = _common_classes(fronts, backs, int64(classes.size), int64(values.itemsize), kinds)
        if common:
            wrong = _expand_all(values, classes, kinds, common, fronts, backs, padded)
    if common == 0:
        # Each class is read from both ends: two cursors do not wait for each other, and they meet where the counts are
        # right. Where not, they run into the margins at worst.
        size = uint64(classes.size)
        one = uint64(1)
        for i in range(size >> one):
            opposite = size - one - i
            front, back = classes[i], classes[opposite]
            first, last = uint64(fronts[front]), uint64(backs[back]) - one
            fronts[front] = first + one
            backs[back] = last
            values[i] = padded[first]
            values[opposite] = padded[last]
        if size & one:
            kind = classes[size >> one]
            values[size >> one] = padded[uint64(fronts[kind])]
            fronts[kind] += 1
        for kind in range(_VALUES):
            wrong |= int64(fronts[kind] != backs[kind])
    return wrong
