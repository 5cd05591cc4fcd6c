"""CRC-32C by carry-less products of whole vectors: twice as fast as by the processors' instruction for it.

Vectors that stand some bits apart from those that follow them are multiplied by that power of x and added to these,
until one is left, which has the remainder of all (Gopal et al., Fast CRC Computation for Generic Polynomials Using
PCLMULQDQ Instruction, 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy_words import Array, uint64
from ckstore.kernels.processor import has

BLOCK = 512
"""Bytes that are folded at once."""

_LANES = 8
_VECTORS = BLOCK // (8 * _LANES)
_POLYNOMIAL = 0x11EDC6F41
_WORD, _INDEX, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VECTOR = ir.VectorType(_WORD, _LANES)
_structure: Callable[[Any], Any] = cgutils.create_struct_proxy


def folds() -> bool:
    """Whether kernels are compiled for a processor that has what `crc32c_of_blocks` takes."""
    return has("avx512f", "vpclmulqdq", "crc32")


def _power(exponent: int) -> int:
    """Bits of x to a power modulo the polynomial, reversed, times x."""
    remainder = 1
    for _ in range(exponent):
        remainder <<= 1
        remainder ^= _POLYNOMIAL * (remainder >> 32)
    return int(f"{remainder:032b}"[::-1], 2) << 1


def _moved(builder: Any, vector: Any, bits: int) -> Any:
    """A vector times x to the power of `bits`, each 128 bits by themselves, but for multiples of the polynomial."""
    product = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _BYTE]), "llvm.x86.pclmulqdq.512"
    )
    keys = ir.Constant(_VECTOR, [_power(bits + 32), _power(bits - 32)] * (_LANES // 2))
    low = builder.call(product, [vector, keys, _BYTE(0x00)])
    return builder.xor(low, builder.call(product, [vector, keys, _BYTE(0x11)]))


@intrinsic
def _remainder(typing_context: Any, data: Any, blocks: Any, register: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = _structure(signature.args[0])(context, builder, arguments[0]).data
        vectors = builder.bitcast(start, _VECTOR.as_pointer())

        def load(index: Any) -> Any:
            vector = builder.load(builder.gep(vectors, [index]))
            vector.align = 1
            return vector

        first = builder.insert_element(ir.Constant(_VECTOR, None), arguments[2], _INDEX(0))
        sums = []
        for lane in range(_VECTORS):
            vector = load(_WORD(lane))
            sums.append(cgutils.alloca_once_value(builder, vector if lane else builder.xor(vector, first)))
        with cgutils.for_range(builder, arguments[1], start=_WORD(1)) as loop:
            place = builder.mul(loop.index, _WORD(_VECTORS))
            for lane, kept in enumerate(sums):
                moved = _moved(builder, builder.load(kept), 8 * BLOCK)
                builder.store(builder.xor(moved, load(builder.add(place, _WORD(lane)))), kept)
        vector = builder.load(sums[0])
        for kept in sums[1:]:
            vector = builder.xor(_moved(builder, vector, 64 * _LANES), builder.load(kept))
        step = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORD, [_WORD, _WORD]), "llvm.x86.sse42.crc32.64.64"
        )
        result = _WORD(0)
        for lane in range(_LANES):
            result = builder.call(step, [result, builder.extract_element(vector, _INDEX(lane))])
        return result

    return types.uint64(data, types.int64, types.uint64), generate


_remainder_of: Callable[[Array, int, Any], Any] = cast(Any, _remainder)


@kernel
def crc32c_of_blocks(data: Array, start: int) -> int:
    """CRC-32C of the whole blocks of `data` (uint8), at least one, that follow bytes whose checksum is `start`."""
    ones = uint64(0xFFFFFFFF)
    return _remainder_of(data, data.size // BLOCK, uint64(start) ^ ones) ^ ones
