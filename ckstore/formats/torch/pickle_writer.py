"""Writes trees as pickles of protocol 2 that `torch.load(weights_only=True)` accepts, without torch."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from ckstore.errors import UsageError
from ckstore.formats.layout import Shared, TensorRef, Unknown
from ckstore.formats.torch.pickle_reader import MAX_PICKLE_BYTES, Identity
from ckstore.formats.trees import QUANTISED, tensor_of

_BATCH = 1000
_U4 = struct.Struct("<I").pack
_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}
_MAX_DEPTH = 300
#: Levels that the call of a tensor adds.
_CALL_DEPTH = 4


class Reference(tuple[str, str]):
    """(module, name) of a global that is written by name."""

    __slots__ = ()


class Call(Struct, eq=False):
    """A call of a global with arguments, made when the pickle is loaded."""

    function: Reference
    args: tuple[Any, ...]


class PersistentId(Struct, eq=False):
    """A persistent id: a tuple of values and references."""

    identity: tuple[Any, ...]


ENCODE = Reference(("_codecs", "encode"))
SET = Reference(("__builtin__", "set"))
COMPLEX = Reference(("__builtin__", "complex"))
FROZENSET = Reference(("__builtin__", "frozenset"))
ORDERED_DICT = Reference(("collections", "OrderedDict"))
DEFAULT_DICT = Reference(("collections", "defaultdict"))
NEW_OBJECT = Reference(("copyreg", "__newobj__"))
#: The global that a pickle calls to open another one, which is kept as bytes.
OPAQUE = "pickle.loads"


#: The form of each tensor, and the key of its storage: calls of tensors of one form differ in the key alone. Other
#: tensors have the form -1.
Forms = tuple[Sequence[int], Sequence[str]]


class MakeTensor(Protocol):
    """Makes the call that builds a tensor of its number and its attributes, a tree; None without any.

    Of a quantised tensor it is the number of its integers, with (scheme, scale, zero point).
    """

    def __call__(self, index: int, attributes: Any, quantiser: Any = None, /) -> Call:
        """Return the call."""


def write_pickle(tree: Any, tensor: MakeTensor, shared: Shared = (), forms: Forms = ((), ())) -> bytes:
    """Return the pickle of a tree; equal trees give equal bytes.

    It may hold plain containers, which are written once and shared, plain values, `Unknown`, `Identity` (of dictionary
    keys and elements of sets), `Reference`, `Call`, `PersistentId`, and `TensorRef`, which `tensor` replaces. For
    `shared` see `FileLayout`: the nodes of a pair are written as one object. `forms` are by numbers of tensors.
    """
    writer = _Writer(tensor, shared, forms)
    writer.value(tree, 0)
    return b"".join((b"\x80\x02", *writer.parts, b"."))


def _reference(name: str) -> Reference:
    module, _, qualname = name.rpartition(".")
    return Reference((module, qualname))


def _rank(item: Any) -> tuple[str, str]:
    """Return the sort key of a set's element."""
    return type(item).__name__, repr(item.value if isinstance(item, Identity) else item)


class _Writer:
    def __init__(self, tensor: MakeTensor, shared: Shared, forms: Forms) -> None:
        self.parts: list[bytes] = []
        self._tensor = tensor
        self._forms, self._keys = forms
        self._firsts = {id(later): first for later, first in shared}
        #: By text, reference, kind and id of a container, or number of a tensor.
        self._memo: dict[Any, int] = {}
        self._numbers = 0
        self._alive: list[Any] = []
        #: The code of a call of each form, before and after the key.
        self._codes: dict[int, tuple[bytes, bytes]] = {}

    def value(self, node: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise UsageError(f"A value that nests deeper than {_MAX_DEPTH} levels cannot be written; make it flatter.")
        emit = self.parts.append
        kind = type(node)
        if node is None or kind is bool:
            emit(_CONSTANTS[node])
        elif kind is str:
            self._text(node)
        elif kind is int:
            self._integer(node)
        elif kind is float:
            emit(b"G" + struct.pack(">d", node))
        elif kind is TensorRef:
            self._tensor_of(node, depth)
        elif kind is Reference:
            if not self._known(node):
                emit("c{}\n{}\n".format(*node).encode())
                self._remember(node)
        elif kind is PersistentId:
            self.value(node.identity, depth + 1)
            emit(b"Q")
        elif kind is bytes:
            self._call(ENCODE, (node.decode("latin-1"), "latin1"), depth)
        elif kind is complex:
            self._call(COMPLEX, (node.real, node.imag), depth)
        elif kind is tuple and not node:
            emit(b")")
        elif kind is Identity:
            self.value(node.value, depth)
        elif kind is Unknown and node.args is None:
            self.value(_reference(node.name), depth)
        else:
            self._container(node, kind, depth)

    def _container(self, node: Any, kind: type, depth: int) -> None:
        node = self._firsts.get(id(node), node)
        key = (kind, id(node))
        if self._known(key):
            return
        # Kept alive: the id of a deleted value may be reused.
        self._alive.append(node)
        emit = self.parts.append
        if kind is tuple:
            emit(b"(")
            for item in node:
                self.value(item, depth + 1)
            emit(b"t")
            self._remember(key)
        elif kind is list:
            emit(b"]")
            self._remember(key)
            self._items(node, depth)
        elif isinstance(node, dict):
            self._mapping(node, key, depth)
        elif kind is set or kind is frozenset:
            # A set is sorted rather than in hash order, so that equal trees give equal bytes.
            self._call(SET if kind is set else FROZENSET, (sorted(node, key=_rank),), depth)
            self._remember(key)
        elif kind is Unknown and (tensor := tensor_of(node)) is not None:
            call = self._tensor(tensor.index, node.state)
            self._call(call.function, call.args, depth)
            self._remember(key)
        elif kind is Unknown and node.name == QUANTISED and (tensor := tensor_of(node.args[0])) is not None:
            call = self._tensor(tensor.index, None, node.args[1])
            self._call(call.function, call.args, depth)
            self._remember(key)
        elif kind is Unknown:
            self._call(_reference(node.name), node.args, depth)
            self._remember(key)
            self._items(node.items, depth)
            if node.state is not None:
                self._state(node.state, depth)
        elif kind is Call:
            self._call(node.function, node.args, depth)
            self._remember(key)
        else:
            raise UsageError(f"A value of type {kind.__name__} cannot be written to a torch file.")

    def _tensor_of(self, node: TensorRef, depth: int) -> None:
        """Write the call of a tensor: in one step if another one of its form was written."""
        index = self._firsts.get(id(node), node).index if self._firsts else node.index
        if index in self._memo:
            self._known(index)
            return
        form = self._forms[index] if self._forms else -1
        if form not in self._codes or depth + _CALL_DEPTH > _MAX_DEPTH:
            call = self._tensor(index, None)
            self._container(call, Call, depth)
            self._memo[index] = self._memo[Call, id(call)]
            if form >= 0:
                self._codes[form] = self._codes_of(call)
            return
        before, after = self._codes[form]
        data = self._keys[index].encode()
        self.parts += before, _U4(len(data)), data, after
        self._remember(index)

    def _codes_of(self, call: Call) -> tuple[bytes, bytes]:
        """Return the code of calls like one that was just written, before and after the length and text of the key."""
        (storage, kind, _, device, count), (offset, shape, strides, *others) = call.args[0].identity, call.args[1:]
        before = self._code(call.function) + b"((" + self._code(storage, kind) + b"X"
        after = self._code(device, count) + b"tQ" + self._code(offset)
        for sizes in (shape, strides):
            after += b"(" + self._code(*sizes) + b"t"
        for other in others:
            after += self._code(other.function) + b"(tR" if type(other) is Call else self._code(other)
        return before, after + b"tR"

    def _code(self, *nodes: Any) -> bytes:
        """Return the code of numbers and known texts and references."""
        before = len(self.parts)
        for node in nodes:
            self.value(node, 0)
        code = b"".join(self.parts[before:])
        del self.parts[before:]
        return code

    def _mapping(self, node: dict[Any, Any], key: Any, depth: int) -> None:
        if type(node) is dict:
            self.parts.append(b"}")
        elif type(node) is OrderedDict:
            self._call(ORDERED_DICT, (), depth)
        else:
            factory = getattr(node, "default_factory", None)
            named = () if factory is None else (Reference((factory.__module__, factory.__qualname__)),)
            self._call(DEFAULT_DICT, named, depth)
        self._remember(key)
        entries = list(node.items())
        for start in range(0, len(entries), _BATCH):
            self.parts.append(b"(")
            for name, item in entries[start : start + _BATCH]:
                if type(name) is str:
                    self._text(name)
                else:
                    self.value(name, depth + 1)
                if type(item) is TensorRef:
                    self._tensor_of(item, depth + 1)
                else:
                    self.value(item, depth + 1)
            self.parts.append(b"u")
        if type(node) is OrderedDict and vars(node):
            self._state(vars(node), depth)

    def _items(self, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        for start in range(0, len(items), _BATCH):
            self.parts.append(b"(")
            for item in items[start : start + _BATCH]:
                self.value(item, depth + 1)
            self.parts.append(b"e")

    def _state(self, state: Any, depth: int) -> None:
        self.value(state, depth + 1)
        self.parts.append(b"b")

    def _call(self, function: Reference, args: tuple[Any, ...], depth: int) -> None:
        if function == NEW_OBJECT and args:  # `torch.load(weights_only=True)` takes the opcode alone.
            self.value(args[0], depth + 1)
            self.value(args[1:], depth + 1)
            self.parts.append(b"\x81")
            return
        self.value(function, depth + 1)
        self.parts.append(b"(")
        for argument in args:
            self.value(argument, depth + 1)
        self.parts.append(b"tR")

    def _text(self, text: str) -> None:
        if text not in self._memo:
            data = text.encode("utf-8", "surrogatepass")
            if len(data) > MAX_PICKLE_BYTES:
                raise UsageError(
                    "A single value of more than 1 GiB cannot be written to a torch file; make it a tensor."
                )
            self.parts.append(b"X" + _U4(len(data)) + data)
            self._remember(text)
        else:
            self._known(text)

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.parts.append(b"K" + struct.pack("<B", value))
        elif 0 <= value < 65536:
            self.parts.append(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise UsageError("An integer of more than 255 bytes cannot be written to a torch file.")
            self.parts.append(b"\x8a" + struct.pack("<B", len(data)) + data)

    def _known(self, key: Any) -> bool:
        number = self._memo.get(key)
        if number is None:
            return False
        self.parts.append(b"h" + struct.pack("<B", number) if number < 256 else b"j" + struct.pack("<I", number))
        return True

    def _remember(self, key: Any) -> None:
        number = self._memo[key] = self._numbers
        self._numbers += 1
        self.parts.append(b"q" + struct.pack("<B", number) if number < 256 else b"r" + _U4(number))
