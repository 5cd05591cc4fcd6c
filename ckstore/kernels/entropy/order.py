"""Context order: elements stably sorted by class, so that similar elements become neighbours, and back: `order.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_group_classes = function("group_classes", "ppp")
_to_coded_order = function("to_coded_order", "pppp")
_to_natural_order = function("to_natural_order", "pppip")

QUARTERS = 4
"""Stretches that are sorted in parallel."""


def group_classes(classes: Array, cursors: Array, directory: int) -> int:
    """Begin the table of groups, one per class that occurs, and find the place of each quarter's first element.

    Parameters
    ----------
    classes : (n,) uint8
    cursors : (QUARTERS, 256) int64
        Filled with the place in coded order of each quarter's first element of a class.
    directory : int
        Address of the directory; `label`, `start` and `count` of its groups are filled in.

    Returns
    -------
    int
        The number of groups, or -1 if a class is out of range.
    """
    return check(_group_classes(id(classes), id(cursors), directory))


def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; move the cursors of `group_classes`."""
    check(_to_coded_order(id(values), id(classes), id(cursors), id(coded)))


def to_natural_order(coded: Array, classes: Array, directory: int, number: int, values: Array) -> int:
    """Undo `to_coded_order`.

    Parameters
    ----------
    coded : (n,)
        The elements in coded order.
    classes : (n,) uint8
    directory, number
        Address of the directory, and the number of its groups.
    values : (n,), of the dtype of `coded`
        Filled in.

    Returns
    -------
    int
        0, or 1 if the number of elements of a class differs from the groups.
    """
    return check(_to_natural_order(id(coded), id(classes), directory, number, id(values)))
