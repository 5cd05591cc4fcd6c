"""Products of two matrices of integers, which are added to the values of a base: a fine-tune has few directions.

Pure functions of arrays. Products and their sums are integers of at most 32 bits, so that neither the order of
additions nor the processor changes a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import CODEBOOK_DTYPES, Bits, as_bits, as_float32
from ckstore.codecs.integers import decode_integers, encode_integers
from ckstore.codecs.lattice import STEP_RANGE
from ckstore.errors import IntegrityError, UsageError
from ckstore.runtime.blocks import aligned, empty

Matrix = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int32]

#: Most directions of one object.
MOST_DIRECTIONS = 256

#: Most elements of one object: factors are decoded as a whole.
MOST_ELEMENTS = 1 << 22

#: Classes of the right matrix follow those of the left one, and that of the weights both.
_RIGHT = MOST_DIRECTIONS.bit_length()
_WEIGHTS = 2 * _RIGHT

#: Bits of the smallest weight of a direction.
_WEIGHT_BITS = 6

#: Binary logarithm of the largest sum of products.
_SUM_BITS = 31


@dataclass(frozen=True, slots=True)
class FactorLattice:
    """Changes of rows of `width` elements: ``2 ** step * (left * weights) @ right``.

    Its numbers (int32) are `rank` weights, `rank` numbers for each row, and `width` numbers for each direction.

    Attributes
    ----------
    dtype
        Of the elements: `float32`, `bfloat16` or `float16`.
    step
        Binary exponent of the unit of all products.
    width
        Elements of a row.
    rank
        Number of directions, at most 256.
    """

    dtype: str
    step: int
    width: int
    rank: int

    def size_of(self, count: int) -> int:
        """Return the number of numbers of `count` elements."""
        return self.rank * (1 + count // self.width + self.width)

    def is_possible(self, count: int, chunk: int) -> bool:
        """Return whether `count` elements in chunks of `chunk` can have such changes: whole rows, within the limits."""
        lowest, highest = STEP_RANGE[self.dtype]
        are_whole = count % self.width == 0 and (chunk >= count or chunk % self.width == 0)
        is_small = count <= MOST_ELEMENTS and self.rank <= min(MOST_DIRECTIONS, self.width, count // self.width)
        return are_whole and is_small and lowest <= self.step <= highest

    def encode(self, numbers: Numbers, count: int) -> bytes:
        """Return the payload of the numbers of `count` elements."""
        return encode_integers(numbers, self._classes(count))

    def decode(self, payload: bytes | memoryview, count: int) -> Numbers:
        """Invert `encode`; raise `IntegrityError` if the payload is damaged or of other sizes."""
        numbers = empty(self.size_of(count), np.int32)
        decode_integers(payload, numbers, self._classes(count))
        return numbers

    def _classes(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the classes of the numbers: directions are sorted by size, and each class has twice those before."""
        groups = np.frexp(np.arange(self.rank))[1].astype(np.uint8)
        weights = np.full(self.rank, _WEIGHTS, np.uint8)
        left, right = np.tile(groups, count // self.width), np.repeat(groups + np.uint8(_RIGHT), self.width)
        return np.concatenate((weights, left, right))

    def add(self, base: Bits, numbers: Numbers, start: int) -> Bits:
        """Return the bits of base + change of a chunk of whole rows that begins at element `start`: finite numbers.

        The sum is rounded once to float32, and then to the dtype. A base that is a subnormal float32 or not finite
        counts as 0, a sum below 2^-126 becomes +0, and one beyond the largest finite number becomes that number. Raise
        `IntegrityError` if sums of products may leave 32 bits.
        """
        from ckstore.kernels import codebook as kernels

        words = empty(base.size, np.uint32)
        before = aligned(as_float32(base, self.dtype)).view(np.uint32)
        if not kernels.add_products(before, aligned(numbers), self.rank, self.width, self.step, start, words):
            raise IntegrityError("Sums of products of factors exceed 32 bits; run `ckstore verify` to find the object.")
        return as_bits(words.view(np.float32), self.dtype)


def factor_lattice(
    dtype: str, weights: npt.NDArray[Any], left: npt.NDArray[Any], right: npt.NDArray[Any]
) -> tuple[FactorLattice, Numbers]:
    """Return the lattice and the numbers of factors, with weights as integers of at least six bits.

    Parameters
    ----------
    dtype
        A key of `CODEBOOK_DTYPES`.
    weights : (rank,) float
        Of each direction; not 0.
    left, right : (rows, rank), (rank, width) integers
        The factors; directions come from the largest change to the smallest.

    Raises
    ------
    UsageError
        Arrays of other shapes, too many directions, a weight that is 0 or not finite, numbers that are too large.
    """
    rank, sizes = len(weights), np.abs(np.asarray(weights, np.float64))
    is_shaped = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0] == rank
    if dtype not in CODEBOOK_DTYPES or not is_shaped or not 1 <= rank <= MOST_DIRECTIONS or not left.size * right.size:
        raise UsageError(f"Factors are (rows, rank) and (rank, width), of a rank from 1 to {MOST_DIRECTIONS}.")
    reach = np.maximum(np.abs(left).max(axis=0), 1.0) * np.maximum(np.abs(right).max(axis=1), 1.0)
    total = float((sizes * reach).sum())
    if not (sizes > 0).all() or not 0 < total < float("inf") or reach.max() >= 2.0**_SUM_BITS:
        raise UsageError("Weights of directions are finite numbers but 0, and products of factors have 31 bits.")
    lowest, highest = STEP_RANGE[dtype]
    finest = max(floor(log2(float(sizes.min()))) - _WEIGHT_BITS, floor(log2(total)) + 2 - _SUM_BITS, lowest)
    step = min(finest, highest)
    whole = np.rint(np.ldexp(np.asarray(weights, np.float64), -step))
    numbers = np.concatenate((whole, left.ravel(), right.ravel())).astype(np.int32)
    return FactorLattice(dtype, step, right.shape[1], rank), numbers
