"""Thin: replaces the exact values of versions by coarse ones, and re-encodes the objects stored against them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckstore.codecs.lattice import STEP_RANGE
from ckstore.commit.change import Change
from ckstore.commit.costs import own_bytes, present_costs, update_costs
from ckstore.encoding.budget import BUDGET
from ckstore.encoding.casts import Casts
from ckstore.encoding.estimate import Encoded, Estimate, Parent
from ckstore.encoding.estimator import Estimator
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.reencode import without_lost
from ckstore.errors import ConflictError, IntegrityError, NotFoundError
from ckstore.gc.kept import present_form
from ckstore.lineage.cost import cost
from ckstore.lineage.planner import Choice
from ckstore.objects.documents import CoarseFacts, CoarseUnit, Deviation, VersionDocument
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Record
from ckstore.objects.restore_cost import relative_cost
from ckstore.policy import Policy
from ckstore.reading.deviations import is_moment
from ckstore.reading.stored_version import StoredVersion
from ckstore.reading.values import StoredValues
from ckstore.repository import Repository
from ckstore.runtime.threads import batches, in_order, worker_count
from ckstore.scanning.hashing import WINDOW
from ckstore.storage import durable
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackWriter
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.root import PACKS
from ckstore.storage.rows import plain_row
from ckstore.writing.claims import Claims
from ckstore.writing.parents import parents_of
from ckstore.writing.rebase import within_budget
from ckstore.writing.storing import version_budget

if TYPE_CHECKING:
    from ckstore.repository import Repository


@contextmanager
def scratch_packs(repository: Repository, *, dry_run: bool) -> Iterator[ScratchPacks | None]:
    """Yield the packs of a dry run and delete them afterwards; yield None otherwise."""
    if not dry_run:
        yield None
        return
    with TemporaryDirectory(prefix="ckstore-") as scratch, closing(ScratchPacks(repository, Path(scratch))) as blocks:
        yield blocks


class ScratchPacks:
    """The packs of a store, together with those of a dry run in another directory."""

    def __init__(self, repository: Repository, scratch: Path) -> None:
        self._repository = repository
        self.path = scratch
        self.read_price = repository.packs.read_price
        (scratch / PACKS).mkdir()
        self._scratch = PackReader.of(scratch)
        self._names: set[str] = set()

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of a pack."""
        return self._reader(pack).pread(pack, offset, length)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a pack from `offset` on."""
        self._reader(pack).read_into(pack, offset, target)

    def _reader(self, pack: str) -> PackReader:
        return self._scratch if pack in self._names else self._repository.packs

    def keep(self, writer: ObjectWriter, fresh: Sequence[Record]) -> None:
        """Make the new objects of a thinned version known: its child's are stored against them."""
        packs, _ = writer.finish(None, {})
        self._names |= {pack.name for pack in packs}
        wanted = {record.id for record in fresh}
        self._repository.resolver.add(record for record in writer.placed(packs) if record.id in wanted)

    def close(self) -> None:
        """Close the packs of the dry run."""
        self._scratch.close()


@dataclass(frozen=True, slots=True)
class Thinned:
    """One version whose exact values were dropped; after a dry run, would be.

    Attributes
    ----------
    version
        Its row, as before the thinning.
    max_abs
        Largest absolute error of any element.
    relative
        Largest relative error of any tensor: root mean square of its errors, as a fraction of that of its values.
    weights
        The same for tensors that are not optimiser moments; 0 if all of them stay exact.
    """

    version: VersionRow
    max_abs: float
    relative: float
    weights: float


@dataclass(slots=True)
class ThinReport:
    """Result of a thinning, or a prediction.

    Attributes
    ----------
    versions
        The thinned versions.
    skipped
        Numbers of versions without exact values to drop.
    reanchored
        Number of objects of other versions that were stored again, without dropped bases.
    freed
        Bytes that `gc` can free in addition.
    added
        Bytes that were written.

    Examples
    --------
    >>> [thinned] = store.thin("gpt@100", dry_run=True).versions
    >>> thinned.version
    <ckstore.VersionRow 1 gpt@100>
    """

    versions: list[Thinned] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    reanchored: int = 0
    freed: int = 0
    added: int = 0


def thin(
    repository: Repository,
    rows: Sequence[VersionRow],
    policy: Policy,
    *,
    dry_run: bool = False,
    may_return: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ThinReport:
    """Replace the exact values of versions by coarse ones of a policy's fidelity, each in its own commit.

    Coarse objects are those of a coarse ingest, planned within the default restore budget. Statistics and counters
    stay exact. If an object of another version is stored against a dropped one, the same commit stores it against
    another base. Versions that exceed the budget for it are rebased. If they `may_return`, `gc` keeps the exact values
    for a time, for `undo`. A `dry_run` does everything except the commit.
    `progress` is called with numbers of bytes of processed objects; an exception that it raises stops between two
    commits.

    Raises
    ------
    ConflictError
        An exact version is tagged, or a version is hot: encode it first.
    IntegrityError
        A version, or an object stored against it, is damaged. If an object is missing, no version was thinned. If
        a chunk fails to decode, the versions before that one were thinned.
    NotFoundError
        A version was forgotten since.
    """
    while True:
        hot = _hot(repository)
        try:
            began = durable.timestamp() if may_return else None
            report, costs = _thin(repository, rows, policy, dry_run=dry_run, began=began, progress=progress)
            break
        except IntegrityError:
            if not dry_run or _hot(repository) >= hot:
                raise
            repository.resolver.forget()  # A dry run has no lease: others may encode a version while it is read.
    for number, before in costs.items():
        # Objects of other versions that were stored again are smaller, not cheaper.
        with suppress(NotFoundError):  # It was forgotten since.
            within_budget(repository, repository.catalog.version(number), max(BUDGET, before))
    return report


def make_exact(repository: Repository, before: VersionRow, sequence: int) -> VersionRow:
    """Give a thinned version the objects that it had `before` again; return its row.

    `sequence` is the number of the log's record of the thinning. Raise `NotFoundError` if the version is gone,
    `ConflictError` if an object is.
    """
    repository.resolver.forget()  # A collection may have moved objects since.
    catalog, before = repository.catalog, present_form(repository, before)
    row = catalog.resolve(before.uid)
    version = StoredVersion(repository, before)
    with PackWriter(repository.path, "encoded") as pack:
        writer = ObjectWriter(pack)
        document = replace(version.document.elsewhere(before.pack), number=row.number)
        document = replace(document, summary=_summary(version, document, writer))
        with Change(repository, writer) as change:
            change.finish(document, again=True)
            undone = {"versions": [row.number], "uids": [row.uid], "undone": sequence}
            change.commit_again({"change": "undo", **undone}, row)
    return catalog.version(row.number)


def _summary(version: StoredVersion, document: VersionDocument, writer: ObjectWriter) -> dict[str, object]:
    """Return the summary of a version with the objects of another document, some of them new."""
    objects = set(document.objects)
    cost, depth = relative_cost(version.repository.reader, objects, version.layout.files)
    written = {record.id: record.nbytes for record in writer.encoded_records if record.id in objects}
    stored = sum(written.values()) + own_bytes(version, objects - written.keys())
    return {**document.summary, "cost": cost, "depth": depth, "base": depth == 0, "stored_bytes": stored}


def _hot(repository: Repository) -> set[str]:
    return {row.uid for row in repository.catalog.hot()}


def _thin(
    repository: Repository,
    rows: Sequence[VersionRow],
    policy: Policy,
    *,
    dry_run: bool,
    began: str | None,
    progress: Callable[[int], None] | None,
) -> tuple[ThinReport, Mapping[int, float]]:
    """Return the report, and the former costs of the versions whose costs may have changed, by number."""
    report = ThinReport()
    costs: dict[int, float] = {}
    moved: set[str] = set()
    repository.catalog.check_untagged(row.number for row in rows if row.fidelity == "exact")
    lease = nullcontext() if dry_run else repository.catalog.lease("thin")
    with lease, scratch_packs(repository, dry_run=dry_run) as blocks:
        repository.resolver.forget()  # Another process may have encoded raw objects since.
        left = sorted({row.number for row in rows})
        try:
            while left:
                chosen = _exact_versions(repository, left, report, dry_run=dry_run)
                claims = Claims(repository, {row.number for row in chosen})
                left = _thin_all(
                    _Batch(repository, policy, claims, report, blocks, began, progress, costs, moved), chosen
                )
        finally:
            repository.resolver.forget()
            if not dry_run:
                update_costs(repository, moved)  # Other versions' costs changed; their contents did not.
    report.skipped.sort()
    return report, costs


def _exact_versions(
    repository: Repository, numbers: Sequence[int], report: ThinReport, *, dry_run: bool
) -> list[VersionRow]:
    """Return the present rows of the exact versions; note the others in the report."""
    chosen = []
    for number in numbers:
        # Read the row under the lease: others may have changed or moved the version before.
        row = repository.catalog.version(number)
        if row.hot and not dry_run:
            raise ConflictError(f"Version {number} is not encoded yet; run `ckstore encode {number}` first.")
        if row.fidelity == "exact":
            StoredVersion(repository, row).check_present()  # Before any version is thinned.
            chosen.append(row)
        else:
            report.skipped.append(number)
    return chosen


def _thin_all(batch: _Batch, rows: Sequence[VersionRow]) -> list[int]:
    """Thin versions until another process changed one or freed objects; return the numbers of the remaining ones."""
    catalog = batch.repository.catalog
    for place, row in enumerate(rows):
        collected = catalog.collected()
        try:
            _Thinning(batch, row).run()
        except ConflictError:
            # Another process has thinned the version or dropped tensors of it, or freed coarse objects that an undone
            # thinning had left: plan the rest again.
            batch.repository.resolver.forget()
            if catalog.version(row.number).described == row.described and catalog.collected() == collected:
                raise
            return [left.number for left in rows[place:]]
    return []


def may_have_any(version: StoredVersion, going: Collection[int] = ()) -> bool:
    """Return whether a version may have exact values to drop, except in the units `going`, by dtypes and roles alone.

    Values that are not finite stay exact in any case; only reading finds them.
    """
    return any(
        number not in going
        and unit.role != "other"
        and version.layout.files[unit.members[0].file].extents[unit.members[0].extent].dtype in STEP_RANGE
        for number, unit in enumerate(version.layout.units)
    )


class _Batch:
    """Shared state of the thinnings of one call.

    `reader` decodes objects of the store and of the dry run. `objects` are the new objects of thinned versions, by
    number, with their coarse facts. `costs` are the former ones of all changed versions; `moved`, the objects of others
    that were stored again. `began` is the time of the call whose versions `undo` brings back together, or None.
    """

    def __init__(
        self,
        repository: Repository,
        policy: Policy,
        claims: Claims,
        report: ThinReport,
        blocks: ScratchPacks | None,
        began: str | None,
        progress: Callable[[int], None] | None,
        costs: dict[int, float],
        moved: set[str],
    ) -> None:
        self.repository = repository
        self.policy = policy
        self.costs = costs
        self.moved = moved
        self.claims = claims
        self.report = report
        self.blocks = blocks
        self.began = began
        self.progress = progress
        self.reader = repository.reader if blocks is None else ObjectReader(repository.resolver, blocks)
        self.objects: dict[int, tuple[Sequence[str], dict[int, CoarseUnit]]] = {}


class _Thinning:
    """The thinning of one version; `moments` are the numbers of its coarse units that are not weights."""

    def __init__(self, batch: _Batch, row: VersionRow) -> None:
        self.batch = batch
        self.repository = batch.repository
        self.row = row
        self.version = StoredVersion(batch.repository, row)
        self.moments: set[int] = set()

    def run(self) -> None:
        """Write the new objects and commit them."""
        place = self.repository.path if self.batch.blocks is None else self.batch.blocks.path
        with PackWriter(place, "encoded") as pack:
            writer = ObjectWriter(pack)
            objects, facts = self._coarse_objects(writer)
            fresh = writer.encoded_records[:]
            remaining = {identity for unit, identity in enumerate(objects) if unit not in facts}
            lost, affected = self.batch.claims.give_up(set(self.version.document.objects), remaining)
            self._store_again(affected, writer)
            resolver = self.repository.resolver
            freed = sum(resolver.record(identity).nbytes for identity in lost | affected)
            if facts or affected:
                if self.batch.blocks is None:
                    self._commit(writer, objects, facts, affected)
                else:
                    self.batch.blocks.keep(writer, fresh)
                self.batch.objects[self.row.number] = objects, facts
            self._note(facts, freed, len(affected), writer)

    def _coarse_objects(self, writer: ObjectWriter) -> tuple[list[str], dict[int, CoarseUnit]]:
        """Write the version's coarse objects; return all its objects, and the facts of the coarse ones."""
        reader, units = self.batch.reader, self.version.layout.units
        parents = self._parents()
        values = StoredValues(self.version)
        casts = Casts(values)
        estimator = Estimator(reader, values, self.batch.policy, parents, casts=casts)
        size = sum(unit.nbytes for unit in units)
        budget = version_budget(reader, self.version.layout.files, size, parents.values(), BUDGET)
        objects = list(self.version.document.objects)
        facts: dict[int, CoarseUnit] = {}
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            for groups in batches(casts.planned(units), lambda group: sum(units[n].nbytes for n in group), WINDOW):
                window = [number for group in groups for number in group]
                estimated = pool.map(estimator.coarse_estimate, [units[number] for number in window])
                estimates = dict(zip(window, estimated, strict=True))
                coarse = {unit: estimate for unit, estimate in estimates.items() if estimate is not None}
                for unit in estimates.keys() - coarse.keys():
                    record = reader.resolver.record(objects[unit])
                    budget.add(record.nbytes_of_values, cost(record.full_work), cost(reader.chains.work(record)))
                choices = budget.choose(list(coarse.values()))
                todo = list(zip(coarse.items(), choices, strict=True))

                def encoded(item: tuple[tuple[int, Estimate], Choice]) -> Encoded:
                    (unit, estimate), choice = item
                    return estimator.encode(objects[unit], estimate, choice)

                done = in_order(pool, encoded, todo, worker_count() + 1)
                for ((unit, _), _), made in zip(todo, done, strict=True):
                    if self.repository.resolver.find(made.record.id) is None:
                        writer.put(made)
                    assert made.facts is not None
                    objects[unit], facts[unit] = made.record.id, made.facts
                    if is_moment(units[unit], made.record):
                        self.moments.add(unit)
                if self.batch.progress is not None:
                    self.batch.progress(sum(units[unit].nbytes for unit in window))
        return objects, dict(sorted(facts.items()))

    def _store_again(self, identities: set[str], writer: ObjectWriter) -> None:
        """Re-encode objects whose bases were dropped."""
        reader = self.repository.reader
        todo = [reader.resolver.record(identity) for identity in sorted(identities)]
        kept = self.batch.claims
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            for again in in_order(pool, lambda record: without_lost(reader, record, kept), todo, worker_count() + 1):
                writer.put(again)

    def _parents(self) -> dict[str, Parent]:
        """Return the parent version's objects, after its own thinning, by key and signature."""
        if self.row.parent is None:
            return {}
        parent = self.repository.catalog.version(self.row.parent)
        if parent.hot:
            return {}  # Its objects are raw, and its encoding deletes them.
        return parents_of(self.repository, parent, coarse=True, thinned=self.batch.objects)

    def _note(self, facts: dict[int, CoarseUnit], freed: int, reanchored: int, writer: ObjectWriter) -> None:
        """Add this version to the report."""
        report = self.batch.report
        if facts:
            deviations: list[Deviation] = [item for off in facts.values() for item in off.deviations]
            weights = [
                item.relative for number, off in facts.items() if number not in self.moments for item in off.deviations
            ]
            report.versions.append(
                Thinned(
                    self.row,
                    max(item.max_abs for item in deviations),
                    max(item.relative for item in deviations),
                    max(weights, default=0.0),
                )
            )
        else:
            report.skipped.append(self.row.number)
        report.reanchored += reanchored
        report.freed += freed
        report.added += sum(record.nbytes for record in writer.encoded_records)

    def _commit(
        self, writer: ObjectWriter, objects: list[str], facts: dict[int, CoarseUnit], affected: set[str]
    ) -> None:
        with Change(self.repository, writer) as change:
            change.finish(self._document(writer, objects, facts) if facts else None, again=True)
            # The new document has the costs of this version.
            numbers = self.batch.claims.users(affected) - ({self.row.number} if facts else set())
            rows = self._rows(numbers)
            costs = present_costs(self.repository, rows)
            for row in (self.row, *rows):
                self.batch.costs.setdefault(row.number, row.cost)
            self.batch.moved |= affected
            record = {"change": "thin", "version": self.row.number}
            if facts and self.batch.began is not None:
                record |= {"before": plain_row(self.row), "began": self.batch.began}
            change.commit_again(record, self.row, untagged=bool(facts), costs=costs)
        self.batch.claims.stored_again(affected)

    def _rows(self, numbers: Collection[int]) -> list[VersionRow]:
        found = []
        for number in sorted(numbers):
            with suppress(NotFoundError):  # It was forgotten since.
                found.append(self.repository.catalog.version(number))
        return found

    def _document(self, writer: ObjectWriter, objects: list[str], facts: dict[int, CoarseUnit]) -> VersionDocument:
        """Return the version's new document."""
        policy = self.batch.policy
        document = replace(
            self.version.document.elsewhere(self.row.pack),
            fidelity="coarse",
            objects=tuple(objects),
            hot=None,
            coarse=CoarseFacts(policy.scheme, {"thinned": True, **policy.parameters()}, facts),
        )
        return replace(document, summary=_summary(self.version, document, writer))
