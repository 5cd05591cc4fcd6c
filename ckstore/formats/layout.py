"""The layout of a file, common to all formats: extents of tensor data, tensors as views into them, skeleton."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from ckstore.dtypes import ITEM_SIZES

Segment = str | int
Path = tuple[Segment, ...]

#: Further properties of a tensor: its values are the complex conjugates or the negatives of the stored ones, it is a
#: `torch.nn.Parameter`, it requires a gradient, it was a NumPy array. `Tensor.marks` keeps this order.
MARKS = ("conj", "neg", "parameter", "requires_grad", "array")

#: Kinds of files.
KINDS = (
    "torch-zip", "torch-legacy", "safetensors", "npy", "npz", "gguf", "msgpack", "hdf5", "zip", "dcp", "dcp-metadata",
    "opaque",
)  # fmt: skip

#: Above the number of axes of any tensor.
MOST_AXES = 256


class Source(Protocol):
    """Random access to the bytes of one file, real or synthetic."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A leaf of a tree: the index of a tensor in `FileLayout.tensors`."""

    index: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A node of a tree that is neither a plain container nor a plain value: an object whose class is never imported.

    Attributes
    ----------
    name
        `module.qualname` of the class or callable as the stream names it.
    args
        Constructor arguments, as trees; None for a class or function that is named but not called.
    state
        The stream's argument for `__setstate__` or `__dict__`, as a tree; None without state.
    items
        List items or dictionary pairs appended by the stream, as a list of trees (pairs are 2-tuples).
    """

    name: str
    args: tuple[Any, ...] | None = ()
    state: Any = None
    items: tuple[Any, ...] = ()


def like(mapping: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dictionary of the kind of another one (`dict`, `OrderedDict`, `defaultdict`), without its attributes."""
    if isinstance(mapping, defaultdict):
        return defaultdict(mapping.default_factory, pairs)
    return OrderedDict(pairs) if isinstance(mapping, OrderedDict) else dict(pairs)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of an array whose last axis is contiguous.

    Examples
    --------
    >>> row_major((4, 0, 3))
    (3, 3, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run of elements of one dtype in a file: the data of one tensor or of the rest of a storage.

    Extents of a layout are sorted by `start` and do not overlap.

    Attributes
    ----------
    start
        Offset of the first byte in the file.
    dtype
        A key of `ITEM_SIZES`; elements are little-endian.
    shape
        The shape in memory order of the tensor that the extent was cut for, or `(count,)`.
    path
        Typed path of the first tensor that views it; versions are matched by it.
    """

    start: int
    dtype: str
    shape: tuple[int, ...]
    path: Path

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def stop(self) -> int:
        """The offset after the last byte in the file."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Box:
    """The place of a shard in its tensor.

    Attributes
    ----------
    first
        The shard's first element, axis by axis.
    whole
        The shape of the whole tensor.
    """

    first: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named view into an extent; tied tensors share one.

    Attributes
    ----------
    path
        Typed path: string segments for names, integers for integer keys and list positions.
    dtype
        The view's dtype; equal to its extent's item size, mostly to its dtype.
    shape, strides
        In elements. An empty tensor has `extent` -1.
    extent
        Index into `FileLayout.extents`, or -1 for a tensor without elements.
    offset
        First element, in elements of the extent.
    marks
        Some of `MARKS`.
    box
        For a shard of a checkpoint in several files: its place in the tensor of its path. Such paths begin at the
        directory of the file rather than at the file.
        shards
            For a tensor assembled from shards: the shards with the numbers of their files. No layout contains such a
            tensor; its `extent` is -1.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int
    offset: int
    marks: tuple[str, ...] = ()
    box: Box | None = None
    shards: tuple[tuple[int, Tensor], ...] = ()

    @property
    def lazy(self) -> tuple[str, ...]:
        """The marks that change values: `conj`, `neg`, both or none."""
        return tuple(mark for mark in self.marks if mark in ("conj", "neg"))

    def places(self, file: int) -> list[tuple[int, int]]:
        """Return (file, extent) of all its elements; `file` is the number of the tensor's own file."""
        if self.shards:
            return [(number, shard.extent) for number, shard in self.shards if shard.extent >= 0]
        return [(file, self.extent)] if self.extent >= 0 else []


@dataclass(frozen=True, slots=True)
class Checked:
    """A stretch of the file with a CRC-32 in the container, little-endian, at one or more places of the skeleton.

    Ingest compares the CRCs; the manifest keeps them as zeros; checkout computes them again. A stretch may contain
    others, which precede it in the layout; those contain none.
    """

    name: str
    start: int
    stop: int
    positions: tuple[int, ...]


@dataclass(slots=True)
class FileLayout:
    """One parsed file.

    Attributes
    ----------
    kind
        One of `KINDS`.
    size
        Size of the file in bytes.
    extents, tensors, checked
        Bytes outside of extents are the skeleton.
    tree
        The nested structure with `TensorRef` leaves, `Unknown` nodes, plain containers (dict, list, tuple, set,
        frozenset, `collections.OrderedDict`, `collections.defaultdict` of a built-in class) and plain values; for
        safetensors, npz and gguf a flat dict, for npy its one tensor; None without tensors.
    facts
        The file's own facts: `step`, `epoch` (integers), if its top level or its metadata has them.
    bytes_for
        Why parts of the file, by name, are bytes rather than tensors.
    """

    kind: str
    size: int
    extents: list[Extent] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    tree: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    bytes_for: dict[str, str] = field(default_factory=dict)
