"""The lattice loops once more, in NumPy and Python integers: slow, obviously right, and what the tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def exponents(count: int, step: int, rows: Array, cols: Array, width: int, start: int) -> Array:
    """The binary exponent of the step of each of `count` elements from element `start` on."""
    position = np.arange(start, start + count)
    result = np.full(count, step, np.int64)
    if rows.size:
        result += rows[position // width]
    if cols.size:
        result += cols[position % width]
    return result


def linear_quantise(values: Array, predicted: Array, exponent: Array, hysteresis: float) -> Array:
    """Integers (int32): see `ckstore.kernels.lattice.linear_quantise`."""
    with np.errstate(all="ignore"):
        scaled = np.ldexp(values.astype(np.float64), -exponent)
    finite = np.isfinite(scaled)
    nearest = np.clip(np.rint(np.where(finite, scaled, 0.0)), -(1 << 24), 1 << 24).astype(np.int64)
    if not predicted.size:
        return np.where(finite, nearest, 0).astype(np.int32)
    with np.errstate(all="ignore"):
        kept = ~finite | (np.abs(scaled - predicted) < hysteresis)
    return np.where(kept, predicted, nearest).astype(np.int32)


def linear_values(integers: Array, exponent: Array, dtype: str) -> Array:
    """Lattice values as bits of `dtype` (float32 or float64)."""
    with np.errstate(over="ignore"):
        values = np.ldexp(integers.astype(np.float64), exponent).astype(dtype)
    return np.where(integers == 0, np.zeros((), dtype), values).view(f"u{values.itemsize}")


def linear_project(integers: Array, shift: Array) -> Array:
    """Integers shifted by an exponent each, rounding half up; see `ckstore.kernels.lattice.linear_project`."""
    result = []
    for integer, bits in zip(integers.tolist(), shift.tolist(), strict=True):
        if bits > 0:
            result.append((integer + (1 << (min(bits, 40) - 1))) >> min(bits, 40))
        elif bits < 0:
            result.append(min(max(integer << min(-bits, 30), -(1 << 24)), 1 << 24))
        else:
            result.append(integer)
    return np.array(result, np.int32)


def chained_values(parent: Array, integers: Array, exponent: Array, dtype: str, reach: float) -> Array:
    """Bits of the parent's values moved into the cells of the integers; see `chained_predict32`."""
    tiny = float(np.finfo(dtype).tiny)
    result = parent.copy()
    with np.errstate(invalid="ignore"):
        doubles = parent.view(dtype).astype(np.float64)
    for k, value in enumerate(doubles):
        if not np.isfinite(value):
            continue
        value = 0.0 if abs(value) < tiny else value
        low = np.ldexp(float(integers[k]) - reach, int(exponent[k]))
        high = np.ldexp(float(integers[k]) + reach, int(exponent[k]))
        if low <= value <= high:
            continue
        rim = low if value < low else high
        with np.errstate(over="ignore"):
            moved = np.array(0.0 if abs(rim) < tiny else rim).astype(dtype)
        result[k] = moved.view(result.dtype)
    return result


def ordinal(bits: Array) -> list[int]:
    """The order-preserving integers of float bits: -1 for -0.0, 0 for +0.0."""
    width = 8 * bits.itemsize
    sign = 1 << (width - 1)
    return [-1 - (value ^ sign) if value & sign else value for value in bits.tolist()]


def ordinal_difference(bits: Array, predicted: Array) -> Array:
    """Difference of ordinals modulo the width, as unsigned integers."""
    modulus = 1 << (8 * bits.itemsize)
    pairs = zip(ordinal(bits), ordinal(predicted), strict=True)
    return np.array([(one - other) % modulus for one, other in pairs], bits.dtype)


def scaled_values(bits: Array, dtype: str, factor: float) -> Array:
    """Bits of values times `factor`; see `scale32`. For float32, float64 and bfloat16."""
    single = dtype == "bfloat16"
    with np.errstate(all="ignore"):
        floats = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32) if single else bits.view(dtype)
        tiny = np.finfo(floats.dtype).tiny
        products = floats.astype(np.float64) * factor
        rounded = products.astype(floats.dtype)
        normal = np.isfinite(floats) & (np.abs(floats) >= tiny) & np.isfinite(rounded)
        # Products of float64 may have been rounded up to the least normal number.
        normal &= np.abs(products) > tiny if dtype == "float64" else np.abs(products) >= tiny
    if single:
        words = rounded.view(np.uint32).astype(np.uint64)
        halves = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        normal &= np.abs(products) < 3.3e38
        return np.where(normal, halves, bits)
    return np.where(normal, rounded.view(bits.dtype), bits)
