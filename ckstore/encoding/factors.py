"""Encodes weights of coarse versions as factors of their change since an exact base."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, Bits, as_float32, has_unrepresentable
from ckstore.codecs.factors import MOST_ELEMENTS, FactorLattice, Matrix, Numbers
from ckstore.codecs.scheme import MatrixScheme
from ckstore.encoding.coarse import Steps
from ckstore.encoding.codebooks import decodable
from ckstore.encoding.deviations import Comparison
from ckstore.encoding.estimate import Encoded, Estimate, Parent, ReadUnit, Way
from ckstore.encoding.magnitudes import row_width
from ckstore.encoding.positives import loses_positives, may_lose
from ckstore.errors import CkstoreError
from ckstore.lineage.cost import cost, factors
from ckstore.lineage.planner import Candidates, Option
from ckstore.objects.identity import digest, lattice_id
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Factors, Raw, Record, common_fields, exact_work
from ckstore.objects.units import Unit

#: The step of factors, as a part of that of a lattice: at the default quality the root mean square of the changes.
_STEP = 0.4


class FactorEncoder:
    """Estimates and encodes factors."""

    def __init__(self, reader: ObjectReader, scheme: MatrixScheme) -> None:
        self.reader = reader
        self.scheme = scheme

    def estimate(
        self, unit: Unit, read: ReadUnit, parent: Parent | None, steps: Callable[[], Steps]
    ) -> Estimate | None:
        """Return the only option of a weight, whose lattice would have these steps.

        None without an encoded base, for other roles and dtypes, and for values that are not finite.
        """
        is_weight = unit.role in ("weight", "vector") and unit.dtype in CODEBOOK_DTYPES
        base = self._base(unit, parent) if is_weight and unit.count <= MOST_ELEMENTS else None
        if base is None:
            return None
        bits, before = read(0, unit.count), self._decoded(base)
        if has_unrepresentable(bits, unit.dtype) or has_unrepresentable(before, unit.dtype):
            return None
        changes = as_float32(bits, unit.dtype).astype(np.float64) - as_float32(before, unit.dtype)
        lattice, numbers = self._factors(changes.reshape(-1, _width(unit)), _step(steps()), unit)
        if may_lose(unit, bits) and loses_positives(unit, bits, lattice.add(before, numbers, 0)):
            return None
        stored = len(lattice.encode(numbers, unit.count))
        work = factors(numbers.size, unit.count, lattice.rank, stored).plus(self.reader.chains.work(base))
        candidates = Candidates((Option("factors", stored, cost(work), is_base=False),))
        ways = {"factors": Way(base, lattice=lattice, numbers=numbers)}
        full_cost = cost(exact_work(unit.count, unit.chunk, unit.dtype))
        return Estimate(unit, candidates, ways, full_cost, unit.nbytes, is_coarse=True)

    def encode(self, estimate: Estimate, way: Way, read: ReadUnit) -> Encoded:
        """Return an object of factors."""
        unit, lattice, base, numbers = estimate.unit, way.lattice, way.base, way.numbers
        assert isinstance(lattice, FactorLattice)
        assert base is not None
        assert numbers is not None
        comparison = Comparison(unit)
        for chunk, start in enumerate(range(0, unit.count, unit.chunk)):
            decoded = lattice.add(self.reader.values(base, chunk), numbers, start)
            comparison.add(read(start, min(start + unit.chunk, unit.count)), decoded)
        identity = lattice_id(lattice, unit.count, unit.chunk, [bytes.fromhex(digest(numbers.view(np.uint8)))], base.id)
        record = Factors.on(lattice, **common_fields(identity, unit, estimate.alone), base=base.id)
        return Encoded(record, [lattice.encode(numbers, unit.count)], comparison.result())

    def _base(self, unit: Unit, parent: Parent | None) -> Record | None:
        """Return the record of the parent's object; None if it is hot, coarse, lost, damaged or cut in another way."""
        record = decodable(self.reader, unit, parent)
        # The raw objects of a hot version that becomes coarse go.
        return None if record is None or isinstance(record, Raw) or not record.is_exact else record

    def _decoded(self, record: Record) -> Bits:
        """Return the values of an object, all its chunks."""
        chunks = [self.reader.values(record, chunk) for chunk in range(record.chunks)]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def _factors(self, changes: Matrix, step: float, unit: Unit) -> tuple[FactorLattice, Numbers]:
        """Return the scheme's factors; raise `CkstoreError` for others than a decoder takes."""
        found: tuple[object, Numbers] = self.scheme.factors(changes, step, unit.dtype)
        lattice, numbers = found
        rows, width = changes.shape
        if (
            not isinstance(lattice, FactorLattice)
            or (lattice.dtype, lattice.width) != (unit.dtype, width)
            or not lattice.is_possible(unit.count, unit.chunk)
            or numbers.size != lattice.size_of(unit.count)
        ):
            raise CkstoreError(f"The scheme {self.scheme.name} returned no factors of {rows} by {width} {unit.dtype}.")
        return lattice, np.ascontiguousarray(numbers, np.int32)


def _step(steps: Steps) -> float:
    """Return the step of a tensor: errors follow its mean sensitivity, with half the power of lattices."""
    octaves = sum(float(axis.mean()) for axis in (steps.rows, steps.cols) if axis.size)
    step: float = _STEP * 2.0 ** (steps.level + octaves / 2)
    return step


def _width(unit: Unit) -> int:
    """Return the width of a unit as a matrix; 1 for bundles, and for tensors of one axis."""
    width = row_width(unit)
    return 1 if unit.is_bundle or width == unit.count or unit.count % width else width
