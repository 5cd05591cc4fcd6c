"""Thin: versions give up their exact layers, and what others had stored against these is stored anew."""

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
from ckstore.operations.claims import Claims
from ckstore.operations.commit import Change
from ckstore.operations.costs import present_costs, write_costs
from ckstore.operations.dry_run import ScratchPacks, scratch_packs
from ckstore.policy import Policy
from ckstore.reading.stored_version import StoredVersion
from ckstore.reading.values import StoredValues
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackWriter

if TYPE_CHECKING:
    from ckstore.repository import Repository


@dataclass(frozen=True, slots=True)
class Thinned:
    """One version that gave up its exact layers, or would.

    Attributes
    ----------
    version
        Its row, as it was before.
    max_abs
        The largest error of any element.
    relative
        The largest root mean square of a tensor's errors, as a part of the tensor's own.
    weights
        The same of tensors that are no moments; 0 where all of these stay exact.
    """

    version: VersionRow
    max_abs: float
    relative: float
    weights: float


@dataclass(slots=True)
class ThinReport:
    """What a thinning did or would do; sizes in bytes.

    Attributes
    ----------
    versions
        Those that gave up exact layers.
    skipped
        Numbers of versions that had none to give up.
    reanchored
        Objects of other versions that were stored anew, because they were stored against what is given up.
    freed
        What `gc` can free now, beyond what it could before.
    added
        What was written: coarse layers of objects that had none, and what was stored anew.
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
    """Let versions give up their exact layers, each in a commit of its own.

    Linear lattices keep the integers that they have. Moments and floats of 16 bits, which have been exact by
    themselves, get coarse layers as in a coarse ingest. Norms, biases and counters stay exact. Objects of other
    versions that are stored against what goes are stored against something else in the same commit.

    Parameters
    ----------
    rows
        The versions.
    policy
        How faithful coarse layers that are made now are.
    dry_run
        Do all but commit.
    progress
        Called with numbers of bytes of objects that are done; what it raises ends the thinning between two commits.

    Raises
    ------
    ConflictError
        A version that would lose its exact layers is tagged, or a version is hot: it is to be compacted first.
    IntegrityError
        A version is damaged, or what is stored against it. Where something is missing, none was thinned; where it is
        found when it is decoded, those before that version were.
    NotFoundError
        A version was forgotten meanwhile.
    """
    while True:
        hot = _hot(repository)
        try:
            return _thin(repository, rows, policy, dry_run=dry_run, progress=progress)
        except IntegrityError:
            if not dry_run or _hot(repository) >= hot:
                raise
            repository.resolver.forget()  # Without a lease, others may compact a version while it is read.


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
                # What others restore to is what it was, but not what that costs: also of one that was killed before.
                write_costs(repository.catalog, present_costs(repository, repository.catalog.versions()))
    report.skipped.sort()
    return report


def _exact_versions(
    repository: Repository, numbers: Sequence[int], report: ThinReport, *, dry_run: bool
) -> list[VersionRow]:
    """Return the present rows of the versions that have exact layers; note the others in the report."""
    chosen = []
    for number in numbers:
        # As it is by now: others may have changed or moved it before the lease.
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
    """Thin versions; return the numbers of those that are left once others have changed one of them."""
    for place, row in enumerate(rows):
        try:
            _Thinning(batch, row).run()
        except ConflictError:
            # Another process has thinned it, or dropped tensors of it: what is left to do is planned again.
            batch.repository.resolver.forget()
            if batch.repository.catalog.version(row.number).described == row.described:
                raise
            return [left.number for left in rows[place:]]
    return []


def _check_present(repository: Repository, row: VersionRow) -> None:
    """Raise `IntegrityError` where a version lacks something, before another one is thinned; nothing is decoded."""
    version = StoredVersion(repository, row)
    for file in range(len(version.document.files)):
        version.skeleton(file)
    for item in version.document.objects:
        for record in repository.reader.records(*item):
            if record.end > repository.packs.size(record.pack):
                raise IntegrityError(f"Pack {record.pack} is too short; restore it from a copy.")


def may_have_any(version: StoredVersion, going: Collection[int] = ()) -> bool:
    """Whether a version may have exact layers to give up, units that are `going` apart: as far as dtypes and roles say.

    Values that are not finite stay exact nevertheless, which takes reading them.
    """
    return any(
        number not in going
        and unit.role != "other"
        and version.layout.files[unit.members[0].file].extents[unit.members[0].extent].dtype in STEP_RANGE
        for number, unit in enumerate(version.layout.units)
    )


class _Batch:
    """What the thinnings of one call share.

    Attributes
    ----------
    reader
        Decodes objects of the store, and those that a dry run has written.
    objects
        What versions that were thinned are made of from now on, by number, and what is recorded of it.
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
    """An object of a version that is thinned: what it is from now on, and what there is to write, if anything."""

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
        """Write what there is to write and commit it."""
        estimator = Estimator(self.batch.reader, StoredValues(self.version), self.batch.policy, self._parents())
        place = self.repository.path if self.batch.blocks is None else self.batch.blocks.path
        with PackWriter(place, "coarse") as coarse, PackWriter(place, "exact") as exact:
            writer = ObjectWriter(coarse, exact)
            objects, facts = self._coarse_objects(estimator, writer)
            fresh = writer.lattices[:]
            lost, concerned = self.batch.claims.give_up(set(self.version.document.objects), objects)
            self._store_anew(concerned, writer)
            freed = self._freed(lost | concerned)
            if facts or concerned:
                if self.batch.blocks is None:
                    self._commit(writer, objects, facts)
                else:
                    self.batch.blocks.keep(writer, fresh)
                self.batch.objects[self.row.number] = objects, facts
            self._note(facts, freed, len(concerned), writer)

    def _coarse_objects(self, estimator: Estimator, writer: ObjectWriter) -> tuple[list[Object], dict[int, CoarseUnit]]:
        """The objects that the version is made of from now on, and what is recorded of those that are not exact."""
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
        """What becomes of an object: it stays, keeps its integers alone, or gets a coarse layer to be written."""
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
        """What an object's lattice values are off its exact ones; None where it has to stay exact."""
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

    def _store_anew(self, items: set[Object], writer: ObjectWriter) -> None:
        """Write objects that are stored against something lost."""
        kept = self.batch.claims.contents
        todo = sorted(items, key=lambda item: (item[0], item[1] or ""))
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            done = in_order(pool, lambda item: reanchored(self.repository.reader, item, kept), todo, worker_count() + 1)
            for anew in done:
                writer.put(anew.content, anew.record, anew.parent, anew.layers, factor=anew.factor)

    def _parents(self) -> dict[tuple[str, str], ParentObject]:
        """The objects of the parent version by key and signature, as they are from now on."""
        if self.row.parent is None:
            return {}
        parent = StoredVersion(self.repository, self.repository.catalog.version(self.row.parent))
        before = {} if parent.document.coarse is None else parent.document.coarse.units
        objects, facts = self.batch.objects.get(self.row.parent, (parent.document.objects, before))
        if parent.row.hot:
            return {}  # Its objects are raw, and go.
        coarse = self._nearest_coarse(parent.row)
        found = parent_objects(parent.layout.units, objects, facts)
        return {key: replace(item, coarse=coarse.get(key)) for key, item in found.items()}

    def _nearest_coarse(self, row: VersionRow) -> dict[tuple[str, str], str]:
        """Lattice ids of the coarse objects of the nearest version from `row` on back that has any."""
        while row.fidelity == "exact" and row.number not in self.batch.objects:
            if row.parent is None:
                return {}
            row = self.repository.catalog.version(row.parent)
        version = StoredVersion(self.repository, row)
        try:
            objects, _ = self.batch.objects.get(row.number, (version.document.objects, {}))
            found = parent_objects(version.layout.units, objects, {})
        except IntegrityError:
            return {}  # It was damaged: nothing can be stored against it.
        return {key: item.lattice for key, item in found.items() if item.content is None}

    def _freed(self, superseded: set[Object]) -> int:
        """Return the bytes of layers that are lost or stored again."""
        total = 0
        for lattice, content in superseded:
            layer = self.repository.reader.exact_layer(lattice, content)
            total += self.repository.resolver.lattice(lattice).nbytes if layer is None else sum(layer.lengths)
        return total

    def _note(self, facts: dict[int, CoarseUnit], freed: int, anew: int, writer: ObjectWriter) -> None:
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
        report.reanchored += anew
        report.freed += freed
        report.added += sum(record.nbytes for record in writer.lattices)
        report.added += sum(sum(record.lengths) for record in writer.contents)

    def _commit(self, writer: ObjectWriter, objects: list[Object], facts: dict[int, CoarseUnit]) -> None:
        with Change(self.repository, writer) as change:
            if facts:
                change.foresee()
            change.finish(self._document(writer, objects, facts) if facts else None, again=True)
            change.commit({"change": "thin", "version": self.row.number}, before=self.row, untagged=bool(facts))

    def _document(self, writer: ObjectWriter, objects: list[Object], facts: dict[int, CoarseUnit]) -> VersionDocument:
        """What is said of the version from now on."""
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
        # Not those of the row's pack alone: after tensors were dropped that is another one.
        stored = sum(
            record.nbytes
            for record in records
            if record.id in written or resolver.manifest(record.pack).document["number"] == number
        )
        return {**document.summary, "cost": cost, "depth": depth, "base": depth == 0, "stored_bytes": stored}


def _has_integers(bits: Bits, dtype: str, integers: Integers) -> bool:
    """Whether the values of a chunk are finite and no further from 0 than integers reach."""
    from ckstore.kernels.lattice import MAX_INTEGER

    total, _, finite = statistics_of(bits, dtype)
    return bool(finite == bits.size and isfinite(total) and np.abs(integers).max(initial=0) < MAX_INTEGER)
