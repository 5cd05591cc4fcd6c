"""Context order: elements stably sorted by class, so that elements that behave alike become neighbours, and back."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_words import Array, kernel

CLASSES = 64
"""Number of classes."""


@kernel
def class_counts(classes: Array, counts: Array) -> int:
    """Count the elements of each class into `counts` (int64, 64). Returns 1 where a class is out of range, else 0."""
    wide = np.zeros((4, 256), np.int64)
    for i in range(0, classes.size - 3, 4):
        wide[0, classes[i]] += 1
        wide[1, classes[i + 1]] += 1
        wide[2, classes[i + 2]] += 1
        wide[3, classes[i + 3]] += 1
    for i in range(classes.size - classes.size % 4, classes.size):
        wide[0, classes[i]] += 1
    for group_class in range(256):
        count = wide[0, group_class] + wide[1, group_class] + wide[2, group_class] + wide[3, group_class]
        if group_class < CLASSES:
            counts[group_class] = count
        elif count:
            return 1
    return 0


@kernel
def to_coded_order(values: Array, classes: Array, counts: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class."""
    cursors = np.zeros(CLASSES, np.int64)
    for group_class in range(1, CLASSES):
        cursors[group_class] = cursors[group_class - 1] + counts[group_class - 1]
    for i in range(values.size):
        group_class = classes[i]
        coded[cursors[group_class]] = values[i]
        cursors[group_class] += 1


@kernel
def to_natural_order(coded: Array, classes: Array, counts: Array, values: Array) -> None:
    """Undo `to_coded_order`."""
    cursors = np.zeros(CLASSES, np.int64)
    for group_class in range(1, CLASSES):
        cursors[group_class] = cursors[group_class - 1] + counts[group_class - 1]
    for i in range(values.size):
        group_class = classes[i]
        values[i] = coded[cursors[group_class]]
        cursors[group_class] += 1
