"""The Zarr store of a virtual hierarchy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from ckstore.errors import UsageError
from ckstore.views.nodes import ArrayNode, Hierarchy

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

#: A function of a module, and its arguments.
Identity = tuple[Callable[..., "ViewStore"], *tuple[Any, ...]]

_READ_ONLY = "store was opened in read-only mode and does not support writing"


class ViewStore(Store):
    """A read-only Zarr store over a hierarchy; chunks are decoded in threads on access.

    Views of equal `identity` are the same store. Its first item is a function that makes the same hierarchy again from
    the others, in another process too.
    """

    def __init__(self, hierarchy: Hierarchy, identity: Identity, *, read_only: bool = True) -> None:
        if not read_only:
            raise UsageError("A version never changes: open its arrays with read_only=True.")
        super().__init__(read_only=True)
        self.hierarchy = hierarchy
        self.identity = identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ViewStore) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"<ckstore.ViewStore {' '.join(map(str, self.identity[1:3]))}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        make, *arguments = self.identity
        return make, tuple(arguments)

    def with_read_only(self, read_only: bool = False) -> ViewStore:
        """Return the same store; raise `NotImplementedError` for a writable one."""
        if not read_only:
            raise NotImplementedError(f"with_read_only is not implemented for the {type(self)} store type.")
        return type(self)(self.hierarchy, self.identity)

    @property
    def supports_writes(self) -> bool:
        """Whether values can be set: never."""
        return False

    @property
    def supports_deletes(self) -> bool:
        """Whether values can be deleted: never."""
        return False

    @property
    def supports_listing(self) -> bool:
        """Whether keys can be listed."""
        return True

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of a document or chunk, or some of them; None for an unknown key."""
        if not self._is_open:
            await self._open()
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Do `get` in the calling thread."""
        wanted = _slice(byte_range)
        found = self.hierarchy.find(key)
        if found is None:
            return None
        path, index = found
        node = self.hierarchy.nodes[path]
        if index is not None and isinstance(node, ArrayNode):
            data: Any = node.chunk(index).data
        else:
            data = self.hierarchy.document(path)
        return (prototype or default_buffer_prototype()).buffer.from_bytes(data[wanted])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the values of several keys or parts of them, in order."""
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether a document or chunk has that key."""
        return self.hierarchy.find(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the size in bytes of a value, without decoding a chunk."""
        found = self.hierarchy.find(key)
        if found is None:
            raise FileNotFoundError(key)
        path, index = found
        node = self.hierarchy.nodes[path]
        if index is not None and isinstance(node, ArrayNode):
            return node.chunk_bytes()
        return len(self.hierarchy.document(path))

    async def list(self) -> AsyncIterator[str]:
        """Return all keys."""
        for key in self.hierarchy.keys_below(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Return all keys that begin with `prefix`."""
        above = prefix.rpartition("/")[0]
        for key in self.hierarchy.keys_below(above if above in self.hierarchy.nodes else ""):
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Return the first segments of all keys below `prefix`."""
        for name in self.hierarchy.names(prefix.rstrip("/")):
            yield name

    async def set(self, key: str, value: Buffer) -> NoReturn:
        """Raise `ValueError`: a version never changes."""
        raise ValueError(_READ_ONLY)

    async def delete(self, key: str) -> NoReturn:
        """Raise `ValueError`: a version never changes."""
        raise ValueError(_READ_ONLY)


def _slice(byte_range: ByteRequest | None) -> slice:
    match byte_range:
        case None:
            return slice(None)
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(-suffix if suffix else 1 << 63, None)
    raise ValueError(f"Unexpected byte_range, got {byte_range}.")
