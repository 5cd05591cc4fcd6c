"""The nodes of a virtual Zarr v3 hierarchy: groups and arrays with their metadata, by path."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.dtypes import plain_dtype
from ckstore.reading.real_values import plain_numbers

#: Name of the document that describes a node.
METADATA = "zarr.json"

#: First segment of the keys of an array's chunks.
CHUNKS = "c"

#: Nodes of a hierarchy whose metadata is read at once; among more, each document is read when it is needed.
_CONSOLIDATED = 16_384

_FILL: dict[str, Any] = {"bool": False, "float": 0.0, "complex": [0.0, 0.0]}


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """An array of a dtype in `ITEM_SIZES`; one that Zarr lacks is of its `plain_dtype`, with an attribute `dtype`.

    Chunks are at least one element long in every axis. `dimensions` are the names of the axes, for xarray.
    `read(starts, stops)` returns the elements of a box as bits, an array of shape stops − starts.
    """

    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    read: Callable[[tuple[int, ...], tuple[int, ...]], npt.NDArray[Any]]

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))

    def metadata(self) -> dict[str, Any]:
        """Return the array's metadata document."""
        name = plain_dtype(self.dtype)
        codec: dict[str, Any] = {"name": "bytes"}
        if name not in ("bool", "int8", "uint8"):
            codec["configuration"] = {"endian": "little"}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk_shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _FILL.get(name.rstrip("0123456789"), 0),
            "codecs": [codec],
            "attributes": {} if name == self.dtype else {"dtype": self.dtype},
            "dimension_names": list(self.dimensions),
            "storage_transformers": [],
        }

    def chunk(self, index: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the bytes of a chunk of the grid, with zeros beyond the end of the array."""
        starts = tuple(position * chunk for position, chunk in zip(index, self.chunk_shape, strict=True))
        stops = tuple(
            min(start + chunk, size) for start, chunk, size in zip(starts, self.chunk_shape, self.shape, strict=True)
        )
        bits = plain_numbers(self.read(starts, stops), self.dtype)
        if bits.shape != self.chunk_shape:
            whole = np.zeros(self.chunk_shape, bits.dtype)
            whole[tuple(slice(0, size) for size in bits.shape)] = bits
            bits = whole
        return np.ascontiguousarray(bits).reshape(-1).view(np.uint8)

    def chunk_bytes(self) -> int:
        """Return the number of bytes of every chunk."""
        return prod(self.chunk_shape) * int(np.dtype(plain_dtype(self.dtype)).itemsize)

    def chunk_keys(self) -> Iterator[str]:
        """Yield the keys of all chunks, below the array's path."""
        for index in product(*map(range, self.grid)):
            yield "/".join([CHUNKS, *map(str, index)])

    def index_of(self, segments: list[str]) -> tuple[int, ...] | None:
        """Return the chunk of key segments below the array's path; None for other keys."""
        grid = self.grid
        if len(segments) != len(grid) + 1 or segments[0] != CHUNKS:
            return None
        if not all(text.isascii() and text.isdigit() and str(int(text)) == text for text in segments[1:]):
            return None
        index = tuple(map(int, segments[1:]))
        return index if all(number < count for number, count in zip(index, grid, strict=True)) else None


@dataclass(frozen=True, slots=True)
class GroupNode:
    """A group: its attributes, and the names of its members in order."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)

    def metadata(self) -> dict[str, Any]:
        """Return the group's metadata document, without those of its members."""
        return {"zarr_format": 3, "node_type": "group", "attributes": dict(self.attributes)}


class Hierarchy:
    """Groups and arrays by path, the root being the empty path; it makes the groups above the arrays, in order."""

    def __init__(self, arrays: Mapping[str, ArrayNode], attributes: Mapping[str, Any]) -> None:
        self.nodes: dict[str, ArrayNode | GroupNode] = {"": GroupNode(attributes)}
        self._documents: dict[str, bytes] = {}
        for path, array in arrays.items():
            parent = self.nodes[""]
            assert isinstance(parent, GroupNode)
            segments = path.split("/")
            for depth, name in enumerate(segments[:-1], 1):
                above = "/".join(segments[:depth])
                node = self.nodes.get(above)
                if node is None:
                    node = self.nodes[above] = GroupNode()
                    parent.members.append(name)
                assert isinstance(node, GroupNode)
                parent = node
            parent.members.append(segments[-1])
            self.nodes[path] = array

    def document(self, path: str) -> bytes:
        """Return the metadata document of a node; a group's holds those of everything below it, if these are few."""
        found = self._documents.get(path)
        if found is None:
            node = self.nodes[path]
            metadata = node.metadata()
            if isinstance(node, GroupNode) and len(self.nodes) <= _CONSOLIDATED:
                metadata["consolidated_metadata"] = self._consolidated(path)
            found = self._documents[path] = json.dumps(metadata, separators=(",", ":")).encode()
        return found

    def _consolidated(self, path: str) -> dict[str, Any]:
        below: dict[str, Any] = {}
        for other, node in self._below(path):
            metadata = node.metadata()
            if isinstance(node, GroupNode):
                metadata["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": {}}
            below[other] = metadata
        return {"kind": "inline", "must_understand": False, "metadata": below}

    def _below(self, path: str, relative: str = "") -> Iterator[tuple[str, ArrayNode | GroupNode]]:
        node = self.nodes[path]
        if isinstance(node, GroupNode):
            for name in node.members:
                member, shown = join(path, name), join(relative, name)
                yield shown, self.nodes[member]
                yield from self._below(member, shown)

    def find(self, key: str) -> tuple[str, tuple[int, ...] | None] | None:
        """Return the node's path and the chunk (None: its document) of a key; None for an unknown key."""
        above, _, last = key.rpartition("/")
        if last == METADATA and join(above, METADATA) == key and above in self.nodes:
            return above, None
        path, rest = self._split(key)
        node = self.nodes.get(path)
        index = node.index_of(rest) if isinstance(node, ArrayNode) else None
        return None if index is None else (path, index)

    @staticmethod
    def _split(key: str) -> tuple[str, list[str]]:
        """Return an array's path, and the segments of a chunk's key below it: one and the last ones of digits."""
        segments = key.split("/")
        first = len(segments) - 1
        while first > 0 and segments[first].isdigit():
            first -= 1
        return "/".join(segments[:first]), segments[first:]

    def keys_below(self, path: str) -> Iterator[str]:
        """Yield all keys of a node and of everything below it."""
        yield join(path, METADATA)
        node = self.nodes[path]
        if isinstance(node, ArrayNode):
            for key in node.chunk_keys():
                yield f"{path}/{key}"
            return
        for name in node.members:
            yield from self.keys_below(join(path, name))

    def names(self, path: str) -> Iterator[str]:
        """Yield the first segments of all keys below a path, even without a node."""
        node = self.nodes.get(path)
        if isinstance(node, GroupNode):
            yield METADATA
            yield from node.members
        elif isinstance(node, ArrayNode):
            yield METADATA
            if prod(node.grid):
                yield CHUNKS
        else:
            yield from self._chunk_names(path)

    def _chunk_names(self, path: str) -> Iterator[str]:
        """Yield names of chunks below `c` of an array, or below some of their positions."""
        above, (first, *given) = self._split(path)
        node = self.nodes.get(above)
        if not isinstance(node, ArrayNode) or first != CHUNKS:
            return
        grid = node.grid
        if len(given) < len(grid) and node.index_of([CHUNKS, *given, *["0"] * (len(grid) - len(given))]) is not None:
            yield from map(str, range(grid[len(given)]))


def join(path: str, name: str) -> str:
    """Return the path of a member of a group."""
    return f"{path}/{name}" if path else name
