"""Finds and reads the stored bytes of chunks in packs."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Protocol

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.objects.records import Patches, Raw, Record
from ckstore.runtime.blocks import empty
from ckstore.runtime.checksum import crc32
from ckstore.runtime.lru import Lru
from ckstore.runtime.scratch import scratch
from ckstore.runtime.threads import shared
from ckstore.storage.pack_reader import read_shard_index

#: Bytes of a shard index: one entry for each chunk, and a checksum.
_INDEX_ENTRY = 16
_INDEX_CHECKSUM = 4

#: Payloads up to this many bytes are read into a reused buffer.
_PAYLOAD = 4 << 20

#: Records up to this many bytes are fetched from a remote store in one piece.
_SMALL = 1 << 20

#: Decoded shard indexes in the cache.
_INDEXES = 1 << 13

Index = list[tuple[int, int] | None]


class Blocks(Protocol):
    """Random access to the bytes of packs by name."""

    @property
    def read_price(self) -> float:
        """The price of reading a byte; see `ckstore.storage.interface.Storage`."""

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a pack."""

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a pack from `offset` on."""


class StoredChunks:
    """The stored bytes of records' chunks."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._indexes: Lru[tuple[str, int, int, int], Index] = Lru(_INDEXES)

    def index(self, record: Record) -> Index:
        """Return (offset, length) in the record's data for each payload; None if nothing is stored of it."""
        if record.payloads == 1 and not isinstance(record, Patches):
            return [(0, record.nbytes) if record.nbytes else None]
        key = (record.pack, record.offset, record.nbytes, record.chunks)  # Records of a hostile pack may overlap.
        return self._indexes.get(key) or self._indexes.put(key, self._read_index(record))

    def _read_index(self, record: Record) -> Index:
        if isinstance(record, Patches):
            ends = accumulate(record.sizes)
            return [(end - size, size) if size else None for end, size in zip(ends, record.sizes, strict=True)]
        length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
        if length > record.nbytes:
            raise IntegrityError(f"The shard of object {record.id} is too short for its index.")
        tail = self._blocks.pread(record.pack, record.offset + record.nbytes - length, length)
        return read_shard_index(tail, record.chunks, record.nbytes)

    def index_ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the place of a record's index, as (offset, length), if `ranges` needs it for these chunks."""
        if chunks is None or not _is_picked(record) or isinstance(record, Patches | Raw):
            return []
        length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
        return [(record.offset + max(record.nbytes - length, 0), min(length, record.nbytes))]

    def ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the places of some chunks of a record (None: all) in its pack, as (offset, length).

        A small record is one range.
        """
        if chunks is None or not _is_picked(record):
            return [(record.offset, record.nbytes)]
        if isinstance(record, Raw):
            size = record.chunk * ITEM_SIZES[record.dtype]
            return [(record.offset + chunk * size, min(size, record.nbytes - chunk * size)) for chunk in chunks]
        places = [self.index(record)[chunk] for chunk in chunks]
        return [(record.offset + place[0], place[1]) for place in places if place is not None]

    def payload(self, record: Record, chunk: int) -> memoryview | None:
        """Return the payload of a chunk, in a buffer that this thread reuses for the next one; None if it has none."""
        place = self.index(record)[chunk]
        if place is None:
            return None
        offset, length = record.offset + place[0], place[1]
        if not 0 <= length <= _PAYLOAD:
            return memoryview(self._blocks.pread(record.pack, offset, length))  # `pread` checks before it allocates.
        target = scratch("payload", length, np.uint8).data
        self._blocks.read_into(record.pack, offset, target)
        return target

    def raw(self, record: Raw, chunk: int, out: Bits | None) -> Bits:
        """Return the bits of one chunk of a raw object, in `out` if given."""
        size = ITEM_SIZES[record.dtype]
        bits = empty(record.size_of(chunk), f"u{size}") if out is None else out
        self._blocks.read_into(record.pack, record.offset + chunk * record.chunk * size, bits.data.cast("B"))
        if crc32(bits) != record.crcs[chunk]:
            raise IntegrityError(f"Chunk {chunk} of object {record.id} does not restore the stored values.")
        return bits


def is_whole(record: Raw, pack: memoryview, workers: int) -> bool:
    """Return whether the chunks of a raw object match their checksums in its mapped pack."""
    size = ITEM_SIZES[record.dtype]

    def agrees(chunk: int) -> bool:
        start = record.offset + chunk * record.chunk * size
        return crc32(pack[start : start + record.size_of(chunk) * size]) == record.crcs[chunk]

    return all(shared(agrees, range(len(record.crcs)), workers))


def _is_picked(record: Record) -> bool:
    """Return whether single chunks of a record are fetched."""
    return record.nbytes > _SMALL and record.payloads > 1
