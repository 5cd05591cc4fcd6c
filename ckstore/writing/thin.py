"""Thin: drops the exact layers of versions, and re-encodes the objects that were stored against them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from ckstore.codecs.lattice import STEP_RANGE, Bits, Integers, statistics_of
from ckstore.commit.change import Change
from ckstore.commit.costs import present_costs, write_costs
from ckstore.encoding.comparison import Comparison
from ckstore.encoding.estimate import Encoded, Estimate
from ckstore.encoding.estimator import Estimator, ParentObject, parent_objects
from ckstore.encoding.reanchor import reanchored
from ckstore.encoding.writer import ObjectWriter
from ckstore.errors import ConflictError, IntegrityError
from ckstore.lineage.planner import Choice, plan
from ckstore.objects.documents import CoarseFacts, CoarseUnit, Deviation, Object, VersionDocument
from ckstore.objects.reader import ObjectReader
from ckstore.objects.restore_cost import relative_cost
from ckstore.objects.units import Unit
from ckstore.policy import Policy
from ckstore.reading.stored_version import StoredVersion
from ckstore.reading.values import StoredValues
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackWriter
from ckstore.writing.claims import Claims
from ckstore.writing.dry_run import ScratchPacks, scratch_packs

if TYPE_CHECKING:
    from ckstore.repository import Repository


@dataclass(frozen=True, slots=True)
class Thinned:
    """One version whose exact layers were dropped; after a dry run, would be.

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
    """Result of a thinning; after a dry run, its prediction. Sizes are in bytes.

    Attributes
    ----------
    versions
        The thinned versions.
    skipped
        Numbers of versions without exact layers to drop.
    reanchored
        Number of objects of other versions that were stored again: their bases were dropped.
    freed
        Bytes that `gc` can free in addition.
    added
        Bytes that were written: new coarse layers, and objects that were stored again.
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
    progress: Callable[[int], None] | None = None,
) -> ThinReport:
    """Drop the exact layers of versions, each in its own commit.

    Objects on linear lattices keep their integers. Moments and 16-bit floats get new coarse layers, as in a coarse
    ingest. Norms, biases and counters stay exact. If an object of another version is stored against a dropped layer,
    the same commit stores it against another base.

    Parameters
    ----------
    rows
        The versions.
    policy
        Fidelity of new coarse layers.
    dry_run
        Do everything except the commit.
    progress
        Called with numbers of bytes of processed objects. An exception that it raises stops between two commits.

    Raises
    ------
    ConflictError
        An exact version is tagged, or a version is hot: compact it first.
    IntegrityError
        A version, or an object stored against it, is damaged. If an object is missing, no version was thinned. If
        a chunk fails to decode, the versions before that one were thinned.
    NotFoundError
        A version was forgotten since.
    """
    while True:
        hot = _hot(repository)
        try:
            return _thin(repository, rows, policy, dry_run=dry_run, progress=progress)
        except IntegrityError:
            if not dry_run or _hot(repository) >= hot:
                raise
            repository.resolver.forget()  # A dry run has no lease: others may compact a version while it is read.


def _hot(repository: Repository) -> set[str]:
    return {row.uid for row in repository.catalog.versions() if row.hot}


def _thin(
    repository: Repository,
    rows: Sequence[VersionRow],
    policy: Policy,
    *,
    dry_run: bool,
    progress: Callable[[int], None] | None,
) -> ThinReport:
    report = ThinReport()
    repository.catalog.check_untagged(row.number for row in rows if row.fidelity == "exact")
    lease = nullcontext() if dry_run else repository.catalog.lease("thin")
    with lease, scratch_packs(repository, dry_run=dry_run) as blocks:
        left = sorted({row.number for row in rows})
        try:
            while left:
                chosen = _exact_versions(repository, left, report, dry_run=dry_run)
                claims = Claims(repository, {row.number for row in chosen})
                left = _thin_all(_Batch(repository, policy, claims, report, blocks, progress), chosen)
        finally:
            repository.resolver.forget()
            if not dry_run:
                # Other versions' costs changed, also those after a killed thinning; their contents did not.
                write_costs(repository.catalog, present_costs(repository, repository.catalog.versions()))
    report.skipped.sort()
    return report


def _exact_versions(
    repository: Repository, numbers: Sequence[int], report: ThinReport, *, dry_run: bool
) -> list[VersionRow]:
    """Return the present rows of the versions that have exact layers; note the others in the report."""
    chosen = []
    for number in numbers:
        # Read the row under the lease: others may have changed or moved the version before.
        row = repository.catalog.version(number)
        if row.hot and not dry_run:
            raise ConflictError(f"Version {number} is not encoded yet; run `ckstore compact {number}` first.")
        if row.fidelity == "exact":
            _check_present(repository, row)
            chosen.append(row)
        else:
            report.skipped.append(number)
    return chosen


def _thin_all(batch: _Batch, rows: Sequence[VersionRow]) -> list[int]:
    """Thin versions until one was changed by another process; return the numbers of the remaining ones."""
    for place, row in enumerate(rows):
        try:
            _Thinning(batch, row).run()
        except ConflictError:
            # Another process has thinned the version or dropped tensors of it: plan the rest again.
            batch.repository.resolver.forget()
            if batch.repository.catalog.version(row.number).described == row.described:
                raise
            return [left.number for left in rows[place:]]
    return []


def _check_present(repository: Repository, row: VersionRow) -> None:
    """Raise `IntegrityError` if parts of a version are missing, before any version is thinned; nothing is decoded."""
    version = StoredVersion(repository, row)
    for file in range(len(version.document.files)):
        version.skeleton(file)
    for item in version.document.objects:
        for record in repository.reader.records(*item):
            if record.end > repository.packs.size(record.pack):
                raise IntegrityError(f"Pack {record.pack} is too short; restore it from a copy.")


def may_have_any(version: StoredVersion, going: Collection[int] = ()) -> bool:
    """Return whether a version may have exact layers to drop, except in the units `going`, by dtypes and roles alone.

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

    Attributes
    ----------
    reader
        Decodes objects of the store and of the dry run.
    objects
        The new objects of thinned versions, by number, with their coarse facts.
    """

    def __init__(
        self,
        repository: Repository,
        policy: Policy,
        claims: Claims,
        report: ThinReport,
        blocks: ScratchPacks | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.repository = repository
        self.policy = policy
        self.claims = claims
        self.report = report
        self.blocks = blocks
        self.progress = progress
        self.reader = repository.reader if blocks is None else ObjectReader(repository.resolver, blocks)
        self.objects: dict[int, tuple[Sequence[Object], dict[int, CoarseUnit]]] = {}


@dataclass(frozen=True, slots=True)
class _Coarse:
    """An object of a thinned version in its new form, and its layers to write, if any."""

    content: str
    object: Object
    facts: CoarseUnit | None = None
    estimate: Estimate | None = None
    choice: Choice | None = None
    layers: Encoded | None = None


class _Thinning:
    """The thinning of one version."""

    def __init__(self, batch: _Batch, row: VersionRow) -> None:
        self.batch = batch
        self.repository = batch.repository
        self.row = row
        self.version = StoredVersion(batch.repository, row)

    def run(self) -> None:
        """Write the new objects and commit them."""
        estimator = Estimator(self.batch.reader, StoredValues(self.version), self.batch.policy, self._parents())
        place = self.repository.path if self.batch.blocks is None else self.batch.blocks.path
        with PackWriter(place, "coarse") as coarse, PackWriter(place, "exact") as exact:
            writer = ObjectWriter(coarse, exact)
            objects, facts = self._coarse_objects(estimator, writer)
            fresh = writer.lattices[:]
            lost, affected = self.batch.claims.give_up(set(self.version.document.objects), objects)
            self._store_again(affected, writer)
            freed = self._freed(lost | affected)
            if facts or affected:
                if self.batch.blocks is None:
                    self._commit(writer, objects, facts)
                else:
                    self.batch.blocks.keep(writer, fresh)
                self.batch.objects[self.row.number] = objects, facts
            self._note(facts, freed, len(affected), writer)

    def _coarse_objects(self, estimator: Estimator, writer: ObjectWriter) -> tuple[list[Object], dict[int, CoarseUnit]]:
        """Return the version's new objects, and the facts of the coarse ones."""
        result: list[Object] = []
        facts: dict[int, CoarseUnit] = {}
        numbers = range(len(self.version.layout.units))
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            coarse = partial(self._coarse_object, estimator)
            for number, made in enumerate(in_order(pool, coarse, numbers, worker_count() + 1)):
                if made.estimate is not None and made.choice is not None and made.layers is not None:
                    stored = self.repository.resolver.known_lattice(made.layers.identity) is not None
                    writer.add(made.content, made.estimate, made.choice, made.layers, stored=stored)
                result.append(made.object)
                if made.facts is not None:
                    facts[number] = made.facts
                if self.batch.progress is not None:
                    self.batch.progress(self.version.layout.units[number].nbytes)
        return result, facts

    def _coarse_object(self, estimator: Estimator, number: int) -> _Coarse:
        """Return the new form of an object: unchanged, its integers alone, or a new coarse layer."""
        unit, (lattice, content) = self.version.layout.units[number], self.version.document.objects[number]
        assert content is not None
        if self.repository.resolver.lattice(lattice).kind == "linear":
            off = self._facts(number, unit) if estimator.may_be_coarse(unit) else None
            return _Coarse(content, (lattice, content if off is None else None), off)
        estimate = estimator.coarse_estimate(unit)
        if estimate is None:
            return _Coarse(content, (lattice, content))
        choice = plan([estimate.candidates], float("inf"))[0]
        estimate, choice, layers = estimator.encode(content, estimate, choice)
        return _Coarse(content, (layers.identity, None), layers.facts, estimate, choice, layers)

    def _facts(self, number: int, unit: Unit) -> CoarseUnit | None:
        """Measure the errors of an object's lattice values; return None if it must stay exact."""
        lattice, content = self.version.document.objects[number]
        record = self.repository.resolver.lattice(lattice)
        assert content is not None
        comparison = Comparison(unit)
        reader = self.repository.reader
        for chunk in range(record.chunks):
            bits = reader.bits(content, chunk)
            if not _has_integers(bits, record.dtype, reader.integers(record, chunk)):
                return None
            comparison.add(bits, reader.values(record, chunk), record.linear)
        return comparison.result()

    def _store_again(self, items: set[Object], writer: ObjectWriter) -> None:
        """Re-encode objects whose bases were dropped."""
        kept = self.batch.claims.contents
        todo = sorted(items, key=lambda item: (item[0], item[1] or ""))
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            done = in_order(pool, lambda item: reanchored(self.repository.reader, item, kept), todo, worker_count() + 1)
            for again in done:
                writer.put(again.content, again.record, again.parent, again.layers, factor=again.factor)

    def _parents(self) -> dict[tuple[str, str], ParentObject]:
        """Return the parent version's objects, after its own thinning, by key and signature."""
        if self.row.parent is None:
            return {}
        parent = StoredVersion(self.repository, self.repository.catalog.version(self.row.parent))
        before = {} if parent.document.coarse is None else parent.document.coarse.units
        objects, facts = self.batch.objects.get(self.row.parent, (parent.document.objects, before))
        if parent.row.hot:
            return {}  # Its objects are raw, and its compaction deletes them.
        coarse = self._nearest_coarse(parent.row)
        found = parent_objects(parent.layout.units, objects, facts)
        return {key: replace(item, coarse=coarse.get(key)) for key, item in found.items()}

    def _nearest_coarse(self, row: VersionRow) -> dict[tuple[str, str], str]:
        """Return the lattice ids of the coarse objects in the nearest such version, from `row` backwards."""
        while row.fidelity == "exact" and row.number not in self.batch.objects:
            if row.parent is None:
                return {}
            row = self.repository.catalog.version(row.parent)
        version = StoredVersion(self.repository, row)
        try:
            objects, _ = self.batch.objects.get(row.number, (version.document.objects, {}))
            found = parent_objects(version.layout.units, objects, {})
        except IntegrityError:
            return {}  # Damaged: nothing can be stored against it.
        return {key: item.lattice for key, item in found.items() if item.content is None}

    def _freed(self, superseded: set[Object]) -> int:
        """Return the bytes of layers that are dropped or superseded."""
        total = 0
        for lattice, content in superseded:
            layer = self.repository.reader.exact_layer(lattice, content)
            total += self.repository.resolver.lattice(lattice).nbytes if layer is None else sum(layer.lengths)
        return total

    def _note(self, facts: dict[int, CoarseUnit], freed: int, reanchored: int, writer: ObjectWriter) -> None:
        """Add this version to the report."""
        report = self.batch.report
        if facts:
            deviations: list[Deviation] = [item for off in facts.values() for item in off.deviations]
            weights = [
                item.relative
                for number, off in facts.items()
                if self.version.layout.units[number].role in ("weight", "other")
                for item in off.deviations
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
        report.added += sum(record.nbytes for record in writer.lattices)
        report.added += sum(sum(record.lengths) for record in writer.contents)

    def _commit(self, writer: ObjectWriter, objects: list[Object], facts: dict[int, CoarseUnit]) -> None:
        with Change(self.repository, writer) as change:
            if facts:
                change.register_pending()
            change.finish(self._document(writer, objects, facts) if facts else None, again=True)
            change.commit({"change": "thin", "version": self.row.number}, before=self.row, untagged=bool(facts))

    def _document(self, writer: ObjectWriter, objects: list[Object], facts: dict[int, CoarseUnit]) -> VersionDocument:
        """Return the version's new document."""
        policy = self.batch.policy
        document = replace(
            self.version.document.elsewhere(self.row.pack),
            fidelity="coarse",
            objects=tuple(objects),
            hot=None,
            coarse=CoarseFacts(policy.scheme, {"thinned": True, **policy.parameters()}, facts),
        )
        return replace(document, summary=self._summary(document, writer))

    def _summary(self, document: VersionDocument, writer: ObjectWriter) -> dict[str, object]:
        objects = set(document.objects)
        cost, depth = relative_cost(self.repository.reader, objects, self.version.layout.files)
        written = {record.id for record in writer.lattices}
        records = [self.repository.resolver.lattice(lattice) for lattice in {lattice for lattice, _ in objects}]
        resolver, number = self.repository.resolver, self.row.number
        # By commit, not by the row's pack alone: dropping tensors gives the version another pack.
        stored = sum(
            record.nbytes
            for record in records
            if record.id in written or resolver.manifest(record.pack).document["number"] == number
        )
        return {**document.summary, "cost": cost, "depth": depth, "base": depth == 0, "stored_bytes": stored}


def _has_integers(bits: Bits, dtype: str, integers: Integers) -> bool:
    """Return whether a chunk's values are finite and within the range of the integers."""
    from ckstore.kernels.lattice import MAX_INTEGER

    total, _, finite = statistics_of(bits, dtype)
    return bool(finite == bits.size and isfinite(total) and np.abs(integers).max(initial=0) < MAX_INTEGER)
