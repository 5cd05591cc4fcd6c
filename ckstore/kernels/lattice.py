"""The loops of the lattices: floats to integers and back, predictions, and differences of order-preserving ordinals.

Every loop works on one chunk, releases the GIL and reads floats through their bits wherever the result may depend on
whether the processor flushes subnormals: what is decoded is the same in every process. `reference.py` says the same
in NumPy.

An element's step is two to the power ``step + rows[i] + cols[j]``; `rows` and `cols` are int16 arrays or empty
(no exponents along that axis). `width` is the length of a row and `start` the chunk's first element, so that
``i = (start + k) // width``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy"}

#: Largest magnitude of a linear lattice's integer.
MAX_INTEGER = 1 << 24


@njit(**_OPTIONS)
def _power_table(lowest: int, highest: int) -> np.ndarray:
    """Two to the powers from `lowest` to `highest`, built from bits: no library's exp2 on the decode path."""
    bits = np.empty(highest - lowest + 1, np.uint64)
    for index in range(bits.size):
        bits[index] = np.uint64(lowest + index + 1023) << np.uint64(52)
    return bits.view(np.float64)


@njit(**_OPTIONS)
def _exponent_range(step: int, rows: np.ndarray, cols: np.ndarray) -> tuple[int, int]:
    lowest = step
    highest = step
    if rows.size:
        lowest += rows.min()
        highest += rows.max()
    if cols.size:
        lowest += cols.min()
        highest += cols.max()
    return lowest, highest


@njit(**_OPTIONS)
def statistics(values: np.ndarray) -> tuple[float, float, int]:
    """Sum of squares, largest magnitude and number of the finite elements of a float array, in float64."""
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


@njit(**_OPTIONS)
def linear_distance(
    values: np.ndarray, integers: np.ndarray, step: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int
) -> tuple[float, int]:
    """Sum of squares of ``value - integer * step`` over finite elements, and their number."""
    lowest, highest = _exponent_range(step, rows, cols)
    powers = _power_table(lowest, highest)
    total = 0.0
    finite = 0
    row = start // width
    col = start - row * width
    for k in range(values.size):
        exponent = step - lowest
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        value = np.float64(values[k])
        if abs(value) <= 1.7976931348623157e308:
            difference = value - np.float64(integers[k]) * powers[exponent]
            total += difference * difference
            finite += 1
        col += 1
        if col == width:
            col = 0
            row += 1
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


@njit(**_OPTIONS)
def _quantise_flat(
    values: np.ndarray, predicted: np.ndarray, inverse: float, hysteresis: float, out: np.ndarray
) -> None:
    """`linear_quantise` with one step for all elements, without branches in its loops."""
    if predicted.size == 0:
        for k in range(values.size):
            out[k] = _nearest(np.float64(values[k]) * inverse)
        return
    for k in range(values.size):
        out[k] = _kept_or_nearest(np.float64(values[k]) * inverse, np.float64(predicted[k]), hysteresis)


@njit(**_OPTIONS)
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
    """Integers of finite `values`: the predicted one while within `hysteresis` steps, else the nearest.

    `predicted` is empty for a base (hysteresis then plays no part); a value that is not finite takes the predicted
    integer, 0 in a base.
    """
    lowest, highest = _exponent_range(step, rows, cols)
    inverses = _power_table(-highest, -lowest)
    if rows.size == 0 and cols.size == 0:
        _quantise_flat(values, predicted, inverses[0], hysteresis, out)
        return
    row = start // width
    col = start - row * width
    k = 0
    while k < values.size:
        stop = min(values.size, k + width - col)
        exponent = highest - step
        if rows.size:
            exponent -= rows[row]
        part = values[k:stop]
        before = predicted[k:stop]
        target = out[k:stop]
        if cols.size:
            across = cols[col : col + stop - k]
            for i in range(part.size):
                inverse = inverses[np.uint64(exponent - across[i])]
                if before.size:
                    target[i] = _kept_or_nearest(np.float64(part[i]) * inverse, np.float64(before[i]), hysteresis)
                else:
                    target[i] = _nearest(np.float64(part[i]) * inverse)
        else:
            _quantise_flat(part, before, inverses[exponent], hysteresis, target)
        k = stop
        col = 0
        row += 1


@njit(inline="always")
def _shifted(value: np.int64, bits: np.int64) -> np.int64:
    """``value / 2**bits``, rounded half up; clamped to a lattice's range where it grows."""
    right = np.int64(min(max(int(bits), 0), 40))
    left = np.int64(min(max(-int(bits), 0), 30))
    grown = min(max(value << left, np.int64(-16777216)), np.int64(16777216))
    return grown if bits < 0 else (value + ((np.int64(1) << right) >> np.int64(1))) >> right


@njit(**_OPTIONS)
def linear_project(
    integers: np.ndarray, shift: int, rows: np.ndarray, cols: np.ndarray, width: int, start: int, out: np.ndarray
) -> None:
    """Integers of a base on a lattice whose exponents are larger by ``shift + rows[i] + cols[j]``.

    Right shifts round half up (a floor would move every value by half a step and undo the hysteresis); results are
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
        part = integers[k:stop]
        target = out[k:stop]
        if cols.size:
            across = cols[col : col + stop - k]
            for i in range(part.size):
                target[i] = _shifted(np.int64(part[i]), bits + np.int64(across[i]))
        elif bits >= 0:
            # Most often by far; in whole vectors of 32 bits. No integer of a lattice has more.
            right = np.int32(min(int(bits), 30))
            half = np.int32((1 << right) >> 1)
            for i in range(part.size):
                target[i] = np.int32(part[i] + half) >> right
        else:
            for i in range(part.size):
                target[i] = _shifted(np.int64(part[i]), bits)
        k = stop
        col = 0
        row += 1


@njit(**_OPTIONS)
def _length_table() -> np.ndarray:
    """Bit lengths of the integers below 2048."""
    lengths = np.zeros(2048, np.uint8)
    for value in range(1, 2048):
        lengths[value] = lengths[value >> 1] + 1
    return lengths


@njit(**_OPTIONS)
def own_predict32(
    integers: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    out: np.ndarray,
    classes: np.ndarray,
) -> None:
    """Bits of the float32 lattice values, and each element's class for the exact layer.

    The class is the bit length of the integer (it says how the step compares with the unit in the last place), and
    for the integer 0 the element's step exponent relative to the smallest one, because there sign and exponent of
    the value itself are coded.
    """
    lowest, highest = _exponent_range(step, rows, cols)
    powers = _power_table(lowest, highest)
    floats = out.view(np.float32)
    if rows.size == 0 and cols.size == 0 and step < 103:
        # No value overflows, so that a value's exponent field tells the bit length of its integer.
        for k in range(integers.size):
            floats[k] = np.float32(np.float64(integers[k]) * powers[0])
        for k in range(integers.size):
            field = np.int32((out[k] >> np.uint32(23)) & np.uint32(255))
            classes[k] = np.uint8(field - (step + 126)) if field else np.uint8(32)
        return
    lengths = _length_table()
    row = start // width
    col = start - row * width
    for k in range(integers.size):
        exponent = step - lowest
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        integer = np.int64(integers[k])
        if integer:
            floats[k] = np.float32(np.float64(integer) * powers[exponent])
            magnitude = abs(integer)
            classes[k] = lengths[magnitude] if magnitude < 2048 else 11 + lengths[min(magnitude >> 11, 2047)]
        else:
            out[k] = 0
            classes[k] = 32 + min(exponent, 31)
        col += 1
        if col == width:
            col = 0
            row += 1


@njit(**_OPTIONS)
def own_predict64(
    integers: np.ndarray,
    step: int,
    rows: np.ndarray,
    cols: np.ndarray,
    width: int,
    start: int,
    out: np.ndarray,
    classes: np.ndarray,
) -> None:
    """`own_predict32` for float64."""
    lowest, highest = _exponent_range(step, rows, cols)
    powers = _power_table(lowest, highest)
    lengths = _length_table()
    floats = out.view(np.float64)
    row = start // width
    col = start - row * width
    for k in range(integers.size):
        exponent = step - lowest
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        integer = np.int64(integers[k])
        if integer:
            floats[k] = np.float64(integer) * powers[exponent]
            magnitude = abs(integer)
            classes[k] = lengths[magnitude] if magnitude < 2048 else 11 + lengths[min(magnitude >> 11, 2047)]
        else:
            out[k] = 0
            classes[k] = 32 + min(exponent, 31)
        col += 1
        if col == width:
            col = 0
            row += 1


@njit(**_OPTIONS)
def _chained_flat32(
    base: np.ndarray, integers: np.ndarray, step: int, power: float, reach: float, out: np.ndarray, classes: np.ndarray
) -> None:
    """`chained_predict32` with one step for all elements, without branches in its loops."""
    floats = out.view(np.float32)
    parents = base.view(np.float32)
    for k in range(base.size):
        value = np.float64(parents[k])
        value = value if abs(value) >= 1.1754943508222875e-38 else np.float64(0.0)
        low = (np.float64(integers[k]) - reach) * power
        high = (np.float64(integers[k]) + reach) * power
        below = value < low
        above = value > high
        rim = low if below else high
        rim = rim if abs(rim) >= 1.1754943508222875e-38 else np.float64(0.0)
        floats[k] = np.float32(rim)
        classes[k] = np.uint8(21) if below else (np.uint8(42) if above else np.uint8(0))
    for k in range(base.size):
        whole = (base[k] & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        moved = classes[k] != 0 and whole
        bits = out[k] if moved else base[k]
        out[k] = bits
        level = np.int32((bits >> np.uint32(23)) & np.uint32(255)) - np.int32(119 + step)
        level = min(max(level, np.int32(0)), np.int32(20))
        classes[k] = np.uint8(level + (np.int32(classes[k]) if moved else np.int32(0)))


@njit(**_OPTIONS)
def chained_predict32(
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
    """Bits of the parent's exact float32 values, moved to the rim of the own integer's cell where they lie outside.

    The cell of integer n reaches `reach` steps to both sides. Inside it the prediction is the parent's value bit for
    bit; subnormal parents count as 0 and subnormal rims are +0, so that flush-to-zero changes nothing. The class is
    the exponent of the prediction relative to the step, and whether and to which side the value was moved.
    """
    lowest, highest = _exponent_range(step, rows, cols)
    powers = _power_table(lowest, highest)
    if rows.size == 0 and cols.size == 0:
        _chained_flat32(base, integers, step, powers[0], reach, out, classes)
        return
    floats = out.view(np.float32)
    parents = base.view(np.float32)
    row = start // width
    col = start - row * width
    for k in range(base.size):
        exponent = step - lowest
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        bits = base[k]
        field = (bits >> np.uint32(23)) & np.uint32(255)
        side = 0
        if field != 255:
            value = 0.0
            if field != 0:
                value = np.float64(parents[k])
            low = (np.float64(integers[k]) - reach) * powers[exponent]
            high = (np.float64(integers[k]) + reach) * powers[exponent]
            if value < low:
                side = 1
                value = low
            elif value > high:
                side = 2
                value = high
        if side == 0:
            out[k] = bits
        elif abs(value) < 1.1754943508222875e-38:
            out[k] = 0
        else:
            floats[k] = np.float32(value)
        field = (out[k] >> np.uint32(23)) & np.uint32(255)
        level = np.int64(field) - 127 - (exponent + lowest) + 8
        classes[k] = 21 * side + min(max(level, 0), 20)
        col += 1
        if col == width:
            col = 0
            row += 1


@njit(**_OPTIONS)
def chained_predict64(
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
    """`chained_predict32` for float64."""
    lowest, highest = _exponent_range(step, rows, cols)
    powers = _power_table(lowest, highest)
    floats = out.view(np.float64)
    parents = base.view(np.float64)
    row = start // width
    col = start - row * width
    for k in range(base.size):
        exponent = step - lowest
        if rows.size:
            exponent += rows[row]
        if cols.size:
            exponent += cols[col]
        bits = base[k]
        field = (bits >> np.uint64(52)) & np.uint64(2047)
        side = 0
        if field != 2047:
            value = 0.0
            if field != 0:
                value = np.float64(parents[k])
            low = (np.float64(integers[k]) - reach) * powers[exponent]
            high = (np.float64(integers[k]) + reach) * powers[exponent]
            if value < low:
                side = 1
                value = low
            elif value > high:
                side = 2
                value = high
        if side == 0:
            out[k] = bits
        elif abs(value) < 2.2250738585072014e-308:
            out[k] = 0
        else:
            floats[k] = np.float64(value)
        field = (out[k] >> np.uint64(52)) & np.uint64(2047)
        level = np.int64(field) - 1023 - (exponent + lowest) + 8
        classes[k] = 21 * side + min(max(level, 0), 20)
        col += 1
        if col == width:
            col = 0
            row += 1


@njit(**_OPTIONS)
def scale32(bits: np.ndarray, factor: float, out: np.ndarray) -> None:
    """Bits of float32 values times `factor`, itself a float32 value; the same bits where one of both is not normal.

    The product is exact in float64 and rounded once, so that no fused arithmetic can change it.
    """
    floats = bits.view(np.float32)
    scaled = out.view(np.float32)
    for k in range(bits.size):
        field = (bits[k] >> np.uint32(23)) & np.uint32(255)
        out[k] = bits[k]
        if field != 0 and field != 255:
            value = np.float64(floats[k]) * factor
            if 1.1754943508222875e-38 <= abs(value) < 3.4028234e38:
                scaled[k] = np.float32(value)


@njit(**_OPTIONS)
def scale64(bits: np.ndarray, factor: float, out: np.ndarray) -> None:
    """`scale32` for float64; a single product, rounded once.

    A product that is rounded up to the least normal number comes out as 0 where the processor flushes subnormals, so
    that one counts as not normal too.
    """
    floats = bits.view(np.float64)
    scaled = out.view(np.float64)
    for k in range(bits.size):
        field = (bits[k] >> np.uint64(52)) & np.uint64(2047)
        out[k] = bits[k]
        if field != 0 and field != 2047:
            value = floats[k] * factor
            if 2.2250738585072014e-308 < abs(value) <= 1.7976931348623157e308:
                scaled[k] = value


@njit(**_OPTIONS)
def scale16(bits: np.ndarray, factor: float, out: np.ndarray) -> None:
    """`scale32` for bfloat16, by way of float32 and rounding to even."""
    words = bits.astype(np.uint32) << np.uint32(16)
    singles = words.view(np.float32)
    for k in range(bits.size):
        field = (words[k] >> np.uint32(23)) & np.uint32(255)
        if field != 0 and field != 255:
            value = np.float64(singles[k]) * factor
            if 1.1754943508222875e-38 <= abs(value) < 3.3e38:
                singles[k] = np.float32(value)
    for k in range(bits.size):
        if (words[k] & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
            out[k] = bits[k]
        else:
            rounded = words[k] + np.uint32(0x7FFF) + ((words[k] >> np.uint32(16)) & np.uint32(1))
            out[k] = np.uint16(rounded >> np.uint32(16))


@njit(inline="always")
def _ordinal(bits: int, sign: int) -> int:
    """The order-preserving integer of float bits, modulo the width: negative floats below, -0.0 just below +0.0."""
    if bits & sign:
        return ~(bits ^ sign)
    return bits


@njit(**_OPTIONS)
def ordinal_difference(bits: np.ndarray, predicted: np.ndarray, out: np.ndarray) -> None:
    """``ord(bits) - ord(predicted)`` modulo the width; all arrays of one unsigned dtype."""
    one = bits.dtype.type(1)
    sign = one << bits.dtype.type(bits.itemsize * 8 - 1)
    for k in range(bits.size):
        out[k] = _ordinal(bits[k], sign) - _ordinal(predicted[k], sign)


@njit(**_OPTIONS)
def ordinal_correct(predicted: np.ndarray, residuals: np.ndarray, out: np.ndarray) -> None:
    """Bits whose ordinal is ``ord(predicted) + residuals`` modulo the width; `out` may be `residuals`."""
    one = predicted.dtype.type(1)
    sign = one << predicted.dtype.type(predicted.itemsize * 8 - 1)
    for k in range(predicted.size):
        ordinal = predicted.dtype.type(_ordinal(predicted[k], sign) + residuals[k])
        if ordinal & sign:
            out[k] = ~ordinal ^ sign
        else:
            out[k] = ordinal


@njit(**_OPTIONS)
def magnitude_classes(bits: np.ndarray, shift: int, top: int, limit: int, classes: np.ndarray) -> None:
    """Class of each element: how far its magnitude's leading bits lie below `top`, at most `limit`.

    ``magnitude = (bits without sign) >> shift``; for floats with `shift` the mantissa's width it is the exponent
    field. `top` is the largest such value of interest; values above it get class 0.
    """
    mask = (bits.dtype.type(1) << bits.dtype.type(bits.itemsize * 8 - 1)) - bits.dtype.type(1)
    for k in range(bits.size):
        level = np.int64((bits[k] & mask) >> bits.dtype.type(shift))
        classes[k] = min(max(top - level, 0), limit)


@njit(**_OPTIONS)
def magnitude_top(bits: np.ndarray, shift: int, ceiling: int) -> int:
    """The largest ``(bits without sign) >> shift`` below `ceiling` (0 where there is none)."""
    mask = (bits.dtype.type(1) << bits.dtype.type(bits.itemsize * 8 - 1)) - bits.dtype.type(1)
    top = np.int64(0)
    for k in range(bits.size):
        level = np.int64((bits[k] & mask) >> bits.dtype.type(shift))
        if level < ceiling and level > top:
            top = level
    return int(top)
