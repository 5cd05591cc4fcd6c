"""The storage of a version's objects, for `show`, `ls` and `Version.storage`; decodes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckstore.objects.records import KINDS
from ckstore.objects.units import is_bundle

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.reading.stored_version import StoredVersion


class Figures(NamedTuple):
    """The storage of a tensor, or of its bundle: form, whether it is a bundle, depth, and stored bits an element."""

    form: str | None
    bundled: bool
    depth: int
    bits: float | None


class StorageFacts:
    """The objects of a version, by their tensors."""

    def __init__(self, version: StoredVersion) -> None:
        self.version = version
        self.records = list(map(version.repository.resolver.record, version.document.objects))
        self._described: dict[tuple[int, ...], Figures] = {}

    def of_tensor(self, file: int, tensor: Tensor) -> Figures:
        """Return the storage of a tensor."""
        units = self.version.contents.units_of
        return self._figures(tuple({unit: None for place in tensor.places(file) for unit in units(*place)}))

    def of_tensors(self, paths: Sequence[str]) -> list[Figures]:
        """Return the storage of tensors."""
        contents = self.version.contents
        units, numbers = contents.lone_units(), list(map(self.version.numbers.__getitem__, paths))
        lone = {unit: self._figures((unit,)) for unit in {units[number] for number in numbers} - {-1}}
        return [lone.get(units[number]) or self.of_tensor(*contents.row(number)) for number in numbers]

    def _figures(self, units: tuple[int, ...]) -> Figures:
        found = self._described.get(units)
        if found is None:
            depth, layout = self.version.repository.reader.chains.depth, self.version.layout
            records = [self.records[unit] for unit in units]
            count = sum(layout.unit_shapes.products[[*units]].tolist())
            found = self._described[units] = Figures(
                "/".join(sorted({record.description for record in records})) or None,
                any(is_bundle(layout.keys[unit]) for unit in units),
                max(map(depth, records), default=0),
                8 * sum(record.nbytes for record in records) / count if count else None,
            )
        return found

    def summary(self) -> dict[str, Any]:
        """Return counts of objects, and bytes of exact and of coarse ones; shared objects count once.

        `here` counts the objects that this version added to the store.
        """
        unique = list({record.id: record for record in self.records}.values())
        kinds = Counter(record.kind for record in unique)
        return {
            "objects": len(unique),
            "here": sum(record.pack == self.version.row.pack for record in unique),
            **{kind: kinds[kind] for kind in KINDS},
            "stored_against_others": sum(record.base is not None for record in unique),
            "coarse_bytes": sum(record.nbytes for record in unique if not record.is_exact),
            "exact_bytes": sum(record.nbytes for record in unique if record.is_exact),
        }


def tensor_object(path: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a tensor as the JSON object of `ls`."""
    return {"path": path, "dtype": dtype, "shape": list(shape), "elements": prod(shape)}
