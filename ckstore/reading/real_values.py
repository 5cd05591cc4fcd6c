"""Elements as float64, for computations, and back: rounded once, to nearest, ties to even."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import PARTS, part_dtype
from ckstore.codecs.short_floats import SHORT, narrowed, widened
from ckstore.dtypes import NATIVE

Bits = npt.NDArray[Any]
Reals = npt.NDArray[np.float64]

#: Mantissa bits, bias, and the magnitude from which codes are no numbers, of the float8 dtypes; those of `fnuz` and
#: `fn` have no infinities, and `fnuz` has its NaN in place of -0.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7, 0x7F),
    "float8_e4m3fnuz": (3, 8, 0x80),
    "float8_e5m2": (2, 15, 0x7C),
    "float8_e5m2fnuz": (2, 16, 0x80),
}

#: The numbers of the codes of float4.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def parts_of(dtype: str) -> int:
    """Return the number of real parts of an element: 2 for complex numbers."""
    return 2 if dtype in PARTS else 1


def to_float64(bits: Bits, dtype: str) -> Reals:
    """Return the numbers of elements as float64: two of a complex element, and of a byte of float4.

    Integers beyond 2^53 are rounded.
    """
    dtype = part_dtype(dtype)
    if dtype in SHORT:
        return widened(bits.view(np.uint16), dtype).view(np.float32).astype(np.float64)
    if dtype in NATIVE:
        return bits.view(dtype).astype(np.float64)
    table = _float8(dtype)
    codes = bits.view(np.uint8)
    return _FLOAT4[float4_codes(codes)] if table is None else table[codes]


def float4_codes(packed: Bits) -> Bits:
    """Return the codes of float4 numbers, lower half of each byte first: the last axis is doubled."""
    shape = packed.shape or (1,)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*shape[:-1], 2 * shape[-1])


def float4_numbers(packed: Bits) -> Bits:
    """Return float4 numbers, as `float4_codes`: of ml_dtypes where it is installed, else float32."""
    codes = float4_codes(packed)
    try:
        import ml_dtypes
    except ImportError:
        return _FLOAT4[codes].astype(np.float32)
    return codes.view(ml_dtypes.float4_e2m1fn)


def plain_numbers(bits: Bits, dtype: str) -> Bits:
    """Return elements in their `plain_dtype`; bits unchanged if NumPy has their dtype, or packs several in a byte."""
    if dtype == "bfloat16":
        return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        parts = np.ascontiguousarray(bits).reshape(-1).view(np.float16)
        return parts.astype(np.float32).view(np.complex64).reshape(bits.shape)
    table = _float8(dtype)
    return bits if table is None else np.asarray(table[bits], np.float32)


def from_float64(values: Reals, dtype: str) -> Bits:
    """Return values as the bits of a float or complex dtype of 16 bits or more."""
    dtype = part_dtype(dtype)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    with np.errstate(over="ignore"):
        words = values.astype(np.float32)
    near, bits = words.astype(np.float64), words.view(np.uint32)
    # Rounding to an odd last bit where float32 is inexact keeps the second rounding from a false tie.
    off = np.flatnonzero((near != values) & (bits & 1 == 0) & np.isfinite(words))
    bits[off] += np.where(np.abs(near[off]) < np.abs(values[off]), 1, -1).astype(np.uint32)
    short = narrowed(bits, dtype)
    odd = np.flatnonzero(~np.isfinite(words))
    short[odd] = (bits[odd] >> 16) | np.where(np.isnan(words[odd]), np.uint32(0x40), np.uint32(0))
    return short


@cache
def _float8(dtype: str) -> Reals | None:
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        table = np.ldexp(1.0, codes - 127)
        table[255] = np.nan
        return table
    if dtype not in _FLOAT8:
        return None
    width, bias, last = _FLOAT8[dtype]
    magnitude = codes & 0x7F
    field, mantissa = magnitude >> width, magnitude & ((1 << width) - 1)
    values = np.where(field > 0, mantissa + (1 << width), mantissa).astype(np.float64)
    table = np.ldexp(values, np.maximum(field, 1) - bias - width)
    table[magnitude >= last] = np.nan
    if dtype == "float8_e5m2":
        table[magnitude == last] = np.inf
    table = np.where(codes < 128, table, -table)
    if dtype.endswith("fnuz"):
        table[128] = np.nan
    return np.asarray(table, np.float64)
