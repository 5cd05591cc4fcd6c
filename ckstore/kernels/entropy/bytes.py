"""Unaligned loads and stores of two and four bytes for the entropy kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.entropy.words import Array, Word, spliced, uint64

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

store_1, store_2, store_4, store_8 = _storer(8), _storer(16), _storer(32), _storer(64)
"""Write the low one to eight bytes of a word at a byte of a uint8 array; the caller checks the bounds."""


@spliced
def store_element(coded: Array, size: int, at: Word, value: Word) -> None:
    """Write element `at`, of `size` bytes, of integers of any width that are given as a uint8 array."""
    if size == 1:
        store_1(coded, at, value)
    elif size == 2:
        store_2(coded, at << uint64(1), value)
    elif size == 4:
        store_4(coded, at << uint64(2), value)
    else:
        store_8(coded, at << uint64(3), value)
