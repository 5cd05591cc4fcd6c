"""Encodes an object's values in exact layers: estimates the cost of each way of storing it, and carries one out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from ckstore.codecs.integers import encode_changes, encode_chunk, has_changes
from ckstore.codecs.lattice import (
    FLOATS,
    Bits,
    Integers,
    LinearLattice,
    common_factor,
    ordinal_classes,
    ordinal_difference,
    scaled,
    step_exponent,
)
from ckstore.codecs.patches import Changes, find_changes
from ckstore.encoding.estimate import (
    BASE,
    DELTA,
    MOVED,
    OWN,
    PATCHED,
    Encoded,
    Estimate,
    ReadUnit,
    Sample,
    Way,
    nearby_ancestors,
)
from ckstore.encoding.magnitudes import row_width
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Prices, Work, cost, layer, patches
from ckstore.lineage.planner import Candidates, Choice, Option
from ckstore.lineage.predictions import Layer, Predictions
from ckstore.objects.identity import digest, lattice_id
from ckstore.objects.reader import FRAME, ObjectReader
from ckstore.objects.records import ContentRecord, LatticeRecord, Record, check_cut
from ckstore.objects.units import Unit
from ckstore.runtime.blocks import empty, fixed
from ckstore.runtime.checksum import crc32

#: The coarse step is this many times the change since the parent, or the floor, whichever is larger.
STEP_OF_CHANGE = 2.0

#: The floor: this part of the distance travelled since the run began.
STEP_OF_DISTANCE = 0.05

#: For a run's first version: this part of the weights' own size.
STEP_OF_VALUES = 0.05

#: The step stays the parent's while its binary logarithm is within this distance of the target.
STEP_SLACK = 0.75

#: Context order is used if it saves at least this part of the payload.
CONTEXT_GAIN = 0.03

#: Patches are offered if at most this part of the elements differs from the parent's, ...
SPARSE = 1 / 16

#: ... their sizes are estimated from at most this number of chunks, ...
_COMPARED = 8

#: ... and if they take at most this multiple of the bytes of other deltas, those are not offered: all later versions of
#: the chain would decode them, and a cheap chain gets long. A delta to an ancestor would save a level and take the
#: bytes of all changes since; a base is the better choice then.
PATCH_WORTH = 1.5

#: Sizes above this count as this: twice as much is still a finite number.
_LARGEST = 2.0**1000

#: Coarse layers hold floats of these dtypes; all others are kept on ordinal lattices.
LINEAR = ("float32", "float64")


class ObjectEncoder:
    """Estimates and encodes objects against objects of the store.

    Parameters
    ----------
    reader
        Decodes the objects that new ones are stored against.
    keep
        Whether the chunks of encoded objects stay in the reader's cache for the next version.
    """

    def __init__(self, reader: ObjectReader, *, keep: bool = False) -> None:
        self.reader = reader
        self._keep = keep

    def estimate(
        self, unit: Unit, read: ReadUnit, parent: str | None, coarse: str | None = None, *, fresh: bool = False
    ) -> Estimate:
        """Return the options of `unit`, from a sample of one chunk or from the parent's predictions.

        Parameters
        ----------
        unit
            The object's cut.
        read
            Bits of the elements from the first to before the second argument.
        parent
            Content id of the parent version's object of the same key and signature, or None. One that was lost or
            cannot be decoded counts as none: a run continues after damage.
        coarse
            Lattice id of that object if it has no exact values.
        fresh
            Whether to ignore the parent's predictions.
        """
        known = None if parent is None else self.reader.predictions.get(parent)
        if parent is not None and known is not None and known.left and not fresh:
            with suppress(IntegrityError):
                found = self._remembered(unit, parent, known)
                if found is not None:
                    return found
        sample = Sample.of(unit, read)
        try:
            if self._is_linear(unit):
                estimate = self._estimate_linear(unit, read, sample, parent, coarse)
            else:
                estimate = self._estimate_ordinal(unit, read, sample, parent)
            if known is not None and estimate.predictions is not None:
                estimate.predictions = known.found(estimate.predictions.sizes)
            return estimate
        except IntegrityError:
            if self._is_linear(unit):
                return self._estimate_first(unit, sample)
            return self._estimate_ordinal(unit, read, sample, None)

    def encode(
        self, content: str, estimate: Estimate, plan: Way, read: ReadUnit, replaced: Sequence[str] = ()
    ) -> Encoded:
        """Return the layers of an object under `plan`.

        If chunks stay in the cache for the next version, those of the ids in `replaced` are evicted: no object will be
        stored against them, and their memory is reused.
        """
        unit = estimate.unit
        encoded = Encoded(content, [], [], patched=plan.patched)
        digests: list[bytes] = []
        kept: list[Integers] = []
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            bits = read(start, min(start + unit.chunk, unit.count))
            if estimate.lattice is None:
                encoded.coarse.append(self._ordinal_chunk(unit, bits, chunk, plan))
            else:
                integers = self._linear_chunk(_linear(estimate), bits, chunk, start, plan, encoded)
                digests.append(bytes.fromhex(digest(integers.view(np.uint8))))
                if self._keep:
                    kept.append(integers)
            if self._keep:
                for before in replaced:
                    self.reader.cache.drop((before, chunk))
                if self.reader.cache.get((content, chunk)) is None:  # Possibly cached by a read of a hot version.
                    own = empty(bits.size, bits.dtype)
                    own[...] = bits  # A copy: the next objects reuse the memory of `bits`.
                    self.reader.cache.put((content, chunk), own)
        if plan.patched and encoded.exact and not any(encoded.exact):
            # The parent's bits under another id, as shards with another cut have: a layer must have some bytes.
            return self.encode(content, estimate, replace(plan, patched=False), read, replaced)
        if estimate.lattice is not None:
            encoded.identity = lattice_id(estimate.lattice, unit.count, unit.chunk, digests)
            for chunk, integers in enumerate(kept):
                self.reader.cache.put((encoded.identity, chunk), integers)
        return encoded

    def remember(self, content: str, estimate: Estimate, choice: Choice, layers: Encoded) -> None:
        """Keep the predictions of an object for the object that is stored against it."""
        if self._keep and estimate.predictions is not None:
            self.reader.predictions.put(content, estimate.predictions.after(estimate.layers(choice, layers)))

    def _remembered(self, unit: Unit, parent: str, known: Predictions) -> Estimate | None:
        """Return options by the sizes of the parent's layers; None if one of these is unknown."""
        if not self._is_linear(unit):
            record = self._ordinal_parent(parent, unit)
            if record is None:
                return None
            names = [order for order in ("natural", "context") if (order, 0) in known.sizes]
            sizes = known.at(names, [place for place, _ in nearby_ancestors(self.reader.chain(record))])
            return None if sizes is None else self._ordinal_options(unit, record, sizes, {}, known)
        record, content = self._linear_parent(unit, parent, None)
        if record is None or content is None:
            return None
        sizes = known.at(["chained"], [place for place, _ in nearby_ancestors(self.reader.content_chain(content))])
        origin = record if record.origin is None else self.reader.resolver.lattice(record.origin)
        if sizes is None:
            return None
        return self._linear_options(unit, record, content, record.linear, origin.id, sizes, {}, known)

    @staticmethod
    def _is_linear(unit: Unit) -> bool:
        return unit.dtype in LINEAR and not unit.is_bundle and unit.role == "weight"

    def _linear_chunk(
        self, lattice: LinearLattice, bits: Bits, chunk: int, start: int, plan: Way, encoded: Encoded
    ) -> Integers:
        if plan.patched and plan.base is not None and plan.parent is not None:
            return self._patched_chunk(plan.base, plan.parent, lattice, bits, chunk, start, encoded)
        predicted = None
        if plan.base is not None:
            # The parent's exact values have the same integers.
            before = self.reader.integers(plan.base, chunk, keep=plan.parent is not None)
            predicted = lattice.project(plan.base.linear, before, start)
        integers = lattice.quantise(bits, start, predicted)
        delta = integers
        if predicted is not None:
            delta = np.subtract(integers, predicted, out=empty(integers.size, np.int32))
        encoded.coarse.append(encode_changes(delta))
        parent = None
        if plan.parent is not None:
            parent = scaled(self.reader.exact(plan.parent, chunk, keep=False), lattice.dtype, plan.factor)
        encoded.exact.append(exact_frame(lattice, bits, integers, start, parent))
        return integers

    def _patched_chunk(
        self, base: LatticeRecord, parent: ContentRecord, lattice: LinearLattice, bits: Bits, chunk: int, start: int,
        encoded: Encoded,
    ) -> Integers:  # fmt: skip
        before = self.reader.integers(base, chunk)
        frame, changes = exact_patch(bits, self.reader.exact(parent, chunk, keep=False))
        encoded.exact.append(frame)
        if parent.lattice == base.id and not (lattice.rows.size or lattice.cols.size):
            # Elements equal to the parent's keep its integers.
            then = before[changes.places]
            now = lattice.quantise(bits[changes.places], 0, then)
            moved = Changes.by(changes.places, now - then)
            integers = before
            if moved.places.size:
                integers = empty(before.size, np.int32)
                integers[...] = before
                integers[changes.places] = now
        else:
            integers = lattice.quantise(bits, start, before)
            moved = find_changes(integers, before, is_float=False)
        encoded.coarse.append(moved.patch())
        return integers

    def _ordinal_chunk(self, unit: Unit, bits: Bits, chunk: int, plan: Way) -> memoryview | bytes | None:
        parent = None
        if plan.base is not None and plan.patched:
            parent = self.reader.ordinals(plan.base, chunk, keep=False)
            return find_changes(bits, parent, is_float=unit.dtype in FLOATS).patch()
        if plan.base is not None:
            parent = scaled(self.reader.ordinals(plan.base, chunk, keep=False), unit.dtype, plan.factor)
        difference = ordinal_difference(bits, parent, unit.dtype)
        if not has_changes(difference):
            return None
        classes = ordinal_classes(parent, unit.dtype) if plan.context and parent is not None else None
        return encode_chunk(difference, classes)

    def _estimate_ordinal(self, unit: Unit, read: ReadUnit, sample: Sample, parent: str | None) -> Estimate:
        bits = sample.bits
        sizes = {BASE: sample.nbytes(ordinal_difference(bits, None, unit.dtype))}
        factors: dict[Layer, float] = {}
        record = None if parent is None else self._ordinal_parent(parent, unit)
        if record is not None:
            for place, ancestor in nearby_ancestors(self.reader.chain(record)):
                before = sample.cut(self.reader.ordinals(ancestor, sample.chunk))
                share = 1.0
                if place == 0 and _is_sparse(sample.bits, before):
                    sizes[PATCHED], share = self._patch_bytes(
                        unit, read, sample, before, ancestor.id, partial(self.reader.ordinals, ancestor)
                    )
                for context, (stored, factor) in self._differences(sample, before, unit.dtype).items():
                    against = "context" if context else "natural", place
                    sizes[against], factors[against] = share * stored, factor
        return self._ordinal_options(unit, record, sizes, factors, _predictions(record, sizes, factors))

    def _ordinal_options(
        self, unit: Unit, record: LatticeRecord | None, sizes: Mapping[Layer, float], factors: Mapping[Layer, float],
        predictions: Predictions | None,
    ) -> Estimate:  # fmt: skip
        """Return the options for layers of these sizes."""
        chunks = -(-unit.count // unit.chunk)
        base = sizes[BASE]
        full = layer(chunks, unit.count, int(base), grouped=False)
        prices = self._prices(full)
        options = [Option("base", base, prices.full, is_base=True)]
        plans = {"base": Way(None)}
        chain = [] if record is None else nearby_ancestors(self.reader.chain(record))
        if record is not None and PATCHED in sizes:
            stored = sizes[PATCHED]
            work = patches(chunks, int(stored)).plus(self.reader.lattice_work(record))
            options.append(Option("patched", stored, prices.of(work, stored), is_base=False))
            plans["patched"] = Way(record, patched=True)
            if stored <= PATCH_WORTH * min(sizes.get((order, 0), stored) for order in ("natural", "context")):
                chain = []
        for place, ancestor in chain:
            for order in ("natural", "context"):
                if (order, place) not in sizes:
                    continue
                stored, name = sizes[order, place], f"{order}-{place}"
                work = layer(chunks, unit.count, int(stored), grouped=order == "context", delta=True)
                work = work.plus(self.reader.lattice_work(ancestor))
                options.append(Option(name, stored, prices.of(work, stored), is_base=False))
                plans[name] = Way(ancestor, context=order == "context", factor=factors.get((order, place), 1.0))
        debt = 0.0 if record is None else record.debt
        candidates = Candidates(tuple(options), debt)
        return Estimate(unit, candidates, plans, prices.full, (int(base), 0), predictions=predictions)

    def _prices(self, full: Work) -> Prices:
        return Prices(cost(full), full.stored, read_price=self.reader.blocks.read_price)

    @staticmethod
    def _differences(sample: Sample, before: Bits, dtype: str) -> dict[bool, tuple[float, float]]:
        """Return bytes and factor of the smallest delta against `before` in natural (False) and context order (True).

        Natural order decodes faster; context order is offered only if it saves `CONTEXT_GAIN`.
        """
        ways = []
        for factor in {1.0, common_factor(sample.bits, before, dtype)}:
            predicted = scaled(before, dtype, factor)
            difference = ordinal_difference(sample.bits, predicted, dtype)
            ways.append((sample.nbytes(difference), factor, predicted, difference))
        natural, factor, predicted, difference = min(ways, key=lambda way: way[:2])
        classes = ordinal_classes(predicted, dtype)
        context = float("inf") if classes is None else sample.nbytes(difference, classes)
        if context < (1 - CONTEXT_GAIN) * natural:
            return {False: (natural, factor), True: (context, factor)}
        return {False: (natural, factor)}

    def _patch_bytes(
        self, unit: Unit, read: ReadUnit, sample: Sample, sampled: Bits, identity: str, before: Callable[[int], Bits]
    ) -> tuple[float, float]:
        """Estimate the bytes of patches to another object, from its given sampled values.

        The estimate uses some chunks of the object that are cached, or the sample's chunk. Few elements of a sample
        differ, and their number varies by chance: the second result is the factor by which there are more.
        """
        step = -(-sample.chunks // _COMPARED)
        chunks = [
            chunk for chunk in range(0, sample.chunks, step) if self.reader.cache.get((identity, chunk)) is not None
        ]
        found = compared = 0
        for chunk in chunks or [sample.chunk]:
            first = chunk * unit.chunk
            bits = read(first, min(first + unit.chunk, unit.count))
            patch = find_changes(bits, before(chunk), is_float=unit.dtype in FLOATS).patch()
            found += 0 if patch is None else FRAME + len(patch)
            compared += bits.size
        stored = found * unit.count / compared
        expected = sample.nbytes_of(find_changes(sample.bits, sampled, is_float=unit.dtype in FLOATS))
        return stored, stored / expected if expected else 1.0

    def _estimate_linear(
        self, unit: Unit, read: ReadUnit, sample: Sample, parent: str | None, coarse: str | None
    ) -> Estimate:
        record, content = self._linear_parent(unit, parent, coarse)
        if record is None:
            return self._estimate_first(unit, sample)
        bits, start = sample.bits, sample.start
        chain = [] if content is None else nearby_ancestors(self.reader.content_chain(content))
        ancestors = [(place, level, sample.cut(self.reader.exact(level, sample.chunk))) for place, level in chain]
        before = ancestors[-1][2] if ancestors else sample.cut(self.reader.values(record, sample.chunk))
        if _is_unrelated(bits, before, record.dtype):
            return self._estimate_first(unit, sample)
        origin, there = self._origin(record, sample)
        is_sparse = bool(ancestors) and _is_sparse(bits, before)
        # Most elements do not change, which is no reason for another step.
        lattice = record.linear if is_sparse else self._next_lattice(record, sample, before, origin, there)
        integers_before = sample.cut(self.reader.integers(record, sample.chunk))
        predicted = lattice.project(record.linear, integers_before, start)
        integers = lattice.quantise(bits, start, predicted)
        sizes = {
            BASE: sample.nbytes(lattice.quantise(bits, start)),
            OWN: sample.nbytes(*lattice.residuals(bits, integers, start)),
            DELTA: sample.nbytes(integers - predicted),
        }
        factors = {}
        for place, _, exact in ancestors:
            sizes["chained", place], factors["chained", place] = min(
                (
                    sample.nbytes(*lattice.residuals(bits, integers, start, scaled(exact, lattice.dtype, factor))),
                    factor,
                )
                for factor in {1.0, common_factor(bits, exact, lattice.dtype)}
            )
        if is_sparse:
            sizes[MOVED] = sample.nbytes_of(find_changes(integers, predicted, is_float=False))
            _, level, _ = ancestors[-1]
            sizes[PATCHED], share = self._patch_bytes(
                unit, read, sample, before, level.id, partial(self.reader.exact, level)
            )
            sizes["chained", 0] *= share
        predictions = _predictions(content, sizes, factors)
        return self._linear_options(unit, record, content, lattice, origin.id, sizes, factors, predictions)

    def _linear_options(
        self, unit: Unit, record: LatticeRecord, content: ContentRecord | None, lattice: LinearLattice, origin: str,
        sizes: Mapping[Layer, float], factors: Mapping[Layer, float], predictions: Predictions | None,
    ) -> Estimate:  # fmt: skip
        """Return the options for layers of these sizes."""
        chunks, count = record.chunks, unit.count
        base, own, delta = sizes[BASE], sizes[OWN], sizes[DELTA]
        own_work = layer(chunks, count, int(own), grouped=True)
        full = layer(chunks, count, int(base), grouped=False).plus(own_work)
        delta_work = layer(chunks, count, int(delta), grouped=False, delta=True).plus(self.reader.lattice_work(record))
        prices = self._prices(full)
        options = [
            Option("base", base + own, prices.full, is_base=True),
            Option("delta", delta + own, prices.of(delta_work.plus(own_work), delta + own), is_base=False),
        ]
        plans = {"base": Way(None), "delta": Way(record)}
        chain = [] if content is None else nearby_ancestors(self.reader.content_chain(content))
        if content is not None and PATCHED in sizes:
            stored = sizes[MOVED] + sizes[PATCHED]
            work = patches(chunks, int(sizes[PATCHED])).plus(self.reader.content_work(content))
            options.append(Option("patched", stored, prices.of(work, stored), is_base=False))
            plans["patched"] = Way(record, content, patched=True)
            if stored <= PATCH_WORTH * (delta + sizes["chained", 0]):
                chain = []
        for place, ancestor in chain:
            chained, name = sizes["chained", place], f"chained-{place}"
            work = layer(chunks, count, int(chained), grouped=True).plus(self.reader.content_work(ancestor))
            price = prices.of(delta_work.plus(work), delta + chained)
            options.append(Option(name, delta + chained, price, is_base=False))
            plans[name] = Way(record, ancestor, factor=factors.get(("chained", place), 1.0))
        alone = int(base), int(own)
        debt = record.debt if content is None else content.debt
        candidates = Candidates(tuple(options), debt)
        return Estimate(unit, candidates, plans, prices.full, alone, lattice, origin, predictions=predictions)

    def _linear_parent(
        self, unit: Unit, parent: str | None, coarse: str | None
    ) -> tuple[LatticeRecord | None, ContentRecord | None]:
        """Return the parent's records, of its integers and of its exact layer; None without such a lattice."""
        content = None if parent is None else self.reader.resolver.content(parent)
        if content is not None:
            record = self.reader.resolver.lattice(content.lattice)
        elif parent is None and coarse is not None:
            record = self.reader.resolver.lattice(coarse)
        else:
            return None, None
        check_cut(record, unit)
        fits = record.kind == "linear" and record.width == row_width(unit)
        return (record, content) if fits else (None, None)

    def _estimate_first(self, unit: Unit, sample: Sample) -> Estimate:
        from ckstore.kernels.lattice import statistics

        bits, start = sample.bits, sample.start
        total, largest, finite = statistics(fixed(bits.view(unit.dtype)))
        size = _root_mean_square(total, finite)
        lattice = LinearLattice(unit.dtype, step_exponent(STEP_OF_VALUES * size, largest, unit.dtype), row_width(unit))
        integers = lattice.quantise(bits, start)
        base = sample.nbytes(integers)
        own = sample.nbytes(*lattice.residuals(bits, integers, start))
        chunks = -(-unit.count // unit.chunk)
        full = layer(chunks, unit.count, int(base), grouped=False)
        full = full.plus(layer(chunks, unit.count, int(own), grouped=True))
        full_cost = cost(full)
        option = Option("base", base + own, full_cost, is_base=True)
        alone = int(base), int(own)
        return Estimate(unit, Candidates((option,)), {"base": Way(None)}, full_cost, alone, lattice)

    def _ordinal_parent(self, content: str, unit: Unit) -> LatticeRecord | None:
        """Return the lattice record of a possible base of `unit`; None if that has another lattice."""
        record = self.reader.record_of(content)
        check_cut(record, unit)
        return record if record.kind == "ordinal" else None

    def _origin(self, record: LatticeRecord, sample: Sample) -> tuple[LatticeRecord, Integers]:
        """Return the first object of the run of `record` and its sampled integers; `record` itself if that is lost."""
        if record.origin is not None:
            try:
                origin = self.reader.resolver.lattice(record.origin)
                check_cut(origin, record)
                return origin, sample.cut(self.reader.integers(origin, sample.chunk))
            except IntegrityError:
                pass
        return record, sample.cut(self.reader.integers(record, sample.chunk))

    @staticmethod
    def _next_lattice(
        record: LatticeRecord, sample: Sample, before: Bits, origin: LatticeRecord, there: Integers
    ) -> LinearLattice:
        """Return the lattice of the next version: the parent's with the step that fits training now.

        Parameters
        ----------
        before
            The parent's sampled values.
        origin, there
            The first object of the run, and its sampled integers.
        """
        from ckstore.kernels.lattice import statistics

        values = sample.bits.view(record.dtype)
        with np.errstate(all="ignore"):
            moved, _, finite = statistics(fixed(values - before.view(record.dtype)))
        _, largest, _ = statistics(fixed(values))
        change = _root_mean_square(moved, finite)
        travelled, finite = origin.linear.distance(sample.bits, there, sample.start)
        distance = _root_mean_square(travelled, finite)
        asked = max(STEP_OF_CHANGE * change, STEP_OF_DISTANCE * distance)
        lattice = record.linear
        step = lattice.step
        if asked > 0 and abs(float(np.log2(asked)) - step) >= STEP_SLACK:
            step = step_exponent(asked, largest, record.dtype)
        step = max(step, step_exponent(0.0, largest, record.dtype))
        return replace(lattice, step=step)


def exact_frame(
    lattice: LinearLattice, bits: Bits, integers: Integers, start: int, parent: Bits | None = None
) -> memoryview:
    """Return a chunk of an exact layer, chained if there is a `parent`: the checksum of its bits, and its residuals."""
    residuals, classes = lattice.residuals(bits, integers, start, parent)
    return encode_chunk(residuals, classes, before=crc32(bits).to_bytes(FRAME, "little"))


def exact_patch(bits: Bits, parent: Bits) -> tuple[bytes, Changes]:
    """Return a chunk of a patched exact layer: the checksum of its bits, and the patch; empty without changes."""
    changes = find_changes(bits, parent, is_float=True)
    return changes.patch(crc32(bits).to_bytes(FRAME, "little")) or b"", changes


def _is_sparse(bits: Bits, before: Bits) -> bool:
    """Return whether few enough elements differ for a patch to be worthwhile."""
    return int(np.count_nonzero(bits != before)) <= SPARSE * bits.size


def _predictions(
    parent: Record | None, sizes: Mapping[Layer, float], factors: Mapping[Layer, float]
) -> Predictions | None:
    """Return the predictions for the next object; None without a parent, or if the objects differ by a factor."""
    return Predictions(sizes) if parent is not None and set(factors.values()) <= {1.0} else None


def _is_unrelated(bits: Bits, before: Bits, dtype: str) -> bool:
    """Return whether values are further from the parent's than from zero: another run with the same names."""
    from ckstore.kernels.lattice import statistics

    values = bits.view(dtype)
    with np.errstate(all="ignore"):
        moved, _, both = statistics(fixed(values - before.view(dtype)))
    total, _, finite = statistics(fixed(values))
    further = _root_mean_square(moved, both) > _root_mean_square(total, finite)
    return further and common_factor(bits, before, dtype) == 1.0


def _root_mean_square(total: float, count: int) -> float:
    """Return the root of the mean of `count` squares with sum `total`; the squares of float64 values may overflow."""
    return min((total / count) ** 0.5, _LARGEST) if count else 0.0


def _linear(estimate: Estimate) -> LinearLattice:
    assert isinstance(estimate.lattice, LinearLattice)
    return estimate.lattice
