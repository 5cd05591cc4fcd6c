"""Finds the objects that the objects of a version may be stored against."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckstore.codecs.integers import payload_bits
from ckstore.codecs.lattice import Bits, is_mirrored, ordinal_difference
from ckstore.encoding.estimate import Parent
from ckstore.encoding.estimator import parent_objects
from ckstore.encoding.value_roles import Values
from ckstore.errors import IntegrityError, NotFoundError
from ckstore.formats.layout import Path
from ckstore.objects.continuation import Cut, beginnings, continued
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.layouts import check_layout
from ckstore.objects.records import Factors, check_cut
from ckstore.objects.units import Unit, plan_units
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack_reader import MissingPackError

if TYPE_CHECKING:
    from ckstore.objects.units import Unit
    from ckstore.repository import Repository
    from ckstore.scanning.scanned import ScannedVersion
    from ckstore.storage.catalog import Catalog

#: Versions whose values are compared: the most similar by names and shapes, later ones first.
_COMPARED = 12

#: Compared elements of each of the largest objects.
_SAMPLE = 1 << 14

#: Compared objects.
_OBJECTS = 4

#: Bands that the parent lacks and another version has, for some objects to be stored against that one.
_APART = 2


def ends_of_runs(catalog: Catalog) -> Iterator[int]:
    """Yield the numbers of the first and the last version of each run."""
    for run in catalog.runs():
        yield from {row.number for row in (catalog.first(run.name), catalog.latest(run.name)) if row is not None}


def nearest_version(
    repository: Repository,
    scanned: ScannedVersion,
    numbers: Iterable[int],
    worth: float = float("inf"),
    *,
    is_cut: bool = False,
) -> VersionRow | None:
    """Return the one of some versions whose largest objects differ least from those of `scanned`, or None.

    It shares at least half of the elements by name and shape, or continues them unless `scanned` is cut for good, and
    is not superseded. The differences take less than the part `worth` of the values in full.
    """
    cut = scanned.cut
    cut = Cut(cut.files, cut.units or plan_units(cut.files))
    total = sum(unit.count for unit in cut.units)
    candidates = []
    for number in numbers:
        with suppress(NotFoundError, IntegrityError):  # It was forgotten since, or is damaged.
            row = repository.catalog.version(number)
            if row.superseded:
                continue
            version = StoredVersion(repository, row)
            objects = {
                unit.signature: item for unit, item in zip(version.layout.units, version.document.objects, strict=True)
            }
            after = cut.units if is_cut else units_after(repository, row, cut, ())
            units = {unit.signature: unit for unit in after}
            shared = sum(unit.count for key, unit in units.items() if key in objects)
            if total and 2 * shared >= total:
                candidates.append((shared, row.number, row, objects, units))
    candidates.sort(key=lambda candidate: candidate[:2], reverse=True)
    best: tuple[float, VersionRow] | None = None
    for _, _, row, objects, units in candidates[:_COMPARED]:
        bits = full = 0.0
        largest = sorted(units, key=lambda key: units[key].count, reverse=True)
        for key in [key for key in largest if key in objects][:_OBJECTS]:
            unit = units[key]
            taken = min(_SAMPLE, unit.chunk, unit.count)
            try:
                values = scanned.read(unit, 0, taken)
            except MissingPackError:  # A rank of another machine has it, and the bucket does not have it yet.
                continue
            bits += _difference(repository, unit, values, objects[key]) / taken * unit.count
            full += payload_bits(ordinal_difference(values, None, unit.dtype))[0] / taken * unit.count
        if bits < min(float("inf"), worth * full) and (best is None or bits < best[0]):
            best = bits, row
    return None if best is None else best[1]


def _values(repository: Repository, unit: Unit, identity: str) -> Bits:
    """Return the first chunk of an object."""
    check_cut(repository.resolver.record(identity), unit)
    return repository.reader.bits(identity, 0)


def with_relatives(
    repository: Repository, values: Values, parents: Mapping[str, Parent], parent: VersionRow, bands: Iterable[int]
) -> dict[str, Parent]:
    """Return the parent's objects, large ones replaced by more similar ones of other versions.

    These share bands with the values that the parent lacks, as if the values were merged of several.
    """
    tables: list[Mapping[str, Parent]] = [parents]
    left = {*bands} - {*repository.resolver.document(parent).bands}
    while (found := _relative(repository, left)) is not None:
        tables.append(found[0])
        left -= found[1]
    chosen = dict(parents)
    for unit in values.units if len(tables) > 1 else ():
        items = {table[unit.signature].id: table[unit.signature] for table in tables if unit.signature in table}
        if len(items) > 1 and not unit.is_bundle:
            own = values.read(unit, 0, min(_SAMPLE, unit.chunk, unit.count))
            chosen[unit.signature] = min(items.values(), key=lambda item: _difference(repository, unit, own, item.id))
    return chosen


def _relative(repository: Repository, bands: set[int]) -> tuple[Mapping[str, Parent], set[int]] | None:
    """Return the objects of an exact version with several of some bands, and which of them; None without any."""
    for number in repository.catalog.alike(bands) if len(bands) >= _APART else ():
        with suppress(NotFoundError, IntegrityError):
            row = repository.catalog.version(number)
            if not row.hot and row.fidelity == "exact":
                also = bands & {*repository.resolver.document(row).bands}
                if len(also) >= _APART:
                    return _objects(repository, row, {}), also
    return None


def _difference(repository: Repository, unit: Unit, bits: Bits, identity: str) -> float:
    """Estimate the bits of the difference of a unit's first elements to an object's."""
    try:
        before = _values(repository, unit, identity)[: bits.size]
    except IntegrityError:
        return float("inf")
    mirrored = is_mirrored(unit.dtype, unit.count, unit.chunk)
    return payload_bits(ordinal_difference(bits, before, unit.dtype, mirrored=mirrored))[0]


#: Objects of versions that are thinned but perhaps not committed, with their coarse facts, by number of the version.
Thinned = Mapping[int, tuple[Sequence[str], Mapping[int, CoarseUnit]]]


def parents_of(
    repository: Repository,
    parent: VersionRow | None,
    *,
    coarse: bool,
    thinned: Thinned = MappingProxyType({}),
) -> dict[str, Parent]:
    """Return the objects of the parent version by signature of their units; none if its layout is lost.

    Exact objects are stored against exact ones, and coarse objects against coarse ones. So if the parent has another
    fidelity than the new version, the nearest ancestor's objects are returned as well.
    """

    def is_other(row: VersionRow) -> bool:
        return (row.fidelity == "coarse" or row.number in thinned) != coarse

    if parent is None:
        return {}
    found = _objects(repository, parent, thinned)
    if is_other(parent):
        nearest: VersionRow | None = parent
        # A hot version's raw objects go when it is encoded.
        while nearest is not None and (nearest.hot or is_other(nearest)):
            nearest = _parent_of(repository, nearest)
        others = {} if nearest is None else _objects(repository, nearest, thinned)
        found = {key: replace(item, other=others[key].id) if key in others else item for key, item in found.items()}
    identities = [identity for item in found.values() for identity in (item.id, item.other) if identity is not None]
    repository.resolver.prefetch(identities)
    return {key: _added_to(repository, item) for key, item in found.items()} if parent.fidelity == "coarse" else found


def _added_to(repository: Repository, parent: Parent) -> Parent:
    """Return the object to which a parent's object adds factors in its place: sums have no sums below them."""
    with suppress(IntegrityError):
        record = repository.resolver.record(parent.id)
        if isinstance(record, Factors):
            return Parent(record.base, other=parent.other)
    return parent


def _parent_of(repository: Repository, row: VersionRow) -> VersionRow | None:
    """Return the parent of a version; None if it has none, or was forgotten since."""
    try:
        return None if row.parent is None else repository.catalog.version(row.parent)
    except NotFoundError:
        return None


def units_after(
    repository: Repository, parent: VersionRow, version: Cut, apart: Container[tuple[int, int]]
) -> list[Unit]:
    """Return the units of a version that is cut alone, some as continuations of its parent's."""
    uid, alone, units = repository.last_cut
    if uid == parent.uid and version.units == alone:
        return list(units)
    before = _cut_of(repository, parent)
    return list(version.units) if before is None else continued(version, before, apart)


def _cut_of(repository: Repository, row: VersionRow) -> Cut | None:
    """Return the files and units of a version; None if its layout is lost."""
    try:
        document = repository.resolver.document(row)
        layout = repository.resolver.layout(document.layout, row.pack)
        check_layout(layout, document)
    except (IntegrityError, NotFoundError):
        return None
    return Cut([*zip(document.prefixes, layout.files, strict=True)], layout.units)


def with_longer(
    repository: Repository, version: Cut, parents: Mapping[str, Parent], parent: VersionRow
) -> dict[str, Parent]:
    """Return the parent's objects, and for units that it lacks the ones that begin with their elements."""
    if all(unit.signature in parents for unit in version.units):
        return dict(parents)
    before = _cut_of(repository, parent)
    longer = {} if before is None else beginnings(version, before)
    found = {own: replace(parents[other], longer=True) for own, other in longer.items() if other in parents}
    return {**parents, **found}


def cuts_of(repository: Repository, row: VersionRow) -> dict[tuple[str, Path], tuple[int, list[int]]]:
    """Return the size and the parts of each extent in several parts, as for `ScannedVersion.cuts_before`.

    None if the version's layout is lost.
    """
    document = repository.resolver.document(row)
    try:
        layout = repository.resolver.layout(document.layout, row.pack)
    except IntegrityError:
        return {}
    firsts: dict[tuple[int, int], list[int]] = {}
    for unit in layout.units:
        if len(unit.members) == 1:
            firsts.setdefault((unit.members[0].file, unit.members[0].extent), []).append(unit.members[0].first)
    found = {}
    for (file, number), parts in firsts.items():
        extent = layout.files[file].extents[number]
        if len(parts) > 1:
            found[document.prefixes[file], extent.path] = extent.count, sorted(parts)
    return found


def _objects(repository: Repository, row: VersionRow, thinned: Thinned) -> dict[str, Parent]:
    """Return the objects of a version; none if its layout is lost: nothing can be stored against them."""
    document = repository.resolver.document(row)
    objects, facts = thinned.get(row.number, (document.objects, document.coarse_units))
    try:
        layout = repository.resolver.layout(document.layout, row.pack)
    except IntegrityError:
        return {}
    return parent_objects(layout.units, objects, facts)
