"""Tensors in several files: whether shards fit together, and their whole tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from ckstore.formats.layout import FileLayout, Path, Tensor, memory_shape, row_major

#: A shard, and the number of its file.
Shard = tuple[int, Tensor]


def directory_of(path: str) -> str:
    """Return the directory of a version's file, the prefix of the names of its shards.

    Examples
    --------
    >>> directory_of("a/b.distcp"), directory_of("b.distcp")
    ('a/', '')
    """
    return path[: path.rfind("/") + 1]


def gather_shards(files: Iterable[tuple[str, FileLayout]]) -> dict[tuple[str, Path], list[Shard]]:
    """Return the shards of each tensor, by directory and typed path, of a version's files by path."""
    found: dict[tuple[str, Path], list[Shard]] = {}
    for number, (name, layout) in enumerate(files):
        for tensor in layout.tensors:
            if tensor.box is not None:
                found.setdefault((directory_of(name), tensor.path), []).append((number, tensor))
    return found


def fit_together(shards: Sequence[Tensor]) -> bool:
    """Return whether shards belong to one tensor, lie in it, and have its number of elements."""
    first = shards[0]
    count = 0
    for one in shards:
        if one.box is None or first.box is None or (one.box.whole, one.dtype) != (first.box.whole, first.dtype):
            return False
        if not len(one.shape) == len(one.box.first) == len(one.box.whole):
            return False
        ends = (start + size for start, size in zip(one.box.first, one.shape, strict=True))
        if any(end > whole for end, whole in zip(ends, one.box.whole, strict=True)):
            return False
        count += prod(one.shape)
    return first.box is not None and count == prod(first.box.whole)


def join(shards: Sequence[Shard]) -> Tensor:
    """Return the tensor that shards make up."""
    _, first = shards[0]
    whole = () if first.box is None else first.box.whole
    return Tensor(first.path, first.dtype, whole, row_major(whole), -1, 0, shards=tuple(shards))


def slabs(shards: Sequence[Shard], layouts: Sequence[FileLayout]) -> list[Shard] | None:
    """Return the shards in the order in which their elements follow each other in the tensor, as in FSDP.

    None if elements of one lie between elements of others, or if their extents hold more.
    """
    filled = [(file, shard) for file, shard in shards if 0 not in shard.shape]
    filled.sort(key=lambda one: one[1].box.first if one[1].box is not None else ())
    row = 0
    for file, shard in filled:
        extent = layouts[file].extents[shard.extent]
        if shard.box is None or extent.shape != shard.shape or extent.dtype != shard.dtype or shard.lazy:
            return None
        if memory_shape(shard.shape, shard.strides) != shard.shape:
            return None
        if shard.shape and (shard.box.first[0] != row or shard.shape[1:] != shard.box.whole[1:]):
            return None
        row += shard.shape[0] if shard.shape else 1
    return filled or None
