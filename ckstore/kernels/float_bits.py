"""Floats from their bits and back, and powers of two: no view of an array, no table, no library's exp2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic


def _reinterpreted(source: Any, target: Any) -> Callable[[Any], Any]:
    @intrinsic
    def convert(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), generate

    return cast(Any, convert)


float32_from: Callable[[Any], float] = _reinterpreted(types.uint32, types.float32)
float64_from: Callable[[Any], float] = _reinterpreted(types.uint64, types.float64)
"""The float whose bits an unsigned integer of its width is."""

bits_of_float32: Callable[[Any], Any] = _reinterpreted(types.float32, types.uint32)
bits_of_float64: Callable[[Any], Any] = _reinterpreted(types.float64, types.uint64)
"""The bits of a float as an unsigned integer of its width."""


@intrinsic
def _power(typing_context: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = arguments[0].type
        bits = builder.shl(builder.add(arguments[0], integer(1023)), integer(52))
        return builder.bitcast(bits, context.get_value_type(types.float64))

    return types.float64(types.int64), generate


power_of_two: Callable[[Any], np.float64] = cast(Any, _power)
"""Two to the power of an integer from -1022 to 1023, in float64."""
