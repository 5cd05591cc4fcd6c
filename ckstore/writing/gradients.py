"""Gradients for the scheme that ranks weights: read like a checkpoint, a part at a time."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np

from ckstore.codecs.codebook import Floats
from ckstore.codecs.lattice import FLOATS
from ckstore.dtypes import ITEM_SIZES, bits_dtype, resolve_views
from ckstore.errors import InputError, UsageError
from ckstore.formats.layout import Tensor, TensorRef
from ckstore.formats.paths import path_to_text
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
    sizes
        The numbers of elements, by path.

    Raises
    ------
    InputError
        The file is damaged or does not exist.
    UsageError
        The source holds anything but tensors of floats.
    """

    def __init__(self, source: Any, store: Path) -> None:
        self._scanned = open_source(source, store, force=False)
        self._lock = Lock()
        try:
            if self._scanned.is_directory:
                raise InputError(f"{os.fspath(source)} is a directory; give one file of gradients.")
            [self._file] = self._scanned.files
            _check_tree(self._file.layout.tree)
            self._tensors = {_path_of(one): one for one in self._file.layout.tensors}
            for path, tensor in self._tensors.items():
                extents = self._file.layout.extents
                held = extents[tensor.extent].count if tensor.extent >= 0 else 0
                if tensor.dtype not in FLOATS or prod(tensor.shape) > held:
                    raise UsageError(f"The gradient of {path} is not an array of floats; give a tensor of its shape.")
        except BaseException:
            self._scanned.close()
            raise
        self.sizes = {path: prod(tensor.shape) for path, tensor in self._tensors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._scanned.close()

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def read(self, path: str, first: int, last: int) -> Floats:
        """Return the elements from `first` to before `last` of a gradient, in C order, as float32."""
        tensor = self._tensors[path]
        if tensor.is_adjacent:
            bits = self._elements(tensor, tensor.offset + first, tensor.offset + last)
        else:
            wanted = [range(size) for size in tensor.shape]
            bits = gather(
                lambda low, high: self._elements(tensor, low, high),
                bits_dtype(tensor.dtype), tensor.offset, tensor.strides, wanted,
            ).reshape(-1)[first:last]  # fmt: skip
            resolve_views(bits, tensor.dtype, tensor.lazy)
        if tensor.dtype == "float32":
            return bits.view(np.float32)
        values = to_float64(bits, tensor.dtype)
        assert values is not None, "it is a float"
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


def _path_of(tensor: Tensor) -> str:
    """Return the path of a gradient: a lone name is a path already."""
    return str(tensor.path[0]) if len(tensor.path) == 1 else path_to_text(tensor.path)


def _check_tree(node: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise `UsageError` if there is anything but tensors in containers."""
    if isinstance(node, TensorRef):
        return
    if not isinstance(node, dict | list | tuple):
        name = "/".join(map(str, path)) or "the tensors"
        raise UsageError(f"The gradient of {name} is not an array of floats; give a tensor of its shape.")
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
        _check_tree(inner, (*path, key))
