"""Turns the nodes of a torch pickle into the tree of a layout: typed paths, tensors, unknown objects, no cycles."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import Path, Segment, Tensor, TensorRef, Unknown, like
from ckstore.formats.torch.objects import Storage, StoredTensor
from ckstore.formats.torch.pickle_reader import Global, Identity, Object
from ckstore.formats.torch.storages import View
from ckstore.formats.trees import ATTRIBUTED, FROM_TYPE, MODULE_GROUPS

#: Deepest nesting of containers; walking a level takes up to four of the interpreter's 1000 frames.
MAX_DEPTH = 128
#: Maximal tensors of one file; a shared container counts once per reference.
MAX_TENSORS = 1_000_000
#: Maximal nodes that are visited: a few shared containers can expand to any number.
MAX_NODES = 20_000_000

#: Replaces a container within itself.
CYCLE = Unknown("ckstore.cycle")
_NAMES: dict[type, str] = {
    dict: "builtins.dict",
    OrderedDict: "collections.OrderedDict",
    defaultdict: "collections.defaultdict",
}
#: Types of plain values.
PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})
#: Path of the tensor of a file that is only a tensor.
ROOT: Path = ("tensor",)


class TreeReader:
    """Turns nodes into a tree of plain containers, plain values, `TensorRef` (which counts `views`) and `Unknown`.

    Containers without tensors keep their sharing. Those with tensors are expanded at each reference, since each place
    gives the tensors other paths; `shared` pairs these nodes, and those of a tensor, with the first ones.
    """

    def __init__(self) -> None:
        self.views: list[View] = []
        self.shared: list[tuple[Any, Any]] = []
        self._first: dict[int, Any] = {}
        self._nodes = 0
        self._open: set[int] = set()
        self._cycles = 0
        self._without_tensors: dict[int, Any] = {}

    def read(self, node: Any) -> Any:
        """Return the tree of a pickle's final value."""
        return self._visit(node, ROOT if type(node) is StoredTensor else (), 0, {})

    def _visit(self, node: Any, path: Path, depth: int, taken: dict[Segment, int]) -> Any:
        kind = type(node)
        if kind in PLAIN:
            return node
        if kind is StoredTensor and node.attributes is None:
            return self._again(node, self._tensor(node, path))
        if kind is Identity:
            return self._visit(node.value, path, depth, taken)
        if kind is Global:
            return Unknown(node.name, None)
        if kind is Storage:
            return Unknown("torch.storage", (node.key, node.dtype, node.count))
        identity = id(node)
        if identity in self._without_tensors:
            return self._without_tensors[identity]
        if identity in self._open:
            self._cycles += 1
            return CYCLE
        if depth > MAX_DEPTH:
            raise InputError(f"the pickle nests deeper than {MAX_DEPTH} levels")
        self._open.add(identity)
        tensors, cycles = len(self.views), self._cycles
        if isinstance(node, dict):
            tree = self._dict(node, path, depth, taken)
        elif kind is Object:
            tree = self._object(node, path, depth, taken)
        elif kind is StoredTensor:
            tensor = self._tensor(node, path)
            tree = Unknown(ATTRIBUTED, (tensor,), self._visit(node.attributes, path, depth + 1, {}))
        elif kind is set or kind is frozenset:
            tree = self._set(node, path, depth, taken)
        else:
            items = self._sequence(node, path, depth, taken)
            tree = tuple(items) if kind is tuple else items
        self._open.discard(identity)
        if len(self.views) == tensors and self._cycles == cycles:
            self._without_tensors[identity] = tree
        return tree if len(self.views) == tensors else self._again(node, tree)

    def _again(self, node: Any, tree: Any) -> Any:
        """Return the tree of a node with tensors; note it if it is not the first one."""
        first = self._first.setdefault(id(node), tree)
        if first is not tree:
            self.shared.append((tree, first))
        return tree

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise InputError(f"the pickle expands to more than {MAX_NODES:,} values")

    def _tensor(self, tensor: StoredTensor, path: Path) -> TensorRef:
        if len(self.views) >= MAX_TENSORS:
            raise InputError(f"the pickle expands to more than {MAX_TENSORS:,} tensors")
        storage, offset = tensor.storage, tensor.offset
        if storage.offset:
            skipped, rest = divmod(storage.offset * ITEM_SIZES[storage.dtype], ITEM_SIZES[tensor.dtype])
            if rest:
                raise InputError(f"a view of storage {storage.key!r} begins in the middle of an element")
            offset += skipped
        found = Tensor(path, tensor.dtype, tensor.shape, tensor.strides, -1, offset, tensor.marks)
        self.views.append((storage.key, found))
        return TensorRef(len(self.views) - 1)

    def _sequence(self, items: Any, path: Path, depth: int, taken: dict[Segment, int]) -> list[Any]:
        self._count(len(items))
        plain = PLAIN
        return [
            item if type(item) in plain else self._visit(item, (*path, free(index, taken)), depth + 1, {})
            for index, item in enumerate(items)
        ]

    def _entries(self, entries: Any, path: Path, depth: int, taken: dict[Segment, int]) -> tuple[list[Any], list[Any]]:
        """Return keys and values of a mapping, as trees."""
        self._count(len(entries))
        keys: list[Any] = []
        values: list[Any] = []
        for key, value in entries:
            if type(value) not in PLAIN:
                if type(key) is str and key not in taken:
                    segment: Segment = key
                    taken[key] = 2
                else:
                    segment = free(segment_of(key), taken)
                if type(value) is StoredTensor and value.attributes is None:
                    value = self._again(value, self._tensor(value, (*path, segment)))
                else:
                    value = self._visit(value, (*path, segment), depth + 1, {})
            if type(key) is Identity or type(key) not in PLAIN:
                key = self._visit(key, (*path, free("key", taken)), depth + 1, {})
            keys.append(key)
            values.append(value)
        return keys, values

    def _dict(self, node: dict[Any, Any], path: Path, depth: int, taken: dict[Segment, int]) -> Any:
        keys, values = self._entries(node.items(), path, depth, taken)
        attributes = self._dict_attributes(node, path, depth) if isinstance(node, OrderedDict) and vars(node) else {}
        if Identity in map(type, node):
            args: tuple[Any, ...] = ()
            if isinstance(node, defaultdict) and node.default_factory is not None:
                args = (Unknown(f"{node.default_factory.__module__}.{node.default_factory.__name__}", None),)
            return Unknown(_NAMES[type(node)], args, attributes or None, tuple(zip(keys, values, strict=True)))
        made = like(node, zip(node, values, strict=True))
        if attributes:
            vars(made).update(attributes)
        return made

    def _dict_attributes(self, node: OrderedDict[Any, Any], path: Path, depth: int) -> dict[str, Any]:
        """Return the attributes of a dictionary; none if there are tensors, as no place of the tree leads there."""
        tensors, shared, first = len(self.views), len(self.shared), self._first
        self._first = {}
        attributes: dict[str, Any] = self._visit(vars(node), (*path, "__dict__"), depth + 1, {})
        self._first = first
        if len(self.views) == tensors:
            return attributes
        del self.views[tensors:], self.shared[shared:]
        return {}

    def _set(self, node: Any, path: Path, depth: int, taken: dict[Segment, int]) -> Any:
        if any(type(item) is Identity for item in node):
            return Unknown(f"builtins.{type(node).__name__}", items=tuple(self._sequence(node, path, depth, taken)))
        return node

    def _object(self, node: Object, path: Path, depth: int, taken: dict[Segment, int]) -> Any:
        wrapped = _wrapped_tensor(node)
        if wrapped is not None:
            return self._tensor(wrapped, path or ROOT)
        # Groups first: a parameter keeps its plain name even if another attribute has the same.
        state = node.state
        if isinstance(state, dict) and all(isinstance(state.get(group), dict) for group in ("_parameters", "_modules")):
            state = self._module_state(state, path, depth, taken)
        elif isinstance(state, dict | tuple | list):
            state = self._visit(state, path, depth + 1, taken)
        elif state is not None and type(state) not in PLAIN:
            state = self._visit(state, (*path, free("state", taken)), depth + 1, {})
        if node.name == FROM_TYPE and len(node.args) == 4 and isinstance(node.args[3], dict | tuple):
            # The inner tensors of a subclass are its attributes: their paths show how they are accessed.
            args = (
                *self._sequence(node.args[:3], path, depth, taken),
                self._visit(node.args[3], path, depth + 1, taken),
            )
        else:
            args = tuple(self._sequence(node.args, path, depth, taken))
        items: list[Any]
        if node.items and all(type(item) is tuple and len(item) == 2 for item in node.items):
            items = list(zip(*self._entries(node.items, path, depth, taken), strict=True))
        else:
            items = self._sequence(node.items, path, depth, taken)
        return Unknown(node.name, args, state, tuple(items))

    def _module_state(self, state: dict[Any, Any], path: Path, depth: int, taken: dict[Segment, int]) -> dict[Any, Any]:
        trees: dict[Any, Any] = {}
        for group in MODULE_GROUPS:
            if isinstance(state.get(group), dict):
                # The group's dictionary takes no segment of its own.
                trees[group] = self._visit(state[group], path, depth + 1, taken)
        others = {key: value for key, value in state.items() if key not in trees}
        trees.update(zip(others, self._entries(others.items(), path, depth, taken)[1], strict=True))
        return {key: trees[key] for key in state}


def segment_of(key: Any) -> Segment:
    """Return the path segment of a dictionary key: text and integers unchanged, anything else as readable text."""
    kind = type(key)
    if kind is Identity and type(key.value) is int and key.value.bit_length() <= 64:
        return int(key.value)
    if kind is str:
        return str(key)
    if kind is int:
        return int(key)
    if kind is bytes:
        return str(key.decode("latin-1"))
    if kind is tuple or kind in PLAIN:
        return repr(key)
    return "key"


def free(segment: Segment, taken: dict[Segment, int]) -> Segment:
    """Return the segment, or the first of `segment~2`, `segment~3`, … that is not in `taken`; add it there.

    `taken` holds for each segment the next number to try, so that many equal ones do not take quadratic time.
    """
    if segment in taken:
        first, stem = segment, segment if isinstance(segment, str) else f"[{segment}]"
        while (segment := f"{stem}~{taken[first]}") in taken:
            taken[first] += 1
        taken[first] += 1
    taken[segment] = 2
    return segment


def _wrapped_tensor(node: Object) -> StoredTensor | None:
    """Return the tensor inside of an old `Variable` or `Parameter`, whose state is (tensor, requires_grad, hooks)."""
    if node.name in ("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable"):
        state = node.state
        if type(state) is tuple and state and type(state[0]) is StoredTensor:
            return state[0]
    return None
