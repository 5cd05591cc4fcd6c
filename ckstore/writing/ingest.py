"""Ingest: stores a checkpoint as the next version of a run.

request  = request_of(options)                 # checks the options
scanned  = open_source(source)                 # parses files or a state dict
stored   = store_objects(writer, ...)          # reads once; looks up, estimates, plans, encodes, writes
document = describe(stored, ...)               # the metadata of the version
Change.finish(document)                        # the packs are durable
Change.commit_version()                        # a trial is evaluated instead of committed
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from msgspec import structs

from ckstore.checking.verify import check_restores
from ckstore.commit.change import Change
from ckstore.commit.going_back import goes_back, marks_of
from ckstore.commit.naming import add_metrics
from ckstore.encoding.casts import has_casts
from ckstore.encoding.estimator import knows_sensitivity
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.lineage import search as settings_search
from ckstore.lineage.search import Found
from ckstore.objects.continuation import Cut
from ckstore.objects.likeness import bands_of
from ckstore.objects.reader import ObjectReader
from ckstore.policy import Policy
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.provenance import MADE, made, own_metrics
from ckstore.runtime.threads import in_turn
from ckstore.scanning.content_cuts import opaque_extents
from ckstore.scanning.hashing import hash_version, held_windows
from ckstore.scanning.inputs import open_source
from ckstore.scanning.metrics import metrics_inside
from ckstore.scanning.scanned import ScannedVersion
from ckstore.storage import reserve
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.durable import sweep_temporaries
from ckstore.storage.pack import PackWriter
from ckstore.storage.placements import RemovedError
from ckstore.storage.root import PACKS
from ckstore.writing.describe import describe
from ckstore.writing.encode import encoded
from ckstore.writing.existing import in_place_of, is_there
from ckstore.writing.gradients import Gradients
from ckstore.writing.parents import cuts_of, ends_of_runs, nearest_version, units_after
from ckstore.writing.ranks import Written
from ckstore.writing.rebase import within_budget
from ckstore.writing.request import AUTO, IngestOptions, Request, existing_of, named_parent, plain_metrics, request_of
from ckstore.writing.storing import Stored, all_windows, store_objects, store_raw
from ckstore.writing.tuning import Search, Trials, fall_of, last_choice, restored, search_space, weight

_log = logging.getLogger("ckstore")

Progress = Callable[[int], None]

_NO_FALL = "Run {} has no loss that falls among the metrics of its last versions, for `max_rework` to follow"

#: Last versions of a run whose metrics show how the loss falls.
_RECENT = 8

#: Bytes of an array's names and metadata in a pack; measured in `docs/decisions.md`.
_ENTRY = 310

#: The part of its bytes in full that the difference of a run's first version to an alike one may take.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Result of an ingest.

    Attributes
    ----------
    version
        The stored version's row.
    is_new
        False if the same content already existed at this run and step.
    note
        Sentences, which are logged, too: on a number in the source that looks like its step and is none, on a version
        that is exact although a coarse one was requested, and on the parent of a run's first version.

    Examples
    --------
    >>> store.ingest({"weight": np.ones(8)}, run="toy", step=1)
    IngestReport(version=<ckstore.VersionRow 4 toy@1>, is_new=True, note='')
    """

    version: VersionRow
    is_new: bool
    note: str = ""


def ingest(
    repository: Repository,
    source: str | os.PathLike[str] | Any,
    options: IngestOptions,
    progress: Progress | None = None,
    opened: Callable[[], None] | None = None,
    written: Written | None = None,
) -> IngestReport:
    """Store a checkpoint as the next version of a run; see `Store.ingest`. Once its files are open, call `opened`.

    With `written`, ranks have hashed the checkpoint and written its objects into packs, which a hot version adopts; it
    is perhaps kept instead of committed.
    """
    repository.require_writable()
    repository.catalog.refresh()
    if not repository.has_stored:
        with suppress(OSError):  # Files that a killed ingest left only take space.
            sweep_temporaries(repository.path / PACKS)
    request = request_of(repository.catalog, options)
    # An evaluation runs the caller's code, which may create garbage cycles.
    with (
        collection_seldom() if request.search is None else nullcontext(),
        reserve.kept(repository.path),
        closing(
            open_source(
                source,
                repository.path,
                force=request.force,
                on_unknown=options.on_unknown,
                allow_empty=options.allow_empty,
            )
        ) as scanned,
        nullcontext() if options.gradients is None else Gradients(options.gradients, repository.path) as gradients,
    ):
        if opened is not None:
            opened()
        if written is not None:
            written.note(scanned)
        if options.parent == AUTO and not scanned.is_hashed:
            hash_version(scanned, force=request.force, progress=progress)
        reads = [file.source.pread if written is None else written.sample for file in scanned.files]
        bands = bands_of(zip(reads, scanned.layouts, strict=True))
        request = replace(
            request,
            bands=bands,
            parent=None if written is None else written.after,
            source=scanned.name,
            gradients=gradients,
        )
        request, like = _with_parent(repository, options.parent, request, scanned, is_cut=written is not None)
        if options.parent == AUTO and request.parent is not None and written is None:
            _cut_again(repository, scanned, request.parent)
        report = _ingest(repository, scanned, request, progress, written)
    if report.is_new and (written is None or written.keep is None):
        report = IngestReport(within_budget(repository, report.version, request.budget), is_new=True)
    subject = scanned.name or f"Run {request.run}"
    notes = [note for note in (scanned.unused, _exact_note(repository, report, request)) if note]
    for note in notes:
        _log.warning("%s: %s", subject, note)
    if like is not None and report.is_new:
        notes.append(f"Against {like.name}, by likeness.")
        _log.info("%s: %s", subject, notes[-1])
    return replace(report, note=" ".join(notes))


def _with_parent(
    repository: Repository, named: int | str | None, request: Request, scanned: ScannedVersion, *, is_cut: bool
) -> tuple[Request, VersionRow | None]:
    """Return a request with step and parent, unless it has one; and the parent again if it was found by likeness."""
    step = scanned.step if request.step is None else request.step
    parent = request.parent or _parent(repository, named, request.run, step, scanned)
    like = None
    if named is None and parent is None and request.bands:
        alike = repository.catalog.alike(request.bands)
        if alike:
            parent = like = nearest_version(repository, scanned, alike, _WORTH, is_cut=is_cut)
    is_named = named not in (None, AUTO) or (parent is not None and parent.superseded)
    back = is_named and goes_back(repository.catalog, request.run, parent)
    return replace(request, step=step, parent=parent, goes_back=back), like


def tuned(repository: Repository, policy: Policy, run: str, wanted: Search) -> Policy:
    """Return a coarse policy with the settings that a search finds on the last version of a run."""
    catalog = repository.catalog
    row = catalog.highest(run)
    if row is None:
        raise NotFoundError(f"Run {run} has no version to search a setting with; ingest one first.")
    if row.fidelity != "exact":
        raise UsageError(f"Version {row.number}, the last of run {run}, is coarse; ingest an exact one first.")
    request = Request(run, row.step, metrics=row.metrics, policy=policy, search=wanted)
    if row.step is not None:
        request = replace(request, parent=catalog.below(run, row.step))
    if not wanted.has_tolerance(_fall(catalog, request)):
        raise UsageError(_NO_FALL.format(run) + "; log one, or limit the degradation.")
    with TemporaryDirectory(prefix="ckstore-") as scratch:
        path = restored(StoredVersion(repository, row), Path(scratch))
        with closing(open_source(path, repository.path, force=False)) as scanned, reserved(catalog) as (number, lease):
            try:
                hash_version(scanned, force=False)
                found = _Ingestion(repository, number, scanned, lease, None).best(request, wanted)
            finally:
                catalog.release_number(number)
                repository.resolver.forget()
    if found is None:
        raise UsageError(f"No lossy setting passed the evaluation of version {row.number}; the policy stays as it was.")
    return found.settings


def _exact_note(repository: Repository, report: IngestReport, request: Request) -> str:
    """Return a sentence on a version that is exact although a coarse one was requested; empty for others."""
    row = report.version
    if not request.policy.is_coarse or row.fidelity != "exact":
        return ""
    hot = repository.resolver.document(row).hot
    if hot is not None and hot.asked.is_coarse:
        return ""
    if not report.is_new:
        remedy = f"`ckstore thin {row.number}` makes it coarse"
        return f"Version {row.number} has this content exactly and keeps it; {remedy}."
    if request.search is not None:
        if not request.search.has_tolerance(_fall(repository.catalog, replace(request, metrics=row.metrics))):
            return f"{_NO_FALL.format(row.run)}, so version {row.number} is exact."
        return f"No lossy setting passed the evaluation, so version {row.number} is exact."
    return f"No tensor can be coarse under this policy, so version {row.number} is exact."


def _fall(catalog: Catalog, request: Request) -> float | None:
    """Return by how much the loss falls a step, in the metrics of the version and those below; None if unasked."""
    if request.search is None or request.search.max_rework is None:
        return None
    seen: list[tuple[int, Mapping[str, Any]]] = []
    step, metrics = request.step, request.metrics
    while step is not None and len(seen) < _RECENT:
        seen.append((step, metrics))
        row = catalog.below(request.run, step)
        step, metrics = (None, {}) if row is None else (row.step, row.metrics)
    return fall_of(seen)


def _parent(
    repository: Repository, spec: str | int | None, run: str, step: int | None, scanned: ScannedVersion
) -> VersionRow | None:
    if spec == AUTO:
        return nearest_version(repository, scanned, ends_of_runs(repository.catalog))
    return named_parent(repository.catalog, spec, run, step)


def _cut_again(repository: Repository, scanned: ScannedVersion, parent: VersionRow) -> None:
    """Have a hashed version read once more if its parent, which is known by now, cuts it otherwise."""
    files = [(scanned.prefix(file), file.layout) for file in scanned.files]
    if units_after(repository, parent, Cut(files, scanned.units), ()) != scanned.units:
        scanned.is_hashed = False
        for file in scanned.files:
            file.digests.clear()
            file.checksums.clear()


def _ingest(
    repository: Repository,
    scanned: ScannedVersion,
    request: Request,
    progress: Progress | None,
    written: Written | None,
) -> IngestReport:
    """Store a scanned version unless it exists. A new exact version is read once."""
    catalog = repository.catalog
    if request.parent is not None and written is None:
        scanned.continued = partial(units_after, repository, request.parent)
    if request.parent is not None and any(opaque_extents(layout) for layout in scanned.layouts):
        scanned.cuts_before = cuts_of(repository, request.parent)
    existing = None if written is not None and written.goes_back else existing_of(catalog, request)
    is_hot = request.is_hot
    whole = existing is not None or request.force or request.policy.is_coarse or request.search is not None
    if not (whole or is_hot or scanned.is_hashed):
        whole = has_casts([(file.source, file.layout) for file in scanned.files])  # Their ids are needed first.
    if whole and not scanned.is_hashed:
        hash_version(scanned, force=request.force, progress=progress)
    if existing is not None:
        if is_there(repository, existing, scanned, request):
            return IngestReport(add_metrics(repository, existing, request.metrics), is_new=False)
        if request.replace or not _supersedes(repository, request, existing):
            request = in_place_of(repository, existing, scanned, request)
    given = request.metrics
    request = _with_metrics(scanned, request)
    if request.parent is not None and not is_hot:
        request = replace(request, parent=encoded(repository, request.parent))
    number = committed = 0
    try:
        with ExitStack() as held:
            progress = in_turn(progress)
            windows = held.enter_context(all_windows(scanned, progress)) if is_hot else None
            if written is None:
                number, lease = held.enter_context(reserved(catalog))
            else:
                number, lease = written.number, written.lease
            committed = _Ingestion(repository, number, scanned, lease, progress, written).commit(request, windows)
    except _KeptError as kept:
        return IngestReport(kept.row, is_new=True)
    except _UnchangedError as unchanged:
        catalog.release_number(number)
        repository.resolver.forget()
        return IngestReport(add_metrics(repository, unchanged.existing, given), is_new=False)
    except BaseException as error:
        if number:
            catalog.release_number(number)
        repository.resolver.forget()
        # Another process may have stored the same content.
        other = existing_of(catalog, request) if existing is None and isinstance(error, ConflictError) else None
        if other is None or not is_there(repository, other, scanned, request):
            raise
        return IngestReport(add_metrics(repository, other, given), is_new=False)
    row = catalog.version(committed)
    repository.last_cut = row.uid, scanned.alone or scanned.units, scanned.units
    return IngestReport(row, is_new=True)


def _with_metrics(scanned: ScannedVersion, request: Request) -> Request:
    """Add the metrics inside the files, and the origin."""
    read = own_metrics(metrics_inside(scanned))
    values = plain_metrics({name: value for name, (value, _) in read.items()})
    places = {name: (values[name], place) for name, (_, place) in read.items()}
    origin = made()
    metrics = {**values, **({MADE: origin} if origin else {}), **request.metrics}
    return replace(request, metrics=metrics, read=places)


@contextmanager
def reserved(catalog: Catalog) -> Iterator[tuple[int, int]]:
    """Reserve a version number, and hold a lease during the block; yield both."""
    with ExitStack() as held:
        with catalog.transaction():  # Each commit waits for the disk: one commit for both.
            number = catalog.reserve_number()
            lease = held.enter_context(catalog.lease(f"ingest {number}"))
        yield number, lease


def _supersedes(repository: Repository, request: Request, existing: VersionRow) -> bool:
    """Return whether the version will supersede the existing one at its step."""
    if not request.goes_back or request.parent is None:
        return False
    marks = marks_of(repository.catalog, request.run, request.parent.number)
    return existing.number in {row.number for row in marks.superseded}


class _UnchangedError(Exception):
    """A version without a step has the content of an existing one of its run."""

    def __init__(self, existing: VersionRow) -> None:
        self.existing = existing


class _KeptError(Exception):
    """A version is not committed now, but later."""

    def __init__(self, row: VersionRow) -> None:
        self.row = row


class _Ingestion:
    """Stores one scanned version under one number."""

    def __init__(
        self,
        repository: Repository,
        number: int,
        scanned: ScannedVersion,
        lease: int,
        progress: Progress | None,
        written: Written | None = None,
    ) -> None:
        self._repository = repository
        self._written = written
        self._number = number
        self._lease = lease
        self._scanned = scanned
        self._progress = progress
        # The first file may be the only one that this process stores; later versions are likely to have successors.
        passing = bool(scanned.name) and not repository.has_stored
        self._reader: ObjectReader = repository.reader.in_passing() if passing else repository.reader
        repository.has_stored = True

    def commit(self, request: Request, windows: Iterable[list[int]] | None) -> int:
        """Write and commit the version as its policy asks for; return its number. A hot one has `windows`."""
        if request.search is not None:
            return self.store_best(request, request.search)
        if windows is not None:
            if committed := self.store_hot(request, windows):
                return committed
            # Coarse, of values that the store has encoded: nothing is left for the background.
            if request.parent is not None:
                request = replace(request, parent=encoded(self._repository, request.parent))
        return self.store(request)

    def store(self, request: Request, found: Mapping[str, float] = MappingProxyType({})) -> int:
        """Write and commit the version; `found` are the results of a search. Return the version's number."""
        with self._stored(request, self._progress, found) as (change, stored):
            return self._commit(change, request, stored)

    def store_hot(self, request: Request, windows: Iterable[list[int]]) -> int:
        """Write the version unencoded while it is read, and commit it; `encode` encodes it later. Return its number.

        Content of another hot version is shared, unless this version will be coarse: its encoding deletes its raw
        objects. If the other version becomes coarse before this one is committed, everything is written. Return 0 if
        the version will be coarse, and the store has encoded all its content: nothing would be hot.
        """
        try:
            return self._store_raw(request, windows, share=not request.policy.is_coarse)
        except RemovedError:
            return self._store_raw(request, [list(range(len(self._scanned.units)))], share=False)

    def _store_raw(self, request: Request, windows: Iterable[list[int]], *, share: bool) -> int:
        repository, scanned = self._repository, self._scanned
        with PackWriter(repository.path, "encoded") as encoded, PackWriter(repository.path, "raw") as raw:
            writer = ObjectWriter(encoded, raw)
            for pack, records in () if self._written is None else self._written.packs:
                writer.adopt(pack, records)
            stored = store_raw(writer, repository.resolver, scanned, windows, self._progress, share=share)
            is_hot = any(item.is_raw for item in stored.values())
            if request.policy.is_coarse and not is_hot:
                return 0
            with Change(repository, writer) as change:
                objects = [stored[content] for content in scanned.contents]
                document, blobs = describe(repository, self._number, scanned, request, objects, hot=is_hot)
                if self._written is not None:
                    document = structs.replace(document, created=self._written.created)
                change.finish(document, blobs)
                if self._written is not None and self._written.keep is not None:
                    raise _KeptError(change.keep(self._written.keep))
                return self._commit(change, request, stored)

    def store_best(self, request: Request, wanted: Search) -> int:
        """Store the version with the most aggressive tolerated setting, or exactly; return its number."""
        found = self.best(request, wanted)
        if found is None:
            return self.store(replace(request, policy=Policy()))
        facts = {"degradation": found.degradation, "evaluations": found.evaluations}
        return self.store(replace(request, policy=found.settings), facts)

    def best(self, request: Request, wanted: Search) -> Found[Policy] | None:
        """Return the most aggressive tolerated setting, or None. Trials are removed."""
        fall = _fall(self._repository.catalog, request)
        if not wanted.has_tolerance(fall):
            return None
        reference = wanted.reference(self._scanned)
        tolerance = wanted.tolerance(reference, fall)
        cube = search_space(request.policy, known=knows_sensitivity(self._scanned.units, request.gradients))
        before = request.parent  # A parent of another run was judged otherwise, perhaps.
        is_judged = before is not None and before.run == request.run
        parent = self._repository.resolver.document(before) if before is not None and is_judged else None
        sizes: dict[Policy, int] = {}

        def size(policy: Policy) -> float:
            """Write a trial under a policy; return its size, weighted for the comparison of settings."""
            if policy not in sizes:
                with self._stored(replace(request, policy=policy), None, trial=True) as (change, _):
                    sizes[policy] = _stored_bytes(change.writer)
            return weight(policy, sizes[policy])

        def written(policy: Policy, scratch: Path) -> Path:
            """Write a trial under a policy and restore it; return the path."""
            with self._stored(replace(request, policy=policy), None, trial=True) as (change, _):
                sizes[policy] = _stored_bytes(change.writer)
                with change.version() as version:
                    return restored(version, scratch)

        last = last_choice(parent, request.policy, cube)
        with Trials(wanted, reference, written) as trials:
            found = settings_search.search(trials.degradation, size, tolerance, cube, last, trials.schedule)
        return found if found.accepted else None

    @contextmanager
    def _stored(
        self,
        request: Request,
        progress: Progress | None,
        found: Mapping[str, float] = MappingProxyType({}),
        *,
        trial: bool = False,
    ) -> Iterator[tuple[Change, dict[str, Stored]]]:
        """Yield the version in finished packs, and its objects; those of a `trial` are never committed."""
        repository, scanned = self._repository, self._scanned
        with PackWriter(repository.path, "encoded") as pack:
            writer = ObjectWriter(pack)
            windows = None if scanned.is_hashed else held_windows(scanned, progress)
            stored = store_objects(repository, writer, self._reader, scanned, request, progress, windows)
            scanned.settle()
            with Change(repository, writer) as change:
                objects = [stored[content] for content in scanned.contents]
                document, blobs = describe(repository, self._number, scanned, request, objects, found)
                change.finish(document, blobs, trial=trial)
                yield change, stored

    def _commit(self, change: Change, request: Request, stored: Mapping[str, Stored]) -> int:
        """Verify the version if requested, and commit it; return its number.

        Raise `_UnchangedError` if it has no step, adds no object, and the run has its content already.
        """
        if request.step is None and not change.writer.records:
            for existing in self._repository.catalog.without_step(request.run, self._scanned.size):
                if is_there(self._repository, existing, self._scanned, request):
                    raise _UnchangedError(existing)
        if request.verify:
            with change.version() as version:
                check_restores(version, self._progress)
        needs = _needs(stored, change.writer)
        return change.commit_version(needs, self._lease, replaces=request.replace, heals=request.heals)


def _needs(stored: Mapping[str, Stored], writer: ObjectWriter) -> set[str]:
    """Return ids of the version's objects and of their bases."""
    bases = {record.base for record in writer.encoded_records if record.base is not None}
    return bases | {item.id for item in stored.values()}


def _stored_bytes(writer: ObjectWriter) -> int:
    """Return the bytes of a version's objects; trials differ in the times and names of their manifests."""
    return sum(record.nbytes + _ENTRY for record in writer.encoded_records)
