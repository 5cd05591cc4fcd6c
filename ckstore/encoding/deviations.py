"""Compares original values with decoded ones of a coarse object: records deviations, and hashes the decoded values."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import Bits, LinearLattice, floats
from ckstore.objects.documents import CoarseUnit, Deviation
from ckstore.objects.identity import MemberHasher
from ckstore.objects.units import Unit
from ckstore.runtime.blocks import aligned
from ckstore.storage.schema import LARGEST

#: The number of significant digits of recorded errors.
_UPWARDS = Context(prec=4, rounding=ROUND_CEILING)

#: Sums of squares below this have lost terms or digits.
_LEAST = 1e-290


class Comparison:
    """Compares a unit's original values with its decoded ones, chunk by chunk in order."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
        self._ends = np.cumsum(unit.member_counts)
        self._sums = np.zeros((len(unit.members), 4))
        self._position = 0
        self._spread = 0.0

    def add(self, bits: Bits, decoded: Bits, lattice: LinearLattice | None = None) -> None:
        """Compare the next chunk: bits of the original and of the decoded values, and the lattice of these."""
        from ckstore.kernels.coarse import weighted_squares

        self._hasher.update(memoryview(decoded).cast("B"))
        add_squares(
            self._sums, self._ends, self._position, floats(bits, self._unit.dtype), floats(decoded, self._unit.dtype)
        )
        if lattice is not None:
            self._spread += weighted_squares(
                floats(bits, self._unit.dtype), floats(decoded, self._unit.dtype),
                lattice.step, aligned(lattice.rows), aligned(lattice.cols), lattice.width, self._position,
            )  # fmt: skip
        self._position += bits.size

    def result(self) -> CoarseUnit:
        """Return the facts that the version records, once all chunks were compared."""
        counts = np.maximum(self._sums[:, 3], 1)
        # Squares of tiny float64 underflow: then the largest difference is the bound.
        rms = np.where(self._sums[:, 1] < _LEAST, self._sums[:, 0], np.sqrt(self._sums[:, 1] / counts))
        size = np.sqrt(self._sums[:, 2] / counts)
        rows = zip(self._sums[:, 0].tolist(), rms.tolist(), size.tolist(), strict=True)
        spread = min(float(f"{self._spread / max(self._position, 1):.4g}"), LARGEST)
        return CoarseUnit(self._hasher.identity(), tuple(Deviation(*map(_bound, row)) for row in rows), spread)


def add_squares(
    sums: npt.NDArray[np.float64],
    ends: npt.NDArray[np.int64],
    position: int,
    values: npt.NDArray[Any],
    others: npt.NDArray[Any],
) -> None:
    """Add the results of `kernels.coarse.deviation` for a stretch of a unit to the sums of its members.

    `sums` has for each member the largest difference, the sums of squared differences and of squared values, and their
    number. `ends` of the members and `position` of the stretch are in elements of the unit.
    """
    from ckstore.kernels.coarse import deviation

    first = int(np.searchsorted(ends, position, side="right"))
    start = 0
    while start < values.size:
        stop = min(values.size, int(ends[first]) - position)
        largest, *squares = deviation(values[start:stop], others[start:stop])
        sums[first, 0] = max(sums[first, 0], largest)
        sums[first, 1:] += squares
        start = stop
        first += 1


def _bound(value: float) -> float:
    """Return `value` to a few digits, rounded up; at most the largest float."""
    return min(float(_UPWARDS.create_decimal_from_float(value)), LARGEST)
