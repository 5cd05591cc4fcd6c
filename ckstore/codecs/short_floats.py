"""Floats of 16 bits as float32 and back; where they are computed with, they are widened."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.runtime.blocks import empty, fixed

Words = npt.NDArray[np.uint32]
Bits = npt.NDArray[Any]

#: dtypes of 16 bits that are widened to float32 to compute with them.
SHORT = ("bfloat16", "float16")


def widened(bits: Bits, dtype: str) -> Words:
    """float32 bits of float16 or bfloat16 bits; exact, NaN and infinities included."""
    from ckstore.kernels import short_floats as kernels

    words = empty(bits.size, np.uint32)
    (kernels.from_bfloat16 if dtype == "bfloat16" else kernels.from_float16)(fixed(bits.view(np.uint16)), words)
    return words


def narrowed(words: Words, dtype: str, out: Bits | None = None) -> Bits:
    """float16 or bfloat16 bits of finite float32 bits: to nearest, ties to even, at most the largest finite number.

    In `out` if given.
    """
    from ckstore.kernels import short_floats as kernels

    bits = empty(words.size, np.uint16) if out is None else out
    (kernels.to_bfloat16 if dtype == "bfloat16" else kernels.to_float16)(fixed(words), bits)
    return bits
