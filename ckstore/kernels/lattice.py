"""Kernels of the lattices: floats to integers and back, predictions, and differences of order-preserving ordinals.

Every kernel works on one chunk and releases the GIL. It reads floats through their bits wherever the result may depend
on the processor flushing subnormals, so that every process decodes the same. `reference.py` has the same functions in
NumPy.

An element's step is two to the power ``step + rows[i] + cols[j]``; `rows` and `cols` are int16 arrays, or empty for an
axis without exponents. `width` is the length of a row and `start` the chunk's first element, so that ``i = (start + k)
// width``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import int64
from ckstore.kernels.float_bits import power_of_two
from ckstore.kernels.library import Array, check, function

_ordinal_difference = function("ordinal_difference", "ppip")
_ordinal_correct = function("ordinal_correct", "ppi")

#: Largest magnitude of a linear lattice's integer.
MAX_INTEGER = 1 << 24

#: Sums of floats have this many parts, each of every 256th element: the compiler vectorises them.
LANES = 256


@njit(inline="always")
def next_place(row: int, col: int, width: int) -> tuple[int, int]:
    """Return row and column of the next element."""
    col += 1
    if col == width:
        col = 0
        row += 1
    return row, col


@njit(inline="always")
def exponent_range(step: int, rows: np.ndarray, cols: np.ndarray) -> tuple[int, int]:
    """Return the smallest and the largest exponent that an element's step may have."""
    lowest = highest = int64(step)
    if rows.size:
        lowest += int64(rows.min())
        highest += int64(rows.max())
    if cols.size:
        lowest += int64(cols.min())
        highest += int64(cols.max())
    return lowest, highest


@kernel
def statistics(values: np.ndarray) -> tuple[float, float, int]:
    """Return sum of squares, largest magnitude and number of the finite elements of a float array, in float64."""
    squares, largest = np.zeros(LANES), np.zeros(LANES)
    finite = 0
    for k in range(0, values.size, LANES):
        part = values[k : k + LANES]
        for i in range(part.size):
            magnitude = abs(np.float64(part[i]))
            counts = magnitude <= 1.7976931348623157e308
            magnitude = magnitude if counts else np.float64(0.0)
            squares[i] += magnitude * magnitude
            largest[i] = max(largest[i], magnitude)
            finite += int64(counts)
    return squares.sum(), largest.max(), finite


@njit(inline="always")
def _nearest(scaled: float) -> np.int32:
    nearest = min(max(np.rint(scaled), -16777216.0), 16777216.0)
    return np.int32(nearest if abs(scaled) <= 1.7976931348623157e308 else 0.0)


@kernel
def linear_quantise(
    values: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int, out: np.ndarray
) -> None:
    """Write the integers nearest to `values`; 0 for values that are not finite."""
    if rows.size == 0 and cols.size == 0:
        width, start = max(values.size, 1), 0
    row = start // width
    col = start - row * width
    k = 0
    while k < values.size:
        stop = min(values.size, k + width - col)
        exponent = -step
        if rows.size:
            exponent -= rows[row]
        if cols.size:
            first = np.uint64(k - col)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = _nearest(np.float64(values[i]) * power_of_two(exponent - cols[i - first]))
        else:
            inverse = power_of_two(exponent)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = _nearest(np.float64(values[i]) * inverse)
        k = stop
        col = 0
        row += 1


@njit(inline="always")
def _shifted(value: np.int64, bits: np.int64) -> np.int64:
    """Return ``value / 2**bits``, rounded half up; clamped to a lattice's range if it grows."""
    right = np.int64(min(max(int(bits), 0), 40))
    left = np.int64(min(max(-int(bits), 0), 30))
    grown = min(max(value << left, np.int64(-16777216)), np.int64(16777216))
    return grown if bits < 0 else (value + ((np.int64(1) << right) >> np.int64(1))) >> right


@kernel
def linear_project(
    integers: np.ndarray, shift: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int, out: np.ndarray
) -> None:
    """Write the integers of a base on a lattice whose exponents are larger by ``shift + rows[i] + cols[j]``.

    Right shifts round half up: a floor would move every value by half a step. Results are clamped to the lattice's
    range.
    """
    row = start // width
    col = start - row * width
    k = 0
    while k < integers.size:
        stop = min(integers.size, k + width - col)
        bits = np.int64(shift)
        if rows.size:
            bits += rows[row]
        if cols.size:
            first = np.uint64(k - col)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = _shifted(np.int64(integers[i]), bits + np.int64(cols[i - first]))
        elif bits >= 0:
            # By far the most common case, vectorised in 32 bits. No integer of a lattice has more.
            right = np.int32(min(int(bits), 30))
            half = np.int32((1 << right) >> 1)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = np.int32(integers[i] + half) >> right
        else:
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = _shifted(np.int64(integers[i]), bits)
        k = stop
        col = 0
        row += 1


def ordinal_difference(bits: Array, predicted: Array | None, is_mirrored: bool, out: Array) -> None:
    """Write ``ord(bits) - ord(predicted)`` modulo the width, or ``ord(bits)`` without `predicted`.

    If it `is_mirrored`, both change their sign where the predicted one is negative. All arrays have one unsigned dtype.
    """
    check(_ordinal_difference(id(bits), None if predicted is None else id(predicted), is_mirrored, id(out)))


def ordinal_correct(predicted: Array | None, residuals: Array, is_mirrored: bool) -> None:
    """Invert `ordinal_difference` in place."""
    check(_ordinal_correct(None if predicted is None else id(predicted), id(residuals), is_mirrored))


@kernel
def magnitude_classes(bits: np.ndarray, shift: int, top: int, limit: int, classes: np.ndarray) -> None:
    """Write the class of each element: the distance of its magnitude's leading bits below `top`, at most `limit`.

    ``magnitude = (bits without sign) >> shift``. For floats, with `shift` the mantissa's width, it is the exponent
    field. `top` is the largest magnitude of interest; larger ones get class 0.
    """
    mask = (bits.dtype.type(1) << bits.dtype.type(bits.itemsize * 8 - 1)) - bits.dtype.type(1)
    for k in range(bits.size):
        level = np.int64((bits[k] & mask) >> bits.dtype.type(shift))
        classes[k] = min(max(top - level, 0), limit)


@kernel
def magnitude_top(bits: np.ndarray, shift: int, ceiling: int) -> int:
    """Return the largest ``(bits without sign) >> shift`` below `ceiling` (0 if there is none)."""
    mask = (bits.dtype.type(1) << bits.dtype.type(bits.itemsize * 8 - 1)) - bits.dtype.type(1)
    narrow = bits.dtype.type
    bound = narrow(ceiling)
    top = narrow(0)
    for k in range(bits.size):
        level = narrow(narrow(bits[k] & mask) >> narrow(shift))
        top = max(top, level if level < bound else narrow(0))
    return int(top)
