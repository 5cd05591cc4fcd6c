"""The numcodecs codec `ckstore.quantized_residual`: floats to the integers of a linear lattice, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckstore.codecs.exponents import exponents_from_text, exponents_to_text
from ckstore.codecs.filters import Filter, check_floats
from ckstore.codecs.lattice import NO_EXPONENTS, STEP_RANGE, LinearLattice
from ckstore.codecs.short_floats import SHORT, widened
from ckstore.errors import UsageError
from ckstore.runtime.cached import cached_property

#: Exponents in either form: text as in a pack's records, or numbers.
Exponents = str | Sequence[int]


@dataclass(frozen=True)
class Steps:
    """The settings that both codecs of this name share; see `QuantizedResidual`."""

    step: int
    rows: Exponents = ()
    cols: Exponents = ()
    width: int | None = None
    precision: str | None = None

    @classmethod
    def parsed(cls, step: Any = None, rows: Any = "", cols: Any = "", width: Any = None, precision: Any = None) -> Self:
        """Return normalised settings; raise `UsageError` for invalid ones."""
        try:
            rows, cols = (axis if isinstance(axis, str) else tuple(int(e) for e in axis) for axis in (rows, cols))
            steps = cls(int(step), rows, cols, None if width is None else int(width), precision)
            steps._axes  # noqa: B018
            return steps
        except (TypeError, ValueError) as error:
            raise UsageError(f"The settings of ckstore.quantized_residual are invalid: {error}") from error

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not defaults, ready for JSON."""
        found: dict[str, Any] = {"step": self.step}
        for name in ("rows", "cols"):
            axis = self._axes[name]
            if axis.size:
                found[name] = exponents_to_text(axis)
        return found | {name: value for name in ("width", "precision") if (value := getattr(self, name)) is not None}

    def check(self, dtype: str) -> None:
        """Raise `UsageError` if no such lattice exists for floats of this dtype."""
        check_floats("ckstore.quantized_residual", dtype, self.precision)
        lowest, highest = STEP_RANGE[self.precision or dtype]
        axes = [axis.astype(np.int64) for axis in self._axes.values() if axis.size]
        if (
            self.step + sum(int(axis.min()) for axis in axes) < lowest
            or self.step + sum(int(axis.max()) for axis in axes) > highest
        ):
            raise UsageError(
                f"Steps of {self.precision or dtype} lie between 2**{lowest} and 2**{highest}; choose other exponents."
            )

    def integer(self, dtype: str) -> np.dtype[Any]:
        """Return the dtype of the integers."""
        return np.dtype(np.int32)

    def quantise(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the integers (int32) of an array of floats, in its shape."""
        flat = np.ascontiguousarray(values).reshape(-1)
        lattice, count = self._lattice(flat.dtype.name, values.shape)
        integers = np.zeros(flat.size, np.int32)
        integers[:count] = lattice.quantise(flat[:count].view(f"u{flat.itemsize}"), 0)
        return integers.reshape(values.shape)

    def dequantise(self, integers: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """Return the lattice values of an array of int32, in its shape."""
        flat = np.ascontiguousarray(integers, np.int32).reshape(-1)
        lattice, count = self._lattice(self.precision or dtype, integers.shape)
        values = np.zeros(flat.size, dtype)
        bits = lattice.values(flat[:count], 0)
        values[:count] = (widened(bits, lattice.dtype) if lattice.dtype in SHORT else bits).view(dtype)
        return values.reshape(integers.shape)

    @cached_property
    def _axes(self) -> dict[str, npt.NDArray[np.int16]]:
        given = {"rows": self.rows, "cols": self.cols}
        return {
            name: exponents_from_text(axis if isinstance(axis, str) else list(axis)) if axis else NO_EXPONENTS
            for name, axis in given.items()
        }

    def _lattice(self, dtype: str, shape: tuple[int, ...]) -> tuple[LinearLattice, int]:
        """Return the lattice of an array of this shape, and the number of elements before the padding."""
        rows, cols = self._axes["rows"], self._axes["cols"]
        width = self.width or (shape[-1] if shape else 1) or 1
        count = int(np.prod(shape, dtype=np.int64))
        if cols.size not in (0, width):
            raise UsageError(f"There are {cols.size} exponents for rows of {width} elements; give one for each.")
        if rows.size > -(-count // width):
            raise UsageError(f"There are {rows.size} exponents for {-(-count // width)} rows; give one for each.")
        return LinearLattice(dtype, self.step, width, rows, cols), min(count, rows.size * width) if rows.size else count


class QuantizedResidual(Filter):
    """Quantisation of floats on a lattice whose steps are powers of two.

    A value x in row i and column j becomes ``n = rint(x / 2**(step + rows[i] + cols[j]))``, as int32 clamped to ±2^24;
    decoding gives ``n * 2**(step + rows[i] + cols[j])``. To quantise changes since a base, encode the differences: the
    codec has no access to a base.

    Parameters
    ----------
    dtype : str
        `float32` or `float64`.
    step : int
        Binary exponent of the step.
    rows, cols : str or sequence of int, optional
        Exponents that rows and columns of a chunk add to `step`, as numbers or as text (`docs/format.md`, Exponents).
        Elements after the last of the `rows` are padding and decode to 0.
    width : int, optional
        Elements of a row; by default the last axis of a chunk.
    precision : str, optional
        `bfloat16` or `float16`: the dtype that decoded values, float32, are rounded to.

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

    def __init__(
        self,
        dtype: str,
        step: int,
        rows: Exponents = (),
        cols: Exponents = (),
        width: int | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__(dtype, Steps.parsed(step, rows, cols, width, precision))
