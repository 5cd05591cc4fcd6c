"""Encodes objects of coarse versions by the published schemes, on codebooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import (
    CODEBOOK_DTYPES,
    CodebookLattice,
    Floats,
    Numbers,
    as_float32,
    differences,
    has_unrepresentable,
)
from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import Bits, Integers
from ckstore.codecs.schemes import dynaquant, lc
from ckstore.codecs.schemes.dynaquant import Treatment
from ckstore.encoding.comparison import Comparison
from ckstore.encoding.estimate import Encoded, Estimate, Parent, ReadUnit, Sample, Way
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import cost, layer
from ckstore.lineage.planner import Candidates, Option
from ckstore.objects.identity import digest, lattice_id
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Codebook, Record, check_cut, exact_work
from ckstore.objects.units import Unit
from ckstore.policy import Policy

#: Bits of an LC-Checkpoint codebook for whole values and for merged changes: every bucket is kept.
_WHOLE_BITS = 8


class CodebookEncoder:
    """Estimates and encodes objects by LC-Checkpoint or Inshrinkerator, as the policy's scheme says."""

    def __init__(self, reader: ObjectReader, policy: Policy) -> None:
        self.reader = reader
        self.policy = policy

    def estimate(
        self, unit: Unit, read: ReadUnit, parent: Parent | None, treatment: Callable[[], Treatment]
    ) -> Estimate | None:
        """Return options of `unit`; None without a codebook: other dtypes, bundles, values that are not finite.

        `treatment` is Inshrinkerator's quantisation of the unit, which depends on the other layers of its type.
        """
        if unit.dtype not in CODEBOOK_DTYPES or unit.is_bundle or unit.role == "second":
            return None  # A second moment that becomes 0 or negative makes the first step after a restore explode.
        bits = read(0, unit.count)
        if has_unrepresentable(bits, unit.dtype):
            return None
        record = self._record(unit, parent)
        if self.policy.scheme == "lc":
            return self._estimate_changes(unit, bits, record)
        return self._estimate_levels(unit, bits, record, treatment())

    def encode(
        self, estimate: Estimate, plan: Way, read: ReadUnit, treatment: Callable[[], Treatment], debt: int
    ) -> Encoded:
        """Return an object under `plan`."""
        unit = estimate.unit
        lattice = plan.lattice
        assert isinstance(lattice, CodebookLattice)
        bits = read(0, unit.count)
        numbers: Numbers
        if plan.additive:
            numbers = lc.assign(lattice, self._changes(unit, bits, plan), _split(plan))
        else:
            numbers = lattice.numbers(*dynaquant.assign(lattice, as_float32(bits, unit.dtype), treatment()))
        payloads = []
        comparison = Comparison(unit)
        digests = []
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            part = numbers[start : start + unit.chunk]
            digests.append(bytes.fromhex(digest(part.view(np.uint8))))
            delta, classes = self._against(lattice, part, None if plan.additive else plan.base, chunk)
            payloads.append(encode_changes(delta, classes))
            before = None if not plan.additive or plan.base is None else self.reader.values(plan.base, chunk)
            decoded = lattice.values(part) if before is None else lattice.add(before, part)
            comparison.add(bits[start : start + unit.chunk], decoded)
        base = plan.base.id if plan.additive and plan.base is not None else ""
        record = Codebook(
            id=lattice_id(lattice, unit.count, unit.chunk, digests, base), dtype=unit.dtype, count=unit.count,
            chunk=unit.chunk, alone=estimate.alone, lattice=lattice, base=plan.base_id, debt=debt,
            additive=plan.additive,
        )  # fmt: skip
        return Encoded(record, [*payloads], comparison.result())

    def _estimate_changes(self, unit: Unit, bits: Bits, record: Codebook | None) -> Estimate:
        """Estimate LC-Checkpoint: a codebook of the changes since the parent or its base, or of the first values.

        Values differ between these ways, but the planner compares bytes and cost alone. So two ways are not offered: a
        delta against an older version, whose error is a part of the whole change since then, and a base after the first
        one, whose error is a part of the values. The merged change reduces the restore cost as much.
        """
        sample = Sample.of(unit, lambda first, last: bits[first:last])
        plans = {"base": Way(None, additive=True)}
        if record is not None:
            plans["delta"] = Way(record, additive=True)
            if record.base is not None:
                plans["merged"] = Way([*self.reader.chains.levels(record)][-1], additive=True, merged=record)
        sizes = {}
        for name, plan in plans.items():
            changes = self._changes(unit, bits, plan)
            levels = _WHOLE_BITS if _split(plan) else self.policy.lc_bits
            lattice = lc.bucket_codebook(changes, levels, unit.dtype, _split(plan))
            first = sample.start
            indices = lc.assign(lattice, changes[first : first + sample.bits.size], _split(plan))
            sizes[name] = sample.nbytes(lattice.stored(indices))
            plans[name] = replace(plan, lattice=lattice)
        if record is not None:
            del plans["base"]
        return self._planned(unit, plans, sizes, record)

    def _estimate_levels(self, unit: Unit, bits: Bits, record: Codebook | None, treatment: Treatment) -> Estimate:
        """Estimate Inshrinkerator: one codebook, its indices in full or against the parent's."""
        sample = Sample.of(unit, lambda first, last: bits[first:last])
        lattice, indices, protected = dynaquant.treated(as_float32(bits, unit.dtype), treatment, unit.dtype)
        part = lattice.numbers(indices, protected)[sample.start : sample.start + sample.bits.size]
        ways: dict[str, Codebook | None] = {"base": None, **({} if record is None else {"delta": record})}
        plans = {}
        sizes = {}
        for name, base in ways.items():
            if base is None:
                sizes[name] = sample.nbytes(lattice.stored(part))
            else:
                before = sample.cut(base.lattice.indices(self.reader.numbers(base, sample.chunk)))
                sizes[name] = sample.nbytes(lattice.delta(part, before), lattice.classes(before))
            plans[name] = Way(base, lattice=lattice)
        return self._planned(unit, plans, sizes, record)

    def _planned(self, unit: Unit, plans: dict[str, Way], sizes: dict[str, float], record: Codebook | None) -> Estimate:
        chunks = -(-unit.count // unit.chunk)
        options = []
        for name, plan in plans.items():
            own = layer(chunks, unit.count, int(sizes[name]), grouped=plan.base is not None and not plan.additive)
            total = own if plan.base is None else own.plus(self.reader.chains.work(plan.base))
            options.append(Option(name, sizes[name], cost(total), is_base=plan.base is None))
        full_cost = cost(exact_work(unit.count, unit.chunk, unit.dtype))
        debt = 0.0 if record is None else float(record.debt)
        candidates = Candidates(tuple(options), debt)
        return Estimate(unit, candidates, plans, full_cost, int(sizes["base"]), is_coarse=True)

    def _record(self, unit: Unit, parent: Parent | None) -> Codebook | None:
        """Return the parent's record if the scheme continues it; one that cannot be decoded counts as none."""
        if parent is None:
            return None
        try:
            record = self.reader.resolver.record(parent.id)
            check_cut(record, unit)
            self.reader.values(record, 0)
        except IntegrityError:
            return None
        if isinstance(record, Codebook) and record.additive == (self.policy.scheme == "lc"):
            return record
        return None

    def _changes(self, unit: Unit, bits: Bits, plan: Way) -> Floats:
        """Return the input of LC-Checkpoint: values, their changes since the decoded base, or merged changes."""
        if plan.base is None:
            return as_float32(bits, unit.dtype)
        if plan.merged is None:
            return differences(bits, self._decoded(plan.base), unit.dtype)
        previous = self._decoded(plan.merged)
        change = lc.lc_quantise(differences(bits, previous, unit.dtype), self.policy.lc_bits, unit.dtype)
        return lc.merged_changes(self._decoded(plan.base), previous, change)

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
        return lattice.delta(numbers, before), lattice.classes(before)


def _split(plan: Way) -> int:
    """Return the bits that split LC-Checkpoint's buckets: none if the next version corrects the error anyway."""
    return 0 if plan.base is not None and plan.merged is None else lc.SPLIT
