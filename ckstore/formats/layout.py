"""What every container format is parsed into: extents of tensor data, tensors as views into them, skeleton."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from ckstore.dtypes import ITEM_SIZES

Segment = str | int
Path = tuple[Segment, ...]

#: What is noted of a tensor besides its place: its values are the complex conjugates or the negatives of the stored
#: ones, it is a `torch.nn.Parameter`, it wants a gradient, it was a NumPy array. `Tensor.marks` keeps this order.
MARKS = ("conj", "neg", "parameter", "requires_grad", "array")

#: Kinds of files.
KINDS = (
    "torch-zip", "torch-legacy", "safetensors", "npy", "npz", "gguf", "msgpack", "hdf5", "zip", "dcp", "dcp-metadata",
    "opaque",
)  # fmt: skip

#: More axes than any tensor has.
MOST_AXES = 256


class Source(Protocol):
    """Random access to the bytes of one file, real or synthetic."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; raises `InputError` where the file is shorter than that."""


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
        Constructor arguments, as trees; None for a class or function that is named and not called.
    state
        What the stream hands to `__setstate__` or puts into `__dict__`, as a tree; None where it has none.
    items
        List items or dictionary pairs appended by the stream, as a list of trees (pairs are 2-tuples).
    """

    name: str
    args: tuple[Any, ...] | None = ()
    state: Any = None
    items: tuple[Any, ...] = ()


def like(mapping: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dictionary of the kind of another one (`dict`, `OrderedDict`, `defaultdict`), without its attributes."""
    if isinstance(mapping, defaultdict):
        return defaultdict(mapping.default_factory, pairs)
    return OrderedDict(pairs) if isinstance(mapping, OrderedDict) else dict(pairs)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array whose last axis is contiguous.

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
    """A contiguous run of elements of one dtype in a file: the data of one tensor or of what remains of one storage.

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
        Typed path of the first tensor that views it: what versions are matched by.
    """

    start: int
    dtype: str
    shape: tuple[int, ...]
    path: Path

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def stop(self) -> int:
        """Offset behind the last byte in the file."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class Box:
    """Where a shard lies in the tensor that it is a part of.

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
        Of a shard of a checkpoint that several files hold together: its place in the tensor that its path names. Such
        paths begin in the directory of the file, not in the file.
    shards
        Of a tensor that is put together: the numbers of the files that its shards are in, and these. No layout holds
        it; its `extent` is -1.
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
        """(File, extent) of all its elements; `file` is the number of the tensor's own."""
        if self.shards:
            return [(number, shard.extent) for number, shard in self.shards if shard.extent >= 0]
        return [(file, self.extent)] if self.extent >= 0 else []


@dataclass(frozen=True, slots=True)
class Checked:
    """A stretch of the file whose CRC-32 the container holds, little-endian, at one or more places of the skeleton.

    Ingest compares them; the manifest keeps them as zeros; checkout computes them again. A stretch may have others
    in it, which come before it in the layout; these have none.
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
        See there. Bytes outside of extents are the skeleton.
    tree
        The nested structure with `TensorRef` leaves, `Unknown` nodes, plain containers (dict, list, tuple, set,
        frozenset, `collections.OrderedDict`, `collections.defaultdict` of a built-in class) and plain values; for
        safetensors, npz and gguf a flat dict, for npy its one tensor; None without tensors.
    facts
        What the file says of itself: `step`, `epoch` (integers) where its top level or its metadata holds them.
    bytes_for
        Why parts of the file, by name, are bytes and no tensors.
    """

    kind: str
    size: int
    extents: list[Extent] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    tree: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    bytes_for: dict[str, str] = field(default_factory=dict)
