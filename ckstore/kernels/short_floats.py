"""Kernels that convert between float32 and floats of 16 bits: `short_floats.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_to_bfloat16, _to_float16, _from_bfloat16, _from_float16 = (
    function(name, "pp") for name in ("to_bfloat16", "to_float16", "from_bfloat16", "from_float16")
)


def to_bfloat16(bits: Array, out: Array) -> None:
    """Round float32 bits of finite numbers to bfloat16, ties to even; overflow becomes the largest finite number."""
    check(_to_bfloat16(id(bits), id(out)))


def to_float16(bits: Array, out: Array) -> None:
    """Round float32 bits of finite numbers to float16, ties to even; overflow becomes the largest finite number."""
    check(_to_float16(id(bits), id(out)))


def from_bfloat16(bits: Array, out: Array) -> None:
    """Convert bfloat16 bits to float32 bits."""
    check(_from_bfloat16(id(bits), id(out)))


def from_float16(bits: Array, out: Array) -> None:
    """Convert float16 bits to float32 bits; subnormals become normal float32 numbers."""
    check(_from_float16(id(bits), id(out)))
