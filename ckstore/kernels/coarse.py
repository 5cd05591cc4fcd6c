"""Kernels of coarse objects: lattice values, rounded ordinals, deviations, and sums over rows and columns.

As in `lattice.py`, decoding works on bits and does no arithmetic on subnormal numbers, so that every process decodes
the same values. `tests/kernels/reference.py` has the same functions in NumPy.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import int64
from ckstore.kernels.float_bits import power_of_two
from ckstore.kernels.lattice import LANES, MAX_INTEGER, exponent_range, next_place

#: Largest magnitude of a rounded ordinal's integer.
MAX_ROUNDED = 1 << 24


@kernel
def linear_values(
    integers: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int, out: np.ndarray
) -> None:
    """Write ``n * 2 ** (step + rows[i] + cols[j])`` into a float32 or float64 array; the integer 0 gives +0.

    Values that would overflow become the largest finite number: a mask filled with it must not come back infinite.
    """
    if rows.size == 0 and cols.size == 0:
        width, start = max(integers.size, 1), 0
    row = start // width
    col = start - row * width
    k = 0
    while k < integers.size:
        stop = min(integers.size, k + width - col)
        exponent = step
        if rows.size:
            exponent += rows[row]
        if cols.size:
            first = np.uint64(k - col)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = np.float64(integers[i]) * power_of_two(exponent + cols[i - first])
        else:
            power = power_of_two(exponent)
            for i in range(np.uint64(k), np.uint64(stop)):
                out[i] = np.float64(integers[i]) * power
        k = stop
        col = 0
        row += 1
    largest = 3.4028234663852886e38 if out.itemsize == 4 else 1.7976931348623157e308
    if power_of_two(exponent_range(step, rows, cols)[1]) * MAX_INTEGER > largest:
        for k in range(out.size):
            out[k] = min(max(np.float64(out[k]), -largest), largest)


@njit(inline="always")
def _order(bits: np.uint64, sign: np.uint64) -> np.int64:
    """Return the order-preserving integer of float bits: negative for negative numbers, 0 for both zeros."""
    magnitude = np.int64(bits & (sign - np.uint64(1)))
    return -magnitude if bits & sign else magnitude


@njit(inline="always")
def _rounded(integer: np.int64) -> np.int32:
    return np.int32(min(max(integer, -np.int64(MAX_ROUNDED)), np.int64(MAX_ROUNDED)))


@kernel
def rounded_quantise(
    bits: np.ndarray,
    shift: int,
    unit: int,
    level: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    out: np.ndarray,
) -> None:
    """Write the integers of ordinals: ``(ord(x) - unit * (level + rows[i] + cols[j])) / 2**shift``, 3/8 and more up.

    An optimiser divides by the root of a second moment, so that values that are too small do more harm.
    """
    sign = np.uint64(1) << np.uint64(8 * bits.itemsize - 1)
    up = (np.int64(5) << shift) >> 3
    row = start // width
    col = start - row * width
    k = 0
    while k < bits.size:
        stop = min(bits.size, k + width - col)
        model = np.int64(level)
        if rows.size:
            model += rows[row]
        part = bits[k:stop]
        target = out[k:stop]
        if cols.size:
            across = cols[col : col + stop - k]
            for i in range(part.size):
                away = up - (model + np.int64(across[i])) * unit
                target[i] = _rounded((_order(np.uint64(part[i]), sign) + away) >> shift)
        else:
            away = up - model * unit
            for i in range(part.size):
                target[i] = _rounded((_order(np.uint64(part[i]), sign) + away) >> shift)
        k = stop
        col = 0
        row += 1


@njit(inline="always")
def _bits_of_order(order: np.int64, reach: np.int64, largest: np.int64, sign: np.int64) -> np.int64:
    """Return the float bits of an order-preserving integer, at most `largest` in magnitude; +0 within `reach` of 0."""
    bits = min(abs(order), largest) | (np.int64(order < 0) << sign)
    return bits if abs(order) > reach else np.int64(0)


@kernel
def rounded_values(
    integers: np.ndarray,
    shift: int,
    unit: int,
    level: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    largest: int,
    out: np.ndarray,
) -> None:
    """Write the bits of the ordinals in the middle of the integers' cells, at most `largest` in magnitude.

    Ordinals within five eighths of a step of 0 become +0, so that a second moment never becomes negative.
    """
    # Row by row and without branches, so that the compiler vectorises the loop.
    sign = np.int64(8 * out.itemsize - 1)
    reach = (np.int64(5) << shift) >> 3
    row = start // width
    col = start - row * width
    k = 0
    while k < integers.size:
        stop = min(integers.size, k + width - col)
        model = np.int64(level)
        if rows.size:
            model += rows[row]
        model *= unit
        part = integers[k:stop]
        target = out[k:stop]
        if cols.size:
            across = cols[col : col + stop - k]
            for i in range(part.size):
                order = (np.int64(part[i]) << shift) + (model + np.int64(across[i]) * unit)
                target[i] = _bits_of_order(order, reach, largest, sign)
        else:
            for i in range(part.size):
                target[i] = _bits_of_order((np.int64(part[i]) << shift) + model, reach, largest, sign)
        k = stop
        col = 0
        row += 1


@kernel
def deviation(values: np.ndarray, others: np.ndarray) -> tuple[float, float, float, int]:
    """Compare two float arrays.

    Returns the largest difference, the sum of squared differences, the sum of squares of `values`, and the number of
    elements. Elements that are not finite in both arrays do not count.
    """
    largest, squares, totals = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    finite = 0
    for k in range(0, values.size, LANES):
        here, there = values[k : k + LANES], others[k : k + LANES]
        for i in range(here.size):
            value = np.float64(here[i])
            difference = abs(value - np.float64(there[i]))
            counts = difference <= 1.7976931348623157e308
            difference = difference if counts else np.float64(0.0)
            value = value if counts else np.float64(0.0)
            largest[i] = max(largest[i], difference)
            squares[i] += difference * difference
            totals[i] += value * value
            finite += int64(counts)
    return largest.max(), squares.sum(), totals.sum(), finite


@kernel
def order_sums(
    bits: np.ndarray, width: int, ceiling: int, shift: int, rows: np.ndarray, cols: np.ndarray, counts: np.ndarray
) -> None:
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
    mask = (np.uint64(1) << np.uint64(8 * bits.itemsize - 1)) - np.uint64(1)
    across = counts[rows.size :]
    for row in range(rows.size):
        part = bits[row * width : (row + 1) * width]
        total = known = 0
        for i in range(part.size):
            magnitude = np.int64(np.uint64(part[i]) & mask)
            one = int64((magnitude > 0) & (magnitude <= ceiling))
            value = int64(magnitude >> shift) * one
            total += value
            known += one
            cols[i] += value
            across[i] += one
        rows[row] += total
        counts[row] += known


@kernel
def value_sums(values: np.ndarray, squared: bool, width: int, rows: np.ndarray, cols: np.ndarray) -> None:
    """Add the finite values of an array, or their squares, in rows of `width`, to the sums of rows and columns."""
    row = 0
    k = 0
    while k < values.size:
        stop = min(values.size, k + width)
        total = 0.0
        for i in range(k, stop):
            value = np.float64(values[i])
            value = value * value if squared else value
            value = value if abs(value) <= 1.7976931348623157e308 else np.float64(0.0)
            total += value
            cols[i - k] += value
        rows[row] += total
        k = stop
        row += 1


@kernel
def weighted_squares(
    values: np.ndarray,
    others: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
) -> float:
    """Return the sum of squared differences of finite values in units of ``2 ** (step + rows[i] + cols[j])``."""
    sums = np.zeros(LANES)
    if rows.size == 0 and cols.size == 0:
        width, start = max(values.size, 1), 0
    row = start // width
    col = start - row * width
    k = 0
    while k < values.size:
        stop = min(values.size, k + width - col, k + LANES)
        here, there = values[k:stop], others[k:stop]
        exponent = -step
        if rows.size:
            exponent -= rows[row]
        if cols.size:
            across = cols[col : col + here.size]
            for i in range(here.size):
                sums[i] += _square(np.float64(here[i]) - np.float64(there[i]), exponent - across[i])
        else:
            for i in range(here.size):
                sums[i] += _square(np.float64(here[i]) - np.float64(there[i]), exponent)
        col += stop - k
        if col == width:
            row, col = row + 1, 0
        k = stop
    return sums.sum()


@njit(inline="always")
def _square(difference: float, exponent: int) -> float:
    difference *= power_of_two(exponent)
    return difference * difference if abs(difference) <= 1e150 else 0.0


@kernel
def linear_dithered(
    values: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int, out: np.ndarray
) -> None:
    """Write the integers of finite values, rounded up or down by a threshold per element.

    A hash of the position spreads the thresholds evenly (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014), so that the rounding errors cancel out wherever the values lie between lattice values.
    """
    row = start // width
    col = start - row * width
    for k in range(values.size):
        exponent = -step
        if rows.size:
            exponent -= rows[row]
        if cols.size:
            exponent -= cols[col]
        bits = (np.uint64(start + k) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        threshold = np.float64((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 1.1102230246251565e-16
        scaled = np.floor(np.float64(values[k]) * power_of_two(exponent) + threshold)
        out[k] = np.int32(min(max(scaled, -16777216.0), 16777216.0))
        row, col = next_place(row, col, width)


@kernel
def concentration(values: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int) -> float:
    """Return how close finite values lie to lattice values: the mean cosine of their distance, 0 for no relation.

    Values that are lattice values do not count.
    """
    total = 0.0
    count = 0
    row = start // width
    col = start - row * width
    for k in range(values.size):
        exponent = -step
        if rows.size:
            exponent -= rows[row]
        if cols.size:
            exponent -= cols[col]
        scaled = np.float64(values[k]) * power_of_two(exponent)
        rest = scaled - np.rint(scaled)
        if rest != 0.0:
            total += np.cos(6.283185307179586 * rest)
            count += 1
        row, col = next_place(row, col, width)
    return total / count if count else 0.0
