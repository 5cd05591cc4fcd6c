"""Stores the objects of a scanned version, window by window: looks up, estimates, plans, encodes, writes.

While one window is encoded and written, the next is estimated and a third is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from ckstore.encoding.budget import Budget
from ckstore.encoding.casts import Casts
from ckstore.encoding.estimate import Encoded, Parent
from ckstore.encoding.estimator import Estimator
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.value_roles import Values
from ckstore.formats.layout import FileLayout
from ckstore.lineage.cost import cost
from ckstore.objects.continuation import Cut
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.reader import ObjectReader
from ckstore.objects.resolver import CatalogResolver
from ckstore.objects.restore_cost import LEVEL, assembly_work
from ckstore.objects.units import Unit
from ckstore.repository import Repository
from ckstore.runtime.threads import Executor, batches, coders, one_ahead
from ckstore.scanning.hashing import WINDOW, held_windows
from ckstore.scanning.scanned import ScannedVersion
from ckstore.writing.parents import parents_of, with_longer, with_relatives
from ckstore.writing.request import Request

#: Objects that are estimated and planned together, with their content ids.
Window = list[tuple[str, Unit]]

#: Bytes of objects that are looked up and written together: the catalog is queried for many, and writing starts early.
_BATCH = 4 << 20


class UnitSource(Values, Protocol):
    """The units of a version, their values, and their content ids as far as they are known."""

    @property
    def contents(self) -> Sequence[str]:
        """The content ids, in the order of the units."""

    @property
    def cut(self) -> Cut:
        """The files and the units."""


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
    values: UnitSource,
    request: Request,
    progress: Callable[[int], None] | None,
    windows: Generator[list[int], None, None] | None = None,
) -> dict[str, Stored]:
    """Write the objects that the store lacks; return all objects of the version, by content id.

    `windows` are those of `held_windows`, to read an unhashed version once, during the encoding.
    """
    resolver, is_coarse = repository.resolver, request.policy.is_coarse
    parents = parents_of(repository, request.parent, coarse=is_coarse)
    if request.parent is not None and request.parent.run != request.run and not is_coarse:
        parents = with_relatives(repository, values, parents, request.parent, request.bands)
    if request.parent is not None and not is_coarse:
        parents = with_longer(repository, values.cut, parents, request.parent)
    casts = Casts(values)
    estimator = Estimator(reader, values, request.policy, parents, request.gradients, casts)
    nbytes = sum(unit.nbytes for unit in values.units)
    budget = version_budget(reader, values.layouts, nbytes, parents.values(), request.budget)
    objects = _Objects(reader, resolver, values)
    with (
        nullcontext() if windows is None else one_ahead(windows, values.size) as stream,
        coders(values.size) as pool,
    ):
        if stream is None:
            unstored = objects.hashed(estimator, budget, casts if is_coarse else None)
        else:
            unstored = objects.streamed(stream, budget)
        encoded = _encoded(pool, estimator, unstored, budget)
        for batch in batches(encoded, attrgetter("unit.nbytes"), _BATCH):
            # An exact version encodes no object that the store knows. A second record of another one could name itself
            # as its base.
            known = resolver.stored(job.encoded.record.id for job in batch)[0] if is_coarse else set()
            for job in batch:
                if job.encoded.record.id not in known:
                    writer.put(job.encoded)
                objects.known[job.content] = Stored(job.encoded.record.id, job.encoded.facts)
                if progress is not None:
                    progress(job.unit.nbytes)
    writer.begin_sync()
    return objects.known


def all_windows(
    scanned: ScannedVersion, progress: Callable[[int], None] | None
) -> AbstractContextManager[Iterable[list[int]]]:
    """Return the numbers of all units, in windows; a thread starts to read a large unhashed version now."""
    if scanned.is_hashed:
        return nullcontext([list(range(len(scanned.units)))])
    return one_ahead(held_windows(scanned, progress, short=True), scanned.size)


def store_raw(
    writer: ObjectWriter,
    resolver: CatalogResolver,
    scanned: ScannedVersion,
    windows: Iterable[list[int]],
    progress: Callable[[int], None] | None,
    *,
    share: bool,
) -> dict[str, Stored]:
    """Write the objects that the store and the packs of `writer` lack, unencoded; return all objects, by content id.

    `windows` are those of `all_windows`. Without `share`, objects that only hot versions have are written again. Raise
    `InputError` if a file changed since it was scanned.
    """
    known = {record.id: Stored(record.id, is_raw=True) for record in writer.records}
    resolver.notice_collection()
    for numbers in windows:
        fresh = {scanned.contents[number]: scanned.units[number] for number in numbers}
        fresh = {content: unit for content, unit in fresh.items() if content not in known}
        encoded, raw = resolver.stored(fresh)
        known |= {content: Stored(content) for content in encoded}
        if share:
            known |= {content: Stored(content, is_raw=True) for content in raw}
        for content, unit in fresh.items():
            if content not in known:
                bits = scanned.whole(unit)
                writer.put_raw(content, unit.dtype, unit.chunk, bits, scanned.digest(unit))
                known[content] = Stored(content, is_raw=True)
            if progress is not None:
                progress(unit.nbytes)
    writer.begin_sync()
    scanned.settle()
    return known


def version_budget(
    reader: ObjectReader, layouts: Sequence[FileLayout], nbytes: int, parents: Iterable[Parent], budget: float
) -> Budget:
    """Return the budget to plan a version's `nbytes` of objects within; lost objects of the parent do not count."""
    full = cost(assembly_work(layouts))
    longest = reader.chains.deepest([item.id for item in parents])
    return Budget(full + LEVEL * (1 + longest), full, nbytes, budget)


def _encoded(pool: Executor, estimator: Estimator, windows: Iterator[Window], budget: Budget) -> Iterator[_Job]:
    """Estimate, plan and encode objects window by window: the encoder finds the estimator's chunks in the cache."""
    window = next(windows, None)
    upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
    while window is not None:
        estimates = [future.result() for future in upcoming]
        choices = budget.choose(estimates)
        encoding = deque(
            (content, unit, pool.submit(estimator.encode, content, estimate, choice))
            for (content, unit), estimate, choice in zip(window, estimates, choices, strict=True)
        )
        window = next(windows, None)
        upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
        while encoding:
            content, unit, future = encoding.popleft()
            yield _Job(content, unit, future.result())


class _Objects:
    """The objects of a version that the store lacks, window by window; `known` are the stored ones, by content id."""

    def __init__(self, reader: ObjectReader, resolver: CatalogResolver, values: UnitSource) -> None:
        self.known: dict[str, Stored] = {}
        self._reader = reader
        self._resolver = resolver
        self._values = values

    def hashed(self, estimator: Estimator, budget: Budget, casts: Casts | None) -> Iterator[Window]:
        """Yield the windows of a hashed version, which has `casts` if it becomes coarse.

        Units that become coarse do so although the store has their values.
        """
        values, is_coarse = self._values, casts is not None
        units: dict[str, Unit] = {}
        for unit, content in zip(values.units, values.contents, strict=True):
            # Among units with the same content, the one that must be stored most faithfully takes precedence.
            present = units.setdefault(content, unit)
            if is_coarse and present is not unit and estimator.caution(present) < estimator.caution(unit):
                units[content] = unit
        exact = [content for content, unit in units.items() if not (is_coarse and estimator.may_be_coarse(unit))]
        self._look_up(exact, budget)
        todo = [item for item in units.items() if item[0] not in self.known]
        groups = [[item] for item in todo]
        if casts is not None:
            groups = [[todo[place] for place in places] for places in casts.planned([unit for _, unit in todo])]
        for window in batches(groups, lambda group: sum(unit.nbytes for _, unit in group), WINDOW):
            yield [item for group in window for item in group]

    def streamed(self, windows: Iterator[list[int]], budget: Budget) -> Iterator[Window]:
        """Yield the windows of an exact version that is read while it is stored."""
        values = self._values
        begun: set[str] = set()
        for numbers in windows:
            fresh: dict[str, Unit] = {}
            for number in numbers:
                content = values.contents[number]
                if content not in self.known and content not in begun:
                    fresh.setdefault(content, values.units[number])
            self._look_up(fresh, budget)
            begun.update(fresh)
            yield [item for item in fresh.items() if item[0] not in self.known]

    def _look_up(self, contents: Iterable[str], budget: Budget) -> None:
        """Look up contents in the store, and add the restore costs of known ones to the budget."""
        for content in self._resolver.known(contents):
            self.known[content] = Stored(content)
            record = self._resolver.record(content)
            budget.add(record.nbytes_of_values, cost(record.full_work), cost(self._reader.chains.work(record)))
