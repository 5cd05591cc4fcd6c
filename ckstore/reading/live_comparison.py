"""Compares a state in memory with a version: objects by their content ids, and by their bits where ids differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from ckstore.codecs.lattice import PARTS
from ckstore.dtypes import NATIVE, torch_dtype
from ckstore.formats.layout import Tensor, Unknown, row_major
from ckstore.formats.paths import listed, text_to_path, texts_of
from ckstore.formats.torch.live_state import Describer, array_of
from ckstore.formats.torch.tree_reader import PLAIN, ROOT, free
from ckstore.formats.trees import ATTRIBUTED, FROM_TYPE
from ckstore.objects.identity import content_id
from ckstore.reading.buffers import read_tensor
from ckstore.reading.renames import renamed_text, renames_of
from ckstore.reading.sharded import sharded_directories
from ckstore.reading.state_dict import outline
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.threads import worker_count

if TYPE_CHECKING:
    from ckstore.formats.layout import Path, Segment
    from ckstore.objects.units import Member
    from ckstore.reading.stored_version import StoredVersion


@dataclass(frozen=True, slots=True)
class StateReport:
    """Comparison of a state in memory with a version, by paths as `ckstore ls` shows them.

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


#: Nodes with parts.
_NODES = (dict, list, tuple, Unknown)


@collection_seldom()
def compare_state(version: StoredVersion, state: Any, allow: Sequence[type] = ()) -> StateReport:
    """Compare a state with a version; see `Version.compare`."""
    files = {*sharded_directories(version), *(entry.path for entry in version.document.files)}
    files = files if version.document.is_directory else set()
    stored = _named(outline(version, _Stored, allow), files)
    live = _named(state, files)

    def form(value: Any) -> tuple[str, tuple[int, ...]] | None:
        tensor = version.paths[value][1] if isinstance(value, _Stored) else value
        return (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor | _Local) else None

    names = renames_of(*(
        {path: (text_to_path(path), *found) for path in one if path not in other and (found := form(one[path]))}
        for one, other in ((stored, live), (live, stored))
    ))  # fmt: skip
    stored = {names.get(path, path): value for path, value in stored.items()}
    differing, forms = [], []
    pairs: dict[str, tuple[str, _Local]] = {}
    tensors = 0
    for path in stored.keys() & live.keys():
        before, now = stored[path], live[path]
        tensors += isinstance(before, _Stored)
        if form(before) != form(now):
            forms.append(path)
        elif isinstance(before, _Stored):
            pairs[path] = before, now
        elif not _is_same(before, now):
            differing.append(path)
    equal = _equal_units(version, [(version.paths[name], now) for name, now in pairs.values()])
    for path, (name, now) in pairs.items():
        if not _is_equal(version, *version.paths[name], now, equal):
            differing.append(path)
    known = {_place(now) for _, now in pairs.values() if now.value.numel()}
    # Attributes that only the state's tensors have are no part of the version.
    fresh = [path for path in live if path not in stored and path.rpartition("/")[0] not in stored]
    return StateReport(
        tuple(sorted(differing)), tuple(sorted(forms)), tuple(path for path in stored if path not in live),
        tuple(path for path in fresh if _place(live[path]) not in known),
        tensors, len(stored.keys() & live.keys()) - tensors, names,
    )  # fmt: skip


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


class _Parts(Describer):
    """Makes trees in which tensors are `_Local` or `_Stored`, and dictionaries have their keys as they are.

    Modules, optimisers and the like become their state dicts; objects of types that cannot be stored stay.
    """

    def visit(self, node: Any, path: Path, depth: int, taken: Any = None) -> Any:
        if type(node) is _Stored:
            return node
        has_state = not isinstance(node, torch.Tensor | type) and callable(getattr(node, "state_dict", None))
        return super().visit(node.state_dict() if has_state else node, path, depth, taken)

    def _described(self, node: Any, path: Path, depth: int, taken: Any) -> Any:
        if isinstance(node, Unknown):
            return Unknown(
                node.name, *(self.visit(part, path, depth + 1) for part in (node.args, node.state, node.items))
            )
        return _local(node) if _is_distributed(node) else super()._described(node, path, depth, taken)

    def _own_tensor(self, tensor: Any, path: Path) -> Any:
        return super()._own_tensor(tensor, path) and _local(tensor)

    def _torch_tensor(self, tensor: Any, path: Path) -> Any:
        super()._torch_tensor(tensor, path)  # It raises an error where memory was freed.
        return _local(tensor)

    def _array(self, array: Any, path: Path) -> Any:
        dtype = array.dtype.newbyteorder("=")
        native = array.astype(dtype, "C", copy=not array.flags.writeable)
        native = native if dtype.name in NATIVE else native.view(f"u{dtype.itemsize}")
        return _local(torch.from_numpy(native).view(torch_dtype(dtype.name)))

    def _keep(self, found: Any) -> Any:
        return found

    def _key(self, key: Any, path: Path) -> Any:
        return key

    def _mapping(self, node: Any, path: Path, depth: int, taken: Any) -> Any:
        return {key: self._item(value, key, path, depth, taken) for key, value in dict(node).items()}

    def _attributes(self, tensor: Any, path: Path, depth: int) -> Any:
        return self._mapping(vars(tensor), path, depth, {})

    def _unknown(self, node: Any, problem: str) -> Any:
        if isinstance(node, Mapping):
            return self._mapping(node, (), 0, {})
        is_dense = isinstance(node, torch.Tensor) and node.layout == torch.strided and not node.is_nested
        return _local(node) if is_dense and not (node.is_meta or node.is_quantized) else node


def _named(state: Any, files: Collection[str]) -> dict[str, Any]:
    """Return tensors and values of a state by their paths in `ckstore ls`; `files` are keys, as of a directory."""
    tree = _Parts(is_pickling=False, is_outlining=False).visit(state, (), 0)
    parts = tree if files and isinstance(tree, dict) else {"": tree}
    paths = [tuple(key.split("/")) if key in files else (_segment(key),) * bool(files) for key in parts]
    leaves = [leaf for path, part in zip(paths, parts.values(), strict=True) for leaf in _leaves(part, path)]
    return dict(zip(texts_of([path for path, _ in leaves]), [leaf for _, leaf in leaves], strict=True))


def _leaves(node: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return tensors and values of a tree; an object without tensors is one value: its parts by their paths."""
    found: list[tuple[Path, Any]] = []
    if isinstance(node, Unknown) and node.name == ATTRIBUTED:
        found += _leaves((node.args or ())[0], path)
        node = node.state or {}
    if not isinstance(node, _NODES):
        return [(path or ROOT, node)]
    taken: dict[Segment, int] = {}
    # Plain values get the segments that the others, which have them in the file, leave.
    for key, part in sorted(_parts(node), key=lambda part: type(part[1]) in PLAIN):
        found += _leaves(part, (*path, free(_segment(key), taken)))
    if isinstance(node, Unknown) and not any(isinstance(leaf, _Local | _Stored) for _, leaf in found):
        return [(path, dict(found))]
    return found


def _parts(node: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a node with their keys, in the order of a file's."""
    if isinstance(node, dict):
        return list(node.items())
    if not isinstance(node, Unknown):
        return list(enumerate(node or ()))
    args, state, items = list(node.args or ()), node.state, node.items
    inner = args.pop() if node.name == FROM_TYPE and len(args) == 4 else None
    is_named = all(type(item) is tuple and len(item) == 2 and type(item[0]) in (str, int) for item in items)
    return [
        ("class", node.name),
        *(_parts(state) if isinstance(state, _NODES) else [("state", state)]),
        *enumerate(args), *_parts(inner), *(items if is_named else enumerate(items)),
    ]  # fmt: skip


def _segment(key: Any) -> Segment:
    return key if type(key) in (str, int) else repr(key)


def _is_distributed(value: Any) -> bool:
    return type(value).__name__ == "DTensor" and type(value).__module__ == "torch.distributed.tensor"


def _local(value: torch.Tensor) -> _Local:
    """Return this process's elements of a tensor."""
    shape, first = tuple(value.shape), (0,) * value.ndim
    cut: Any = value
    if _is_distributed(value):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, first = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
        value = cut.to_local()
    value = value.detach().resolve_conj().resolve_neg()
    return _Local(value, str(value.dtype).removeprefix("torch."), shape, tuple(first))


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Return the place of a tensor in memory: files of weights have one of several tied names."""
    if not isinstance(tensor, _Local):
        return None
    return tensor.value.data_ptr(), tensor.value.device, tensor.dtype, tensor.shape, tensor.value.stride()


def _is_same(before: Any, now: Any) -> bool:
    """Return whether two values are of one type and equal; NaN equals itself."""
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(value, now[path]) for path, value in before.items())
    if isinstance(before, _Local) and isinstance(now, _Local):  # An array within a pickle.
        return before.bytes(0, before.value.numel()) == now.bytes(0, now.value.numel())
    try:
        return type(before) is type(now) and bool(before == now or (before != before and repr(before) == repr(now)))
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
