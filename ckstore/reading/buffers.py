"""Decodes ranges of a version's extents into existing buffers, with several threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ckstore.codecs.lattice import Bits, part_dtype
from ckstore.dtypes import bits_dtype, resolve_views
from ckstore.formats.layout import Tensor
from ckstore.reading.gather import Selection, gather, stretches
from ckstore.runtime.threads import shared, worker_count

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Bytes = npt.NDArray[np.uint8]

#: Number of chunks above which other threads pay.
_POOLED = 3


class Destination(Struct, frozen=True, gc=False):
    """A range of elements in an extent of a file, and the writable bytes that they are decoded to."""

    file: int
    extent: int
    first: int
    last: int
    out: Bytes


def fill(
    version: StoredVersion,
    requests: Iterable[Destination],
    progress: Callable[[int], None] | None = None,
    *,
    keep: bool = True,
) -> None:
    """Fill all destinations; decode each chunk once. With `keep`, chunks stay in the store's cache.

    `progress` is called with numbers of bytes that were filled, by this thread.
    """
    places: dict[tuple[int, int], list[tuple[int, int, Bytes]]] = {}
    sizes = version.contents.item_sizes
    place, parts = (-1, -1), list[tuple[int, int, Bytes]]()
    for request in requests:
        position = 0
        for number, chunk, start, stop in version.contents.cover(
            request.file, request.extent, request.first, request.last
        ):
            nbytes = (stop - start) * sizes[number]
            if (number, chunk) != place:
                place = number, chunk
                parts = places.setdefault(place, [])
            parts.append((start, stop, request.out[position : position + nbytes]))
            position += nbytes

    version.prefetch(places)

    def work(place: tuple[int, int]) -> int:
        parts = places[place]
        target = None if keep else _whole(version, place, parts)
        bits = version.chunk(*place, keep=keep, out=target)
        if bits is not target:
            data, size = bits.view(np.uint8), bits.itemsize
            for start, stop, out in parts:
                out[...] = data[start * size : stop * size]
        return sum([out.size for _, _, out in parts])

    workers = worker_count() if len(places) >= _POOLED else 1
    for nbytes in shared(work, places, workers):
        if progress is not None:
            progress(nbytes)


def read(version: StoredVersion, file: int, extent: int, first: int, last: int) -> npt.NDArray[Any]:
    """Return the elements from `first` to before `last` of an extent, bit for bit, as a new array."""
    version.require(file, extent)
    dtype = bits_dtype(version.layout.files[file].extents[extent].dtype)
    if version.is_computed:
        return np.frombuffer(version.read_extent(file, extent, first, last), dtype)
    out = np.empty(last - first, dtype)
    fill(version, [Destination(file, extent, first, last, out.view(np.uint8))])
    return out


def read_tensor(version: StoredVersion, file: int, tensor: Tensor, wanted: Sequence[Selection]) -> npt.NDArray[Any]:
    """Return the elements of a tensor at combinations of positions, as unsigned integers (complex128: 16 raw bytes).

    `wanted` has a range, or ascending positions, for each axis; see `ckstore.reading.gather.gather`.
    """
    dtype = bits_dtype(tensor.dtype)
    if tensor.shards:
        return _from_shards(version, tensor, wanted)
    if tensor.extent < 0 or any(len(positions) == 0 for positions in wanted):
        return np.empty([len(positions) for positions in wanted], dtype)

    def stretch(first: int, last: int) -> npt.NDArray[Any]:
        return read(version, file, tensor.extent, first, last).view(dtype)

    found = gather(stretch, dtype, tensor.offset, tensor.strides, wanted)
    resolve_views(found, tensor.dtype, tensor.lazy)
    return found


def prefetch_parts(version: StoredVersion, parts: Iterable[tuple[Tensor, int, Sequence[Selection]]]) -> None:
    """Prefetch parts of tensors, given as (tensor, file, positions): few requests of a remote store fetch them all."""
    cover = version.contents.cover
    version.prefetch(
        (number, chunk)
        for tensor, file, wanted in parts
        for inner, place, positions in _unsharded(tensor, file, wanted)
        for first, last in stretches(inner.offset, inner.strides, positions)
        for number, chunk, _, _ in cover(place, inner.extent, first, last)
    )


def _unsharded(
    tensor: Tensor, file: int, wanted: Sequence[Selection]
) -> Iterator[tuple[Tensor, int, Sequence[Selection]]]:
    """Yield a tensor, or those of its shards with wanted elements, with the positions in each."""
    if not tensor.shards and tensor.extent >= 0:
        yield tensor, file, wanted
    for place, shard in tensor.shards:
        if shard.box is not None:
            axes = zip(wanted, shard.box.first, shard.shape, strict=True)
            yield shard, place, [_within(positions, first, first + size)[1] for positions, first, size in axes]


def _from_shards(version: StoredVersion, tensor: Tensor, wanted: Sequence[Selection]) -> npt.NDArray[Any]:
    """Return the elements of a sharded tensor; read only the shards with wanted elements."""
    # Overlapping shards, which only damage produces, leave elements that no shard contains.
    found = np.zeros([len(positions) for positions in wanted], bits_dtype(tensor.dtype))
    for file, shard in tensor.shards:
        if shard.box is None:
            continue
        axes = [
            _within(positions, first, first + size)
            for positions, first, size in zip(wanted, shard.box.first, shard.shape, strict=True)
        ]
        inside = tuple(where for where, _ in axes)
        if all(where.start < where.stop for where in inside):
            found[inside] = read_tensor(version, file, shard, [positions for _, positions in axes])
    return found


def _within(positions: Selection, first: int, stop: int) -> tuple[slice, Selection]:
    """Return the slice of an axis's positions between two, and these positions relative to the first."""
    if isinstance(positions, range):
        if positions.step < 0:
            where, inner = _within(positions[::-1], first, stop)
            count = len(positions)
            assert isinstance(inner, range)
            return slice(count - where.stop, count - where.start), inner[::-1]
        low, high = bisect_left(positions, first), bisect_left(positions, stop)
        found = positions[low:high]
        return slice(low, high), range(found.start - first, found.stop - first, found.step)
    low, high = (int(place) for place in np.searchsorted(positions, [first, stop]))
    return slice(low, high), positions[low:high] - first


def _whole(version: StoredVersion, place: tuple[int, int], parts: list[tuple[int, int, Bytes]]) -> Bits | None:
    """Return the destination of a chunk if it is wanted whole and once, and suits the decoder."""
    if len(parts) > 1:
        return None
    number, chunk = place
    unit = version.layout.units[number]
    start, stop, out = parts[0]
    if start > 0 or stop < min(unit.chunk, unit.count - chunk * unit.chunk):
        return None
    bits: Bits = out.view(bits_dtype(part_dtype(unit.dtype)))
    return bits if bits.flags.aligned else None
