"""Kernels of coarse objects: lattice values, rounded ordinals, deviations, sums over rows and columns: `coarse.c`.

As in `lattice.py`, decoding works on bits and does no arithmetic on subnormal numbers, so that every process decodes
the same values. `tests/kernels/reference.py` has the same functions in NumPy.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.native import Array, check, function

_linear_values = function("linear_values", "pippiip")
_rounded_quantise = function("rounded_quantise", "piiippiip")
_rounded_values = function("rounded_values", "piiippiiip")
_deviation = function("deviation", "ppp")
_order_sums = function("order_sums", "piiippp")
_value_sums = function("value_sums", "piipp")
_weighted_squares = function("weighted_squares", "ppippiip")
_linear_dithered = function("linear_dithered", "pippiip")
_concentration = function("concentration", "pippiip")


def linear_values(integers: Array, step: int, rows: Array, cols: Array, width: int, start: int, out: Array) -> None:
    """Write ``n * 2 ** (step + rows[i] + cols[j])`` into a float32 or float64 array; the integer 0 gives +0.

    Values that would overflow become the largest finite number: a mask filled with it must not come back infinite.
    """
    check(_linear_values(id(integers), step, id(rows), id(cols), width, start, id(out)))


def rounded_quantise(
    bits: Array, shift: int, unit: int, level: int, rows: Array, cols: Array, width: int, start: int, out: Array
) -> None:
    """Write the integers of ordinals: ``(ord(x) - unit * (level + rows[i] + cols[j])) / 2**shift``, 3/8 and more up.

    An optimiser divides by the root of a second moment, so that values that are too small do more harm.
    """
    check(_rounded_quantise(id(bits), shift, unit, level, id(rows), id(cols), width, start, id(out)))


def rounded_values(
    integers: Array, shift: int, unit: int, level: int, rows: Array, cols: Array, width: int, start: int, largest: int,
    out: Array,
) -> None:  # fmt: skip
    """Write the bits of the ordinals in the middle of the integers' cells, at most `largest` in magnitude.

    Ordinals within five eighths of a step of 0 become +0, so that a second moment never becomes negative.
    """
    check(_rounded_values(id(integers), shift, unit, level, id(rows), id(cols), width, start, largest, id(out)))


def deviation(values: Array, others: Array) -> tuple[float, float, float, int]:
    """Compare two float arrays.

    Returns the largest difference, the sum of squared differences, the sum of squares of `values`, and the number of
    elements. Elements that are not finite in both arrays do not count.
    """
    found = np.empty(3)
    finite = check(_deviation(id(values), id(others), id(found)))
    largest, squares, total = found.tolist()
    return largest, squares, total, finite


def order_sums(bits: Array, width: int, ceiling: int, shift: int, rows: Array, cols: Array, counts: Array) -> None:
    """Add the ordinals of magnitudes up to row and column sums, without zeros and ordinals above `ceiling`.

    Parameters
    ----------
    ceiling
        The largest finite magnitude's bits.
    shift
        Low bits that ordinals lose, so that sums of 2^22 ordinals fit.
    rows, cols
        int64 sums by row and by column; `counts` (int64) holds the numbers of elements, rows first.
    """
    check(_order_sums(id(bits), width, ceiling, shift, id(rows), id(cols), id(counts)))


def value_sums(values: Array, squared: bool, width: int, rows: Array, cols: Array) -> None:
    """Add the finite values of an array, or their squares, in rows of `width`, to the sums of rows and columns."""
    check(_value_sums(id(values), squared, width, id(rows), id(cols)))


def weighted_squares(
    values: Array, others: Array, step: int, rows: Array, cols: Array, width: int, start: int
) -> float:
    """Return the sum of squared differences of finite values in units of ``2 ** (step + rows[i] + cols[j])``."""
    found = np.empty(1)
    check(_weighted_squares(id(values), id(others), step, id(rows), id(cols), width, start, id(found)))
    return float(found[0])


def linear_dithered(values: Array, step: int, rows: Array, cols: Array, width: int, start: int, out: Array) -> None:
    """Write the integers of finite values, rounded up or down by a threshold per element.

    A hash of the position spreads the thresholds evenly (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014), so that the rounding errors cancel out wherever the values lie between lattice values.
    """
    check(_linear_dithered(id(values), step, id(rows), id(cols), width, start, id(out)))


def concentration(values: Array, step: int, rows: Array, cols: Array, width: int, start: int) -> float:
    """Return how close finite values lie to lattice values: the mean cosine of their distance, 0 for no relation.

    Values that are lattice values do not count.
    """
    found = np.empty(1)
    check(_concentration(id(values), step, id(rows), id(cols), width, start, id(found)))
    return float(found[0])
