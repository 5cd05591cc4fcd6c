"""The storage of a version's objects, for `show`, `ls` and `Version.storage`; decodes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.objects.records import ContentRecord, LatticeRecord
    from ckstore.objects.units import Unit
    from ckstore.reading.stored_version import StoredVersion


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One unit of a version and the records of its layers; `exact` is None if the lattice is exact by itself."""

    unit: Unit
    lattice: LatticeRecord
    exact: ContentRecord | None
    content: str | None

    @property
    def coarse_bytes(self) -> int:
        """Bytes of the integers, and of a codebook's exceptions."""
        return self.lattice.nbytes

    @property
    def exact_bytes(self) -> int:
        """Bytes of the exact layer."""
        return 0 if self.exact is None else sum(self.exact.lengths)

    @property
    def lattice_text(self) -> str:
        """The kind of lattice and its step, if any; the smallest and largest step of rows and columns."""
        from ckstore.codecs.lattice import LinearLattice
        from ckstore.codecs.rounded import RoundedLattice

        lattice = self.lattice.lattice
        if isinstance(lattice, RoundedLattice):
            return f"rounded 2^{lattice.shift}"
        if not isinstance(lattice, LinearLattice):
            return lattice.kind
        low = high = lattice.step
        for axis in (lattice.rows, lattice.cols):
            if axis.size:
                low, high = low + int(axis.min()), high + int(axis.max())
        return f"linear 2^{low}" if low == high else f"linear 2^{low}..{high}"

    @property
    def layers(self) -> str:
        """`base` or `delta`, and the mode of the exact layer if there is one."""
        kind = "base" if self.lattice.base is None else "delta"
        return kind if self.exact is None else f"{kind}+{self.exact.mode}"


@dataclass(slots=True)
class StorageFacts:
    """The objects of a version, by their tensors.

    Parameters
    ----------
    version
        A version of an open store.
    """

    version: StoredVersion
    objects: list[StoredObject] = field(init=False)
    _by_extent: dict[tuple[int, int], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        resolver = self.version.repository.resolver
        self.objects = []
        self._by_extent = {}
        for number, (unit, (identity, content)) in enumerate(
            zip(self.version.layout.units, self.version.document.objects, strict=True)
        ):
            exact = None if content is None else resolver.content(content)
            self.objects.append(StoredObject(unit, resolver.lattice(identity), exact, content))
            for member in unit.members:
                numbers = self._by_extent.setdefault((member.file, member.extent), [])
                if number not in numbers:
                    numbers.append(number)

    def of_tensor(self, file: int, tensor: Tensor) -> list[StoredObject]:
        """Return the objects of a tensor's extent: its units, or the bundle that contains it."""
        numbers = {number: None for place in tensor.places(file) for number in self._by_extent.get(place, ())}
        return [self.objects[number] for number in numbers]

    def depth(self, objects: Iterable[StoredObject]) -> int:
        """Return the largest number of deltas in the chains of these objects."""
        reader = self.version.repository.reader
        return max((reader.depth(item.lattice.id, item.content) for item in objects), default=0)

    def summary(self) -> dict[str, Any]:
        """Return counts of objects by kind, and bytes by layer; shared objects count once.

        `here` counts the objects whose integers this version added to the store.
        """
        unique = list({(item.lattice.id, item.content): item for item in self.objects}.values())
        exact = [item.exact for item in unique if item.exact is not None]
        lattices = {item.lattice.id: item.lattice for item in unique}.values()
        return {
            "objects": len(unique),
            "here": sum(item.lattice.pack == self.version.row.pack for item in unique),
            "base": sum(item.lattice.base is None for item in unique),
            "delta": sum(item.lattice.base is not None for item in unique),
            "linear": sum(item.lattice.kind == "linear" for item in unique),
            "rounded": sum(item.lattice.kind == "rounded" for item in unique),
            "codebook": sum(item.lattice.kind == "codebook" for item in unique),
            "ordinal": sum(item.lattice.kind == "ordinal" for item in unique),
            "own": sum(record.mode == "own" for record in exact),
            "chained": sum(record.mode == "chained" for record in exact),
            "patched": sum(record.mode == "patched" for record in exact),
            "coarse_bytes": sum(record.nbytes for record in lattices),
            "exact_bytes": sum(sum(record.lengths) for record in exact),
        }


def tensor_storage(stored: StorageFacts, file: int, tensor: Tensor) -> dict[str, Any]:
    """Return the storage of a tensor as the JSON object of `show` and `ls -l`; for a bundle its figures.

    `bits` are stored bits an element by layer.
    """
    objects = stored.of_tensor(file, tensor)
    count = sum(item.unit.count for item in objects)
    coarse, exact = sum(item.coarse_bytes for item in objects), sum(item.exact_bytes for item in objects)
    return {
        "lattice": "/".join(sorted({item.lattice_text for item in objects})) or None,
        "layers": "/".join(sorted({item.layers for item in objects})) or None,
        "bundled": any(item.unit.is_bundle for item in objects),
        "depth": stored.depth(objects),
        "bits": {"coarse": 8 * coarse / count, "exact": 8 * exact / count} if count else None,
        "bytes_per_element": (coarse + exact) / count if count else None,
    }


def tensor_object(path: str, tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as the JSON object of `ls` and `diff`."""
    return {"path": path, "dtype": tensor.dtype, "shape": list(tensor.shape), "elements": prod(tensor.shape)}
