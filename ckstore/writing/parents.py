"""Finds the objects that the objects of a version may be stored against."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ckstore.encoding.estimate import Parent
from ckstore.encoding.estimator import parent_objects
from ckstore.errors import IntegrityError, NotFoundError
from ckstore.formats.layout import Path
from ckstore.objects.continuation import Cut, continued
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.layouts import check_layout
from ckstore.objects.units import Unit
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow

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
        # A hot version's raw objects go when it is compacted.
        while nearest is not None and (nearest.hot or is_other(nearest)):
            nearest = _parent_of(repository, nearest)
        others = {} if nearest is None else _objects(repository, nearest, thinned)
        found = {key: replace(item, other=others[key].id) if key in others else item for key, item in found.items()}
    identities = [identity for item in found.values() for identity in (item.id, item.other) if identity is not None]
    repository.resolver.prefetch(identities)
    return found


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
    try:
        document = repository.resolver.document(parent)
        layout = repository.resolver.layout(document.layout, parent.pack)
        check_layout(layout, document)
    except (IntegrityError, NotFoundError):
        return list(version.units)
    prefixes = (f"{file.path}/" if document.is_directory else "" for file in document.files)
    return continued(version, Cut([*zip(prefixes, layout.files, strict=True)], layout.units), apart)


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
        prefix = f"{document.files[file].path}/" if document.is_directory else ""
        if len(parts) > 1:
            found[prefix, extent.path] = extent.count, sorted(parts)
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
