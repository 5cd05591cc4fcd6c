"""The positions that NumPy's indexing expressions select along each axis, so that only these are read."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.reading.gather import Selection

#: An axis whose positions are all read.
_ALL = slice(None)


def parse_key(key: Any, shape: tuple[int, ...]) -> tuple[list[Selection], tuple[Any, ...]]:
    """Split an indexing expression of NumPy into positions to read, and an index of the resulting array.

    Return the positions to read for each axis, and the expression that turns their box into the result. Raise
    `IndexError` as NumPy would.

    Examples
    --------
    >>> parse_key((..., 1, slice(None, None, -2)), (4, 5, 6))
    ([range(0, 4), range(1, 2), range(5, -1, -2)], (slice(None, None, None), 0, slice(None, None, None)))
    """
    wanted: list[Selection] = []
    rest: list[Any] = []
    for term in _expand(key, shape):
        if term is None or term is Ellipsis:
            rest.append(term)
            continue
        axis = len(wanted)
        size = shape[axis]
        if isinstance(term, slice):
            wanted.append(range(*term.indices(size)))
            rest.append(_ALL)
        elif isinstance(term, np.ndarray):
            positions, inverse = np.unique(_in_range(term, axis, size), return_inverse=True)
            wanted.append(positions)
            rest.append(inverse.reshape(term.shape))
        else:
            position = int(_in_range(np.array(term), axis, size))
            wanted.append(range(position, position + 1))
            rest.append(0)
    return wanted, tuple(rest)


def _expand(key: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return one slice, integer or integer array for each axis, None for an inserted one, and an ellipsis of none."""
    terms = [_term(item) for item in (key if isinstance(key, tuple) else (key,))]
    ellipses = [place for place, term in enumerate(terms) if term is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    taken = sum(_axes(term) for term in terms)
    if taken > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} axes, but {taken} were indexed")
    place = ellipses[0] if ellipses else len(terms)
    # An ellipsis of no axes stays: it separates index arrays.
    terms[place : place + 1] = [_ALL] * (len(shape) - taken) or terms[place : place + 1]
    expanded: list[Any] = []
    axis = 0
    for term in terms:
        if isinstance(term, np.ndarray) and term.dtype == np.bool:
            if term.shape != shape[axis : axis + term.ndim]:
                raise IndexError(f"a mask of shape {term.shape} does not fit the tensor's axes from {axis} on")
            expanded.extend(term.nonzero())
        else:
            expanded.append(term)
        axis += _axes(term)
    return expanded


def _axes(term: Any) -> int:
    """Return the number of axes that a term indexes."""
    if term is None or term is Ellipsis:
        return 0
    return term.ndim if isinstance(term, np.ndarray) and term.dtype == np.bool else 1


def _term(item: Any) -> Any:
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, int | np.integer) and not isinstance(item, bool):
        return operator.index(item)
    array = np.asarray(item)
    if array.size == 0 and not isinstance(item, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype.kind == "b" and array.ndim > 0:
        return array
    if array.dtype.kind not in "iu":
        raise IndexError("only integers, slices, ellipsis, None and arrays of integers or bools are valid indices")
    return array.astype(np.int64)


def _in_range(positions: npt.NDArray[np.int64], axis: int, size: int) -> npt.NDArray[np.int64]:
    """Return non-negative positions."""
    outside = (positions < -size) | (positions >= size)
    if outside.any():
        raise IndexError(f"index {positions[outside].flat[0]} is out of bounds for axis {axis} with size {size}")
    return np.where(positions < 0, positions + size, positions)
