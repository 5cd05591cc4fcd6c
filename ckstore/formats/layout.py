"""The layout of a file, common to all formats: extents of tensor data, tensors as views into them, skeleton."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import prod
from operator import lt
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES
from ckstore.runtime.cached import cached_property

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]

T = TypeVar("T")

Segment = str | int
Path = tuple[Segment, ...]
#: Pairs of nodes of a tree: one that is shown at a further place, and the first one, which it equals.
Shared = Sequence[tuple[Any, Any]]

#: Further properties of a tensor: its values are the complex conjugates or the negatives of the stored ones, it is a
#: `torch.nn.Parameter`, it requires a gradient, it was a NumPy array. `Tensor.marks` keeps this order.
MARKS = ("conj", "neg", "parameter", "requires_grad", "array")

#: Stretches without tensors become extents from this size in bytes on, to keep them out of the skeleton.
LARGE_BYTES = 1 << 16

#: Above any place of an element.
_BEYOND = 1 << 60

#: Above the number of axes of any tensor.
MOST_AXES = 256

#: Items that are made one by one.
_FEW = 64


class Source(Protocol):
    """Random access to the bytes of one file, real or synthetic."""

    @property
    def size(self) -> int:
        """The size in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""


class TensorRef(Struct, frozen=True, gc=False):
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


def memory_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape with the dimensions in the order of memory; None if the elements leave holes or overlap.

    A tensor contiguous in C order keeps its shape; otherwise dimensions of one element are left out.
    """
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                break
            step *= size
    else:
        return shape
    dimensions = sorted(
        ((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1), reverse=True
    )
    step = 1
    for stride, size in reversed(dimensions):
        if stride != step:
            return None
        step *= size
    return tuple(size for _, size in dimensions)


class Extent(Struct, frozen=True, gc=False):
    """A contiguous run of elements of one dtype in a file: the data of a tensor or of the rest of a storage.

    Elements are little-endian. It has the shape in memory order of the tensor that it was cut for, or `(count,)`, and
    the typed path of the first tensor that views it, by which versions are matched. Extents of a layout are sorted by
    `start`, an offset in the file, and do not overlap.
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


class Box(Struct, frozen=True, gc=False):
    """The place of a shard in its tensor: its first element, axis by axis, and the shape of the whole tensor."""

    first: tuple[int, ...]
    whole: tuple[int, ...]


class Tensor(Struct, frozen=True, gc=False):
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

    @property
    def is_adjacent(self) -> bool:
        """Whether its values are adjacent elements of its extent, in C order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return self.extent >= 0 and not self.lazy

    def places(self, file: int) -> list[tuple[int, int]]:
        """Return (file, extent) of all its elements; `file` is the number of the tensor's own file."""
        if self.shards:
            return [(number, shard.extent) for number, shard in self.shards if shard.extent >= 0]
        return [(file, self.extent)] if self.extent >= 0 else []


class Checked(Struct, frozen=True, gc=False):
    """A stretch of the file with a CRC-32 in the container, little-endian, at one or more places of the skeleton.

    Ingest compares the CRCs; the manifest keeps them as zeros; checkout computes them again. A stretch may contain
    others, which precede it in the layout; those contain none.
    """

    name: str
    start: int
    stop: int
    positions: tuple[int, ...]


class Rows(Sequence[T]):
    """A part of the rows of a table, whose items are made on first use: few one by one, many all at once.

    `make` returns the items from one row to before another one.
    """

    def __init__(self, make: Callable[[int, int], list[T]], first: int, last: int) -> None:
        self._make, self._rows = make, range(first, last)
        self._some: dict[int, T] = {}
        self._all: list[T] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if self._all is None:
            wanted = self._rows[index]
            rows = range(wanted, wanted + 1) if isinstance(wanted, int) else wanted
            if len(rows) == 1 and len(self._some) < _FEW < len(self._rows):
                row = rows[0]
                if row not in self._some:
                    [self._some[row]] = self._make(row, row + 1)
                return self._some[row] if rows is not wanted else [self._some[row]]
            self._all = self._make(self._rows.start, self._rows.stop)
        return self._all[index]


@dataclass(slots=True)
class FileLayout:
    """One parsed file.

    Attributes
    ----------
    kind
        The name of its format; `opaque` for an unknown one.
    size
        Size of the file in bytes.
    extents, tensors, checked
        Bytes outside of extents are the skeleton.
    tree
        The nested structure with `TensorRef` leaves, `Unknown` nodes, plain containers (dict, list, tuple, set,
        frozenset, `collections.OrderedDict`, `collections.defaultdict` of a built-in class) and plain values; for
        safetensors, npz, gguf and onnx a flat dict, for npy its one tensor; None without tensors.
    facts
        The file's own facts: `step`, `epoch` (integers), if its top level or its metadata has them.
    bytes_for
        Why parts of the file, by name, are bytes rather than tensors.
    shared
        Pairs of nodes of the tree, (later, first), that are one object of the file: its tensors have a path for each
        place, so that the tree has a node for each.
    """

    kind: str
    size: int
    extents: list[Extent] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    tree: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    bytes_for: dict[str, str] = field(default_factory=dict)
    shared: list[tuple[Any, Any]] = field(default_factory=list, compare=False, repr=False)

    def add(
        self, path: Path, dtype: str, shape: tuple[int, ...], start: int, strides: tuple[int, ...] | None = None
    ) -> TensorRef:
        """Add a tensor whose elements, from byte `start` on, are its own; return its leaf for the tree.

        Without `strides` the last axis is contiguous; with them, the elements are dense in another order of the axes.
        """
        extent = -1
        if 0 not in shape:
            extent = len(self.extents)
            memory = shape if strides is None else memory_shape(shape, strides)
            self.extents.append(Extent(start, dtype, memory or (), path))
        self.tensors.append(Tensor(path, dtype, shape, row_major(shape) if strides is None else strides, extent, 0))
        return TensorRef(len(self.tensors) - 1)

    def add_bytes(self, path: Path, start: int, stop: int) -> None:
        """Keep a stretch without tensors out of the skeleton if it is large."""
        if stop - start >= LARGE_BYTES:
            self.extents.append(Extent(start, "uint8", (stop - start,), path))

    def sort(self) -> None:
        """Sort the extents by their place, and renumber the tensors' references."""
        starts = [extent.start for extent in self.extents]
        stops = [one.start + prod(one.shape) * ITEM_SIZES[one.dtype] for one in self.extents]
        if all(map(lt, starts, starts[1:])):
            return
        order = sorted(range(len(starts)), key=lambda index: (starts[index], stops[index]))
        number = {old: new for new, old in enumerate(order)}
        self.extents = [self.extents[index] for index in order]
        self.tensors = [replace(one, extent=number.get(one.extent, -1)) for one in self.tensors]

    def fault(self) -> str:
        """Return the part in which the layout contradicts itself or leaves the file; see `fault_of`."""
        import numpy as np

        def column(values: list[int]) -> Integers:
            return np.array(values, np.int64)

        def lists(values: list[tuple[int, ...]]) -> Lists:
            return Lists(column(list(map(len, values))), column(list(chain.from_iterable(values))))

        parts = extents, tensors, checked = self.extents, self.tensors, self.checked
        try:
            return fault_of(
                (column([self.size]), [column([len(part)]) for part in parts]),
                (column([one.start for one in extents]), lists([one.shape for one in extents]),
                 column([ITEM_SIZES[one.dtype] for one in extents])),
                (lists([one.shape for one in tensors]), lists([one.strides for one in tensors]),
                 column([one.extent for one in tensors]), column([one.offset for one in tensors]),
                 column([ITEM_SIZES[one.dtype] for one in tensors])),
                (column([one.start for one in checked]), column([one.stop for one in checked])),
            )  # fmt: skip
        except OverflowError:  # No file has that many bytes.
            return "extents or tensors"


def opaque(source: Source, kind: str = "opaque", why: str = "", start: int = 0) -> FileLayout:
    """Return the layout of a file without tensors: one extent of bytes from `start` on, or all skeleton if small."""
    layout = FileLayout(kind, source.size, bytes_for={"": why} if why else {})
    layout.add_bytes(("__bytes__",), start, source.size)
    return layout


# Below, columns without calls of Python for each item: there may be very many tensors.


@dataclass
class Lists:
    """Lists of integers in two columns: their lengths, and the items of all."""

    counts: Integers
    items: Integers

    def cut(self, first: int = 0, last: int | None = None) -> list[tuple[int, ...]]:
        """Return the lists from `first` to before `last` as tuples."""
        counts = self.counts[first:last]
        begin = int(self.counts[:first].sum()) if first else 0
        flat = iter(self.items[begin : begin + int(counts.sum())].tolist())
        if counts.size and (counts == counts[0]).all() and counts[0]:
            return list(zip(*[flat] * int(counts[0]), strict=True))
        return [tuple(islice(flat, count)) for count in counts.tolist()]

    @cached_property
    def products(self) -> Integers:
        """The product of each list; one above 2^53, where floats become inexact, is only known to be above it."""
        import numpy as np

        found, starts = np.ones(self.counts.size), self.counts.cumsum() - self.counts
        axis, long = 0, self.counts.nonzero()[0]
        while long.size:
            found[long] = np.minimum(found[long] * self.items[starts[long] + axis], _BEYOND)
            axis += 1
            long = long[self.counts[long] > axis]
        return found.astype(np.int64)


def places_of(extents: Integers, counts: Sequence[Integers]) -> Integers:
    """Return the number over all files of each tensor's extent; -1 without one. See `fault_of`."""
    import numpy as np

    limits, bases = (column.repeat(counts[1]) for column in (counts[0], counts[0].cumsum() - counts[0]))
    return np.where((extents >= 0) & (extents < limits), extents + bases, -1)


def fault_of(
    files: tuple[Integers, Sequence[Integers]],
    extents: tuple[Integers, Lists, Integers],
    tensors: tuple[Lists, Lists, Integers, Integers, Integers],
    checked: tuple[Integers, Integers],
) -> str:
    """Return the part in which layouts contradict themselves or leave their files; empty for sound ones.

    Extents must be disjoint and in order, tensors in their extents, checked stretches disjoint or nested once.

    Parameters
    ----------
    files
        Their sizes, and how many extents, tensors and checked stretches they have.
    extents
        Over all files: offset, shape, bytes of an element.
    tensors
        Shape, strides, number of the extent in its file, offset, bytes of an element.
    checked
        First byte, and the byte after the last.
    """
    import numpy as np

    (sizes, counts), (starts, forms, widths), (shapes, strides, _, offsets, own) = files, extents, tensors
    file = np.arange(sizes.size).repeat(counts[0])
    limits, least, some = sizes[file], np.minimum.reduce, np.logical_or.reduce
    lowest = min(least(starts, initial=0), least(forms.items, initial=0))
    if lowest < 0 or some(np.maximum(forms.products, starts) > limits):
        return "extents"
    ends = starts + forms.products * widths
    if some(ends > limits) or some((starts[1:] < ends[:-1]) & (file[1:] == file[:-1])):
        return "extents"
    lowest = min([least(column, initial=0) for column in (shapes.items, strides.items, offsets)])
    if lowest < 0 or some(offsets > _BEYOND) or some(shapes.counts != strides.counts):
        return "tensors"
    # The distance of the last element from the first, as a float: exact where it may be in an extent.
    owners = np.arange(own.size).repeat(shapes.counts)
    reach = np.bincount(owners, (shapes.items - 1.0) * strides.items, own.size)
    reach = np.minimum(np.maximum(reach, 0), _BEYOND).astype(np.int64)
    held = shapes.products.nonzero()[0]
    places = places_of(tensors[2], counts)[held]
    if least(places, initial=0) < 0 or some((offsets + reach)[held] >= forms.products[places]):
        return "tensors"
    return "tensors" if some(own[held] != widths[places]) else _fault_of_checked(sizes, counts[2], checked)


def _fault_of_checked(sizes: Integers, counts: Integers, checked: tuple[Integers, Integers]) -> str:
    last = 0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        starts, stops = (column[last : last + count] for column in checked)
        last += count
        is_in_turn = (starts <= stops).all() and (starts[1:] >= stops[:-1]).all() and stops.max(initial=0) <= size
        is_in_turn = is_in_turn and starts.min(initial=0) >= 0
        if not is_in_turn and not are_nested_once(list(zip(starts.tolist(), stops.tolist(), strict=True)), size):
            return "checked"
    return ""


def are_nested_once(stretches: list[tuple[int, int]], size: int) -> bool:
    """Return whether stretches of a file are disjoint or nested once; an outer stretch comes after its inner ones."""
    outer: list[tuple[int, int, bool]] = []
    for start, stop in stretches:
        holds_others = False
        while outer and outer[-1][0] >= start:
            _, end, is_around = outer.pop()
            if is_around or end > stop:
                return False
            holds_others = True
        if not (outer[-1][1] if outer else 0) <= start <= stop <= size:
            return False
        outer.append((start, stop, holds_others))
    return True


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files with tensors, ours or one of another distribution (`docs/how-to/add-a-format.md`).

    Attributes
    ----------
    name
        In messages, and the `kind` of its layouts.
    starts_like
        Returns whether a file that begins with these bytes, up to 512, may be of this format.
    parse
        Returns the layout of a file; None if it is of another format after all. A file with zeros in its extents must
        have the same layout, as trees are read from skeletons. Raises `InputError` for a damaged file.
    in_archives
        Whether to recognise such files in zip archives, too: their first bytes must tell them from all others.
    """

    name: str
    starts_like: Callable[[bytes], bool]
    parse: Callable[[Source], FileLayout | None]
    in_archives: bool = True
