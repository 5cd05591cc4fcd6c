"""Kernels that convert between float32 and floats of 16 bits: integer arithmetic, the same on every processor."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel


@kernel
def to_bfloat16(bits: np.ndarray, out: np.ndarray) -> None:
    """Round float32 bits of finite numbers to bfloat16, ties to even; overflow becomes the largest finite number."""
    for k in range(bits.size):
        value = bits[k]
        rounded = (value + np.uint32(0x7FFF) + ((value >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        if rounded & np.uint32(0x7F80) == np.uint32(0x7F80):
            rounded = (rounded & np.uint32(0x8000)) | np.uint32(0x7F7F)
        out[k] = np.uint16(rounded)


@kernel
def to_float16(bits: np.ndarray, out: np.ndarray) -> None:
    """Round float32 bits of finite numbers to float16, ties to even; overflow becomes the largest finite number."""
    for k in range(bits.size):
        value = np.int64(bits[k])
        sign = (value >> 16) & 0x8000
        magnitude = value & 0x7FFFFFFF
        exponent = magnitude >> 23
        if exponent >= 113:
            rounded = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
            rounded = min(rounded, np.int64(0x7BFF))
        elif exponent >= 102:
            # A subnormal float16: whole multiples of 2^-24.
            shift = 126 - exponent
            mantissa = (magnitude & 0x7FFFFF) | 0x800000
            rounded = (mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift
        else:
            rounded = np.int64(0)
        out[k] = np.uint16(sign | rounded)


@kernel
def from_bfloat16(bits: np.ndarray, out: np.ndarray) -> None:
    """Convert bfloat16 bits to float32 bits."""
    for k in range(bits.size):
        out[k] = np.uint32(bits[k]) << np.uint32(16)


@kernel
def from_float16(bits: np.ndarray, out: np.ndarray) -> None:
    """Convert float16 bits to float32 bits; subnormals become normal float32 numbers."""
    for k in range(bits.size):
        half = np.int64(bits[k])
        field = (half >> 10) & 31
        mantissa = half & 0x3FF
        if field == 31:
            field = np.int64(255)
        elif field:
            field += 112
        elif mantissa:
            field = np.int64(113)
            while not mantissa & 0x400:
                mantissa <<= 1
                field -= 1
        out[k] = np.uint32(((half & 0x8000) << 16) | (field << 23) | ((mantissa & 0x3FF) << 13))
