"""Gc: frees what no version needs: packs, parts of packs, and files that nothing refers to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from ckstore.errors import ConflictError, DiskFullError, LockedError
from ckstore.operations.commit import remove_uncommitted
from ckstore.operations.gc.plan import GcPlan, plan_for
from ckstore.operations.gc.reachability import PackContents
from ckstore.operations.gc.repack import Copy, repack
from ckstore.storage import durable, reserve, root
from ckstore.storage.pack import PackInfo

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.catalog import Placement, VersionRow

#: Seconds for which a file that nothing refers to must have been left untouched before it is removed.
GRACE = 3600.0

#: Seconds to wait for a moment in which nobody writes, and between two looks.
PATIENCE = 600.0
_PAUSE = 0.05

_PURPOSE = "gc"


@dataclass(slots=True)
class GcReport:
    """What was freed or would be.

    Attributes
    ----------
    bytes
        Bytes that the store takes less; of a dry run, what is garbage in the packs that would be written again.
    removed
        Packs of which nothing was needed.
    rewritten
        Packs that were written again without what nothing needs.
    files
        Packs that no commit knows, and temporary files, of processes that were killed.
    versions
        Versions, forgotten or replaced, whose manifests went.
    """

    bytes: int = 0
    removed: int = 0
    rewritten: int = 0
    files: int = 0
    versions: int = 0

    def add(self, other: GcReport) -> None:
        """Count what another run has freed as well."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def gc(
    repository: Repository, *, grace: float = GRACE, dry_run: bool = False, patience: float | None = None
) -> GcReport:
    """Free what no version needs.

    Ingests and rebases may go on meanwhile; the change itself waits for a moment in which nobody else writes. Where
    another `gc` is at work, it waits for that.

    Parameters
    ----------
    grace
        Seconds for which files that nothing refers to must have been left untouched.
    dry_run
        Change nothing, only say what would be freed.
    patience
        Seconds to wait for a moment in which nobody writes; ten minutes by default.

    Where the disk has no room for packs that are to be written again, these are left as they are.

    Raises
    ------
    IntegrityError
        Something is damaged that a present or a lost version may need; nothing was changed.
    LockedError
        Others wrote, or freed space, all the time.
    """
    if dry_run:
        return _expected(repository, plan_for(repository, grace), grace)
    with reserve.spent(repository.path), repository.catalog.lease(_PURPOSE) as lease:
        return _Collection(repository, grace, lease, PATIENCE if patience is None else patience).run()


class _Collection:
    """One run of gc.

    Packs that were written again for a plan which the next one takes over are not written twice.
    """

    def __init__(self, repository: Repository, grace: float, lease: int, patience: float) -> None:
        self._repository = repository
        self._grace = grace
        self._lease = lease
        self._deadline = time.monotonic() + patience
        # What an earlier run that was killed had written already is not added to the store.
        self._before = {info.name for info in repository.packs.list_packs()}
        # The copy of each pack, and what it was made for.
        self._copies: dict[str, tuple[Copy, tuple[Any, ...]]] = {}
        # Packs that this or another gc has counted as freed: of a remote store they are deleted later.
        self._told: set[str] = set()

    def run(self) -> GcReport:
        """Plan, copy and commit until nothing has changed in between."""
        try:
            report = self._collect(rewriting=True)
        except DiskFullError:
            # What is removed first makes room, and may be enough.
            report = GcReport()
            self._sweep(report)
            report.add(self._collect(rewriting=False))
            with suppress(DiskFullError):
                report.add(self._collect(rewriting=True))
        self._repository.resolver.notice_collection()
        swept = self._repository.packs.sweep(self._grace)
        _add_files(report, [nbytes for name, nbytes in swept.items() if name not in self._told])
        self._sweep(report)
        return report

    def _collect(self, *, rewriting: bool) -> GcReport:
        try:
            while True:
                self._wait()
                self._repository.catalog.refresh()
                plan = plan_for(self._repository, self._grace, [copy.pack for copy, _ in self._copies.values()])
                if not rewriting:
                    plan.rewritten = []
                self._copy(plan)
                try:
                    report = self._commit(plan)
                except ConflictError:  # Another mirror took a copy for something left over, and says that it is gone.
                    self._drop(list(self._copies))
                    report = None
                if report is not None:
                    return report
                if time.monotonic() > self._deadline:
                    raise self._busy()
        except BaseException:
            self._drop(list(self._copies))
            raise

    def _wait(self) -> None:
        while self._writer():
            if time.monotonic() > self._deadline:
                raise self._busy()
            time.sleep(_PAUSE)

    def _busy(self) -> LockedError:
        """What is said of the others: other machines hold no lease here, and are known by what they commit alone."""
        writer, last = self._writer(), self._repository.catalog.latest()
        if writer:
            known = f" (now: {writer})"
        elif last is not None:
            known = f" (last: version {last.number} of run {last.run}, {last.created})"
        else:
            known = ""
        return LockedError(f"Others write all the time{known}; free space when they are done.")

    def _writer(self) -> str | None:
        """What another process is doing that needs objects which no version refers to yet, or frees space itself."""
        claims = self._repository.catalog.leases()
        before = list(takewhile(lambda claim: claim.number != self._lease, claims))
        # Of two that free space, the one that began first goes first.
        others = [claim for claim in claims if claim.purpose != _PURPOSE or claim in before]
        return f"{others[0].purpose}, process {others[0].pid} on {others[0].host}" if others else None

    def _copy(self, plan: GcPlan) -> None:
        """Write packs again, and drop what was written for an earlier plan only."""
        wanted = {pack.name: _purpose(pack) for pack in plan.rewritten}
        self._drop([name for name, (_, purpose) in self._copies.items() if wanted.get(name) != purpose])
        for pack in plan.rewritten:
            if pack.name not in self._copies:
                self._copies[pack.name] = repack(self._repository, pack), wanted[pack.name]

    def _drop(self, names: Sequence[str]) -> None:
        copies = [self._copies.pop(name)[0].pack for name in names]
        remove_uncommitted(self._repository, copies)

    def _commit(self, plan: GcPlan) -> GcReport | None:
        """Make the change; None where what came since the plan needs what it takes away, or somebody writes."""
        catalog = self._repository.catalog
        copies: dict[str, Copy] = {}
        written = {copy.pack.name for copy, _ in self._copies.values()}
        going: list[str] = []
        self._repository.packs.publish(sorted(written))

        self._told = plan.told
        tries = count()

        def change() -> GcReport | None:
            # With the write lock held nobody can begin to write; whoever has begun holds a lease.
            late = next(tries) and time.monotonic() > self._deadline
            if late or self._writer() or not plan.holds(written):
                return None
            # What others have freed since is neither removed nor written again.
            known = {pack.name for pack in catalog.packs()}
            # A pack can be what another one is written as: both lie there after a crash. It stays as it is.
            copies.clear()
            copies.update(
                (name, copy) for name, (copy, _) in self._copies.items() if name in known and name not in written
            )
            removed = [pack.name for pack in plan.removed if pack.name in known and pack.name not in written]
            files = [info for info in plan.files if info.name not in written and info.name not in known]
            report = self._report(plan, removed, files, copies)
            if plan.is_empty:
                return report
            going[:] = [name for name in (*removed, *copies) if name not in written]
            record = {
                "written": sorted(copy.pack.name for copy in copies.values()),
                "removed": sorted({*going, *(info.name for info in files)}),
            }
            catalog.note({"change": "gc", **record, "versions": plan.gone(known)})
            # Before the commit: `recover` could bring a version back out of them that lacks what goes now.
            self._unlink(info.name for info in files)
            catalog.remove_lattices(plan.survey.dead_lattices)
            catalog.remove_contents(plan.survey.dead_contents)
            rows = catalog.versions() if going else []  # Else nothing of what they have added to the store goes.
            for name, copy in copies.items():
                self._move(plan.survey.packs[name], copy)
            catalog.remove_packs(going)
            self._write_sizes(rows, plan, copies)
            catalog.note_gone(record["removed"])
            self._told = {*plan.told, *record["removed"]}
            catalog.note_collected(durable.timestamp())
            return report

        report = catalog.commit(change)
        if report is None or plan.is_empty:
            return report
        self._drop([name for name in self._copies if name not in copies])
        self._copies.clear()
        # With the lock held once more: a `recover` that ran in between has taken them in again.
        with catalog.transaction():
            known = {pack.name for pack in catalog.packs()}
            self._unlink(name for name in going if name not in known)
        return report

    def _move(self, contents: PackContents, copy: Copy) -> None:
        """Let the catalog find in the copy what it found in the pack."""
        catalog = self._repository.catalog
        catalog.replace_pack(contents.name, copy.pack, copy.manifest)
        placed = catalog.contents_in if contents.kind == "exact" else catalog.lattices_in
        places: list[Placement] = [(number, copy.pack.name, copy.slots[slot]) for number, slot in placed(contents.name)]
        (catalog.move_contents if contents.kind == "exact" else catalog.move_lattices)(places)

    def _write_sizes(self, rows: Iterable[VersionRow], plan: GcPlan, copies: dict[str, Copy]) -> None:
        """Write into the catalog what each version has added to the store and is still there."""
        present = {pack.name for pack in self._repository.catalog.packs()}
        sizes = {
            pack.name: copies[pack.name].pack.bytes if pack.name in copies else pack.bytes
            for pack in plan.survey.packs.values()
            if pack.name in copies or pack.name in present
        }
        exact = {
            (pack.number, pack.created): sizes[pack.name]
            for pack in plan.survey.packs.values()
            if pack.kind != "coarse" and pack.name in sizes
        }
        for row in rows:
            if row.pack not in plan.survey.packs:
                continue  # It came since the plan, and nothing of it goes.
            pack = plan.survey.packs[row.pack]
            stored = sizes[pack.name] + exact.get((pack.number, pack.created), 0)
            if stored == row.stored_bytes or pack.stored_bytes is not None:
                continue
            # Unless it gave up its exact layers, and its layers stand in several packs.
            if "stored_bytes" not in self._repository.resolver.document(row).summary:
                self._repository.catalog.update_version(row.number, stored_bytes=stored)

    def _report(
        self, plan: GcPlan, removed: Sequence[str], files: Sequence[PackInfo], copies: dict[str, Copy]
    ) -> GcReport:
        packs = plan.survey.packs
        freed = sum(packs[name].bytes for name in (*removed, *copies)) + sum(info.bytes for info in files)
        freed -= sum(copy.pack.bytes for copy in copies.values() if copy.pack.name not in self._before)
        return GcReport(freed, len(removed), len(copies), len(files), len(plan.lost))

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            self._repository.packs.remove(name)

    def _sweep(self, report: GcReport) -> None:
        """Remove temporary files; with the write lock held, so that no `recover` is at work."""
        with self._repository.catalog.transaction():
            if self._writer():
                return
            for path in root.find_temporaries(self._repository.path, self._grace):
                size = durable.size_of(path)
                with suppress(OSError):
                    durable.remove(path)
                    report.bytes += size
                    report.files += 1


def _expected(repository: Repository, plan: GcPlan, grace: float) -> GcReport:
    """What carrying out a plan would free."""
    temporaries = root.find_temporaries(repository.path, grace)
    freed = sum(pack.bytes for pack in plan.removed) + sum(info.bytes for info in plan.files)
    freed += sum(pack.garbage for pack in plan.rewritten) + sum(durable.size_of(path) for path in temporaries)
    files = len(plan.files) + len(temporaries)
    report = GcReport(freed, len(plan.removed), len(plan.rewritten), files, len(plan.lost))
    gone = repository.catalog.gone().keys() - plan.told
    _add_files(report, [info.bytes for info in repository.packs.list_packs() if info.name in gone] if gone else [])
    return report


def _add_files(report: GcReport, sizes: Sequence[int]) -> None:
    """Count what a compaction has freed, which takes space in a remote store until it is deleted."""
    report.bytes += sum(sizes)
    report.files += len(sizes)


def _purpose(pack: PackContents) -> tuple[Any, ...]:
    return frozenset(pack.slots), frozenset(pack.wanted), pack.is_present
