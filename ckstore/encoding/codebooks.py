"""Encodes objects of coarse versions by the published schemes, on codebooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import (
    CODEBOOK_DTYPES,
    CodebookLattice,
    Numbers,
    as_float32,
    differences,
    has_unrepresentable,
)
from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import Bits, Integers, floats
from ckstore.codecs.scheme import Layer, Scheme
from ckstore.encoding.deviations import Comparison
from ckstore.encoding.estimate import Encoded, Estimate, Parent, ReadUnit, Sample, Way
from ckstore.encoding.positives import is_positive, loses_positives
from ckstore.errors import CkstoreError, IntegrityError
from ckstore.lineage.cost import cost, layer
from ckstore.lineage.planner import Candidates, Option
from ckstore.objects.identity import digest, lattice_id
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Codebook, Record, check_cut, common_fields, exact_work
from ckstore.objects.units import Unit

#: Roles of values that become neither 0 nor negative.
CAREFUL = ("second", "relative")


def decodable(reader: ObjectReader, unit: Unit, parent: Parent | None) -> Record | None:
    """Return the record of the parent's object; None if it is lost, damaged or cut in another way."""
    if parent is None:
        return None
    try:
        record = reader.resolver.record(parent.id)
        check_cut(record, unit)
        reader.values(record, 0)
    except IntegrityError:
        return None
    return record


class CodebookEncoder:
    """Estimates and encodes objects by a scheme.

    For a unit it is given the scheme's `Layer`, which has no values yet, and depends on other layers of its type.
    """

    def __init__(self, reader: ObjectReader, scheme: Scheme) -> None:
        self.reader = reader
        self.scheme = scheme

    def estimate(
        self, unit: Unit, read: ReadUnit, parent: Parent | None, layer: Callable[[], Layer]
    ) -> Estimate | None:
        """Return options of `unit`; None without a codebook: other dtypes, bundles, values that are not finite."""
        if unit.dtype not in CODEBOOK_DTYPES or unit.is_bundle or unit.role in CAREFUL:
            return None  # A second moment that becomes 0 or negative makes the first step after a restore explode.
        bits = read(0, unit.count)
        if has_unrepresentable(bits, unit.dtype):
            return None
        record = self._record(unit, parent)
        estimated = self._estimate_changes if self.scheme.of_changes else self._estimate_levels
        estimate = estimated(unit, bits, record, layer())
        if is_positive(floats(bits, unit.dtype)):
            for way in estimate.ways.values():
                assert isinstance(way.lattice, CodebookLattice)
                numbers = self._numbers(way.lattice, self._filled(layer(), unit, bits, way))
                before = None if not way.additive or way.base is None else self._decoded(way.base)
                decoded = way.lattice.values(numbers) if before is None else way.lattice.add(before, numbers)
                if loses_positives(unit, bits, decoded):
                    return None  # Not surely a weight.
        return estimate

    def encode(self, estimate: Estimate, way: Way, read: ReadUnit, layer: Callable[[], Layer], debt: int) -> Encoded:
        """Return an object under `way`."""
        unit = estimate.unit
        lattice = way.lattice
        assert isinstance(lattice, CodebookLattice)
        bits = read(0, unit.count)
        numbers = self._numbers(lattice, self._filled(layer(), unit, bits, way))
        payloads = []
        comparison = Comparison(unit)
        digests = []
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            part = numbers[start : start + unit.chunk]
            digests.append(bytes.fromhex(digest(part.view(np.uint8))))
            delta, classes = self._against(lattice, part, None if way.additive else way.base, chunk)
            payloads.append(encode_changes(delta, classes))
            before = None if not way.additive or way.base is None else self.reader.values(way.base, chunk)
            decoded = lattice.values(part) if before is None else lattice.add(before, part)
            comparison.add(bits[start : start + unit.chunk], decoded)
        base = way.base.id if way.additive and way.base is not None else ""
        common = common_fields(lattice_id(lattice, unit.count, unit.chunk, digests, base), unit, estimate.alone)
        record = Codebook.on(lattice, **common, base=way.base_id, debt=debt, additive=way.additive)
        return Encoded(record, [*payloads], comparison.result())

    def _estimate_changes(self, unit: Unit, bits: Bits, record: Codebook | None, layer: Layer) -> Estimate:
        """Estimate a scheme of changes: a codebook of those since the parent or its base, or of the first values.

        Values differ between these ways, but the planner compares bytes and cost alone. So two ways are not offered: a
        delta against an older version, whose error is a part of the whole change since then, and a base after the first
        one, whose error is a part of the values. The merged change reduces the restore cost as much.
        """
        sample = Sample.of(unit, lambda first, last: bits[first:last])
        ways = {"base": Way(None, additive=True)}
        if record is not None:
            ways["delta"] = Way(record, additive=True)
            if record.base is not None:
                ways["merged"] = Way(self.reader.chains.levels(record)[-1], additive=True, merged=record)
        sizes = {}
        for name, way in ways.items():
            filled = self._filled(layer, unit, bits, way)
            lattice = self._codebook(filled)
            first = sample.start
            part = replace(filled, values=filled.values[first : first + sample.bits.size])
            sizes[name] = sample.nbytes(lattice.stored(self._numbers(lattice, part)))
            ways[name] = replace(way, lattice=lattice)
        if record is not None:
            del ways["base"]
        return self._estimate_of(unit, ways, sizes, record)

    def _estimate_levels(self, unit: Unit, bits: Bits, record: Codebook | None, layer: Layer) -> Estimate:
        """Estimate a scheme of values: one codebook, its indices in full or against the parent's."""
        sample = Sample.of(unit, lambda first, last: bits[first:last])
        filled = replace(layer, values=as_float32(bits, unit.dtype))
        lattice = self._codebook(filled)
        part = self._numbers(lattice, filled)[sample.start : sample.start + sample.bits.size]
        bases: dict[str, Codebook | None] = {"base": None, **({} if record is None else {"delta": record})}
        ways = {}
        sizes = {}
        for name, base in bases.items():
            if base is None:
                sizes[name] = sample.nbytes(lattice.stored(part))
            else:
                before = sample.cut(base.lattice.indices(self.reader.numbers(base, sample.chunk)))
                sizes[name] = sample.nbytes(lattice.delta(part, before), base.lattice.classes(before))
            ways[name] = Way(base, lattice=lattice)
        return self._estimate_of(unit, ways, sizes, record)

    def _estimate_of(
        self, unit: Unit, ways: dict[str, Way], sizes: dict[str, float], record: Codebook | None
    ) -> Estimate:
        chunks = -(-unit.count // unit.chunk)
        options = []
        for name, way in ways.items():
            own = layer(chunks, unit.count, int(sizes[name]), grouped=way.base is not None and not way.additive)
            total = own if way.base is None else own.plus(self.reader.chains.work(way.base))
            options.append(Option(name, sizes[name], cost(total), is_base=way.base is None))
        full_cost = cost(exact_work(unit.count, unit.chunk, unit.dtype))
        debt = 0.0 if record is None else float(record.debt)
        candidates = Candidates(tuple(options), debt)
        return Estimate(unit, candidates, ways, full_cost, int(sizes["base"]), is_coarse=True)

    def _record(self, unit: Unit, parent: Parent | None) -> Codebook | None:
        """Return the parent's record if the scheme continues it; one that cannot be decoded counts as none."""
        record = decodable(self.reader, unit, parent)
        if isinstance(record, Codebook) and record.additive == self.scheme.of_changes:
            return record
        return None

    def _codebook(self, layer: Layer) -> CodebookLattice:
        """Return the codebook of a layer; raise `CkstoreError` if the scheme gives another: kernels do not check it."""
        lattice: object = self.scheme.codebook(layer)
        if not isinstance(lattice, CodebookLattice) or lattice.dtype != layer.dtype:
            raise CkstoreError(f"The scheme {self.scheme.name} returned no codebook of {layer.dtype}.")
        if lattice.protected and self.scheme.of_changes:
            raise CkstoreError(f"The scheme {self.scheme.name} protects elements, which a scheme of changes cannot.")
        return lattice

    def _numbers(self, lattice: CodebookLattice, layer: Layer) -> Numbers:
        """Return the numbers of a layer's elements; raise `CkstoreError` if the scheme gives others."""
        indices, protected = map(np.ascontiguousarray, self.scheme.assign(lattice, layer))
        last = np.count_nonzero(indices == lattice.levels - 1) if lattice.protected else 0
        is_sound = indices.dtype == np.uint8 and indices.shape == layer.values.shape and protected.shape == (last,)
        if not is_sound or indices.max(initial=0) >= lattice.levels:
            raise CkstoreError(f"The scheme {self.scheme.name} returned indices that fit neither layer nor levels.")
        short = "bfloat16" if lattice.dtype == "float32" else lattice.dtype
        if last and (protected.dtype != np.uint16 or has_unrepresentable(protected, short)):
            raise CkstoreError(f"The scheme {self.scheme.name} returned no finite {short} bits of protected elements.")
        return lattice.numbers(indices, protected)

    def _filled(self, layer: Layer, unit: Unit, bits: Bits, way: Way) -> Layer:
        """Return the layer with its values, their changes since the decoded base, or merged changes."""
        if way.base is None or not way.additive:
            return replace(layer, values=as_float32(bits, unit.dtype))
        if way.merged is None:
            return self._changed(layer, unit, bits, self._decoded(way.base))
        previous = self._decoded(way.merged)
        change = self._changed(layer, unit, bits, previous)
        lattice = self._codebook(change)
        # The sum leads to the decoded last state, not to the exact one: without kept changes there is nothing to merge.
        merged = differences(lattice.add(previous, self._numbers(lattice, change)), self._decoded(way.base), unit.dtype)
        return replace(layer, values=merged)

    @staticmethod
    def _changed(layer: Layer, unit: Unit, bits: Bits, base: Bits) -> Layer:
        """Return the layer with changes, whose error the next version corrects."""
        return replace(layer, values=differences(bits, base, unit.dtype), is_whole=False)

    def _decoded(self, record: Record) -> Bits:
        """Return the values of an object, all its chunks."""
        chunks = [self.reader.values(record, chunk) for chunk in range(record.chunks)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def _against(
        self, lattice: CodebookLattice, numbers: Numbers, base: Record | None, chunk: int
    ) -> tuple[Integers, npt.NDArray[np.uint8] | None]:
        """Return the stored form of a chunk's numbers, and the classes that code it."""
        if not isinstance(base, Codebook):
            return lattice.stored(numbers), None
        before = base.lattice.indices(self.reader.numbers(base, chunk))
        return lattice.delta(numbers, before), base.lattice.classes(before)
