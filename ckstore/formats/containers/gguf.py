"""GGUF files of llama.cpp: a header with metadata, then the tensors one after another.

Tensors of plain numbers are tensors. Quantised ones are blocks of scales and packed integers, and stay bytes. Only
lengths are read from the metadata.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from math import prod
from typing import NamedTuple

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, Format, Source, opaque

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_ALIGNMENT_KEY = b"general.alignment"
#: Above the size of any vocabulary.
_MAX_HEADER_BYTES = 1 << 28
_READ_BYTES = 1 << 20
_MAX_AXES = 4
_MAX_NESTED = 4
_MAX_NAME_BYTES = 1 << 16

#: Bytes of a metadata value, by type; text and arrays have lengths of their own.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _TEXT, _ARRAY = 4, 8, 9

#: dtype of each type of plain numbers.
_DTYPES = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip
#: Name, elements and bytes of a block of each quantised type.
_QUANTISED = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


class _Described(NamedTuple):
    """The header's description of a tensor; `offset` counts from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _parse(source: Source) -> FileLayout:
    """Return the layout of a GGUF file; each name is one path segment, shapes are in the order of NumPy and torch.

    Raises `InputError` if it is cut off, or names a tensor twice.
    """
    header = _Header(source)
    header.skip(len(_MAGIC))
    version = header.number(4)
    if version not in _VERSIONS:
        why = f"version {version} of the format" if version & 0xFFFF else "big-endian"
        return opaque(source, "gguf", why, 8)
    count, values = header.number(8), header.number(8)
    alignment = _ALIGNMENT
    for _ in range(values):
        key = header.text()
        kind = header.number(4)
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            alignment = header.number(4)
        else:
            _skip_value(header, kind)
    if not alignment or alignment & (alignment - 1):
        raise InputError(f"its alignment is {alignment}, which is not a power of two")
    described = [_describe(header) for _ in range(count)]
    if len({one.name for one in described}) < count:
        raise InputError("the header names a tensor twice")
    layout = FileLayout("gguf", source.size)
    base = -(-header.position // alignment) * alignment
    following = sorted({base + one.offset for one in described} | {source.size})
    end = base
    tree = {}
    for one in described:
        start = base + one.offset
        if one.offset % alignment:
            raise InputError(f"the place of {one.name!r} is not aligned")
        if one.kind in _DTYPES:
            stop = start + prod(one.shape) * ITEM_SIZES[_DTYPES[one.kind]]
            tree[one.name] = layout.add((one.name,), _DTYPES[one.kind], one.shape, start)
        else:
            name, elements, size = _QUANTISED.get(one.kind, (f"type {one.kind}", 0, 0))
            layout.bytes_for[one.name] = f"quantised, {name}"
            # A type that is not known yet extends to the next tensor.
            unknown = following[bisect_right(following, start) :]
            stop = start + prod(one.shape) // elements * size if elements else unknown[0] if unknown else start
            layout.add_bytes((one.name,), start, stop)
        if stop > source.size:
            raise InputError(f"the file ends within {one.name!r}")
        end = max(end, stop)
    layout.add_bytes(("__bytes__",), end, source.size)
    layout.tree = tree or None
    return layout


class _Header:
    """The header of a file, read in order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._data = b""
        self.position = 0

    def skip(self, nbytes: int) -> None:
        """Skip some bytes."""
        self.position += nbytes
        if self.position > self._source.size:
            raise InputError("the file ends within its header")

    def skip_texts(self, count: int) -> None:
        """Skip some texts: a vocabulary has hundreds of thousands."""
        length = struct.Struct("<Q").unpack_from
        while count:
            data, position, last = self._data, self.position, len(self._data) - 8
            while count and position <= last:
                position += 8 + length(data, position)[0]
                count -= 1
            self.position = position
            self.skip(0)
            if count:
                self.skip(self.number(8))
                count -= 1

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start = self.position
        self.skip(nbytes)
        if self.position > _MAX_HEADER_BYTES:
            raise InputError("its header is implausibly large")
        while self.position > len(self._data):
            missing = min(max(_READ_BYTES, self.position - len(self._data)), self._source.size - len(self._data))
            self._data += self._source.pread(len(self._data), missing)
        return self._data[start : self.position]

    def number(self, nbytes: int) -> int:
        """Return the next unsigned number."""
        return int.from_bytes(self.take(nbytes), "little")

    def text(self) -> bytes:
        """Return the next text, which is short."""
        length = self.number(8)
        if length > _MAX_NAME_BYTES:
            raise InputError("its header has an implausibly long name")
        return self.take(length)


def _skip_value(header: _Header, kind: int, depth: int = 0) -> None:
    if kind in _VALUE_BYTES:
        header.skip(_VALUE_BYTES[kind])
    elif kind == _TEXT:
        header.skip(header.number(8))
    elif kind == _ARRAY and depth < _MAX_NESTED:
        kind, count = struct.unpack("<IQ", header.take(12))
        if kind in _VALUE_BYTES:
            header.skip(count * _VALUE_BYTES[kind])
            return
        if kind == _TEXT:
            header.skip_texts(count)
            return
        for _ in range(count):
            _skip_value(header, kind, depth + 1)
    else:
        raise InputError("its header has a value of an unknown type")


def _describe(header: _Header) -> _Described:
    raw = header.text()
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise InputError("the name of a tensor is not UTF-8") from None
    axes = header.number(4)
    if axes > _MAX_AXES:
        raise InputError(f"{name!r} has {axes} axes")
    sizes = struct.unpack(f"<{axes}Q", header.take(8 * axes))
    kind, offset = struct.unpack("<IQ", header.take(12))
    if max((*sizes, offset)) >= 1 << 63:
        raise InputError(f"{name!r} has an impossible shape or place")
    return _Described(name, sizes[::-1], kind, offset)


FORMAT = Format("gguf", lambda head: head.startswith(_MAGIC), _parse)
