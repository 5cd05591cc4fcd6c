"""Calls and persistent ids of torch's pickles, interpreted without torch: tensors, storages, a few plain types."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.torch.pickle_reader import Global, Object, key_of
from ckstore.formats.trees import FROM_TYPE, QUANTISED

#: dtype of each storage class; quantised ones are kept as their raw integers, packed ones as bytes.
STORAGE_DTYPES: dict[str, str] = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "QInt32Storage": "int32",
    "QInt8Storage": "int8",
    "QUInt2x4Storage": "uint8",
    "QUInt4x2Storage": "uint8",
    "QUInt8Storage": "uint8",
    "ShortStorage": "int16",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}
#: Storage classes whose tensors have other shapes than their bytes.
_PACKED = ("QUInt2x4Storage", "QUInt4x2Storage")
#: Types whose tensors keep their attributes.
_ATTRIBUTED = ("torch.Tensor", "torch.nn.parameter.Parameter")
#: Marks that change values.
_LAZY = ("conj", "neg")
#: dtypes that NumPy has as well.
_ARRAY_DTYPES = frozenset(
    name for name in ITEM_SIZES if name == "bool" or name.rstrip("0123456789") in ("int", "uint", "float", "complex")
) - {"complex32"}
#: Classes that a pickle may name without calling them, such as the factory of a `collections.defaultdict`.
CLASSES: dict[str, type] = {
    f"{one.__module__}.{one.__name__}": one
    for one in (
        bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple,
        Counter, OrderedDict, defaultdict, deque,
    )
}  # fmt: skip
#: Maximal fields of an array's dtype, with the fields within them, and their maximal nesting: few shared ones could
#: multiply at every level.
MAX_FIELDS = 4096
MAX_FIELD_DEPTH = 16
#: dtypes that torch cannot negate, and that have no negatives or several representations of them.
_WITHOUT_NEGATIVES = frozenset(name for name in ITEM_SIZES if name == "bool" or name.startswith(("float8", "float4")))
#: Names of dtypes in torch that have another name here.
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "chalf": "complex32"}


def registered() -> dict[str, type]:
    """Return the classes, torch's own apart, that the program registered for `torch.load` to trust, by name."""
    torch: Any = sys.modules.get("torch")
    found: list[Any] = getattr(getattr(torch, "serialization", None), "get_safe_globals", list)()
    classes = [one for one in found if isinstance(one, type) and not one.__module__.startswith("torch.")]
    return {f"{one.__module__}.{one.__qualname__}": one for one in classes}


class Storage(Struct, eq=False, gc=False):
    """A storage of a pickle: its name in the file, the name of its class, its number of elements, its dtype.

    An `untyped` one leaves the dtype to its views. Legacy files store views of storages, which begin at element
    `offset`.
    """

    key: str
    kind: str
    count: int
    dtype: str
    untyped: bool
    offset: int = 0


class StoredTensor(Struct, eq=False):
    """A tensor of a pickle: a storage, in elements of `dtype` the offset, shape and strides, `MARKS`, attributes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    marks: tuple[str, ...] = ()
    attributes: dict[str, Any] | None = None


class TorchPersistent:
    """Interprets torch's persistent ids; keeps every storage by its key, as first referenced, without legacy views."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}

    def __call__(self, identity: Any) -> Any:
        """Return the storage or class of a persistent id."""
        if type(identity) is not tuple or not identity:
            raise InputError("the pickle holds a persistent id that is not torch's")
        if identity[0] == "module" and len(identity) == 4 and type(identity[1]) is Global:
            return identity[1]  # (class, file of its source, source): the source stays in the skeleton.
        if identity[0] != "storage" or len(identity) not in (5, 6):
            raise InputError("the pickle holds a persistent id that is not torch's")
        _, kind, key, _, count, *view = identity
        name = kind.name.rpartition(".")[2] if type(kind) is Global else ""
        if name not in STORAGE_DTYPES:
            raise InputError("the pickle holds a storage of an unknown type")
        if type(key) is not str or type(count) is not int or count < 0:
            raise InputError("the pickle does not describe a storage by a name and a size")
        storage = Storage(key, name, count, STORAGE_DTYPES[name], name.endswith("UntypedStorage"))
        self._keep(storage)
        if view and view[0] is not None:
            return _storage_view(storage, view[0])
        return storage

    def again(self, made: Any, key: str) -> StoredTensor | None:
        """Return a tensor like another one, in a storage of another key; None for anything else than a tensor."""
        if type(made) is not StoredTensor:
            return None
        held = made.storage
        storage = Storage(key, held.kind, held.count, held.dtype, held.untyped)
        self._keep(storage)
        return StoredTensor(storage, made.offset, made.shape, made.strides, made.dtype, made.marks)

    def _keep(self, storage: Storage) -> None:
        known = self.storages.setdefault(storage.key, storage)
        if ITEM_SIZES[known.dtype] * known.count != ITEM_SIZES[storage.dtype] * storage.count:
            raise InputError(f"the pickle gives storage {storage.key!r} two sizes")


def _storage_view(storage: Storage, view: Any) -> Storage:
    if type(view) is not tuple or len(view) != 3:
        raise InputError("the pickle has an invalid view of a storage")
    _, offset, size = view
    if type(offset) is not int or type(size) is not int or offset < 0 or size < 0 or offset + size > storage.count:
        raise InputError(f"the pickle has a view that exceeds storage {storage.key!r}")
    return replace(storage, count=size, offset=offset)


def reduce(name: str, args: tuple[Any, ...]) -> Any:
    """Return the result of a call: a tensor, a plain container or value, or an `Object` that records the call."""
    constructor = CONSTRUCTORS.get(name)
    if constructor is not None:
        built = constructor(args)
        if built is not None:
            return built
    return Object(name, args)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a shape or strides; None for anything else."""
    if type(value) is Object and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if type(value) is list:
        value = tuple(value)
    if type(value) is not tuple or not {int}.issuperset(map(type, value)):
        return None
    return value


def _tensor(args: tuple[Any, ...]) -> StoredTensor | None:
    """Interpret `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks, metadata=None)`."""
    return _view(args, args[6:7])


def _view(args: tuple[Any, ...], metadata: tuple[Any, ...], dtype: str | None = None) -> StoredTensor | None:
    """Return the tensor of a rebuilding call; None if torch itself could not build it."""
    if len(args) < 4 or type(args[0]) is not Storage or type(args[1]) is not int or args[0].kind in _PACKED:
        return None
    shape, strides = _sizes(args[2]), _sizes(args[3])
    if shape is None or strides is None:
        return None
    storage: Storage = args[0]
    dtype = dtype or storage.dtype
    lazy = _lazy_marks(metadata[0] if metadata else None, dtype)
    if lazy is None:
        return None
    if len(args) > 4 and args[4] is True:
        lazy += ("requires_grad",)
    elif not lazy and dtype in _ARRAY_DTYPES and metadata and metadata[0] and metadata[0].get("array") is True:
        lazy = ("array",)
    return StoredTensor(storage, args[1], shape, strides, dtype, lazy)


def _lazy_marks(metadata: Any, dtype: str) -> tuple[str, ...] | None:
    """Return `conj` and `neg` of a tensor's metadata; None for other types, or a dtype without such values.

    The rest of the metadata is for other devices; torch ignores it on the CPU.
    """
    if metadata is None:
        return ()
    if not isinstance(metadata, dict) or any(type(metadata.get(mark, False)) not in (bool, int) for mark in _LAZY):
        return None
    lazy = tuple(mark for mark in _LAZY if metadata.get(mark, False))
    possible = dtype.startswith("complex") or "conj" not in lazy
    return lazy if possible and not (lazy and dtype in _WITHOUT_NEGATIVES) else None


def _parameter(args: tuple[Any, ...]) -> StoredTensor | None:
    """Interpret `_rebuild_parameter(data, requires_grad, …)`, or `Parameter(data, requires_grad=True)`."""
    data = _first_tensor(args)
    if data is None:
        return None
    grad = ("requires_grad",) if len(args) < 2 or args[1] is True else ()
    lazy = tuple(mark for mark in data.marks if mark in _LAZY)
    return replace(data, marks=(*lazy, "parameter", *grad), attributes=None)


def _parameter_with_state(args: tuple[Any, ...]) -> StoredTensor | None:
    """Interpret `_rebuild_parameter_with_state(data, requires_grad, backward_hooks, state)`."""
    made = _parameter(args)
    return None if made is None else replace(made, attributes=_attributes(args[3] if len(args) > 3 else None))


def _attributes(state: Any) -> dict[str, Any] | None:
    """Return the attributes in the state of a tensor: a dictionary, or (dictionary, slots); None without any."""
    state = state[0] if type(state) is tuple and len(state) == 2 else state
    is_named = isinstance(state, dict) and all(type(name) is str for name in state)
    return state or None if is_named else None


def _tensor_of_dtype(args: tuple[Any, ...]) -> StoredTensor | None:
    """`_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, backward_hooks, dtype, metadata=None)`."""
    if len(args) < 7 or type(args[6]) is not Global:
        return None
    module, _, name = args[6].name.rpartition(".")
    name = _DTYPE_ALIASES.get(name, name)
    if module != "torch" or name not in ITEM_SIZES:
        return None
    return _view(args, args[7:8], name)


def _quantised(args: tuple[Any, ...]) -> Object | None:
    tensor = _view(args[:4], ())
    return None if tensor is None else Object(QUANTISED, (tensor, *args[4:5]))


def _first_tensor(args: tuple[Any, ...]) -> StoredTensor | None:
    return args[0] if args and type(args[0]) is StoredTensor else None


def _from_type(args: tuple[Any, ...]) -> Any:
    """Interpret `_rebuild_from_type_v2(function, type, args, state)`: a tensor subclass or a tensor with attributes.

    A `DTensor` becomes the part of the rank that saved it; other subclasses lose their attributes with their type.
    """
    if len(args) == 4 and type(args[0]) is Global and type(args[2]) is tuple:
        # Torch does not nest it; a stream could without end.
        built = None if args[0].name == FROM_TYPE else reduce(args[0].name, args[2])
        if type(built) is StoredTensor:
            is_plain = type(args[1]) is Global and args[1].name in _ATTRIBUTED
            return replace(built, attributes=_attributes(args[3])) if is_plain else built
        if type(args[1]) is Global and args[1].name == "torch.distributed.tensor.DTensor":
            for attributes in args[3] if type(args[3]) is tuple else (args[3],):
                local = attributes.get("_local_tensor") if isinstance(attributes, dict) else None
                if type(local) is StoredTensor:
                    return local
    return None


def _ordered_dict(args: tuple[Any, ...]) -> OrderedDict[Any, Any] | None:
    if not args or (len(args) == 1 and args[0] is None):
        return OrderedDict()
    if len(args) == 1 and type(args[0]) is list:
        pairs = args[0]
        if all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            return OrderedDict((key_of(key), value) for key, value in pairs)
    if len(args) == 1 and isinstance(args[0], dict):
        return OrderedDict(args[0])
    return None


def _default_dict(args: tuple[Any, ...]) -> defaultdict[Any, Any] | None:
    if not args or (len(args) == 1 and args[0] is None):
        return defaultdict(None)
    if len(args) == 1 and type(args[0]) is Global and args[0].name in CLASSES:
        return defaultdict(CLASSES[args[0].name])
    return None


def _elements(args: tuple[Any, ...]) -> list[Any] | None:
    if not args:
        return []
    return list(args[0]) if len(args) == 1 and type(args[0]) in (list, tuple) else None


def _set(args: tuple[Any, ...]) -> set[Any] | None:
    elements = _elements(args)
    return None if elements is None else set(map(key_of, elements))


def _frozenset(args: tuple[Any, ...]) -> frozenset[Any] | None:
    elements = _elements(args)
    return None if elements is None else frozenset(map(key_of, elements))


def _complex(args: tuple[Any, ...]) -> complex | None:
    if len(args) == 2 and type(args[0]) is float and type(args[1]) is float:
        return complex(args[0], args[1])
    return None


def _encode(args: tuple[Any, ...]) -> bytes | None:
    """Interpret `_codecs.encode(text, 'latin1')`, protocol 2's form of bytes."""
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return None


def _bytes(args: tuple[Any, ...]) -> bytes | None:
    return b"" if not args else None


def _reconstructor(args: tuple[Any, ...]) -> Object | None:
    """Interpret `copyreg._reconstructor(class, base, state)`, the form of any object in protocols 0 and 1."""
    return Object(args[0].name) if args and type(args[0]) is Global else None


def _new_object(args: tuple[Any, ...]) -> Object | None:
    return Object(args[0].name, args[1:]) if args and type(args[0]) is Global else None


#: Interpreters of calls, by the callable's name; None as their result means: record the call.
CONSTRUCTORS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.frozenset": _frozenset,
    "builtins.set": _set,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "copyreg.__newobj__": _new_object,
    "copyreg._reconstructor": _reconstructor,
    FROM_TYPE: _from_type,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    QUANTISED: _quantised,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch.nn.parameter.Buffer": _first_tensor,
    "torch.nn.parameter.Parameter": _parameter,
}
