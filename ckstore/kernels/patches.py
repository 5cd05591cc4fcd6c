"""Patches: the elements of a chunk that differ from another's, and their differences: `patches.c`.

`ckstore.codecs.patches` has the format. Elements are passed as bytes.
"""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_find_changes = function("find_changes", "ppiipp")
_write_patch = function("write_patch", "ppip")
_apply_patch = function("apply_patch", "ppiii")


def find_changes(after: Array, before: Array, size: int, is_float: bool, places: Array, numbers: Array) -> int:
    """List the elements that differ.

    Parameters
    ----------
    after, before : uint8, (size n,)
        Elements of `size` bytes.
    is_float
        Whether they are floats, which are compared by ordinals.
    places : int32, (n,)
        Filled with the elements' numbers.
    numbers : uint64, (n,)
        Filled with their differences modulo the width, as sign and magnitude less one: 0, 1, 2, 3 for -1, 1, -2, 2.

    Returns their number.
    """
    return check(_find_changes(id(after), id(before), size, is_float, id(places), id(numbers)))


def write_patch(places: Array, numbers: Array, count: int, payload: Array) -> int:
    """Write a patch of `count` changes after its checksum; return the next byte.

    `payload` (uint8) has room for 19 bytes a change and 96 more.
    """
    return check(_write_patch(id(places), id(numbers), count, id(payload)))


def apply_patch(payload: Array, bits: Array, size: int, is_float: bool, is_undone: bool = False) -> int:
    """Apply a patch to its elements in place, or undo it; return 0, or 1 if the patch does not fit the chunk.

    Parameters
    ----------
    payload : uint8
        The patch, whose checksum was verified.
    bits : uint8, (size n,)
        The elements that the patch was made against, or its result if it is undone; damaged if 1 is returned.
    size, is_float
        As for `find_changes`.
    """
    return check(_apply_patch(id(payload), id(bits), size, is_float, is_undone))
