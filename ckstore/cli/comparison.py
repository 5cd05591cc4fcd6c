"""Compares the tensors of two versions: by ids where they tell, by bytes where objects are shared with others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.cli.storage_facts import tensor_object
from ckstore.dtypes import ITEM_SIZES

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.objects.units import Unit
    from ckstore.version import Version

#: Bytes of a tensor that are decoded at once.
_BLOCK = 1 << 24


class Side:
    """One of two versions that are compared.

    Parameters
    ----------
    version
        A version of an open store.
    globs
        Which of its tensors; all where there is none.
    """

    def __init__(self, version: Version, globs: tuple[str, ...]) -> None:
        from ckstore.formats.paths import match_paths, text_to_path

        self.version = version
        texts = list(version.paths)
        numbers = match_paths(map(text_to_path, texts), globs)
        self.tensors: dict[str, tuple[int, Tensor]] = {
            texts[number]: version.paths[texts[number]] for number in numbers
        }

    @cached_property
    def _units(self) -> dict[tuple[int, int], list[tuple[Unit, str]]]:
        """The units that each extent lies in, with the content ids of what they decode to."""
        found: dict[tuple[int, int], list[tuple[Unit, str]]] = {}
        document = self.version.document
        coarse = {} if document.coarse is None else document.coarse.units
        for number, unit in enumerate(self.version.layout.units):
            lattice, content = document.objects[number]
            identity = content or (coarse[number].decoded if number in coarse else lattice)
            for place in {(member.file, member.extent): None for member in unit.members}:
                found.setdefault(place, []).append((unit, identity))
        return found

    def identity(self, path: str) -> tuple[Any, list[tuple[str, str, str]]]:
        """How the tensor views its extent, and key, signature and id of each unit that the extent lies in."""
        file, tensor = self.tensors[path]
        units = self._units_of(file, tensor)
        places = tensor.places(file)
        members = [(unit.key, unit.signature, identity) for unit, identity in units]
        first = [
            (member.first, member.count)
            for unit, _ in units
            for member in unit.members
            if (member.file, member.extent) in places
        ]
        boxes = [(shard.box, shard.strides, shard.lazy) for _, shard in tensor.shards]
        return (tensor.offset, tensor.strides, tensor.lazy, first, boxes), members

    def _units_of(self, file: int, tensor: Tensor) -> list[tuple[Unit, str]]:
        found = {unit.key: (unit, name) for place in tensor.places(file) for unit, name in self._units.get(place, ())}
        return list(found.values())

    def has_own_objects(self, path: str) -> bool:
        """Whether the tensor is all that its objects hold, so that other ids mean other values."""
        file, tensor = self.tensors[path]
        places = tensor.places(file)
        count = sum(self.version.layout.files[number].extents[extent].count for number, extent in places)
        members = {(member.file, member.extent) for unit, _ in self._units_of(file, tensor) for member in unit.members}
        return tensor_object(path, tensor)["elements"] == count and members == set(places)

    def blocks(self, path: str) -> Iterator[Any]:
        """The tensor as arrays of whole rows, one after the other."""
        lazy = self.version[path]
        tensor = self.tensors[path][1]
        if not tensor.shape:
            yield np.asarray(lazy[...])
            return
        row = max(1, tensor_object(path, tensor)["elements"] // max(tensor.shape[0], 1)) * ITEM_SIZES[tensor.dtype]
        step = max(1, _BLOCK // row)
        for start in range(0, tensor.shape[0], step):
            yield np.asarray(lazy[start : start + step])


class VersionDiff:
    """Two versions, tensor by tensor.

    Parameters
    ----------
    before, after
        The two sides.
    """

    def __init__(self, before: Side, after: Side) -> None:
        self.before = before
        self.after = after

    def changes(self, *, values: bool) -> Iterator[dict[str, Any]]:
        """What differs, in the order of the second version's tensors, those that are gone last.

        Parameters
        ----------
        values
            Add `max_abs` and `rms` of the differences of float tensors, over elements that are finite in both.
        """
        for path, (_, tensor) in self.after.tensors.items():
            now = tensor_object(path, tensor)
            if path not in self.before.tensors:
                yield {"path": path, "change": "added", "after": _form(now)}
                continue
            then = tensor_object(path, self.before.tensors[path][1])
            forms = {"before": _form(then), "after": _form(now)}
            if forms["before"] != forms["after"]:
                yield {"path": path, "change": "shape", **forms}
            elif not self._is_same(path):
                yield {"path": path, "change": "values", **forms, **(self._distance(path) if values else {})}
        for path, (_, tensor) in self.before.tensors.items():
            if path not in self.after.tensors:
                yield {"path": path, "change": "removed", "before": _form(tensor_object(path, tensor))}

    def _is_same(self, path: str) -> bool:
        view, units = self.before.identity(path)
        other_view, other_units = self.after.identity(path)
        if view == other_view and [unit[:2] for unit in units] == [unit[:2] for unit in other_units]:
            if units == other_units:
                return True
            if self.before.has_own_objects(path) and self.after.has_own_objects(path):
                return False
        pairs = zip(self.before.blocks(path), self.after.blocks(path), strict=True)
        return all(left.tobytes() == right.tobytes() for left, right in pairs)

    def _distance(self, path: str) -> dict[str, float | None]:
        dtype = self.before.tensors[path][1].dtype
        if not dtype.startswith(("float", "bfloat", "complex")):
            return {"max_abs": None, "rms": None}
        largest = total = 0.0
        count = 0
        wide = np.complex128 if dtype.startswith("complex") else np.float64
        for left, right in zip(self.before.blocks(path), self.after.blocks(path), strict=True):
            one, other = left.astype(wide), right.astype(wide)
            finite = np.isfinite(one) & np.isfinite(other)
            distance = np.abs(other[finite] - one[finite])
            if distance.size:
                largest = max(largest, float(distance.max()))
                total += float((distance * distance).sum())
                count += distance.size
        return {"max_abs": largest, "rms": (total / count) ** 0.5 if count else 0.0}


def _form(tensor: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": tensor["dtype"], "shape": tensor["shape"]}
