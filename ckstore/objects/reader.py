"""Reads objects: resolves their chains, and decodes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from itertools import accumulate
from threading import Lock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import Indices
from ckstore.codecs.integers import add_integers, decode_integers
from ckstore.codecs.lattice import (
    FLOATS,
    Bits,
    Integers,
    ordinal_classes,
    ordinal_correct,
)
from ckstore.codecs.patches import apply_patch
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work
from ckstore.objects.cache import ChunkCache
from ckstore.objects.records import Codebook, Delta, Linear, Patches, Raw, Record, Rounded, check_cut
from ckstore.runtime import forks
from ckstore.runtime.blocks import empty
from ckstore.runtime.checksum import crc32
from ckstore.runtime.lru import Lru
from ckstore.runtime.scratch import scratch
from ckstore.runtime.threads import shared
from ckstore.storage.pack_reader import read_shard_index

#: Bytes of a shard index: one entry for each chunk, and a checksum.
_INDEX_ENTRY = 16
_INDEX_CHECKSUM = 4

#: Bytes of the checksum before each chunk of protected elements.
_FRAME = 4

#: Payloads up to this many bytes are read into a reused buffer.
_PAYLOAD = 4 << 20

#: Records up to this many bytes are fetched from a remote store in one piece.
_SMALL = 1 << 20

#: Bytes of cached chunks for work that is done once.
_PASSING = 64 << 20

#: Decoded shard indexes and resolved chains in the caches.
_INDEXES = 1 << 13
_CHAINS = 1 << 13

P = ParamSpec("P")
T = TypeVar("T")


class Resolver(Protocol):
    """Finds records by id."""

    @property
    def generation(self) -> int:
        """A number that changes when records may have changed."""

    def settled(self, look: Callable[[], T]) -> T:
        """Return the result of `look`; repeat it if a concurrent change fails it."""

    def record(self, identity: str) -> Record:
        """Return the record of an id; raise `IntegrityError` if it is lost."""


class Blocks(Protocol):
    """Random access to the bytes of packs by name."""

    @property
    def read_price(self) -> float:
        """The price of reading a byte; see `ckstore.storage.interface.Storage`."""

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a pack."""

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a pack from `offset` on."""


def _settled(method: Callable[Concatenate[ObjectReader, P], T]) -> Callable[Concatenate[ObjectReader, P], T]:
    """Repeat a lookup that a concurrent change has failed; see `Resolver.settled`."""

    @wraps(method)
    def settled(self: ObjectReader, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self.resolver.settled(lambda: method(self, *arguments, **named))

    return settled


class ObjectReader:
    """Decodes chunks of objects.

    Parameters
    ----------
    resolver
        Finds records.
    blocks
        Reads bytes of packs.
    cache_bytes
        Limit of the cache of decoded chunks.
    keeps
        Whether the chunks of a version that is being stored stay cached for its successor.
    """

    def __init__(self, resolver: Resolver, blocks: Blocks, cache_bytes: int = 64 << 20, *, keeps: bool = True) -> None:
        self.resolver = resolver
        self.blocks = blocks
        self.cache = ChunkCache(cache_bytes)
        self.keeps = keeps
        self.decoded_chunks = 0
        self._indexes: Lru[tuple[str, int], list[tuple[int, int] | None]] = Lru(_INDEXES)
        self._chains: Lru[str, tuple[int, list[Record]]] = Lru(_CHAINS)
        self._locks: dict[tuple[str, int, int], tuple[Lock, int]] = {}
        self._lock = forks.Lock()

    def in_passing(self) -> ObjectReader:
        """Return a reader of the same objects with a small cache of its own, for work that is done once."""
        return ObjectReader(self.resolver, self.blocks, min(self.cache.limit, _PASSING), keeps=False)

    def chain(self, record: Record) -> list[Record]:
        """Return the records from `record` back to its base.

        Raises
        ------
        IntegrityError
            A record is lost, is its own ancestor, or has another kind or cut than the record above it.
        """
        generation = self.resolver.generation
        found = self._chains.get(record.id)
        if found is not None and found[0] == generation and found[1][0] is record:
            return found[1]
        records = [record]
        seen = {record.id}
        while (base := self._base(records[-1])) is not None:
            if base.id in seen:
                raise IntegrityError(f"The chain of object {record.id} is a cycle; run `ckstore recover`.")
            seen.add(base.id)
            records.append(base)
        self._chains.drop(record.id)
        self._chains.put(record.id, (generation, records))
        return records

    def _base(self, record: Record) -> Record | None:
        if record.base is None:
            return None
        base = self.resolver.record(record.base)
        check_cut(base, record)
        if not record.fits_on(base):
            raise IntegrityError(f"Object {record.id} cannot be a delta against {base.id}; run `ckstore recover`.")
        return base

    def records(self, identity: str) -> list[Record]:
        """Return all records that restore an object; raise `IntegrityError` if one is lost."""
        return list(self.resolver.settled(lambda: self.chain(self.resolver.record(identity))))

    def index_ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the place of a record's index, as (offset, length), if `ranges` needs it for these chunks."""
        if chunks is None or not self._is_picked(record) or isinstance(record, Patches):
            return []
        length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
        return [(record.offset + max(record.length - length, 0), min(length, record.length))]

    def ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the places of some chunks of a record (None: all) in its pack, as (offset, length).

        A small record is one range.
        """
        if chunks is None or not self._is_picked(record):
            return [(record.start, record.end - record.start)]
        places = [self.index(record)[chunk] for chunk in chunks]
        return [(record.offset + place[0], place[1]) for place in places if place is not None]

    @staticmethod
    def _is_picked(record: Record) -> bool:
        """Return whether single chunks of a record are fetched by its index."""
        is_indexed = not isinstance(record, Raw) and not (isinstance(record, Codebook) and record.aside)
        return is_indexed and record.length > _SMALL and record.chunks > 1

    def _undecoded(self, chain: Sequence[Record], chunk: int) -> tuple[list[Record], Record | None, Bits | None]:
        """Return the levels of a chain to decode, lowest first, and the cached level below them with its chunk."""
        for place, level in enumerate(chain):
            cached = self.cache.get((level.id, chunk))
            if cached is not None:
                return list(reversed(chain[:place])), level, cached
        return list(reversed(chain)), None, None

    @_settled
    def work(self, record: Record) -> Work:
        """Return the work of decoding all values of `record` along its chain."""
        return reduce(Work.plus, (level.work for level in self.chain(record)))

    # Decoded chunks are cached unless `keep` is false, as for a sequential read. Values are decoded into `out` if
    # given, unless they are cached or another buffer already holds them: callers use the returned array.

    def integers(self, record: Linear | Rounded, chunk: int, *, keep: bool = True) -> Integers:
        """Return the integers (int32) of one chunk of an object on a lattice, read-only."""
        pending, below, integers = self._undecoded(self.chain(record), chunk)
        for level in pending:
            if isinstance(level, Linear) and isinstance(below, Linear) and integers is not None:
                integers = self._moved(level, below, integers, chunk)
            else:
                integers = self._stored_integers(level, chunk, np.dtype(np.int32), None)
                if integers is None:
                    integers = np.zeros(_chunk_size(level, chunk), np.int32)
            below = level
        assert integers is not None
        return self._decoded((record.id, chunk), integers, keep=keep)

    def _moved(self, level: Linear, below: Linear, integers: Integers, chunk: int) -> Integers:
        """Return the integers of `level` from those of `below`, in place if these are writeable."""
        place = self.index(level)[chunk]
        shift = None if place is None else level.lattice.shift_from(below.lattice)
        if shift is None:
            integers = level.lattice.project(below.lattice, integers, chunk * level.chunk)
            shift = 0
        if place is None:
            return integers
        if not integers.flags.writeable:
            # The cache shares this array with other readers.
            own = empty(integers.size, np.int32)
            own[...] = integers
            integers = own
        payload = self._payload(level.pack, level.offset + place[0], place[1])
        self.decoded_chunks += 1
        add_integers(payload, integers, shift)
        return integers

    def _patched(self, patch: memoryview | None, bits: Bits, out: Bits | None, *, is_float: bool) -> Bits:
        """Return `bits` with a patch applied, in place if it is writeable."""
        if patch is None:
            return bits
        if not bits.flags.writeable:
            own = empty(bits.size, bits.dtype) if out is None else out
            own[...] = bits
            bits = own
        self.decoded_chunks += 1
        apply_patch(patch, bits, is_float=is_float)
        return bits

    def _decoded(self, key: tuple[str, int], array: npt.NDArray[Any], *, keep: bool) -> npt.NDArray[Any]:
        """Make a decoded chunk read-only, and cache it if `keep`."""
        if keep:
            self.cache.put(key, array)
        else:
            array.flags.writeable = False
        return array

    def values(self, record: Record, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk's values, read-only."""
        if isinstance(record, Linear | Rounded):
            return record.lattice.values(self.integers(record, chunk, keep=keep), chunk * record.chunk, out)
        if isinstance(record, Codebook):
            return self._added(record, chunk) if record.additive else self._looked_up(record, chunk)
        return self.ordinals(record, chunk, keep=keep, out=out)

    def indices(self, record: Codebook, chunk: int) -> Indices:
        """Return the codebook indices (uint8) of one chunk, read-only."""
        if record.additive:
            return self._stored_indices(record, chunk)
        pending, _, indices = self._undecoded(self.chain(record), chunk)
        for level in pending:
            assert isinstance(level, Codebook)
            if indices is None:
                indices = self._stored_indices(level, chunk)
                continue
            lattice = level.lattice
            stored = self._stored_integers(level, chunk, np.dtype(np.int32), lattice.classes(indices))
            zeros = np.zeros(_chunk_size(level, chunk), np.int32)
            indices = lattice.apply(indices, zeros if stored is None else stored)
        assert indices is not None
        self.cache.put((record.id, chunk), indices)
        return indices

    def _stored_indices(self, record: Codebook, chunk: int) -> Indices:
        """Return the indices of a chunk that is stored in full, relative to the index of 0."""
        stored = self._stored_integers(record, chunk, np.dtype(np.int32), None)
        zero = record.lattice.zero
        if stored is None:
            return np.full(_chunk_size(record, chunk), zero, np.uint8)
        indices = stored + np.int32(zero)
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= record.lattice.levels:
            raise IntegrityError(f"Object {record.id} has indices outside its codebook; run `ckstore verify`.")
        return indices.astype(np.uint8)

    def _looked_up(self, record: Codebook, chunk: int) -> Bits:
        aside = None
        if record.lattice.protected:
            frame = self.aside(record, chunk)
            aside = np.frombuffer(frame, "<u2", offset=_FRAME)
            if crc32(aside) != int.from_bytes(frame[:_FRAME], "little"):
                raise IntegrityError(f"Chunk {chunk} of object {record.id} has damaged protected elements.")
        return record.lattice.values(self.indices(record, chunk), aside)

    def aside(self, record: Codebook, chunk: int) -> bytes:
        """Return the frame of one chunk's protected elements: checksum and bits."""
        offset = sum(record.aside[: 1 + chunk])
        return self.blocks.pread(record.pack, offset, record.aside[1 + chunk])

    def _added(self, record: Codebook, chunk: int) -> Bits:
        pending, _, bits = self._undecoded(self.chain(record), chunk)
        for level in pending:
            assert isinstance(level, Codebook)
            indices = self._stored_indices(level, chunk)
            bits = level.lattice.values(indices) if bits is None else level.lattice.add(bits, indices)
        assert bits is not None
        self.cache.put((record.id, chunk), bits)
        return bits

    def ordinals(self, record: Record, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of an exact object, read-only."""
        size = ITEM_SIZES[record.dtype]
        pending, _, bits = self._undecoded(self.chain(record), chunk)
        # Patches are applied in place: if only patches follow, the values are already in `out`.
        target = next((level for level in reversed(pending) if not isinstance(level, Patches)), None)
        for level in pending:
            if isinstance(level, Raw):
                bits = self._raw(level, chunk, out if level is target else None)
                continue
            if isinstance(level, Patches) and bits is not None:
                place = self.index(level)[chunk]
                patch = None if place is None else self._payload(level.pack, level.offset + place[0], place[1])
                bits = self._patched(patch, bits, out if target is None else None, is_float=level.dtype in FLOATS)
                continue
            in_context = isinstance(level, Delta) and level.context and bits is not None
            classes = ordinal_classes(bits, level.dtype) if in_context and bits is not None else None
            stored = self._stored_integers(level, chunk, np.dtype(f"i{size}"), classes)
            if stored is None:
                bits = np.zeros(_chunk_size(level, chunk), f"u{size}") if bits is None else bits
            else:
                bits = ordinal_correct(bits, stored, level.dtype, out if level is target else None)
        assert bits is not None
        return self._decoded((record.id, chunk), bits, keep=keep)

    def _raw(self, record: Raw, chunk: int, out: Bits | None) -> Bits:
        """Return the bits of one chunk of a raw object."""
        size = ITEM_SIZES[record.dtype]
        bits = empty(_chunk_size(record, chunk), f"u{size}") if out is None else out
        self.blocks.read_into(record.pack, record.offset + chunk * record.chunk * size, bits.data.cast("B"))
        if crc32(bits) != record.crcs[chunk]:
            raise _is_wrong(record.id, chunk)
        return bits

    @staticmethod
    def is_whole(record: Raw, pack: memoryview, workers: int) -> bool:
        """Return whether the chunks of a raw object match their checksums in its mapped pack."""
        size = ITEM_SIZES[record.dtype]

        def agrees(chunk: int) -> bool:
            start = record.offset + chunk * record.chunk * size
            return crc32(pack[start : start + _chunk_size(record, chunk) * size]) == record.crcs[chunk]

        return all(shared(agrees, range(len(record.crcs)), workers))

    def bits(self, identity: str, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of an object; of an exact one, other threads that want the same chunk wait."""
        if not self.resolver.record(identity).is_exact:
            return self._values(identity, chunk, keep=keep, out=out)
        cached = self.cache.get((identity, chunk))
        if cached is not None:
            return cached
        with self._decoding(identity, chunk):
            return self._values(identity, chunk, keep=keep, out=out)

    @_settled
    def _values(self, identity: str, chunk: int, *, keep: bool, out: Bits | None) -> Bits:
        return self.values(self.resolver.record(identity), chunk, keep=keep, out=out)

    @contextmanager
    def _decoding(self, identity: str, chunk: int) -> Iterator[None]:
        """Admit one thread for each chunk. Chains are decoded without it, so threads never wait in a cycle."""
        key = identity, chunk, forks.generation()  # After a fork, no thread of the parent would release its lock.
        with self._lock:
            lock, users = self._locks.get(key, (Lock(), 0))
            self._locks[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                _, users = self._locks[key]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = lock, users - 1

    @_settled
    def depth(self, record: Record) -> int:
        """Return the number of deltas in the chain that restoring the object takes."""
        return len(self.chain(record)) - 1

    def _stored_integers(
        self, record: Record, chunk: int, dtype: np.dtype[Any], classes: npt.NDArray[np.uint8] | None
    ) -> Integers | None:
        """Return the stored integers of one chunk; None if all are zero."""
        place = self.index(record)[chunk]
        if place is None:
            return None
        payload = self._payload(record.pack, record.offset + place[0], place[1])
        self.decoded_chunks += 1
        out = empty(_chunk_size(record, chunk), dtype)
        decode_integers(payload, out, classes)
        return out

    def _payload(self, pack: str, offset: int, length: int) -> memoryview:
        """Return bytes of a pack, in a buffer that this thread reuses for the next payload."""
        if not 0 <= length <= _PAYLOAD:
            return memoryview(self.blocks.pread(pack, offset, length))  # `pread` checks the length before it allocates.
        target = scratch("payload", length, np.uint8).data
        self.blocks.read_into(pack, offset, target)
        return target

    def entropies(self, record: Record) -> Iterator[tuple[float, int]]:
        """Yield the order-0 entropy in bits and the payload's bytes of each stored chunk of an object.

        Patches have none: they are not entropy-coded.
        """
        from ckstore.codecs.integers import entropy_bits

        if isinstance(record, Raw | Patches):
            return
        dtype = np.dtype(f"i{ITEM_SIZES[record.dtype]}" if record.is_exact else np.int32)
        for chunk, place in enumerate(self.index(record)):
            if place is None:
                continue
            context = None
            base = None if record.base is None else self.resolver.record(record.base)
            if isinstance(record, Codebook) and isinstance(base, Codebook) and not record.additive:
                context = record.lattice.classes(self.indices(base, chunk))
            if isinstance(record, Delta) and base is not None and record.context:
                context = ordinal_classes(self.ordinals(base, chunk), record.dtype)
            stored = self._stored_integers(record, chunk, dtype, context)
            assert stored is not None
            yield entropy_bits(stored, context), place[1]

    def index(self, record: Record) -> list[tuple[int, int] | None]:
        """Return (offset, length) in the record's shard for each chunk; None if all its integers are zero."""
        if isinstance(record, Patches):
            return self._patches(record)
        if record.chunks == 1:
            return [(0, record.length) if record.length else None]
        key = (record.pack, record.offset)
        index = self._indexes.get(key)
        if index is None:
            length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
            if length > record.length:
                raise IntegrityError(f"The shard of object {record.id} is too short for its index.")
            tail = self.blocks.pread(record.pack, record.offset + record.length - length, length)
            index = read_shard_index(tail, record.chunks, record.length)
            index = self._indexes.put(key, index)
        return index

    def _patches(self, record: Patches) -> list[tuple[int, int] | None]:
        key = (record.pack, record.offset)
        index = self._indexes.get(key)
        if index is None:
            ends = accumulate(record.sizes)
            places = [(end - size, size) if size else None for end, size in zip(ends, record.sizes, strict=True)]
            index = self._indexes.put(key, places)
        return index


def _is_wrong(identity: str, chunk: int) -> IntegrityError:
    return IntegrityError(f"Chunk {chunk} of object {identity} does not restore the stored values.")


def _chunk_size(record: Record, chunk: int) -> int:
    return min(record.chunk, record.count - chunk * record.chunk)


def concatenate(chunks: Iterable[Bits]) -> bytes:
    """Return the concatenated bytes of chunks."""
    return b"".join(chunk.tobytes() for chunk in chunks)
