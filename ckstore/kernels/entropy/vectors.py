"""Sorting 64 elements by class at once, by instructions that compress and expand vectors of 64 bytes (AVX-512).

A class's elements are moved to the front of their vector and stored behind those that came before them, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.entropy.words import Array, Word, int64
from ckstore.kernels.processor import has

BLOCK = int64(64)
"""Elements that are taken at once."""

_BYTES = 64
_BIT, _BYTE, _INDEX, _WORD = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_CLASSES = ir.VectorType(_BYTE, int(BLOCK))
_structure: Callable[[Any], Any] = cgutils.create_struct_proxy


def has_vectors() -> bool:
    """Whether kernels are compiled for a processor that has what this takes."""
    return has("avx512f", "avx512bw", "avx512vbmi2")


@intrinsic
def _sorts(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _BIT(has_vectors())

    return types.boolean(), generate


def _equal(builder: Any, classes: Any, group_class: Any) -> Any:
    """A bit for each class of a block that is this one."""
    nothing = ir.Constant(_CLASSES, ir.Undefined)
    single = builder.insert_element(nothing, group_class, _INDEX(0))
    all_equal = builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(_INDEX, int(BLOCK)), None))
    return builder.bitcast(builder.icmp_signed("==", classes, all_equal), _WORD)


def _mover(name: str, expands: bool) -> Any:
    """The intrinsic that takes a block's elements of some classes from `values` to `coded`, or back."""

    @intrinsic
    def move(
        typing_context: Any, values: Any, classes: Any, at: Any, kinds: Any, number: Any, cursors: Any, ends: Any,
        coded: Any,
    ) -> Any:  # fmt: skip
        bits = values.dtype.bitwidth
        lanes = 8 * _BYTES // bits
        vector = ir.VectorType(ir.IntType(bits), lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if not has_vectors():
                return _WORD(-1)
            values_at, classes_at, kinds_at, cursors_at, ends_at, coded_at = (
                _structure(signature.args[i])(context, builder, arguments[i]).data for i in (0, 1, 3, 5, 6, 7)
            )
            moved = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(vector, [vector, vector, ir.VectorType(_BIT, lanes)]),
                f"llvm.x86.avx512.mask.{name}.v{lanes}i{bits}",
            )
            nothing = ir.Constant(vector, None)

            def place(base: Any, index: Any) -> Any:
                return builder.bitcast(builder.gep(base, [index]), vector.as_pointer())

            def load(base: Any, index: Any) -> Any:
                loaded = builder.load(place(base, index))
                loaded.align = 1
                return loaded

            places = [builder.add(arguments[2], _WORD(first)) for first in range(0, int(BLOCK), lanes)]
            block = builder.load(builder.bitcast(builder.gep(classes_at, [arguments[2]]), _CLASSES.as_pointer()))
            block.align = 1
            left = cgutils.alloca_once_value(builder, _WORD(-1))
            held = [cgutils.alloca_once_value(builder, nothing if expands else load(values_at, at)) for at in places]
            with cgutils.for_range(builder, arguments[4]) as loop:
                kind = builder.load(builder.gep(kinds_at, [loop.index]))
                index = builder.zext(kind, _WORD)
                cursor_at = builder.gep(cursors_at, [index])
                cursor = builder.load(cursor_at)
                end = builder.load(builder.gep(ends_at, [index]))
                # Whole vectors are loaded and stored: not those that might reach beyond the class's place.
                room = builder.icmp_signed("<=", builder.add(cursor, _WORD(int(BLOCK) + lanes)), end)
                mask = builder.select(room, _equal(builder, block, kind), _WORD(0))
                with builder.if_then(builder.icmp_unsigned("!=", mask, _WORD(0)), likely=True):
                    builder.store(builder.xor(builder.load(left), mask), left)
                    for part, kept in enumerate(held):
                        some = mask
                        if lanes < int(BLOCK):
                            some = builder.trunc(builder.lshr(mask, _WORD(part * lanes)), ir.IntType(lanes))
                        chosen = builder.bitcast(some, ir.VectorType(_BIT, lanes))
                        if expands:
                            taken = builder.call(moved, [load(coded_at, cursor), builder.load(kept), chosen])
                            builder.store(taken, kept)
                        else:
                            taken = builder.call(moved, [builder.load(kept), nothing, chosen])
                            builder.store(taken, place(coded_at, cursor)).align = 1
                        count = builder.ctpop(some)
                        cursor = builder.add(cursor, builder.zext(count, _WORD) if lanes < int(BLOCK) else count)
                    builder.store(cursor, cursor_at)
            if expands:
                for at, kept in zip(places, held, strict=True):
                    builder.store(builder.load(kept), place(values_at, at)).align = 1
            return builder.load(left)

        return types.uint64(values, classes, types.int64, kinds, types.int64, cursors, ends, coded), generate

    return move


sorts_vectors: Callable[[], bool] = cast(Any, _sorts)
"""Whether the processor has what the following takes; a constant where it is compiled."""

compress: Callable[[Array, Array, int, Array, int, Array, Array, Array], Word] = cast(Any, _mover("compress", False))
"""Write the block of `values` that begins at an element into `coded`, sorted by class.

Parameters
----------
values, classes (uint8)
    In natural order.
at : int
    The block's first element.
kinds, number
    The classes (uint8) whose elements are written, in any order, and how many these are.
cursors, ends : (256,) int64
    By class where its next element goes, which is moved, and where its place ends.
coded
    Of the dtype of `values`.

Returns a bit for each element that was not written, being of another class or near the end of its class's place.
"""

expand: Callable[[Array, Array, int, Array, int, Array, Array, Array], Word] = cast(Any, _mover("expand", True))
"""The way back: fill a block of `values`. Elements that were not found are 0."""
