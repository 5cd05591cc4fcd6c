"""Comparisons of 64 elements at once: a bit for each, the first one in the lowest bit of a word.

Written as vectors of LLVM, which makes of them what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.entropy.words import Array, Word, int64

MASKED = int64(64)
"""Elements of a mask."""

_structure: Callable[[Any], Any] = cgutils.create_struct_proxy


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = _structure(array_type)(context, builder, array).data
    vector = ir.VectorType(context.get_data_type(array_type.dtype), int(MASKED))
    elements = builder.load(builder.bitcast(builder.gep(data, [offset]), vector.as_pointer()))
    elements.align = 1
    return elements


@intrinsic
def _non_zeros(typing_context: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        elements = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        different = builder.icmp_signed("!=", elements, ir.Constant(elements.type, None))
        return builder.bitcast(different, ir.IntType(64))

    return types.uint64(array, types.uint64), generate


@intrinsic
def _equals(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        elements = _load(context, builder, signature.args[0], arguments[0], arguments[1])
        nothing = ir.Constant(elements.type, ir.Undefined)
        single = builder.insert_element(nothing, arguments[2], ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), int(MASKED)), None)
        equal = builder.icmp_signed("==", elements, builder.shuffle_vector(single, nothing, lanes))
        return builder.bitcast(equal, ir.IntType(64))

    return types.uint64(array, types.uint64, array.dtype), generate


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@intrinsic
def _ones(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


non_zeros: Callable[[Array, Word], Word] = cast(Any, _non_zeros)
"""Which of the 64 elements from `offset` on are not zero; the caller checks the bounds."""

equals: Callable[[Array, Word, int], Word] = cast(Any, _equals)
"""Which of them have a value, given in the array's dtype; the caller checks the bounds."""

first_bit: Callable[[Word], Word] = cast(Any, _trailing_zeros)
"""Place of the lowest bit that is set, 64 where none is."""

count_bits: Callable[[Word], int] = cast(Any, _ones)
"""Number of bits that are set."""
