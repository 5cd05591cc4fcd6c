"""The deviations of a coarse version's tensors from their originals."""

from __future__ import annotations

from ckstore.objects.documents import Deviation
from ckstore.objects.records import Record, Rounded
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion


def tensor_deviations(version: StoredVersion) -> dict[str, Deviation]:
    """Return the deviations of a version's tensors, by path; see `Version.deviations`."""
    parts: dict[tuple[int, int], list[tuple[int, Deviation]]] = {}
    for number, facts in version.document.coarse_units.items():
        for member, deviation in zip(version.layout.units[number].members, facts.deviations, strict=True):
            parts.setdefault((member.file, member.extent), []).append((member.count, deviation))
    found: dict[str, Deviation] = {}
    if not parts:
        return found
    for path, (file, tensor) in version.paths.items():
        pieces = [piece for place in tensor.places(file) for piece in parts.get(place, ())]
        if pieces:
            total = sum(count for count, _ in pieces)
            rms = (sum(count * item.rms**2 for count, item in pieces) / total) ** 0.5
            size = (sum(count * item.size**2 for count, item in pieces) / total) ** 0.5
            found[path] = Deviation(max(item.max_abs for _, item in pieces), rms, size)
    return found


def is_moment(unit: Unit, record: Record) -> bool:
    """Return whether a coarse unit holds states of an optimiser, by its path or by its values."""
    return unit.role in ("first", "second", "state") or isinstance(record, Rounded)


def largest_deviations(version: StoredVersion) -> tuple[float, float]:
    """Return the largest relative deviations of any weight and of any moment of a version; 0 if all are exact."""
    units, objects = version.layout.units, version.document.objects
    moments = {
        (member.file, member.extent)
        for number in version.document.coarse_units
        if is_moment(units[number], version.repository.resolver.record(objects[number]))
        for member in units[number].members
    }
    found = [0.0, 0.0]
    for path, deviation in tensor_deviations(version).items():
        file, tensor = version.paths[path]
        of_moment = any(place in moments for place in tensor.places(file))
        found[of_moment] = max(found[of_moment], deviation.relative)
    return found[0], found[1]
