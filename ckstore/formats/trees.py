"""Trees of layouts: selects tensors, replaces tensors, and turns unknown objects into plain containers and numbers."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from ckstore.formats.layout import Shared, TensorRef, Unknown, like

#: Attributes of `torch.nn.Module` whose entries are accessed as attributes of the module.
MODULE_GROUPS = ("_parameters", "_buffers", "_modules")
#: Modules of NumPy 1 and 2 that define its functions.
NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
#: `struct` formats of NumPy's dtypes.
_NUMBERS = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip
_GONE = object()
#: Nodes that are replaced, or whose parts are.
_NODES = (TensorRef, dict, list, tuple, Unknown)
#: Name of the object for a tensor with attributes: its argument is the tensor, its state the attributes.
ATTRIBUTED = "torch.Tensor"
#: Rebuilds a tensor of a class from (function, class, arguments, state), a subclass around others by `WRAPPER`.
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
WRAPPER = "torch._utils._rebuild_wrapper_subclass"
#: Rebuilds a quantised tensor; its first argument is the tensor of its integers in place of their storage.
QUANTISED = "torch._utils._rebuild_qtensor"
#: Rebuild tensors of other layouts, and parameters of these.
SPARSE = "torch._utils._rebuild_sparse_tensor"
NESTED = "torch._utils._rebuild_nested_tensor"
JAGGED = "torch.nested._internal.nested_tensor._rebuild_njt"
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def tensor_of(node: Any) -> TensorRef | None:
    """Return the tensor of a node that is one, with attributes or without; None for any other."""
    if isinstance(node, Unknown) and node.name == ATTRIBUTED and node.args is not None and len(node.args) == 1:
        node = node.args[0]
    return node if isinstance(node, TensorRef) else None


def tensor_numbers(tree: Any) -> Iterator[int]:
    """Yield the number of every `TensorRef` of a tree, in its order; those of a shared container once."""
    left = [tree]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if type(node) is TensorRef:
            yield node.index
        elif isinstance(node, dict | list | tuple | Unknown) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, dict):
                left.extend(reversed(node.values()))
            elif isinstance(node, Unknown):
                left.extend((node.items, node.state, node.args))
            else:
                left.extend(reversed(node))


def select_tensors(tree: Any, keep: Collection[int]) -> Any:
    """Return the tree with the tensors whose number is in `keep`, numbers unchanged; None if none remain.

    Dictionary entries that lose all of their tensors vanish. List and tuple items become None, so that the others keep
    their places. Parts that never held a tensor stay.
    """
    kept_numbers = frozenset(keep)
    done: dict[int, tuple[Any, bool]] = {}

    def select(node: Any) -> tuple[Any, bool]:
        """Return the remaining part of a node, and whether it has a tensor."""
        if isinstance(node, TensorRef):
            kept = node.index in kept_numbers
            return (node if kept else _GONE), kept
        if not isinstance(node, dict | list | tuple | Unknown):
            return node, False
        if id(node) not in done:
            done[id(node)] = select_parts(node)
        return done[id(node)]

    def select_parts(node: dict[Any, Any] | list[Any] | tuple[Any, ...] | Unknown) -> tuple[Any, bool]:
        if isinstance(node, dict):
            parts: list[Any] = list(node.values())
        elif isinstance(node, Unknown):
            parts = [node.args, node.state, node.items]
        else:
            parts = list(node)
        selected = [select(part) for part in parts]
        kept = any(holds for _, holds in selected)
        if not kept and any(part is _GONE for part, _ in selected):
            return _GONE, False
        if isinstance(node, dict):
            left = zip(node, selected, strict=True)
            return like(node, ((key, part) for key, (part, _) in left if part is not _GONE)), kept
        items = [None if part is _GONE else part for part, _ in selected]
        if isinstance(node, Unknown):
            args = None if node.args is None else items[0] or ()
            return Unknown(node.name, args, items[1], items[2] or ()), kept
        return (tuple(items) if isinstance(node, tuple) else items), kept

    selected, _ = select(tree)
    return None if selected is _GONE else selected


def replace_tensors(
    tree: Any,
    replacement: Callable[[int], Any],
    build: Callable[[Unknown], Any] | None = None,
    shared: Shared = (),
) -> Any:
    """Return the tree with ``replacement(n)`` in place of tensor n; a container at several places stays shared.

    `build` replaces an unknown object whose parts are already replaced. With the pairs of `FileLayout.shared`, an
    object at several places becomes one.
    """
    return _replaced(replacement, build, {id(later): first for later, first in shared}, {}, tree)


def renumber_tensors(tree: Any, replacement: Callable[[int], Any], shared: Shared) -> tuple[Any, Shared]:
    """Return `replace_tensors` of a tree, and the pairs of its nodes in place of the pairs of `FileLayout.shared`."""
    done: dict[int, Any] = {}
    made = _replaced(replacement, None, {}, done, tree)
    return made, [(done[id(later)], done[id(first)]) for later, first in shared]


def _replaced(
    replacement: Callable[[int], Any],
    build: Callable[[Unknown], Any] | None,
    firsts: dict[int, Any],
    done: dict[int, Any],
    tree: Any,
) -> Any:
    """Return `replace_tensors`; `done` gets the results by the identities of nodes."""
    node = firsts.get(id(tree), tree)
    if not isinstance(node, _NODES):
        return node
    if id(node) not in done:
        if isinstance(node, TensorRef):
            done[id(node)] = replacement(node.index)
        else:
            # No function that refers to itself: its cycle would keep the tensors until the next garbage collection.
            done[id(node)] = _converted(node, partial(_replaced, replacement, build, firsts, done), build)
    return done[id(node)]


def _converted(
    node: dict[Any, Any] | list[Any] | tuple[Any, ...] | Unknown,
    visit: Callable[[Any], Any],
    build: Callable[[Unknown], Any] | None,
) -> Any:
    if isinstance(node, dict):
        made = like(node, zip(node, map(visit, node.values()), strict=True))
        if isinstance(node, OrderedDict):
            vars(made).update(visit(vars(node)))
        return made
    if isinstance(node, list):
        return [visit(item) for item in node]
    if isinstance(node, tuple):
        return tuple(visit(item) for item in node)
    changed = Unknown(node.name, visit(node.args), visit(node.state), visit(node.items))
    return changed if build is None else build(changed)


def plain_tree(tree: Any) -> Any:
    """Return the tree without `Unknown` nodes, which can be written without naming a class.

    A `torch.nn.Module` becomes its state dict: a flat dictionary with dotted names. NumPy's numbers become Python's,
    `torch.Size` a tuple, every kind of dictionary `dict`, every kind of set `set`. Tensors lose their attributes. Any
    other object becomes a dictionary with `__class__` and, if present, `args`, `state` and `items`.
    """
    done: dict[int, Any] = {}

    def plain(node: Any) -> Any:
        if isinstance(node, frozenset):
            return set(node)
        if not isinstance(node, dict | list | tuple | Unknown):
            return node
        if id(node) not in done:
            done[id(node)] = convert(node)
        return done[id(node)]

    def convert(node: Any) -> Any:
        tensor = tensor_of(node)
        if tensor is not None:
            return tensor
        number = numpy_number(node)
        if number is not None:
            return number
        if isinstance(node, Unknown) and node.args:
            if node.name == "torch.Size" and isinstance(node.args[0], tuple):
                return node.args[0]
            if node.name == "collections.Counter" and isinstance(node.args[0], dict):
                return plain(node.args[0])
        if isinstance(node, dict):
            return {key: plain(value) for key, value in node.items()}
        if isinstance(node, tuple):
            return tuple(plain(item) for item in node)
        if isinstance(node, list):
            return [plain(item) for item in node]
        if is_module(node):
            state_dict: dict[str, Any] = {}
            _module_state(node, "", state_dict, set())
            return state_dict
        parts = {"args": node.args, "state": node.state, "items": node.items}
        return {"__class__": node.name} | {name: plain(part) for name, part in parts.items() if part not in (None, ())}

    return plain(tree)


def numpy_number(node: Any) -> bool | int | float | complex | None:
    """Return the number of an unknown object that is a NumPy scalar, little-endian; None for anything else."""
    if not isinstance(node, Unknown) or node.name not in [f"{core}.scalar" for core in NUMPY_CORES]:
        return None
    kind, data = node.args if node.args is not None and len(node.args) == 2 else (None, None)
    if not isinstance(kind, Unknown) or not kind.args or not isinstance(data, bytes):
        return None
    order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else "<"
    code = _NUMBERS.get(kind.args[0]) if isinstance(kind.args[0], str) else None
    if code is None or order not in ("<", "|", "=") or len(data) != struct.calcsize(f"<{code}"):
        return None
    numbers: tuple[Any, ...] = struct.unpack(f"<{code}", data)
    return complex(*numbers) if len(numbers) == 2 else numbers[0]


def is_module(node: Any) -> bool:
    """Return whether a node of a tree is an object with the state of a `torch.nn.Module`."""
    state = node.state if isinstance(node, Unknown) else None
    return isinstance(state, dict) and all(isinstance(state.get(group), dict) for group in ("_parameters", "_modules"))


def _module_state(module: Unknown, prefix: str, state_dict: dict[str, Any], barren: set[int]) -> None:
    """Add a module's tensors; modules in `barren` have none, and are skipped at further references."""
    before = len(state_dict)
    for group in MODULE_GROUPS:
        members = module.state.get(group)
        for name, member in members.items() if isinstance(members, dict) else ():
            tensor = tensor_of(member)
            if tensor is not None:
                state_dict[f"{prefix}{name}"] = tensor
            elif is_module(member) and id(member) not in barren:
                _module_state(member, f"{prefix}{name}.", state_dict, barren)
    if len(state_dict) == before:
        barren.add(id(module))
