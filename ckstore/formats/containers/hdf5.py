"""HDF5 files with contiguous datasets, as Keras and `h5py` write them.

The reader supports the structures of such files: superblocks, object headers of both versions, groups as symbol tables
or with links in the header, dataspaces, datatypes, contiguous layouts. Everything else (chunks, compression, text,
links to other files, groups in fractal heaps) stays bytes. ckstore has its own reader for two reasons: a library in C
would parse untrusted input, and the contents of a stored version would depend on its installation.

Source: HDF5 File Format Specification, version 3.0.
"""

from __future__ import annotations

import struct
from math import prod
from typing import NamedTuple

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, Format, Path, Source, Tensor, TensorRef, row_major
from ckstore.formats.paths import path_to_text

_MAGIC = b"\x89HDF\r\n\x1a\n"
#: The address of nothing.
_NOWHERE = (1 << 64) - 1
_MAX_DEPTH = 64
_MAX_RANK = 32
_MAX_NAME_BYTES = 1 << 16
#: The limit of header bytes that are read, and the overhead of a read: above any model's groups and datasets.
_MAX_READ_BYTES = 1 << 28
_READING_BYTES = 256

_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _EXTERNAL, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _SYMBOL_TABLE = (
    0x01, 0x02, 0x03, 0x06, 0x07, 0x08, 0x0C, 0x10, 0x11,
)  # fmt: skip
_SHARED = 0x02
_SOFT_LINK = 2

#: dtype by class, size and properties: integers by sign, floats by the places of their fields.
_INTEGERS = {
    (size, signed): f"{'' if signed else 'u'}int{8 * size}" for size in (1, 2, 4, 8) for signed in (True, False)
}
_FLOATS = {
    (2, 15, 10, 5, 0, 10, 15): "float16",
    (2, 15, 7, 8, 0, 7, 127): "bfloat16",
    (4, 31, 23, 8, 0, 23, 127): "float32",
    (8, 63, 52, 11, 0, 52, 1023): "float64",
}


class _Message(NamedTuple):
    """A message of an object header."""

    kind: int
    is_shared: bool
    data: bytes


def _parse(source: Source) -> FileLayout:
    """Return the layout of an HDF5 file; a tensor's path is the names of its groups and of its dataset.

    Raises `InputError` if it is cut off, or its datasets overlap with one another or with their descriptions.
    """
    reader = _Reader(source)
    try:
        reader.file()
    except (struct.error, IndexError):
        raise InputError("one of its headers ends too early") from None
    return reader.laid_out()


class _Reader:
    """Reads groups and datasets from the root on, and records the bytes of the file that it has read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._layout = FileLayout("hdf5", source.size, tree={})
        self._left = _MAX_READ_BYTES
        self._read_spans: list[tuple[int, int]] = []
        self._groups: set[int] = set()
        self._nodes: set[int] = set()
        #: The number of the extent that begins at a place.
        self._extents: dict[int, int] = {}

    def file(self) -> None:
        """Read the whole file."""
        version = self._read(0, 9)[8]
        if version in (0, 1):
            skip = 24 if version == 0 else 28
            sizes = self._read(13, 2)
            base, _, stop, _ = struct.unpack("<4Q", self._read(skip, 32))
            _, root = struct.unpack("<2Q", self._read(skip + 32, 40)[:16])
        elif version in (2, 3):
            sizes = self._read(9, 2)
            base, _, stop, root = struct.unpack("<4Q", self._read(12, 36)[:32])
        else:
            sizes, base, stop, root = b"", 0, 0, 0
        if sizes != b"\x08\x08" or base:
            self._layout.bytes_for[""] = "an unknown version of the format, or an unusual size of addresses"
            return
        if stop > self._source.size:
            raise InputError("the file ends before its end of data")
        self._object(root, ())

    def laid_out(self) -> FileLayout:
        """Return the layout after reading; large stretches that are neither headers nor tensors become extents."""
        layout = self._layout
        places = {(one.start, one.stop) for one in layout.extents}
        position = data = 0
        for start, stop in sorted([*self._read_spans, *places, (layout.size, layout.size)]):
            is_data = (start, stop) in places
            if (is_data and start < position) or start < data:
                raise InputError("its datasets overlap with one another or with their descriptions")
            layout.add_bytes(("__bytes__", position), position, start)
            position = max(position, stop)
            data = stop if is_data else data
        if not layout.tensors:
            layout.tree = None
        return layout

    def _read(self, start: int, length: int) -> bytes:
        if start + length > self._source.size:
            raise InputError("one of its addresses points beyond the file")
        self._left -= length + _READING_BYTES
        if self._left < 0:
            raise InputError("it has implausibly many groups and datasets")
        if length:
            self._read_spans.append((start, start + length))
        return self._source.pread(start, length)

    def _object(self, address: int, path: Path) -> None:
        """Read a group or dataset and all below it."""
        messages = self._messages(address)
        kinds = {message.kind: message for message in messages}
        if _LAYOUT in kinds and path:
            self._dataset(kinds, path)
            return
        if address in self._groups or len(path) > _MAX_DEPTH:
            return  # A group may be in several places, or in itself.
        self._groups.add(address)
        for name, child in self._links(messages, path):
            self._object(child, (*path, name))

    def _links(self, messages: list[_Message], path: Path) -> list[tuple[str, int]]:
        """Return the names and addresses of the members of a group."""
        links: list[tuple[str, int]] = []
        for message in messages:
            if message.kind == _SYMBOL_TABLE:
                tree, heap = struct.unpack_from("<2Q", message.data)
                links += self._symbols(tree, heap)
            elif message.kind == _LINK:
                link = _link(message.data)
                links += [] if link is None else [link]
            elif message.kind == _LINK_INFO:
                heap_place = 2 + 8 * (message.data[1] & 1)
                if struct.unpack_from("<Q", message.data, heap_place)[0] != _NOWHERE:
                    self._layout.bytes_for[path_to_text(path)] = "a group whose members are in a fractal heap"
        names = [name for name, _ in links]
        if len(set(names)) < len(names):
            raise InputError(f"group {path_to_text(path)!r} has two members with one name")
        return links

    def _messages(self, address: int) -> list[_Message]:
        """Return the messages of an object header."""
        if self._read(address, 4) == b"OHDR":
            flags = self._read(address + 4, 2)[1]
            place = address + 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
            width = 1 << (flags & 3)
            blocks = [(place + width, int.from_bytes(self._read(place, width), "little"))]
            order = 2 * bool(flags & 0x04)
        else:
            version, _, _, _, length = struct.unpack("<BBHII", self._read(address, 12))
            if version != 1:
                raise InputError("an object header has an unknown version")
            blocks = [(address + 16, length)]
            order = -1
        messages: list[_Message] = []
        for start, length in blocks:  # which grows
            data = self._read(start, length)
            position = 0
            head = 8 if order < 0 else 4 + order
            while position + head <= length:
                if order < 0:
                    kind, size, flags = struct.unpack_from("<HHB", data, position)
                else:
                    kind, size, flags = struct.unpack_from("<BHB", data, position)
                position += head
                message = _Message(kind, bool(flags & _SHARED), data[position : position + size])
                position += size
                if position > length:
                    raise InputError("a message exceeds its object header")
                messages.append(message)
                if kind == _CONTINUATION:
                    place, more = struct.unpack_from("<QQ", message.data)
                    # Blocks of the second version have a signature before their messages, and a checksum after them.
                    blocks.append((place, more) if order < 0 else (place + 4, max(more - 8, 0)))
                    if len(blocks) > _MAX_NAME_BYTES:
                        raise InputError("an object header continues without end")
        return messages

    def _symbols(self, tree: int, heap: int) -> list[tuple[str, int]]:
        """Return the members of a symbol-table group: names are in a local heap, addresses in a tree."""
        signature, size, _, names = struct.unpack("<4s4x3Q", self._read(heap, 32))
        if signature != b"HEAP":
            raise InputError("the group and its local heap disagree about the heap's place")
        text = self._read(names, size)
        found: list[tuple[str, int]] = []
        left = [tree]
        while left:
            node = left.pop()
            if node in self._nodes:
                raise InputError("a node of a group occurs twice")
            self._nodes.add(node)
            head = self._read(node, 8)
            if head[:4] == b"SNOD":
                count = int.from_bytes(head[6:8], "little")
                entries = struct.iter_unpack("<2QI20x", self._read(node + 8, 40 * count))
                found += [(_name(text, name), child) for name, child, kind in entries if kind != _SOFT_LINK]
            elif head[:5] == b"TREE\0":
                count = int.from_bytes(head[6:8], "little")
                children = self._read(node + 24, 16 * count + 8)
                left += [child for _, child in struct.iter_unpack("<2Q", children[: 16 * count])][::-1]
            else:
                raise InputError("the group and one of its nodes disagree about the node's place")
        return found

    def _dataset(self, kinds: dict[int, _Message], path: Path) -> None:
        why = self._place(kinds, path)
        if why:
            self._layout.bytes_for[path_to_text(path)] = why

    def _place(self, kinds: dict[int, _Message], path: Path) -> str:
        """Add a dataset as a tensor; return the reason if it stays bytes."""
        if _DATASPACE not in kinds or _DATATYPE not in kinds:
            return "no dataspace or datatype"
        if kinds[_DATATYPE].is_shared or kinds[_DATASPACE].is_shared or kinds[_LAYOUT].is_shared:
            return "a datatype that is shared"
        if _EXTERNAL in kinds:
            return "in another file"
        layout = kinds[_LAYOUT].data
        if layout[0] not in (3, 4) or layout[1] != 1:
            return "compact, chunked or compressed"
        start, length = struct.unpack_from("<2Q", layout, 2)
        dtype = _dtype(kinds[_DATATYPE].data, _ATTRIBUTE in kinds)
        shape = _shape(kinds[_DATASPACE].data)
        if shape is None or dtype is None:
            return "text, references or other elements than numbers" if dtype is None else "no simple dataspace"
        nbytes = prod(shape) * ITEM_SIZES[dtype]
        if nbytes and start == _NOWHERE:
            return "nothing was written"
        if nbytes != length and start != _NOWHERE:
            raise InputError(f"dataset {path_to_text(path)!r} has another size than its shape and dtype")
        if nbytes and start + nbytes > self._source.size:
            raise InputError(f"the file ends within dataset {path_to_text(path)!r}")
        self._insert(path, self._tensor(path, dtype, shape, start if nbytes else -1))
        return ""

    def _tensor(self, path: Path, dtype: str, shape: tuple[int, ...], start: int) -> TensorRef:
        """Add a tensor; one that begins where another does is tied to it."""
        number = self._extents.get(start)
        if number is None:
            leaf = self._layout.add(path, dtype, shape, start)
            if start >= 0:
                self._extents[start] = self._layout.tensors[leaf.index].extent
            return leaf
        extent, count = self._layout.extents[number], prod(shape)
        if (extent.count, ITEM_SIZES[extent.dtype]) != (count, ITEM_SIZES[dtype]):
            raise InputError("its datasets overlap with one another or with their descriptions")
        self._layout.tensors.append(Tensor(path, dtype, shape, row_major(shape), number, 0))
        return TensorRef(len(self._layout.tensors) - 1)

    def _insert(self, path: Path, leaf: TensorRef) -> None:
        node = self._layout.tree
        for segment in path[:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = leaf


def _link(data: bytes) -> tuple[str, int] | None:
    """Return name and address of a link in an object header; None for links to names and to other files."""
    flags = data[1]
    kind = data[2] if flags & 0x08 else 0
    place = 2 + bool(flags & 0x08) + 8 * bool(flags & 0x04) + bool(flags & 0x10)
    width = 1 << (flags & 3)
    length = int.from_bytes(data[place : place + width], "little")
    name = data[place + width : place + width + length]
    if kind:
        return None
    return _decoded(name), struct.unpack_from("<Q", data, place + width + length)[0]


def _name(heap: bytes, place: int) -> str:
    stop = heap.find(b"\0", place, place + _MAX_NAME_BYTES)
    if stop < 0:
        raise InputError("a name exceeds its heap")
    return _decoded(heap[place:stop])


def _decoded(name: bytes) -> str:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise InputError("a name is not UTF-8") from None
    if not text:
        raise InputError("a name is empty")
    return text


def _shape(data: bytes) -> tuple[int, ...] | None:
    """Return the shape of a dataspace; None without elements."""
    version, rank = data[0], data[1]
    if rank > _MAX_RANK or version not in (1, 2) or (version == 2 and data[3] == 2):
        return None
    sizes = struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)
    return None if any(size >= 1 << 63 for size in sizes) else sizes


def _dtype(data: bytes, has_attributes: bool) -> str | None:
    """Return the dtype of a datatype; None if it is not supported."""
    kind, bits, size = data[0] & 0x0F, data[1:4], int.from_bytes(data[4:8], "little")
    if kind == 0 and not bits[0] & 1:
        offset, precision = struct.unpack_from("<2H", data, 8)
        whole = offset == 0 and precision == 8 * size
        return _INTEGERS.get((size, bool(bits[0] & 8))) if whole else None
    if kind == 1 and not bits[0] & 0x41:
        offset, precision, *fields, bias = struct.unpack_from("<2H4BI", data, 8)
        whole = offset == 0 and precision == 8 * size
        return _FLOATS.get((size, bits[1], *fields, bias)) if whole else None
    if kind == 8 and size == 1 and bits[:2] == b"\2\0" and data.find(b"FALSE\0") < data.find(b"TRUE\0"):
        return "bool"
    if kind == 5 and size == 2 and has_attributes:
        return "bfloat16"  # Keras writes opaque elements, and names their dtype in an attribute.
    return None


#: A user block may precede the magic; such files stay bytes.
FORMAT = Format("hdf5", lambda head: head.startswith(_MAGIC), _parse)
