"""Compares the tensors of two versions: by ids where these decide, else by their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckstore.dtypes import ITEM_SIZES, numpy_dtype
from ckstore.errors import NotFoundError
from ckstore.formats.paths import match_texts
from ckstore.reading.buffers import read_tensor
from ckstore.runtime.cached import cached_property

if TYPE_CHECKING:
    from ckstore.formats.layout import Tensor
    from ckstore.objects.units import Unit
    from ckstore.reading.stored_version import StoredVersion

#: Bytes of a tensor that are decoded at once.
_BLOCK = 1 << 24

Kind = Literal["added", "removed", "shape", "values"]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The dtype, as torch names it, and the shape of a tensor.

    Examples
    --------
    >>> store.diff("gpt@100", "gpt@300").changes[0].after
    TensorForm(dtype='float32', shape=(256, 128))
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that differs between two versions.

    Attributes
    ----------
    path
        Typed path as text.
    change
        `added`, `removed`, `shape` (another shape or dtype) or `values`.
    before, after
        Its dtype and shape in each version; None in the version that lacks it.
    max_abs, rms
        Largest magnitude and root mean square of the differences between the values of float tensors, over elements
        that are finite in both versions; None where values were not compared.

    Examples
    --------
    >>> [change] = store.diff("gpt@100", "gpt@300").changes
    >>> change.path, change.change, change.after.shape
    ('model/weight', 'values', (256, 128))
    """

    path: str
    change: Kind
    before: TensorForm | None
    after: TensorForm | None
    max_abs: float | None = None
    rms: float | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of a comparison of two versions.

    Attributes
    ----------
    changes
        The tensors that differ: in the order of the second version, then those of the first version alone.
    compared
        Number of tensors compared, equal ones included.

    Examples
    --------
    >>> report = store.diff("gpt@100", "gpt@300", values=True)
    >>> report.compared, report.changes[0].path, round(report.changes[0].rms, 3)
    (2, 'model/weight', 0.002)
    """

    changes: tuple[TensorChange, ...]
    compared: int

    def count(self, change: Kind) -> int:
        """Return the number of changes of one kind."""
        return sum(item.change == change for item in self.changes)


def compare(
    before: StoredVersion, after: StoredVersion, globs: Sequence[str] = (), *, values: bool = False
) -> DiffReport:
    """Compare two versions tensor by tensor, bit for bit: 0.0 and -0.0 differ, and a NaN equals itself.

    Parameters
    ----------
    before, after
        The two versions.
    globs
        Globs over the paths of tensors; without any, all tensors are compared.
    values
        Decode tensors whose values differ, to fill `max_abs` and `rms`.

    Raises
    ------
    NotFoundError
        Neither version has a tensor that a glob matches.
    """
    one, other = _Side(before, globs), _Side(after, globs)
    if globs and not one.tensors and not other.tensors:
        raise NotFoundError(
            f"Neither version has a tensor that matches {' or '.join(globs)}; see `ckstore ls {before.row.number}`."
        )
    return DiffReport(tuple(_changes(one, other, values=values)), len(one.tensors.keys() | other.tensors.keys()))


class _Side:
    """One of the two versions, with the tensors that are compared."""

    def __init__(self, stored: StoredVersion, globs: Sequence[str]) -> None:
        self.stored = stored
        texts = list(stored.paths)
        numbers = match_texts(texts, globs)
        self.tensors: dict[str, tuple[int, Tensor]] = {texts[number]: stored.paths[texts[number]] for number in numbers}

    def form(self, path: str) -> TensorForm:
        """Return the dtype and shape of a tensor."""
        tensor = self.tensors[path][1]
        return TensorForm(tensor.dtype, tensor.shape)

    @cached_property
    def _units(self) -> dict[tuple[int, int], list[tuple[Unit, str]]]:
        """The units of each extent, with the content ids of their decoded values."""
        found: dict[tuple[int, int], list[tuple[Unit, str]]] = {}
        document = self.stored.document
        coarse = document.coarse_units
        for number, unit in enumerate(self.stored.layout.units):
            identity = coarse[number].decoded if number in coarse else document.objects[number]
            for place in {(member.file, member.extent): None for member in unit.members}:
                found.setdefault(place, []).append((unit, identity))
        return found

    def identity(self, path: str) -> tuple[Any, list[tuple[str, str, str]]]:
        """Return how the tensor views its extent, and the key, signature and id of each unit of the extent."""
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
        """Return whether the objects of the tensor contain no other, so that different ids mean different values."""
        file, tensor = self.tensors[path]
        places = tensor.places(file)
        count = sum(self.stored.layout.files[number].extents[extent].count for number, extent in places)
        members = {(member.file, member.extent) for unit, _ in self._units_of(file, tensor) for member in unit.members}
        return prod(tensor.shape) == count and members == set(places)

    def blocks(self, path: str) -> Iterator[Any]:
        """Yield the tensor as arrays of whole rows."""
        file, tensor = self.tensors[path]
        whole = [range(size) for size in tensor.shape]
        rows = tensor.shape[0] if tensor.shape else 1
        row = max(1, prod(tensor.shape) // max(rows, 1)) * ITEM_SIZES[tensor.dtype]
        step = max(1, _BLOCK // row)
        for start in range(0, rows, step):
            part = [range(start, min(start + step, rows)), *whole[1:]] if tensor.shape else whole
            yield read_tensor(self.stored, file, tensor, part).view(numpy_dtype(tensor.dtype))


def _changes(before: _Side, after: _Side, *, values: bool) -> Iterator[TensorChange]:
    for path in after.tensors:
        now = after.form(path)
        if path not in before.tensors:
            yield TensorChange(path, "added", None, now)
            continue
        then = before.form(path)
        if then != now:
            yield TensorChange(path, "shape", then, now)
        elif not _is_same(before, after, path):
            yield TensorChange(path, "values", then, now, *(_distance(before, after, path) if values else ()))
    for path in before.tensors:
        if path not in after.tensors:
            yield TensorChange(path, "removed", before.form(path), None)


def _is_same(before: _Side, after: _Side, path: str) -> bool:
    view, units = before.identity(path)
    other_view, other_units = after.identity(path)
    if view == other_view and [unit[:2] for unit in units] == [unit[:2] for unit in other_units]:
        if units == other_units:
            return True
        if before.has_own_objects(path) and after.has_own_objects(path):
            return False
    pairs = zip(before.blocks(path), after.blocks(path), strict=True)
    return all(left.tobytes() == right.tobytes() for left, right in pairs)


def _distance(before: _Side, after: _Side, path: str) -> tuple[float | None, float | None]:
    dtype = before.tensors[path][1].dtype
    if not dtype.startswith(("float", "bfloat", "complex")):
        return None, None
    largest = total = 0.0
    count = 0
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    for left, right in zip(before.blocks(path), after.blocks(path), strict=True):
        one, other = left.astype(wide), right.astype(wide)
        finite = np.isfinite(one) & np.isfinite(other)
        distance = np.abs(other[finite] - one[finite])
        if distance.size:
            largest = max(largest, float(distance.max()))
            total += float((distance * distance).sum())
            count += distance.size
    return largest, (total / count) ** 0.5 if count else 0.0
