"""The numcodecs codec `ckstore.quantized_residual`: floats to the integers of a linear lattice, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_bytes, ensure_ndarray, ndarray_copy

from ckstore.codecs.lattice import STEP_RANGE, LinearLattice
from ckstore.errors import UsageError


def linear_lattice(dtype: str, step: int, exponents: Sequence[int], width: int) -> LinearLattice:
    """The lattice that both codecs of this name quantise on; raises `UsageError` where there is none such."""
    if dtype not in STEP_RANGE:
        raise UsageError(f"The codec ckstore.quantized_residual takes float32 or float64, not {dtype}.")
    lowest, highest = STEP_RANGE[dtype]
    smallest = step + min(exponents, default=0)
    largest = step + max(exponents, default=0)
    if smallest < lowest or largest > highest:
        raise UsageError(f"Steps of {dtype} lie between 2**{lowest} and 2**{highest}; choose other exponents.")
    if exponents and len(exponents) != width:
        raise UsageError(f"There are {len(exponents)} exponents for rows of {width} elements; give one for each.")
    return LinearLattice(dtype, step, max(width, 1), cols=np.array(exponents, np.int16))


class QuantizedResidual(Codec):  # type: ignore[misc]
    """Quantisation of floats on a lattice whose step is a power of two.

    A value x becomes ``n = rint(x / 2**(step + exponents[j]))``, j its position in its row (the last axis), as int32
    clamped to ±2^24; decoding gives ``n * 2**(step + exponents[j])``. To quantise what changed since a base, give the
    difference to it: the codec never sees a base.

    Parameters
    ----------
    dtype : str
        `float32` or `float64`.
    step : int
        Binary exponent of the step.
    exponents : sequence of int, optional
        One for each element of a row, added to `step`.

    Notes
    -----
    Lossy: finite values within ±2^24 steps come back within half a step; NaN and infinities come back as 0, and -0.0
    as +0.0. Integers of decoded values are the same, so that coding a second time changes nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from ckstore.codecs.quantized_residual import QuantizedResidual
    >>> codec = QuantizedResidual(dtype="float32", step=-3)
    >>> codec.encode(np.array([0.3, -1.0], "float32")).tolist()
    [2, -8]
    >>> codec.decode(np.array([2, -8], "int32")).tolist()
    [0.25, -1.0]
    """

    codec_id = "ckstore.quantized_residual"

    def __init__(self, dtype: str, step: int, exponents: Sequence[int] = ()) -> None:
        self.dtype = np.dtype(dtype).name
        self.step = int(step)
        self.exponents = [int(exponent) for exponent in exponents]
        linear_lattice(self.dtype, self.step, self.exponents, len(self.exponents))

    def encode(self, buf: Any) -> Any:
        """Integers (int32) of the shape of `buf`, floats of the codec's dtype; bytes are taken as such floats."""
        values = ensure_ndarray(buf)
        if values.dtype != self.dtype:
            if values.dtype.itemsize != 1:
                raise UsageError(
                    f"The codec ckstore.quantized_residual was made for {self.dtype}, not for {values.dtype.name}."
                )
            values = np.ascontiguousarray(values).reshape(-1).view(self.dtype)
        return quantise(values, self._lattice(values))

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Lattice values of the shape of `buf`, int32 integers or their bytes, or into `out`."""
        integers = ensure_ndarray(buf)
        if integers.dtype != np.int32:
            integers = np.frombuffer(ensure_bytes(buf), np.int32)
        return ndarray_copy(dequantise(integers, self._lattice(integers)), out)

    def _lattice(self, array: Any) -> LinearLattice:
        return linear_lattice(self.dtype, self.step, self.exponents, array.shape[-1] if array.ndim else 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dtype={self.dtype!r}, step={self.step}, exponents={self.exponents})"


def quantise(values: Any, lattice: LinearLattice) -> Any:
    """Integers (int32) of an array of floats, of its shape."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return lattice.quantise(flat.view(f"u{flat.itemsize}"), 0).reshape(values.shape)


def dequantise(integers: Any, lattice: LinearLattice) -> Any:
    """Lattice values of an array of int32, of its shape."""
    bits, _ = lattice.own(np.ascontiguousarray(integers).reshape(-1), 0)
    return bits.view(lattice.dtype).reshape(integers.shape)
