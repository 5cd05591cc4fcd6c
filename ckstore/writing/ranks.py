"""One version whose tensors several ranks hold: each rank writes whole objects into a pack of its own.

outline = Outline(state, shards, ranks, own)    # the coordinator: the file without its tensors, cut into objects
part    = write_part(repository, plan, ...)     # each rank: takes the missing elements of its objects from others
written = Written(outline, parts, ...)          # the coordinator: for an ingest that adopts the packs

An object's elements do not depend on the number of ranks. The rank with most of an object's bytes writes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES
from ckstore.encoding.object_writer import RawWriter
from ckstore.errors import CkstoreError, UsageError
from ckstore.formats.skeleton import fill_crcs
from ckstore.formats.torch.live_state import LiveState, StateDictSource
from ckstore.objects.continuation import Cut
from ckstore.objects.documents import ManifestDocument
from ckstore.objects.file_digest import FileDigest, Stretch, stretch_of
from ckstore.objects.identity import content_id
from ckstore.objects.likeness import places_of
from ckstore.objects.records import Raw
from ckstore.objects.units import Member, Unit, plan_units
from ckstore.repository import Repository
from ckstore.runtime.checksum import crc32, crc32_combine
from ckstore.scanning.inputs import scan_state_dict
from ckstore.scanning.scanned import ScannedVersion
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackInfo, PackWriter

Bytes = npt.NDArray[np.uint8]

#: Bytes of objects that are looked up in the store and written together.
_BATCH = 8 << 20


class Exchange(Protocol):
    """Messages between the ranks of a save, in order for each pair of ranks."""

    def send(self, rank: int, data: Bytes) -> None:
        """Send bytes, perhaps in the background."""

    def receive(self, rank: int, nbytes: int) -> Bytes:
        """Return the next message of a rank; raise `CkstoreError` if it does not come in time."""

    def flush(self) -> None:
        """Wait until all messages are sent."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor of some `shape` that a rank holds in C order: its `first` element and `sizes`, by axis.

    `number` names it on that rank.
    """

    rank: int
    number: int
    shape: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements of the shard that lie from `start` to before `stop` of the tensor: one stretch."""
        length, count = self._length, prod(self.sizes[: self._cut])
        if not length or not count:
            return 0, 0
        if (step := self._step) is not None:
            base = self._begin
            low = max((start - length - base) // step + 1, 0)
            high = min(-((base - stop) // step), count)
            first, last = base + low * step, base + (high - 1) * step
        else:
            begins = self._begins()
            low = int(np.searchsorted(begins + length, start, "right"))
            high = int(np.searchsorted(begins, stop, "left"))
            first, last = (int(begins[min(run, count - 1)]) for run in (low, high - 1))
        if low >= high:
            return 0, 0
        return low * length + max(start - first, 0), (high - 1) * length + min(stop - last, length)

    def place(self, low: int, high: int, data: Bytes, start: int, target: Bytes, size: int) -> None:
        """Copy elements from `low` to before `high` of the shard to a stretch of the tensor that begins at `start`.

        `data` and `target` are bytes, `size` of them in an element.
        """
        length = self._length
        one, last = low // length, (high - 1) // length
        begins = self._begins()[one : last + 1] - start
        if one == last:
            offset = int(begins[0]) + low % length
            target[offset * size : (offset + high - low) * size] = data
            return
        for run in (one, last):
            inside = slice(max(run * length, low), min((run + 1) * length, high))
            offset = int(begins[run - one]) + inside.start - run * length
            part = data[(inside.start - low) * size : (inside.stop - low) * size]
            target[offset * size : offset * size + part.size] = part
        middle = data[((one + 1) * length - low) * size :][: (last - one - 1) * length * size]
        rows = middle.reshape(-1, length * size)
        for group in _even(begins[1:-1]):
            at = begins[1:-1][group]
            step = int(at[1] - at[0]) if at.size > 1 else length
            shape, strides = (at.size, length * size), (step * size, 1)
            np.lib.stride_tricks.as_strided(target[int(at[0]) * size :], shape, strides)[:] = rows[group]

    # The shard is made of stretches of the tensor of one length: its axes from the last one that is cut.

    @property
    def _cut(self) -> int:
        """The last axis that is cut."""
        axis = len(self.shape) - 1
        while axis > 0 and self.sizes[axis] == self.shape[axis]:
            axis -= 1
        return max(axis, 0)

    @property
    def _length(self) -> int:
        return prod(self.sizes[self._cut :])

    @property
    def _begin(self) -> int:
        """The first element."""
        return sum(first * prod(self.shape[axis + 1 :]) for axis, first in enumerate(self.first))

    @property
    def _step(self) -> int | None:
        """The distance of the stretches, None if it varies."""
        cut = self._cut
        return max(prod(self.shape[cut:]), 1) if self.sizes[1:cut] == self.shape[1:cut] else None

    def _begins(self) -> npt.NDArray[np.int64]:
        """Return the elements of the tensor at which the stretches begin."""
        begins = np.full(1, self._begin, np.int64)
        for axis, size in enumerate(self.sizes[: self._cut]):
            begins = (begins[:, None] + np.arange(size) * prod(self.shape[axis + 1 :])).reshape(-1)
        return begins


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a shard, from `low` to before `high`, in an object.

    The object has the tensor's elements from `start` on, from its byte `position` on.
    """

    shard: Shard
    low: int
    high: int
    start: int
    position: int
    size: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return (self.high - self.low) * self.size


@dataclass(frozen=True, slots=True)
class Task:
    """An object, and the pieces of it that a rank holds; for the rank that writes it, all pieces.

    `starts` are the places of the members in the file, `sizes` their bytes.
    """

    number: int
    writer: int
    dtype: str
    chunk: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The objects that a rank writes or has pieces of, in order; number and time of the version.

    With `share`, content that only hot versions have is not written again. `samples` are the places of the elements
    that the version's bands are made of: first byte in the file, and bytes, in order.
    """

    rank: int
    number: int
    created: str
    share: bool
    tasks: tuple[Task, ...]
    samples: tuple[tuple[int, int], ...]


class Hashed(NamedTuple):
    """BLAKE3 and CRC-32 of a member's bytes, and the nodes for the digest of the file."""

    digest: bytes
    crc: int
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's pack with its records; the content ids and members of the rank's objects, by number.

    `samples` are those of the plan that lie in these objects, by their first byte.
    """

    pack: PackInfo | None
    records: tuple[Raw, ...]
    contents: Mapping[int, str]
    members: Mapping[int, Sequence[Hashed]]
    samples: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Written:
    """A version that ranks have written: its outline, its parts, and its number, time and lease.

    With `keep`, it is not committed: the function gets the row that it would have, and its packs. `after` is the
    version before it if that was kept, too; `goes_back` tells whether that or one before went back in the run, so that
    versions at later steps will be superseded.
    """

    outline: Outline
    parts: Sequence[Part]
    number: int
    created: str
    lease: int
    keep: Callable[[VersionRow, Sequence[PackInfo]], None] | None = None
    after: VersionRow | None = None
    goes_back: bool = False

    @property
    def packs(self) -> list[tuple[PackInfo, Sequence[Raw]]]:
        """The packs with their records."""
        return [(part.pack, part.records) for part in self.parts if part.pack is not None]

    def sample(self, start: int, nbytes: int) -> bytes:
        """Return the bytes of a sample; none if it lies in two objects."""
        return next((part.samples[start] for part in self.parts if start in part.samples), b"")

    def filled(self, repository: Repository) -> LiveState:
        """Return the state with the values in the packs, whose records the repository's resolver has."""
        return self.outline.filled(repository, self.parts)

    def note(self, scanned: ScannedVersion) -> None:
        """Fill in units, content ids and digests of the scanned state."""
        self.outline.note(scanned, self.parts)


class Outline:
    """The file of a state whose tensors the ranks hold, cut into objects.

    Parameters
    ----------
    state
        The state; the memories of the ranks' tensors are absent.
    shards
        The shards of these, by number of the extent.
    ranks, own
        Number of ranks; the one that has all other tensors.
    continued
        As `ScannedVersion.continued`.
    """

    def __init__(
        self,
        state: LiveState,
        shards: Mapping[int, Sequence[Shard]],
        ranks: int,
        own: int,
        continued: Callable[[Cut, Container[tuple[int, int]]], list[Unit]] | None = None,
    ) -> None:
        self.state = state
        [file] = scan_state_dict(state).files
        self._layout = file.layout
        source = cast("StateDictSource", file.source)
        self._extents = [source.extent_at(extent.start) for extent in file.layout.extents]
        self._units = plan_units([("", file.layout)])
        if continued is not None:
            self._units = continued(Cut([("", file.layout)], self._units), ())
        self._shards = shards
        self._own = own
        self._ranks = ranks

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """The places of the elements that the version's bands are made of."""
        return tuple(sorted({(place.start, place.nbytes) for place in places_of([self._layout])}))

    def tasks(self) -> list[tuple[Task, ...]]:
        """Return the tasks of each rank."""
        found: list[list[Task]] = [[] for _ in range(self._ranks)]
        written = [0] * self._ranks
        for number, unit in enumerate(self._units):
            pieces = [*self._pieces(unit)]
            if sum(piece.nbytes for piece in pieces) != unit.nbytes:
                raise UsageError(
                    f"The ranks' shards of {unit.key} do not add up to the tensor; save with another planner."
                )
            held = dict.fromkeys(range(self._ranks), 0)
            for piece in pieces:
                held[piece.shard.rank] += piece.nbytes
            writer = min(held, key=lambda rank: (-held[rank], written[rank]))
            written[writer] += unit.nbytes
            starts = tuple(map(self._start, unit.members))
            for rank in {writer, *(piece.shard.rank for piece in pieces)}:
                own = tuple(piece for piece in pieces if rank in (writer, piece.shard.rank))
                found[rank].append(Task(number, writer, unit.dtype, unit.chunk, starts, tuple(unit.member_bytes), own))
        return [tuple(tasks) for tasks in found]

    def _pieces(self, unit: Unit) -> Iterator[Piece]:
        position = 0
        for member, nbytes in zip(unit.members, unit.member_bytes, strict=True):
            extent = self._extents[member.extent]
            size = ITEM_SIZES[self._layout.extents[member.extent].dtype]
            count = self._layout.extents[member.extent].count
            # The coordinator has the tensors within objects.
            alone = (Shard(self._own, -1 - extent, (count,), (0,), (count,)),)
            for shard in self._shards.get(extent, alone):
                low, high = shard.overlap(member.first, member.first + member.count)
                if low < high:
                    yield Piece(shard, low, high, member.first, position, size)
            position += nbytes

    def _start(self, member: Member) -> int:
        """Return the first byte of a member in the file."""
        extent = self._layout.extents[member.extent]
        return extent.start + member.first * ITEM_SIZES[extent.dtype]

    def note(self, scanned: ScannedVersion, parts: Sequence[Part]) -> None:
        """Fill in units, content ids and digests of the scanned state, which the ranks computed."""
        [file] = scanned.files
        scanned.units = self._units
        hashed: dict[int, Hashed] = {}
        sizes: dict[int, int] = {}
        scanned.contents = [""] * len(self._units)
        for part in parts:
            for number, content in part.contents.items():
                unit = self._units[number]
                scanned.contents[number] = content
                for member, nbytes, found in zip(unit.members, unit.member_bytes, part.members[number], strict=True):
                    start = self._start(member)
                    hashed[start], sizes[start] = found, nbytes
                    file.digests[member.extent, member.first] = found.digest
        order = sorted(hashed)
        file.skeleton = skeleton = cast("StateDictSource", file.source).skeleton
        file.crcs = []
        for checked in file.layout.checked:  # Each is that of a storage.
            crc = 0
            for start in order[bisect_left(order, checked.start) : bisect_left(order, checked.stop)]:
                crc = crc32_combine(crc, hashed[start].crc, sizes[start])
            file.crcs.append(crc)
        filled = fill_crcs(skeleton, file.layout, file.crcs)
        digest = FileDigest()
        position = taken = 0
        for start in (*order, file.layout.size):
            digest.add(filled[taken : taken + start - position])
            taken += start - position
            if start in hashed:
                digest.add_stretch(hashed[start].stretch)
                position = start + sizes[start]
        file.blake3 = digest.hexdigest()
        scanned.is_hashed = True

    def filled(self, repository: Repository, parts: Sequence[Part]) -> LiveState:
        """Return the state with the values in the ranks' packs, whose records the repository's resolver has."""
        contents: dict[int, str] = {}
        for part in parts:
            contents |= part.contents
        places: dict[int, list[tuple[int, int, int]]] = {}
        for number, unit in enumerate(self._units):
            position = 0
            for member, nbytes in zip(unit.members, unit.member_bytes, strict=True):
                extent = self._extents[member.extent]
                size = ITEM_SIZES[self._layout.extents[member.extent].dtype]
                places.setdefault(extent, []).append((member.first * size, number, position))
                position += nbytes
        for extent, stretches in places.items():
            if extent in self._shards:
                found = [(first, contents[number], position) for first, number, position in sorted(stretches)]
                self.state.memories[extent] = _Stored(repository, found)
        self.state.is_still = False
        return self.state


class _Stored:
    """The bytes of a tensor in objects: first byte, id of the object, and first byte there."""

    is_remote = False

    def __init__(self, repository: Repository, places: Sequence[tuple[int, str, int]]) -> None:
        self._repository = repository
        self._places = places

    def view(self, offset: int, nbytes: int) -> memoryview:
        data = np.empty(nbytes, np.uint8)
        stops = [first for first, _, _ in self._places[1:]] + [offset + nbytes]
        for (first, identity, position), stop in zip(self._places, stops, strict=True):
            low, high = max(first, offset), min(stop, offset + nbytes)
            if low < high:
                self._read(identity, position + low - first, data[low - offset : high - offset])
        return data.data

    def _read(self, identity: str, start: int, target: Bytes) -> None:
        reader = self._repository.reader
        record = reader.resolver.record(identity)
        size = record.chunk * ITEM_SIZES[record.dtype]
        for chunk in range(start // size, -(-(start + target.size) // size)):
            bits = reader.bits(identity, chunk, keep=False).view(np.uint8)
            low, high = max(start, chunk * size), min(start + target.size, chunk * size + bits.size)
            target[low - start : high - start] = bits[low - chunk * size : high - chunk * size]

    def copy_into(self, target: Bytes) -> Any:
        target[:] = np.frombuffer(self.view(0, target.size), np.uint8)

    def sample(self) -> Bytes:
        return np.empty(0, np.uint8)  # Packs do not change.


def write_part(
    repository: Repository,
    plan: PartPlan,
    held: Callable[[int], Bytes],
    exchange: Exchange,
    publish: Callable[[Sequence[str]], None] | None = None,
) -> Part:
    """Write the objects of a rank; send the pieces of others' objects.

    After an error, the rank sends zeros and receives the messages of others, which need not wait for a limit then. At
    last it raises the error.

    Parameters
    ----------
    held
        Returns the bytes of a shard of this rank by its number.
    publish
        Called with the names of finished packs; by default, the store has them afterwards.
    """
    error: Exception | None = None
    with ExitStack() as stack:
        try:
            pack = stack.enter_context(PackWriter(repository.path, "raw"))
            objects = _Objects(repository, RawWriter(pack), plan)
        except Exception as raised:
            error = raised
        for task in plan.tasks:
            try:
                if task.writer != plan.rank:
                    exchange.send(task.writer, _sent(task, plan.rank, None if error else held))
                    continue
                received = _received(task, plan.rank, exchange)
                if error is None:
                    objects.put(task, _assembled(task, plan.rank, held, received))
            except Exception as raised:
                error = error or raised
        try:
            exchange.flush()
        except CkstoreError as raised:
            error = error or raised
        if error is not None:
            raise error
        return objects.finish(publish or repository.packs.publish)


def _sent(task: Task, rank: int, held: Callable[[int], Bytes] | None) -> Bytes:
    """Return the pieces of an object that a rank sends; zeros without their values."""
    pieces = [piece for piece in task.pieces if piece.shard.rank == rank]
    if held is None:
        return np.zeros(sum(piece.nbytes for piece in pieces), np.uint8)
    return np.concatenate([_cut(piece, held) for piece in pieces])


def _received(task: Task, rank: int, exchange: Exchange) -> dict[int, Bytes]:
    """Return the pieces of other ranks; raise the first error after all have come or failed."""
    sizes: dict[int, int] = {}
    for piece in task.pieces:
        if piece.shard.rank != rank:
            sizes[piece.shard.rank] = sizes.get(piece.shard.rank, 0) + piece.nbytes
    found: dict[int, Bytes] = {}
    error: CkstoreError | None = None
    for source, nbytes in sizes.items():
        try:
            found[source] = exchange.receive(source, nbytes)
        except CkstoreError as raised:
            error = error or raised
    if error is not None:
        raise error
    return found


def _assembled(task: Task, rank: int, held: Callable[[int], Bytes], received: dict[int, Bytes]) -> Bytes:
    """Return the bytes of an object; without a copy if this rank holds it in one piece."""
    if len(task.pieces) == 1 and task.pieces[0].nbytes == sum(task.sizes) and not received:
        return _cut(task.pieces[0], held)
    target = np.empty(sum(task.sizes), np.uint8)
    for piece in task.pieces:
        if piece.shard.rank == rank:
            data = _cut(piece, held)
        else:
            data, received[piece.shard.rank] = np.split(received[piece.shard.rank], [piece.nbytes])
        piece.shard.place(piece.low, piece.high, data, piece.start, target[piece.position :], piece.size)
    return target


def _cut(piece: Piece, held: Callable[[int], Bytes]) -> Bytes:
    return held(piece.shard.number)[piece.low * piece.size : piece.high * piece.size]


class _Objects:
    """Objects that are hashed, looked up in the store and written, in batches."""

    def __init__(self, repository: Repository, raw: RawWriter, plan: PartPlan) -> None:
        self._repository = repository
        self._raw = raw
        self._plan = plan
        self._samples: dict[int, bytes] = {}
        self._contents: dict[int, str] = {}
        self._members: dict[int, list[Hashed]] = {}
        self._ids: set[str] = set()
        self._batch: dict[str, tuple[Task, Bytes, bytes | None]] = {}
        repository.resolver.notice_collection()

    def put(self, task: Task, data: Bytes) -> None:
        """Add an object; `data` does not change."""
        members = self._members[task.number] = []
        position = 0
        for start, size in zip(task.starts, task.sizes, strict=True):
            member = data[position : position + size]
            members.append(Hashed(blake3(member.data).digest(), crc32(member), stretch_of(member, start)))
            for first, nbytes in self._plan.samples[bisect_left(self._plan.samples, (start, 0)) :]:
                if first + nbytes > start + size:
                    break
                self._samples[first] = member[first - start : first - start + nbytes].tobytes()
            position += size
        content = content_id(task.dtype, task.chunk, [member.digest for member in members])
        self._contents[task.number] = content
        if content not in self._ids:
            self._ids.add(content)
            self._batch[content] = task, data, members[0].digest if len(members) == 1 else None
            if sum(one.size for _, one, _ in self._batch.values()) >= _BATCH:
                self._write()

    def _write(self) -> None:
        encoded, raw = self._repository.resolver.stored(self._batch)
        for content, (task, data, digest) in self._batch.items():
            if content not in encoded and not (self._plan.share and content in raw):
                bits = np.ascontiguousarray(data).view(f"u{ITEM_SIZES[task.dtype]}")
                self._raw.put(content, task.dtype, task.chunk, bits, digest)
        self._batch.clear()

    def finish(self, publish: Callable[[Sequence[str]], None]) -> Part:
        """Make the pack durable, with a manifest."""
        self._write()
        if not self._raw.records:
            return Part(None, (), self._contents, self._members, self._samples)
        self._raw.add_manifest(partial(ManifestDocument, number=self._plan.number, created=self._plan.created))
        pack = self._raw.pack.finish()
        publish([pack.name])
        records = tuple(replace(record, pack=pack.name) for record in self._raw.records)
        return Part(pack, records, self._contents, self._members, self._samples)


def _even(begins: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Yield groups of neighbours with one distance."""
    first = 0
    steps = np.diff(begins)
    for change in (*np.flatnonzero(np.diff(steps)) + 2, begins.size):
        if first < change:
            yield slice(first, int(change))
            first = int(change)
