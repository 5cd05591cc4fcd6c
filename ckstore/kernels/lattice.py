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
from ckstore.kernels.entropy.words import bit_length, int64
from ckstore.kernels.float_bits import bits_of, float_from, power_of_two

#: Largest magnitude of a linear lattice's integer.
MAX_INTEGER = 1 << 24


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
    total = 0.0
    largest = 0.0
    finite = 0
    for k in range(values.size):
        value = np.float64(values[k])
        magnitude = abs(value)
        if magnitude <= 1.7976931348623157e308:
            total += value * value
            largest = max(largest, magnitude)
            finite += 1
    return total, largest, finite


@kernel
def linear_distance(
    values: np.ndarray, integers: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int
) -> tuple[float, int]:
    """Return the sum of squares of ``value - integer * step`` over finite elements, and their number."""
    total = 0.0
    finite = 0
    row = start // width
    col = start - row * width
    for k in range(values.size):
        exponent = step
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        value = np.float64(values[k])
        if abs(value) <= 1.7976931348623157e308:
            difference = value - np.float64(integers[k]) * power_of_two(exponent)
            total += difference * difference
            finite += 1
        row, col = next_place(row, col, width)
    return total, finite


@njit(inline="always")
def _nearest(scaled: float) -> np.int32:
    nearest = min(max(np.rint(scaled), -16777216.0), 16777216.0)
    return np.int32(nearest if abs(scaled) <= 1.7976931348623157e308 else 0.0)


@njit(inline="always")
def _kept_or_nearest(scaled: float, prediction: float, hysteresis: float) -> np.int32:
    nearest = min(max(np.rint(scaled), -16777216.0), 16777216.0)
    moved = abs(scaled - prediction) >= hysteresis and abs(scaled) <= 1.7976931348623157e308
    return np.int32(nearest if moved else prediction)


@kernel
def linear_quantise(
    values: np.ndarray,
    predicted: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    hysteresis: float,
    out: np.ndarray,
) -> None:
    """Write the integers of finite `values`: the predicted one while within `hysteresis` steps, else the nearest.

    `predicted` is empty for a base, where hysteresis has no effect. A value that is not finite takes the predicted
    integer, 0 in a base.
    """
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
                scaled = np.float64(values[i]) * power_of_two(exponent - cols[i - first])
                if predicted.size:
                    out[i] = _kept_or_nearest(scaled, np.float64(predicted[i]), hysteresis)
                else:
                    out[i] = _nearest(scaled)
        elif predicted.size:
            # The compiler makes a faster loop of slices, and most bases have one step.
            inverse = power_of_two(exponent)
            part = values[k:stop]
            before = predicted[k:stop]
            target = out[k:stop]
            for i in range(part.size):
                target[i] = _kept_or_nearest(np.float64(part[i]) * inverse, np.float64(before[i]), hysteresis)
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

    Right shifts round half up: a floor would move every value by half a step and undo the hysteresis. Results are
    clamped to the lattice's range.
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


@njit(inline="always")
def _length(integer: np.int64) -> int:
    """Return the bit length of an integer's magnitude, at most 22."""
    return min(bit_length(np.uint64(abs(integer))), int64(22))


@njit(inline="always")
def _ordinal32(bits: np.uint32) -> np.int32:
    """Return `_ordinal` of 32 bits, as a signed integer: 32-bit vectors need narrow intermediate types throughout."""
    value = np.int32(bits)
    return np.int32(value ^ np.int32(np.uint32(np.int32(value >> np.int32(31))) >> np.uint32(1)))


@njit(inline="always")
def _field32(bits: np.uint32) -> np.uint32:
    """Return the exponent field of a float32."""
    return np.uint32(np.uint32(bits >> np.uint32(23)) & np.uint32(255))


@njit(inline="always")
def _own32(integer: np.int32, power: np.float32, below: np.uint32) -> tuple[np.uint32, np.uint8]:
    """Return (bits, class) of an element; an integer's bit length is its value's exponent field less `below`."""
    predicted = bits_of(np.float32(np.float32(integer) * power), np.uint32(0))
    field = _field32(predicted)
    return predicted, np.uint8(np.uint32(field - below)) if field else np.uint8(32)


@kernel
def own_flat32(integers: np.ndarray, bits: np.ndarray, step: int, out: np.ndarray, classes: np.ndarray) -> None:
    """Do `own_predict` for 32 bits and one step for all elements, below 103, so that no lattice value overflows.

    If `bits` is not empty, `out` is filled with their ordinals' differences to the lattice values instead.
    """
    power = np.float32(power_of_two(step))
    below = np.uint32(step + 126)
    if bits.size:
        for k in range(integers.size):
            predicted, classes[k] = _own32(np.int32(integers[k]), power, below)
            out[k] = np.int32(_ordinal32(bits[k]) - _ordinal32(predicted))
    else:
        for k in range(integers.size):
            out[k], classes[k] = _own32(np.int32(integers[k]), power, below)


@kernel
def own_predict(
    integers: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    out: np.ndarray,
    classes: np.ndarray,
) -> None:
    """Write the bits of the lattice values as floats of the width of `out` (32 or 64), and each element's class.

    The class is the bit length of the integer, which compares the step with the unit in the last place. For the integer
    0 it is the element's step exponent relative to the smallest one, because there sign and exponent of the value
    itself are coded.
    """
    zero = out.dtype.type(0)
    lowest, _ = exponent_range(step, rows, cols)
    row = start // width
    col = start - row * width
    for k in range(integers.size):
        exponent = step
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        integer = np.int64(integers[k])
        if integer:
            out[k] = bits_of(np.float64(integer) * power_of_two(exponent), zero)
            classes[k] = _length(integer)
        else:
            out[k] = 0
            classes[k] = 32 + min(exponent - lowest, 31)
        row, col = next_place(row, col, width)


@njit(inline="always")
def _chained32(
    base: np.uint32, integer: np.int32, power: np.float32, half: np.float32, floor: np.int32
) -> tuple[np.uint32, np.uint8]:
    """Return (bits, class) of an element; the cell extends by `half` of a step to both sides."""
    middle = np.float32(np.float32(integer) * power)
    low = np.float32(middle - half)
    high = np.float32(middle + half)
    value = float_from(base)
    below = value < low
    side = np.int32(21) if below else (np.int32(42) if value > high else np.int32(0))
    side = side if np.uint32(base & np.uint32(0x7F800000)) != np.uint32(0x7F800000) else np.int32(0)
    predicted = bits_of(low if below else high, base) if side else base
    level = min(max(np.int32(np.int32(_field32(predicted)) - floor), np.int32(0)), np.int32(20))
    return predicted, np.uint8(np.int32(level + side))


@kernel
def chained_flat32(
    base: np.ndarray, integers: np.ndarray, bits: np.ndarray, step: int, out: np.ndarray, classes: np.ndarray
) -> bool:
    """Do `chained_predict` for 32 bits, one step for all elements, from -125 to 103, and a reach of half of it.

    If `bits` is not empty, `out` is filled with their ordinals' differences to the prediction instead. Returns whether
    all integers are below 2^23, so that no rim has more than 24 bits; if not, the output is invalid.

    No rim is subnormal or 0, so the rule that subnormal parents count as 0 makes no difference.
    """
    power = np.float32(power_of_two(step))
    half = np.float32(power_of_two(step - 1))
    floor = np.int32(step + 119)
    union = np.int32(0)
    if bits.size:
        for k in range(base.size):
            integer = np.int32(integers[k])
            union = np.int32(union | np.int32(integer ^ np.int32(integer >> np.int32(31))))
            predicted, classes[k] = _chained32(base[k], integer, power, half, floor)
            out[k] = np.int32(_ordinal32(bits[k]) - _ordinal32(predicted))
    else:
        for k in range(base.size):
            integer = np.int32(integers[k])
            union = np.int32(union | np.int32(integer ^ np.int32(integer >> np.int32(31))))
            out[k], classes[k] = _chained32(base[k], integer, power, half, floor)
    return bool(union < 1 << 23)


@kernel
def chained_predict(
    base: np.ndarray,
    integers: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    reach: float,
    out: np.ndarray,
    classes: np.ndarray,
) -> None:
    """Write the bits of the parent's exact values (32 or 64), clamped to the cells of the integers.

    The cell of integer n extends `reach` steps to both sides. Inside it the prediction is the parent's value bit for
    bit; outside it is the nearer rim. Subnormal parents count as 0 and subnormal rims are +0, so that flush-to-zero
    changes nothing. The class is the exponent of the prediction relative to the step, and whether and to which side the
    value was clamped.
    """
    double = base.itemsize == 8
    narrow = base.dtype.type
    tiny = 2.2250738585072014e-308 if double else 1.1754943508222875e-38
    shift = narrow(52 if double else 23)
    special = narrow(2047 if double else 255)
    bias = int64(1023 if double else 127)
    row = start // width
    col = start - row * width
    for k in range(base.size):
        exponent = step
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        bits = base[k]
        field = narrow(narrow(bits >> shift) & special)
        side = 0
        if field != special:
            value = 0.0
            if field != 0:
                value = np.float64(float_from(bits))
            low = (np.float64(integers[k]) - reach) * power_of_two(exponent)
            high = (np.float64(integers[k]) + reach) * power_of_two(exponent)
            if value < low:
                side = 1
                value = low
            elif value > high:
                side = 2
                value = high
        if side == 0:
            out[k] = bits
        elif abs(value) < tiny:
            out[k] = 0
        else:
            out[k] = bits_of(value, bits)
        field = narrow(narrow(out[k] >> shift) & special)
        level = int64(field) - bias - exponent + 8
        classes[k] = 21 * side + min(max(level, 0), 20)
        row, col = next_place(row, col, width)


@kernel
def scale(bits: np.ndarray, factor: float, out: np.ndarray) -> None:
    """Write the bits of values times `factor`, itself a float32 value; keep the bits if either side is not normal.

    Supports float32, float64, and bfloat16 for 16 bits. Products are computed in float64, where the product of two
    float32 numbers is exact: it is rounded once, so that no fused arithmetic can change it; for bfloat16 once more, to
    even, by way of float32. A product of float64 that is rounded up to the smallest normal number becomes 0 on
    processors that flush subnormals, so that one counts as not normal too.
    """
    size = bits.itemsize
    narrow = bits.dtype.type
    shift = narrow(52 if size == 8 else (23 if size == 4 else 7))
    special = narrow(2047 if size == 8 else 255)
    low = 2.225073858507202e-308 if size == 8 else 1.1754943508222875e-38
    high = np.inf if size == 8 else (3.4028234e38 if size == 4 else 3.3e38)
    for k in range(bits.size):
        field = narrow(narrow(bits[k] >> shift) & special)
        out[k] = bits[k]
        if field != narrow(0) and field != special:
            value = np.float64(float_from(bits[k])) * factor
            if low <= abs(value) < high:
                out[k] = bits_of(value, bits[k])


@njit(inline="always")
def _ordinal(bits: int, sign: int) -> int:
    """Return the order-preserving integer of float bits, modulo the width: negative floats below, -0.0 below +0.0."""
    if bits & sign:
        return ~(bits ^ sign)
    return bits


@kernel
def ordinal_difference(bits: np.ndarray, predicted: np.ndarray, out: np.ndarray) -> None:
    """Write ``ord(bits) - ord(predicted)`` modulo the width; all arrays have one unsigned dtype."""
    one = bits.dtype.type(1)
    sign = one << bits.dtype.type(bits.itemsize * 8 - 1)
    for k in range(bits.size):
        out[k] = _ordinal(bits[k], sign) - _ordinal(predicted[k], sign)


@kernel
def ordinal_correct(predicted: np.ndarray, residuals: np.ndarray, out: np.ndarray) -> None:
    """Write the bits whose ordinal is ``ord(predicted) + residuals`` modulo the width; `out` may be `residuals`."""
    one = predicted.dtype.type(1)
    sign = one << predicted.dtype.type(predicted.itemsize * 8 - 1)
    for k in range(predicted.size):
        ordinal = predicted.dtype.type(_ordinal(predicted[k], sign) + residuals[k])
        if ordinal & sign:
            out[k] = ~ordinal ^ sign
        else:
            out[k] = ordinal


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
