"""Context order: elements stably sorted by class, so that similar elements become neighbours, and back.

Four quarters of the elements are sorted at once, each with its own cursors: a cursor's next value waits for its last
one, but four cursors do not wait for each other.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.payload_directory import CLASSES
from ckstore.kernels.entropy.words import Array, clear, int64, spliced, uint64

QUARTERS = 4
"""Stretches that are sorted in parallel; the last one also takes the rest."""

# Not a plain integer: numba would compile callees again for every literal.
_VALUES = int64(256)


@kernel
def group_classes(classes: Array, cursors: Array, groups: Array) -> int:
    """Begin the table of groups, one per class that occurs, and find the place of each quarter's first element.

    Parameters
    ----------
    classes : (n,) uint8
    cursors : (QUARTERS, 256) int64
        Filled with the place in coded order of each quarter's first element of a class.
    groups : (CLASSES,) GROUP
        `label`, `start` and `count` are filled in.

    Returns
    -------
    int
        The number of groups, or -1 if a class is out of range.
    """
    clear(cursors.reshape(-1), cursors.size)
    quarter = uint64(classes.size // QUARTERS)
    for i in range(quarter):
        for part in range(QUARTERS):
            cursors[part, classes[uint64(part) * quarter + i]] += 1
    for i in range(uint64(QUARTERS) * quarter, uint64(classes.size)):
        cursors[QUARTERS - 1, classes[i]] += 1
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
def _put(value: int, group_class: int, cursors: Array, part: int, coded: Array) -> None:
    place = cursors[part, group_class]
    coded[uint64(place)] = value
    cursors[part, group_class] = place + 1


@kernel
def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; move the cursors of `group_classes`."""
    quarter = uint64(classes.size // QUARTERS)
    for i in range(quarter):
        for part in range(QUARTERS):
            k = uint64(part) * quarter + i
            _put(values[k], classes[k], cursors, part, coded)
    for i in range(uint64(QUARTERS) * quarter, uint64(classes.size)):
        _put(values[i], classes[i], cursors, QUARTERS - 1, coded)


@kernel
def to_natural_order(coded: Array, classes: Array, groups: Array, number: int, values: Array) -> int:
    """Undo `to_coded_order`.

    Parameters
    ----------
    coded : (n,)
        The elements in coded order.
    classes : (n,) uint8
    groups, number
        As `code_directory` read them; their counts add up to n.
    values : (n,), of the dtype of `coded`
        Filled in.

    Returns
    -------
    int
        0, or 1 if the number of elements of a class differs from `groups`.
    """
    fronts = np.zeros(_VALUES, np.int64)
    backs = np.zeros(_VALUES, np.int64)
    for index in range(number):
        fronts[groups[index].label] = groups[index].start
        backs[groups[index].label] = groups[index].start + groups[index].count
    # Each class is read from both ends: the two cursors do not wait for each other, and meet if the counts are right.
    # If not, they run beyond the elements.
    size = uint64(classes.size)
    end = int64(size) - 1
    for i in range(size >> uint64(1)):
        opposite = size - uint64(1) - i
        front, back = classes[i], classes[opposite]
        first, last = fronts[front], backs[back] - 1
        fronts[front] = first + 1
        backs[back] = last
        values[i] = coded[uint64(min(first, end))]
        values[opposite] = coded[uint64(max(last, 0))]
    if size & uint64(1):
        middle = size >> uint64(1)
        values[middle] = coded[uint64(min(fronts[classes[middle]], end))]
        fronts[classes[middle]] += 1
    wrong = int64(0)
    for kind in range(_VALUES):
        wrong |= int64(fronts[kind] != backs[kind])
    return wrong
