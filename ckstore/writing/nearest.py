"""Finds the most likely parent of a new version: `parent="auto"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckstore.codecs.integers import payload_bits
from ckstore.codecs.lattice import Bits, is_mirrored, ordinal_difference
from ckstore.errors import IntegrityError
from ckstore.objects.continuation import Cut
from ckstore.objects.records import check_cut
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage.catalog import VersionRow
from ckstore.writing.parents import units_after

if TYPE_CHECKING:
    from ckstore.objects.units import Unit
    from ckstore.repository import Repository
    from ckstore.scanning.scanned import ScannedVersion

#: Versions whose values are compared: the most similar by names and shapes, later ones first.
_COMPARED = 12

#: Compared elements of each of the largest objects.
_SAMPLE = 1 << 14

#: Compared objects.
_OBJECTS = 4


def nearest_version(repository: Repository, scanned: ScannedVersion) -> VersionRow | None:
    """Return the version whose largest objects differ least from those of `scanned`, or None.

    Candidates are the first and the last version of each run that share at least half of the elements by name and
    shape, or continue them. Superseded versions are none.
    """
    cut = Cut([(scanned.prefix(file), file.layout) for file in scanned.files], scanned.units)
    total = sum(unit.count for unit in scanned.units)
    candidates = []
    for run in repository.catalog.runs():
        ends = repository.catalog.first(run.name), repository.catalog.latest(run.name)
        for row in {row.number: row for row in ends if row is not None and not row.superseded}.values():
            version = StoredVersion(repository, row)
            objects = {
                unit.signature: item for unit, item in zip(version.layout.units, version.document.objects, strict=True)
            }
            units = {unit.signature: unit for unit in units_after(repository, row, cut, ())}
            shared = sum(unit.count for key, unit in units.items() if key in objects)
            if total and 2 * shared >= total:
                candidates.append((shared, row.number, row, objects, units))
    candidates.sort(key=lambda candidate: candidate[:2], reverse=True)
    best: tuple[float, VersionRow] | None = None
    for _, _, row, objects, units in candidates[:_COMPARED]:
        bits = 0.0
        largest = sorted(units, key=lambda key: units[key].count, reverse=True)
        for key in [key for key in largest if key in objects][:_OBJECTS]:
            unit = units[key]
            taken = min(_SAMPLE, unit.chunk, unit.count)
            try:
                before = _values(repository, unit, objects[key])[:taken]
            except IntegrityError:
                bits = float("inf")
                break
            mirrored = is_mirrored(unit.dtype, unit.count, unit.chunk)
            difference = ordinal_difference(scanned.read(unit, 0, taken), before, unit.dtype, mirrored=mirrored)
            bits += payload_bits(difference)[0] / taken * unit.count
        if bits < float("inf") and (best is None or bits < best[0]):
            best = bits, row
    return None if best is None else best[1]


def _values(repository: Repository, unit: Unit, identity: str) -> Bits:
    """Return the first chunk of an object."""
    check_cut(repository.resolver.record(identity), unit)
    return repository.reader.bits(identity, 0)
