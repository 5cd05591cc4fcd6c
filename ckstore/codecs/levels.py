"""The numcodecs codec `ckstore.levels`: floats to the integers of other lattices than linear ones, and back."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import CODEBOOK_DTYPES, CodebookLattice, as_bits
from ckstore.codecs.exponents import exponents_from_text
from ckstore.codecs.filters import Filter, check_floats
from ckstore.codecs.lattice import Bits, floats, ordinal_correct, ordinal_difference
from ckstore.codecs.rounded import RoundedLattice
from ckstore.errors import UsageError
from ckstore.runtime.cached import cached_property

#: The lattices of one float: its codebook, its rounded ordinals, or None for its ordinals themselves.
_Lattice = CodebookLattice | RoundedLattice | None


@dataclass(frozen=True)
class Scale:
    """The settings that both codecs of this name share; see `Levels`."""

    centroids: str = ""
    protected: bool = False
    shift: int = 0
    level: int = 0
    width: int = 0
    rows: str | tuple[int, ...] = ()
    cols: str | tuple[int, ...] = ()
    precision: str | None = None

    @classmethod
    def parsed(cls, **given: Any) -> Self:
        """Return checked settings; raise `UsageError` for invalid ones."""
        try:
            plain: dict[str, Any] = {
                name: tuple(value) if type(value) is list else value for name, value in given.items()
            }
            scale = cls(**plain)
            scale._axes  # noqa: B018
            numbers: list[Any] = [scale.shift, scale.level, scale.width]
            if plain.get("protected", False) not in (True, False) or any(type(number) is not int for number in numbers):
                raise ValueError("protected is true or false, the others are integers")
            if not (0 <= scale.shift <= 31 and abs(scale.level) < 1 << 15 and scale.width >= 0):
                raise ValueError(f"shift, level and width cannot be {numbers}")
            if scale.centroids and scale.shift:
                raise ValueError("centroids and a shift exclude each other")
            scale._lattice("float32" if scale.precision is None else scale.precision)
        except (TypeError, ValueError, UsageError) as error:
            raise UsageError(f"The settings of ckstore.levels are invalid: {error}") from error
        return scale

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not defaults, ready for JSON."""
        said = {field.name: getattr(self, field.name) for field in fields(Scale)}
        return {
            name: list(value) if type(value) is tuple else value
            for name, value in said.items()
            if value != Scale.__dataclass_fields__[name].default
        }

    def check(self, dtype: str) -> None:
        """Raise `UsageError` if no such lattice exists for floats of this dtype."""
        check_floats("ckstore.levels", dtype, self.precision)
        if (self.centroids or self.shift) and dtype == "float64":
            raise UsageError("Codebooks and rounded ordinals are of float32; leave their settings out.")

    def integer(self, dtype: str) -> np.dtype[Any]:
        """Return the dtype of the integers: int32 on a lattice, as wide as the floats for ordinals."""
        if self.centroids or self.shift:
            return np.dtype(np.int32)
        return np.dtype(f"i{8 if dtype == 'float64' else 4 if self.precision is None else 2}")

    def quantise(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the integers of an array of floats, in its shape."""
        flat = np.require(values, requirements=("C", "A")).reshape(-1)
        dtype = self.precision or flat.dtype.name
        lattice = self._lattice(dtype)
        if isinstance(lattice, CodebookLattice):
            indices = lattice.nearest(flat)
            integers = lattice.stored(lattice.numbers(*self._kept(lattice, flat, indices)))
        else:
            bits = flat.view(f"u{flat.itemsize}") if self.precision is None else as_bits(flat, dtype)
            integers = np.zeros(flat.size, self.integer(flat.dtype.name))
            count = self._count(flat.size)
            if isinstance(lattice, RoundedLattice):
                integers[:count] = self._shaped(lattice, values.shape).quantise(bits[:count], 0)
            else:
                integers[:] = ordinal_difference(bits, None, dtype)
        return integers.reshape(values.shape)

    def dequantise(self, integers: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """Return the floats of an array of integers, in its shape."""
        name = self.precision or dtype
        lattice = self._lattice(name)
        flat = np.ascontiguousarray(integers, self.integer(dtype)).reshape(-1)
        if isinstance(lattice, CodebookLattice):
            bits = lattice.values(lattice.restored(flat))
        elif isinstance(lattice, RoundedLattice):
            count = self._count(flat.size)
            bits = np.zeros(flat.size, "u4" if name == "float32" else "u2")
            bits[:count] = self._shaped(lattice, integers.shape).values(flat[:count], 0)
        else:
            bits = flat.astype(f"u{flat.itemsize}")
            ordinal_correct(None, bits, name)
        return floats(bits, name).reshape(integers.shape)

    @cached_property
    def _axes(self) -> dict[str, npt.NDArray[np.int16]]:
        given = {"rows": self.rows, "cols": self.cols}
        return {
            name: exponents_from_text(axis if isinstance(axis, str) else list(axis)) for name, axis in given.items()
        }

    def _lattice(self, dtype: str) -> _Lattice:
        if self.centroids:
            centroids = np.frombuffer(b64decode(self.centroids, validate=True), "<f4")
            return CodebookLattice(dtype, centroids, self.protected)
        if self.shift:
            if dtype not in CODEBOOK_DTYPES:
                raise UsageError(f"Ordinals of {dtype} are not rounded.")
            return RoundedLattice(dtype, self.shift, self.level, max(self.width, 1), **self._axes)
        return None

    def _count(self, size: int) -> int:
        """Return the number of elements before the padding of the last chunk."""
        rows = self._axes["rows"].size
        return min(size, rows * self.width) if rows else size

    def _shaped(self, lattice: RoundedLattice, shape: tuple[int, ...]) -> RoundedLattice:
        """Return the lattice if its rows and columns fit an array of this shape."""
        count = self._count(int(np.prod(shape, dtype=np.int64)))
        if lattice.cols.size not in (0, self.width) or lattice.rows.size > -(-count // max(self.width, 1)):
            raise UsageError("Rows and columns need one number each, and the `width` of a row.")
        return lattice

    @staticmethod
    def _kept(
        lattice: CodebookLattice, values: npt.NDArray[np.float32], indices: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.uint8], Bits]:
        """Return indices, and the bits of the elements that no level has exactly, if they are protected."""
        if not lattice.protected:
            return indices, np.empty(0, np.uint16)
        aside = floats(lattice.values(lattice.numbers(indices, np.empty(0, np.uint16))), lattice.dtype) != values
        indices[aside] = lattice.levels - 1
        return indices, as_bits(values[aside], "bfloat16" if lattice.dtype == "float32" else lattice.dtype)


class Levels(Filter):
    """Conversion of floats to the integers of a codebook, of a logarithmic scale, or of their order.

    Without settings, integers are the *ordinals* of floats, which keep their order and every bit. With `shift`, these
    are rounded to steps of ``2**shift``, which is even on a logarithmic scale. With `centroids`, an integer counts the
    levels from the one nearest to 0.

    Parameters
    ----------
    dtype : str
        `float32`, or for ordinals `float64`.
    centroids : str, optional
        Base64 of the levels, float32 in ascending order.
    protected : bool, optional
        Values that are not levels keep 16 bits; otherwise they take the nearest level.
    shift : int, optional
        Binary logarithm of the step of rounded ordinals.
    level, rows, cols, width : optional
        Quarter octaves that rounded ordinals count from: of all elements, of rows, of columns; elements of a row.
    precision : str, optional
        `bfloat16` or `float16`: the dtype of decoded values, as float32.

    Examples
    --------
    >>> import numpy as np
    >>> from base64 import b64encode
    >>> from ckstore.codecs.levels import Levels
    >>> codec = Levels("float32", centroids=b64encode(np.array([-1, 0, 2], "<f4")).decode())
    >>> codec.encode(np.array([1.7, -0.1, -3.0], "float32")).tolist()
    [1, 0, -1]
    >>> codec.decode(np.array([1, 0, -1], "int32")).tolist()
    [2.0, 0.0, -1.0]
    """

    codec_id = "ckstore.levels"

    def __init__(self, dtype: str, **settings: Any) -> None:
        super().__init__(dtype, Scale.parsed(**settings))
