"""Unaligned 64-bit words and bit lengths for the entropy kernels, and the options of their compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.compiled import Decorator
from ckstore.runtime.compiling import reference_counting

Array = npt.NDArray[Any]
"""Any array; the docstrings name its dtype."""

Word = Any
"""An unsigned 64-bit word. NumPy makes a float of one and an `int`: both operands must be words."""

int64: Callable[[Any], int] = cast(Any, np.int64)
uint64: Callable[[Any], Word] = np.uint64
"""NumPy's types under names whose results the type checker takes for `int` and for words."""

_structure: Callable[[Any], Any] = cgutils.create_struct_proxy

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


inner: Decorator = njit(**_OPTIONS, **reference_counting(False))
"""Decorator of functions that only kernels call: without the wrappers for Python, compiling takes a third less.

References to the given arrays are not counted: those atomic additions take as long as a short function. So the function
makes and returns no arrays, and calls no `counted` function.
"""

inlined: Decorator = njit(forceinline=True, **_OPTIONS, **reference_counting(False))
"""The same, for functions that must be part of their caller's loop."""

counted: Decorator = njit(**_OPTIONS, **reference_counting(True))
"""The same as `inner`, for functions that make arrays or call such functions, and so must count references."""

spliced: Decorator = njit(inline="always", **_OPTIONS)
"""The same, for functions that are short or called from one place. They become part of their callers before
compilation, and are not compiled themselves, which would take as long again at every level of calls."""


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, kind: Any) -> Any:
    data = _structure(array_type)(context, builder, array).data
    byte = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer()), [offset])
    return builder.bitcast(byte, kind.as_pointer())


def _loader(bits: int) -> Callable[[Array, int], Word]:
    @intrinsic
    def load(typing_context: Any, array: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(
                _address(context, builder, signature.args[0], arguments[0], arguments[1], ir.IntType(bits))
            )
            value.align = 1
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return types.uint64(array, types.int64), generate

    return cast(Any, load)


def _storer(bits: int) -> Callable[[Array, int, Any], None]:
    @intrinsic
    def store(typing_context: Any, array: Any, offset: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _address(context, builder, signature.args[0], arguments[0], arguments[1], ir.IntType(bits))
            value = arguments[2] if bits == 64 else builder.trunc(arguments[2], ir.IntType(bits))
            builder.store(value, place).align = 1
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), generate

    return cast(Any, store)


load_2, load_4, load_word = _loader(16), _loader(32), _loader(64)
"""Return the little-endian unsigned integer of two to eight bytes at a byte of an array; the caller checks the
bounds."""

store_1, store_2, store_4, store_word = _storer(8), _storer(16), _storer(32), _storer(64)
"""Write the low one to eight bytes of a word at a byte of an array; the caller checks the bounds."""


@intrinsic
def _leading_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


@intrinsic
def _differing(typing_context: Any, array: Any, other: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), int(MASKED))
        loaded = []
        for kind, argument in zip(signature.args[:2], arguments[:2], strict=True):
            data = _structure(kind)(context, builder, argument).data
            loaded.append(builder.load(builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())))
            loaded[-1].align = 1
        return builder.bitcast(builder.icmp_signed("!=", *loaded), ir.IntType(64))

    return types.uint64(array, other, types.int64), generate


MASKED = int64(64)
"""Elements of a mask."""

differing_bytes: Callable[[Array, Array, int], Word] = cast(Any, _differing)
"""Return a mask of the 64 bytes from `offset` on that differ between two uint8 arrays, the first in the lowest bit; the
caller checks the bounds."""

first_bit: Callable[[Word], int] = cast(Any, _trailing_zeros)
"""Return the place of the lowest set bit, 64 if none is set."""

_count_leading_zeros: Callable[[Word], int] = cast(Any, _leading_zeros)


@inner
def bit_length(word: Word) -> int:
    """Return the number of significant bits of an unsigned word, 0 for 0."""
    return 64 - _count_leading_zeros(word)


@inner
def low_bits(word: Word, bits: int) -> Word:
    """Return the low `bits` (0 to 63) bits of an unsigned word."""
    return word & ((uint64(1) << uint64(bits)) - uint64(1))


@spliced
def store_element(coded: Array, size: int, at: int, value: int) -> None:
    """Write element `at`, of `size` bytes, of integers of any width that are passed as a uint8 array."""
    if size == 1:
        store_1(coded, at, value)
    elif size == 2:
        store_2(coded, at << 1, value)
    elif size == 4:
        store_4(coded, at << 2, value)
    else:
        store_word(coded, at << 3, value)
