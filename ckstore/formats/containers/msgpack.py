"""MessagePack files with arrays, as `flax.serialization` writes them.

An array is an extension of type 1 (a NumPy scalar: 3), which holds a shape, the name of a dtype and the elements in C
order. MessagePack has no signature: a file without arrays stays opaque.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md and `flax/serialization.py`.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import LARGE_BYTES, FileLayout, Format, Path, Source, Unknown
from ckstore.formats.paths import path_to_text

_MAX_DEPTH = 100
_MAX_RANK = 64
#: Above the number of values of any state dict; each takes a moment to read.
_MAX_VALUES = 1 << 20
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3

#: The number of length bytes after a code.
_LENGTH_BYTES = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
#: `struct` formats of the numbers after a code.
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def _starts_like(head: bytes) -> bool:
    """Return whether a file begins with a map whose first key is text."""
    first = head[:1]
    if b"\x81" <= first <= b"\x8f":
        key = head[1:2]
    else:
        key = {b"\xde": head[3:4], b"\xdf": head[5:6]}.get(first, b"")
    return b"\xa1" <= key <= b"\xbf" or key == b"\xd9"


def _parse(source: Source) -> FileLayout | None:
    """Return the layout of a MessagePack file; None without arrays.

    Raises `InputError` if a file with arrays is cut off or damaged.
    """
    reader = _Reader(source)
    try:
        tree = reader.value((), 0)
        if reader.position != source.size:
            raise InputError("it continues after its end")
    except InputError:
        if reader.has_arrays:
            raise
        return None
    if not reader.has_arrays:
        return None
    layout = reader.layout
    layout.facts = facts_of_mapping(tree)
    layout.tree = tree if layout.tensors else None
    return layout


class _Reader:
    """Reads values in order; adds arrays to `layout`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left = _MAX_VALUES
        self.layout = FileLayout("msgpack", source.size)
        self.position = 0
        self.has_arrays = False

    def value(self, path: Path, depth: int) -> Any:
        """Return the value that begins here."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise InputError("it is nested implausibly deep, or holds implausibly many values")
        code = self._take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            return struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if code < 0x90 or code in (0xDE, 0xDF):
            return self._map(self._length(code, 0x0F), path, depth)
        if code < 0xA0 or code in (0xDC, 0xDD):
            return [self.value((*path, index), depth + 1) for index in range(self._length(code, 0x0F))]
        if code < 0xC0 or code in (0xD9, 0xDA, 0xDB):
            return self._bytes(self._length(code, 0x1F), path, is_text=True)
        if code in (0xC4, 0xC5, 0xC6):
            return self._bytes(self._length(code), path, is_text=False)
        if code == 0xC1:
            raise InputError("it holds an undefined code")
        length = _FIXED_EXTENSIONS.get(code) or self._length(code)
        return self._extension(self._take(1)[0], self.position + length, path, depth)

    def _map(self, count: int, path: Path, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value((), depth + 1)
            if type(key) not in (str, int) or key in found:
                raise InputError("a key of a map is neither text nor a number, or occurs twice")
            found[key] = self.value((*path, key), depth + 1)
        return found

    def _bytes(self, length: int, path: Path, *, is_text: bool) -> Any:
        if length >= LARGE_BYTES:  # Such text and bytes stay in the file, outside of the tree.
            start = self.position
            self._go(start + length)
            self.layout.add_bytes((*path, "__bytes__"), start, start + length)
            return Unknown(f"msgpack.{'str' if is_text else 'bin'}")
        data = self._take(length)
        try:
            return data.decode() if is_text else data
        except UnicodeDecodeError:
            raise InputError("a text is not UTF-8") from None

    def _extension(self, kind: int, stop: int, path: Path, depth: int) -> Any:
        """Return an array, a complex number, or an unknown object."""
        if kind in (_NDARRAY, _SCALAR):
            return self._array(stop, path)
        if kind == _COMPLEX:
            parts = self.value(path, depth + 1)
            if type(parts) is list and [type(part) for part in parts] == [float, float] and self.position == stop:
                return complex(*parts)
            raise InputError("a complex number does not consist of two numbers")
        self._go(stop)
        return Unknown(f"msgpack.ext.{kind}")

    def _array(self, stop: int, path: Path) -> Any:
        if self._take(1) != b"\x93":
            raise InputError("an array is not described by shape, dtype and elements")
        code = self._take(1)[0]
        if not 0x90 <= code < 0xA0 and code != 0xDC:
            raise InputError("an array has no shape")
        rank = self._length(code, 0x0F)
        if rank > _MAX_RANK:
            raise InputError(f"an array has {rank} axes")
        shape = tuple(self.value((), 0) for _ in range(rank))
        dtype = self.value((), 0)
        if any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape) or type(dtype) is not str:
            raise InputError("an array has an impossible shape or dtype")
        code = self._take(1)[0]
        if code not in (0xC4, 0xC5, 0xC6):
            raise InputError("an array has no elements")
        length = self._length(code)
        self.has_arrays = True
        start = self.position
        if dtype in ITEM_SIZES and length != prod(shape) * ITEM_SIZES[dtype]:
            raise InputError("an array has another size than its shape and dtype")
        if start + length != stop:
            raise InputError("an array and its extension have different ends")
        self._go(stop)
        if dtype in ITEM_SIZES:
            return self.layout.add(path, dtype, shape, start)
        self.layout.bytes_for[path_to_text(path)] = f"dtype {dtype}"
        self.layout.add_bytes(path, start, stop)
        return Unknown("msgpack.ndarray")

    def _length(self, code: int, mask: int = 0) -> int:
        """Return a length from the code or after it."""
        if code in _LENGTH_BYTES:
            return int.from_bytes(self._take(_LENGTH_BYTES[code]), "big")
        return code & mask

    def _take(self, length: int) -> bytes:
        start = self.position
        self._go(start + length)
        return self._source.pread(start, length)

    def _go(self, position: int) -> None:
        if position > self._source.size:
            raise InputError("the file ends within a value")
        self.position = position


FORMAT = Format("msgpack", _starts_like, _parse, in_archives=False)
