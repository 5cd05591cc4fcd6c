"""The size of a payload, estimated from histograms of its elements: `histogram.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_estimate_bits = function("estimate_bits", "ppipp")

ROWS = 65
"""The histograms of a call: of all elements, and of each class."""


def estimate_bits(values: Array, classes: Array | None, fine: int, counts: Array, bits: Array) -> None:
    """Estimate the bits of a payload's elements and of its tables.

    Parameters
    ----------
    values : (n,) signed integers
    classes : (n,) uint8, below ROWS - 1; or None
    fine
        Every octave of each sign has 2^fine cells.
    counts : int32
        Scratch: ROWS histograms (without classes one) of 2^fine cells for each bit of an element and each sign.
    bits : float64, (2, 2)
        Filled with the bits of elements and of tables, in natural order and, if there are classes, in groups.
    """
    check(_estimate_bits(id(values), None if classes is None else id(classes), fine, id(counts), id(bits)))
