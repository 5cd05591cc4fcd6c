"""Lays out and writes torch zips without torch: pickle, then every storage stored and aligned, then the directory.

The archives are those of `torch.save` since 2.1: `torch.load` reads them with `weights_only=True` and with `mmap=True`.
The CRC of a storage is written after it and in the directory at the end, so that a file can be written in one pass.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, UsageError
from ckstore.formats.layout import Checked, Extent, FileLayout, Shared, Tensor
from ckstore.formats.skeleton import crc_offsets
from ckstore.formats.torch.pickle_reader import MAX_PICKLE_BYTES
from ckstore.formats.torch.pickle_writer import ORDERED_DICT, Call, PersistentId, Reference, write_pickle
from ckstore.formats.trees import plain_tree, tensor_numbers
from ckstore.runtime.checksum import crc32
from ckstore.runtime.zip_records import (
    CENTRAL,
    CENTRAL_CRC,
    DESCRIPTOR_MAGIC,
    HAS_DESCRIPTOR,
    LIMIT,
    LOCAL,
    STORED,
    Member,
    Style,
    central_record,
    descriptor,
    end_records,
    local_record,
)

ALIGNMENT = 64
_FOLDER = "archive"
#: torch's style: names are UTF-8, and checksums follow the data.
_STYLE = Style(version=0, flags=0x0800 | HAS_DESCRIPTOR, date=0, system=0, attributes=0)

#: Storage classes by dtype; tensors of other dtypes are rebuilt from untyped storages, as torch does.
_STORAGE_CLASSES = {
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
}
_REBUILD = Reference(("torch._utils", "_rebuild_tensor_v2"))
_REBUILD_UNTYPED = Reference(("torch._utils", "_rebuild_tensor_v3"))
_REBUILD_PARAMETER = Reference(("torch._utils", "_rebuild_parameter"))
_REBUILD_PARAMETER_WITH_STATE = Reference(("torch._utils", "_rebuild_parameter_with_state"))
_REBUILD_WITH_STATE = Reference(("torch._tensor", "_rebuild_from_type_v2"))
_TENSOR = Reference(("torch", "Tensor"))
_QUANTISED = Reference(("torch._utils", "_rebuild_qtensor"))
_QUANTISED_CLASSES = {"int8": "QInt8Storage", "uint8": "QUInt8Storage", "int32": "QInt32Storage"}
_UNTYPED = Reference(("torch.storage", "UntypedStorage"))


#: Types of written data.
BytesLike = bytes | bytearray | memoryview


class Output(Protocol):
    """The target of a write: a binary file; it need not seek."""

    def write(self, data: BytesLike, /) -> Any:
        """Write all of `data`."""


#: Returns the bytes of an extent of the caller's list in order, in pieces of any size.
ReadExtent = Callable[[int], Iterable[BytesLike]]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A torch zip before its storages are written.

    Each extent of the layout is a whole storage, whose CRC is the check of the same number. The skeleton has all bytes
    outside of the storages, with these CRCs as zeros. `numbers` has the number of each storage in the caller's list of
    extents; `untyped` those whose dtype belongs to the tensors rather than the storage.
    """

    layout: FileLayout
    skeleton: bytes
    numbers: list[int]
    untyped: Collection[int]


def plan_torch(tree: Any, tensors: Sequence[Tensor], extents: Sequence[Extent], shared: Shared = ()) -> TorchPlan:
    """Lay out the torch zip of a tree, whose `TensorRef` index `tensors`; tensors without a reference are left out.

    Each extent of a tensor of the tree becomes one storage, so tensors that share an extent are tied again. The `start`
    of extents is not used. For `shared` see `FileLayout`.
    """
    used = [tensors[index] for index in sorted(set(tensor_numbers(tree)))]
    numbers = sorted({tensor.extent for tensor in used if tensor.extent >= 0})
    # The first reference to a storage determines its dtype: tensors without elements share one storage per dtype.
    empty = sorted({tensor.dtype for tensor in used if tensor.extent < 0})
    slots: list[int | str] = [*numbers, *empty]
    keys = {slot: str(key) for key, slot in enumerate(slots)}
    untyped = {number for number in numbers if extents[number].dtype not in _STORAGE_CLASSES}
    untyped |= {one.extent for one in used if one.extent >= 0 and one.dtype != extents[one.extent].dtype}
    calls: dict[int, Call] = {}

    def rebuild(index: int, attributes: Any, quantiser: Any = None) -> Call:
        if quantiser is not None:
            return _quantised_call(tensors[index], extents, keys, quantiser)
        if index not in calls:
            calls[index] = _rebuild_call(tensors[index], extents, keys, untyped)
        return calls[index] if attributes is None else _with_state(calls[index], attributes)

    archive = _Archive()
    known: dict[Any, int] = {}
    forms = [
        -1
        if one.extent in untyped or one.extent not in keys or one.marks not in ((), ("requires_grad",))
        else known.setdefault(
            (one.dtype, extents[one.extent].shape, one.offset, one.shape, one.strides, one.marks), len(known)
        )
        for one in tensors
    ]
    data = write_pickle(tree, rebuild, shared, (forms, [keys.get(one.extent, "") for one in tensors]))
    if len(data) > MAX_PICKLE_BYTES:
        raise UsageError("The values of a torch file besides tensors must stay below 1 GiB; make tensors of them.")
    archive.add("data.pkl", data)
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", b"little")
    sizes = [prod(extents[number].shape) * ITEM_SIZES[extents[number].dtype] for number in numbers]
    starts = archive.reserve([f"data/{keys[number]}" for number in numbers], sizes)
    archive.reserve([f"data/{keys[dtype]}" for dtype in empty], [0] * len(empty))
    archive.add("version", b"3\n")
    skeleton, checked, size = archive.finish()
    placed = zip([extents[number] for number in numbers], starts, strict=True)
    storages = [Extent(start, one.dtype, one.shape, one.path) for one, start in placed]
    return TorchPlan(FileLayout("torch-zip", size, storages, checked=checked), skeleton, numbers, untyped)


def write_torch(
    out: Output,
    tree: Any,
    tensors: Sequence[Tensor],
    extents: Sequence[Extent],
    read: ReadExtent,
) -> int:
    """Write the torch zip of a tree in one pass, with no more than the skeleton and one piece of data in memory.

    Parameters and arrays become tensors without gradients, as in the state dict of a module; `Unknown` nodes are
    written in the form of `plain_tree`. `read` is called once for each written extent, in ascending order of its
    number. Returns the number of bytes written; for the rest see `plan_torch`.
    """
    plan = plan_torch(plain_tree(tree), [replace(tensor, marks=tensor.lazy) for tensor in tensors], extents)
    skeleton = bytearray(plan.skeleton)
    places: dict[int, list[int]] = {}
    for index, offset in zip(*(column.tolist() for column in crc_offsets(plan.layout)), strict=True):
        places.setdefault(index, []).append(offset)
    position = written = 0
    for index, (number, storage) in enumerate(zip(plan.numbers, plan.layout.extents, strict=True)):
        before = storage.start - written
        out.write(skeleton[position : position + before])
        position += before
        crc = 0
        length = 0
        for piece in read(number):
            view = memoryview(piece).cast("B")
            crc = crc32(view, crc)
            length += len(view)
            out.write(view)
        if length != storage.nbytes:
            raise InputError(f"Extent {number} has {length} bytes rather than {storage.nbytes}.")
        for offset in places[index]:
            skeleton[offset : offset + 4] = crc.to_bytes(4, "little")
        written = storage.stop
    out.write(skeleton[position:])
    return plan.layout.size


def _rebuild_call(
    tensor: Tensor, extents: Sequence[Extent], keys: dict[int | str, str], untyped: Collection[int]
) -> Call:
    """Return the call that makes torch rebuild a tensor, as torch itself writes it.

    Its tuples are its own: which other tensors share them would change the bytes.
    """
    if tensor.extent < 0:
        dtype, key, count, by_dtype = tensor.dtype, keys[tensor.dtype], 0, tensor.dtype not in _STORAGE_CLASSES
    else:
        extent = extents[tensor.extent]
        dtype, key, count, by_dtype = extent.dtype, keys[tensor.extent], extent.count, tensor.extent in untyped
    if by_dtype:
        identity = PersistentId(("storage", _UNTYPED, key, "cpu", count * ITEM_SIZES[dtype]))
    else:
        identity = PersistentId(("storage", Reference(("torch", _STORAGE_CLASSES[dtype])), key, "cpu", count))
    is_parameter, grad = "parameter" in tensor.marks, "requires_grad" in tensor.marks
    wants = grad and not is_parameter
    args = (identity, tensor.offset, (*tensor.shape,), (*tensor.strides,), wants, Call(ORDERED_DICT, ()))
    of_dtype = (Reference(("torch", tensor.dtype)),) if by_dtype else ()
    said = {mark: True for mark in tensor.marks if mark in ("conj", "neg", "array")}
    metadata = (said,) if said else ()
    call = Call(_REBUILD_UNTYPED if by_dtype else _REBUILD, (*args, *of_dtype, *metadata))
    return Call(_REBUILD_PARAMETER, (call, grad, Call(ORDERED_DICT, ()))) if is_parameter else call


def _quantised_call(
    tensor: Tensor, extents: Sequence[Extent], keys: dict[int | str, str], quantiser: tuple[Any, ...]
) -> Call:
    """Return the call that makes torch rebuild a quantised tensor of its integers."""
    key, count = (keys[tensor.dtype], 0) if tensor.extent < 0 else (keys[tensor.extent], extents[tensor.extent].count)
    storage = PersistentId(("storage", Reference(("torch", _QUANTISED_CLASSES[tensor.dtype])), key, "cpu", count))
    return Call(
        _QUANTISED,
        (storage, tensor.offset, (*tensor.shape,), (*tensor.strides,), quantiser, False, Call(ORDERED_DICT, ())),
    )


def _with_state(call: Call, attributes: Any) -> Call:
    """Return the call that makes torch rebuild a tensor with attributes."""
    if call.function is _REBUILD_PARAMETER:
        return Call(_REBUILD_PARAMETER_WITH_STATE, (*call.args, attributes))
    return Call(_REBUILD_WITH_STATE, (call.function, _TENSOR, call.args, attributes))


def _member(name: bytes, crc: int, nbytes: int, offset: int = 0) -> Member:
    return Member(name, STORED, crc, nbytes, nbytes, offset)


class _Archive:
    """An incomplete zip archive: its skeleton, and gaps for the storages.

    There may be very many storages: records that differ in few fields are packed once.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        #: The bytes of these, and of the storages.
        self._position = 0
        #: Of each member its name, CRC, size and place.
        self._columns: tuple[list[bytes], list[int], list[int], list[int]] = ([], [], [], [])
        #: The number of the member of each storage, its name in full, and the place of its data.
        self._storages: tuple[list[int], list[str], list[int]] = ([], [], [])
        #: Local records without names by length of name, padding and whether their fields are long.
        self._heads: dict[tuple[int, int, bool], tuple[bytes, bytes]] = {}

    def add(self, name: str, data: bytes) -> None:
        """Append an entry with its data."""
        self._begin(f"{_FOLDER}/{name}".encode(), crc32(data), len(data))
        self._append(data + descriptor(crc32(data), len(data)))

    def reserve(self, names: Iterable[str], sizes: Iterable[int]) -> list[int]:
        """Append entries whose data is written later; return the places of the data."""
        descriptors: dict[int, bytes] = {}
        members, fulls, starts = self._storages
        before = len(starts)
        for name, nbytes in zip(names, sizes, strict=True):
            full = f"{_FOLDER}/{name}"
            members.append(len(self._columns[0]))
            self._begin(full.encode(), 0, nbytes)
            fulls.append(full)
            starts.append(self._position)
            if nbytes not in descriptors:
                descriptors[nbytes] = descriptor(0, nbytes)
            self._position += nbytes
            self._append(descriptors[nbytes])
        return starts[before:]

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self._position += len(data)

    def _begin(self, name: bytes, crc: int, nbytes: int) -> None:
        offset, length = self._position, len(name)
        names, crcs, sizes, offsets = self._columns
        names.append(name)
        crcs.append(crc)
        sizes.append(nbytes)
        offsets.append(offset)
        padding = -(offset + LOCAL.size + length + 4) % ALIGNMENT
        kind = length, padding, nbytes >= LIMIT
        if kind not in self._heads:
            extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
            self._heads[kind] = local_record(_STYLE, _member(name, crc, nbytes, offset), extra)[: LOCAL.size], extra
        head, extra = self._heads[kind]
        self._parts += head, name, extra
        self._position = offset + LOCAL.size + length + len(extra)

    def finish(self) -> tuple[bytes, list[Checked], int]:
        """Return the skeleton, the checks of the storages and the size of the file, with the directory."""
        directory = position = self._position
        records = self._parts
        places = []
        heads: dict[tuple[int, int, int], bytes] = {}
        for name, crc, size, offset in zip(*self._columns, strict=True):
            places.append(position + CENTRAL_CRC)
            kind = len(name), crc, size
            if size >= LIMIT or offset >= LIMIT:
                record = central_record(_STYLE, _member(name, crc, size, offset))
            else:
                if kind not in heads:  # The offset is the last field.
                    heads[kind] = central_record(_STYLE, _member(name, crc, size))[: CENTRAL.size - 4]
                record = heads[kind] + offset.to_bytes(4, "little") + name
            records.append(record)
            position += len(record)
        self._position = position
        self._append(end_records(len(places), directory, position - directory))
        checked = []
        for number, full, start in zip(*self._storages, strict=True):
            stop = start + self._columns[2][number]
            checked.append(Checked(full, start, stop, (stop + len(DESCRIPTOR_MAGIC), places[number])))
        return b"".join(self._parts), checked, self._position
