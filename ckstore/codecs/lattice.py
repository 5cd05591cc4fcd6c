"""The linear lattices of coarse objects, and the ordinals of exact ones.

Both are pure functions of arrays. Original values are passed as unsigned integers of the item's width (`bits`), so that
NaN payloads, signed zeros and subnormals survive. Arrays of ordinals are aligned; the kernels refuse others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.short_floats import SHORT, narrowed, widened
from ckstore.errors import IntegrityError
from ckstore.runtime.blocks import aligned, empty

Bits = npt.NDArray[Any]
Integers = npt.NDArray[Any]
Classes = npt.NDArray[np.uint8]

#: The approximate number of elements of a chunk.
CHUNK = 1 << 18

#: Mantissa width in bits and number of exponent fields of the float dtypes with a sign bit on top.
FLOATS: dict[str, tuple[int, int]] = {
    "float64": (52, 2048),
    "float32": (23, 256),
    "float16": (10, 32),
    "bfloat16": (7, 256),
    "float8_e4m3fn": (3, 16),
    "float8_e4m3fnuz": (3, 16),
    "float8_e5m2": (2, 32),
    "float8_e5m2fnuz": (2, 32),
}

#: Complex numbers are coded by parts.
PARTS: dict[str, str] = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

#: Exponents of a linear step: the step and every lattice value but 0 are normal numbers.
STEP_RANGE: dict[str, tuple[int, int]] = {
    "float32": (-126, 106),
    "float64": (-1000, 1002),
    "bfloat16": (-126, 106),
    "float16": (-48, 5),
}

#: Binary orders of magnitude below the largest that have a class of their own: more save nothing and take time.
_OCTAVES = 10

#: Least `count` and `chunk` of objects of floats whose differences to negative numbers change their sign: magnitudes
#: shrink or grow. The tensors of small models drift to one side.
MIRRORED = 1 << 16

#: The exponents of a lattice of equal steps.
NO_EXPONENTS: npt.NDArray[np.int16] = np.empty(0, np.int16)
NO_EXPONENTS.flags.writeable = False


def part_dtype(dtype: str) -> str:
    """Return the dtype of the coded parts of elements: the component's for complex numbers, else `dtype` itself."""
    return PARTS.get(dtype, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LinearLattice:
    """Integers n with values ``n * 2 ** (step + rows[i] + cols[j])``.

    Attributes
    ----------
    dtype
        A key of `STEP_RANGE`.
    step
        Binary exponent of the step: steps are powers of two, so that they halve and double exactly and the exact
        layer of a lattice value is a plain run of mantissa bits.
    width
        Length of a row (the last axis); an element's row is its position divided by it.
    rows, cols
        int16 exponents of rows and of columns, or empty.
    """

    dtype: str
    step: int
    width: int
    rows: npt.NDArray[np.int16] = field(default_factory=lambda: NO_EXPONENTS)
    cols: npt.NDArray[np.int16] = field(default_factory=lambda: NO_EXPONENTS)

    @property
    def _exponents(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        return aligned(self.rows), aligned(self.cols)

    @property
    def is_in_range(self) -> bool:
        """Whether all steps are in the range of the dtype."""
        lowest, highest = STEP_RANGE[self.dtype]
        axes = [axis.astype(np.int64) for axis in (self.rows, self.cols) if axis.size]
        return (
            self.step + sum(int(axis.min()) for axis in axes) >= lowest
            and self.step + sum(int(axis.max()) for axis in axes) <= highest
        )

    def quantise(self, bits: Bits, start: int, *, doubled: bool = False) -> Integers:
        """Return the nearest integers (int32) of a chunk of values that begins at element `start`.

        If `doubled`, return those on half the step, halved and rounded away from 0.
        """
        from ckstore.kernels import lattice as kernels

        out = empty(bits.size, np.int32)
        kernels.linear_quantise(floats(bits, self.dtype), self.step, *self._exponents, self.width, start, doubled, out)
        return out

    def dithered(self, bits: Bits, start: int) -> Integers:
        """Return the integers (int32) of a chunk of finite values, rounded by a threshold per element.

        This serves values close to lattice values: the nearest lattice value would stay the same however they move.
        """
        from ckstore.kernels import coarse as kernels

        out = empty(bits.size, np.int32)
        kernels.linear_dithered(floats(bits, self.dtype), self.step, *self._exponents, self.width, start, out)
        return out

    def concentration(self, bits: Bits, start: int) -> float:
        """Return how close values of a chunk lie to lattice values, from 0 (no relation) to 1; see the kernel."""
        from ckstore.kernels import coarse as kernels

        result: float = kernels.concentration(floats(bits, self.dtype), self.step, *self._exponents, self.width, start)
        return result

    def shift_from(self, base: LinearLattice) -> int | None:
        """Return the number of bits by which integers of `base` are shifted right to fit this lattice.

        None if it differs between elements, or if the integers grow; `project` handles every case.
        """
        if self.step < base.step or not _are_equal(self.rows, base.rows) or not _are_equal(self.cols, base.cols):
            return None
        return self.step - base.step

    def project(self, base: LinearLattice, integers: Integers, start: int, *, in_place: bool = False) -> Integers:
        """Shift integers of `base` onto this lattice; return the same array if nothing shifts, or if `in_place`."""
        from ckstore.kernels import lattice as kernels

        rows = _exponent_difference(self.rows, base.rows)
        cols = _exponent_difference(self.cols, base.cols)
        if self.step == base.step and not rows.size and not cols.size:
            return integers
        out = integers if in_place else empty(integers.size, np.int32)
        if not in_place:
            out[...] = integers
        kernels.linear_project(out, self.step - base.step, aligned(rows), aligned(cols), self.width, start)
        return out

    def values(self, integers: Integers, start: int, out: Bits | None = None) -> Bits:
        """Return bits of the lattice values of a chunk of integers from element `start` on; in `out` if given."""
        from ckstore.kernels import coarse as kernels

        check_sizes(integers, out)
        is_short = self.dtype in SHORT
        if out is None or is_short:
            carrier = empty(integers.size, np.uint32 if is_short else _unsigned(self.dtype))
        else:
            carrier = out
        values = carrier.view(np.float32 if is_short else self.dtype)
        kernels.linear_values(aligned(integers), self.step, *self._exponents, self.width, start, values)
        return narrowed(carrier, self.dtype, out) if is_short else carrier


def _are_equal(own: npt.NDArray[np.int16], base: npt.NDArray[np.int16]) -> bool:
    return own is base or (own.size == base.size and own.tobytes() == base.tobytes())


def _exponent_difference(own: npt.NDArray[np.int16], base: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    if _are_equal(own, base):
        return NO_EXPONENTS
    if own.size and base.size:
        return own - base
    return own if own.size else -base


def floats(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Return bits of a float dtype of `STEP_RANGE` as an array for NumPy: 16-bit floats are widened to float32."""
    if dtype in SHORT:
        return aligned(widened(bits, dtype).view(np.float32))
    return aligned(np.ascontiguousarray(bits).view(dtype))


def statistics_of(bits: Bits, dtype: str) -> tuple[float, float, int]:
    """Return sum of squares, largest magnitude and number of the finite values."""
    from ckstore.kernels.lattice import statistics

    found: tuple[float, float, int] = statistics(floats(bits, dtype))
    return found


def _unsigned(dtype: str) -> str:
    return "uint32" if dtype == "float32" else "uint64"


def step_exponent(step: float, largest: float, dtype: str) -> int:
    """Return the binary exponent of the power of two next to `step`, large enough to keep integers within 2^22.

    `largest` is the largest finite magnitude of the values.
    """
    lowest, highest = STEP_RANGE[dtype]
    exponent = lowest
    if step > 0:
        exponent = round(float(np.log2(min(step, 1e300))))
    if largest > 0:
        exponent = max(exponent, int(np.floor(np.log2(largest))) - 21)
    return min(max(exponent, lowest), highest)


def ordinal_classes(parent: Bits, dtype: str) -> Classes | None:
    """Return the classes that code differences of ordinals: the parent's exponent, for 8-bit floats its magnitude.

    None for dtypes that are not floats: their differences do not depend on the magnitude.
    """
    if dtype not in FLOATS or parent.size == 0:
        return None
    from ckstore.kernels import lattice as kernels

    mantissa, fields = FLOATS[dtype]
    shift, ceiling, limit = mantissa, fields - 1, _OCTAVES
    if parent.itemsize == 1:
        shift, ceiling, limit = 1, 64, 63
    top = kernels.magnitude_top(parent, shift, ceiling)
    classes = empty(parent.size, np.uint8)
    kernels.magnitude_classes(parent, shift, top, limit, classes)
    return classes


def check_sizes(values: Bits, predicted: Bits | None) -> None:
    """Raise `IntegrityError` if `predicted` is given and has another size."""
    # The kernels do not check the sizes of their arrays.
    if predicted is not None and predicted.size != values.size:
        raise IntegrityError(
            f"{values.size} values do not fit {predicted.size} predictions; run `ckstore verify` to find the object."
        )


def is_mirrored(dtype: str, count: int, chunk: int) -> bool:
    """Return whether an object's differences to negative numbers change their sign."""
    return dtype in FLOATS and min(count, chunk) >= MIRRORED


def ordinal_difference(bits: Bits, predicted: Bits | None, dtype: str, *, mirrored: bool = False) -> Integers:
    """Return ``ord(bits) - ord(predicted)`` modulo the width as signed integers; subtract integer dtypes directly.

    If `mirrored`, differences to negative floats change their sign. Without `predicted`, return the ordinals
    themselves. Raise `IntegrityError` if the sizes differ.
    """
    check_sizes(bits, predicted)
    signed = np.dtype(f"i{bits.itemsize}")
    if dtype not in FLOATS:
        if predicted is None:
            return bits.view(signed)
        difference = empty(bits.size, bits.dtype)
        np.subtract(bits, predicted, out=difference)
        return difference.view(signed)
    from ckstore.kernels import lattice as kernels

    out = empty(bits.size, bits.dtype)
    kernels.ordinal_difference(bits, predicted, mirrored, out)
    return out.view(signed)


def ordinal_correct(predicted: Bits | None, residuals: Bits, dtype: str, *, mirrored: bool = False) -> None:
    """Invert `ordinal_difference` in place, of residuals that are passed as unsigned integers."""
    check_sizes(residuals, predicted)
    if dtype in FLOATS:
        from ckstore.kernels import lattice as kernels

        kernels.ordinal_correct(predicted, residuals, mirrored)
    elif predicted is not None:
        residuals += predicted
