"""State dicts in memory, described and read like files: torch tensors, NumPy arrays, plain containers and values.

torch is never imported here: an object can be a torch tensor only if the program has imported torch.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from ctypes import PYFUNCTYPE, c_ssize_t, c_void_p, py_object, pythonapi
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msgspec import Struct

from ckstore.dtypes import ITEM_SIZES, NATIVE
from ckstore.errors import CkstoreError, InputError, UsageError
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import (
    MARKS,
    Extent,
    FileLayout,
    Path,
    Segment,
    Shared,
    Tensor,
    TensorRef,
    Unknown,
    like,
    memory_shape,
    row_major,
)
from ckstore.formats.paths import path_to_text
from ckstore.formats.skeleton import Checks
from ckstore.formats.sources import CompositeSource
from ckstore.formats.torch.objects import CLASSES, MAX_FIELD_DEPTH, MAX_FIELDS, registered
from ckstore.formats.torch.pickle_reader import Identity, key_of
from ckstore.formats.torch.pickle_writer import OPAQUE
from ckstore.formats.torch.storages import MAX_RANK, StorageData
from ckstore.formats.torch.tree_reader import MAX_TENSORS, PLAIN, ROOT, free, segment_of
from ckstore.formats.torch.zip import assemble
from ckstore.formats.torch.zip_writer import TorchPlan, plan_torch
from ckstore.formats.trees import ATTRIBUTED, FROM_TYPE, JAGGED, NESTED, PARAMETERS, QUANTISED, SPARSE, WRAPPER
from ckstore.runtime.checksum import crc32

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Below the depth that the reader accepts.
_MAX_DEPTH = 100
#: Maximal bits of an integer.
_MAX_BITS = 2000
_READ_BYTES = 1 << 22

#: Types whose objects are written as they pickle themselves; `ckstore.reading.known_types` rebuilds them.
_REDUCED = frozenset(
    {
        "argparse.Namespace", "builtins.bytearray", "builtins.range", "builtins.slice", "collections.Counter",
        "collections.deque", "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta",
        "datetime.timezone", "decimal.Decimal", "fractions.Fraction", "numpy.random._generator.Generator",
        "numpy.random._mt19937.MT19937", "numpy.random._pcg64.PCG64", "numpy.random._pcg64.PCG64DXSM",
        "numpy.random._philox.Philox", "numpy.random._sfc64.SFC64", "numpy.random.bit_generator.SeedSequence",
        "numpy.random.mtrand.RandomState", "torch._C.Generator", "pathlib.PosixPath", "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath", "pathlib.WindowsPath", "pathlib._local.PosixPath", "pathlib._local.PurePosixPath",
        "pathlib._local.PureWindowsPath", "pathlib._local.WindowsPath", "torch.Size", "torch.device", "torch.dtype",
        "torch.layout", "torch.qscheme", "torch.torch_version.TorchVersion", "types.SimpleNamespace", "uuid.UUID",
    }
)  # fmt: skip
#: Name prefixes of the types among them that a dictionary may have as keys.
_KEYS = ("datetime.", "pathlib.", "torch.d")
#: Maximal parts of a tuple that is a key, and its levels of tuples, if one is no plain value.
_KEY_PARTS = 64
_KEY_DEPTH = 2

#: Among them the types that pickle themselves without attributes, though they may have some.
_WITHOUT_ATTRIBUTES = (Counter,)
#: Types of the elements of arrays with fields.
_RECORDS = ("numpy.void", "numpy.record")

#: Segments at a path, see `free`.
_Taken = dict[Segment, int]

#: The treatment of an object of an unknown type.
OnUnknown = Literal["raise", "pickle"]
#: A sample has the last bytes of each stretch of an extent: a cache line of every 256 kB.
_LINE = 64
_STRETCH = 1 << 18
#: Of scattered elements it has one of each such stretch of bytes: each costs a cache line.
_SPREAD = 1 << 14

#: Returns the bytes at an address: `ctypes.string_at` in one call.
_bytes_at = PYFUNCTYPE(py_object, c_void_p, c_ssize_t)(("PyBytes_FromStringAndSize", pythonapi))
#: Names of torch's integers by size.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class _Seen(Struct, eq=False, gc=False):
    """A node, its tree, and whether that has tensors."""

    node: Any
    tree: Any
    has_tensors: bool


class _Noted(Struct, eq=False, gc=False):
    """A tensor at a path with the number of changes that torch has counted."""

    tensor: Any
    version: int
    path: Path


class Memory(Protocol):
    """The bytes of an extent; they are the caller's and may change."""

    @property
    def is_remote(self) -> bool:
        """Whether they are on a device."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes from a byte offset."""

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        """Copy all bytes; return the GPU stream of a pending copy, None for a finished one."""

    def sample(self) -> Any:
        """A view of a few elements from all over it: an array, or a tensor on a GPU."""


@dataclass(slots=True)
class LiveState:
    """The contents of a state dict: tree, tensors, extents, whose `start` is 0, and the bytes of each extent.

    For `shared` see `FileLayout`. If it `is_still`, no one writes to the bytes while the state is read, and they do not
    move. If it `is_plain`, each tensor is an extent of its own, in C order.
    """

    tree: Any
    tensors: list[Tensor] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    shared: Shared = ()
    is_still: bool = False
    is_plain: bool = False
    _noted: list[_Noted] = field(default_factory=list)
    _sampled: list[Any] = field(default_factory=list)
    _sample: list[bytes] = field(default_factory=list)

    def view(self, extent: int, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of an extent from a byte offset, without a copy if they are in main memory."""
        return self.memories[extent].view(offset, nbytes)

    def note(self) -> None:
        """Take a sample of the bytes as they are now, for `check_unchanged`."""
        self._sampled = [one if type(one) is _FewBytes else one.sample() for one in self.memories]
        self._sample = _contents(self._sampled)

    def check_unchanged(self) -> None:
        """Raise `InputError` where torch counted a change of a tensor since, or the sample has other bytes by now.

        Torch counts no change by fused optimisers and through `Tensor.data`, and nothing counts changes of arrays.
        """
        for one in self._noted:
            if one.tensor._version != one.version:
                raise _changed(one.path)
        for memory in self.memories:
            _check_place(memory)
        for extent, before, now in zip(self.extents, self._sample, _contents(self._sampled), strict=False):
            if before != now:
                raise _changed(extent.path)


class StateDictSource:
    """A state dict, or its `LiveState`, as the torch zip that it would be, without writing it.

    `layout` is the result of `parse` for the file, but for the tree; `skeleton` has its bytes outside of extents.
    """

    def __init__(self, state_dict: Any, on_unknown: OnUnknown = "raise") -> None:
        is_described = isinstance(state_dict, LiveState)
        state = self._state = state_dict if is_described else describe_state_dict(state_dict, on_unknown)
        plan = plan_torch(state.tree, state.tensors, state.extents, state.shared)
        self.layout = _layout_of(plan, self._state)
        self.skeleton = plan.skeleton
        memories, numbers = state.memories, plan.numbers
        self._numbers = plan.numbers
        self._starts = [one.start for one in plan.layout.extents]
        self._crcs: dict[int, int] = {}
        self._checks, self._followed = Checks(self.layout), 0
        import numpy as np

        places = np.array([one.positions for one in self.layout.checked], np.int64)
        order = places.argsort(axis=None)
        self._places, self._place_numbers = places.reshape(-1)[order], order // max(1, places.shape[-1])
        self._bytes = CompositeSource(
            plan.skeleton,
            zip(self._starts, [prod(one.shape) * ITEM_SIZES[one.dtype] for one in plan.layout.extents], strict=True),
            plan.layout.size,
            # Without a reference to this source: in a cycle, the caller's tensors would wait for the garbage collector.
            lambda index, offset, nbytes: memories[numbers[index]].view(offset, nbytes),
        )

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._bytes.size

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; a stretch with the CRC of a storage reads that storage, once."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` on.

        CRCs of storages that were read in order are known; others read their storage, once.
        """
        self._bytes.read_into(offset, target)
        stop = offset + len(target)
        self._follow(offset, target)
        first, last = self._places.searchsorted((offset - 3, stop)).tolist()
        if first == last:
            return
        import numpy as np

        numbers = self._place_numbers[first:last].tolist()
        crcs = np.array(self._crcs_of(numbers), "<u4").view(np.uint8).reshape(-1, 4)
        indices = self._places[first:last, None] + np.arange(4) - offset
        is_inside = (indices >= 0) & (indices < len(target))
        np.frombuffer(target, np.uint8)[indices[is_inside]] = crcs[is_inside]

    def crcs(self) -> list[int]:
        """Return the CRC-32 of each storage."""
        return self._crcs_of(range(len(self.layout.checked)))

    def extent_at(self, start: int) -> int:
        """Return the number of the state's extent that begins at a byte of the file."""
        return self._numbers[bisect_right(self._starts, start) - 1]

    @property
    def is_still(self) -> bool:
        """Whether its tensors do not change while they are read: `view` is enough."""
        return self._state.is_still

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of a storage from `offset` of the file on, without a copy; otherwise as `read_into`."""
        index = bisect_right(self._starts, offset) - 1
        found = self._state.view(self._numbers[index], offset - self._starts[index], nbytes)
        self._follow(offset, found)
        return found

    def check_unchanged(self) -> None:
        """Raise `InputError` where a tensor was changed since it was described, as far as torch or a sample tells."""
        self._state.check_unchanged()

    def close(self) -> None:
        """Do nothing: the tensors are the caller's."""

    def _follow(self, offset: int, data: memoryview) -> None:
        """Compute the CRC-32 of storages from data that is read anyway, while it is read in order."""
        if offset == 0:
            self._checks, self._followed = Checks(self.layout), 0
        if offset != self._followed:
            return
        self._checks.update(offset, data)
        self._followed += len(data)

    def _crcs_of(self, numbers: Sequence[int]) -> list[int]:
        known, checked = self._crcs, self.layout.checked
        for number in [one for one in numbers if one not in known]:
            start, stop = checked[number].start, checked[number].stop
            if stop <= self._followed:
                crc = self._checks.results[number]
            else:
                crc = 0
                for place in range(start, stop, _READ_BYTES):
                    crc = crc32(self._bytes.pread(place, min(_READ_BYTES, stop - place)), crc)
            known[number] = crc
        return [known[number] for number in numbers]


def _layout_of(plan: TorchPlan, state: LiveState) -> FileLayout:
    """Return the layout of a planned file: its storages are cut as if they had been read from it."""
    if state.is_plain:
        return replace(plan.layout, tensors=state.tensors, tree=state.tree, facts=facts_of_mapping(state.tree))
    storages = [StorageData("-1", "uint8", 0, 0)]  # Of tensors without elements.
    for number, extent in zip(plan.numbers, plan.layout.extents, strict=True):
        dtype, nbytes = extent.dtype, prod(extent.shape) * ITEM_SIZES[extent.dtype]
        storages.append(StorageData(str(number), None if number in plan.untyped else dtype, extent.start, nbytes))
    views = [(str(one.extent), one) for one in state.tensors]
    layout = assemble("torch-zip", plan.layout.size, storages, views, state.tree)
    layout.checked = plan.layout.checked
    return layout


def describe_state_dict(state_dict: Any, on_unknown: OnUnknown = "raise", *, outline: bool = False) -> LiveState:
    """Return the tree, tensors and extents of an object in memory.

    It may nest dictionaries (`dict`, `OrderedDict`, `defaultdict`), lists, tuples and sets of tensors, arrays, plain
    values and objects of the types that `Version.state_dict` rebuilds. With `pickle` as `on_unknown`, any other object
    is kept as the bytes of its pickle; else a `UsageError` names its place.

    An object held at several places stays one. Tensors that share a storage stay tied: the part of it that they span
    becomes one extent. Any other tensor becomes an extent of its own, in memory order if it is dense, else in C order.

    With `outline`, tensors may be on the meta device. Their memories are `Absent`, until the caller replaces them.
    """
    if on_unknown not in ("raise", "pickle"):
        raise UsageError(f"`on_unknown` is `raise` or `pickle`, not {on_unknown!r}.")
    reader = Describer(is_pickling=on_unknown == "pickle", is_outlining=outline)
    tree = reader.visit(state_dict, (), 0)
    return reader.finish(tree)


class _Found(Struct, eq=False, gc=False):
    """A tensor or array: its memory, and its place there in elements."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    memory: Any
    value: Any
    marks: tuple[str, ...] = ()


class _Named(Struct, eq=False):
    """A class or function in the description of a tensor: its name is kept."""

    one: Any


class Describer:
    """Makes the tree of an object in memory; see `describe_state_dict`."""

    def __init__(self, *, is_pickling: bool, is_outlining: bool) -> None:
        self._is_pickling = is_pickling
        self._is_outlining = is_outlining
        #: Whether arrays are part of an object that `torch.load` makes with them, and are no tensors then.
        self._is_inline = False
        self._found: list[_Found] = []
        self._noted: list[_Noted] = []
        #: Shapes and strides, each once.
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._open: set[int] = set()
        self._seen: dict[int, _Seen] = {}
        self._shared: list[tuple[Any, Any]] = []
        self._torch: Any = _imported("torch")
        self._tensor = getattr(self._torch, "Tensor", None)
        self._numpy: Any = _imported("numpy")
        self._scalars = _scalar_types(self._numpy)
        self._registered = registered()
        nn = getattr(self._torch, "nn", None)
        self._plain = {self._torch.Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter)} if nn else set()
        # Later versions of torch have no named axes.
        self._has_names = getattr(self._tensor, "has_names", None)

    def visit(self, node: Any, path: Path, depth: int, taken: _Taken | None = None) -> Any:
        """Return the tree of a node; tensors get the paths and the order that `TreeReader` gives them in the file.

        `taken` has the segments that other parts of an object at this path have used.
        """
        if type(node) in PLAIN:
            return _integer(node, path) if type(node) is int else node
        seen = self._seen.get(id(node))
        if seen is not None and not seen.has_tensors:
            return seen.tree
        before = len(self._found)
        own = self._own_tensor(node, path) if type(node) is self._tensor else None
        tree = self._described(node, path, depth, taken) if own is None else self._keep(own)
        if seen is None:
            # The node is kept alive: the id of a deleted one may be reused.
            self._seen[id(node)] = _Seen(node, tree, len(self._found) > before)
        else:
            self._shared.append((tree, seen.tree))
        return tree

    def _described(self, node: Any, path: Path, depth: int, taken: _Taken | None) -> Any:
        if self._torch is not None and isinstance(node, self._torch.Tensor):
            if type(node).__name__ == "DTensor" and type(node).__module__ == "torch.distributed.tensor":
                return self.visit(_whole_of(node, path), path, depth)
            problem = self._problem_of(node)
            if problem and (other := self._other_tensor(node, path, depth)) is not None:
                return other
            if problem:
                return self._unknown(node, f"The tensor at {_shown(path)} {problem}")
            path = path or ROOT
            tensor = self._keep(self._torch_tensor(node, path))
            return Unknown(ATTRIBUTED, (tensor,), self._attributes(node, path, depth)) if node.__dict__ else tensor
        if type(node) is _Named:
            return Unknown(_name(node.one), None)
        if isinstance(node, type):
            return self._class(node, path)
        if id(node) in self._open or depth > _MAX_DEPTH:
            raise UsageError(
                f"The state dict holds itself or nests too deeply at {_shown(path)}, which cannot be stored; make it"
                f" flatter, of at most {_MAX_DEPTH} levels."
            )
        self._open.add(id(node))
        tree = self._container(node, path, depth, {} if taken is None else taken)
        self._open.discard(id(node))
        return tree

    def _container(self, node: Any, path: Path, depth: int, taken: _Taken) -> Any:
        kind = type(node)
        if kind in (dict, OrderedDict, defaultdict):
            return self._mapping(node, path, depth, taken)
        if kind is list or kind is tuple:
            return kind(self._sequence(node, path, depth, taken))
        if kind is set or kind is frozenset:
            return kind(self._key(item, path) for item in node)
        if self._numpy is not None and isinstance(node, self._numpy.ndarray):
            return self._array_or_object(node, path, depth)
        dtype = None
        if self._numpy is not None and isinstance(node, self._numpy.dtype | self._numpy.generic):
            dtype = node if isinstance(node, self._numpy.dtype) else node.dtype
        if _name(kind) in _REDUCED or (dtype is not None and _is_own(dtype)):
            outer, self._is_inline = self._is_inline, self._is_inline or kind.__module__.startswith("numpy.random")
            made = self._reduced(node, path, depth)
            self._is_inline = outer
            return made
        if self._registered.get(_name(kind)) is kind and _is_plain(node):
            return self._reduced(node, path, depth)
        return self._unknown(node, f"The state dict holds a {_name(kind)} at {_shown(path)}, which cannot be stored")

    def _mapping(self, node: Any, path: Path, depth: int, taken: _Taken) -> Any:
        if isinstance(node, defaultdict) and node.default_factory not in (None, *CLASSES.values()):
            return self._unknown(
                node, f"The defaultdict at {_shown(path)} calls {node.default_factory}, which cannot be stored"
            )
        attributes = vars(node) if isinstance(node, OrderedDict) else {}
        for name in attributes:
            if hasattr(OrderedDict, name):
                raise UsageError(
                    f"The dictionary at {_shown(path)} has an attribute {name}, which hides its method; delete it."
                )
        pairs: Iterable[tuple[Any, Any]] = dict(node).items()  # An object that is pickled may change the dictionary.
        if {*map(type, node)} != {str}:  # Most keys are texts, and there may be very many.
            pairs = [(key if type(key) is str else self._key(key, path), value) for key, value in pairs]
        tree = like(node, self._entries(pairs, path, depth, taken))
        if attributes:
            before = len(self._found)
            vars(tree).update(self.visit(attributes, (*path, "__dict__"), depth + 1))
            if len(self._found) > before:
                raise UsageError(
                    f"The attributes of the dictionary at {_shown(path)} hold tensors; make them its items."
                )
        return tree

    def _sequence(self, items: Iterable[Any], path: Path, depth: int, taken: _Taken) -> list[Any]:
        return [self._item(item, index, path, depth, taken) for index, item in enumerate(items)]

    def _item(self, item: Any, key: Any, path: Path, depth: int, taken: _Taken) -> Any:
        """Return the tree of the value of a key; only a value that may hold tensors takes a segment of its own."""
        if type(item) in PLAIN:
            return _integer(item, (*path, segment_of(key))) if type(item) is int else item
        segment = key if type(key) is str else segment_of(key)
        return self.visit(item, (*path, free(segment, taken)), depth + 1)

    def _entries(
        self, pairs: Iterable[tuple[Any, Any]], path: Path, depth: int, taken: _Taken
    ) -> Iterator[tuple[Any, Any]]:
        """Yield pairs of a key's tree and a value's."""
        for key, value in pairs:
            tree = self._item(value, key, path, depth, taken)
            if type(key) is Identity:
                free("key", taken)
            elif type(key) not in PLAIN:
                key = self.visit(key, (*path, free("key", taken)), depth + 1)
            yield key, tree

    def _key(self, key: Any, path: Path) -> Any:
        """Return a key or element: plain ones unchanged, others as values that equal only themselves."""
        if type(key_of(key)) is not Identity:
            return key
        if not self._is_known_key(key):
            raise UsageError(
                f"The state dict has a key of type {type(key).__qualname__} at {_shown(path)} that cannot be stored; "
                "use text or a small integer."
            )
        return Identity(self.visit(key, (*path, "key"), 0))

    def _is_known_key(self, key: Any, depth: int = 0) -> bool:
        if type(key) is tuple:
            fits = depth < _KEY_DEPTH and len(key) <= _KEY_PARTS
            return fits and all(
                self._is_known_key(part, depth + 1) if type(part) is tuple or type(key_of(part)) is Identity else True
                for part in key
            )
        if self._numpy is not None and isinstance(key, self._numpy.generic):
            return _is_own(key.dtype) and key.dtype.kind != "V"
        return _name(type(key)) in _REDUCED and _name(type(key)).startswith(_KEYS)

    def _class(self, node: type, path: Path) -> Any:
        name = _name(node)
        if CLASSES.get(name) is node or node in self._scalars:
            return Unknown(name, None)
        return self._unknown(node, f"The state dict holds the class {name} at {_shown(path)}, which cannot be stored")

    def _reduced(self, node: Any, path: Path, depth: int) -> Any:
        """Return an object as its own pickle method describes it."""
        if isinstance(node, _WITHOUT_ATTRIBUTES) and vars(node):
            return self._unknown(
                node, f"The {_name(type(node))} at {_shown(path)} has attributes, which cannot be stored"
            )
        # Below protocol 4 times lose their `fold`.
        registered = copyreg.dispatch_table.get(type(node))
        protocol = 4 if type(node).__module__ == "datetime" else 2
        made = node.__reduce_ex__(protocol) if registered is None else registered(node)
        if isinstance(made, str):
            return Unknown(f"{type(node).__module__}.{made}", None)
        function, args, state, items = (*made, None, None)[:4]
        taken: _Taken = {}
        if isinstance(state, dict | tuple | list):
            state = self.visit(state, path, depth + 1, taken)
        elif type(state) not in PLAIN:
            state = self.visit(state, (*path, free("state", taken)), depth + 1)
        parts = tuple(
            Unknown(_name(part), None) if isinstance(part, type) else self._item(part, index, path, depth, taken)
            for index, part in enumerate(args)
        )
        appended = list(items or ())
        if all(type(item) is tuple and len(item) == 2 for item in appended):
            appended = [*self._entries(appended, path, depth, taken)]
        else:
            appended = self._sequence(appended, path, depth, taken)
        return Unknown(_name(function), parts, state, tuple(appended))

    def _unknown(self, node: Any, problem: str) -> Any:
        """Return the bytes of its pickle if these are requested; they are opened only on request."""
        if not self._is_pickling:
            raise UsageError(
                f"{problem}; replace it by plain values, or ingest with on_unknown='pickle', which keeps it "
                "for programs that have its class."
            )
        try:
            return Unknown(OPAQUE, (pickle.dumps(node, 4),))
        except Exception as error:
            raise UsageError(f"{problem}, and cannot be pickled ({error}); leave it out.") from error

    def _keep(self, found: _Found) -> TensorRef:
        if len(self._found) >= MAX_TENSORS:
            raise UsageError(
                f"The state dict has more than {MAX_TENSORS:,} tensors, each place of a shared container counted;"
                " split it."
            )
        self._found.append(found)
        return TensorRef(len(self._found) - 1)

    def _problem_of(self, tensor: Any) -> str:
        """Return why a tensor cannot be stored; empty if it can."""
        torch = self._torch
        dtype = _name_of_dtype(tensor.dtype)
        nested = tensor.is_nested  # Such a tensor does not even have a size.
        if (
            type(tensor) not in self._plain
            or nested
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or dtype not in ITEM_SIZES
        ):
            kind = f"{'nested ' * nested}{type(tensor).__qualname__}"
            return f"is a {kind} of dtype {dtype} and layout {tensor.layout}, which cannot be stored"
        if tensor.is_meta and not self._is_outlining:
            return "is on the meta device and has no values"
        if tensor._is_zerotensor():
            return "is a zero tensor without memory, which cannot be stored"
        if tensor.dim() > MAX_RANK:
            return f"has {tensor.dim()} axes, which cannot be stored"
        is_named = self._has_names is not None and self._has_names(tensor)
        return "has named axes, which cannot be stored" if is_named else ""

    def _other_tensor(self, tensor: Any, path: Path, depth: int) -> Any:
        """Return a sparse, nested or quantised tensor, or a subclass around others, as torch's pickle describes it.

        None for one that torch describes in another way.
        """
        torch, kind = self._torch, type(tensor)
        if kind is torch.Tensor and not vars(tensor) and tensor.dtype in (torch.qint8, torch.quint8, torch.qint32):
            return Unknown(QUANTISED, tuple(self._sequence(_integers_and_quantiser(tensor), path, depth, {})))
        if kind in (torch.Tensor, torch.nn.Parameter) or hasattr(kind, "__tensor_flatten__"):
            try:
                function, parts = tensor.__reduce_ex__(2)
            except (AttributeError, NotImplementedError, RuntimeError, TypeError):
                return None
        else:
            return None
        name = _name(function)
        taken: _Taken = {}
        if name == FROM_TYPE and _name(parts[0]) in (WRAPPER, JAGGED, SPARSE, NESTED):
            function, kind, args, state = parts
            if _name(function) == JAGGED:  # Its state repeats its arguments, and torch computes the cache again.
                args, state = ({**args[0], "_metadata_cache": {}},), {}
            args = tuple(_Named(part) if isinstance(part, type) else part for part in args)
            made = self._sequence((_Named(function), _Named(kind), args), path, depth, taken)
            made.append(self.visit(state, path, depth + 1, taken))
        elif name in (SPARSE, NESTED, *PARAMETERS):
            made = self._sequence(parts, path, depth, taken)
        else:
            return None
        return Unknown(name, tuple(made))

    def _attributes(self, tensor: Any, path: Path, depth: int) -> Any:
        """Return the attributes of a tensor or parameter besides those of its type, as a tree."""
        for name in tensor.__dict__:
            if hasattr(type(tensor), name):
                raise UsageError(
                    f"The tensor at {_shown(path)} has an attribute {name}, which hides that of its type; delete it, or"
                    " give `tensor.detach()`, which has no attributes."
                )
        try:
            return self.visit(tensor.__dict__, path, depth + 1)
        except UsageError as error:
            problem = str(error).rstrip(".")
            raise UsageError(
                f"An attribute of the tensor at {_shown(path)} cannot be stored ({problem}); delete it, or give"
                " `tensor.detach()`, which has no attributes."
            ) from error

    def _own_tensor(self, tensor: Any, path: Path) -> _Found | None:
        """Return a plain tensor in few steps; None for most others, which `_problem_of` and `_torch_tensor` look at."""
        dtype = _name_of_dtype(tensor.dtype)
        # Its `__dict__` would make one, which lives as long as the tensor.
        if dtype not in ITEM_SIZES or tensor.requires_grad or object.__getstate__(tensor) is not None:
            return None
        try:
            storage, offset = tensor.untyped_storage(), tensor.storage_offset()
            is_whole = 0 < tensor.numel() <= storage.nbytes() // ITEM_SIZES[dtype] - offset and tensor.is_contiguous()
            is_other = tensor.is_neg() or tensor.is_conj() or not tensor.is_cpu or tensor.dim() > MAX_RANK
            if not is_whole or is_other or (self._has_names is not None and self._has_names(tensor)):
                return None
            start, version, shape, strides = storage.data_ptr(), tensor._version, tensor.shape, tensor.stride()
        except (RuntimeError, TypeError):
            return None
        path = path or ROOT
        self._noted.append(_Noted(tensor, version, path))
        shape, strides = self._sizes.get(shape) or tuple(shape), self._sizes.setdefault(strides, strides)
        return _Found(path, dtype, self._sizes.setdefault(shape, shape), strides, offset, start, tensor)

    def _torch_tensor(self, tensor: Any, path: Path) -> _Found:
        torch = self._torch
        is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
        # An instance check of torch's parameters is slow.
        is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
        said = (is_conj, is_neg, is_parameter, tensor.requires_grad, False)
        marks = tuple([mark for mark, holds in zip(MARKS, said, strict=True) if holds]) if any(said) else ()
        if not tensor.is_inference():
            self._noted.append(_Noted(tensor, tensor._version, path))
        value = tensor.detach()
        # The values as they are in memory; the marks then apply to these.
        value = value.conj() if is_conj else value
        value = torch._neg_view(value) if is_neg else value
        # Without memory, each tensor is its own.
        storage = value.untyped_storage()
        start = id(tensor) if tensor.is_meta else storage.data_ptr()
        memory = start if value.is_cpu else (value.device, start)
        shape, strides = tuple(value.shape), value.stride()
        found = _Found(path, _name_of_dtype(tensor.dtype), shape, strides, value.storage_offset(), memory, value, marks)
        last = value.numel() - 1 if value.is_contiguous() else _reach(found)
        needed, there = (found.offset + 1 + last) * ITEM_SIZES[found.dtype], storage.nbytes()
        if needed > there and 0 not in shape:
            raise UsageError(
                f"The tensor at {_shown(path)} has {there:,} of its {needed:,} bytes: its memory was freed or cut, as"
                " FSDP does with parameters between steps; give the gathered ones, such as of `get_model_state_dict`."
            )
        return found

    def _array_or_object(self, array: Any, path: Path, depth: int) -> Any:
        """Store an array as a tensor with a mark; as its own pickle if torch lacks its dtype."""
        numpy, dtype = self._numpy, array.dtype
        if type(array) not in (numpy.ndarray, numpy.memmap) or dtype.hasobject:
            return self._unknown(
                array, f"The array at {_shown(path)} is a {_name(type(array))} of {dtype}, which cannot be stored"
            )
        if dtype.name in ITEM_SIZES and dtype.fields is None and not self._is_inline:
            return self._keep(self._array(array, path or ROOT))
        if _is_own(dtype) and dtype.itemsize:
            return self._reduced(numpy.asarray(array), path, depth)
        return self._unknown(array, f"The array at {_shown(path)} has dtype {dtype}, which cannot be stored")

    def _array(self, array: Any, path: Path) -> _Found:
        base = self._numpy.asarray(array)
        strides = row_major(base.shape)
        if base.flags.f_contiguous and not base.flags.c_contiguous:
            # Columns follow one another: the elements are those of the transposed array in its own order.
            base = base.T
            strides = tuple(reversed(row_major(base.shape)))
        memory = ("numpy", base.__array_interface__["data"][0], base.dtype.str, base.shape, base.strides)
        marks = ("array",) if _is_own(base.dtype) else ()
        return _Found(path, base.dtype.name, array.shape, strides, 0, memory, base, marks)

    def finish(self, tree: Any) -> LiveState:
        """Return the state with this tree."""
        state = LiveState(tree, shared=self._shared, _noted=self._noted)
        placed, extents, memories = state.tensors, state.extents, state.memories
        firsts: dict[Any, int] = {}
        tied: dict[Any, list[int]] = {}
        for number, one in enumerate(self._found):
            placed.append(Tensor(one.path, one.dtype, one.shape, one.strides, -1, 0, one.marks))
            if 0 not in one.shape and (first := firsts.setdefault(one.memory, number)) != number:
                tied.setdefault(one.memory, [first]).append(number)
        state.is_plain = len(firsts) == len(self._found)
        for place, number in firsts.items():
            one = self._found[number]
            if place not in tied and (memory := _own_memory(one)) is not None:
                placed[number] = Tensor(one.path, one.dtype, one.shape, one.strides, len(extents), 0, one.marks)
                extents.append(Extent(0, one.dtype, one.shape, one.path))
                memories.append(memory)
            else:
                self._place(tied.get(place, [number]), state)
        state.note()
        return state

    def _place(self, numbers: list[int], state: LiveState) -> None:
        """Add the extents of tensors that share their memory, and place the tensors in them."""
        state.is_plain = False
        group = [self._found[number] for number in numbers]
        first = group[0]
        low, strides = 0, None
        memory: Memory
        same = all(
            (one.dtype, one.shape, one.strides, one.offset) == (first.dtype, first.shape, first.strides, first.offset)
            for one in group[1:]
        )
        shape = memory_shape(first.shape, first.strides) if same else None
        if self._numpy is not None and isinstance(first.value, self._numpy.ndarray):
            shape, memory = first.value.shape, _ArrayMemory(first.value)
        elif same and shape is None and prod(first.shape) <= _reach(first):  # There are holes, and a copy has none.
            shape, strides, low = first.shape, row_major(first.shape), first.offset
            memory = _TensorMemory(first.value)
        else:
            sizes: dict[int, list[int]] = {}
            for number, found in zip(numbers, group, strict=True):
                sizes.setdefault(ITEM_SIZES[found.dtype], []).append(number)
            if len(sizes) > 1:
                # No extent can hold views of several item sizes: those of each become one.
                for views in sizes.values():
                    self._place(views, state)
                return
            [item] = sizes
            low, high = min(one.offset for one in group), max(map(_end, group)) // item
            shape = (high - low,) if shape is None else shape
            if first.value.is_meta:
                memory = Absent(first.path, first.memory[1])
            else:
                data = _bytes_of(first.value, low * item, high * item)
                is_near = data.device.type == "cpu"
                memory = _ArrayMemory(array_of(data), data, data.data_ptr()) if is_near else _TensorMemory(data)
        state.extents.append(Extent(0, first.dtype, shape, first.path))
        state.memories.append(memory)
        extent = len(state.extents) - 1
        for number, one in zip(numbers, group, strict=True):
            place = strides or one.strides, extent, one.offset - low
            state.tensors[number] = Tensor(one.path, one.dtype, one.shape, *place, one.marks)


def _own_memory(found: _Found) -> Memory | None:
    """Return the memory of a tensor in main memory in C order; None for any other one."""
    value = found.value
    if not getattr(value, "is_cpu", False) or not value.is_contiguous():
        return None
    if value.untyped_storage().data_ptr() != found.memory:  # An object that was pickled since has freed it.
        raise _changed(found.path)
    nbytes, address = value.nbytes, value.data_ptr()
    if nbytes <= _LINE:
        return _FewBytes(value, address, nbytes)
    return _ArrayMemory(array_of(value), value, address)


def _check_place(memory: Memory) -> None:
    """Raise `InputError` if a tensor's memory has been freed or replaced: its bytes must not be read."""
    owner = getattr(memory, "owner", None)
    if owner is not None and owner.data_ptr() != memory.address:  # type: ignore[attr-defined]
        raise _changed(None)


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """Return the elements of a tensor in main memory, in place; as integers if NumPy lacks their dtype.

    Torch resizes no storage that `Tensor.numpy` has seen, though FSDP frees and fills some in each step. So the caller
    must see to it that the storage is still the same.
    """
    if _name_of_dtype(tensor.dtype) not in NATIVE:
        tensor = tensor.view(getattr(sys.modules["torch"], _INTEGERS[tensor.element_size()]))
    array: npt.NDArray[Any] = sys.modules["numpy"].from_dlpack(tensor)
    return array


def _imported(name: str) -> Any:
    """Return a module that the program has imported, or None; wait for an import by another thread."""
    module = sys.modules.get(name)
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return import_module(name) if is_partial else module


@cache
def _name_of_dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _contents(views: Sequence[Any]) -> list[bytes]:
    """The bytes that views show now; those of one kind on a GPU come in one transfer."""
    remote: dict[Any, list[int]] = {}
    found = []
    for index, view in enumerate(views):
        if type(view) is _FewBytes:
            found.append(_bytes_at(view.address, view.nbytes))
            continue
        is_remote = getattr(view, "is_cuda", None) is not None
        found.append(b"" if is_remote else view.tobytes())
        if is_remote:
            remote.setdefault((view.device, view.dtype, view.shape[1:]), []).append(index)
    for indices in remote.values():
        torch = sys.modules["torch"]
        whole = torch.cat([views[index] for index in indices]).cpu()
        for index, part in zip(indices, whole.split([len(views[index]) for index in indices]), strict=True):
            found[index] = part.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def _lines(data: Any) -> Any:
    """The last line of each stretch of some bytes, an array or a tensor; all stretches have the same length."""
    stretches = len(data) // _STRETCH
    if stretches < 2:
        return data[-_LINE:]
    length = len(data) // stretches
    return data[len(data) - stretches * length :].reshape(stretches, length)[:, -_LINE:]


def _spread(value: Any, nbytes: int) -> Any:
    """Elements from all over an array or tensor, the last one of each axis among them."""
    step = max(1, int((nbytes / _SPREAD) ** (1 / value.ndim)))
    return value[tuple(slice((size - 1) % step, None, step) for size in value.shape)]


def _end(found: _Found) -> int:
    """Return the byte of the memory behind the last element."""
    return (found.offset + 1 + _reach(found)) * ITEM_SIZES[found.dtype]


def _reach(found: _Found) -> int:
    """Return the distance of the last element from the first, in elements."""
    last: int = sum(map(mul, found.shape, found.strides))
    return last - sum(found.strides)


class Absent:
    """The bytes of a tensor on the meta device: none. `identity` is the tensor's `id`."""

    is_remote = False

    def __init__(self, path: Path, identity: int) -> None:
        self._path = path
        self.identity = identity

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Raise `UsageError`."""
        raise UsageError(f"The tensor at {_shown(self._path)} is on the meta device and has no values.")

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        """Raise `UsageError`."""
        self.view(0, target.size)

    def sample(self) -> Any:
        """Return nothing that may change."""
        return memoryview(b"")


class _TensorMemory:
    """A tensor's elements in C order, wherever it lies.

    If that requires a copy, the copy is made at the first access and released after the last.
    """

    def __init__(self, tensor: Any) -> None:
        self.owner = self._tensor = tensor
        self.address = tensor.data_ptr()
        self._nbytes = tensor.numel() * tensor.element_size()
        self._bytes: Any = None

    @property
    def is_remote(self) -> bool:
        return bool(self._tensor.device.type != "cpu")

    def view(self, offset: int, nbytes: int) -> memoryview:
        if self._bytes is None:
            self._bytes = self._of_all()
        view = memoryview(array_of(self._bytes[offset : offset + nbytes].cpu()))
        if offset + nbytes >= self._nbytes:
            self._bytes = None
        return view

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        data = self._of_all()
        if data.device.type == "cpu":
            # In this thread alone: torch's threads wait for one another, which takes long on busy cores.
            _copy(array_of(data), target)
            return None
        torch = sys.modules["torch"]
        torch.from_numpy(target).copy_(data, non_blocking=data.is_cuda)
        return torch.cuda.current_stream(data.device) if data.is_cuda else None

    def sample(self) -> Any:
        torch, tensor = sys.modules["torch"], self._tensor
        if tensor.is_contiguous():
            view = _lines(self._of_all())
        else:
            kind = _INTEGERS.get(tensor.element_size())  # NumPy has not every dtype of torch.
            view = _spread(tensor if kind is None else tensor.view(getattr(torch, kind)), self._nbytes)
        return array_of(view) if view.device.type == "cpu" else view

    def _of_all(self) -> Any:
        """All bytes, in place where they are in order."""
        _check_place(self)
        value = self._tensor.contiguous()
        low = value.storage_offset() * value.element_size()
        return _bytes_of(value, low, low + self._nbytes)


class _FewBytes(Struct, eq=False, gc=False):
    """The same for a small tensor in main memory, without an array."""

    owner: Any
    address: int
    nbytes: int
    is_remote: ClassVar[bool] = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        if self.owner.data_ptr() != self.address:
            raise _changed(None)
        return memoryview(_bytes_at(self.address + offset, nbytes))

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        target.data[:] = self.view(0, self.nbytes)

    def sample(self) -> Any:
        return self


class _ArrayMemory(Struct, eq=False, gc=False):
    """The same for an array: its elements, little-endian and in C order; if it is of a tensor, that and its address."""

    array: npt.NDArray[Any]
    owner: Any = None
    address: int = 0
    _bytes: memoryview | None = None
    is_remote: ClassVar[bool] = False

    def view(self, offset: int, nbytes: int) -> memoryview:
        _check_place(self)
        if self._bytes is None:
            self._bytes = memoryview(self._of_all())
        view = self._bytes[offset : offset + nbytes]
        if offset + nbytes >= self.array.nbytes:
            self._bytes = None
        return view

    def copy_into(self, target: npt.NDArray[np.uint8]) -> Any:
        _check_place(self)
        _copy(self._of_all(), target)

    def sample(self) -> Any:
        array = self.array
        if array.nbytes <= _LINE:
            return array
        if not array.flags.c_contiguous:
            return _spread(array, array.nbytes)
        return _lines(array.reshape(-1).view("u1"))

    def _of_all(self) -> npt.NDArray[np.uint8]:
        if self.array.dtype.char == "B" and self.array.ndim == 1 and self.array.flags.c_contiguous:
            return self.array
        numpy = sys.modules["numpy"]
        little = self.array.astype(self.array.dtype.newbyteorder("<"), copy=False)
        try:
            flat: npt.NDArray[np.uint8] = numpy.ascontiguousarray(little).reshape(-1).view(numpy.uint8)
        except MemoryError as error:
            raise CkstoreError(
                f"An array of shape {self.array.shape} takes {self.array.nbytes:,} bytes in one piece, more than fit"
                " into memory; store the tensor before it was broadcast."
            ) from error
        return flat


def _copy(data: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Copy bytes that another process reads."""
    from ckstore.kernels.native import copy_past_caches

    copy_past_caches(data, target)


def _bytes_of(tensor: Any, low: int, high: int) -> Any:
    """The bytes [low, high) of a tensor's storage, in place."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[low:high]


def _integers_and_quantiser(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the integers of a quantised tensor, in its memory, and (scheme, scale, zero point)."""
    torch = sys.modules["torch"]
    kind = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}[tensor.dtype]
    place = (tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    integers = torch.empty(0, dtype=kind, device=tensor.device).set_(*place)
    scheme = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        return integers, (scheme, tensor.q_scale(), tensor.q_zero_point())
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return integers, (scheme, scales, zeros, tensor.q_per_channel_axis())


def _whole_of(tensor: Any, path: Path) -> Any:
    """Return the values of a `DTensor` if this rank holds all of them."""
    ranks = tensor.device_mesh.size()
    if ranks > 1 and not all(placement.is_replicate() for placement in tensor.placements):
        raise UsageError(
            f"The tensor at {_shown(path)} is a DTensor whose parts are on {ranks} ranks; save with "
            "`ckstore.integrations.dcp.StoreWriter`, or give its `full_tensor()`."
        )
    return tensor.detach().to_local()


def _changed(path: Path | None) -> InputError:
    tensor = "A tensor" if path is None else f"The tensor at {_shown(path)}"
    return InputError(
        f"{tensor} changed while it was read; change nothing, in other threads either, before the "
        "call returns. That of `Store.saver` returns when it has copied the state."
    )


def _name(one: Any) -> str:
    """Return the name of a class or function, as in a pickle."""
    return f"{one.__module__}.{one.__qualname__}"


def _is_own(dtype: Any) -> bool:
    """Return whether a dtype is one of NumPy's, with values in the array itself, and fields within the bounds."""
    return 0 < _own_fields(dtype) <= MAX_FIELDS


def _own_fields(dtype: Any, depth: int = 0) -> int:
    """Return the number of fields of a dtype and of those within; 0 if one is not NumPy's."""
    dtype = dtype.base
    if dtype.isbuiltin == 2 or dtype.hasobject or dtype.kind not in "biufcSUVmM" or depth > MAX_FIELD_DEPTH:
        return 0
    if not dtype.names:
        return int(dtype.type.__module__ == "numpy" and dtype.type.__name__ != "record")
    parts = [dtype.fields[name] for name in dtype.names]
    if _name(dtype.type) not in _RECORDS or not all(
        isinstance(title, str) for _, _, *titles in parts for title in titles
    ):
        return 0
    counts = [_own_fields(part[0], depth + 1) for part in parts]
    return sum(counts) if all(counts) else 0


def _scalar_types(numpy: Any) -> frozenset[type]:
    """Return the classes of NumPy's numbers, texts and times; none if the program has not imported NumPy."""
    return frozenset() if numpy is None else frozenset(numpy.sctypeDict.values()) - {numpy.object_}


def _is_plain(node: Any) -> bool:
    """Return whether an object pickles as a call of its class, or by `__new__`, which `Version.state_dict` imitates."""
    made = node.__reduce_ex__(2)
    return isinstance(made, tuple) and _name(made[0]) in (_name(type(node)), "copyreg.__newobj__")


def _integer(value: int, path: Path) -> int:
    if value.bit_length() > _MAX_BITS:
        raise UsageError(
            f"The integer at {_shown(path)} has more than {_MAX_BITS:,} bits, too many to be stored; give it as text."
        )
    return value


def _shown(path: Path) -> str:
    return path_to_text(path) or "its top"
