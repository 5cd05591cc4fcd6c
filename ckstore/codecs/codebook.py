"""The codebook lattice: elements as indices into sorted centroids, for the published non-uniform quantisers.

Pure functions of arrays. The quantisers take float32 values (`as_float32` makes them of 16-bit floats); decoding
returns bits of the elements' dtype. Decoding is a table lookup and at most one float32 addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import FLOATS, check_sizes
from ckstore.codecs.short_floats import narrowed, widened
from ckstore.errors import IntegrityError, UsageError
from ckstore.runtime.blocks import aligned, empty

Array = npt.NDArray[Any]
Bits = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]

#: Indices with the bits of protected elements: int32 if there may be any, else uint8.
Numbers = npt.NDArray[Any]

#: dtypes of elements that a codebook supports.
CODEBOOK_DTYPES = ("float32", "bfloat16", "float16")

#: Levels of a codebook: an index is a byte.
MOST_LEVELS = 256

#: Classes of the entropy coder.
_CLASSES = 64

#: Numbers of protected elements: of 16 bits each.
_BITS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class CodebookLattice:
    """Integers n (uint8) with values ``centroids[n]``, or ``base + centroids[n]`` if a scheme quantises changes.

    Attributes
    ----------
    dtype
        Of the elements: `float32`, `bfloat16` or `float16`.
    centroids
        (m,) float32: finite, strictly ascending, 0 or normal.
    protected
        There is one more level, the last, whose elements keep 16 bits b each, of bfloat16 if they are float32: as the
        number m + b in place of an index.

    Raises
    ------
    UsageError
        If the centroids break these rules, or make more than 256 levels.
    """

    dtype: str
    centroids: Floats
    protected: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in CODEBOOK_DTYPES:
            raise UsageError(f"A codebook supports {', '.join(CODEBOOK_DTYPES)}, not {self.dtype}.")
        centroids = self.centroids
        shaped = centroids.dtype == np.float32 and centroids.ndim == 1 and centroids.size > 0
        if not shaped or self.levels > MOST_LEVELS:
            raise UsageError(f"Centroids must be a one-dimensional float32 array that makes 1 to {MOST_LEVELS} levels.")
        fields = (centroids.view(np.uint32) >> 23) & 255
        positive_zero = centroids.view(np.uint32) == 0
        if not np.all((fields != 255) & ((fields != 0) | positive_zero)) or np.any(centroids[1:] <= centroids[:-1]):
            raise UsageError("Centroids must be finite, strictly ascending, and each +0 or a normal number.")

    @property
    def levels(self) -> int:
        """The number of levels, with the protected one: differences of indices are taken modulo it."""
        return self.centroids.size + self.protected

    @property
    def zero(self) -> int:
        """The index of the centroid nearest to 0, which elements without a finite value take."""
        return int(np.argmin(np.abs(self.centroids)))

    def nearest(self, values: Floats) -> Indices:
        """Return the index of the centroid nearest to each value of a chunk; on a midpoint the lower one.

        Values are compared with midpoints in float64. Subnormal values count as 0; NaN and infinities take the index
        `zero`.
        """
        from ckstore.kernels import codebook as kernels

        centroids = self.centroids.astype(np.float64)
        midpoints = np.append((centroids[1:] + centroids[:-1]) / 2, np.inf)
        out = empty(values.size, np.uint8)
        kernels.nearest(float_words(values), midpoints, self.zero, out)
        return out

    def numbers(self, indices: Indices, protected: Bits) -> Numbers:
        """Return the numbers of a chunk: its indices (uint8), with the bits (uint16) of protected elements in order."""
        if not self.protected:
            return indices
        numbers = indices.astype(np.int32)
        numbers[indices == self.levels - 1] += protected
        return numbers

    def indices(self, numbers: Numbers) -> Indices:
        """Return the indices of a chunk; that of a protected element is the last level."""
        return np.minimum(numbers, self.levels - 1).astype(np.uint8) if self.protected else numbers.view(np.uint8)

    def values(self, numbers: Numbers) -> Bits:
        """Return the bits of the elements of a chunk; raise `IntegrityError` for a number without a level."""
        self._check_numbers(numbers)
        table = as_bits(self.centroids, self.dtype)
        if not self.protected:
            return np.take(table, numbers)
        out = np.take(np.append(table, table[:1]), self.indices(numbers))
        places = np.flatnonzero(numbers >= self.centroids.size)
        kept = (numbers[places] - self.centroids.size).astype(out.dtype)
        out[places] = kept << np.uint32(16) if self.dtype == "float32" else kept
        return out

    def stored(self, numbers: Numbers) -> npt.NDArray[np.int32]:
        """Return the integers of a chunk that is stored in full: relative to the index of 0."""
        return numbers.astype(np.int32) - np.int32(self.zero)

    def restored(self, integers: npt.NDArray[np.int32]) -> Numbers:
        """Invert `stored`; raise `IntegrityError` for an integer without a level."""
        numbers = integers + np.int32(self.zero)
        self._check_numbers(numbers)
        return numbers if self.protected else numbers.astype(np.uint8)

    def add(self, base: Bits, indices: Indices) -> Bits:
        """Return the bits of ``base + centroids[n]`` of a chunk: always finite numbers.

        One float32 addition, rounded once, and rounded to the dtype. A base that is a subnormal float32 or not finite
        counts as 0, a float32 sum below 2^-126 becomes +0, and one beyond the largest finite number becomes that
        number.
        """
        from ckstore.kernels import codebook as kernels

        if self.protected:
            raise UsageError("A codebook that is added to a base has no protected elements; leave them out.")
        self._check_numbers(indices)
        check_sizes(base, indices)
        words = empty(base.size, np.uint32)
        kernels.add(_words(base, self.dtype), aligned(indices), self.centroids, words)
        return as_bits(words.view(np.float32), self.dtype)

    def delta(self, numbers: Numbers, base: Indices) -> npt.NDArray[np.int32]:
        """Return the differences ``(base - n) mod B`` to the indices of a base, from 0 to B - 1, as in Inshrinkerator.

        A protected element of bits b has B + b. The base may have another codebook, with another number of levels.
        """
        check_sizes(numbers, base)
        differences: npt.NDArray[np.int32] = np.remainder(base.astype(np.int32) - numbers, np.int32(self.levels))
        if self.protected:
            np.copyto(differences, numbers + np.int32(1), where=numbers >= self.levels - 1)
        return differences

    def apply(self, base: Indices, differences: Array) -> Numbers:
        """Return the numbers that have these differences (`delta`) to the indices of the base."""
        check_sizes(differences, base)
        numbers = np.remainder(base.astype(np.int32) - differences, np.int32(self.levels))
        if not self.protected:
            return numbers.astype(np.uint8)
        np.copyto(numbers, differences - np.int32(1), where=differences >= self.levels)
        self._check_numbers(numbers)
        return numbers

    def classes(self, indices: Indices) -> npt.NDArray[np.uint8]:
        """Return the class of each index, by which its layers are coded: the level, or its neighbourhood.

        There are at most 64 classes: neighbouring levels of a larger codebook share one.
        """
        shift = max(0, int(self.levels - 1).bit_length() - int(_CLASSES - 1).bit_length())
        return indices >> np.uint8(shift)

    def _check_numbers(self, numbers: Numbers) -> None:
        most = self.centroids.size + _BITS * self.protected
        for number in (int(numbers.min(initial=0)), int(numbers.max(initial=0))):
            if not 0 <= number < most:
                raise IntegrityError(
                    f"There is no level {number} among {self.levels}; run `ckstore verify` to find the object."
                )


def codebook(values: Array, dtype: str, protected: bool = False) -> CodebookLattice:
    """Return the codebook of these values and 0: sorted and unique, with values below 2^-126 as 0."""
    centroids = np.append(values, 0.0).astype(np.float32)
    fields = (centroids.view(np.uint32) >> 23) & 255
    return CodebookLattice(dtype, np.unique(np.where(fields == 0, np.float32(0), centroids)), protected)


def has_unrepresentable(bits: Bits, dtype: str) -> bool:
    """Return whether a chunk holds a NaN or an infinity, which have no level and take the level of 0."""
    mantissa, fields = FLOATS[dtype]
    mask = bits.dtype.type((fields - 1) << mantissa)
    return bool(np.any((bits & mask) == mask))


def as_float32(bits: Bits, dtype: str) -> Floats:
    """Return the float32 values of bits of `dtype`; exact, subnormals of float16 included."""
    return _words(bits, dtype).view(np.float32)


def as_bits(values: Floats, dtype: str) -> Bits:
    """Return bits of `dtype` of finite float32 values: to nearest, ties to even, at most the largest finite number."""
    words = float_words(values)
    return words if dtype == "float32" else narrowed(words, dtype)


def differences(bits: Bits, base: Bits, dtype: str) -> Floats:
    """Return the changes of a chunk since its base as float32: the inverse of `CodebookLattice.add` up to rounding.

    NaN if the value is not finite; a base that is subnormal or not finite counts as 0.
    """
    from ckstore.kernels import codebook as kernels

    check_sizes(bits, base)
    out = empty(bits.size, np.uint32)
    kernels.difference(_words(bits, dtype), _words(base, dtype), out)
    return out.view(np.float32)


def float_words(values: Floats) -> npt.NDArray[np.uint32]:
    """Return the words of a one-dimensional float32 array; raise `UsageError` for another array."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise UsageError("Values to quantise must be a one-dimensional float32 array.")
    return aligned(values).view(np.uint32)


def _words(bits: Bits, dtype: str) -> npt.NDArray[np.uint32]:
    return aligned(bits.view(np.uint32) if dtype == "float32" else widened(bits, dtype))
