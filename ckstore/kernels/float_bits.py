"""Powers of two, without tables or a library's exp2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic


@intrinsic
def _power(typing_context: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = arguments[0].type
        bits = builder.shl(builder.add(arguments[0], integer(1023)), integer(52))
        return builder.bitcast(bits, context.get_value_type(types.float64))

    return types.float64(types.int64), generate


power_of_two: Callable[[Any], np.float64] = cast(Any, _power)
"""Two to the power of an integer from -1022 to 1023, in float64."""
