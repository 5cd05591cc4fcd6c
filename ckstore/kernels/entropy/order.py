"""Context order: elements stably sorted by class, so that similar elements become neighbours, and back.

Four quarters of the elements are processed at once, each with its own cursors: a cursor's next value waits for its last
one, but four cursors do not wait for each other.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.directory import CLASSES
from ckstore.kernels.entropy.words import Array, clear, int64, spliced, uint64

QUARTERS = 4
"""Stretches that are sorted in parallel; the last one also takes the rest."""

# Not plain integers: numba would compile callees again for every literal.
_QUARTERS, _VALUES = int64(QUARTERS), int64(256)


@kernel
def group_classes(classes: Array, cursors: Array, groups: Array) -> int:
    """Begin the table of groups, one per class that occurs, and find the place of each quarter's first element.

    Parameters
    ----------
    classes : (n,) uint8
    cursors : (4, 256) int64
        Filled with the place in coded order of each quarter's first element of a class.
    groups : (CLASSES,) GROUP
        `label`, `start` and `count` are filled in.

    Returns
    -------
    int
        The number of groups, or -1 if a class is out of range.
    """
    clear(cursors.reshape(-1), cursors.size)
    quarter = classes.size // QUARTERS
    c0, c1, c2, c3 = cursors[0], cursors[1], cursors[2], cursors[3]
    s1, s2, s3 = classes[quarter:], classes[2 * quarter :], classes[3 * quarter :]
    for i in range(uint64(quarter)):
        c0[classes[i]] += 1
        c1[s1[i]] += 1
        c2[s2[i]] += 1
        c3[s3[i]] += 1
    for i in range(uint64(quarter), uint64(s3.size)):
        c3[s3[i]] += 1
    number = 0
    place = int64(0)
    for group_class in range(256):
        first = place
        for part in range(QUARTERS):
            count = cursors[part, group_class]
            cursors[part, group_class] = place
            place += count
        if place != first:
            if group_class >= CLASSES:
                return -1
            groups[number].label = group_class
            groups[number].start = first
            groups[number].count = place - first
            number += 1
    return number


@spliced
def _put(value: int, group_class: int, cursors: Array, coded: Array) -> None:
    place = cursors[group_class]
    coded[uint64(place)] = value
    cursors[group_class] = place + 1


@kernel
def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; move the cursors of `group_classes`."""
    quarter = classes.size // QUARTERS
    c0, c1, c2, c3 = cursors[0], cursors[1], cursors[2], cursors[3]
    s1, s2, s3 = classes[quarter:], classes[2 * quarter :], classes[3 * quarter :]
    v1, v2, v3 = values[quarter:], values[2 * quarter :], values[3 * quarter :]
    for i in range(uint64(quarter)):
        _put(values[i], classes[i], c0, coded)
        _put(v1[i], s1[i], c1, coded)
        _put(v2[i], s2[i], c2, coded)
        _put(v3[i], s3[i], c3, coded)
    for i in range(uint64(quarter), uint64(s3.size)):
        _put(v3[i], s3[i], c3, coded)


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
        0, or 1 if the number of elements of a class differs from `groups`.
    """
    fronts = np.empty(_VALUES, np.int64)
    backs = np.empty(_VALUES, np.int64)
    for kind in range(_VALUES):
        fronts[kind] = margin
        backs[kind] = margin
    for index in range(number):
        fronts[groups[index].label] = margin + groups[index].start
        backs[groups[index].label] = margin + groups[index].start + groups[index].count
    # Each class is read from both ends: the two cursors do not wait for each other, and meet if the counts are right.
    # If not, they run into the margins at worst.
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
    wrong = int64(0)
    for kind in range(_VALUES):
        wrong |= int64(fronts[kind] != backs[kind])
    return wrong
