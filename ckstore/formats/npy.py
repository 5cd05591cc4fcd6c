"""NumPy's files: npy, a header and one array; npz, a zip archive of npy files.

The header is the text of a Python dictionary. A regular expression matches the only form that a tensor's header has;
the text is never evaluated or compiled. Pickles in arrays of objects are not read.

Source: NEP 1 and `numpy.lib.format`.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import Checked, Extent, FileLayout, Path, Source, Tensor, TensorRef, row_major
from ckstore.formats.zip_directory import (
    LARGE_ENTRY_BYTES,
    ZipEntry,
    check_crc,
    first_name,
    read_directory,
    starts_like_zip,
)

_MAGIC = b"\x93NUMPY"
_ENDING = ".npy"
#: Bytes of the header's length, by version.
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
#: NumPy refuses longer headers unless the caller trusts the file.
_MAX_HEADER_BYTES = 10_000
_MAX_RANK = 64
_MAX_DIGITS = 18

_ITEM = re.compile(
    r"""\s*['"](descr|fortran_order|shape)['"]\s*:\s*"""
    r"""(?:['"]([|<>=]?[A-Za-z][A-Za-z0-9[\]]{0,15})['"]|(True|False)|\(([0-9L,\s]*)\))\s*""",
    re.ASCII,
)
_SIZE = re.compile(r"\s*(0|[1-9][0-9]*)L?\s*", re.ASCII)
#: dtype by `descr`; all others stay bytes: big-endian ones, text, dates, objects.
_DTYPES = {
    f"{order}{kind}{ITEM_SIZES[dtype]}": dtype
    for kind, dtypes in {
        "b": ("bool",),
        "i": ("int8", "int16", "int32", "int64"),
        "u": ("uint8", "uint16", "uint32", "uint64"),
        "f": ("float16", "float32", "float64"),
        "c": ("complex64", "complex128"),
    }.items()
    for dtype in dtypes
    for order in ("|<" if ITEM_SIZES[dtype] == 1 else "<")
}
#: Path of the array of an npy file.
_PATH: Path = ("array",)


class _Array(NamedTuple):
    """An array in a file: `start` is the beginning of its data."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * ITEM_SIZES[self.dtype]


class _Bytes(NamedTuple):
    """Bytes that are not a tensor, and the reason; the header before `start` is skeleton, readable without the data."""

    start: int
    why: str


def starts_like_npy(head: bytes) -> bool:
    """Return whether a file begins like an npy file."""
    return head.startswith(_MAGIC)


def starts_like_npz(head: bytes) -> bool:
    """Return whether a file begins like a zip archive whose first entry has the name of an npy file."""
    return starts_like_zip(head) and first_name(head).endswith(_ENDING)


def parse_npy(source: Source) -> FileLayout:
    """Return the layout of an npy file: one tensor, or bytes if its array is unsupported.

    Raises
    ------
    InputError
        If it is cut off.
    """
    layout = FileLayout("npy", source.size)
    found = _read_array(source, 0, source.size, "the file")
    if isinstance(found, _Array):
        _add(layout, found, _PATH)
        layout.tree = TensorRef(0)
    else:
        _add_bytes(layout, "", found, source.size, ("__bytes__",))
    return layout


def parse_npz(source: Source) -> FileLayout:
    """Return the layout of an npz file; each name without its ending is one path segment.

    Stored arrays become tensors. Entries that are compressed, or hold anything else, stay bytes. The CRCs of large
    entries and of tensors are in `checked`, for later comparison; those of other stored entries are compared here.

    Raises
    ------
    InputError
        If the archive is cut off or damaged, or an array has another size than in its header.
    """
    layout = FileLayout("npz", source.size)
    for entry in sorted(read_directory(source), key=lambda entry: entry.start):
        extents = len(layout.extents)
        found = _read_entry(source, entry)
        if isinstance(found, _Array):
            _add(layout, found, (entry.name.removesuffix(_ENDING),))
        else:
            _add_bytes(layout, entry.name, found, entry.stop, ("__entry__", entry.name))
        if not entry.plain:
            continue  # The CRC covers the bytes before compression.
        if len(layout.extents) > extents:
            layout.checked.append(Checked(entry.name, entry.start, entry.stop, entry.crc_positions))
        else:
            check_crc(source, entry)
    if layout.tensors:
        layout.tree = {str(tensor.path[0]): TensorRef(index) for index, tensor in enumerate(layout.tensors)}
    return layout


def _read_entry(source: Source, entry: ZipEntry) -> _Array | _Bytes:
    """Return the array of an entry, or the reason why it stays bytes."""
    if not entry.plain:
        return _Bytes(entry.start, "compressed")
    if not entry.name.endswith(_ENDING):
        return _Bytes(entry.start, "no npy file")
    return _read_array(source, entry.start, entry.stop, entry.name)


def _read_array(source: Source, start: int, stop: int, name: str) -> _Array | _Bytes:
    """Return the array from `start` to `stop`, or the reason why these bytes stay bytes."""
    prefix = source.pread(start, min(12, stop - start))
    if not prefix.startswith(_MAGIC):
        return _Bytes(start, "no npy file")
    width = _LENGTH_BYTES.get(prefix[6:8])
    if width is None and len(prefix) >= 8:
        return _Bytes(start + len(prefix), "an unknown version of the format")
    if width is None or len(prefix) < 8 + width:
        raise InputError(f"{name} ends within its header")
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    begin = start + 8 + width + length
    if begin > stop:
        raise InputError(f"{name} ends within its header")
    if length > _MAX_HEADER_BYTES:
        return _Bytes(begin, "a long header")
    items = _items(source.pread(begin - length, length).decode("latin-1"))
    if items is None:
        return _Bytes(begin, "a dtype with fields, or a header that is not NumPy's")
    descr, fortran, shape = items
    if descr not in _DTYPES:
        return _Bytes(begin, f"dtype {descr}")
    array = _Array(begin, _DTYPES[descr], shape, fortran)
    if array.stop > stop:
        raise InputError(f"{name} ends within its array")
    if prod(max(size, 1) for size in shape) >> 63:  # An array without elements, with strides of more than 64 bits.
        return _Bytes(begin, "an implausible shape")
    return array if array.stop == stop else _Bytes(begin, "more than one array")


def _items(text: str) -> tuple[str, bool, tuple[int, ...]] | None:
    """Return `descr`, `fortran_order` and `shape` of a header; None for another form."""
    text = text.strip()
    if text[:1] != "{" or text[-1:] != "}":
        return None
    found: dict[str, re.Match[str]] = {}
    position, stop = 1, len(text) - 1
    while position < stop:
        item = _ITEM.match(text, position, stop)
        if item is None or item[1] in found or text[item.end()] not in ",}":
            return None
        found[item[1]] = item
        position = item.end() + 1
        if not text[position:stop].strip():
            break
    if len(found) < 3:
        return None
    descr, fortran, shape = found["descr"][2], found["fortran_order"][3], _sizes(found["shape"][4])
    if descr is None or fortran is None or shape is None:
        return None
    return descr, fortran == "True", shape


def _sizes(text: str | None) -> tuple[int, ...] | None:
    """Return a shape from the text between its parentheses: `3, 4`, `3,` or nothing."""
    if text is None:
        return None
    parts = text.split(",")
    if not parts[-1].strip():
        parts.pop()
    elif len(parts) == 1:
        return None  # `(3)` is a number.
    sizes = [_SIZE.fullmatch(part) for part in parts]
    if len(sizes) > _MAX_RANK or any(size is None or len(size[1]) > _MAX_DIGITS for size in sizes):
        return None
    return tuple(int(size[1]) for size in sizes if size is not None)


def _add(layout: FileLayout, array: _Array, path: Path) -> None:
    """Add a tensor and its extent; the extent of an array in Fortran order has reversed axes."""
    memory = array.shape[::-1] if array.fortran else array.shape
    strides = row_major(memory)
    extent = -1
    if array.stop > array.start:
        extent = len(layout.extents)
        layout.extents.append(Extent(array.start, array.dtype, memory, path))
    turned = strides[::-1] if array.fortran else strides
    layout.tensors.append(Tensor(path, array.dtype, array.shape, turned, extent, 0))


def _add_bytes(layout: FileLayout, name: str, found: _Bytes, stop: int, path: Path) -> None:
    layout.bytes_for[name] = found.why
    if stop - found.start >= LARGE_ENTRY_BYTES:
        layout.extents.append(Extent(found.start, "uint8", (stop - found.start,), path))
