"""Floats from their bits and back, and powers of two, without views of arrays, tables or a library's exp2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic


def _float(bits: Any) -> Any:
    """Return the float type of unsigned integers of 32 or 64 bits; for 16 bits, the wider type of bfloat16."""
    return types.float64 if bits.bitwidth == 64 else types.float32


@intrinsic
def _float_from(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = arguments[0]
        if bits.bitwidth == 16:
            wide = context.get_value_type(types.uint32)
            word = builder.shl(builder.zext(word, wide), wide(16))
        return builder.bitcast(word, context.get_value_type(_float(bits)))

    return _float(bits)(bits), generate


@intrinsic
def _bits_of(typing_context: Any, value: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rounded = context.cast(builder, arguments[0], value, _float(like))
        if like.bitwidth != 16:
            return builder.bitcast(rounded, context.get_value_type(like))
        wide = context.get_value_type(types.uint32)
        word = builder.bitcast(rounded, wide)
        odd = builder.and_(builder.lshr(word, wide(16)), wide(1))
        even = builder.add(builder.add(word, wide(0x7FFF)), odd)
        return builder.trunc(builder.lshr(even, wide(16)), context.get_value_type(like))

    return like(value, like), generate


float_from: Callable[[Any], float] = cast(Any, _float_from)
"""The float of the bits of an unsigned integer of 32 or 64 bits; of 16 bits, the float32 of a bfloat16."""

bits_of: Callable[[Any, Any], Any] = cast(Any, _bits_of)
"""The bits of a float, rounded to even to the width of the second argument; to 16 bits by way of float32."""


@intrinsic
def _power(typing_context: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = arguments[0].type
        bits = builder.shl(builder.add(arguments[0], integer(1023)), integer(52))
        return builder.bitcast(bits, context.get_value_type(types.float64))

    return types.float64(types.int64), generate


power_of_two: Callable[[Any], np.float64] = cast(Any, _power)
"""Two to the power of an integer from -1022 to 1023, in float64."""
