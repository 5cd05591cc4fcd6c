"""Context order: elements stably sorted by class, so that elements that behave alike become neighbours, and back.

The elements are taken in four quarters at once, each with cursors of its own: one cursor's next value waits for the
last one, four do not wait for each other.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_words import Array, kernel

CLASSES = 64
"""Number of classes."""

QUARTERS = 4
"""Stretches that are sorted side by side; the last one takes what is left over."""


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
    wide = np.zeros((QUARTERS, 256), np.int64)
    quarter = classes.size // QUARTERS
    for i in range(quarter):
        wide[0, classes[i]] += 1
        wide[1, classes[quarter + i]] += 1
        wide[2, classes[2 * quarter + i]] += 1
        wide[3, classes[3 * quarter + i]] += 1
    for i in range(4 * quarter, classes.size):
        wide[3, classes[i]] += 1
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
def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; moves the cursors of `class_counts`."""
    quarter = classes.size // QUARTERS
    for i in range(quarter):
        for part in range(QUARTERS):
            at = part * quarter + i
            coded[cursors[part, classes[at]]] = values[at]
            cursors[part, classes[at]] += 1
    for at in range(QUARTERS * quarter, classes.size):
        coded[cursors[3, classes[at]]] = values[at]
        cursors[3, classes[at]] += 1


@kernel
def to_natural_order(coded: Array, classes: Array, cursors: Array, values: Array) -> None:
    """Undo `to_coded_order`; moves the cursors of `class_counts`."""
    quarter = classes.size // QUARTERS
    for i in range(quarter):
        for part in range(QUARTERS):
            at = part * quarter + i
            values[at] = coded[cursors[part, classes[at]]]
            cursors[part, classes[at]] += 1
    for at in range(QUARTERS * quarter, classes.size):
        values[at] = coded[cursors[3, classes[at]]]
        cursors[3, classes[at]] += 1
