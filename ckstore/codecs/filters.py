"""Filters: codecs from floats to integers and back, for numcodecs; their settings are shared with Zarr's twins."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numcodecs.abc import Codec
from numcodecs.compat import ensure_bytes, ensure_ndarray, ndarray_copy

from ckstore.codecs.short_floats import SHORT
from ckstore.errors import UsageError


class Quantiser(Protocol):
    """The settings of a filter, and both directions."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not defaults, ready for JSON."""

    def check(self, dtype: str) -> None:
        """Raise `UsageError` for floats of a dtype that the filter does not support."""

    def integer(self, dtype: str) -> np.dtype[Any]:
        """Return the dtype of the integers."""

    def quantise(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the integers of an array of floats, in its shape."""

    def dequantise(self, integers: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """Return the floats of an array of integers, in its shape."""


class Filter(Codec):  # type: ignore[misc]
    """A numcodecs codec from floats of `dtype` to integers; public attributes are its configuration."""

    def __init__(self, dtype: str, quantiser: Quantiser) -> None:
        self.dtype = np.dtype(dtype).name
        self._quantiser = quantiser
        quantiser.check(self.dtype)
        self.__dict__.update(quantiser.settings())

    def encode(self, buf: Any) -> Any:
        """Return the integers of `buf`, floats of the codec's dtype or their bytes, in its shape."""
        values = ensure_ndarray(buf)
        if values.dtype != self.dtype:
            if values.dtype.itemsize != 1:
                raise UsageError(f"The codec {self.codec_id} was made for {self.dtype}, not for {values.dtype.name}.")
            values = np.ascontiguousarray(values).reshape(-1).view(self.dtype)
        return self._quantiser.quantise(values)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the values of `buf`, integers or their bytes, in its shape or in `out`."""
        integers = ensure_ndarray(buf)
        dtype = self._quantiser.integer(self.dtype)
        if integers.dtype != dtype:
            integers = np.frombuffer(ensure_bytes(buf), dtype)
        return ndarray_copy(self._quantiser.dequantise(integers, self.dtype), out)


def check_floats(name: str, dtype: str, precision: str | None) -> None:
    """Raise `UsageError` unless values are float32 or float64, and a shorter precision belongs to float32."""
    if dtype not in ("float32", "float64"):
        raise UsageError(f"The codec {name} takes float32 or float64, not {dtype}.")
    if precision is not None and (precision not in SHORT or dtype != "float32"):
        raise UsageError("A precision is bfloat16 or float16, of arrays of float32; leave it out otherwise.")
