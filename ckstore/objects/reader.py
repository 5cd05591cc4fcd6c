"""Decodes objects, chunk by chunk along their chains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import Numbers
from ckstore.codecs.integers import add_integers, decode_integers
from ckstore.codecs.lattice import (
    CHUNK,
    FLOATS,
    Bits,
    Integers,
    is_mirrored,
    ordinal_classes,
    ordinal_correct,
)
from ckstore.codecs.patches import apply_patch
from ckstore.codecs.short_floats import narrowed
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.objects.chains import Chains, Resolver
from ckstore.objects.records import CAST_CHECKSUM, Cast, Codebook, Delta, Factors, Linear, Patches, Raw, Record, Rounded
from ckstore.objects.stored_chunks import Blocks, StoredChunks
from ckstore.objects.units import Unit
from ckstore.runtime import forks
from ckstore.runtime.blocks import Block, empty
from ckstore.runtime.checksum import crc32
from ckstore.runtime.lru import Lru

#: A way of `Chains.between`.
Way = tuple[Sequence[Patches], Sequence[Record]]


class ChunkCache(Lru[tuple[str, int], npt.NDArray[Any]]):
    """Decoded chunks by (id, index). Beyond `limit` bytes the least recently used are evicted. Safe for threads.

    An array that would keep a much larger buffer alive is copied first, unless the rest of the buffer is cached, too.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit, _parts)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self.weight

    @property
    def identities(self) -> set[str]:
        """Ids of the objects with cached chunks."""
        return {identity for identity, _ in self}

    def keep(self, key: tuple[str, int], array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Cache an array and make it read-only; return the cached one."""
        array.flags.writeable = False
        if array.nbytes > self.limit:
            return array
        if _held(array) >= 2 * array.nbytes:
            array = _copy(array)
        return self.put(key, array, _weight(array))

    def keep_part(self, key: tuple[str, int], array: npt.NDArray[Any]) -> None:
        """Cache a chunk of an object whose chunks are all cached, in the memory that they share; make it read-only.

        A chunk in memory that the caller may write to is copied.
        """
        owner = _owner(array)
        if not isinstance(owner, Block) or owner.nbytes > self.limit:
            array = _copy(array)
        array.flags.writeable = False
        self.put(key, array, _weight(array))


def _copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    own = empty(array.size, array.dtype)
    own[...] = array
    own.flags.writeable = False
    return own


def _weight(array: npt.NDArray[Any]) -> int:
    """Return the bytes that a cached array counts: of a part of an object its own."""
    held = _held(array)
    return held if held < 2 * array.nbytes else array.nbytes


def _parts(key: tuple[str, int], array: npt.NDArray[Any]) -> Iterator[tuple[str, int]]:
    """Yield the keys of all chunks that may share memory with one: a single chunk would keep all of it."""
    held = _held(array)
    if held >= 2 * array.nbytes:
        least = max(array.nbytes, CHUNK // 2 * array.itemsize)  # The last chunk may have fewer bytes.
        yield from ((key[0], chunk) for chunk in range(-(-held // least)))


def _held(array: npt.NDArray[Any]) -> int:
    """Return the bytes of memory that `array` keeps alive."""
    owner = _owner(array)
    return owner.nbytes if isinstance(owner, Block) else memoryview(owner).nbytes


def _owner(array: npt.NDArray[Any]) -> Any:
    owner: Any = array
    while not isinstance(owner, Block):
        below = owner.base if isinstance(owner, np.ndarray) else owner.obj if isinstance(owner, memoryview) else None
        if below is None:
            break
        owner = below
    return owner


#: Bytes of cached chunks for work that is done once.
_PASSING = 64 << 20

#: Bytes of cached samples of exact objects.
_SAMPLES = 48 << 20


class ObjectReader:
    """Decodes chunks of objects.

    Parameters
    ----------
    cache_bytes
        Limit of the cache of decoded chunks.
    keeps
        Whether the chunks of a version that is being stored stay cached for its successor.

    Attributes
    ----------
    decoded_chunks
        The number of payloads decoded so far.
    samples
        The elements of exact objects, by (id, chunk), from which the encoder estimates sizes: the chunks of older
        objects need not be decoded for them.
    """

    def __init__(self, resolver: Resolver, blocks: Blocks, cache_bytes: int = 64 << 20, *, keeps: bool = True) -> None:
        self.resolver = resolver
        self.blocks = blocks
        self.cache = ChunkCache(cache_bytes)
        self.samples = ChunkCache(min(cache_bytes, _SAMPLES))
        self._cache_bytes = cache_bytes
        self.keeps = keeps
        self.decoded_chunks = 0
        self.chains = Chains(resolver)
        self.stored = StoredChunks(blocks)
        self._locks: dict[tuple[str, int, int], tuple[Lock, int]] = {}
        self._lock = forks.Lock()

    def limit_caches(self, nbytes: int) -> None:
        """Limit the caches further, or again less, within their bytes at first."""
        self.cache.limit = min(nbytes, self._cache_bytes)
        self.samples.limit = min(nbytes, self._cache_bytes, _SAMPLES)

    def in_passing(self) -> ObjectReader:
        """Return a reader of the same objects with a small cache of its own, for work that is done once."""
        return ObjectReader(self.resolver, self.blocks, min(self.cache.limit, _PASSING), keeps=False)

    def _undecoded(self, record: Record, chunk: int) -> tuple[list[Record], Record | None, npt.NDArray[Any] | None]:
        """Return the levels of a chain to decode, lowest first, and the cached level below them with its chunk."""
        pending: list[Record] = []
        levels = iter(self.chains.levels(record))
        for level in levels:
            cached = self.cache.get((level.id, chunk))
            if cached is not None:
                return pending[::-1], level, cached
            pending.append(level)
            if level.part:
                below = next(levels)
                return pending[::-1], below, self.before(below, level, chunk, keep=False)
        return pending[::-1], None, None

    def before(self, base: Record, of: Record | Unit, chunk: int, *, keep: bool = True) -> Bits:
        """Return the bits of an exact object's elements that are those of a chunk of one stored against it."""
        if base.count == of.count:
            return self.ordinals(base, chunk, keep=keep)
        first, last = chunk * of.chunk, min((chunk + 1) * of.chunk, of.count)
        parts = [
            self.ordinals(base, number, keep=keep)[max(first - start, 0) : last - start]
            for number in range(first // base.chunk, -(-last // base.chunk))
            for start in (number * base.chunk,)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # Decoded chunks are cached unless `keep` is false, as for a sequential read. Values are decoded into `out` if
    # given, unless they are cached or another buffer already holds them: callers use the returned array.

    def integers(self, record: Linear | Rounded, chunk: int, *, keep: bool = True) -> Integers:
        """Return the integers (int32) of one chunk of an object on a lattice, read-only."""
        pending, below, integers = self._undecoded(record, chunk)
        for level in pending:
            if isinstance(level, Linear) and isinstance(below, Linear) and integers is not None:
                integers = self._moved(level, below, integers, chunk)
            else:
                integers = self.stored_integers(level, chunk)
            below = level
        assert integers is not None
        return self._decoded((record.id, chunk), integers, keep=keep)

    def _moved(self, level: Linear, below: Linear, integers: Integers, chunk: int) -> Integers:
        """Return the integers of `level` from those of `below`, in place if these are writeable."""
        payload = self.stored.payload(level, chunk)
        shift = None if payload is None else level.lattice.shift_from(below.lattice)
        if shift is None:
            is_own = integers.flags.writeable
            integers = level.lattice.project(below.lattice, integers, chunk * level.chunk, in_place=is_own)
            shift = 0
        if payload is None:
            return integers
        integers = self._own(integers)
        self.decoded_chunks += 1
        add_integers(payload, integers, shift)
        return integers

    @staticmethod
    def _own(array: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return an array that may be changed; a copy, in `out` if given, of one that the cache shares with others."""
        if array.flags.writeable:
            return array
        own = empty(array.size, array.dtype) if out is None else out
        own[...] = array
        return own

    def _decoded(self, key: tuple[str, int], array: npt.NDArray[Any], *, keep: bool) -> npt.NDArray[Any]:
        """Make a decoded chunk read-only, and cache it if `keep`."""
        if keep:
            self.cache.keep(key, array)
        else:
            array.flags.writeable = False
        return array

    def values(self, record: Record, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk's values, read-only."""
        if isinstance(record, Linear | Rounded):
            return record.lattice.values(self.integers(record, chunk, keep=keep), chunk * record.chunk, out)
        if isinstance(record, Codebook):
            if record.additive:
                return self._added(record, chunk)
            return record.lattice.values(self.numbers(record, chunk))
        if isinstance(record, Factors):
            _, base, *_ = self.chains.levels(record)
            return record.lattice.add(self.values(base, chunk, keep=keep), self.factors(record), chunk * record.chunk)
        return self.ordinals(record, chunk, keep=keep, out=out)

    def factors(self, record: Factors) -> Numbers:
        """Return the numbers (int32) of all chunks of an object of factors, read-only."""
        numbers = self.cache.get((record.id, 0))
        if numbers is None:
            payload = self.stored.payload(record, 0)
            if payload is None:
                raise IntegrityError(f"Object {record.id} has no factors; run `ckstore verify`.")
            self.decoded_chunks += 1
            numbers = self._decoded((record.id, 0), record.lattice.decode(payload, record.count), keep=True)
        return numbers

    def numbers(self, record: Codebook, chunk: int) -> Numbers:
        """Return the numbers of one chunk of a codebook object, read-only."""
        if record.additive:
            return self._stored_numbers(record, chunk)
        pending, below, numbers = self._undecoded(record, chunk)
        for level in pending:
            assert isinstance(level, Codebook)
            if numbers is None:
                numbers = self._stored_numbers(level, chunk)
            else:
                assert isinstance(below, Codebook)
                indices = below.lattice.indices(numbers)
                classes = below.lattice.classes(indices)
                numbers = level.lattice.apply(indices, self.stored_integers(level, chunk, classes))
            below = level
        assert numbers is not None
        self.cache.keep((record.id, chunk), numbers)
        return numbers

    def _stored_numbers(self, record: Codebook, chunk: int) -> Numbers:
        return record.lattice.restored(self.stored_integers(record, chunk))

    def _added(self, record: Codebook, chunk: int) -> Bits:
        pending, _, bits = self._undecoded(record, chunk)
        for level in pending:
            assert isinstance(level, Codebook)
            indices = self._stored_numbers(level, chunk)
            bits = level.lattice.values(indices) if bits is None else level.lattice.add(bits, indices)
        assert bits is not None
        self.cache.keep((record.id, chunk), bits)
        return bits

    def ordinals(self, record: Record, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of an exact object, read-only."""
        pending, _, bits = self._undecoded(record, chunk)
        if bits is not None and not pending:
            return bits
        return self._decoded((record.id, chunk), self._applied(pending, chunk, bits, out), keep=keep)

    def _applied(self, pending: Sequence[Record], chunk: int, bits: Bits | None, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk after levels, lowest first, from those below them, if there are any."""
        # Patches are applied in place: if only patches follow, the values are already in `out`.
        target = next(
            (level for level in reversed(pending) if not isinstance(level, Patches) or isinstance(level, Cast)), None
        )
        for level in pending:
            if isinstance(level, Raw):
                bits = self.stored.raw(level, chunk, out if level is target else None)
                continue
            if isinstance(level, Cast) and bits is not None:
                bits = self._rounded(level, chunk, bits, out if level is target else None)
                continue
            if isinstance(level, Patches) and bits is not None:
                patch = self.stored.payload(level, chunk)
                if patch is not None:
                    bits = self._own(bits, out if target is None else None)
                    self.decoded_chunks += 1
                    apply_patch(patch, bits, is_float=level.dtype in FLOATS)
                continue
            if bits is not None and self.stored.index(level)[chunk] is None:
                continue
            in_context = isinstance(level, Delta) and level.context and bits is not None
            classes = ordinal_classes(bits, level.dtype) if in_context and bits is not None else None
            stored = self.stored_integers(level, chunk, classes, out if level is target else None)
            mirrored = is_mirrored(level.dtype, level.count, level.chunk)
            ordinal_correct(bits, stored, level.dtype, mirrored=mirrored)
            bits = stored
        assert bits is not None
        return bits

    def changes(self, way: Way, chunk: int) -> bool:
        """Return whether a way of `Chains.between` leads to other bits of one chunk."""
        return any(self.stored.index(level)[chunk] is not None for levels in way for level in levels)

    def led(self, way: Way, chunk: int, bits: Bits) -> Bits:
        """Return the bits of one chunk at the end of a way, from those at its beginning, perhaps in their memory."""
        undone, applied = way
        for level in undone:
            patch = self.stored.payload(level, chunk)
            if patch is not None:
                self.decoded_chunks += 1
                apply_patch(patch, bits, is_float=level.dtype in FLOATS, is_undone=True)
        return self._applied(applied[::-1], chunk, bits)

    def _rounded(self, level: Cast, chunk: int, words: Bits, out: Bits | None) -> Bits:
        """Return the bits of one chunk of a cast, from those of its base."""
        bits = narrowed(words, level.dtype, out)
        payload = self.stored.payload(level, chunk)
        if payload is None:
            raise IntegrityError(f"Chunk {chunk} of object {level.id} has no checksum; run `ckstore verify`.")
        self.decoded_chunks += 1
        if len(payload) > CAST_CHECKSUM:
            apply_patch(payload[CAST_CHECKSUM:], bits, is_float=True)
        if crc32(bits) != int.from_bytes(payload[:CAST_CHECKSUM], "little"):
            raise IntegrityError(f"Chunk {chunk} of object {level.id} does not restore the stored values.")
        return bits

    def bits(self, identity: str, chunk: int, *, keep: bool = True, out: Bits | None = None) -> Bits:
        """Return the bits of one chunk of an object; of an exact one, other threads that want the same chunk wait."""
        if not self.resolver.record(identity).is_exact:
            return self._values(identity, chunk, keep=keep, out=out)
        cached = self.cache.get((identity, chunk))
        if cached is not None:
            return cached
        with self._decoding(identity, chunk):
            return self._values(identity, chunk, keep=keep, out=out)

    def _values(self, identity: str, chunk: int, *, keep: bool, out: Bits | None) -> Bits:
        return self.resolver.settled(lambda: self.values(self.resolver.record(identity), chunk, keep=keep, out=out))

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

    def stored_integers(
        self, record: Record, chunk: int, classes: npt.NDArray[np.uint8] | None = None, out: Bits | None = None
    ) -> Integers:
        """Return the stored integers of one chunk: int32, of an exact object unsigned and as wide as its elements."""
        out_type = f"u{ITEM_SIZES[record.dtype]}" if record.is_exact else "i4"
        payload = self.stored.payload(record, chunk)
        if payload is None:
            return np.zeros(record.size_of(chunk), out_type)
        self.decoded_chunks += 1
        integers = empty(record.size_of(chunk), out_type) if out is None else out
        decode_integers(payload, integers, classes)
        return integers
