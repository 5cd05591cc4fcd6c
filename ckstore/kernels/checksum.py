"""CRC-32C and CRC-32 by carry-less products of whole vectors: faster than what libraries do.

Vectors that stand some bits apart from those that follow them are multiplied by that power of x and added to these,
until one is left, which has the remainder of all (Gopal et al., Fast CRC Computation for Generic Polynomials Using
PCLMULQDQ Instruction, 2009).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.words import Array, uint64
from ckstore.kernels.processor import has

BLOCK = 512
"""Bytes that are folded at once."""

_LANES = 8
_VECTORS = BLOCK // (8 * _LANES)
_WORD, _INDEX, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VECTOR = ir.VectorType(_WORD, _LANES)
_structure: Callable[[Any], Any] = cgutils.create_struct_proxy


def folds() -> bool:
    """Whether kernels are compiled for a processor that has what `fold_blocks` takes."""
    return has("avx512f", "vpclmulqdq")


def keys(polynomial: int) -> Array:
    """What `fold_blocks` multiplies by for a polynomial of degree 32 (uint64, 4), its highest power in the top bit."""
    distances = 8 * BLOCK, 64 * _LANES
    powers = [_power(bits + more, polynomial) for bits in distances for more in (32, -32)]
    found = np.array(powers, np.uint64)
    found.flags.writeable = False
    return found


def _power(exponent: int, polynomial: int) -> int:
    """Bits of x to a power modulo the polynomial, reversed, times x."""
    remainder = 1
    for _ in range(exponent):
        remainder <<= 1
        remainder ^= polynomial * (remainder >> 32)
    return int(f"{remainder:032b}"[::-1], 2) << 1


def _moved(builder: Any, vector: Any, keys: Any) -> Any:
    """A vector times the power of x that the keys stand for, each 128 bits by themselves; the remainder is the same."""
    product = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _BYTE]), "llvm.x86.pclmulqdq.512"
    )
    low = builder.call(product, [vector, keys, _BYTE(0x00)])
    return builder.xor(low, builder.call(product, [vector, keys, _BYTE(0x11)]))


def _repeated(builder: Any, words: Any, first: int) -> Any:
    """A vector of two words again and again."""
    vector = ir.Constant(_VECTOR, None)
    for lane in range(_LANES):
        word = builder.load(builder.gep(words, [_WORD(first + lane % 2)]))
        vector = builder.insert_element(vector, word, _INDEX(lane))
    return vector


@intrinsic
def _fold(typing_context: Any, data: Any, blocks: Any, register: Any, keys: Any, out: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, words, target = (
            _structure(signature.args[place])(context, builder, arguments[place]).data for place in (0, 3, 4)
        )
        vectors = builder.bitcast(start, _VECTOR.as_pointer())
        block_keys, vector_keys = (_repeated(builder, words, first) for first in (0, 2))

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
                moved = _moved(builder, builder.load(kept), block_keys)
                builder.store(builder.xor(moved, load(builder.add(place, _WORD(lane)))), kept)
        vector = builder.load(sums[0])
        for kept in sums[1:]:
            vector = builder.xor(_moved(builder, vector, vector_keys), builder.load(kept))
        builder.store(vector, builder.bitcast(target, _VECTOR.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64, keys, out), generate


_fold_to: Callable[[Array, int, Any, Array, Array], None] = cast(Any, _fold)


@kernel
def fold_blocks(data: Array, start: int, keys: Array, out: Array) -> None:
    """Fold the whole blocks of `data` (uint8), at least one, that follow bytes whose checksum is `start`.

    What stands in `out` (uint64, 8) then has their checksum, if it is taken from a register of zeros on.
    """
    _fold_to(data, data.size // BLOCK, uint64(start) ^ uint64(0xFFFFFFFF), keys, out)
