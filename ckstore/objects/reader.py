"""Reads objects: resolves chains of integers and of exact layers, once an object, and decodes them chunk by chunk."""

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

#: Bytes of a shard index: 16 a chunk, and a checksum.
_INDEX_ENTRY = 16
_INDEX_CHECKSUM = 4

#: Bytes of the checksum before each chunk of an exact layer.
FRAME = 4

#: Payloads of up to so many bytes are read into memory that is used again.
_PAYLOAD = 4 << 20

#: Records of up to so many bytes are fetched from a remote store whole, whatever is wanted of them.
_SMALL = 1 << 20

#: Bytes of chunks of what is done once.
_PASSING = 64 << 20

#: Shard indexes that stay decoded, and chains that stay resolved.
_INDEXES = 1 << 13
_CHAINS = 1 << 13

#: Objects with predictions.
_PREDICTIONS = 1 << 14

P = ParamSpec("P")
T = TypeVar("T")
Level = TypeVar("Level", LatticeRecord, ContentRecord)


class Resolver(Protocol):
    """Where records are found by id."""

    @property
    def generation(self) -> int:
        """Another number after records may have changed."""

    def settled(self, look: Callable[[], T]) -> T:
        """Return the result of `look`, which a change by another process does not fail."""

    def lattice(self, identity: str) -> LatticeRecord:
        """The record of a lattice id; `IntegrityError` where the store has lost it."""

    def content(self, identity: str) -> ContentRecord | None:
        """The record of a content id's exact layer; None where the content is an ordinal lattice."""

    def content_now(self, identity: str) -> ContentRecord | None:
        """The same, without what is remembered of ids that had none."""


class Blocks(Protocol):
    """Random access to the bytes of packs by name.

    Attributes
    ----------
    is_remote
        Whether they come over a link.
    """

    is_remote: bool

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of a pack."""

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a pack from `offset` on."""


def _settled(method: Callable[Concatenate[ObjectReader, P], T]) -> Callable[Concatenate[ObjectReader, P], T]:
    """Repeat a look by ids that a change by another process has failed; see `Resolver.settled`."""

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
        Finds bytes.
    cache_bytes
        Limit of the cache of decoded chunks.
    keeps
        Whether a version that is stored against these objects leaves its own chunks here, for the one that follows.

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
        """A reader of the same objects whose chunks go with it and take little memory: for what is done once."""
        return ObjectReader(self.resolver, self.blocks, min(self.cache.limit, _PASSING), keeps=False)

    def chain(self, record: LatticeRecord) -> list[LatticeRecord]:
        """The records from `record` back to its base.

        Raises
        ------
        IntegrityError
            One of them is lost, is its own ancestor, or is not of the kind and cut of those above it.
        """
        return self._to_end(self._chains, record, self._base)

    def content_chain(self, record: ContentRecord) -> list[ContentRecord]:
        """The records from `record` back to the first own exact layer.

        Raises
        ------
        IntegrityError
            One of them is lost, is its own ancestor, or is not cut like those above it.
        """
        return self._to_end(self._content_chains, record, self._parent)

    def _to_end(
        self,
        known: Lru[str, tuple[int, list[Level]]],
        record: Level,
        below: Callable[[Level], Level | None],
    ) -> list[Level]:
        """The records from `record` back to the one that has none `below`, which are kept in `known`."""
        generation = self.resolver.generation
        found = known.get(record.id)
        if found is not None and found[0] == generation and found[1][0] is record:
            return found[1]
        records = [record]
        seen = {record.id}
        while (before := below(records[-1])) is not None:
            if before.id in seen:
                raise IntegrityError(f"The chain of object {record.id} runs in a circle; run `ckstore recover`.")
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
            raise IntegrityError(f"Object {record.id} cannot follow {base.id}; run `ckstore recover`.")
        if record.patches and record.kind == "linear" and record.linear.shift_from(base.linear) != 0:
            raise IntegrityError(f"Object {record.id} cannot be a patch of {base.id}; run `ckstore recover`.")
        return base

    def _parent(self, record: ContentRecord) -> ContentRecord | None:
        lattice = self._lattice_of(record)
        if record.mode == "own":
            return None
        parent = self.resolver.content(record.parent or "")
        if parent is None:
            raise IntegrityError(f"Object {record.id} follows an exact layer that is lost; run `ckstore recover`.")
        check_cut(self._lattice_of(parent), lattice)
        return parent

    def _lattice_of(self, record: ContentRecord) -> LatticeRecord:
        """The record of the integers that an exact layer corrects, which must be of as many chunks."""
        lattice = self.resolver.lattice(record.lattice)
        if lattice.kind != "linear" or lattice.dtype in SHORT or lattice.chunks != len(record.lengths):
            raise IntegrityError(
                f"The exact layer of object {record.id} does not fit its integers; run `ckstore verify`."
            )
        return lattice

    @_settled
    def exact_layer(self, lattice: str, content: str | None) -> ContentRecord | None:
        """The record of an object's exact layer; None where it has none or its lattice is exact by itself.

        Raises
        ------
        IntegrityError
            It was lost.
        """
        record = None if content is None else self.resolver.content(content)
        if record is None and content not in (None, lattice) and (record := self.resolver.content_now(content)) is None:
            raise IntegrityError(f"The store has lost the exact layer of object {content}; run `ckstore recover`.")
        return None if record is not None and lattice == content and self._is_raw(lattice) else record

    def _is_raw(self, lattice: str) -> bool:
        """Whether an object still lies there as it was read: a hot version has it, and another one has it encoded."""
        with suppress(IntegrityError):
            return self.resolver.lattice(lattice).is_raw
        return False

    @_settled
    def records(self, lattice: str, content: str | None) -> list[Record]:
        """All records that restoring an object takes; `IntegrityError` where one is lost."""
        record = self.exact_layer(lattice, content)
        if record is None:
            return list(self.chain(self.resolver.lattice(lattice)))
        levels = self.content_chain(record)
        return [*levels, *(below for level in levels for below in self.chain(self._lattice_of(level)))]

    @_settled
    def decoded(self, lattice: str, content: str | None) -> list[Record]:
        """Those of them that are decoded, each once: patches are applied to values whose integers nobody needs."""
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
        """Where in its pack the index of a record lies, as (offset, length), if `ranges` of some chunks read that."""
        if chunks is None or isinstance(record, ContentRecord) or not self._is_picked(record) or record.patches:
            return []
        length = _INDEX_ENTRY * record.chunks + _INDEX_CHECKSUM
        return [(record.offset + max(record.length - length, 0), min(length, record.length))]

    def ranges(self, record: Record, chunks: Collection[int] | None) -> list[tuple[int, int]]:
        """Where in its pack lies what some chunks of a record take, or all with None, as (offset, length).

        Of a small record that is all of it.
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
        """Whether single chunks of a record are worth a look into its index."""
        return record.end - record.start > _SMALL and record.chunks > 1 and not record.is_raw and not record.protected

    def _undecoded(self, chain: Sequence[Level], chunk: int) -> tuple[list[Level], Level | None, Bits | None]:
        """The levels of a chain that must be decoded, lowest first; the one below them and its chunk where cached."""
        for place, level in enumerate(chain):
            cached = self.cache.get((level.id, chunk))
            if cached is not None:
                return list(reversed(chain[:place])), level, cached
        return list(reversed(chain)), None, None

    def lattice_work(self, record: LatticeRecord) -> Work:
        """Work of decoding all integers of `record` along its chain."""
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
        """Work of decoding all exact values of `record`, and of the chains of integers that these take."""
        work = Work()
        for level in self.content_chain(record):
            if level.mode == "patched":
                work = work.plus(patches(sum(map(bool, level.lengths)), sum(level.lengths)))
                continue
            lattice = self.resolver.lattice(level.lattice)
            exact = layer(lattice.chunks, lattice.count, sum(level.lengths), grouped=True)
            work = work.plus(exact).plus(self.lattice_work(lattice))
        return work

    # What is decoded stays in the cache unless `keep` is false, as for whatever is read once from end to end. Values
    # are decoded into `out` if given, unless they are at hand or lie elsewhere on the way: the result tells.

    def integers(self, record: LatticeRecord, chunk: int, *, keep: bool = True) -> Integers:
        """Integers (int32) of one chunk of an object that is not ordinal; the array is read-only."""
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
        """The integers of `level`, from those of `below`, which are changed where they may be."""
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
            # It is in the cache, and others read it.
            own = empty(integers.size, np.int32)
            own[...] = integers
            integers = own
        payload = self._payload(level.pack, level.offset + place[0], place[1])
        self.decoded_chunks += 1
        add_integers(payload, integers, shift)
        return integers

    def _patched(self, patch: memoryview | None, bits: Bits, out: Bits | None, *, is_float: bool) -> Bits:
        """A chunk that is as another one but for a patch, which is changed unless others may read it."""
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
        """A chunk that was decoded, read-only from here on."""
        if keep:
            self.cache.put(key, array)
        else:
            array.flags.writeable = False
        return array

    def values(self, record: LatticeRecord, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Bits of the values that one chunk of an object has on its lattice, without any exact layer."""
        lattice = record.lattice
        if isinstance(lattice, OrdinalLattice):
            return self.ordinals(record, chunk, keep=keep, out=out)
        if isinstance(lattice, CodebookLattice):
            return self._added(record, chunk) if record.additive else self._looked_up(record, chunk)
        return lattice.values(self.integers(record, chunk, keep=keep), chunk * record.chunk, out)

    def indices(self, record: LatticeRecord, chunk: int) -> Indices:
        """Indices (uint8) of one chunk of an object on a codebook; the array is read-only."""
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
        """Indices that are stored in full: relative to that of 0."""
        stored = self._stored_integers(record, chunk, np.dtype(np.int32), None)
        zero = record.codebook.zero
        if stored is None:
            return np.full(_chunk_size(record, chunk), zero, np.uint8)
        indices = stored + np.int32(zero)
        if indices.min(initial=0) < 0 or indices.max(initial=0) >= record.codebook.levels:
            raise IntegrityError(f"Object {record.id} has indices outside of its codebook; run `ckstore verify`.")
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
        """The frame of one chunk's protected elements: checksum and bits."""
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
        """Bits of one chunk of an object on an ordinal lattice; the array is read-only."""
        size = ITEM_SIZES[record.dtype]
        pending, _, bits = self._undecoded(self.chain(record), chunk)
        # What is patched is so in place: where only patches follow, values are at their place already.
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
        """Bits of one chunk of an object that is stored raw."""
        size = ITEM_SIZES[record.dtype]
        bits = empty(_chunk_size(record, chunk), f"u{size}") if out is None else out
        self.blocks.read_into(record.pack, record.offset + chunk * record.chunk * size, bits.data.cast("B"))
        if crc32(bits) != record.crcs[chunk]:
            raise _is_wrong(record.id, chunk)
        return bits

    @staticmethod
    def is_whole(record: LatticeRecord, pack: memoryview, workers: int) -> bool:
        """Whether the chunks of an object that is stored raw have their checksums, in the bytes of its mapped pack."""
        size = ITEM_SIZES[record.dtype]

        def agrees(chunk: int) -> bool:
            start = record.offset + chunk * record.chunk * size
            return crc32(pack[start : start + _chunk_size(record, chunk) * size]) == record.crcs[chunk]

        return all(shared(agrees, range(len(record.crcs)), workers))

    def exact(self, record: ContentRecord, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Bits of one chunk of the original values of an object on a linear lattice; the array is read-only."""
        pending, _, bits = self._undecoded(self.content_chain(record), chunk)
        whole = [level for level in pending if level.mode != "patched"]
        check = None
        for level in pending:
            if level.mode != "patched" or bits is None:
                # The integers of one level are those that the next ones are stored against.
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
        """Bits of one chunk of an object by its content id; threads that want the same chunk wait for the first."""
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
        """Held by one thread a chunk; chains are decoded inside without it, so that nobody waits in a circle."""
        key = content, chunk, forks.generation()  # Nothing ends a thread's turn in a child that has not the thread.
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
        """The lattice record of an object by its content id."""
        record = self.resolver.content(content)
        return self.resolver.lattice(content if record is None else record.lattice)

    @_settled
    def work(self, lattice: str, content: str | None) -> Work:
        """Work of decoding all values of an object: the exact ones where it has a content id."""
        record = self.exact_layer(lattice, content)
        return self.lattice_work(self.resolver.lattice(lattice)) if record is None else self.content_work(record)

    @_settled
    def depth(self, lattice: str, content: str | None) -> int:
        """The largest number of deltas on the way to a base that restoring the object takes."""
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
        """One chunk of an exact layer: the checksum of its bits, and a payload."""
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
        """Integers of one chunk as they are stored; None where all are zero."""
        place = self.index(record)[chunk]
        if place is None:
            return None
        payload = self._payload(record.pack, record.offset + place[0], place[1])
        self.decoded_chunks += 1
        out = empty(_chunk_size(record, chunk), dtype)
        decode_integers(payload, out, classes)
        return out

    def _payload(self, pack: str, offset: int, length: int) -> memoryview:
        """Bytes of a pack, in memory that this thread uses again for the next ones."""
        if not 0 <= length <= _PAYLOAD:
            return memoryview(self.blocks.pread(pack, offset, length))  # which sees what cannot be before it is made
        target = scratch("payload", length, np.uint8).data
        self.blocks.read_into(pack, offset, target)
        return target

    def entropies(self, record: Record) -> Iterator[tuple[float, int]]:
        """For each stored chunk of a layer the order-0 entropy of what is coded, in bits, and the payload's bytes.

        Patches are none: their numbers are not entropy-coded.
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
        """For each chunk (offset, length) in the record's shard, or None where all integers are zero."""
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
    return IntegrityError(f"Chunk {chunk} of object {identity} does not restore what was stored.")


def _chunk_size(record: LatticeRecord, chunk: int) -> int:
    return min(record.chunk, record.count - chunk * record.chunk)


def concatenate(chunks: Iterable[Bits]) -> bytes:
    """The bytes of chunks one after the other."""
    return b"".join(chunk.tobytes() for chunk in chunks)
