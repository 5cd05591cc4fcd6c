"""Writes tensors as safetensors or npz, in one pass and with no more than one piece of data in memory."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import IO, Any, NamedTuple, cast

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, UsageError
from ckstore.formats.containers.safetensors import DTYPES, FLOAT4
from ckstore.formats.torch.zip_writer import BytesLike, Output

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NPY_KINDS = {"bool": "|b1", "int8": "|i1", "uint8": "|u1"} | {
    f"{kind}{8 * size}": f"<{letter}{size}"
    for kind, letter, sizes in (
        ("int", "i", (2, 4, 8)),
        ("uint", "u", (2, 4, 8)),
        ("float", "f", (2, 4, 8)),
        ("complex", "c", (8, 16)),
    )
    for size in sizes
}
_NPY_ALIGNMENT = 64
#: Size in bytes from which an entry needs 64-bit sizes, with room for its header.
_ZIP64_BYTES = (1 << 31) - (1 << 20)


class Item(NamedTuple):
    """A tensor to write: its data is contiguous in C order and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the data."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


#: Returns the bytes of an item in order, in pieces of any size.
ReadItem = Callable[[int], Iterable[BytesLike]]


def write_safetensors(
    out: Output,
    items: Sequence[tuple[str, str, tuple[int, ...]]],
    read: ReadItem,
    metadata: dict[str, str] | None = None,
) -> int:
    """Write a safetensors file of tensors (name, dtype, shape); return its size. The output need not seek.

    `read` is called once for each tensor, in order; `metadata` is text for the header's `__metadata__`. Raises
    `UsageError` for dtypes without a safetensors type (complex32, complex128), for float4 without axes, and for
    duplicate names.
    """
    described = _distinct(items)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for item in described:
        shape = list(item.shape)
        if item.dtype == FLOAT4 and shape:
            shape[-1] *= 2
        elif item.dtype == FLOAT4 or item.dtype not in _SAFETENSORS_NAMES:
            kind = f"{item.dtype} without axes" if item.dtype == FLOAT4 else item.dtype
            raise UsageError(f"safetensors has no dtype {kind}; leave out {item.name} or take `format` pt.")
        if item.name == "__metadata__":
            raise UsageError("A tensor of a safetensors file cannot be called __metadata__; take `format` pt.")
        header[item.name] = {
            "dtype": _SAFETENSORS_NAMES[item.dtype],
            "shape": shape,
            "data_offsets": [position, position + item.nbytes],
        }
        position += item.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for index, item in enumerate(described):
        _copy(out, item, read(index))
    return 8 + len(text) + position


def write_npz(out: IO[bytes], items: Sequence[tuple[str, str, tuple[int, ...]]], read: ReadItem) -> None:
    """Write an uncompressed npz archive of tensors of NumPy's dtypes, one entry `<name>.npy` each.

    See `write_safetensors`.
    """
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for index, item in enumerate(_distinct(items)):
            entry = zipfile.ZipInfo(f"{item.name}.npy")
            with archive.open(entry, "w", force_zip64=item.nbytes >= _ZIP64_BYTES) as member:
                member.write(_npy_header(_NPY_KINDS[item.dtype], item.shape))
                _copy(cast(Output, member), item, read(index))


def _npy_header(kind: str, shape: tuple[int, ...]) -> bytes:
    """Return version 1.0 of the header, see numpy.lib.format; version 2.0, beyond 65535 bytes, cannot occur."""
    text = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % _NPY_ALIGNMENT) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _distinct(items: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Item]:
    described = [Item(*item) for item in items]
    names = set()
    for item in described:
        if item.name in names:
            raise UsageError(f"Two tensors are called {item.name}; take `format` pt, which keeps their places.")
        names.add(item.name)
    return described


def _copy(out: Output, item: Item, pieces: Iterable[BytesLike]) -> None:
    length = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        length += len(view)
        out.write(view)
    if length != item.nbytes:
        raise InputError(f"{item.name} has {length} bytes rather than {item.nbytes}.")
