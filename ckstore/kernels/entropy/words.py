"""Unaligned 64-bit words and bit lengths for the entropy kernels, and the options with which they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.cpu import CPUTargetOptions
from numba.extending import intrinsic

from ckstore.kernels.compiled import Decorator

Array = npt.NDArray[Any]
"""Any array; the docstrings say of what."""

Word = Any
"""An unsigned 64-bit word. NumPy makes a float of one and an `int`: both sides of an operator must be words."""

int32: Callable[[Any], int] = cast(Any, np.int32)
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


def _references(counted: bool) -> dict[str, Any]:
    """The option to count references or not. Numba has a name for it only among its own; without it, all count."""
    return {"_nrt": counted} if hasattr(CPUTargetOptions, "_nrt") else {}


inner: Decorator = njit(**_OPTIONS, **_references(False))
"""Decorator of what only kernels call: without the wrappers for Python, compiling takes a third less.

References to the arrays given are not counted: those atomic additions take as long as a short function does. So it
makes and returns no arrays, and calls nothing that is `counted`.
"""

inlined: Decorator = njit(forceinline=True, **_OPTIONS, **_references(False))
"""The same, for what must be part of its caller's loop."""

counted: Decorator = njit(**_OPTIONS, **_references(True))
"""The same as `inner`, for what makes arrays of its own or calls what does, and so has to count references."""

spliced: Decorator = njit(inline="always", **_OPTIONS)
"""The same, for what is short or called from one place: it becomes part of its callers before they are compiled, and is
not compiled by itself, which takes as long again at every level of calls."""


def _word_address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = _structure(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), ir.IntType(64).as_pointer())


@intrinsic
def _load_word(typing_context: Any, array: Any, offset: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(_word_address(context, builder, signature.args[0], arguments[0], arguments[1]))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def _store_word(typing_context: Any, array: Any, offset: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _word_address(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def _leading_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.int64(types.uint64), generate


load_word: Callable[[Array, int], Word] = cast(Any, _load_word)
"""The little-endian unsigned 64-bit word at byte `offset` of a uint8 array; the caller checks the bounds."""

store_word: Callable[[Array, int, Word], None] = cast(Any, _store_word)
"""Write eight little-endian bytes at byte `offset` of a uint8 array; the caller checks the bounds."""

_count_leading_zeros: Callable[[Word], int] = cast(Any, _leading_zeros)


@inner
def bit_length(word: Word) -> int:
    """Number of significant bits of an unsigned word, 0 for 0."""
    return 64 - _count_leading_zeros(word)


@inner
def low_bits(word: Word, bits: int) -> Word:
    """The low `bits` (0 to 63) bits of an unsigned word."""
    return word & ((uint64(1) << uint64(bits)) - uint64(1))


@inner
def zigzag(value: int) -> Word:
    """Unsigned image of a signed integer: 0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 ..."""
    wide = int64(value)
    return uint64((wide << 1) ^ (wide >> 63))


@inner
def unzigzag(number: Word) -> int:
    """Signed integer of a zigzag number."""
    return int64(number >> uint64(1)) ^ -int64(number & uint64(1))


@inner
def read_bits(buffer: Array, position: int, limit: int, bits: int) -> Word:
    """Up to 63 raw bits at a bit position, loads beyond `limit` moved there."""
    result = uint64(0)
    done = 0
    while done < bits:
        part = min(bits - done, 32)
        at = min(position + done, limit)
        word = load_word(buffer, at >> 3) >> uint64(at & 7)
        result |= low_bits(word, part) << uint64(done)
        done += part
    return result
