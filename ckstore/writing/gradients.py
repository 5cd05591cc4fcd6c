"""Gradients for the scheme that ranks weights: read like a checkpoint, a part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
from msgspec.structs import replace

from ckstore.codecs.codebook import Floats
from ckstore.codecs.lattice import FLOATS
from ckstore.dtypes import ITEM_SIZES, bits_dtype, resolve_views
from ckstore.errors import InputError, UsageError
from ckstore.formats.layout import Tensor
from ckstore.formats.paths import path_to_text
from ckstore.formats.trees import tensor_of
from ckstore.reading.gather import Array, gather
from ckstore.reading.real_values import to_float64
from ckstore.scanning.inputs import open_source


class Gradients:
    """The gradients of tensors, in a state dict or a file.

    Parameters
    ----------
    source
        Gradients by the paths of their tensors, or nested as in the state; or the path of a file of either.
    store
        Directory of the store, which the source does not contain.

    Attributes
    ----------
    shapes
        The shapes, by path.

    Raises
    ------
    InputError
        The file is damaged or does not exist.
    UsageError
        The source holds anything but tensors of floats.
    """

    def __init__(self, source: Any, store: Path) -> None:
        # Pickles of other objects are refused below, by a message that names gradients.
        self._scanned = open_source(
            {} if source is None else source, store, force=False, on_unknown="pickle", allow_empty=True
        )
        self._lock = Lock()
        try:
            if self._scanned.is_directory:
                raise InputError(f"{os.fspath(source)} is a directory; give one file of gradients.")
            [self._file] = self._scanned.files
            check_tree(self._file.layout.tree)
            self._tensors = {_path_of(one): one for one in self._file.layout.tensors}
            for path, tensor in self._tensors.items():
                extents = self._file.layout.extents
                held = extents[tensor.extent].count if tensor.extent >= 0 else 0
                if tensor.dtype not in FLOATS or prod(tensor.shape) > held:
                    raise UsageError(f"The gradient of {path} is not an array of floats; give a tensor of its shape.")
        except BaseException:
            self._scanned.close()
            raise
        self.shapes = {path: tensor.shape for path, tensor in self._tensors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._scanned.close()

    def __bool__(self) -> bool:
        return bool(self.shapes)

    def read(self, path: str, axes: Sequence[int], first: int, last: int) -> Floats:
        """Return the elements from `first` to before `last` of a gradient, in C order of `axes`, as float32."""
        given = self._tensors[path]
        shape, strides = (tuple(sizes[axis] for axis in axes) for sizes in (given.shape, given.strides))
        tensor = replace(given, shape=shape, strides=strides)
        if tensor.is_adjacent:
            bits = self._elements(tensor, tensor.offset + first, tensor.offset + last)
        else:
            dtype = bits_dtype(tensor.dtype)
            bits = np.concatenate([
                gather(partial(self._elements, tensor), dtype, tensor.offset, strides, wanted).reshape(-1)[inside]
                for wanted, inside in _boxes(shape, first, last)
            ])  # fmt: skip
            resolve_views(bits, tensor.dtype, tensor.lazy)
        if tensor.dtype == "float32":
            return bits.view(np.float32)
        values = to_float64(bits, tensor.dtype)
        with np.errstate(over="ignore"):
            return values.astype(np.float32)

    def _elements(self, tensor: Tensor, low: int, high: int) -> Array:
        """Return the bits of elements of a tensor's extent, writable."""
        size = ITEM_SIZES[tensor.dtype]
        bits = np.empty(high - low, bits_dtype(tensor.dtype))
        start = self._file.layout.extents[tensor.extent].start
        with self._lock:
            self._file.source.read_into(start + low * size, memoryview(bits).cast("B"))
        return bits


def _boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[list[range], slice]]:
    """Yield positions that hold the elements from `first` to before `last` in C order, and their place among these.

    The positions are of at most about three times as many elements.
    """
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) > last - first:
        axis += 1
    row = prod(shape[axis + 1 :])
    size = row * prod(shape[axis : axis + 1])
    for outer in range(first // size, -(-last // size)):
        low, high = max(first - outer * size, 0), min(last - outer * size, size)
        rows = [range(low // row, -(-high // row))] if shape else []
        above = [range(int(index), int(index) + 1) for index in np.unravel_index(outer, tuple(shape[:axis]))]
        yield [*above, *rows, *map(range, shape[axis + 1 :])], slice(low - low // row * row, high - low // row * row)


def _path_of(tensor: Tensor) -> str:
    """Return the path of a gradient: a lone name is a path already."""
    return str(tensor.path[0]) if len(tensor.path) == 1 else path_to_text(tensor.path)


def check_tree(node: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise `UsageError` if there is anything but tensors in containers."""
    if tensor_of(node) is not None:
        return
    if not isinstance(node, dict | list | tuple):
        name = "/".join(map(str, path)) or "the tensors"
        raise UsageError(f"The gradient of {name} is not an array of floats; give a tensor of its shape.")
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
        check_tree(inner, (*path, key))
