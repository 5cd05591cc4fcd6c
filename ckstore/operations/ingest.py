"""Ingest: from scanned files to a committed version."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.encoding.budget import Budget, relative_cost, restore_work, writing_work
from ckstore.encoding.comparison import CoarseUnit
from ckstore.encoding.estimator import Estimator, ParentObject, parent_objects
from ckstore.encoding.exact import Encoded, Estimate
from ckstore.encoding.writer import ObjectWriter, remove_uncommitted, version_row
from ckstore.errors import ConflictError, IntegrityError
from ckstore.lineage.cost import cost
from ckstore.lineage.planner import Choice
from ckstore.lineage.search import search
from ckstore.objects.documents import BlobRef, CoarseFacts, FileEntry, LayoutDocument, VersionDocument
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Record
from ckstore.objects.resolver import CatalogResolver
from ckstore.objects.units import Unit
from ckstore.operations.request import Request
from ckstore.operations.tuning import Tuning, last_choice, search_space
from ckstore.policy import Policy
from ckstore.runtime.threads import in_turn, one_ahead, worker_count
from ckstore.scanning.scan import WINDOW, ScannedVersion, hash_version, held_windows
from ckstore.storage import durable, log
from ckstore.storage.catalog import Catalog, VersionRow, key
from ckstore.storage.delta import compress_against
from ckstore.storage.pack import PackWriter

if TYPE_CHECKING:
    from ckstore.version import Version

#: Objects that are estimated and planned together, by content id.
Window = list[tuple[str, Unit]]

#: Objects of so many bytes are looked up and written together.
_BATCH = 4 << 20

#: A delta of a blob below this size is kept without asking what the blob would take alone.
_SMALL_BLOB = 1024

#: A blob is packed against the parent's only where that takes at most this part of packing it alone.
_WORTH_A_DELTA = 0.6


@dataclass(frozen=True, slots=True)
class Stored:
    """One object of a version under way: its lattice, its content id where it is exact, else what is recorded of it."""

    lattice: str
    content: str | None = None
    facts: CoarseUnit | None = None


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingest did; sizes in bytes.

    Attributes
    ----------
    version
        The row of the version.
    is_new
        False where the same content stood at the same run and step already.
    """

    version: VersionRow
    is_new: bool


@dataclass(slots=True)
class _Trial:
    """A version that is only evaluated: how, and the result."""

    evaluate: Callable[[Version], float]
    result: float = float("inf")


class _TrialOverError(Exception):
    """A trial is over, and its packs go."""


class Ingest:
    """One ingest into one store.

    Parameters
    ----------
    root
        Directory of the store.
    catalog, resolver, reader
        The store's.
    """

    def __init__(self, root: Path, catalog: Catalog, resolver: CatalogResolver, reader: ObjectReader) -> None:
        self.root = root
        self.catalog = catalog
        self.resolver = resolver
        self.reader = reader

    def run(self, scanned: ScannedVersion, request: Request, progress: Callable[[int], None] | None) -> IngestReport:
        """Store a scanned version, which is read once where it is exact and no other stands in its place.

        Raises
        ------
        ConflictError
            Run and step are taken by other content, and `request.replace` is not set.
        InputError
            A file changed since it was scanned.
        """
        standing = None if request.step is None else self.catalog.at_step(request.run, request.step)
        whole = standing is not None or request.force or request.policy.is_coarse or request.tuning is not None
        if whole and not scanned.is_hashed:
            hash_version(scanned, force=request.force, progress=progress)
        if standing is not None:
            if self._same(standing, scanned):
                if self._is_enough(standing, request) and self._is_whole(standing):
                    return IngestReport(standing, is_new=False)
                request = self._healing(standing, request)
            elif not request.replace:
                raise ConflictError(
                    f"{request.run}@{request.step} holds other content as version {standing.number}; "
                    "choose another step or run, or use --replace."
                )
        number = self.catalog.reserve_number()
        try:
            with self.catalog.lease(f"ingest {number}"):
                if request.tuning is None:
                    return self._store(number, scanned, request, progress)
                return self._search(number, scanned, request, request.tuning, progress)
        except BaseException:
            self.catalog.release_number(number)
            self.resolver.forget()
            raise

    def _search(
        self,
        number: int,
        scanned: ScannedVersion,
        request: Request,
        tuning: Tuning,
        progress: Callable[[int], None] | None,
    ) -> IngestReport:
        """Store under the most aggressive setting that is tolerated, exactly where none is; trials leave nothing."""
        reference = tuning.reference(scanned)
        cube = search_space(request.policy)
        parent = None if request.parent is None else self.document(request.parent)

        def evaluate(policy: Policy) -> float:
            trial = _Trial(lambda version: tuning.degradation(version, reference))
            try:
                self._store(number, scanned, replace(request, policy=policy), None, trial)
            except _TrialOverError:
                self.resolver.forget()
            return trial.result

        found = search(evaluate, tuning.tolerance, cube, last_choice(parent, request.policy, cube))
        policy = found.settings if found.accepted else Policy()
        facts = {"degradation": found.degradation, "evaluations": found.evaluations} if found.accepted else {}
        return self._store(number, scanned, replace(request, policy=policy), progress, found=facts)

    def _same(self, standing: VersionRow, scanned: ScannedVersion) -> bool:
        """Whether a version holds what was scanned: of one file its bytes, of a directory also names and modes."""
        document = self.document(standing)
        if document.is_directory != scanned.is_directory:
            return False
        if not scanned.is_directory:
            return [file.sha256 for file in document.files] == [file.sha256 for file in scanned.files]
        there = {(file.path, file.sha256, file.mode) for file in document.files}
        here = {(file.path, file.sha256, file.mode) for file in scanned.files}
        return (
            there == here
            and set(document.links) == set(scanned.links)
            and set(document.directories) == set(scanned.directories)
        )

    def _is_enough(self, standing: VersionRow, request: Request) -> bool:
        """Whether a version of the same content is as faithful as what is asked for."""
        coarse, policy = self.document(standing).coarse, request.policy
        if coarse is None or not policy.is_coarse:
            return coarse is None
        said = coarse.parameters if coarse.scheme == policy.scheme else {}
        if request.tuning is not None:
            return bool(said.get("degradation", inf) <= request.tuning.tolerance)
        if policy.is_bounded:
            return all(said.get(name, inf) <= bound for name, bound in policy.parameters().items())
        return bool(said.get("quality", 0.0) <= policy.quality)

    def _is_whole(self, row: VersionRow) -> bool:
        """Whether all that restoring a version takes is recorded, in packs that are there and long enough."""
        self.resolver.forget()  # What another process has found to be lost meanwhile counts.
        document = self.document(row)
        if not self.catalog.has_packs(document.blob_packs()):
            return False
        try:
            for reference in (document.layout, document.crcs, *(file.skeleton for file in document.files)):
                self.resolver.blob(reference, row.pack)
            for lattice, content in set(document.objects):
                for record in self.reader.records(lattice, content):
                    if record.end > self.resolver.packs.size(record.pack):
                        return False
        except IntegrityError:
            return False
        return True

    def _healing(self, standing: VersionRow, request: Request) -> Request:
        """The request that stores a damaged version again in its own place, after the same parent as before."""
        parent = request.parent
        if parent is not None and parent.number >= standing.number:  # The run's latest, where none was named.
            parent = None if standing.parent is None else self.catalog.version(standing.parent)
        return replace(request, parent=parent, replace=True, heals=True)

    def document(self, row: VersionRow) -> VersionDocument:
        """The document of a committed version."""
        return self.resolver.document(row)

    def _store(
        self,
        number: int,
        scanned: ScannedVersion,
        request: Request,
        progress: Callable[[int], None] | None,
        trial: _Trial | None = None,
        found: Mapping[str, float] = MappingProxyType({}),
    ) -> IngestReport:
        objects = _Objects(self.reader, self.resolver, scanned)
        progress = in_turn(progress)
        stream = None if scanned.is_hashed else one_ahead(held_windows(scanned, progress))
        estimator = Estimator(self.reader, scanned, request.policy, self._parents(request.parent), request.gradients)
        known = objects.known
        budget = Budget(cost(writing_work([file.layout for file in scanned.files])), scanned.size, request.budget)
        windows = objects.hashed(estimator, budget) if stream is None else objects.streamed(stream, budget)
        with (
            nullcontext() if stream is None else closing(stream),
            ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool,
            PackWriter(self.root, "coarse") as coarse,
            PackWriter(self.root, "exact") as exact,
        ):
            writer = ObjectWriter(coarse, exact)
            for batch in _batches(self._encoded(pool, estimator, windows, budget)):
                # Of what the store holds under its content id nothing is encoded.
                stored = self.resolver.known_lattices(
                    layers.identity for job, layers in batch if layers.identity not in ("", job.content)
                )
                for job, layers in batch:
                    is_stored = layers.identity in stored
                    lattice = writer.add(job.content, job.estimate, job.choice, layers, stored=is_stored)
                    is_exact = layers.facts is None
                    known[job.content] = Stored(lattice, job.content if is_exact else None, layers.facts)
                    if progress is not None:
                        progress(job.estimate.unit.nbytes)
            writer.begin_sync()
            for file in scanned.files:
                file.source.check_unchanged()
            scanned.held.clear()
            with self.resolver.under_way() as hold:
                return self._commit(number, scanned, request, known, writer, hold, progress, trial, found)

    def _encoded(
        self,
        pool: ThreadPoolExecutor,
        estimator: Estimator,
        windows: Iterator[Window],
        budget: Budget,
    ) -> Iterator[tuple[_Job, Encoded]]:
        """Estimate, plan and encode objects window by window, so that chunks decoded for one are at hand for the other.

        While the objects of a window are encoded and written, the next one is read and estimated.
        """
        try:
            window = next(windows, None)
            upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
            while window is not None:
                estimates = [future.result() for future in upcoming]
                choices = budget.plan(estimates)
                jobs = [
                    _Job(content, estimate, choice)
                    for (content, _), estimate, choice in zip(window, estimates, choices, strict=True)
                ]
                encoding = deque(
                    (job, pool.submit(estimator.encode, job.content, job.estimate, job.choice)) for job in jobs
                )
                window = next(windows, None)
                upcoming = [pool.submit(estimator.estimate, unit) for _, unit in window or ()]
                while encoding:
                    job, future = encoding.popleft()
                    yield job, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _parents(self, parent: VersionRow | None) -> dict[tuple[str, str], ParentObject]:
        """The objects of the parent version by key and signature of their units."""
        if parent is None:
            return {}
        document = self.document(parent)
        try:
            layout = LayoutDocument.decode(self.resolver.blob(document.layout, parent.pack))
        except IntegrityError:
            return {}  # Its layout was lost with another pack: nothing can be stored against it.
        facts = {} if document.coarse is None else document.coarse.units
        objects = parent_objects(layout.units, document.objects, facts)
        contents = [item.content for item in objects.values() if item.content is not None]
        self.resolver.prefetch((item.lattice for item in objects.values()), contents)
        return objects

    def _commit(
        self,
        number: int,
        scanned: ScannedVersion,
        request: Request,
        known: dict[str, Stored],
        writer: ObjectWriter,
        hold: Callable[[Iterable[Record]], None],
        progress: Callable[[int], None] | None,
        trial: _Trial | None,
        found: Mapping[str, float],
    ) -> IngestReport:
        blobs: dict[str, bytes] = {}
        parent = None if request.parent is None else (self.document(request.parent), request.parent.pack)
        layout = LayoutDocument([file.layout for file in scanned.files], scanned.units).encode()
        layout_ref = self._blob("layout", layout, blobs, None if parent is None else (parent[0].layout, parent[1]))
        files = []
        for index, file in enumerate(scanned.files):
            before = None if parent is None else _file_before(parent[0], file.path, single=not scanned.is_directory)
            reference = None if parent is None or before is None else (before.skeleton, parent[1])
            ref = self._blob(f"skeleton.{index}", file.skeleton, blobs, reference)
            files.append(FileEntry(file.path, file.layout.size, file.sha256, file.mode, file.mtime_ns, ref))
        crcs = np.array([crc for file in scanned.files for crc in file.crcs], "<u4").tobytes()
        facts: dict[str, Any] = {}
        for file in scanned.files:
            facts |= {name: value for name, value in file.layout.facts.items() if name in ("step", "epoch")}
        hold(writer.records)
        standing = None
        if request.replace and request.step is not None:
            standing = self.catalog.at_step(request.run, request.step)
        stored = [known[content] for content in scanned.contents]
        objects = tuple((item.lattice, item.content) for item in stored)
        off = {index: item.facts for index, item in enumerate(stored) if item.facts is not None}
        policy = request.policy
        coarse = CoarseFacts(policy.scheme, {**policy.parameters(), **found}, off) if off else None
        document = VersionDocument(
            number=number,
            run=request.run,
            step=request.step,
            parent=None if request.parent is None else request.parent.number,
            created=durable.timestamp(),
            fidelity="exact" if coarse is None else "coarse",
            is_directory=scanned.is_directory,
            files=tuple(files),
            links=tuple(scanned.links),
            directories=tuple(scanned.directories),
            layout=layout_ref,
            crcs=self._blob("crcs", crcs, blobs, None),
            objects=objects,
            coarse=coarse,
            metrics=request.metrics,
            source=request.source,
            facts=facts,
            summary=self._summary(scanned, objects),
            replaces=None if standing is None else standing.number,
        )
        try:
            packs, entry = writer.finish(document, blobs, trial=trial is not None)
            hold(writer.placed(packs))
            row = version_row(document, packs, entry)
            if trial is not None:
                with self._uncommitted(row, writer.placed(packs)) as version:
                    trial.result = trial.evaluate(version)
                raise _TrialOverError
            if request.verify:
                self._verify(row, writer.placed(packs), progress)
            lattices, contents = writer.places(packs)
            needed_lattices, needed_contents = self._needed(known, writer)
            with self.catalog.transaction() if request.heals else nullcontext():
                tags = self._take_tags(document.replaces) if request.heals else []
                self.catalog.commit_version(
                    row,
                    packs,
                    lattices,
                    contents,
                    references=document.blob_packs(),
                    replace=request.replace,
                    requires_lattices=sorted(needed_lattices - {place[0] for place in lattices}),
                    requires_contents=sorted(needed_contents - {place[0] for place in contents}),
                )
                for tag in tags:
                    self.catalog.set_tag(tag, number)
                    log.append(self.root, {"change": "tag", "tag": tag, "version": number})
        except BaseException:
            remove_uncommitted(self.root, self.catalog, self.resolver, writer.finished)
            raise
        return IngestReport(self.catalog.version(number), is_new=True)

    def _take_tags(self, number: int | None) -> list[str]:
        """Take the tags of a version off it; returns them."""
        tags = [tag for tag, meant in self.catalog.tags().items() if meant == number]
        for tag in tags:
            self.catalog.delete_tag(tag)
        return tags

    def _needed(self, known: dict[str, Stored], writer: ObjectWriter) -> tuple[set[int], set[int]]:
        """Keys of the lattices and of the exact layers that a version's objects are, and are stored against."""
        lattices = {key(item.lattice) for item in known.values()}
        lattices |= {key(record.base) for record in writer.lattices if record.base is not None}
        exact = [item.content for item in known.values() if item.content is not None]
        contents = {key(content) for content in exact if self.resolver.content(content) is not None}
        contents |= {key(record.parent) for record in writer.contents if record.parent is not None}
        return lattices, contents

    def _verify(self, row: VersionRow, records: Sequence[Record], progress: Callable[[int], None] | None) -> None:
        """Decode every file of a version from its finished packs; `IntegrityError` where one does not come back."""
        from ckstore.operations.verify import check_restores

        with self._uncommitted(row, records) as version:
            check_restores(version, progress)

    @contextmanager
    def _uncommitted(self, row: VersionRow, records: Sequence[Record]) -> Iterator[Version]:
        """A version in finished packs, before it is committed."""
        from ckstore.store import Store
        from ckstore.version import Version

        with Store(self.root, "r") as store:  # with caches of its own: everything comes from the packs
            store.resolver.add(records)
            yield Version(store, row)

    def _summary(self, scanned: ScannedVersion, objects: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
        """Counts, depth, restore cost as a multiple of a full one, and whether the version needs no other."""
        unique = set(objects)
        work, full = restore_work(self.reader, unique, [file.layout for file in scanned.files])
        depth = max((self.reader.depth(*item) for item in unique), default=0)
        return {
            "original_bytes": scanned.size,
            "elements": sum(unit.count for unit in scanned.units),
            "tensors": sum(len(file.layout.tensors) for file in scanned.files),
            "depth": depth,
            "cost": relative_cost(work, full),
            "base": depth == 0,
        }

    def _blob(self, name: str, data: bytes, blobs: dict[str, bytes], parent: tuple[BlobRef, str] | None) -> BlobRef:
        """Keep `data` under `name`, the parent's where it is the same, packed against the parent's where that pays."""
        before = None if parent is None else self._blob_before(*parent)
        if before is not None:
            ref, value, reference, against = before
            if value == data:
                return ref
            packed = compress_against(data, against)
            if len(packed) <= _SMALL_BLOB or len(packed) <= _WORTH_A_DELTA * len(compress_against(data, None)):
                blobs[name] = packed
                return BlobRef(name, None, reference)
        blobs[name] = compress_against(data, None)
        return BlobRef(name)

    def _blob_before(self, blob: BlobRef, pack: str) -> tuple[BlobRef, bytes, BlobRef, bytes] | None:
        """A parent's blob and what its successor is packed against, each as (place, bytes); None where lost."""
        ref = blob.within(pack)
        reference = ref if ref.against is None else ref.against
        # Of a damaged pack parts may still be read, and yet nothing may be stored against it.
        if not self.catalog.has_packs(name for name in (ref.pack, reference.pack) if name is not None):
            return None
        try:
            return ref, self.resolver.blob(ref, pack), reference, self.resolver.blob(reference, pack)
        except IntegrityError:
            return None


@dataclass(frozen=True, slots=True)
class _Job:
    """An object to be encoded: its content id, what is known of it, and how it will be stored."""

    content: str
    estimate: Estimate
    choice: Choice


class _Objects:
    """The objects of a version that the store does not hold yet, window by window.

    Attributes
    ----------
    known
        What is stored, by content id: what the store held before, to begin with.
    """

    def __init__(self, reader: ObjectReader, resolver: CatalogResolver, scanned: ScannedVersion) -> None:
        self.known: dict[str, Stored] = {}
        self._reader = reader
        self._resolver = resolver
        self._scanned = scanned

    def hashed(self, estimator: Estimator, budget: Budget) -> Iterator[Window]:
        """Of a version whose content ids are all known."""
        scanned = self._scanned
        self._look_up(scanned.contents, budget)
        todo: dict[str, Unit] = {}
        for unit, content in zip(scanned.units, scanned.contents, strict=True):
            if content in self.known:
                continue
            # Of units with the same content one that stays exact speaks for all.
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
        """Of a version that is read while it is stored, none of whose objects is coarse."""
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
        """Find what the store holds, and take note of what restoring that costs."""
        for content, lattice in self._resolver.known(contents).items():
            self.known[content] = Stored(lattice, content)
            full = self._resolver.lattice(lattice).full_work
            budget.add(cost(full), cost(self._reader.work(lattice, content)))


def _batches(encoded: Iterable[tuple[_Job, Encoded]]) -> Iterator[list[tuple[_Job, Encoded]]]:
    """Encoded objects in groups of some bytes: the catalog is asked for many at once, and writing begins early."""
    batch: list[tuple[_Job, Encoded]] = []
    filled = 0
    for job, layers in encoded:
        batch.append((job, layers))
        filled += job.estimate.unit.nbytes
        if filled >= _BATCH:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def _file_before(document: VersionDocument, path: str, *, single: bool) -> FileEntry | None:
    if single:
        return None if document.is_directory else document.files[0]
    return next((file for file in document.files if file.path == path), None)
