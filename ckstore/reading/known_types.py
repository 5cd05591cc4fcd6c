"""Builds objects of well-known types from the descriptions in a pickle.

A name in a pickle is looked up in the tables here. It is never imported, and no class is called unless the tables or
the caller list it.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import fractions
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch

from ckstore.errors import InputError, UsageError
from ckstore.formats.layout import Unknown
from ckstore.formats.torch.objects import CLASSES, MAX_FIELD_DEPTH, MAX_FIELDS, reduce, registered
from ckstore.formats.torch.pickle_reader import read_pickle
from ckstore.formats.torch.pickle_writer import OPAQUE
from ckstore.formats.torch.tree_reader import TreeReader
from ckstore.formats.trees import (
    ATTRIBUTED,
    FROM_TYPE,
    JAGGED,
    NESTED,
    NUMPY_CORES,
    PARAMETERS,
    QUANTISED,
    SPARSE,
    WRAPPER,
    replace_tensors,
)

#: Bytes that objects may take in addition to a multiple of the pickle's size.
_FREE_BYTES = 1 << 28
_TIMES_THE_PICKLE = 16

#: Makes an object of arguments, state and items; raises one of `_UNFIT` if the type does not write them.
_Make = Callable[[tuple[Any, ...], Any, tuple[Any, ...]], Any]
_UNFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_DTYPE = re.compile(r"b1|[iu][1248]|f2|f4|f8|f16|c8|c16|c32|[SUV]\d{1,9}|[Mm]8")
_TIME_UNITS = (b"generic", b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")
_MAX_AXES = 64
_FRACTION = re.compile(r"[-+]?\d{1,4000}(/\d{1,4000})?")


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the type does not write this")


def _called(cls: Callable[..., Any], *kinds: type) -> _Make:
    """Return a maker that calls `cls` with its arguments, all of these kinds; of any kind if none is given."""

    def make(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
        _require(state is None and not items)
        _require(not kinds or all(isinstance(argument, kinds) for argument in args))
        return cls(*args)

    return make


def _with_state(cls: Callable[[], Any]) -> _Make:
    """Return a maker of objects that consist of their attributes."""

    def make(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
        _require(not args and not items and (state is None or all(isinstance(name, str) for name in state)))
        made = cls()
        vars(made).update(state or {})
        return made

    return make


def _dict(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(state is None and not args)
    return {_fair(key): value for key, value in items}


def _ordered_dict(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(not args)
    made = collections.OrderedDict((_fair(key), value) for key, value in items)
    _set_attributes(made, state or {})
    return made


def _tensor(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    """Return a tensor with its attributes; see `ckstore.formats.trees.ATTRIBUTED`."""
    _require(len(args) == 1 and isinstance(args[0], torch.Tensor) and not items)
    _set_attributes(args[0], state or {})
    return args[0]


def _set_attributes(made: Any, attributes: Any) -> None:
    """Set the attributes that hide none of the type's."""
    _require(all(isinstance(name, str) for name in attributes))
    vars(made).update({name: value for name, value in attributes.items() if not hasattr(type(made), name)})


def _require_stored(*parts: Any) -> None:
    """Raise unless the elements, which are read, are in memory each: those of a stride of 0 could be any number."""
    _require(all(one.numel() <= one.untyped_storage().nbytes() for one in parts))


def _sparse(layout: Any, data: Any) -> Any:
    """Return a sparse tensor whose indices are within its shape: kernels of torch rely on that."""
    *parts, size, last = data if layout == torch.sparse_coo and len(data) == 4 else (*data, None)
    _require(all(isinstance(part, torch.Tensor) for part in parts))
    _require_stored(*parts[:-1])
    how = {"is_coalesced": last} if layout == torch.sparse_coo else {"layout": layout}
    make: Any = torch.sparse_coo_tensor if layout == torch.sparse_coo else torch.sparse_compressed_tensor
    return make(*parts, size, check_invariants=True, **how)


def _nested(buffer: Any, *places: Any) -> Any:
    """`_rebuild_nested_tensor(buffer, sizes, strides, offsets)`: each tensor lies within the buffer."""
    _require(buffer.dim() == 1 and buffer.is_contiguous() and all(one.dtype == torch.int64 for one in places))
    _require_stored(*places)
    sizes, strides, offsets = (one.contiguous() for one in places)
    _require(sizes.dim() == 2 and sizes.shape == strides.shape and offsets.shape == sizes.shape[:1])
    _require(sizes.shape[1] <= _MAX_AXES)
    for shape, steps, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        _require(min((offset, *shape, *steps)) >= 0)
        reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        _require(prod(shape) == 0 or offset + reach < len(buffer))
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _jagged(parts: Any) -> Any:
    """Return a jagged tensor whose offsets and lengths are within its values; torch computes the rest again."""
    values, offsets, lengths, axis = (parts[name] for name in ("values", "offsets", "lengths", "_ragged_idx"))
    _require(type(axis) is int and 0 < axis <= values.dim() and offsets.dim() == 1 and len(offsets) > 0)
    places = [offsets] if lengths is None else [offsets, lengths]
    _require(all(one.dtype in (torch.int64, torch.int32) for one in places))
    _require_stored(*places)
    starts = offsets.tolist()
    sizes = [stop - start for start, stop in pairwise(starts)] if lengths is None else lengths.tolist()
    _require(len(sizes) == len(starts) - 1 and min((starts[0], *sizes)) >= 0)
    _require(all(start + size <= values.shape[axis - 1] for start, size in zip(starts, sizes, strict=False)))
    _require(lengths is None or min(starts) >= 0)
    made = torch.nested.nested_tensor_from_jagged(values.detach(), offsets, lengths, jagged_dim=axis)
    return made.requires_grad_(parts["requires_grad"] is True)


def _quantised(integers: Any, quantiser: Any) -> Any:
    """Return a quantised tensor in the memory of its integers."""
    dtype = {torch.int8: torch.qint8, torch.uint8: torch.quint8, torch.int32: torch.qint32}[integers.dtype]
    scheme, scale, zero, *axis = quantiser
    if scheme == torch.per_tensor_affine:
        _require(type(scale) is float and type(zero) is int and not axis)
        made: Any = torch._empty_affine_quantized((0,), scale=scale, zero_point=zero, dtype=dtype)
    else:
        _require(scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams))
        # Of the latter scheme torch writes the name of the former; the dtypes tell them apart.
        _require((scale.dtype, zero.dtype) in ((torch.float64, torch.int64), (torch.float32, torch.float32)))
        _require(type(axis[0]) is int and 0 <= axis[0] < integers.dim())
        _require(scale.shape == zero.shape == (integers.shape[axis[0]],))
        _require(scale.is_contiguous() and zero.is_contiguous())
        none = (0,) * integers.dim()
        made = torch._empty_per_channel_affine_quantized(
            none, scales=scale, zero_points=zero, axis=axis[0], dtype=dtype
        )
    return made.set_(integers.untyped_storage(), integers.storage_offset(), integers.shape, integers.stride())


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    _require(isinstance(data, torch.Tensor))
    return _tensor((torch.nn.Parameter(data, requires_grad is True),), state, ())


def _wrapper(cls: Any, args: Any, state: Any) -> Any:
    """Return a tensor of a class around the tensors in its state; all that its class requires are there."""
    of, dtype, size, stride, offset, layout, _, requires_grad = args
    _require(of is cls and issubclass(cls, torch.Tensor) and all(type(one) is int for one in (*size, *stride, offset)))
    parts = (cls, dtype, tuple(size), tuple(stride), offset, layout, torch.device("cpu"), requires_grad is True)
    rebuild: Any = torch._tensor._rebuild_from_type_v2
    made = rebuild(torch._utils._rebuild_wrapper_subclass, cls, parts, state)
    if hasattr(cls, "__tensor_flatten__"):
        _require(all(isinstance(getattr(made, name), torch.Tensor) for name in made.__tensor_flatten__()[0]))
    return made


def _elements(cls: Callable[..., Any]) -> _Make:
    def make(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
        _require(state is None and not args)
        return cls(map(_fair, items))

    return make


def _default_dict(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(state is None and len(args) <= 1 and isinstance(args[0] if args else None, type | None))
    return collections.defaultdict(args[0] if args else None, ((_fair(key), value) for key, value in items))


def _deque(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(state is None and len(args) <= 2)
    first, longest = (*args, (), None)[:2] if args else ((), None)
    _require(isinstance(first, list | tuple) and isinstance(longest, int | None))
    return collections.deque((*first, *items), longest)


def _uuid(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    is_safe = state.get("is_safe", uuid.SafeUUID.unknown.value)
    _require(not args and not items and type(state["int"]) is int and isinstance(is_safe, int | None))
    return uuid.UUID(int=state["int"], is_safe=uuid.SafeUUID(is_safe))


def _fraction(*args: Any) -> Any:
    text = len(args) == 1 and isinstance(args[0], str) and _FRACTION.fullmatch(args[0])
    _require(bool(text or all(isinstance(part, int) for part in args)))
    return fractions.Fraction(*args)


def _bytearray(*args: Any) -> Any:
    if len(args) == 2:
        _require(isinstance(args[0], str) and args[1] in ("latin-1", "latin1"))
        return bytearray(args[0], "latin-1")
    _require(all(isinstance(data, bytes) for data in args))
    return bytearray(*args)


def _dtype(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    """`numpy.dtype(code, align, copy)` with (version, order, subarray, names, fields, size, alignment, flags, …)."""
    code = args[0]
    is_record = code is np.record and state is not None and state[3] is not None
    _require(is_record or (isinstance(code, str) and _DTYPE.fullmatch(code) is not None and not items))
    if state is None:
        return np.dtype(code)
    order, subarray, names, fields, size = state[1:6]
    _require(order in ("<", ">", "|", "="))
    if subarray is not None:
        base, shape = subarray
        _require(isinstance(base, np.dtype))
        return np.dtype((base, shape))
    if names is not None:
        _require(all(isinstance(name, str) for name in names))
        parts = [fields[name] for name in names]
        number = 0
        for part in parts:
            _require(isinstance(part[0], np.dtype))
            number += _fields(part[0])
            _require(number <= MAX_FIELDS)
        offsets = [part[1] for part in parts]
        aligned = len(state) > 7 and bool(state[7] & 0x80)
        wanted = {"names": list(names), "formats": [part[0] for part in parts], "offsets": offsets, "itemsize": size}
        titles = [part[2] if len(part) > 2 else None for part in parts]
        _require(all(isinstance(title, str | None) for title in titles))
        if any(title is not None for title in titles):
            wanted["titles"] = titles
        made = np.dtype(wanted, align=aligned)  # type: ignore[call-overload]
        return np.dtype((np.record, made)) if is_record else made
    if code in ("M8", "m8"):
        unit, number = state[8][1][:2]
        _require(unit in _TIME_UNITS and type(number) is int)
        code += "" if unit == b"generic" else f"[{number}{unit.decode()}]"
    return np.dtype(f"{order}{code}")


def _fields(dtype: np.dtype[Any], depth: int = 0) -> int:
    """Return the number of fields of a dtype and of those within."""
    _require(depth <= MAX_FIELD_DEPTH)
    fields = dtype.base.fields
    return 1 if not fields else sum(_fields(fields[name][0], depth + 1) for name in dtype.base.names or ())


def _array(shape: Any, dtype: Any, data: Any, order: Any) -> Any:
    _require(isinstance(dtype, np.dtype) and dtype.itemsize > 0 and not dtype.hasobject)
    _require(len(shape) <= _MAX_AXES and all(type(size) is int and size >= 0 for size in shape))
    _require(isinstance(data, bytes | bytearray))
    _require(len(data) == prod(shape) * dtype.itemsize and order in ("C", "F"))
    if not data:
        return np.empty(shape, dtype, order)
    return np.frombuffer(data, dtype).reshape(shape, order=order).copy("K")


def _reconstruct(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    """`_reconstruct(numpy.ndarray, (0,), b'b')` with (version, shape, dtype, is Fortran, bytes)."""
    _require(args[0] is np.ndarray and not items)
    _, shape, dtype, fortran, data = state
    array = _array(shape, dtype, data, "F" if fortran else "C")
    # Equals NumPy's own `__setstate__`, except for fields.
    return array if dtype.isnative or dtype.fields else array.astype(dtype.newbyteorder("="), order="K")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """`_frombuffer(data, dtype, shape, order)`, as protocol 5 writes arrays."""
    return _array(shape, dtype, data, order)


def _scalar(dtype: Any, data: Any) -> Any:
    if data == b"" and isinstance(dtype, np.dtype) and dtype.kind in "SU" and not dtype.itemsize:
        return dtype.type()
    return _array((1,), dtype, data, "C")[0]


_BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
#: Shape and dtype of each array in a bit generator's state, and the largest position: NumPy checks neither.
_STATES = {"MT19937": ("key", 624, np.uint32), "Philox": ("counter", 4, np.uint64), "SFC64": ("state", 4, np.uint64)}
_POSITIONS = {"MT19937": 624, "Philox": 4}
_LARGEST_POOL = 64


def _check_state(values: Any) -> None:
    """Raise unless arrays and positions in the state of a bit generator are within its own."""
    kind, inner = values["bit_generator"], values["state"]
    _require(isinstance(kind, str))
    arrays = [(inner[_STATES[kind][0]], *_STATES[kind][1:])] if kind in _STATES else []
    if kind == "Philox":
        arrays += [(inner["key"], 2, np.uint64), (values["buffer"], 4, np.uint64)]
    _require(all(isinstance(one, np.ndarray) and one.shape == (n,) and one.dtype == of for one, n, of in arrays))
    position = inner["pos"] if kind == "MT19937" else values.get("buffer_pos", 0)
    _require(type(position) is int and 0 <= position <= _POSITIONS.get(kind, 0))


def _seed_sequence(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(args[0] is np.random.SeedSequence and not items)
    entropy, children, pool, size, key = state
    _require(type(size) is int and size <= _LARGEST_POOL and isinstance(pool, np.ndarray))
    # NumPy follows nested lists, which shared ones could make endless.
    for one in (entropy, key):
        parts = one if isinstance(one, list | tuple | np.ndarray) else (one,)
        _require(all(isinstance(part, int | np.integer) for part in parts))
    made = np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=children)
    _require(np.array_equal(made.pool, pool))
    return made


def _bit_generator(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    values, sequence = state
    _require(args[0] in _BIT_GENERATORS and isinstance(sequence, np.random.SeedSequence | None) and not items)
    _check_state(values)
    made = args[0](0)
    made.__setstate__((values, sequence))
    return made


def _random_state(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    _require(isinstance(args[0], _BIT_GENERATORS) and not items)
    _check_state(state)
    made = np.random.RandomState(args[0])
    made.set_state(state)
    return made


#: The most that the numbers left and the place of the next add up to in the state of torch's generator.
_LEFT_AND_NEXT = 625


def _torch_generator(args: tuple[Any, ...], state: Any, items: tuple[Any, ...]) -> Any:
    """Return a generator whose next number is among those it has left: torch reads behind them otherwise."""
    _require(args[0].type == "cpu" and not items)
    head = state[2][:24].numpy().tobytes()
    left, following = int.from_bytes(head[8:12], "little"), int.from_bytes(head[16:24], "little")
    _require(0 < left <= _LEFT_AND_NEXT - following)
    return torch.Generator().set_state(state[2])


#: Classes, and constants of torch, that a pickle may name without a call.
NAMED: dict[str, Any] = {
    **CLASSES,
    "numpy.ndarray": np.ndarray,
    "numpy.record": np.record,
    **{f"{one.__module__}.{one.__name__}": one for one in (*_BIT_GENERATORS, np.random.SeedSequence)},
    **{f"numpy.{one.__name__}": one for one in set(np.sctypeDict.values()) if one is not np.object_},
    **{
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format | torch.qscheme)
    },
}

#: Makers of objects by the name that the pickle calls.
MAKERS: dict[str, _Make] = {
    "argparse.Namespace": _with_state(argparse.Namespace),
    "builtins.bytearray": _called(_bytearray),
    "builtins.dict": _dict,
    "builtins.frozenset": _elements(frozenset),
    "builtins.range": _called(range, int),
    "builtins.set": _elements(set),
    "builtins.slice": _called(slice),
    "collections.Counter": _called(collections.Counter, dict),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "datetime.date": _called(dt.date, int, bytes),
    "datetime.datetime": _called(dt.datetime, int, bytes, dt.timezone),
    "datetime.time": _called(dt.time, int, bytes, dt.timezone),
    "datetime.timedelta": _called(dt.timedelta, int),
    "datetime.timezone": _called(dt.timezone, dt.timedelta, str),
    "decimal.Decimal": _called(decimal.Decimal, str),
    "fractions.Fraction": _called(_fraction),
    "numpy.dtype": _dtype,
    "numpy.random._pickle.__bit_generator_ctor": _bit_generator,
    "numpy.random._pickle.__generator_ctor": _called(np.random.Generator, *_BIT_GENERATORS),
    "numpy.random._pickle.__randomstate_ctor": _random_state,
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
    **{f"{core}._reconstruct": _reconstruct for core in NUMPY_CORES},
    **{f"{core}.scalar": _called(_scalar) for core in NUMPY_CORES},
    **{f"{core.removesuffix('multiarray')}numeric._frombuffer": _called(_from_buffer) for core in NUMPY_CORES},
    **{
        f"{module}.{kind.__name__}": _called(kind, str)
        for module in ("pathlib", "pathlib._local")
        for kind in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    },
    ATTRIBUTED: _tensor,
    "torch._C.Generator": _torch_generator,
    SPARSE: _called(_sparse),
    NESTED: _called(_nested, torch.Tensor),
    JAGGED: _called(_jagged, dict),
    QUANTISED: _called(_quantised),
    **dict.fromkeys(PARAMETERS, _called(_parameter)),
    "torch.Size": _called(torch.Size, tuple),
    "torch.device": _called(torch.device, str, int),
    "torch.serialization._get_layout": _called(NAMED.__getitem__, str),
    "torch.torch_version.TorchVersion": _called(torch.torch_version.TorchVersion, str),
    "types.SimpleNamespace": _with_state(types.SimpleNamespace),
    "uuid.UUID": _uuid,
}

#: Keys in addition to plain ones whose hashes an attacker cannot make collide.
_FAIR = (
    np.number, np.bool_, np.character, np.datetime64, pathlib.PurePath, torch.dtype, torch.device, dt.date,
    dt.time, dt.timedelta, dt.timezone, Enum, str, float, bool, bytes, complex, type(None),
)  # fmt: skip
_LARGEST_INTEGER = 2**61 - 1
_LONGEST_KEY = 64


def _fair(key: Any, depth: int = 0) -> Any:
    """Return the key if hashing it takes little time and collides with few others; otherwise raise."""
    if isinstance(key, tuple):
        _require(len(key) <= _LONGEST_KEY and depth < 2)
        for part in key:
            _fair(part, depth + 1)
    elif type(key) is int:
        _require(abs(key) < _LARGEST_INTEGER)
    else:
        _require(isinstance(key, _FAIR))
    return key


def _is_short(value: Any) -> bool:
    """Return whether a value has few parts: hashing visits shared ones again."""
    left = [value]
    for _ in range(_LONGEST_KEY):
        if not left:
            return True
        part = left.pop()
        left += part if isinstance(part, tuple) else ()
    return False


class ObjectBuilder:
    """Makes objects of the `Unknown` nodes of one tree; unknown types stay nodes.

    The size of the pickle limits the memory of objects. `allow` are further classes, by the names in the pickle:
    dataclasses, enumerations, named tuples and any other class whose pickle contains its attributes.
    """

    def __init__(self, pickle_bytes: int, allow: Sequence[type] = ()) -> None:
        for one in allow:
            if not isinstance(one, type):
                raise UsageError(f"`allow` takes classes; {one!r} is not one.")
        self._allowed = {f"{one.__module__}.{one.__qualname__}": one for one in allow}
        self._registered = registered()
        self._named = {**self._registered, **NAMED, **self._allowed}
        self._is_inside = False
        self._left = _FREE_BYTES + _TIMES_THE_PICKLE * pickle_bytes

    def __call__(self, node: Unknown) -> Any:
        """Return the object of a node whose parts are complete; the node itself if its type is unknown.

        Raise `InputError` if the objects would take far more memory than the pickle has bytes, and `UsageError` if an
        object of an allowed class cannot be made.
        """
        if node.args is None:
            return self._named.get(node.name, node)
        self._spend((node.args, node.state, node.items), 3)
        allowed = self._allowed.get(node.name)
        if allowed is not None:
            return _of_class(allowed, node)
        if node.name == OPAQUE and self._allowed:
            return self._opened(node)
        if node.name == FROM_TYPE and len(node.args) == 4:
            return self._of_type(node, *node.args)
        try:
            if node.name == "builtins.getattr":
                return self._member(*node.args) or node
            if (make := MAKERS.get(node.name)) is not None:
                return make(node.args, node.state, node.items)
            registered = self._registered.get(node.name)
            return node if registered is None else _of_class(registered, node)
        except (*_UNFIT, UsageError):
            return node

    def _of_type(self, node: Unknown, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """Return a tensor of an allowed or registered class around others, or one of torch's own with attributes."""
        name = getattr(function, "name", "")
        try:
            if name == WRAPPER and isinstance(kind, type):
                return _wrapper(kind, args, state)
            if name == JAGGED or (name in (SPARSE, NESTED) and getattr(kind, "name", "") == ATTRIBUTED):
                return _tensor((MAKERS[name](args, None, ()),), None if name == JAGGED else state, ())
        except Exception as error:
            if isinstance(kind, type) and kind in self._allowed.values():
                raise _unmade(f"{kind.__module__}.{kind.__qualname__}", error) from error
        return node

    def _spend(self, part: Any, depth: int) -> None:
        """Count the memory of a copied part: a few shared parts could be copied any number of times."""
        if isinstance(part, str | bytes | bytearray):
            self._left -= len(part)
        elif isinstance(part, tuple | list | dict):
            self._left -= 64 + 8 * len(part)
            if depth:
                for inner in part.values() if isinstance(part, dict) else part:
                    self._spend(inner, depth - 1)
        if self._left < 0:
            raise InputError(
                "The objects of the pickle take far more memory than it has bytes; it is damaged or hostile."
            )

    def _opened(self, node: Unknown) -> Any:
        """Return an object that a live state dict stored as a pickle, if the allowed classes can make it."""
        data = node.args[0] if node.args else None
        # Pickles within pickles stay closed: they could be nested without end.
        if self._is_inside or not isinstance(data, bytes):
            return node
        self._is_inside = True
        try:
            reader = TreeReader()
            made = replace_tensors(reader.read(read_pickle(data, reduce=reduce)[0]), reader.views.__getitem__, self)
        finally:
            self._is_inside = False
        return node if isinstance(made, Unknown) else made

    def _member(self, enumeration: Any, name: Any) -> Any:
        """Return a member of an allowed enumeration, in the form of some versions of Python."""
        is_member = isinstance(enumeration, type) and issubclass(enumeration, Enum) and isinstance(name, str)
        if is_member and enumeration in self._allowed.values():
            return enumeration.__members__[name]
        return None


def _of_class(cls: type, node: Unknown) -> Any:
    """Return an object of an allowed class, from arguments of its `__new__`, items and state."""
    args = node.args or ()
    try:
        if issubclass(cls, Enum):
            _require(_is_short(args))
            return cls(*args)
        # Such a class needs arguments in `__init__`, or its callable is unknown.
        if args and (cls.__new__ is object.__new__ or issubclass(cls, _FILLED)):
            raise TypeError("its pickle calls it with arguments")
        made: Any = cls.__new__(cls, *args)
        if isinstance(made, dict):
            for key, value in node.items:
                made[_fair(key)] = value
        elif node.items:
            made.extend(node.items)
        if node.state is None:
            return made
        if hasattr(made, "__setstate__"):
            made.__setstate__(node.state)
            return made
        attributes, slots = node.state if isinstance(node.state, tuple) else (node.state, None)
        vars(made).update(attributes or {})
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)
    except Exception as error:
        raise _unmade(node.name, error) from error
    return made


def _unmade(name: str, error: Exception) -> UsageError:
    return UsageError(f"No {name} can be made from the version ({error}); leave it out of `allow`.")


#: Built-in containers that fill themselves in `__init__`.
_FILLED = (dict, list, set, collections.deque, bytearray, BaseException)
