"""NumPy's npy files: a header and one array. An npz is an archive of them (`ckstore/formats/archive.py`).

The header is the text of a Python dictionary. A regular expression matches the only form that a tensor's header has;
the text is never evaluated or compiled. Pickles in arrays of objects are not read.

Source: NEP 1 and `numpy.lib.format`.
"""

from __future__ import annotations

import re
from math import prod

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, Format, Path, Source, opaque, row_major

_MAGIC = b"\x93NUMPY"
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


def _parse(source: Source) -> FileLayout:
    """Return the layout of an npy file: one tensor, or bytes if its array is unsupported.

    Raises `InputError` if it is cut off.
    """
    prefix = source.pread(0, min(12, source.size))
    width = _LENGTH_BYTES.get(prefix[6:8])
    if width is None and len(prefix) >= 8:
        return opaque(source, "npy", "an unknown version of the format", len(prefix))
    if width is None or len(prefix) < 8 + width:
        raise InputError("the file ends within its header")
    length = int.from_bytes(prefix[8 : 8 + width], "little")
    begin = 8 + width + length
    if begin > source.size:
        raise InputError("the file ends within its header")
    if length > _MAX_HEADER_BYTES:
        return opaque(source, "npy", "a long header", begin)
    items = _items(source.pread(begin - length, length).decode("latin-1"))
    if items is None:
        return opaque(source, "npy", "a dtype with fields, or a header that is not NumPy's", begin)
    descr, is_fortran, shape = items
    if descr not in _DTYPES:
        return opaque(source, "npy", f"dtype {descr}", begin)
    stop = begin + prod(shape) * ITEM_SIZES[_DTYPES[descr]]
    if stop > source.size:
        raise InputError("the file ends within its array")
    if prod(max(size, 1) for size in shape) >> 63:  # An array without elements, with strides of more than 64 bits.
        return opaque(source, "npy", "an implausible shape", begin)
    if stop < source.size:
        return opaque(source, "npy", "more than one array", begin)
    layout = FileLayout("npy", source.size)
    strides = row_major(shape[::-1])[::-1] if is_fortran else None
    layout.tree = layout.add(_PATH, _DTYPES[descr], shape, begin, strides)
    return layout


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


FORMAT = Format("npy", lambda head: head.startswith(_MAGIC), _parse)
