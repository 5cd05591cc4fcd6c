"""The deviations of a coarse version's tensors from their originals."""

from __future__ import annotations

from ckstore.objects.documents import Deviation
from ckstore.reading.stored_version import StoredVersion


def tensor_deviations(version: StoredVersion) -> dict[str, Deviation]:
    """Return the deviations of a version's tensors, by path; see `Version.deviations`."""
    parts: dict[tuple[int, int], list[tuple[int, Deviation]]] = {}
    for number, facts in version.document.coarse_units.items():
        for member, deviation in zip(version.layout.units[number].members, facts.deviations, strict=True):
            parts.setdefault((member.file, member.extent), []).append((member.count, deviation))
    found = {}
    for path, (file, tensor) in version.paths.items():
        pieces = [piece for place in tensor.places(file) for piece in parts.get(place, ())]
        if pieces:
            total = sum(count for count, _ in pieces)
            rms = (sum(count * item.rms**2 for count, item in pieces) / total) ** 0.5
            size = (sum(count * item.size**2 for count, item in pieces) / total) ** 0.5
            found[path] = Deviation(max(item.max_abs for _, item in pieces), rms, size)
    return found
