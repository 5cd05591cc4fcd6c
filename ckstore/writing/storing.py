"""Stores the objects of a scanned version, window by window: looks up, estimates, plans, encodes, writes.

While one window is encoded and written, the next is estimated and a third is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

from ckstore.encoding.budget import Budget
from ckstore.encoding.estimate import Encoded, Parent
from ckstore.encoding.estimator import Estimator
from ckstore.encoding.writer import ObjectWriter
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import cost
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.reader import ObjectReader
from ckstore.objects.resolver import CatalogResolver
from ckstore.objects.restore_cost import LEVEL, assembly_work
from ckstore.objects.units import Unit
from ckstore.repository import Repository
from ckstore.runtime.threads import in_turn, one_ahead, worker_count
from ckstore.scanning.held import WINDOW
from ckstore.scanning.scan import held_windows
from ckstore.scanning.scanned import ScannedVersion
from ckstore.writing.parents import parents_of
from ckstore.writing.request import Request

#: Objects that are estimated and planned together, with their content ids.
Window = list[tuple[str, Unit]]

#: Bytes of objects that are looked up and written together.
_BATCH = 4 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One object of a version that is being stored: its id and, if it is coarse, its facts.

    `is_raw` tells whether it is stored unencoded.
    """

    id: str
    facts: CoarseUnit | None = None
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """An encoded object, with its unit and content id."""

    content: str
    unit: Unit
    encoded: Encoded


def store_objects(
    repository: Repository,
    writer: ObjectWriter,
    reader: ObjectReader,
    scanned: ScannedVersion,
    request: Request,
    progress: Callable[[int], None] | None,
) -> dict[str, Stored]:
    """Write the objects that the store lacks; return all objects of the version, by content id.

    An unhashed version is read once, during the encoding.

    Raises
    ------
    InputError
        A file changed since it was scanned.
    """
    progress = in_turn(progress)
    resolver = repository.resolver
    parents = parents_of(repository, request.parent, coarse=request.policy.is_coarse)
    estimator = Estimator(reader, scanned, request.policy, parents, request.gradients)
    full = cost(assembly_work(scanned.layouts))
    budget = Budget(full + LEVEL * (1 + deepest(reader, parents.values())), full, scanned.size, request.budget)
    objects = _Objects(reader, resolver, scanned)
    with (
        nullcontext() if scanned.is_hashed else one_ahead(held_windows(scanned, progress)) as stream,
        ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool,
    ):
        windows = objects.hashed(estimator, budget) if stream is None else objects.streamed(stream, budget)
        for batch in _batches(_encoded(pool, estimator, windows, budget)):
            # Objects that the store knows by content id are not encoded. A second record of a coarse object could name
            # itself as its base.
            known = resolver.known(job.encoded.record.id for job in batch if not job.encoded.record.is_exact)
            for job in batch:
                if job.encoded.record.id not in known:
                    writer.put(job.encoded)
                objects.known[job.content] = Stored(job.encoded.record.id, job.encoded.facts)
                if progress is not None:
                    progress(job.unit.nbytes)
    writer.begin_sync()
    scanned.settle()
    return objects.known


def all_windows(
    scanned: ScannedVersion, progress: Callable[[int], None] | None
) -> AbstractContextManager[Iterable[list[int]]]:
    """Return the numbers of all units, in windows; a thread starts to read an unhashed version now."""
    if scanned.is_hashed:
        return nullcontext([list(range(len(scanned.units)))])
    return one_ahead(held_windows(scanned, progress))


def store_raw(
    writer: ObjectWriter,
    resolver: CatalogResolver,
    scanned: ScannedVersion,
    windows: Iterable[list[int]],
    progress: Callable[[int], None] | None,
    *,
    share: bool,
) -> dict[str, Stored]:
    """Write the objects that the store lacks, unencoded; return all objects of the version, by content id.

    `windows` are those of `all_windows`. Without `share`, objects that only hot versions have are written again.

    Raises
    ------
    InputError
        A file changed since it was scanned.
    """
    known: dict[str, Stored] = {}
    for numbers in windows:
        fresh = {scanned.contents[number]: scanned.units[number] for number in numbers}
        fresh = {content: unit for content, unit in fresh.items() if content not in known}
        encoded, raw = resolver.stored(fresh)
        known |= {content: Stored(content) for content in encoded}
        if share:
            known |= {content: Stored(content, is_raw=True) for content in raw}
        for content, unit in fresh.items():
            if content not in known:
                bits = scanned.read(unit, 0, unit.count)
                scanned.check(unit, bits)
                writer.put_raw(content, unit.dtype, unit.chunk, bits)
                known[content] = Stored(content, is_raw=True)
            if progress is not None:
                progress(unit.nbytes)
    writer.begin_sync()
    scanned.settle()
    return known


def deepest(reader: ObjectReader, parents: Iterable[Parent]) -> int:
    """Return the deltas of the longest chain of the parents' objects, as far as these exist."""
    longest = -1
    for item in parents:
        with suppress(IntegrityError):
            longest = max(longest, reader.chains.depth(reader.resolver.record(item.id)))
    return longest


def _encoded(
    pool: ThreadPoolExecutor, estimator: Estimator, windows: Iterator[Window], budget: Budget
) -> Iterator[_Job]:
    """Estimate, plan and encode objects window by window: the encoder finds the estimator's chunks in the cache."""
    try:
        window = next(windows, None)
        upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
        while window is not None:
            estimates = [future.result() for future in upcoming]
            choices = budget.plan(estimates)
            encoding = deque(
                (content, unit, pool.submit(estimator.encode, content, estimate, choice))
                for (content, unit), estimate, choice in zip(window, estimates, choices, strict=True)
            )
            window = next(windows, None)
            upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
            while encoding:
                content, unit, future = encoding.popleft()
                yield _Job(content, unit, future.result())
    finally:
        pool.shutdown(cancel_futures=True)


class _Objects:
    """The objects of a version that the store lacks, window by window.

    Attributes
    ----------
    known
        Stored objects by content id; at first, those that the store already had.
    """

    def __init__(self, reader: ObjectReader, resolver: CatalogResolver, scanned: ScannedVersion) -> None:
        self.known: dict[str, Stored] = {}
        self._reader = reader
        self._resolver = resolver
        self._scanned = scanned

    def hashed(self, estimator: Estimator, budget: Budget) -> Iterator[Window]:
        """Yield the windows of a hashed version."""
        scanned = self._scanned
        self._look_up(scanned.contents, budget)
        todo: dict[str, Unit] = {}
        for unit, content in zip(scanned.units, scanned.contents, strict=True):
            if content in self.known:
                continue
            # Among units with the same content, an exact one takes precedence.
            present = todo.setdefault(content, unit)
            if estimator.may_be_coarse(present) and not estimator.may_be_coarse(unit):
                todo[content] = unit
        window: Window = []
        filled = 0
        for item in todo.items():
            window.append(item)
            filled += item[1].nbytes
            if filled >= WINDOW:
                yield window
                window, filled = [], 0
        if window:
            yield window

    def streamed(self, windows: Iterator[list[int]], budget: Budget) -> Iterator[Window]:
        """Yield the windows of an exact version that is read while it is stored."""
        scanned = self._scanned
        begun: set[str] = set()
        for numbers in windows:
            fresh: dict[str, Unit] = {}
            for number in numbers:
                content = scanned.contents[number]
                if content not in self.known and content not in begun:
                    fresh.setdefault(content, scanned.units[number])
            self._look_up(fresh, budget)
            begun.update(fresh)
            yield [item for item in fresh.items() if item[0] not in self.known]

    def _look_up(self, contents: Iterable[str], budget: Budget) -> None:
        """Look up contents in the store, and add the restore costs of known ones to the budget."""
        for content in self._resolver.known(contents):
            self.known[content] = Stored(content)
            record = self._resolver.record(content)
            budget.add(record.nbytes_of_values, cost(record.full_work), cost(self._reader.chains.work(record)))


def _batches(encoded: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Group encoded objects by bytes: the catalog is queried for many at once, and writing starts early."""
    batch: list[_Job] = []
    filled = 0
    for job in encoded:
        batch.append(job)
        filled += job.unit.nbytes
        if filled >= _BATCH:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
