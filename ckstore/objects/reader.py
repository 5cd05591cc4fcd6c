"""Reads objects: resolves their chains of integers and exact layers, and decodes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import accumulate
from threading import Lock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import CodebookLattice, Indices
from ckstore.codecs.integers import add_integers, decode_integers
from ckstore.codecs.lattice import (
    FLOATS,
    Bits,
    Integers,
    OrdinalLattice,
    ordinal_classes,
    ordinal_correct,
    ordinal_difference,
    scaled,
)
from ckstore.codecs.patches import apply_patch
from ckstore.codecs.short_floats import SHORT
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work, layer, patches
from ckstore.lineage.predictions import Predictions
from ckstore.objects.cache import ChunkCache
from ckstore.objects.records import ContentRecord, LatticeRecord, Record, check_cut
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

#: Bytes of the checksum before each chunk of an exact layer.
FRAME = 4

#: Payloads up to this many bytes are read into a reused buffer.
_PAYLOAD = 4 << 20

#: Records up to this many bytes are fetched from a remote store in one piece.
_SMALL = 1 << 20

#: Bytes of cached chunks for work that is done once.
_PASSING = 64 << 20

#: Decoded shard indexes and resolved chains in the caches.
_INDEXES = 1 << 13
_CHAINS = 1 << 13

#: Objects with predictions.
_PREDICTIONS = 1 << 14

P = ParamSpec("P")
T = TypeVar("T")
Level = TypeVar("Level", LatticeRecord, ContentRecord)


class Resolver(Protocol):
    """Finds records by id."""

    @property
    def generation(self) -> int:
        """A number that changes when records may have changed."""

    def settled(self, look: Callable[[], T]) -> T:
        """Return the result of `look`; repeat it if a concurrent change fails it."""

    def lattice(self, identity: str) -> LatticeRecord:
        """Return the record of a lattice id; raise `IntegrityError` if it is lost."""

    def content(self, identity: str) -> ContentRecord | None:
        """Return the record of a content id's exact layer; None for ordinal content."""

    def content_now(self, identity: str) -> ContentRecord | None:
        """Return the same, ignoring cached absences."""


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

    Attributes
    ----------
    predictions
    Predicted sizes of recently stored objects, by content id, for objects stored against them.
    """

    def __init__(self, resolver: Resolver, blocks: Blocks, cache_bytes: int = 64 << 20, *, keeps: bool = True) -> None:
        self.resolver = resolver
        self.blocks = blocks
        self.cache = ChunkCache(cache_bytes)
        self.keeps = keeps
        self.decoded_chunks = 0
        self.predictions: Lru[str, Predictions] = Lru(_PREDICTIONS)
        self._indexes: Lru[tuple[str, int], list[tuple[int, int] | None]] = Lru(_INDEXES)
        self._chains: Lru[str, tuple[int, list[LatticeRecord]]] = Lru(_CHAINS)
        self._content_chains: Lru[str, tuple[int, list[ContentRecord]]] = Lru(_CHAINS)
        self._locks: dict[tuple[str, int, int], tuple[Lock, int]] = {}
        self._lock = forks.Lock()

    def in_passing(self) -> ObjectReader:
        """Return a reader of the same objects with a small cache of its own, for work that is done once."""
        return ObjectReader(self.resolver, self.blocks, min(self.cache.limit, _PASSING), keeps=False)

    def chain(self, record: LatticeRecord) -> list[LatticeRecord]:
        """Return the records from `record` back to its base.

        Raises
        ------
        IntegrityError
            A record is lost, is its own ancestor, or has another kind or cut than the record above it.
        """
        return self._to_end(self._chains, record, self._base)

    def content_chain(self, record: ContentRecord) -> list[ContentRecord]:
        """Return the records from `record` back to the first exact layer of mode `own`.

        Raises
        ------
        IntegrityError
            A record is lost, is its own ancestor, or has another cut than the record above it.
        """
        return self._to_end(self._content_chains, record, self._parent)

    def _to_end(
        self,
        known: Lru[str, tuple[int, list[Level]]],
        record: Level,
        below: Callable[[Level], Level | None],
    ) -> list[Level]:
        """Return the records from `record` to the first without `below`; cache them in `known`."""
        generation = self.resolver.generation
        found = known.get(record.id)
        if found is not None and found[0] == generation and found[1][0] is record:
            return found[1]
        records = [record]
        seen = {record.id}
        while (before := below(records[-1])) is not None:
            if before.id in seen:
                raise IntegrityError(f"The chain of object {record.id} is a cycle; run `ckstore recover`.")
            seen.add(before.id)
            records.append(before)
        known.drop(record.id)
        known.put(record.id, (generation, records))
        return records

    def _base(self, record: LatticeRecord) -> LatticeRecord | None:
        if record.base is None:
            return None
        base = self.resolver.lattice(record.base)
        check_cut(base, record)
        if (base.kind, base.additive, base.width) != (record.kind, record.additive, record.width):
            raise IntegrityError(f"Object {record.id} cannot be a delta against {base.id}; run `ckstore recover`.")
        if record.patches and record.kind == "linear" and record.linear.shift_from(base.linear) != 0:
            raise IntegrityError(f"Object {record.id} cannot be a patch of {base.id}; run `ckstore recover`.")
        return base

    def _parent(self, record: ContentRecord) -> ContentRecord | None:
        lattice = self._lattice_of(record)
        if record.mode == "own":
            return None
        parent = self.resolver.content(record.parent or "")
        if parent is None:
            raise IntegrityError(f"Object {record.id} needs an exact layer that is lost; run `ckstore recover`.")
        check_cut(self._lattice_of(parent), lattice)
        return parent

    def _lattice_of(self, record: ContentRecord) -> LatticeRecord:
        """Return the record of the integers that an exact layer corrects; check that their chunks agree."""
        lattice = self.resolver.lattice(record.lattice)
        if lattice.kind != "linear" or lattice.dtype in SHORT or lattice.chunks != len(record.lengths):
            raise IntegrityError(
                f"The exact layer of object {record.id} does not fit its integers; run `ckstore verify`."
            )
        return lattice

    @_settled
    def exact_layer(self, lattice: str, content: str | None) -> ContentRecord | None:
        """Return the record of an object's exact layer; None if it has none or its lattice is exact.

        Raises
        ------
        IntegrityError
            The exact layer is lost.
        """
        record = None if content is None else self.resolver.content(content)
        if record is None and content not in (None, lattice) and (record := self.resolver.content_now(content)) is None:
            raise IntegrityError(f"The store has lost the exact layer of object {content}; run `ckstore recover`.")
        return None if record is not None and lattice == content and self._is_raw(lattice) else record

    def _is_raw(self, lattice: str) -> bool:
        """Return whether an object is still stored raw: one hot version has it raw, another one encoded."""
        with suppress(IntegrityError):
            return self.resolver.lattice(lattice).is_raw
        return False

    @_settled
    def records(self, lattice: str, content: str | None) -> list[Record]:
        """Return all records that restore an object; raise `IntegrityError` if one is lost."""
        record = self.exact_layer(lattice, content)
        if record is None:
            return list(self.chain(self.resolver.lattice(lattice)))
        levels = self.content_chain(record)
        return [*levels, *(below for level in levels for below in self.chain(self._lattice_of(level)))]

    @_settled
    def decoded(self, lattice: str, content: str | None) -> list[Record]:
        """Return the records that a restore decodes, each once: patches need no integers."""
        record = self.exact_layer(lattice, content)
        if record is None:
            return list(self.chain(self.resolver.lattice(lattice)))
        levels = self.content_chain(record)
        found: dict[int, Record] = {id(level): level for level in levels}
        for level in levels:
            if level.mode != "patched":
                found |= {id(below): below for below in self.chain(self._lattice_of(level))}
        return list(found.values())

    def index_ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the place of a record's index, as (offset, length), if `ranges` needs it for these chunks."""
        if chunks is None or isinstance(record, ContentRecord) or not self._is_picked(record) or record.patches:
            return []
        length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
        return [(record.offset + max(record.length - length, 0), min(length, record.length))]

    def ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Return the places of some chunks of a record (None: all) in its pack, as (offset, length).

        A small record is one range.
        """
        if chunks is not None and isinstance(record, ContentRecord):
            before = list(accumulate(record.lengths, initial=0))
            return [(record.offset + before[chunk], record.lengths[chunk]) for chunk in chunks]
        if chunks is None or isinstance(record, ContentRecord) or not self._is_picked(record):
            return [(record.start, record.end - record.start)]
        places = [self.index(record)[chunk] for chunk in chunks]
        return [(record.offset + place[0], place[1]) for place in places if place is not None]

    @staticmethod
    def _is_picked(record: LatticeRecord) -> bool:
        """Return whether single chunks of a record are fetched by its index."""
        return record.end - record.start > _SMALL and record.chunks > 1 and not record.is_raw and not record.protected

    def _undecoded(self, chain: Sequence[Level], chunk: int) -> tuple[list[Level], Level | None, Bits | None]:
        """Return the levels of a chain to decode, lowest first, and the cached level below them with its chunk."""
        for place, level in enumerate(chain):
            cached = self.cache.get((level.id, chunk))
            if cached is not None:
                return list(reversed(chain[:place])), level, cached
        return list(reversed(chain)), None, None

    def lattice_work(self, record: LatticeRecord) -> Work:
        """Return work of decoding all integers of `record` along its chain."""
        work = Work()
        for level in self.chain(record):
            if level.is_raw:
                return Work(records=1)
            if level.patches:
                work = work.plus(patches(sum(map(bool, level.patches)), level.nbytes))
                continue
            is_delta = level.base is not None
            work = work.plus(layer(level.chunks, level.count, level.nbytes, grouped=level.context, delta=is_delta))
        return work

    def content_work(self, record: ContentRecord) -> Work:
        """Return the work of decoding all exact values of `record`, with their integers."""
        work = Work()
        for level in self.content_chain(record):
            if level.mode == "patched":
                work = work.plus(patches(sum(map(bool, level.lengths)), sum(level.lengths)))
                continue
            lattice = self.resolver.lattice(level.lattice)
            exact = layer(lattice.chunks, lattice.count, sum(level.lengths), grouped=True)
            work = work.plus(exact).plus(self.lattice_work(lattice))
        return work

    # Decoded chunks are cached unless `keep` is false, as for a sequential read. Values are decoded into `out` if
    # given, unless they are cached or another buffer already holds them: callers use the returned array.

    def integers(self, record: LatticeRecord, chunk: int, *, keep: bool = True) -> Integers:
        """Return the integers (int32) of one chunk of a non-ordinal object, read-only."""
        pending, below, integers = self._undecoded(self.chain(record), chunk)
        for level in pending:
            if below is None or integers is None:
                integers = self._stored_integers(level, chunk, np.dtype(np.int32), None)
                if integers is None:
                    integers = np.zeros(_chunk_size(level, chunk), np.int32)
            else:
                integers = self._moved(level, below, integers, chunk)
            below = level
        assert integers is not None
        return self._decoded((record.id, chunk), integers, keep=keep)

    def _moved(self, level: LatticeRecord, below: LatticeRecord, integers: Integers, chunk: int) -> Integers:
        """Return the integers of `level` from those of `below`, in place if these are writeable."""
        place = self.index(level)[chunk]
        if level.patches:
            payload = None if place is None else self._payload(level.pack, level.offset + place[0], place[1])
            return self._patched(payload, integers, None, is_float=False)
        shift = None if place is None else level.linear.shift_from(below.linear)
        if shift is None:
            integers = level.linear.project(below.linear, integers, chunk * level.chunk)
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

    def values(self, record: LatticeRecord, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk's lattice values, without an exact layer."""
        lattice = record.lattice
        if isinstance(lattice, OrdinalLattice):
            return self.ordinals(record, chunk, keep=keep, out=out)
        if isinstance(lattice, CodebookLattice):
            return self._added(record, chunk) if record.additive else self._looked_up(record, chunk)
        return lattice.values(self.integers(record, chunk, keep=keep), chunk * record.chunk, out)

    def indices(self, record: LatticeRecord, chunk: int) -> Indices:
        """Return the codebook indices (uint8) of one chunk, read-only."""
        if record.additive:
            return self._stored_indices(record, chunk)
        pending, _, indices = self._undecoded(self.chain(record), chunk)
        for level in pending:
            if indices is None:
                indices = self._stored_indices(level, chunk)
                continue
            lattice = level.codebook
            stored = self._stored_integers(level, chunk, np.dtype(np.int32), lattice.classes(indices))
            zeros = np.zeros(_chunk_size(level, chunk), np.int32)
            indices = lattice.apply(indices, zeros if stored is None else stored)
        assert indices is not None
        self.cache.put((record.id, chunk), indices)
        return indices

    def _stored_indices(self, record: LatticeRecord, chunk: int) -> Indices:
        """Return the indices of a chunk that is stored in full, relative to the index of 0."""
        stored = self._stored_integers(record, chunk, np.dtype(np.int32), None)
        zero = record.codebook.zero
        if stored is None:
            return np.full(_chunk_size(record, chunk), zero, np.uint8)
        indices = stored + np.int32(zero)
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= record.codebook.levels:
            raise IntegrityError(f"Object {record.id} has indices outside its codebook; run `ckstore verify`.")
        return indices.astype(np.uint8)

    def _looked_up(self, record: LatticeRecord, chunk: int) -> Bits:
        aside = None
        if record.protected:
            frame = self.aside(record, chunk)
            aside = np.frombuffer(frame, "<u2", offset=FRAME)
            if crc32(aside) != int.from_bytes(frame[:FRAME], "little"):
                raise IntegrityError(f"Chunk {chunk} of object {record.id} has damaged protected elements.")
        return record.codebook.values(self.indices(record, chunk), aside)

    def aside(self, record: LatticeRecord, chunk: int) -> bytes:
        """Return the frame of one chunk's protected elements: checksum and bits."""
        offset = sum(record.aside[: 1 + chunk])
        return self.blocks.pread(record.pack, offset, record.aside[1 + chunk])

    def _added(self, record: LatticeRecord, chunk: int) -> Bits:
        pending, _, bits = self._undecoded(self.chain(record), chunk)
        for level in pending:
            indices = self._stored_indices(level, chunk)
            bits = level.codebook.values(indices) if bits is None else level.codebook.add(bits, indices)
        assert bits is not None
        self.cache.put((record.id, chunk), bits)
        return bits

    def ordinals(self, record: LatticeRecord, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of an object on an ordinal lattice, read-only."""
        size = ITEM_SIZES[record.dtype]
        pending, _, bits = self._undecoded(self.chain(record), chunk)
        # Patches are applied in place: if only patches follow, the values are already in `out`.
        target = next((level for level in reversed(pending) if not level.patches), None)
        for level in pending:
            if level.is_raw:
                bits = self._raw(level, chunk, out if level is target else None)
                continue
            if level.patches and bits is not None:
                place = self.index(level)[chunk]
                patch = None if place is None else self._payload(level.pack, level.offset + place[0], place[1])
                bits = self._patched(patch, bits, out if target is None else None, is_float=level.dtype in FLOATS)
                continue
            if bits is not None:
                bits = scaled(bits, level.dtype, level.factor)
            classes = ordinal_classes(bits, level.dtype) if level.context and bits is not None else None
            stored = self._stored_integers(level, chunk, np.dtype(f"i{size}"), classes)
            if stored is None:
                bits = np.zeros(_chunk_size(level, chunk), f"u{size}") if bits is None else bits
            else:
                bits = ordinal_correct(bits, stored, level.dtype, out if level is target else None)
        assert bits is not None
        return self._decoded((record.id, chunk), bits, keep=keep)

    def _raw(self, record: LatticeRecord, chunk: int, out: Bits | None) -> Bits:
        """Return the bits of one chunk of a raw object."""
        size = ITEM_SIZES[record.dtype]
        bits = empty(_chunk_size(record, chunk), f"u{size}") if out is None else out
        self.blocks.read_into(record.pack, record.offset + chunk * record.chunk * size, bits.data.cast("B"))
        if crc32(bits) != record.crcs[chunk]:
            raise _is_wrong(record.id, chunk)
        return bits

    @staticmethod
    def is_whole(record: LatticeRecord, pack: memoryview, workers: int) -> bool:
        """Return whether the chunks of a raw object match their checksums in its mapped pack."""
        size = ITEM_SIZES[record.dtype]

        def agrees(chunk: int) -> bool:
            start = record.offset + chunk * record.chunk * size
            return crc32(pack[start : start + _chunk_size(record, chunk) * size]) == record.crcs[chunk]

        return all(shared(agrees, range(len(record.crcs)), workers))

    def exact(self, record: ContentRecord, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk's original values, for an object on a linear lattice; read-only."""
        pending, _, bits = self._undecoded(self.content_chain(record), chunk)
        whole = [level for level in pending if level.mode != "patched"]
        check = None
        for level in pending:
            if level.mode != "patched" or bits is None:
                # The next level is stored against the integers of this one.
                target = out if level is whole[-1] else None
                lattice = self.resolver.lattice(level.lattice)
                bits = self._exact_level(level, lattice, bits, chunk, keep=keep or len(whole) > 1, out=target)
                check = None
            elif level.lengths[chunk]:
                frame = self._frame(level, chunk)
                check = int.from_bytes(frame[:FRAME], "little")
                bits = self._patched(frame[FRAME:], bits, None if whole else out, is_float=True)
        assert bits is not None
        if check is not None and crc32(bits) != check:
            raise _is_wrong(record.id, chunk)
        return self._decoded((record.id, chunk), bits, keep=keep)

    def bits(self, content: str, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk by content id; other threads that want the same chunk wait."""
        cached = self.cache.get((content, chunk))
        if cached is not None:
            return cached
        with self._decoding(content, chunk):
            return self._bits(content, chunk, keep=keep, out=out)

    @_settled
    def _bits(self, content: str, chunk: int, *, keep: bool, out: Bits | None) -> Bits:
        record = self.resolver.content(content)
        if record is None:
            return self.ordinals(self.resolver.lattice(content), chunk, keep=keep, out=out)
        return self.exact(record, chunk, keep=keep, out=out)

    @contextmanager
    def _decoding(self, content: str, chunk: int) -> Iterator[None]:
        """Admit one thread for each chunk. Chains are decoded without it, so threads never wait in a cycle."""
        key = content, chunk, forks.generation()  # After a fork, no thread of the parent would release its lock.
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
    def record_of(self, content: str) -> LatticeRecord:
        """Return the lattice record of a content id."""
        record = self.resolver.content(content)
        return self.resolver.lattice(content if record is None else record.lattice)

    @_settled
    def work(self, lattice: str, content: str | None) -> Work:
        """Return the work of decoding all values of an object: the exact ones if it has a content id."""
        record = self.exact_layer(lattice, content)
        return self.lattice_work(self.resolver.lattice(lattice)) if record is None else self.content_work(record)

    @_settled
    def depth(self, lattice: str, content: str | None) -> int:
        """Return the number of deltas in the longest chain that restoring the object takes."""
        record = self.exact_layer(lattice, content)
        if record is None:
            return len(self.chain(self.resolver.lattice(lattice))) - 1
        levels = self.content_chain(record)
        deepest = max(len(self.chain(self.resolver.lattice(level.lattice))) - 1 for level in levels)
        return max(deepest, len(levels) - 1)

    def _exact_level(
        self,
        level: ContentRecord,
        lattice: LatticeRecord,
        parent: Bits | None,
        chunk: int,
        *,
        keep: bool,
        out: Bits | None,
    ) -> Bits:
        integers = self.integers(lattice, chunk, keep=keep)
        predicted, classes = self._predict(level, lattice, integers, parent, chunk)
        frame = self._frame(level, chunk)
        self.decoded_chunks += 1
        residuals = empty(integers.size, f"i{predicted.itemsize}")
        decode_integers(frame[FRAME:], residuals, classes)
        bits = ordinal_correct(predicted, residuals, lattice.dtype, out)
        if crc32(bits) != int.from_bytes(frame[:FRAME], "little"):
            raise _is_wrong(level.id, chunk)
        return bits

    def _frame(self, level: ContentRecord, chunk: int) -> memoryview:
        """Return one chunk of an exact layer: checksum and payload."""
        return self._payload(level.pack, level.offset + sum(level.lengths[:chunk]), level.lengths[chunk])

    @staticmethod
    def _predict(
        record: ContentRecord, lattice: LatticeRecord, integers: Integers, parent: Bits | None, chunk: int
    ) -> tuple[Bits, npt.NDArray[np.uint8]]:
        start = chunk * lattice.chunk
        if record.mode == "own" or parent is None:
            return lattice.linear.own(integers, start)
        return lattice.linear.chained(scaled(parent, lattice.dtype, record.factor), integers, start)

    def _stored_integers(
        self, record: LatticeRecord, chunk: int, dtype: np.dtype[Any], classes: npt.NDArray[np.uint8] | None
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
        """Yield the order-0 entropy in bits and the payload's bytes of each stored chunk of a layer.

        Patches have none: they are not entropy-coded.
        """
        from ckstore.codecs.integers import entropy_bits

        if isinstance(record, ContentRecord):
            if record.mode == "patched":
                return
            lattice = self.resolver.lattice(record.lattice)
            for chunk, length in enumerate(record.lengths):
                parent = None if record.parent is None else self.bits(record.parent, chunk)
                integers = self.integers(lattice, chunk)
                predicted, classes = self._predict(record, lattice, integers, parent, chunk)
                residuals = ordinal_difference(self.exact(record, chunk), predicted, lattice.dtype)
                yield entropy_bits(residuals, classes), length - FRAME
            return
        if record.is_raw or record.patches:
            return
        dtype = np.dtype(f"i{ITEM_SIZES[record.dtype]}" if record.is_exact else np.int32)
        for chunk, place in enumerate(self.index(record)):
            if place is None:
                continue
            context = None
            if record.kind == "codebook" and not record.additive and record.base is not None:
                context = record.codebook.classes(self.indices(self.resolver.lattice(record.base), chunk))
            if record.context and record.base is not None:
                before = self.ordinals(self.resolver.lattice(record.base), chunk)
                context = ordinal_classes(scaled(before, record.dtype, record.factor), record.dtype)
            stored = self._stored_integers(record, chunk, dtype, context)
            assert stored is not None
            yield entropy_bits(stored, context), place[1]

    def index(self, record: LatticeRecord) -> list[tuple[int, int] | None]:
        """Return (offset, length) in the record's shard for each chunk; None if all its integers are zero."""
        if record.patches:
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
            index = read_shard_index(tail, record.chunks)
            for place in index:
                if place is not None and not 0 <= place[0] <= place[0] + place[1] <= record.length:
                    raise IntegrityError(f"The shard index of object {record.id} points outside of it.")
            index = self._indexes.put(key, index)
        return index

    def _patches(self, record: LatticeRecord) -> list[tuple[int, int] | None]:
        key = (record.pack, record.offset)
        index = self._indexes.get(key)
        if index is None:
            ends = accumulate(record.patches)
            places = [(end - size, size) if size else None for end, size in zip(ends, record.patches, strict=True)]
            index = self._indexes.put(key, places)
        return index


def _is_wrong(identity: str, chunk: int) -> IntegrityError:
    return IntegrityError(f"Chunk {chunk} of object {identity} does not restore the stored values.")


def _chunk_size(record: LatticeRecord, chunk: int) -> int:
    return min(record.chunk, record.count - chunk * record.chunk)


def concatenate(chunks: Iterable[Bits]) -> bytes:
    """Return the concatenated bytes of chunks."""
    return b"".join(chunk.tobytes() for chunk in chunks)
