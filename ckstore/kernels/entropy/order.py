"""Context order: elements stably sorted by class, so that similar elements become neighbours, and back."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.directory import CLASSES
from ckstore.kernels.entropy.words import Array, clear, int64, uint64

# Not a plain integer: numba would compile callees again for every literal.
_VALUES = int64(256)


@kernel
def group_classes(classes: Array, cursors: Array, groups: Array) -> int:
    """Begin the table of groups, one per class that occurs, and find the place of its first element.

    Parameters
    ----------
    classes : (n,) uint8
    cursors : (256,) int64
        Filled with the place in coded order of the first element of a class.
    groups : (CLASSES,) GROUP
        `label`, `start` and `count` are filled in.

    Returns
    -------
    int
        The number of groups, or -1 if a class is out of range.
    """
    clear(cursors, cursors.size)
    for i in range(uint64(classes.size)):
        cursors[classes[i]] += 1
    number = 0
    place = int64(0)
    for group_class in range(256):
        count = cursors[group_class]
        cursors[group_class] = place
        if count:
            if group_class >= CLASSES:
                return -1
            groups[number].label = group_class
            groups[number].start = place
            groups[number].count = count
            number += 1
        place += count
    return number


@kernel
def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; move the cursors of `group_classes`."""
    for i in range(uint64(classes.size)):
        place = cursors[classes[i]]
        coded[uint64(place)] = values[i]
        cursors[classes[i]] = place + 1


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
    cursors = np.zeros(_VALUES, np.int64)
    ends = np.zeros(_VALUES, np.int64)
    for index in range(number):
        cursors[groups[index].label] = groups[index].start
        ends[groups[index].label] = groups[index].start + groups[index].count
    for i in range(uint64(classes.size)):
        place = cursors[classes[i]]
        cursors[classes[i]] = place + 1
        # With wrong counts a cursor runs beyond the last element.
        values[i] = coded[uint64(min(place, coded.size - 1))]
    wrong = int64(0)
    for kind in range(_VALUES):
        wrong |= int64(cursors[kind] != ends[kind])
    return wrong
