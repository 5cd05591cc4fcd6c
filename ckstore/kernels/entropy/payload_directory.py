"""The directory of a payload: its groups, their bins and code lengths, as plain bits: `directory.c`."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.native import Array, check, function

_read_directory = function("read_directory", "piiiip")
_write_directory = function("write_directory", "piiip")

SYMBOLS = 4096
"""The maximal number of symbols of a group."""

CLASSES = 64
"""The number of classes, and so the maximal number of groups."""

GROUP = np.dtype(
    [
        # Contents of the directory: class, first element, number of elements.
        ("label", np.int64), ("start", np.int64), ("count", np.int64),
        # Its kind, below; the value of all elements; bytes of each element that lie in a plane (0, 1, 2 or 4).
        ("kind", np.int64), ("constant", np.int64), ("plane", np.int64),
        # The number of pairs; bits of the numbers without their sign, and of the zero runs.
        ("pairs", np.int64), ("top", np.int64), ("run_top", np.int64),
        # The number of bins of both, 1 for the runs of a dense group; the only symbol that occurs, or -1.
        ("bins", np.int64), ("run_bins", np.int64), ("single", np.int64),
        # The encoder's plan: bits in the streams, maximal bits of an item, first pair; whether symbols are numbers, and
        # whether pairs are extracted. Before planning, `pairs` holds the non-zeros and `top` the bits of whole
        # elements.
        ("bits", np.int64), ("widest", np.int64), ("first_pair", np.int64), ("exact", np.int64), ("paired", np.int64),
        # Elements of each quarter of a sparse group of at least 4096 pairs.
        ("spans", np.int64, 4),
    ]
)  # fmt: skip
"""A group."""

DENSE, SPARSE, EQUAL = range(3)
"""Kinds of groups: a symbol for each element; one for each zero run and the value behind it; one value throughout."""

TABLE = SYMBOLS + 1
"""The maximal number of bins of values and runs together."""


def read_directory(payload: Array, begin: int, end: int, grouped: bool, count: int, directory: int) -> int:
    """Read the directory from bytes `begin` to `end` of a payload (uint8) of `count` elements.

    `grouped` is whether elements have classes; if not, there is one group. `directory` is the address of the result.
    Returns the number of groups, -1 for an impossible directory.
    """
    return check(_read_directory(id(payload), begin, end, grouped, count, directory))


def write_directory(buffer: Array, grouped: bool, count: int, number: int, directory: int) -> int:
    """Write the directory of `number` groups into a buffer (uint8); return its bytes, -1 if there is no room."""
    return check(_write_directory(id(buffer), grouped, count, number, directory))
