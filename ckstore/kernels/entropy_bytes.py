"""Unaligned loads and stores of two and four bytes for the entropy kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.entropy_words import Array, Word

_structure: Callable[[Any], Any] = cgutils.create_struct_proxy


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, bits: int) -> Any:
    data = _structure(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), ir.IntType(bits).as_pointer())


def _loader(bits: int) -> Callable[[Array, Word], Word]:
    @intrinsic
    def load(typing_context: Any, array: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(_address(context, builder, signature.args[0], arguments[0], arguments[1], bits))
            value.align = 1
            return builder.zext(value, ir.IntType(64))

        return types.uint64(array, types.uint64), generate

    return cast(Any, load)


def _storer(bits: int) -> Callable[[Array, Word, Word], None]:
    @intrinsic
    def store(typing_context: Any, array: Any, offset: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = _address(context, builder, signature.args[0], arguments[0], arguments[1], bits)
            builder.store(builder.trunc(arguments[2], ir.IntType(bits)), address).align = 1
            return context.get_dummy_value()

        return types.void(array, types.uint64, types.uint64), generate

    return cast(Any, store)


load_2, load_4 = _loader(16), _loader(32)
"""The little-endian unsigned integer of two or four bytes at a byte of a uint8 array; the caller checks the bounds."""

store_2, store_4 = _storer(16), _storer(32)
"""Write the low two or four bytes of a word at a byte of a uint8 array; the caller checks the bounds."""
