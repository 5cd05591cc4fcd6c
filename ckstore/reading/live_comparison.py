"""Compares a state in memory with a version: objects by their content ids, and by their bits where ids differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from ckstore.codecs.lattice import PARTS
from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import row_major
from ckstore.formats.paths import listed
from ckstore.formats.torch.live_state import array_of
from ckstore.objects.identity import content_id
from ckstore.reading.buffers import read_tensor
from ckstore.reading.renames import renamed_text, renames_of
from ckstore.reading.state_dict import outline
from ckstore.runtime.threads import worker_count

if TYPE_CHECKING:
    from ckstore.formats.layout import Path, Tensor
    from ckstore.objects.units import Member
    from ckstore.reading.stored_version import StoredVersion


@dataclass(frozen=True, slots=True)
class StateReport:
    """Comparison of a state in memory with a version, by paths joined by slashes.

    Attributes
    ----------
    differing
        Tensors with other bits, and values that are not equal.
    forms
        Tensors of another dtype or shape, and values that are tensors in the version, or the other way round.
    missing
        Tensors and values that only the version has.
    fresh
        Tensors and values that only the state has.
    tensors, values
        Number of tensors and of other values that were compared.
    renames
        Paths in the state of tensors that have another path in the version, by these.

    Examples
    --------
    >>> report = store["gpt@300"].compare({"model": {"weight": np.zeros((256, 128), np.float32)}})
    >>> report.differing, report.missing
    (('model/weight',), ('model/bias',))
    """

    differing: tuple[str, ...]
    forms: tuple[str, ...]
    missing: tuple[str, ...]
    fresh: tuple[str, ...]
    tensors: int
    values: int
    renames: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether all is equal."""
        return not (self.differing or self.forms or self.missing or self.fresh)

    def __str__(self) -> str:
        moved = f" {renamed_text(self.renames)}." if self.renames else ""
        if self:
            return f"All {self.tensors:,} tensors and {self.values:,} values are equal.{moved}"
        found = {
            "differing": self.differing, "of another form": self.forms, "missing": self.missing, "fresh": self.fresh
        }  # fmt: skip
        parts = [f"{len(names):,} {kind}: {listed(names)}" for kind, names in found.items() if names]
        return f"Of {self.tensors:,} tensors and {self.values:,} values, {'; '.join(parts)}.{moved}"


class _Stored(str):
    """The path of a stored tensor."""

    __slots__ = ()


def compare_state(version: StoredVersion, state: Any, allow: Sequence[type] = ()) -> StateReport:
    """Compare a state with a version; see `Version.compare`."""
    stored = dict(_leaves(outline(version, _Stored, allow)))
    live = dict(_leaves(state))
    names = renames_of(
        {path: _form(path, version.paths[name][1]) for path, name in stored.items() if isinstance(name, _Stored)},
        {path: _form(path, now) for path, value in live.items() if (now := _local(value)) is not None},
    )
    stored = {names.get(path, path): value for path, value in stored.items()}
    differing, forms = [], []
    pairs: dict[str, tuple[str, _Local]] = {}
    tensors = 0
    for path in stored.keys() & live.keys():
        before, now = stored[path], _local(live[path])
        tensors += isinstance(before, _Stored)
        if isinstance(before, _Stored) and now is not None:
            _, tensor = version.paths[before]
            if (tensor.dtype, tensor.shape) == (now.dtype, now.shape):
                pairs[path] = before, now
                continue
        if isinstance(before, _Stored) or now is not None:
            forms.append(path)
        elif not _is_same(before, live[path]):
            differing.append(path)
    equal = _equal_units(version, [(version.paths[name], now) for name, now in pairs.values()])
    for path, (name, now) in pairs.items():
        if not _is_equal(version, *version.paths[name], now, equal):
            differing.append(path)
    known = {_place(now) for _, now in pairs.values() if now.value.numel()}
    fresh = [path for path in live if path not in stored and _place(_local(live[path])) not in known]
    return StateReport(
        tuple(sorted(differing)), tuple(sorted(forms)), tuple(path for path in stored if path not in live),
        tuple(fresh), tensors, len(stored.keys() & live.keys()) - tensors,
        names,
    )  # fmt: skip


def _form(path: str, tensor: Tensor | _Local) -> tuple[Path, str, tuple[int, ...]]:
    return tuple(path.split("/")), tensor.dtype, tensor.shape


@dataclass(frozen=True, slots=True)
class _Local:
    """The elements of a tensor that this process holds: a box that begins at `first`; the whole tensor has `shape`."""

    value: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    first: tuple[int, ...]

    @property
    def stretch(self) -> tuple[int, int] | None:
        """The first element, and the one after the last; None if they are not adjacent in the whole tensor."""
        if tuple(self.value.shape[1:]) != self.shape[1:]:
            return None
        start = self.first[0] * prod(self.shape[1:]) if self.shape else 0
        return start, start + self.value.numel()

    def bytes(self, start: int, stop: int) -> memoryview:
        """Return the bytes of elements of the box, counted in it."""
        flat = self.value.contiguous().reshape(-1)[start:stop]
        return memoryview(array_of(flat.view(torch.uint8).cpu()))


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield tensors and values with their paths; modules, optimisers and the like as their state dicts."""
    if callable(getattr(node, "state_dict", None)) and not isinstance(node, type):
        node = node.state_dict()
    if isinstance(node, Mapping):
        items: Any = node.items()
    elif type(node) in (list, tuple):
        items = enumerate(node)
    else:
        yield path, node
        return
    for key, value in items:
        yield from _leaves(value, f"{path}/{key}" if path else str(key))


def _local(value: Any) -> _Local | None:
    """Return this process's elements of a tensor or array; None for other values."""
    if isinstance(value, np.ndarray) and value.dtype.name in ITEM_SIZES:
        value = torch.from_numpy(np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False)))
    if not isinstance(value, torch.Tensor):
        return None
    shape, first = tuple(value.shape), (0,) * value.ndim
    cut: Any = value
    if type(value).__name__ == "DTensor" and type(value).__module__ == "torch.distributed.tensor":
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, first = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
        value = cut.to_local()
    value = value.detach().resolve_conj().resolve_neg()
    return _Local(value, str(value.dtype).removeprefix("torch."), shape, tuple(first))


def _place(tensor: _Local | None) -> tuple[Any, ...] | None:
    """Return the place of a tensor in memory: files of weights have one of several tied names."""
    if tensor is None:
        return None
    return tensor.value.data_ptr(), tensor.value.device, tensor.dtype, tensor.shape, tensor.value.stride()


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two values are of one type and equal; NaN equals itself."""
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return (before.dtype, before.shape, before.tobytes()) == (now.dtype, now.shape, now.tobytes())
    try:
        return type(before) is type(now) and bool(before == now or (before != before and now != now))
    except Exception:
        return False


def _equal_units(version: StoredVersion, held: Sequence[tuple[tuple[int, Tensor], _Local]]) -> set[int]:
    """Return the numbers of the units whose elements this process holds, and whose content ids are equal."""
    layout, document = version.layout, version.document
    extents: dict[tuple[int, int], tuple[int, int, _Local]] = {}
    for (file, tensor), now in held:
        if tensor.extent < 0 or tensor.shards or tensor.lazy or tensor.offset or now.stretch is None:
            continue
        if not now.value.is_contiguous():  # Each stretch would be cut out of a copy of the whole.
            continue
        count = layout.files[file].extents[tensor.extent].count
        if tensor.strides == row_major(tensor.shape) and prod(tensor.shape) == count:
            extents[file, tensor.extent] = (*now.stretch, now)

    def digest(member: Member) -> bytes | None:
        start, stop, now = extents.get((member.file, member.extent), (0, 0, None))
        if now is None or member.first < start or member.first + member.count > stop:
            return None
        return blake3(now.bytes(member.first - start, member.first - start + member.count)).digest()

    def is_equal(number: int) -> bool:
        unit = layout.units[number]
        digests = [digest(member) for member in unit.members]
        found = [one for one in digests if one is not None]
        return len(found) == len(digests) and content_id(unit.dtype, unit.chunk, found) == document.objects[number]

    numbers = [number for number in range(len(layout.units)) if number not in document.coarse_units]
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        return {number for number, equal in zip(numbers, pool.map(is_equal, numbers), strict=True) if equal}


def _is_equal(version: StoredVersion, file: int, tensor: Tensor, now: _Local, equal: set[int]) -> bool:
    """Return whether the elements that this process holds have the stored bits; decode them unless ids tell."""
    if not now.value.numel():
        return True
    if now.stretch is not None and tensor.extent >= 0 and not tensor.shards:
        scale = 2 if tensor.dtype in PARTS else 1
        start, stop = (scale * (element + tensor.offset) for element in now.stretch)
        parts = version.contents.parts(file, tensor.extent)
        ends = [*(first for first, _, _ in parts[1:]), stop][: len(parts)]
        inside = [number for (first, number, _), end in zip(parts, ends, strict=True) if first < stop and end > start]
        if inside and equal.issuperset(inside) and tensor.strides == row_major(tensor.shape):
            return True
    wanted = [range(first, first + size) for first, size in zip(now.first, now.value.shape, strict=True)]
    bits = read_tensor(version, file, tensor, wanted)
    return bool(memoryview(np.ascontiguousarray(bits)).cast("B") == now.bytes(0, now.value.numel()))
