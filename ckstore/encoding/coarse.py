"""Encodes an object's values as a coarse object, and measures the deviation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, frexp, isfinite, log2
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import (
    FLOATS,
    STEP_RANGE,
    Bits,
    Integers,
    LinearLattice,
    floats,
    statistics_of,
    step_exponent,
)
from ckstore.codecs.rounded import ROUNDED, RoundedLattice
from ckstore.codecs.short_floats import narrowed
from ckstore.encoding.codebooks import CAREFUL
from ckstore.encoding.common_step import CONCENTRATED, FIRST
from ckstore.encoding.deviations import Comparison
from ckstore.encoding.estimate import Encoded, Estimate, Master, Parent, ReadUnit, Sample, Way, nearby_ancestors
from ckstore.encoding.magnitudes import LogModel, exponent_bias, member_rows, row_width, whole
from ckstore.encoding.positives import loses_positives, may_lose, steady_least
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import cost, layer
from ckstore.lineage.planner import Candidates, Option
from ckstore.objects.identity import digest, lattice_id
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Linear, Rounded, check_cut, common_fields, exact_work
from ckstore.objects.units import Unit
from ckstore.policy import Policy
from ckstore.runtime.blocks import empty

Grid = LinearLattice | RoundedLattice

#: A first moment's step in octaves above the mean magnitude of its row and column, at quality 1.
FIRST_MOMENT = 2.5

#: Octaves by which the step is smaller in a run's first version, and at most elsewhere: while gradients agree, momentum
#: matters.
EARLY = 2.5

#: Elsewhere it shrinks by two octaves for each octave of a tensor's agreement above the mean tensor's and this.
_AGREEMENT = 0.25

#: Octaves that the step of a steady first moment is below the smallest value, at least.
_STEADY = 1

#: Where less of the momentum is kept, values that are not 0 are doubled: the middle of the octave up to all of it.
_KEPT = 0.5**0.5

#: Binary logarithm of a second moment's step in octaves, at quality 1.
SECOND_MOMENT = 1.5

#: The same of other values that are rounded relative to each: a sixteenth of an octave.
RELATIVE = -4.5

#: dtypes of second moments that become coarse. In float16 all values below 2^-12, which are most, lie in the cell of 0.
SECOND_MOMENTS = tuple(dtype for dtype in ROUNDED if dtype != "float16")

#: A row's step is at most this part of the root mean square of its values.
_LARGEST_STEP = 2.0

#: The step of a weight without a base is at most this many times that of a first version of such weights alone.
_OWN = 2.0

#: Octaves by which that of norms and biases is finer: 1/16.
_FINER = -5.0

#: Octaves above a row's largest step from which it is lost.
_LOST = 2.0

#: Exponents stay the parent's while they are within this distance of the target.
SLACK = 0.75


class Steps(NamedTuple):
    """The steps of a weight: binary logarithms of all its elements' step, and additions of rows and columns, or empty.

    A weight that `is_still` has not changed since the parent, and keeps its lattice. A parent that `is_related` belongs
    to the same run.
    """

    level: float
    rows: npt.NDArray[np.float64]
    cols: npt.NDArray[np.float64]
    is_still: bool = False
    is_related: bool = True


class CoarseEncoder:
    """Estimates and encodes objects of a coarse version."""

    def __init__(self, reader: ObjectReader, policy: Policy) -> None:
        self.reader = reader
        self.policy = policy

    def estimate(
        self,
        unit: Unit,
        read: ReadUnit,
        parent: Parent | None,
        steps: Callable[[], Steps],
        size: Callable[[], float],
        agreement: Callable[[], float | None],
    ) -> Estimate | None:
        """Return options of `unit`; None if it cannot be coarse: no floats, non-finite values, too tight a bound.

        A `parent` that was lost or cannot be decoded counts as none. `steps` are those of a weight, `size` is the root
        mean square of the unit's tensor, `agreement` the excess of first moments over the mean tensor's, if
        they have second ones.
        """
        if unit.dtype not in STEP_RANGE:
            return None
        if unit.role in CAREFUL and (self.policy.is_bounded or unit.dtype not in ROUNDED):
            return None  # Every bound allows 0, which makes the first step after a restore explode.
        bits = read(0, unit.count)
        total, largest, finite = statistics_of(bits, unit.dtype)
        if finite < unit.count or not isfinite(total):
            return None

        def against(parent: Parent | None) -> Estimate | None:
            if unit.role in CAREFUL:
                return self._estimate_relative(unit, bits, is_moment=unit.role == "second")
            if self.policy.is_bounded:
                return self._estimate_bounded(unit, bits, largest, parent, size)
            if unit.role == "first":
                return self._estimate_first_moment(unit, bits, agreement(), early=parent is None)
            return self._estimate_weight(unit, bits, largest, parent, steps())

        try:
            estimate = against(parent)
        except IntegrityError:
            estimate = against(None)  # A run continues after damage.
        if estimate is not None and unit.role != "first" and _loses(estimate, bits):
            # Not surely a weight, or with values next to the smallest float.
            estimate = None if self.policy.is_bounded else self._estimate_relative(unit, bits, is_moment=False)
            return None if estimate is None or _loses(estimate, bits) else estimate
        return None if estimate is None or _is_clamped(bits, largest, estimate) else estimate

    def estimate_cast(self, unit: Unit, read: ReadUnit, master: Master) -> Estimate | None:
        """Return options of a rounding of values that become coarse: on their lattice, against them or in full.

        None if the lattice does not suit its dtype or values.
        """
        if not isinstance(master.estimate.lattice, LinearLattice):
            return None
        lattice = replace(master.estimate.lattice, dtype=unit.dtype)
        bits = read(0, unit.count)
        if not lattice.is_in_range or statistics_of(bits, unit.dtype)[2] < unit.count:
            return None
        estimate = self._estimate_of(unit, bits, lattice, None)
        if _loses(estimate, bits):
            return None
        chunks = -(-unit.count // unit.chunk)
        work = layer(chunks, unit.count, 0, grouped=False, delta=True).plus(master.source.work)
        estimate.candidates = replace(
            estimate.candidates,
            options=(*estimate.candidates.options, Option("cast", 0.0, cost(work), is_base=False)),
        )
        estimate.ways["cast"] = Way(None, source=master.source)
        estimate.master = master
        return estimate

    def encode(self, estimate: Estimate, plan: Way, read: ReadUnit, debt: int) -> Encoded:
        """Return an object under `plan`, and cache its integers for the next version."""
        unit, lattice, master = estimate.unit, estimate.lattice, estimate.master
        assert isinstance(lattice, LinearLattice | RoundedLattice)
        payloads = []
        below: list[bytes] = []
        comparison = Comparison(unit)
        coded: list[Integers] = []
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            bits = read(start, min(start + unit.chunk, unit.count))
            predicted = None
            if isinstance(plan.base, Linear) and isinstance(lattice, LinearLattice):
                predicted = lattice.project(plan.base.lattice, self.reader.integers(plan.base, chunk), start)
            integers = _integers(estimate, bits, start)
            if master is not None:
                words = master.source.read(start, start + bits.size)
                rounded = _integers(master.estimate, words, start)
                below.append(bytes.fromhex(digest(rounded.view(np.uint8))))
                integers = np.where(narrowed(words, unit.dtype) == bits, rounded, integers)
                predicted = None if plan.source is None else rounded
            delta = integers
            if predicted is not None:
                delta = np.subtract(integers, predicted, out=empty(integers.size, np.int32))
            payloads.append(encode_changes(delta))
            comparison.add(
                bits, lattice.values(integers, start), lattice if isinstance(lattice, LinearLattice) else None
            )
            coded.append(integers)
        digests = [bytes.fromhex(digest(integers.view(np.uint8))) for integers in coded]
        identity = lattice_id(lattice, unit.count, unit.chunk, digests)
        if unit.role in ("weight", "vector"):
            # The next version will be stored against these; moments would only evict them.
            for chunk, integers in enumerate(coded):
                self.reader.cache.keep((identity, chunk), integers)
        common = common_fields(identity, unit, estimate.alone)
        if isinstance(lattice, RoundedLattice):
            return Encoded(Rounded.on(lattice, **common), [*payloads], comparison.result())
        if master is not None and plan.source is not None:
            assert master.estimate.lattice is not None
            base = lattice_id(master.estimate.lattice, unit.count, unit.chunk, below)
            return Encoded(Linear.on(lattice, **common, base=base, cast=True), [*payloads], comparison.result())
        record = Linear.on(lattice, **common, base=plan.base_id, debt=debt, origin=estimate.origin)
        return Encoded(record, [*payloads], comparison.result())

    def _estimate_bounded(
        self, unit: Unit, bits: Bits, largest: float, parent: Parent | None, size: Callable[[], float]
    ) -> Estimate | None:
        """Estimate a linear lattice with one step, small enough for the bound."""
        if unit.is_bundle:
            return None
        bound = self.policy.max_abs_error or float("inf")
        if self.policy.max_rel_error is not None:
            bound = min(bound, self.policy.max_rel_error * size())
        if not 0 < bound < float("inf"):
            return None
        step = min(frexp(bound)[1], STEP_RANGE[unit.dtype][1])  # at most twice the bound
        if step < step_exponent(0.0, largest, unit.dtype):
            return None
        lattice = LinearLattice(unit.dtype, step, row_width(unit))
        record = self._record(unit, parent)
        if unit.dtype not in ("float32", "float64"):
            reached, *_ = _deviation(unit, bits, lattice.values(lattice.quantise(bits, 0), 0))
            if reached > bound:
                return None
        return self._estimate_of(unit, bits, lattice, record)

    def _estimate_weight(
        self, unit: Unit, bits: Bits, largest: float, parent: Parent | None, steps: Steps
    ) -> Estimate | None:
        record = None if parent is None or not steps.is_related else self._record(unit, parent)
        if steps.is_still and record is not None:
            lattice = record.lattice
        else:
            limits = _limits(unit, bits)
            if unit.role == "vector":
                if step_exponent(0.0, largest, unit.dtype) > steps.level:
                    return None  # A value is so large that integers cannot hold the others as well.
                limits = _FINER + np.minimum(limits, _tensor_limits(unit, bits))
            most = limits
            if record is None and unit.role == "weight":
                octaves = log2(_OWN * FIRST * self.policy.quality / _LARGEST_STEP) + _reach(steps.cols)
                shaped = steps.rows if steps.rows.size else np.zeros(1)
                most = np.minimum(limits, _own_limits(unit, bits, limits) + octaves + shaped)
            lattice = _settled(unit, steps, most, largest, record)
            if _is_lost(lattice, limits):
                return None
        sample = Sample.of(unit, lambda first, last: bits[first:last]).part()
        # Training that was restored from the parent began on its lattice, and has hardly left it.
        dithered = record is not None and lattice.concentration(sample.bits, sample.start) > CONCENTRATED
        estimate = self._estimate_of(unit, bits, lattice, record, dithered=dithered)
        if record is not None:
            estimate.origin = record.origin or record.id
        return estimate

    def _estimate_first_moment(
        self, unit: Unit, bits: Bits, agreement: float | None, *, early: bool
    ) -> Estimate | None:
        finer = EARLY if early else min(EARLY, 2 * max(0.0, (agreement or 0.0) - _AGREEMENT))
        lowest, highest = STEP_RANGE[unit.dtype]
        model = LogModel.of(unit, bits)
        rows, cols = model.exponents()
        step = round(model.level + FIRST_MOMENT - finer + log2(self.policy.quality))
        limits = _steady_limits(unit, bits)
        if limits is not None:
            rows = whole(np.minimum(model.rows, limits - step))
        if unit.dtype == "float16":
            cols = cols[:0]  # The range of its steps is so small that rows and columns together may leave it.
        reach = sum(int(axis.min()) for axis in (rows, cols) if axis.size)
        top = sum(int(axis.max()) for axis in (rows, cols) if axis.size)
        step = min(max(step, lowest - reach), highest - top - 1)
        lattice = LinearLattice(unit.dtype, step, row_width(unit), rows, cols)
        if limits is not None:
            if (step + (rows if rows.size else 0) > limits).any():
                return self._estimate_relative(unit, bits, is_moment=False)
            return self._estimate_of(unit, bits, lattice, None)
        if agreement is None or _momentum_kept(unit, bits, lattice) > _KEPT:
            return self._estimate_of(unit, bits, lattice, None)
        return self._estimate_of(unit, bits, replace(lattice, step=step + 1), None, doubled=True)

    def _estimate_relative(self, unit: Unit, bits: Bits, *, is_moment: bool) -> Estimate | None:
        """Estimate values that are rounded relative to each: coarsely if they are second moments."""
        if unit.dtype not in (SECOND_MOMENTS if is_moment else ROUNDED):
            return None
        octaves = (SECOND_MOMENT if is_moment else RELATIVE) + log2(self.policy.quality) / 2
        shift = max(FLOATS[unit.dtype][0] + min(max(ceil(octaves), 0) if is_moment else ceil(octaves), 3), 1)
        if not is_moment and floats(bits, unit.dtype).min(initial=0) < 0:
            return self._estimate_of(unit, bits, RoundedLattice(unit.dtype, shift, 0, row_width(unit)), None)
        model = LogModel.of(unit, bits)
        rows, cols = model.exponents(4.0)
        # Up, since a mean of logarithms lies below the mean.
        level = ceil(4 * (model.level + exponent_bias(unit.dtype)))
        lattice = RoundedLattice(unit.dtype, shift, level, row_width(unit), rows, cols)
        # In full: the residuals after rows and columns are as small as their change since the parent.
        return self._estimate_of(unit, bits, lattice, None)

    def _record(self, unit: Unit, parent: Parent | None) -> Linear | None:
        """Return the parent's record if its lattice is linear, else that of the nearest coarse ancestor."""
        for identity in () if parent is None else (parent.id, parent.other):
            if identity is not None:
                record = self.reader.resolver.record(identity)
                check_cut(record, unit)
                if isinstance(record, Linear):
                    return record
        return None

    def _estimate_of(
        self,
        unit: Unit,
        bits: Bits,
        lattice: Grid,
        record: Linear | None,
        *,
        dithered: bool = False,
        doubled: bool = False,
    ) -> Estimate:
        """Return options for `bits` on `lattice`: in full, or against the object of `record` and its ancestors."""
        sample = Sample.of(unit, lambda first, last: bits[first:last]).part()
        chunks = -(-unit.count // unit.chunk)
        quantised = _quantised(lattice, sample.bits, sample.start, dithered=dithered, doubled=doubled)
        base = sample.nbytes(quantised)
        work = layer(chunks, unit.count, int(base), grouped=False)
        full_cost = cost(exact_work(unit.count, unit.chunk, unit.dtype))
        options = [Option("base", base, cost(work), is_base=True)]
        ways = {"base": Way(None)}
        debt = 0.0
        if record is not None and isinstance(lattice, LinearLattice) and record.lattice.width == lattice.width:
            debt = record.debt
            for place, ancestor in nearby_ancestors(self.reader.chains.levels(record), unit.dtype):
                assert isinstance(ancestor, Linear)
                name = f"delta-{place}"
                integers = sample.cut(self.reader.integers(ancestor, sample.chunk))
                predicted = lattice.project(ancestor.lattice, integers, sample.start)
                stored = sample.nbytes(quantised - predicted)
                price = layer(chunks, unit.count, int(stored), grouped=False, delta=True).plus(
                    self.reader.chains.work(ancestor)
                )
                options.append(Option(name, stored, cost(price), is_base=False))
                ways[name] = Way(ancestor)
        candidates = Candidates(tuple(options), debt)
        return Estimate(
            unit, candidates, ways, full_cost, int(base), lattice, is_coarse=True, dithered=dithered, doubled=doubled
        )


def _limits(unit: Unit, bits: Bits) -> npt.NDArray[np.float64]:
    """Return binary logarithms of the largest steps of a unit's rows: beyond them, whole rows would become 0."""
    from ckstore.kernels.coarse import value_sums

    width = row_width(unit)
    rows, cols = np.zeros(-(-unit.count // width)), np.zeros(width)
    value_sums(floats(bits, unit.dtype), True, width, rows, cols)
    counts = np.full(rows.size, width)
    counts[-1] = unit.count - (rows.size - 1) * width
    with np.errstate(divide="ignore"):
        limits: npt.NDArray[np.float64] = np.where(
            rows > 0, np.log2(_LARGEST_STEP) + np.log2(rows / counts) / 2, np.inf
        )
    return limits


def _tensor_limits(unit: Unit, bits: Bits) -> npt.NDArray[np.float64]:
    """Return the same from whole tensors of a bundle: two of them may share a row."""
    sizes = np.array([np.sqrt(np.square(tensor).sum() / max(tensor.size, 1)) for tensor in _members(unit, bits)])
    with np.errstate(divide="ignore"):
        return member_rows(unit, np.where(sizes > 0, np.log2(_LARGEST_STEP * sizes), np.inf))


def _members(unit: Unit, bits: Bits) -> list[npt.NDArray[np.float64]]:
    """Return the values of a bundle's tensors."""
    return np.split(floats(bits, unit.dtype).astype(np.float64), np.cumsum(unit.member_counts)[:-1])


def _steady_limits(unit: Unit, bits: Bits) -> npt.NDArray[np.float64] | None:
    """Return binary logarithms of the largest steps of a bundle's rows that keep steady values; None without any."""
    least = np.array([steady_least(tensor) for tensor in _members(unit, bits)] if unit.is_bundle else [0.0])
    if not least.any():
        return None
    with np.errstate(divide="ignore"):
        return member_rows(unit, np.where(least > 0, np.floor(np.log2(least)) - _STEADY, np.inf))


def _own_limits(unit: Unit, bits: Bits, limits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the limits of tensors as wholes, given those of rows: rows of 0 do not count."""
    if unit.is_bundle:
        return _tensor_limits(unit, bits)
    known = limits[np.isfinite(limits)]
    return np.log2(np.exp2(2 * known).mean(keepdims=True)) / 2 if known.size else limits


def _settled(
    unit: Unit, steps: Steps, limits: npt.NDArray[np.float64], largest: float, record: Linear | None
) -> LinearLattice:
    """Return the lattice of these steps; nearby exponents of the parent stay, so that its integers fit."""
    lowest, highest = STEP_RANGE[unit.dtype]
    smallest = step_exponent(0.0, largest, unit.dtype)
    before = None if record is None else record.lattice
    cols = steps.cols
    rows = np.minimum(steps.level + (steps.rows if steps.rows.size else np.zeros(1)), limits - _reach(cols))
    rows = np.clip(rows, smallest, highest)
    if before is not None:
        rows = _near(rows, before.step + (before.rows if before.rows.size else np.zeros(1)))
        cols = _near(cols, before.cols if before.cols.size else np.zeros(1))
    whole_rows = np.rint(rows).astype(np.int64)
    step = int(np.median(whole_rows))
    if before is not None and abs(step - before.step) <= 1 and (whole_rows == before.step).any():
        step = before.step
    row_exponents = whole(whole_rows.astype(np.float64) - step)
    col_exponents = whole(cols)
    if row_exponents.size == 1:
        step, row_exponents = step + int(row_exponents[0]), row_exponents[:0]
    low = sum(int(axis.min()) for axis in (row_exponents, col_exponents) if axis.size)
    high = sum(int(axis.max()) for axis in (row_exponents, col_exponents) if axis.size)
    step = min(max(step, lowest - low), highest - high)
    return LinearLattice(unit.dtype, step, row_width(unit), row_exponents, col_exponents)


def _is_lost(lattice: LinearLattice, limits: npt.NDArray[np.float64]) -> bool:
    """Return whether most rows would become 0: a value is so large that integers cannot hold the others as well."""
    rows = lattice.step + (lattice.rows if lattice.rows.size else np.zeros(1))
    return bool(np.mean(rows > limits + _LOST) > 0.5)


def _reach(cols: npt.NDArray[np.float64]) -> float:
    """Return the average addition of columns to a row's step."""
    return float(cols.mean()) if cols.size else 0.0


def _near(asked: npt.NDArray[np.float64], before: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return exponents: the previous ones if they are within `SLACK` of the targets."""
    if before.size not in (1, asked.size):
        return asked
    result: npt.NDArray[np.float64] = np.where(np.abs(asked - before) < SLACK, before, np.rint(asked))
    return result


def _deviation(unit: Unit, bits: Bits, decoded: Bits) -> tuple[float, float, float, int]:
    from ckstore.kernels.coarse import deviation

    result: tuple[float, float, float, int] = deviation(floats(bits, unit.dtype), floats(decoded, unit.dtype))
    return result


def _loses(estimate: Estimate, bits: Bits) -> bool:
    """Return whether a positive value of a tensor without negative ones becomes 0."""
    unit, lattice = estimate.unit, estimate.lattice
    assert isinstance(lattice, LinearLattice | RoundedLattice)
    if not may_lose(unit, bits):
        return False
    if isinstance(lattice, RoundedLattice) and lattice.is_above_zero(bits):
        return False
    integers = _integers(estimate, bits, 0)
    return loses_positives(unit, bits, lattice.values(integers, 0))


def _is_clamped(bits: Bits, largest: float, estimate: Estimate) -> bool:
    """Return whether values are so far from 0 that their integers are clamped."""
    from ckstore.kernels.lattice import MAX_INTEGER

    if not isinstance(estimate.lattice, LinearLattice):
        return False
    lattice = replace(estimate.lattice, step=estimate.lattice.step - estimate.doubled)
    finest = lattice.step + sum(int(axis.min()) for axis in (lattice.rows, lattice.cols) if axis.size)
    if frexp(largest)[1] - finest < MAX_INTEGER.bit_length() - 1:
        return False
    return bool(np.abs(lattice.quantise(bits, 0)).max(initial=0) == MAX_INTEGER)


def _momentum_kept(unit: Unit, bits: Bits, lattice: LinearLattice) -> float:
    """Return the projection of decoded first moments on the original ones, as a part of these; 1 if all are 0."""
    sample = Sample.of(unit, lambda first, last: bits[first:last])
    decoded = lattice.values(lattice.quantise(sample.bits, sample.start), sample.start)
    before, after = (floats(each, unit.dtype).astype(np.float64) for each in (sample.bits, decoded))
    size = float(np.square(before).sum())  # 0 for tiny values, too. A product would wake the threads of BLAS.
    return float((before * after).sum()) / size if size else 1.0


def _integers(estimate: Estimate, bits: Bits, start: int) -> Integers:
    """Return the integers of a chunk, as an estimate prepares them."""
    assert isinstance(estimate.lattice, LinearLattice | RoundedLattice)
    return _quantised(estimate.lattice, bits, start, dithered=estimate.dithered, doubled=estimate.doubled)


def _quantised(lattice: Grid, bits: Bits, start: int, *, dithered: bool, doubled: bool) -> Integers:
    """Return the integers of a chunk."""
    if not isinstance(lattice, LinearLattice):
        return lattice.quantise(bits, start)
    return lattice.dithered(bits, start) if dithered else lattice.quantise(bits, start, doubled=doubled)
