"""The storage of a version's objects, for `show`, `ls` and `Version.storage`; decodes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from ckstore.objects.records import KINDS

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.objects.records import Record
    from ckstore.objects.units import Unit
    from ckstore.reading.stored_version import StoredVersion


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One unit of a version and the record of its object."""

    unit: Unit
    record: Record


@dataclass(slots=True)
class StorageFacts:
    """The objects of a version, by their tensors."""

    version: StoredVersion
    objects: list[StoredObject] = field(init=False)
    _by_extent: dict[tuple[int, int], list[int]] = field(init=False)
    _described: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        resolver = self.version.repository.resolver
        self.objects = []
        self._by_extent = {}
        for number, (unit, identity) in enumerate(
            zip(self.version.layout.units, self.version.document.objects, strict=True)
        ):
            self.objects.append(StoredObject(unit, resolver.record(identity)))
            for member in unit.members:
                numbers = self._by_extent.setdefault((member.file, member.extent), [])
                if number not in numbers:
                    numbers.append(number)

    def of_tensor(self, file: int, tensor: Tensor) -> dict[str, Any]:
        """Return the storage of a tensor as the JSON object of `show` and `ls -l`; for a bundle its figures.

        `bits` are stored bits an element.
        """
        listed = [self._by_extent.get(place, []) for place in tensor.places(file)]
        numbers = tuple(listed[0] if len(listed) == 1 else dict.fromkeys(chain.from_iterable(listed)))
        found = self._described.get(numbers)
        if found is None:
            found = self._described[numbers] = self._figures([self.objects[number] for number in numbers])
        return found

    def _figures(self, objects: Sequence[StoredObject]) -> dict[str, Any]:
        depth = self.version.repository.reader.chains.depth
        count = sum(item.unit.count for item in objects)
        return {
            "form": "/".join(sorted({item.record.description for item in objects})) or None,
            "bundled": any(item.unit.is_bundle for item in objects),
            "depth": max((depth(item.record) for item in objects), default=0),
            "bits": 8 * sum(item.record.nbytes for item in objects) / count if count else None,
        }

    def summary(self) -> dict[str, Any]:
        """Return counts of objects, and bytes of exact and of coarse ones; shared objects count once.

        `here` counts the objects that this version added to the store.
        """
        unique = list({item.record.id: item for item in self.objects}.values())
        kinds = Counter(item.record.kind for item in unique)
        return {
            "objects": len(unique),
            "here": sum(item.record.pack == self.version.row.pack for item in unique),
            **{kind: kinds[kind] for kind in KINDS},
            "stored_against_others": sum(item.record.base is not None for item in unique),
            "coarse_bytes": sum(item.record.nbytes for item in unique if not item.record.is_exact),
            "exact_bytes": sum(item.record.nbytes for item in unique if item.record.is_exact),
        }


def tensor_object(path: str, tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as the JSON object of `ls` and `diff`."""
    return {"path": path, "dtype": tensor.dtype, "shape": list(tensor.shape), "elements": prod(tensor.shape)}
