"""Thin: versions give up their exact layers, and what others had stored against these is stored anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ckstore.budget import relative_cost, restore_work
from ckstore.codecs.lattice import Bits, LinearLattice
from ckstore.deviation import CoarseUnit, Comparison, Deviation
from ckstore.documents import BlobRef, CoarseFacts, VersionDocument
from ckstore.estimator import Estimator, ParentObject
from ckstore.lineage.planner import plan
from ckstore.object_writer import ObjectWriter, remove_uncommitted, version_row
from ckstore.policy import Policy
from ckstore.reanchor import Anew, reanchored
from ckstore.rebase import present_costs, write_costs
from ckstore.storage import log
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackWriter
from ckstore.storage.root import PACKS
from ckstore.threads import in_order, worker_count
from ckstore.units import Unit
from ckstore.version import Version

if TYPE_CHECKING:
    from ckstore.store import Store

#: An object of a version: lattice id, and content id or None.
Object = tuple[str, str | None]


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
    """

    version: VersionRow
    max_abs: float
    relative: float


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


class _Values:
    """The exact values of a stored version, as an `Estimator` reads them."""

    def __init__(self, version: Version) -> None:
        self._version = version
        self._numbers = {unit.key: number for number, unit in enumerate(version.layout.units)}
        self.units = version.layout.units
        self.layouts = version.layout.files
        self.size = version.row.original_bytes

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Bits of the elements from `first` to before `last` of a unit."""
        parts = []
        for chunk in range(first // unit.chunk, -(-last // unit.chunk)):
            start = chunk * unit.chunk
            bits = self._version.chunk(self._numbers[unit.key], chunk)
            parts.append(bits[max(first - start, 0) : last - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def check(self, unit: Unit, bits: Bits) -> None:
        """Nothing: what is decoded was compared with its checksums."""


def thin(
    store: Store,
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
        Called with numbers of bytes of the versions that are done.
    """
    report = ThinReport()
    chosen = []
    for row in sorted(rows, key=lambda row: row.number):
        if row.fidelity == "exact":
            chosen.append(row)
        else:
            report.skipped.append(row.number)
    with nullcontext() if dry_run else store.catalog.lease("thin"), _place(store, dry_run=dry_run) as place:
        claims = _Claims(store, {row.number for row in chosen})
        for row in chosen:
            _Thinning(store, row, policy, claims, report).run(place, dry_run=dry_run)
            if progress is not None:
                progress(row.original_bytes)
        if report.versions and not dry_run:
            # What others restore is what it was, but not what that costs.
            store.resolver.forget()
            write_costs(store.catalog, present_costs(store, store.catalog.versions()))
    store.resolver.forget()
    return report


@contextmanager
def _place(store: Store, *, dry_run: bool) -> Iterator[Path]:
    """Where packs are written: the store, or what is removed again."""
    if not dry_run:
        yield store.path
        return
    with TemporaryDirectory(prefix="ckstore-") as scratch:
        (Path(scratch) / PACKS).mkdir()
        yield Path(scratch)


class _Claims:
    """Which exact objects versions claim that are not thinned, and which were given up so far."""

    def __init__(self, store: Store, thinned: set[int]) -> None:
        self._store = store
        self.objects: set[Object] = set()
        self.lost: set[Object] = set()
        for row in store.catalog.versions():
            if row.number not in thinned:
                self.objects |= set(Version(store, row).document.objects)

    def on(self, lost: set[str]) -> list[Object]:
        """The claimed objects that take one of the lost ones (content ids) to restore."""
        reader = self._store.reader
        found: list[Object] = []
        for lattice, content in sorted(self.objects, key=lambda item: (item[0], item[1] or "")):
            if content is not None and lost & {record.id for record in reader.records(lattice, content)}:
                found.append((lattice, content))
        return found


class _Thinning:
    """The thinning of one version."""

    def __init__(self, store: Store, row: VersionRow, policy: Policy, claims: _Claims, report: ThinReport) -> None:
        self.store = store
        self.row = row
        self.policy = policy
        self.claims = claims
        self.report = report
        self.version = Version(store, row)

    def run(self, place: Path, *, dry_run: bool) -> None:
        """Write what there is to write and commit it."""
        values = _Values(self.version)
        estimator = Estimator(self.store.reader, values, self.policy, self._parents())
        with PackWriter(place, "coarse") as coarse, PackWriter(place, "exact") as exact:
            writer = ObjectWriter(coarse, exact)
            objects, facts = self._coarse_objects(values, estimator, writer)
            if not facts:
                self.report.skipped.append(self.row.number)
                return
            claimed = {content for _, content in self.claims.objects} | {content for _, content in objects}
            lost = {item for item in self.version.document.objects if item[1] is not None and item[1] not in claimed}
            lost -= self.claims.lost
            self.claims.lost |= lost
            contents = {content for _, content in lost if content is not None}
            anew = self._anew(self.claims.on(contents), contents)
            for item in anew:
                writer.put(item.content, item.record, item.parent, item.layers, factor=item.factor)
            self._note(facts, lost, anew, writer)
            if not dry_run:
                self._commit(writer, objects, facts)

    def _coarse_objects(
        self, values: _Values, estimator: Estimator, writer: ObjectWriter
    ) -> tuple[list[Object], dict[int, CoarseUnit]]:
        """The objects that the version is made of from now on, and what is recorded of those that are not exact."""
        units, objects = self.version.layout.units, self.version.document.objects

        def coarse(number: int) -> tuple[Object, CoarseUnit | None, Callable[[], str] | None]:
            unit, (lattice, content) = units[number], objects[number]
            record = self.store.resolver.lattice(lattice)
            if content is None:
                before = self.version.document.coarse
                return objects[number], None if before is None else before.units.get(number), None
            if record.kind == "linear":
                return (lattice, None), self._facts(number, unit), None
            estimate = estimator.coarse_estimate(unit)
            if estimate is None:
                return objects[number], None, None
            choice = plan([estimate.candidates], float("inf"))[0]
            encoded = estimator.encode(content, estimate, choice)
            stored = self.store.resolver.known_lattice(encoded.identity) is not None

            def add() -> str:
                return writer.add(content, estimate, choice, encoded, stored=stored)

            return (encoded.identity, None), encoded.facts, add

        result: list[Object] = []
        facts: dict[int, CoarseUnit] = {}
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            done = in_order(pool, coarse, range(len(units)), worker_count() + 1)
            for number, (item, off, add) in enumerate(done):
                if add is not None:
                    add()
                result.append(item)
                if off is not None:
                    facts[number] = off
        return result, facts

    def _facts(self, number: int, unit: Unit) -> CoarseUnit:
        """What an object's lattice values are off its exact ones."""
        lattice, content = self.version.document.objects[number]
        record = self.store.resolver.lattice(lattice)
        assert content is not None
        comparison = Comparison(unit)
        grid = record.lattice
        for chunk in range(record.chunks):
            bits = self.store.reader.bits(content, chunk)
            decoded = self.store.reader.values(record, chunk)
            comparison.add(bits, decoded, grid if isinstance(grid, LinearLattice) else None)
        return comparison.result()

    def _anew(self, items: Sequence[Object], lost: set[str]) -> list[Anew]:
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            reader = self.store.reader
            kept = {content for _, content in self.claims.objects if content is not None}
            return list(in_order(pool, lambda item: reanchored(reader, item, lost, kept), items, worker_count() + 1))

    def _parents(self) -> dict[tuple[str, str], ParentObject]:
        """The objects of the parent version by key and signature, as it is stored now."""
        if self.row.parent is None:
            return {}
        parent = Version(self.store, self.store.catalog.version(self.row.parent))
        coarse = parent.document.coarse
        found = {}
        for number, (unit, (lattice, content)) in enumerate(
            zip(parent.layout.units, parent.document.objects, strict=True)
        ):
            off = None if coarse is None else coarse.units.get(number)
            item = ParentObject(lattice, content) if off is None else ParentObject(lattice, content, off.spread)
            found[unit.key, unit.signature] = item
        return found

    def _note(
        self, facts: dict[int, CoarseUnit], lost: set[Object], anew: Sequence[Anew], writer: ObjectWriter
    ) -> None:
        """Add this version to the report."""
        deviations: list[Deviation] = [item for off in facts.values() for item in off.deviations]
        relative = max((item.relative for item in deviations), default=0.0)
        self.report.versions.append(Thinned(self.row, max(item.max_abs for item in deviations), relative))
        self.report.reanchored += len(anew)
        for lattice, content in {*lost, *((item.record.id, item.content) for item in anew)}:
            layer = self.store.reader.exact_layer(lattice, content)
            record = self.store.resolver.lattice(lattice)
            self.report.freed += record.nbytes if layer is None else sum(layer.lengths)
        self.report.added += sum(record.nbytes for record in writer.lattices)
        self.report.added += sum(sum(record.lengths) for record in writer.contents)

    def _commit(self, writer: ObjectWriter, objects: list[Object], facts: dict[int, CoarseUnit]) -> None:
        store, before = self.store, self.version.document
        document = replace(
            _elsewhere(before, self.row.pack),
            number=self.row.number,
            fidelity="coarse",
            objects=tuple(objects),
            coarse=CoarseFacts(self.policy.scheme, {"thinned": True, **self.policy.parameters()}, facts),
        )
        try:
            document = replace(document, summary=self._summary(document, writer))
            packs, entry = writer.finish(document, {}, anew=True)
            store.resolver.add(writer.placed(packs))
            row = version_row(document, packs, entry)
            lattices, contents = writer.places(packs)
            with store.catalog.transaction():
                log.append(
                    store.path,
                    {"change": "thin", "version": self.row.number, "packs": [pack.name for pack in packs]},
                )
                store.catalog.add_packs(packs)
                store.catalog.move_lattices(lattices)
                store.catalog.move_contents(contents)
                store.catalog.replace_version(row, references=document.blob_packs())
        except BaseException:
            remove_uncommitted(store.path, store.catalog, store.resolver, writer.finished)
            raise
        finally:
            store.resolver.forget()

    def _summary(self, document: VersionDocument, writer: ObjectWriter) -> dict[str, object]:
        self.store.resolver.add(writer.records)
        objects = set(document.objects)
        work, full = restore_work(self.store.reader, objects, self.version.layout.files)
        depth = max((self.store.reader.depth(*item) for item in objects), default=0)
        written = {record.id for record in writer.lattices}
        records = [self.store.resolver.lattice(lattice) for lattice in {lattice for lattice, _ in objects}]
        stored = sum(record.nbytes for record in records if record.id in written or record.pack == self.row.pack)
        cost = {"cost": relative_cost(work, full), "depth": depth, "base": depth == 0}
        return {**document.summary, **cost, "stored_bytes": stored}


def _elsewhere(document: VersionDocument, pack: str) -> VersionDocument:
    """A document whose blobs are named from outside of its pack."""

    def named(ref: BlobRef) -> BlobRef:
        return ref.within(pack)

    files = tuple(replace(file, skeleton=named(file.skeleton)) for file in document.files)
    return replace(document, layout=named(document.layout), crcs=named(document.crcs), files=files)
