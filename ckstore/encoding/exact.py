"""Encodes an object's values exactly: estimates the cost of each way of storing it, and carries one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import FLOATS, Bits, is_mirrored, ordinal_classes, ordinal_difference
from ckstore.codecs.patches import find_changes
from ckstore.codecs.short_floats import narrowed
from ckstore.encoding.estimate import Encoded, Estimate, Parent, ReadUnit, Sample, Source, Way, nearby_ancestors
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work, cost, layer, patches, price
from ckstore.lineage.planner import Candidates, Option
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import (
    CAST_CHECKSUM,
    Cast,
    Delta,
    Full,
    Patches,
    Raw,
    Record,
    begins,
    check_cut,
    common_fields,
)
from ckstore.objects.units import Unit
from ckstore.runtime.checksum import crc32

#: Context order is used if it saves at least this part of the payload.
CONTEXT_GAIN = 0.03

#: Patches are offered if at most this part of the elements differs from the parent's, ...
SPARSE = 1 / 4

#: ... their sizes are estimated from at most this number of chunks, ...
_COMPARED = 8

#: ... those of the parent's object are also stored, for followers, if they take at most this part of another way, ...
SHORTCUT_WORTH = 0.75

#: ... and if they take at most this multiple of the bytes of other deltas, those are not offered: all later versions of
#: the chain would decode them, and a cheap chain gets long. A patch of an ancestor replaces the levels between: where
#: the same elements change again, it takes less than a base.
PATCH_WORTH = 1.5

#: Objects of a chain that are parts of their bases, at most.
_PARTS = 4


class ObjectEncoder:
    """Estimates and encodes objects against objects of the store.

    With `keep`, the chunks of encoded objects stay in the reader's cache for the next version.
    """

    def __init__(self, reader: ObjectReader, *, keep: bool = False) -> None:
        self.reader = reader
        self._keep = keep

    def estimate(self, unit: Unit, read: ReadUnit, parent: Parent | None, source: Source | None = None) -> Estimate:
        """Return the options of `unit`, from a sample of one chunk; it may be a cast of its `source`.

        A parent that was lost or cannot be decoded counts as none: a run continues after damage.
        """
        sample = Sample.of(unit, read)
        try:
            found = self._against(unit, read, sample, None if parent is None else self._base(parent, unit))
        except IntegrityError:
            found = self._against(unit, read, sample, None)
        return found if source is None else self._with_cast(found, sample, source)

    def _with_cast(self, estimate: Estimate, sample: Sample, source: Source) -> Estimate:
        """Return an estimate with the option of a cast, unless too many elements differ."""
        unit = estimate.unit
        rounded = narrowed(source.read(sample.start, sample.start + sample.bits.size), unit.dtype)
        if not _is_sparse(sample.bits, rounded):
            return estimate
        changed = sample.nbytes_of(find_changes(sample.bits, rounded, is_float=True))
        stored = CAST_CHECKSUM * sample.chunks + changed
        full = layer(sample.chunks, unit.count, estimate.alone, grouped=False)
        own, read_price = patches(sample.chunks, int(stored)), self.reader.blocks.read_price
        option = Option("cast", stored, price(own, source.work, stored, full, read_price), is_base=False)
        table = replace(estimate.candidates, options=(*estimate.candidates.options, option))
        return replace(estimate, candidates=table, ways={**estimate.ways, "cast": Way(None, source=source)})

    def encode(
        self, content: str, estimate: Estimate, way: Way, read: ReadUnit, debt: int, replaced: Sequence[str] = ()
    ) -> Encoded:
        """Return an object stored in one way.

        If chunks stay in the cache for the next version, those of the ids in `replaced` are evicted: no object will be
        stored against them, and their memory is reused.
        """
        unit = estimate.unit
        common = common_fields(content, unit, estimate.alone)
        sample = Sample.of(unit, read)
        self.reader.samples.keep((content, sample.chunk), sample.bits)
        parent = estimate.parent
        aside = None if parent is None or way.base is parent or way.source is not None else Way(parent, patched=True)
        try:
            payloads, patches = self._payloads(content, estimate, way, aside, read, replaced)
        except IntegrityError:  # The estimate saw a sample of the base; a run continues after damage of the rest.
            way, aside, debt = Way(None), None, 0
            payloads, patches = self._payloads(content, estimate, way, aside, read, replaced)
        found = encoded_as(common, way, payloads, debt)
        if aside is not None and any(patches):
            shortcut = encoded_as(common, aside, patches)
            found.shortcut = shortcut if shortcut.nbytes <= SHORTCUT_WORTH * found.nbytes else None
        return found

    def _payloads(
        self, content: str, estimate: Estimate, way: Way, aside: Way | None, read: ReadUnit, replaced: Sequence[str]
    ) -> tuple[list[memoryview | bytes | None], list[memoryview | bytes | None]]:
        """Return the payloads of an object's chunks in one way, and in another one aside."""
        unit = estimate.unit
        payloads, others = [], []

        def payload(one: Way, chunk: int, bits: Bits) -> memoryview | bytes | None:
            if one.patched and one.base is estimate.parent and chunk in estimate.patches:
                return estimate.patches[chunk]
            before = None if one.base is None else self.reader.before(one.base, unit, chunk, keep=False)
            if one.source is not None:
                before = narrowed(one.source.read(start, start + bits.size), unit.dtype)
            return encode_values(unit, bits, before, one)

        count, length = unit.count, unit.chunk
        for chunk, start in enumerate(range(0, count, length)):
            bits = read(start, min(start + length, count))
            payloads.append(payload(way, chunk, bits))
            if aside is not None:
                others.append(payload(aside, chunk, bits))
            if self._keep:
                for other in replaced:
                    self.reader.cache.drop((other, chunk))
                self.reader.cache.keep_part((content, chunk), bits)
        return payloads, others

    def _base(self, parent: Parent, unit: Unit) -> Record | None:
        """Return the record of the parent's object, or else of the nearest ancestor's that is exact.

        A raw one belongs to a hot version, whose encoding removes it, and perhaps encodes it against this object.
        """
        for identity in (parent.id, parent.other):
            if identity is not None:
                record = self.reader.resolver.record(identity)
                if not parent.longer:
                    check_cut(record, unit)
                elif not begins(record, unit) or self.reader.chains.parts(record) >= _PARTS:
                    return None
                if record.is_exact and not isinstance(record, Raw):
                    return record
        return None

    def _against(self, unit: Unit, read: ReadUnit, sample: Sample, record: Record | None) -> Estimate:
        """Return the options of a unit against an object and its ancestors."""
        count, chunks, read_price = unit.count, sample.chunks, self.reader.blocks.read_price
        ancestors = nearby_ancestors(() if record is None else self.reader.chains.levels(record), unit.dtype)
        before = [self._sampled(ancestor, unit, sample) for _, ancestor in ancestors]
        is_sparse = bool(before) and _is_sparse(sample.bits, before[-1])
        taken = sample if is_sparse else sample.part()
        base = taken.nbytes(ordinal_difference(taken.bits, None, unit.dtype))
        full = layer(chunks, count, int(base), grouped=False)
        alone = cost(full)
        options = [Option("base", base, alone, is_base=True)]
        ways = {"base": Way(None)}
        mirrored = is_mirrored(unit.dtype, count, unit.chunk)

        def offer(name: str, way: Way, stored: float, own: Work) -> None:
            options.append(Option(name, stored, price(own, below, stored, full, read_price), is_base=False))
            ways[name] = way

        of_parent, share, known = 0.0, 1.0, dict[int, bytes | None]()
        if is_sparse:
            of_parent, share = self._patch_bytes(unit, read, sample, before[-1], ancestors[-1][1], known)
        for (place, ancestor), values in zip(ancestors, before, strict=True):
            below = self.reader.chains.work(ancestor)
            sizes = _differences(taken, values[taken.first - sample.first :][: taken.bits.size], unit.dtype, mirrored)
            if is_sparse:
                sizes = {context: share * stored for context, stored in sizes.items()}
                changes = find_changes(sample.bits, values, is_float=unit.dtype in FLOATS)
                patch = share * sample.nbytes_of(changes) if place else of_parent
                offer(f"patched-{place}", Way(ancestor, patched=True), patch, patches(chunks, int(patch)))
                if patch <= PATCH_WORTH * min(sizes.values()):
                    continue
            for context, stored in sizes.items():
                own = layer(chunks, count, int(stored), grouped=context, delta=True)
                offer(f"{'context' if context else 'natural'}-{place}", Way(ancestor, context=context), stored, own)
        candidates = Candidates(tuple(options), 0.0 if record is None else record.debt)
        parent = record if is_sparse and record is not None and record.count == count else None
        return Estimate(unit, candidates, ways, alone, int(base), parent=parent, patches=known)

    def _sampled(self, record: Record, unit: Unit, sample: Sample) -> Bits:
        """Return the same elements of another object as those of a sample."""
        if record.count != unit.count:
            return sample.cut(self.reader.before(record, unit, sample.chunk))
        key = record.id, sample.chunk
        found = self.reader.samples.get(key)
        if found is None or found.size != sample.bits.size:
            found = sample.cut(self.reader.ordinals(record, sample.chunk))
            self.reader.samples.keep(key, found)
        return found

    def _patch_bytes(
        self, unit: Unit, read: ReadUnit, sample: Sample, sampled: Bits, record: Record, known: dict[int, bytes | None]
    ) -> tuple[float, float]:
        """Estimate the bytes of patches to another object, from its given sampled values; add patches to `known` ones.

        The estimate uses some chunks of the object that are cached, or the sample's chunk. Few elements of a sample
        differ, and their number varies by chance: the second result is the factor by which there are more.
        """
        step = -(-sample.chunks // _COMPARED)
        chunks = [
            chunk for chunk in range(0, sample.chunks, step) if self.reader.cache.get((record.id, chunk)) is not None
        ]
        found = compared = 0
        for chunk in chunks or [sample.chunk]:
            first = chunk * unit.chunk
            bits = read(first, min(first + unit.chunk, unit.count))
            before = self.reader.before(record, unit, chunk)
            known[chunk] = find_changes(bits, before, is_float=unit.dtype in FLOATS).patch()
            found += len(known[chunk] or b"")
            compared += bits.size
        stored = found * unit.count / compared
        expected = sample.nbytes_of(find_changes(sample.bits, sampled, is_float=unit.dtype in FLOATS))
        return stored, stored / expected if expected else 1.0


def encoded_as(
    common: Mapping[str, Any], way: Way, payloads: list[memoryview | bytes | None], debt: int = 0
) -> Encoded:
    """Return the object with the common fields of its records, stored in one way."""
    if way.source is not None:
        sizes = tuple(len(payload or b"") for payload in payloads)
        return Encoded(Cast(**common, base=way.source.content, sizes=sizes), payloads)
    if way.base is None:
        return Encoded(Full(**common), payloads)
    based = {**common, "base": way.base.id, "debt": debt, "part": way.base.count > common["count"]}
    if way.patched and any(payloads):
        sizes = tuple(len(payload or b"") for payload in payloads)
        return Encoded(Patches(**based, sizes=sizes), payloads)
    return Encoded(Delta(**based, context=way.context), payloads)


def encode_values(of: Unit | Record, bits: Bits, before: Bits | None, way: Way) -> memoryview | bytes | None:
    """Return the payload of one chunk in one way, against the values `before`; None if nothing is to be stored."""
    if way.source is not None and before is not None:
        return crc32(bits).to_bytes(CAST_CHECKSUM, "little") + (
            find_changes(bits, before, is_float=True).patch() or b""
        )
    if way.patched and before is not None:
        return find_changes(bits, before, is_float=of.dtype in FLOATS).patch()
    classes = ordinal_classes(before, of.dtype) if way.context and before is not None else None
    mirrored = is_mirrored(of.dtype, of.count, of.chunk)
    return encode_changes(ordinal_difference(bits, before, of.dtype, mirrored=mirrored), classes)


def _differences(sample: Sample, before: Bits, dtype: str, mirrored: bool) -> dict[bool, float]:
    """Return the bytes of a delta against `before` in natural (False) and context order (True).

    Natural order decodes faster; context order is offered only if it saves `CONTEXT_GAIN`.
    """
    natural, context = sample.nbytes_of_delta(before, dtype, mirrored=mirrored)
    return {False: natural, True: context} if context < (1 - CONTEXT_GAIN) * natural else {False: natural}


def _is_sparse(bits: Bits, before: Bits) -> bool:
    """Return whether few enough elements differ for a patch to be worthwhile."""
    return int(np.count_nonzero(bits != before)) <= SPARSE * bits.size
