"""Gathers elements of a strided tensor from a flat extent, and reads few other elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ckstore.errors import CkstoreError

Array = npt.NDArray[Any]

#: The wanted positions along one axis: ascending, or a range of any direction.
Selection = range | npt.NDArray[np.int64]

#: Reads the elements from the first to before the second position of an extent, as a new flat array.
Read = Callable[[int, int], Array]

#: Gap in elements between wanted ones that is skipped; smaller gaps are read.
GAP = 1 << 15

#: Elements that are read at once if fewer than half of them are wanted.
SPARSE = 1 << 21


def gather(read: Read, dtype: np.dtype[Any], offset: int, strides: Sequence[int], wanted: Sequence[Selection]) -> Array:
    """Return the elements at all combinations of positions, as a new contiguous array of one axis for each of `wanted`.

    The tensor lies at `offset` in the extent, in elements; its `strides` are not negative.
    """
    shape = tuple(len(positions) for positions in wanted)
    if 0 in shape:
        return np.empty(shape, dtype)
    low, high = _span(offset, strides, wanted)
    if high - low == prod(shape) and _is_dense(strides, wanted):
        return read(low, high).reshape(shape)
    try:
        out = np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:  # Strides of 0 repeat a few elements any number of times.
        raise CkstoreError(f"{shape} elements do not fit into memory; read a part of them.") from error
    for first, last, place, part in _stretches(offset, strides, list(wanted)):
        _select(out[place], read(first, last), strides, part)
    return out


def stretches(offset: int, strides: Sequence[int], wanted: Sequence[Selection]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of the extent that `gather` reads: the first element, and the one after the last."""
    if all(len(positions) for positions in wanted):
        for first, last, _, _ in _stretches(offset, strides, list(wanted)):
            yield first, last


def _is_dense(strides: Sequence[int], wanted: Sequence[Selection]) -> bool:
    """Return whether the wanted elements are adjacent in C order."""
    step = 1
    for stride, positions in zip(reversed(strides), reversed(wanted), strict=True):
        if len(positions) == 1:
            continue
        if not isinstance(positions, range) or stride * positions.step != step:
            return False
        step *= len(positions)
    return True


def _span(offset: int, strides: Sequence[int], wanted: Sequence[Selection]) -> tuple[int, int]:
    """Return the index of the first wanted element, and the index after the last."""
    low = high = offset
    for stride, positions in zip(strides, wanted, strict=True):
        first, last = int(positions[0]), int(positions[-1])
        low += stride * min(first, last)
        high += stride * max(first, last)
    return low, high + 1


#: A stretch of the extent, and the wanted elements in it: their place in the result, and positions along each axis.
_Stretch = tuple[int, int, tuple[slice, ...], list[Selection]]


def _stretches(offset: int, strides: Sequence[int], wanted: list[Selection]) -> Iterator[_Stretch]:
    low, high = _span(offset, strides, wanted)
    reaches = [
        stride * abs(int(positions[-1]) - int(positions[0])) for stride, positions in zip(strides, wanted, strict=True)
    ]
    for axis in sorted(range(len(wanted)), key=lambda axis: -reaches[axis]):
        cuts = _cuts(wanted[axis], strides[axis], sum(reaches) - reaches[axis])
        if cuts:
            yield from _in_parts(offset, strides, wanted, axis, cuts)
            return
    if high - low > max(SPARSE, 2 * prod(map(len, wanted))):
        axis = max(range(len(wanted)), key=lambda axis: reaches[axis])
        yield from _in_parts(offset, strides, wanted, axis, [len(wanted[axis]) // 2])
        return
    yield low, high, tuple(slice(0, len(positions)) for positions in wanted), wanted


def _select(out: Array, flat: Array, strides: Sequence[int], wanted: list[Selection]) -> None:
    """Copy the wanted elements of a stretch: of the box over the range of every axis."""
    starts = [min(int(positions[0]), int(positions[-1])) for positions in wanted]
    lengths = [abs(int(p[-1]) - int(p[0])) + 1 for p in wanted]
    item = flat.dtype.itemsize
    box = as_strided(flat, tuple(lengths), tuple(stride * item for stride in strides), writeable=False)
    if all(isinstance(positions, range) for positions in wanted):
        out[...] = box[tuple(_slice(p, s) for p, s in zip(wanted, starts, strict=True) if isinstance(p, range))]
    else:
        out[...] = box[np.ix_(*(np.asarray(p, np.int64) - s for p, s in zip(wanted, starts, strict=True)))]


def _slice(positions: range, start: int) -> slice:
    stop = positions[-1] - start + (1 if positions.step > 0 else -1)
    return slice(positions[0] - start, stop if stop >= 0 else None, positions.step)


def _cuts(positions: Selection, stride: int, inner: int) -> list[int]:
    """Return the positions after which an axis is cut, since the gaps there exceed `inner` elements."""
    if len(positions) < 2 or stride == 0:
        return []
    if isinstance(positions, range):
        worthwhile = stride * abs(positions.step) - inner - 1 >= GAP
        return list(range(1, len(positions))) if worthwhile else []
    gaps = np.diff(positions) * stride - inner - 1
    return [int(cut) + 1 for cut in np.flatnonzero(gaps >= GAP)]


def _in_parts(
    offset: int, strides: Sequence[int], wanted: list[Selection], axis: int, cuts: list[int]
) -> Iterator[_Stretch]:
    positions = wanted[axis]
    for first, last in zip([0, *cuts], [*cuts, len(positions)], strict=True):
        part = list(wanted)
        part[axis] = positions[first:last]
        for low, high, place, inner in _stretches(offset, strides, part):
            moved = slice(first + place[axis].start, first + place[axis].stop)
            yield low, high, (*place[:axis], moved, *place[axis + 1 :]), inner
