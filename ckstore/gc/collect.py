"""Gc: frees the bytes that no version needs: packs, parts of packs, and unreferenced files."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from ckstore.commit.change import remove_uncommitted
from ckstore.commit.costs import update_costs
from ckstore.commit.dependents import users
from ckstore.commit.in_full import store_in_full
from ckstore.commit.join import garbage, join, join_due
from ckstore.errors import ConflictError, DiskFullError, IntegrityError, LockedError, NotFoundError, UsageError
from ckstore.gc.changed import changes
from ckstore.gc.plan import GARBAGE_BYTES, GARBAGE_SHARE, GRACE, GcPlan, plan_for, removed_packs, unused_segments
from ckstore.gc.reachability import PackContents, State
from ckstore.gc.repack import Copy, repack
from ckstore.storage import durable, reserve, root
from ckstore.storage.catalog import key
from ckstore.storage.pack import PackInfo
from ckstore.storage.segments import COUNT

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.catalog import VersionRow


def overhead(repository: Repository) -> int:
    """Return the bytes of segments beyond those of the packs that the catalog has in them."""
    sizes = repository.packs.segments()
    joined = repository.catalog.joined() if sizes else {}
    return sum(sizes.values()) - sum(size for name, (_, size) in joined.items() if name in sizes)


def tidy(repository: Repository) -> None:
    """Join small packs, write segments with much garbage again, and delete segments and files that nothing needs."""
    catalog, packs = repository.catalog, repository.packs
    with suppress(DiskFullError):
        _join(repository)
    if not packs.segments():
        return
    with catalog.transaction():
        for name in packs.doubled():
            place = catalog.segment_of(name)
            if place is not None and packs.is_intact_at(name, packs.path_of(place.segment), place):
                packs.remove(name)
            elif packs.is_intact(name):  # Its own file comes first.
                catalog.place_packs({name: None})
        for segment in unused_segments(repository, catalog.log_records):
            if all(map(packs.is_intact, catalog.known_packs(packs.names_in(segment)))):
                packs.remove_segment(segment)


def _join(repository: Repository) -> None:
    """Join small packs, and the packs left in segments with much garbage."""
    while join_due(repository):
        pass
    unneeded, sizes = garbage(repository), repository.packs.segments()
    due = {name for name, size in sizes.items() if unneeded.get(name, 0) >= min(GARBAGE_BYTES, GARBAGE_SHARE * size)}
    names = repository.packs.placed_in(due) if due else []
    for start in range(0, len(names), COUNT):
        join(repository, names[start : start + COUNT])


def held_since(repository: Repository) -> int | None:
    """Return the held bytes that the last collection found, if a new one would find no garbage either; else None."""
    found = changes(repository)
    return None if found is None or found.packs or found.files else repository.catalog.held()


#: Seconds to wait for other writers to finish, and between two checks.
PATIENCE = 600.0
_PAUSE = 0.05

_PURPOSE = "gc"
#: Plans for the changes alone that another change may overtake, before one for the whole store.
_OVERTAKEN = 3

#: Bytes that objects stored in full may take beyond their prediction, for the pack around them.
_SLACK = 1 << 14


@dataclass(slots=True)
class GcReport:
    """Result of a garbage collection, or a prediction.

    Attributes
    ----------
    bytes
        Freed bytes; a dry run estimates them.
    removed
        Number of deleted packs.
    rewritten
        Number of packs that were rewritten without garbage.
    in_full
        Number of objects that were stored in full, in fewer bytes than their forgotten bases.
    files
        Number of deleted files of killed processes.
    versions
        Number of forgotten or replaced versions whose manifests were deleted.
    held
        Bytes of objects of forgotten versions that stay, since present versions are stored against them.
    kept, until
        Bytes of forgotten versions that stay for `undo`, and the time from which some of them do no longer.

    Examples
    --------
    >>> store.gc(dry_run=True)
    GcReport(bytes=0, removed=0, rewritten=0, in_full=0, files=0, versions=0, held=0, kept=0, until='')
    """

    bytes: int = 0
    removed: int = 0
    rewritten: int = 0
    in_full: int = 0
    files: int = 0
    versions: int = 0
    held: int = field(default=0, compare=False)
    kept: int = field(default=0, compare=False)
    until: str = field(default="", compare=False)

    def add(self, other: GcReport) -> None:
        """Add the numbers of another report."""
        held, kept, until = other.held or self.held, other.kept or self.kept, other.until or self.until
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        self.held, self.kept, self.until = held, kept, until


@dataclass(frozen=True, slots=True)
class _Freed:
    """A committed plan: its report, the packs that it removed or copied, those copied, and the names in its record."""

    report: GcReport
    packs: tuple[str, ...] = ()
    copied: Set[str] = frozenset()
    removals: Set[str] = frozenset()


def gc(
    repository: Repository, *, grace: float | None = None, dry_run: bool = False, patience: float | None = None
) -> GcReport:
    """Free the bytes that no version needs; see `Store.gc`. Packs stay as they are if the disk is too full.

    The commit waits `patience` seconds, ten minutes by default, until no other process writes; a second `gc` waits for
    the first.
    """
    if grace is not None and grace < 0:
        raise UsageError(f"`grace` must be 0 or more seconds, not {grace:g}.")
    repository.catalog.refresh()
    if dry_run:
        return expected(repository, grace)
    with reserve.spent(repository.path), repository.catalog.lease(_PURPOSE) as lease:
        return _Collection(repository, grace, lease, PATIENCE if patience is None else patience).run()


class _Collection:
    """One run of gc.

    A rewritten pack is reused if the next plan needs the same copy.
    """

    def __init__(self, repository: Repository, grace: float | None, lease: int, patience: float) -> None:
        self._repository = repository
        self._asked, self._grace = grace, GRACE if grace is None else grace
        self._lease = lease
        self._deadline = time.monotonic() + patience
        # Copies that a killed run left already take space: they are not counted as new.
        self._before: set[str] = set()
        # The copy of each pack, and the contents that it was made for.
        self._copies: dict[str, tuple[Copy, tuple[Any, ...]]] = {}
        # Packs that this run has already counted as freed: a remote store deletes them later.
        self._removals: set[str] = set()
        # Objects that were stored in full, and their bytes.
        self._in_full: set[str] = set()
        self._added = 0
        self._may_store_in_full = True
        # Whether another process was writing when a plan was to be committed.
        self._met_writer = False

    def run(self) -> GcReport:
        """Plan, copy and commit until nothing changes in between."""
        before = overhead(self._repository)
        held = held_since(self._repository)
        report = self._run() if held is None else GcReport(held=held)
        self._delete_gone(report)
        self._sweep(report)
        tidy(self._repository)
        # The bytes of a pack in a segment are free once the segment is written again; a join writes headers.
        report.bytes = max(report.bytes + before - overhead(self._repository), 0)
        return report

    def _run(self) -> GcReport:
        if self._repository.catalog.is_only:  # In a bucket, no two copies have the same name.
            self._before = set(self._repository.packs.apart())
        try:
            report = self._collect(rewriting=True)
        except DiskFullError:
            # Deletions free space for the rewrites.
            report = GcReport()
            self._sweep(report)
            report.add(self._collect(rewriting=False))
            with suppress(DiskFullError):
                report.add(self._collect(rewriting=True))
        self._repository.resolver.notice_collection()
        if self._in_full:
            # Others may have encoded versions in the meantime, with the former costs.
            update_costs(self._repository, self._in_full)
        report.add(GcReport(-self._added, in_full=len(self._in_full)))
        return report

    def _delete_gone(self, report: GcReport) -> None:
        """Delete packs of a remote store that have left the catalog."""
        _add_files(report, self._repository, self._repository.packs.sweep(self._grace), self._removals)

    def _collect(self, *, rewriting: bool) -> GcReport:
        refused: State | None = None
        try:
            tries = count()
            while True:
                self._wait()
                self._repository.catalog.refresh()
                # A plan for the whole store also holds after changes that do not matter.
                plan = self._plan(whole=next(tries) >= _OVERTAKEN)
                if not rewriting:
                    plan.rewritten = []
                elif plan.survey.in_full and self._may_store_in_full:
                    self._store_in_full(plan)
                    continue
                self._copy(plan)
                try:
                    self._repository.packs.publish(sorted(copy.pack.name for copy, _ in self._copies.values()))
                    report = self._commit(plan)
                    while report is None and self._met_writer and time.monotonic() <= self._deadline:
                        self._wait()  # The plan may still hold: a new one may take longer than writers pause.
                        report = self._commit(plan)
                except ConflictError as error:  # Another mirror deleted a copy as a leftover.
                    self._drop(list(self._copies))
                    report = None
                    if refused == plan.state:  # Nobody has changed anything since it was refused before.
                        raise IntegrityError("The catalog contradicts itself; run `ckstore recover`.") from error
                    refused = plan.state
                if report is not None:
                    return report
                if time.monotonic() > self._deadline:
                    raise self._busy()
        except BaseException:
            self._drop(list(self._copies))
            raise

    def _plan(self, *, whole: bool) -> GcPlan:
        own = [copy.pack for copy, _ in self._copies.values()]
        if whole:
            return plan_for(self._repository, self._asked, own, whole=True)
        return plan_for(self._repository, self._asked, own)

    def _wait(self) -> None:
        while self._writer():
            if time.monotonic() > self._deadline:
                raise self._busy()
            time.sleep(_PAUSE)

    def _busy(self) -> LockedError:
        """Return the error that names the writers. Other machines hold no lease here: their last commit is named."""
        writer, last = self._writer(), self._repository.catalog.latest()
        if writer:
            known = f" (now: {writer})"
        elif last is not None:
            known = f" (last: version {last.number} of run {last.run}, {last.created})"
        else:
            known = ""
        return LockedError(f"Other processes keep writing{known}; free space when they are done.")

    def _writer(self) -> str | None:
        """Describe another process that ingests, or that began to free space first; None if there is none."""
        claims = self._repository.catalog.leases()
        before = list(takewhile(lambda claim: claim.number != self._lease, claims))
        # Of two collections, the earlier one goes first.
        others = [claim for claim in claims if claim.purpose != _PURPOSE or claim in before]
        return f"{others[0].purpose}, process {others[0].pid} on {others[0].host}" if others else None

    def _store_in_full(self, plan: GcPlan) -> None:
        """Store objects in full; the next plan frees those of forgotten versions that they were stored against.

        Nothing is stored if it takes more bytes than predicted, does not fit on the disk, or needs damaged objects.
        """
        began = time.monotonic()
        self._may_store_in_full = False
        resolver = self._repository.resolver
        places = plan.survey.in_full.items()
        chosen = {resolver.manifest(pack).record(slot).id for pack, slots in places for slot in slots}
        try:
            rows = [self._repository.catalog.version(number) for number in sorted(users(self._repository, chosen))]
            versions = [row.number for row in rows if not chosen.isdisjoint(resolver.document(row).objects)]
            most = plan.survey.added + plan.survey.added // 10 + _SLACK
            self._added = store_in_full(self._repository, chosen, versions, most)
            self._in_full = chosen if self._added else set()
            self._deadline += time.monotonic() - began
        except DiskFullError:
            pass
        except (ConflictError, IntegrityError, NotFoundError):
            # Another process has changed a version since, or an object is damaged, which `verify` reports.
            # Writers on other machines may change one again each time, so the attempts end with the patience.
            self._may_store_in_full = not plan.is_current() and time.monotonic() < self._deadline
            resolver.forget()

    def _copy(self, plan: GcPlan) -> None:
        """Rewrite packs, and delete copies that only an earlier plan needed."""
        wanted = {pack.name: _purpose(pack) for pack in plan.rewritten}
        self._drop([name for name, (_, purpose) in self._copies.items() if wanted.get(name) != purpose])
        for pack in plan.rewritten:
            if pack.name not in self._copies:
                self._copies[pack.name] = repack(self._repository, pack), wanted[pack.name]

    def _drop(self, names: Sequence[str]) -> None:
        copies = [self._copies.pop(name)[0].pack for name in names]
        remove_uncommitted(self._repository, copies)

    def _commit(self, plan: GcPlan) -> GcReport | None:
        """Commit the plan; return None if a new version needs a part that it removes, or if another process writes."""
        catalog = self._repository.catalog
        written = {copy.pack.name for copy, _ in self._copies.values()}
        tries = count()

        def change() -> _Freed | None:
            # Nobody can begin to write while this holds the lock; a process that has begun holds a lease.
            late = next(tries) and time.monotonic() > self._deadline
            self._met_writer = bool(self._writer())
            is_valid = not (late or self._met_writer) and plan.holds(written)
            return self._free(plan, written) if is_valid else None

        freed = catalog.commit(change)
        if freed is None:
            return None
        self._removals |= freed.removals
        if plan.is_empty:
            return freed.report
        self._drop([name for name in self._copies if name not in freed.copied])
        self._copies.clear()
        # Under the lock again: a `recover` may have re-added packs in between.
        with catalog.transaction():
            known = catalog.known_packs(freed.packs)
            self._unlink(name for name in freed.packs if name not in known)
        return freed.report

    def _free(self, plan: GcPlan, written: Set[str]) -> _Freed:
        """Carry out the plan within a transaction; the packs `written` are the copies."""
        catalog = self._repository.catalog
        # Skip packs that others have freed since.
        asked = {info.name for info in plan.files} | {pack.name for pack in (*plan.removed, *plan.rewritten)}
        known = catalog.known_packs(asked | written)
        # After a crash a pack may exist together with its copy: it stays.
        copies = {name: copy for name, (copy, _) in self._copies.items() if name in known and name not in written}
        removed = [pack.name for pack in plan.removed if pack.name in known and pack.name not in written]
        files = [info for info in plan.files if info.name not in written and info.name not in known]
        report = self._report(plan, removed, files, copies)
        settled = plan.settled({name: copy.pack.name for name, copy in copies.items()})
        if plan.kept.until or catalog.kept()[1]:
            catalog.note_kept(plan.survey.kept, plan.kept.until or durable.timestamp())
        if plan.is_empty:
            catalog.note_swept(settled, log=True)
            return _Freed(report)
        packs = [name for name in (*removed, *copies) if name not in written]
        record = {
            "written": sorted(copy.pack.name for copy in copies.values()),
            "removed": sorted({*packs, *(info.name for info in files)}),
        }
        expired = {"expired": plan.expired} if plan.expired else {}
        catalog.note({"change": "gc", **record, "versions": plan.origins_to_log(known), **expired})
        # Before the commit: otherwise `recover` could restore a version from them that lacks objects.
        self._unlink(info.name for info in files)
        catalog.remove_objects(plan.survey.dead)
        rows = self._rows_in(plan, copies)
        for name, copy in copies.items():
            self._move(plan.survey.packs[name], copy)
        catalog.remove_packs(packs)
        self._write_sizes(rows, plan, copies)
        catalog.note_gone(record["removed"])
        catalog.note_collected(durable.timestamp())
        gone = {*packs, *record["removed"]}
        catalog.note_swept({name: held for name, held in settled.items() if name not in gone}, log=True)
        return _Freed(report, tuple(packs), frozenset(copies), frozenset(record["removed"]))

    def _move(self, contents: PackContents, copy: Copy) -> None:
        """Point the catalog's entries for a pack at its copy."""
        catalog = self._repository.catalog
        catalog.replace_pack(contents.name, copy.pack, copy.manifest)
        records = map(self._repository.resolver.manifest(copy.pack.name).record, copy.slots.values())
        bases = {record.base for record in records if record.base is not None}
        catalog.add_packs([copy.pack], catalog.places_of(map(key, bases)))
        numbers = [key(record.id) for record in self._repository.resolver.manifest(contents.name).document.records]
        places = catalog.find_objects(numbers)
        catalog.move_objects(
            [
                (number, copy.pack.name, copy.slots[slot])
                for number, (pack, slot) in places.items()
                if pack == contents.name
            ]
        )

    def _rows_in(self, plan: GcPlan, copies: dict[str, Copy]) -> list[VersionRow]:
        """Return the versions whose sizes may change: those of rewritten packs."""
        catalog = self._repository.catalog
        if not copies or plan.state.part is None:
            return catalog.versions() if copies else []
        own = [catalog.version(number) for name in copies for number in catalog.uses_of(name).own]
        return own + (catalog.hot() if any(plan.survey.packs[name].kind == "raw" for name in copies) else [])

    def _write_sizes(self, rows: Iterable[VersionRow], plan: GcPlan, copies: dict[str, Copy]) -> None:
        """Update each version's remaining size in the catalog."""
        packs = plan.survey.packs
        saved = {name: packs[name].bytes - copy.pack.bytes for name, copy in copies.items()}
        raw: dict[tuple[int, str], int] = {}
        for name, size in saved.items():
            if packs[name].kind == "raw":
                raw[packs[name].commit] = raw.get(packs[name].commit, 0) + size
        for row in {row.number: row for row in rows}.values():
            of_raw = raw.get(self._commit_of(row, packs), 0) if raw else 0
            stored = row.stored_bytes - saved.get(row.pack, 0) - of_raw
            # A thinned version stores its size in its summary: its objects are in several packs.
            if stored != row.stored_bytes and "stored_bytes" not in self._repository.resolver.document(row).summary:
                self._repository.catalog.update_version(row.number, stored_bytes=stored)

    def _commit_of(self, row: VersionRow, packs: Mapping[str, PackContents]) -> tuple[int, str]:
        """Return number and time of the commit of a version's pack."""
        if row.pack in packs:
            return packs[row.pack].commit
        document = self._repository.resolver.manifest(row.pack).document
        return document.number, document.created

    def _report(
        self, plan: GcPlan, removed: Sequence[str], files: Sequence[PackInfo], copies: dict[str, Copy]
    ) -> GcReport:
        packs = plan.survey.packs
        freed = sum(packs[name].bytes for name in (*removed, *copies)) + sum(info.bytes for info in files)
        freed -= sum(copy.pack.bytes for copy in copies.values() if copy.pack.name not in self._before)
        report = GcReport(freed, len(removed), len(copies), files=len(files), versions=len(plan.lost))
        report.held, report.kept, report.until = plan.survey.held, plan.survey.kept, plan.kept.until
        return report

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            self._repository.packs.remove(name)

    def _sweep(self, report: GcReport) -> None:
        """Delete temporary files, under the write lock, so that no `recover` runs."""
        with self._repository.catalog.transaction():
            if self._writer():
                return
            for path in root.find_temporaries(self._repository.path, self._grace):
                size = durable.size_of(path)
                with suppress(OSError):
                    durable.remove(path)
                    report.bytes += size
                    report.files += 1


def expected(repository: Repository, grace: float | None = None, without: Collection[int] = ()) -> GcReport:
    """Predict the report of a collection, once the versions of some numbers are forgotten for good."""
    temporaries = root.find_temporaries(repository.path, GRACE if grace is None else grace)
    held = None if without else held_since(repository)
    gone = repository.catalog.gone()
    leaving = {info.name: info.bytes for info in repository.packs.list_packs() if info.name in gone} if gone else {}
    if held is not None:
        report = GcReport(sum(map(durable.size_of, temporaries)), files=len(temporaries), held=held)
        _add_files(report, repository, leaving)
        return report
    plan = plan_for(repository, grace, ahead=True, without=without)
    freed = sum(pack.bytes for pack in plan.removed) + sum(info.bytes for info in plan.files)
    freed += sum(pack.garbage for pack in plan.rewritten) + sum(durable.size_of(path) for path in temporaries)
    in_full = sum(map(len, plan.survey.in_full.values()))
    report = GcReport(freed - plan.survey.added, len(plan.removed), len(plan.rewritten), in_full)
    report.files, report.versions = len(plan.files) + len(temporaries), len(plan.lost)
    report.held, report.kept, report.until = plan.survey.held, plan.survey.kept, plan.kept.until
    _add_files(report, repository, leaving)
    return report


def _add_files(
    report: GcReport, repository: Repository, gone: Mapping[str, int], removals: Set[str] = frozenset()
) -> None:
    """Count the bytes of packs of a remote store that encodings freed; collections have counted their `removals`."""
    if left := gone.keys() - removals:
        first = min(repository.catalog.gone(left).values())
        left -= removed_packs(repository.catalog.log_records(f"{first - 1:012d}"))
    report.bytes += sum(gone[name] for name in left)
    report.files += len(left)


def _purpose(pack: PackContents) -> tuple[Any, ...]:
    return frozenset(pack.slots), frozenset(pack.wanted), pack.is_present
