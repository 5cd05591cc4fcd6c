"""Rounded ordinals: the lattice of second moments, whose logarithm matters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import FLOATS, NO_EXPONENTS, Bits, Integers, check_sizes
from ckstore.runtime.blocks import aligned, empty

#: dtypes whose ordinals can be rounded: differences of ordinals and models fit 64 bits.
ROUNDED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, eq=False)
class RoundedLattice:
    """Integers n with ordinals ``n * 2 ** shift`` plus ``level + rows[i] + cols[j]`` quarter octaves.

    The ordinal of a float is the order-preserving integer of its bits, in which an octave is one exponent: steps are
    even on a logarithmic scale. Rows and columns are the model (Shazeer and Stern, "Adafactor", 2018, fit the same to
    second moments); the integers are its residuals. Integer arithmetic only.

    Attributes
    ----------
    dtype
        One of `ROUNDED`.
    shift
        Binary logarithm of the step in ordinals, at least 1.
    level
        Quarter octaves of all elements.
    width
        Length of a row; an element's row is its position divided by it.
    rows, cols
        int16 quarter octaves of rows and of columns, or empty.
    """

    dtype: str
    shift: int
    level: int
    width: int
    rows: npt.NDArray[np.int16] = field(default_factory=lambda: NO_EXPONENTS)
    cols: npt.NDArray[np.int16] = field(default_factory=lambda: NO_EXPONENTS)

    def quantise(self, bits: Bits, start: int) -> Integers:
        """Return the integers (int32) of a chunk of finite values that begins at element `start`."""
        from ckstore.kernels import coarse as kernels

        out = empty(bits.size, np.int32)
        kernels.rounded_quantise(
            aligned(bits), self.shift, quarter_octave(self.dtype), self.level, aligned(self.rows), aligned(self.cols),
            self.width, start, out,
        )  # fmt: skip
        return out

    def values(self, integers: Integers, start: int, out: Bits | None = None) -> Bits:
        """Return bits of the values in the middle of the integers' cells; near 0 they are +0. Uses `out` if given."""
        from ckstore.kernels import coarse as kernels

        check_sizes(integers, out)
        if out is None:
            out = empty(integers.size, "u4" if self.dtype == "float32" else "u2")
        kernels.rounded_values(
            aligned(integers), self.shift, quarter_octave(self.dtype), self.level, aligned(self.rows),
            aligned(self.cols), self.width, start, largest_finite(self.dtype), out,
        )  # fmt: skip
        return out

    def is_above_zero(self, bits: Bits) -> bool:
        """Return whether no magnitude but 0 is below a step, so that positive values stay positive.

        Integers that are not clamped decode to at most three eighths of a step less, and to 0 within five eighths.
        """
        from ckstore.kernels import lattice as kernels

        return not kernels.magnitude_top(aligned(bits), 0, 1 << self.shift)


def quarter_octave(dtype: str) -> int:
    """Return a quarter of an octave in ordinals of a float dtype."""
    mantissa, _ = FLOATS[dtype]
    return 1 << (mantissa - 2)


def largest_finite(dtype: str) -> int:
    """Return the bits of the largest finite magnitude of a float dtype with infinities."""
    mantissa, fields = FLOATS[dtype]
    return ((fields - 1) << mantissa) - 1
