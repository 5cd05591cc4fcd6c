"""The steps of a coarse version's weights: one budget, pooled over all of them, shaped by sensitivity.

Rounding raises the loss, to second order, by half the sum of F times the squared error (F the diagonal of the Fisher
information): steps follow the loss rather than single tensors. A tensor that changes more than others is not stored
more coarsely for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import Bits, LinearLattice, floats
from ckstore.encoding.estimate import Parent, Sample
from ckstore.encoding.magnitudes import row_width, whole
from ckstore.encoding.sensitivity import Sensitivity
from ckstore.errors import IntegrityError
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Linear, Record, check_cut
from ckstore.objects.units import Unit
from ckstore.runtime.blocks import aligned
from ckstore.runtime.threads import worker_count

#: The step of quality 1: this many times the change since the parent ...
ALPHA = 1.75

#: ... or this part of the distance travelled since the run began, whichever is larger, ...
FLOOR = 0.35

#: ... and for a run's first version this part of the weights' own size.
FIRST = 0.1

#: Buffers among the weights, such as masks and sums, may be larger by orders of magnitude, and change by more: mean
#: squares of a unit count as at most this many times the median of all elements. Those of trained models are below.
_OUTLYING = {"size": 16.0, "travelled": 256.0, "change": 256.0}

#: The minimal part of the squared distance to the parent's decoded values that counts as change.
_LEAST_CHANGE = 0.004

#: Below this part a tensor has not changed at all, and keeps its lattice.
_STILL = 0.001

#: If the change in a sample is below this part of the squared distance, the whole tensor is measured.
_SUSPECT = 0.05

#: Beyond this mean cosine of their distances from lattice values, values lie near them. A normal distribution of half a
#: step has 0.007, and rounds without bias.
CONCENTRATED = 0.03


@dataclass(frozen=True, slots=True)
class CommonStep:
    """The common settings of a version's weights.

    `level` is the binary logarithm of the step of weights of mean sensitivity, None if all weights are 0. `still` has
    the keys of weights that have not changed since the parent. A parent that is not related belongs to another run with
    the same names.
    """

    level: float | None
    still: frozenset[str]
    is_related: bool


@dataclass(frozen=True, slots=True)
class _Measured:
    """One unit's mean squares, in units of its sensitivity's octaves.

    Attributes
    ----------
    elements
        The number of elements that it represents.
    size
        Of the values.
    travelled, change
        Of the distances to the run's first version, and to the parent without the parent's error. The latter is in
        units of the parent's steps; None without parent, or without change.
    level
        Binary logarithm of the parent's common step.
    is_still
        It has not changed since the parent.
    is_restored
        Its values lie near the parent's lattice values: training was restored from these.
    """

    elements: int
    size: float
    travelled: float | None = None
    change: float | None = None
    level: float = 0.0
    is_still: bool = False
    is_restored: bool = False


def common_step(
    units: Sequence[tuple[Unit, Sensitivity, Parent | None]],
    read: Callable[[Unit, int, int], Bits],
    reader: ObjectReader,
    quality: float,
) -> CommonStep:
    """Return the steps of weights, given with their sensitivities and possible bases, from a sample of each.

    Norms and biases are only compared with their parents: they have steps of their own. `read` returns the bits of a
    unit from one element to before another.
    """

    def measured(item: tuple[Unit, Sensitivity, Parent | None]) -> _Measured:
        unit, shape, parent = item
        sample = Sample.of(unit, lambda first, last: read(unit, first, last))
        if parent is not None:
            try:
                record = reader.resolver.record(parent.id)
                check_cut(record, unit)
                if record.is_exact:
                    return _exactly(unit, sample, shape, record, reader)
                if isinstance(record, Linear) and record.lattice.width == row_width(unit):
                    return _against(unit, sample, shape, parent.spread, record, read, reader)
            except IntegrityError:
                pass  # A run continues after damage.
        return _Measured(unit.count, _square(unit, sample, shape, None))

    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        found = list(pool.map(measured, units))
    still = frozenset(unit.key for (unit, _, _), item in zip(units, found, strict=True) if item.is_still)
    found = [item for (unit, _, _), item in zip(units, found, strict=True) if unit.role == "weight"]
    moved = [item for item in found if item.change is not None]
    if moved:
        level = _pooled(moved, "level")
        change = _pooled(moved, "change") * 4.0**level
        asked = quality * max(ALPHA * change**0.5, FLOOR * _pooled(moved, "travelled") ** 0.5)
        if _pooled(moved, "is_restored") > 0.5:
            asked /= 2  # Dithered values have larger errors; see `CoarseEncoder`.
        if change <= _pooled(moved, "size"):
            return CommonStep(float(np.log2(asked)) if asked > 0 else level, still, is_related=True)
    size = _pooled(found, "size")
    first = float(np.log2(FIRST * quality * size**0.5)) if size > 0 else None
    return CommonStep(first, still, is_related=not moved)


def _pooled(found: Sequence[_Measured], name: str) -> float:
    """Return the mean over all elements; mean squares far beyond those of other units count as less."""
    weights = np.array([item.elements for item in found], np.float64)
    values = np.array([getattr(item, name) for item in found], np.float64)
    order = np.argsort(values)
    order = order[values[order] > 0]
    if name in _OUTLYING and order.size:
        total = np.cumsum(weights[order])
        values = np.minimum(values, _OUTLYING[name] * values[order[np.searchsorted(total, total[-1] / 2)]])
    return float(values @ weights / weights.sum()) if values.size else 0.0


def _against(
    unit: Unit,
    sample: Sample,
    shape: Sensitivity,
    spread: float,
    record: Linear,
    read: Callable[[Unit, int, int], Bits],
    reader: ObjectReader,
) -> _Measured:
    lattice = record.lattice
    distance = _distance(unit, lattice, sample.bits, sample.cut(reader.integers(record, sample.chunk)), sample.start)
    distance /= max(sample.bits.size, 1)
    size = _square(unit, sample, shape, None)
    if abs(distance - spread) <= _SUSPECT * distance:
        total = 0.0
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            bits = read(unit, start, min(start + unit.chunk, unit.count))
            total += _distance(unit, lattice, bits, reader.integers(record, chunk), start)
        distance = total / unit.count
        if abs(distance - spread) <= _STILL * distance:
            return _Measured(unit.count, size, is_still=True)
    enough = sample.part()
    is_restored = lattice.concentration(enough.bits, enough.start) > CONCENTRATED
    if is_restored:
        spread = 0.0
    change = max(distance - spread, _LEAST_CHANGE * distance)
    origin = record if record.origin is None else reader.resolver.record(record.origin)
    check_cut(origin, record)
    travelled = _square(unit, sample, shape, sample.cut(reader.values(origin, sample.chunk)))
    level = lattice.step - _mean(shape.rows) - _mean(shape.cols) + _mean(lattice.rows) + _mean(lattice.cols)
    return _Measured(unit.count, size, travelled, change, level, is_restored=is_restored)


def _exactly(unit: Unit, sample: Sample, shape: Sensitivity, record: Record, reader: ObjectReader) -> _Measured:
    """Measure against a parent whose lattice is exact: the run effectively begins there."""
    change = _square(unit, sample, shape, sample.cut(reader.values(record, sample.chunk)))
    size = _square(unit, sample, shape, None)
    return _Measured(unit.count, size, change, change) if change else _Measured(unit.count, size)


def _distance(unit: Unit, lattice: LinearLattice, bits: Bits, integers: npt.NDArray[Any], start: int) -> float:
    """Return the sum of squared differences of values and lattice values, in units of the lattice's steps."""
    from ckstore.kernels.coarse import weighted_squares

    there = floats(lattice.values(integers, start), unit.dtype)
    total: float = weighted_squares(
        floats(bits, unit.dtype),
        there,
        lattice.step,
        aligned(lattice.rows),
        aligned(lattice.cols),
        lattice.width,
        start,
    )
    return total


def _square(unit: Unit, sample: Sample, shape: Sensitivity, other: Bits | None) -> float:
    """Return mean square of a sample, or of its difference to other values, in units of the sensitivity's octaves."""
    from ckstore.kernels.coarse import weighted_squares

    values = floats(sample.bits, unit.dtype)
    others = aligned(np.zeros_like(values)) if other is None else floats(other, unit.dtype)
    rows, cols = aligned(whole(shape.rows)), aligned(whole(shape.cols))
    total: float = weighted_squares(values, others, 0, rows, cols, row_width(unit), sample.start)
    return total / max(sample.bits.size, 1)


def _mean(octaves: npt.NDArray[Any]) -> float:
    return float(octaves.mean()) if octaves.size else 0.0
