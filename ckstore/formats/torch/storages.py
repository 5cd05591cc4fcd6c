"""Cuts the storages of a torch file into extents, and places every tensor in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from operator import attrgetter, itemgetter
from typing import Any

from msgspec import Struct

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import Extent, Path, Tensor, memory_shape

MAX_RANK = 64


class StorageData(Struct, frozen=True, gc=False):
    """The place of a storage's bytes in its file; its dtype is None if only the views have one."""

    key: str
    dtype: str | None
    start: int
    nbytes: int


#: A tensor as the file describes it, with the key of its storage: `offset` counts from the storage's beginning.
View = tuple[str, Tensor]


class _Placed(Struct, eq=False):
    """A tensor with its number and the bytes [low, high) of its storage that it spans."""

    number: int
    tensor: Tensor
    storage: StorageData
    low: int
    high: int


def cut(storages: Iterable[StorageData], views: list[View]) -> tuple[list[Extent], list[Tensor | None]]:
    """Return the extents of all storages, sorted by their place in the file, and the tensor of every view.

    A view that is dense in some order of its dimensions, and that does not overlap with others or contains them,
    becomes an extent of its own shape (in memory order). Views that overlap otherwise or have holes share one extent of
    shape `(count,)` over their whole span. Bytes without a view become extents of the storage's dtype. No extent can
    hold views of several item sizes: the others are None. Raises `InputError` if a view leaves its storage, or refers
    to none.
    """
    by_key = {storage.key: storage for storage in storages}
    tensors: list[Tensor | None] = [None] * len(views)
    viewed: dict[str, list[_Placed]] = {}
    times = Counter(map(itemgetter(0), views))
    #: Tensors that are all that a storage holds; there may be very many, of few forms, that is, shapes of extents.
    alone: dict[str, int] = {}
    whole: list[tuple[int, ...] | None] = []
    shapes: dict[Any, tuple[int, ...] | None] = {}
    for number, (key, tensor) in enumerate(views):
        storage = by_key.get(key)
        if storage is None:
            raise InputError(f"a tensor refers to storage {key!r}, which the file does not hold")
        form = tensor.dtype, tensor.shape, tensor.strides, tensor.offset, storage.nbytes
        if form not in shapes:
            shapes[form] = _shape_of_all(_place(number, tensor, storage))
        whole.append(shapes[form])
        if whole[number] is not None and times[key] == 1:
            alone[key] = number
        elif (view := _place(number, tensor, storage)) is None:
            tensors[number] = Tensor(tensor.path, tensor.dtype, tensor.shape, tensor.strides, -1, 0, tensor.marks)
        else:
            viewed.setdefault(key, []).append(view)
    extents: list[Extent] = []
    groups: dict[int, list[_Placed]] = {}
    for storage in sorted(by_key.values(), key=attrgetter("start")):
        shape = None if (alone_in := alone.get(storage.key)) is None else whole[alone_in]
        if alone_in is None or shape is None:
            _cut_storage(storage, viewed.get(storage.key, []), extents, groups)
            continue
        held = views[alone_in][1]
        tensors[alone_in] = Tensor(held.path, held.dtype, held.shape, held.strides, len(extents), 0, held.marks)
        extents.append(Extent(storage.start, held.dtype, shape, held.path))
    for index, group in groups.items():
        item = ITEM_SIZES[extents[index].dtype]
        for one in group:
            if ITEM_SIZES[one.tensor.dtype] == item:
                offset = (one.storage.start + one.low - extents[index].start) // item
                held = one.tensor
                tensors[one.number] = Tensor(held.path, held.dtype, held.shape, held.strides, index, offset, held.marks)
    return extents, tensors


def _shape_of_all(view: _Placed | None) -> tuple[int, ...] | None:
    """Return the shape of the extent of a tensor that spans its storage; None for any other one."""
    if view is None or view.low or view.high < view.storage.nbytes:
        return None
    return _group_extent(0, [view], 0, view.high).shape


def _place(number: int, tensor: Tensor, storage: StorageData) -> _Placed | None:
    """Return the bytes that a tensor spans; None for one without elements."""
    shape, strides, item = tensor.shape, tensor.strides, ITEM_SIZES[tensor.dtype]
    if len(shape) != len(strides) or len(shape) > MAX_RANK or tensor.offset < 0:
        raise InputError(f"a tensor in storage {storage.key!r} has no possible shape, strides or offset")
    last = 0
    empty = False
    for size, stride in zip(shape, strides, strict=True):
        if size < 0 or stride < 0 or size >= 1 << 63 or stride >= 1 << 63:
            raise InputError(f"a tensor in storage {storage.key!r} has a negative or implausible size")
        if size == 0:
            empty = True
        last += (size - 1) * stride
    if empty:
        return None
    low = tensor.offset * item
    high = low + (last + 1) * item
    if high > storage.nbytes == 0:
        raise InputError(
            f"the memory of storage {storage.key!r} was freed before it was saved, as FSDP frees parameters; save"
            " gathered ones"
        )
    if high > storage.nbytes:
        raise InputError(f"a tensor exceeds storage {storage.key!r}")
    return _Placed(number, tensor, storage, low, high)


def _cut_storage(
    storage: StorageData, placed: list[_Placed], extents: list[Extent], groups: dict[int, list[_Placed]]
) -> None:
    """Append the extents of one storage; add the views in them by their numbers."""
    dtype = storage.dtype or (placed[0].tensor.dtype if placed else "uint8")
    prefix = (*placed[0].tensor.path, "__rest__") if placed else ("__storage__", storage.key)
    position = rest = 0
    for group, low, high in _groups(placed):
        if low > position:
            _append_rest(storage, dtype, position, low, (*prefix, rest), extents)
            rest += 1
        groups[len(extents)] = group
        extents.append(_group_extent(storage.start, group, low, high))
        position = high
    if storage.nbytes > position:
        path = (*prefix, rest) if placed else prefix
        _append_rest(storage, dtype, position, storage.nbytes, path, extents)


def _groups(placed: list[_Placed]) -> Iterable[tuple[list[_Placed], int, int]]:
    """Group views that overlap; each group's views are in the order of the file's tensors."""
    if len(placed) > 1:
        placed = sorted(placed, key=lambda one: (one.low, -one.high, one.number))
    group: list[_Placed] = []
    low = high = 0
    for one in placed:
        if group and one.low >= high:
            yield group, low, high
            group = []
        if not group:
            low, high = one.low, one.high
        group.append(one)
        high = max(high, one.high)
    if group:
        yield group, low, high


def _group_extent(start: int, group: list[_Placed], low: int, high: int) -> Extent:
    for one in group:
        if one.low == low and one.high == high:
            shape = memory_shape(one.tensor.shape, one.tensor.strides)
            if shape is not None and prod(shape) * ITEM_SIZES[one.tensor.dtype] == high - low:
                return Extent(start + low, one.tensor.dtype, shape, one.tensor.path)
    first = min(group, key=lambda one: one.number).tensor
    dtype = first.dtype
    if len({ITEM_SIZES[one.tensor.dtype] for one in group}) > 1:
        # Views begin at multiples of their own item size, so the smallest size fits them all.
        dtype = min((one.tensor.dtype for one in group), key=lambda name: (ITEM_SIZES[name], name != first.dtype))
    return Extent(start + low, dtype, ((high - low) // ITEM_SIZES[dtype],), first.path)


def _append_rest(storage: StorageData, dtype: str, low: int, high: int, path: Path, extents: list[Extent]) -> None:
    item = ITEM_SIZES[dtype]
    if low % item or high % item:
        dtype, item = "uint8", 1
    extents.append(Extent(storage.start + low, dtype, ((high - low) // item,), path))
