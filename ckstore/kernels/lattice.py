"""Kernels of the lattices: floats to integers and back, predictions, differences of ordinals: `lattice.c`.

Every kernel works on one chunk. It reads floats through their bits wherever the result may depend on the processor
flushing subnormals, so that every process decodes the same. `reference.py` has the same functions in NumPy.

An element's step is two to the power ``step + rows[i] + cols[j]``; `rows` and `cols` are int16 arrays, or empty for an
axis without exponents. `width` is the length of a row and `start` the chunk's first element, so that ``i = (start + k)
// width``.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.native import Array, check, function

_statistics = function("statistics", "pp")
_linear_quantise = function("linear_quantise", "pippiiip")
_linear_project = function("linear_project", "pippii")
_ordinal_difference = function("ordinal_difference", "ppip")
_ordinal_correct = function("ordinal_correct", "ppi")
_magnitude_classes = function("magnitude_classes", "piiip")
_magnitude_top = function("magnitude_top", "pii")

#: Largest magnitude of a linear lattice's integer.
MAX_INTEGER = 1 << 24


def statistics(values: Array) -> tuple[float, float, int]:
    """Return sum of squares, largest magnitude and number of the finite elements of a float array, in float64."""
    found = np.empty(2)
    finite = check(_statistics(id(values), id(found)))
    squares, largest = found.tolist()
    return squares, largest, finite


def linear_quantise(
    values: Array, step: int, rows: Array, cols: Array, width: int, start: int, doubled: bool, out: Array
) -> None:
    """Write the integers nearest to `values`; 0 for values that are not finite.

    If `doubled`, write those on half the step, halved and rounded away from 0.
    """
    check(_linear_quantise(id(values), step, id(rows), id(cols), width, start, doubled, id(out)))


def linear_project(integers: Array, shift: int, rows: Array, cols: Array, width: int, start: int) -> None:
    """Move the integers of a base, in place, to a lattice of exponents larger by ``shift + rows[i] + cols[j]``.

    Right shifts round half up: a floor would move every value by half a step. Results are clamped to the lattice's
    range.
    """
    check(_linear_project(id(integers), shift, id(rows), id(cols), width, start))


def ordinal_difference(bits: Array, predicted: Array | None, is_mirrored: bool, out: Array) -> None:
    """Write ``ord(bits) - ord(predicted)`` modulo the width, or ``ord(bits)`` without `predicted`.

    If it `is_mirrored`, both change their sign where the predicted one is negative. All arrays have one unsigned dtype.
    """
    check(_ordinal_difference(id(bits), None if predicted is None else id(predicted), is_mirrored, id(out)))


def ordinal_correct(predicted: Array | None, residuals: Array, is_mirrored: bool) -> None:
    """Invert `ordinal_difference` in place."""
    check(_ordinal_correct(None if predicted is None else id(predicted), id(residuals), is_mirrored))


def magnitude_classes(bits: Array, shift: int, top: int, limit: int, classes: Array) -> None:
    """Write the class of each element: the distance of its magnitude's leading bits below `top`, at most `limit`.

    ``magnitude = (bits without sign) >> shift``. For floats, with `shift` the mantissa's width, it is the exponent
    field. `top` is the largest magnitude of interest; larger ones get class 0.
    """
    check(_magnitude_classes(id(bits), shift, top, limit, id(classes)))


def magnitude_top(bits: Array, shift: int, ceiling: int) -> int:
    """Return the largest ``(bits without sign) >> shift`` below `ceiling` (0 if there is none)."""
    return check(_magnitude_top(id(bits), shift, ceiling))
