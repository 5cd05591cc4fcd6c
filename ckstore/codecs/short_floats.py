"""Floats of 16 bits as float32 and back; computations use the wider type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.runtime.blocks import aligned, empty

Words = npt.NDArray[np.uint32]
Bits = npt.NDArray[Any]

#: dtypes of 16 bits that are widened to float32 for computations.
SHORT = ("bfloat16", "float16")


def widened(bits: Bits, dtype: str) -> Words:
    """Return float32 bits of float16 or bfloat16 bits; exact, with NaN and infinities."""
    from ckstore.kernels import short_floats as kernels

    words = empty(bits.size, np.uint32)
    (kernels.from_bfloat16 if dtype == "bfloat16" else kernels.from_float16)(aligned(bits.view(np.uint16)), words)
    return words


def narrowed(words: Words, dtype: str, out: Bits | None = None) -> Bits:
    """Round finite float32 bits to float16 or bfloat16: to nearest, ties to even, at most the largest finite number.

    Writes into `out` if given.
    """
    from ckstore.kernels import short_floats as kernels

    bits = empty(words.size, np.uint16) if out is None else out
    (kernels.to_bfloat16 if dtype == "bfloat16" else kernels.to_float16)(aligned(words), bits)
    return bits
