"""Models of a unit's magnitudes by rows and columns: the exponents of its lattice, and its sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import FLOATS, Bits
from ckstore.codecs.rounded import largest_finite
from ckstore.objects.units import Unit

Exponents = npt.NDArray[np.int16]

#: Elements of a bundle that share an exponent.
BUNDLE_ROW = 64

#: Rows and columns with fewer elements have no exponents.
_NARROW = 16

#: Limit of exponents: within it they take one character each in a manifest.
_REACH = 40


def row_width(unit: Unit) -> int:
    """Return the length of a lattice's rows for `unit`: the cut between its axes with the fewest rows and columns.

    Rows of a convolution are its filters, rather than the three elements of its last axis. A bundle's rows are short
    blocks, so that each of its members has its own rows. A unit that is narrow either way is one row: exponents for
    every few elements would take more than the elements.
    """
    if unit.is_bundle:
        return BUNDLE_ROW
    shape = unit.shape
    cuts = [prod(shape[axis:]) for axis in range(1, len(shape))] or [unit.count]
    width = min(cuts, key=lambda width: unit.count // width + width)
    return width if min(width, unit.count // width) >= _NARROW else unit.count


@dataclass(frozen=True, slots=True)
class LogModel:
    """The mean of a unit's binary logarithms, as a level and the differences of rows and columns from it, in octaves.

    Zeros and values that are not finite do not count. Shazeer and Stern ("Adafactor", 2018) fit rows and columns to
    second moments with arithmetic means; here they are fitted to logarithms.

    `cols` is empty for bundles and for units of one axis.
    """

    level: float
    rows: npt.NDArray[np.float64]
    cols: npt.NDArray[np.float64]

    @classmethod
    def of(cls, unit: Unit, bits: Bits) -> LogModel:
        """Fit the model to all of a unit's values (bits of a float dtype with infinities)."""
        from ckstore.kernels.coarse import order_sums

        width = row_width(unit)
        rows = -(-unit.count // width)
        sums, cols, counts = (np.zeros(size, np.int64) for size in (rows, width, rows + width))
        mantissa, bias = FLOATS[unit.dtype][0], exponent_bias(unit.dtype)
        shift = max(mantissa - 23, 0)
        order_sums(bits, width, largest_finite(unit.dtype), shift, sums, cols, counts)
        octave, known = 1 << (mantissa - shift), counts[:rows].sum()
        if not known:
            return cls(-bias, np.zeros(rows), np.zeros(0 if rows == 1 or unit.is_bundle else width))
        level = float(sums.sum() / known / octave)
        if unit.is_bundle:
            return cls(level - bias, _by_member(unit, sums, counts[:rows], octave) - level, np.zeros(0))
        if rows == 1:
            return cls(level - bias, np.zeros(1), np.zeros(0))
        by_rows = _means(sums, counts[:rows], octave, level)
        return cls(level - bias, by_rows, _means(cols, counts[rows:], octave, level))

    def exponents(self, factor: float = 1.0) -> tuple[Exponents, Exponents]:
        """Return rows and columns times `factor`, as whole numbers."""
        return whole(self.rows * factor), whole(self.cols * factor)


def exponent_bias(dtype: str) -> int:
    """Return the bias of a float dtype's exponents: the octaves of the ordinal of 1."""
    return FLOATS[dtype][1] // 2 - 1


def whole(octaves: npt.NDArray[np.float64]) -> Exponents:
    """Round octaves to exponents of a lattice, within the range of a record; empty if all are 0."""
    exponents = np.clip(np.rint(octaves), -_REACH, _REACH).astype(np.int16)
    return exponents if exponents.any() else np.empty(0, np.int16)


def member_rows(unit: Unit, octaves: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the octaves of a bundle's blocks from those of its members: blocks of two members get the smaller one."""
    ends = np.cumsum(unit.member_counts)
    rows = -(-unit.count // BUNDLE_ROW)
    result = np.full(rows, np.inf)
    starts = np.concatenate([[0], ends[:-1]])
    for value, start, end in zip(octaves.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if end > start:
            stretch = result[start // BUNDLE_ROW : -(-end // BUNDLE_ROW)]
            np.minimum(stretch, value, out=stretch)
    return result


def _by_member(unit: Unit, sums: Any, counts: Any, octave: int) -> npt.NDArray[np.float64]:
    """Return means by member, for each block; a block of two members counts for both."""
    ends = np.cumsum(unit.member_counts)
    starts = np.concatenate([[0], ends[:-1]])
    means = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        blocks = slice(start // BUNDLE_ROW, -(-end // BUNDLE_ROW))
        known = counts[blocks].sum()
        means.append(sums[blocks].sum() / known / octave if known else 0.0)
    return member_rows(unit, np.array(means))


def _means(sums: Any, counts: Any, octave: int, level: float) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1) / octave - level, 0.0)
    return result
