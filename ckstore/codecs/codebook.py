"""The codebook lattice: elements as indices into sorted centroids, for the published non-uniform quantisers.

Pure functions of arrays. What is quantised comes as float32 values (`as_float32` makes them of 16-bit floats), what
is decoded leaves as bits of the elements' dtype; decoding is table lookup and at most one float32 addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import FLOATS, Kind
from ckstore.codecs.short_floats import narrowed, widened
from ckstore.errors import IntegrityError, UsageError
from ckstore.runtime.blocks import empty, fixed

Array = npt.NDArray[Any]
Bits = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]

#: dtypes of elements that a codebook is made for.
CODEBOOK_DTYPES = ("float32", "bfloat16", "float16")

#: Levels of a codebook: an index is a byte.
MOST_LEVELS = 256

#: Classes that the entropy coder knows.
_CLASSES = 64


@dataclass(frozen=True, slots=True, eq=False)
class CodebookLattice:
    """Integers n (uint8) with values ``centroids[n]``, or ``base + centroids[n]`` where a scheme quantises changes.

    Attributes
    ----------
    dtype
        Of the elements: `float32`, `bfloat16` or `float16`.
    centroids
        (m,) float32: finite, strictly ascending, 0 or normal.
    protected
        There is one more level, the last: its elements are kept aside, 16 bits each, in their order.

    Raises
    ------
    UsageError
        If the centroids are not such, or make more than 256 levels.
    """

    kind: ClassVar[Kind] = "codebook"

    dtype: str
    centroids: Floats
    protected: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in CODEBOOK_DTYPES:
            raise UsageError(f"A codebook is made for {', '.join(CODEBOOK_DTYPES)}, not for {self.dtype}.")
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
        """Number of levels, the protected one included: the B that differences of indices are taken modulo."""
        return self.centroids.size + self.protected

    @property
    def zero(self) -> int:
        """Index of the centroid nearest to 0: what an element without a finite value takes."""
        return int(np.argmin(np.abs(self.centroids)))

    def nearest(self, values: Floats) -> Indices:
        """Index of the centroid nearest to each value of a chunk; on a midpoint the lower one.

        Compared in float64 with midpoints. Subnormal values count as 0, and NaN and infinities take the index `zero`.
        """
        from ckstore.kernels import codebook as kernels

        centroids = self.centroids.astype(np.float64)
        midpoints = np.append((centroids[1:] + centroids[:-1]) / 2, np.inf)
        out = empty(values.size, np.uint8)
        kernels.nearest(float_words(values), midpoints, self.zero, out)
        return out

    def values(self, indices: Indices, aside: Bits | None = None) -> Bits:
        """Bits of the elements of a chunk.

        Parameters
        ----------
        indices : (n,) uint8
        aside : (k,) uint16, optional
            The bits of the chunk's protected elements: bfloat16 for float32 elements, else of their own dtype.

        Raises
        ------
        IntegrityError
            If an index is none of a level, or there are not as many protected elements as indices of theirs.
        """
        self._check_indices(indices)
        table = as_bits(self.centroids, self.dtype)
        if not self.protected:
            return np.take(table, indices)
        out = np.take(np.append(table, table[:1]), indices)
        places = np.flatnonzero(indices == self.levels - 1)
        kept = 0 if aside is None else aside.size
        if kept != places.size:
            raise IntegrityError(
                f"{places.size} protected elements do not fit {kept} kept aside; "
                "run `ckstore verify` to find the object."
            )
        if aside is not None and kept:
            out[places] = aside.astype(np.uint32) << np.uint32(16) if self.dtype == "float32" else aside
        return out

    def add(self, base: Bits, indices: Indices) -> Bits:
        """Bits of ``base + centroids[n]`` of a chunk, which are those of finite numbers whatever the base holds.

        One float32 addition, rounded once, and rounded to the dtype: a base that is a subnormal float32 or not finite
        counts as 0, a float32 sum below 2^-126 is +0, and one beyond the largest finite number is that number.
        """
        from ckstore.kernels import codebook as kernels

        if self.protected:
            raise UsageError("A codebook that is added to a base keeps no elements aside; leave them out.")
        self._check_indices(indices)
        _check_sizes(base, indices)
        words = empty(base.size, np.uint32)
        kernels.add(_words(base, self.dtype), fixed(indices), self.centroids, words)
        return as_bits(words.view(np.float32), self.dtype)

    def delta(self, indices: Indices, base: Indices) -> npt.NDArray[np.int32]:
        """Differences ``(base - n) mod B`` to the indices of a base, from 0 to B - 1, as in Inshrinkerator.

        The base's codebook may be another one, with another number of levels.
        """
        _check_sizes(indices, base)
        differences: npt.NDArray[np.int32] = np.remainder(base.astype(np.int32) - indices, np.int32(self.levels))
        return differences

    def apply(self, base: Indices, differences: Array) -> Indices:
        """The indices whose `delta` to those of the base these differences are."""
        _check_sizes(differences, base)
        return np.remainder(base.astype(np.int32) - differences, np.int32(self.levels)).astype(np.uint8)

    def classes(self, indices: Indices) -> npt.NDArray[np.uint8]:
        """The class by which what is stored against these indices is coded: the level, or its neighbourhood.

        At most 64 classes: several neighbouring levels of a larger codebook share one.
        """
        shift = max(0, int(self.levels - 1).bit_length() - int(_CLASSES - 1).bit_length())
        return indices >> np.uint8(shift)

    def _check_indices(self, indices: Indices) -> None:
        if indices.size and int(indices.max()) >= self.levels:
            raise IntegrityError(
                f"There is no level {int(indices.max())} among {self.levels}; run `ckstore verify` to find the object."
            )


def codebook(values: Array, dtype: str, protected: bool = False) -> CodebookLattice:
    """The codebook of these values and 0: sorted, those below 2^-126 taken as 0, equal ones once."""
    centroids = np.append(values, 0.0).astype(np.float32)
    fields = (centroids.view(np.uint32) >> 23) & 255
    return CodebookLattice(dtype, np.unique(np.where(fields == 0, np.float32(0), centroids)), protected)


def has_unrepresentable(bits: Bits, dtype: str) -> bool:
    """Whether a chunk holds a NaN or an infinity, which have no level: such elements take the level of 0."""
    mantissa, fields = FLOATS[dtype]
    mask = bits.dtype.type((fields - 1) << mantissa)
    return bool(np.any((bits & mask) == mask))


def as_float32(bits: Bits, dtype: str) -> Floats:
    """The float32 values of bits of `dtype`; exact, subnormals of float16 included."""
    return _words(bits, dtype).view(np.float32)


def as_bits(values: Floats, dtype: str) -> Bits:
    """Bits of `dtype` of finite float32 values: to nearest, ties to even, at most the largest finite number."""
    words = float_words(values)
    return words if dtype == "float32" else narrowed(words, dtype)


def differences(bits: Bits, base: Bits, dtype: str) -> Floats:
    """What a chunk changed by since its base, as float32: the inverse of `CodebookLattice.add` up to rounding.

    NaN where the value is not finite; a base that is subnormal or not finite counts as 0.
    """
    from ckstore.kernels import codebook as kernels

    _check_sizes(bits, base)
    out = empty(bits.size, np.uint32)
    kernels.difference(_words(bits, dtype), _words(base, dtype), out)
    return out.view(np.float32)


def float_words(values: Floats) -> npt.NDArray[np.uint32]:
    """The words of a one-dimensional float32 array; raises `UsageError` for another array."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise UsageError("Values to quantise must be a one-dimensional float32 array.")
    return fixed(values).view(np.uint32)


def _words(bits: Bits, dtype: str) -> npt.NDArray[np.uint32]:
    return fixed(bits.view(np.uint32) if dtype == "float32" else widened(bits, dtype))


def _check_sizes(one: Array, other: Array) -> None:
    # The kernels take the sizes of their arrays on trust.
    if one.size != other.size:
        raise IntegrityError(
            f"{one.size} elements do not fit the {other.size} of their base; run `ckstore verify` to find the object."
        )
