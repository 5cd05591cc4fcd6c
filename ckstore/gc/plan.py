"""Plans which packs a `gc` removes and which it rewrites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.gc.changed import Changes, changed_state, changed_survey, changes
from ckstore.gc.kept import kept
from ckstore.gc.reachability import (
    Origin,
    PackContents,
    State,
    Survey,
    described_version,
    gone_versions,
    survey,
    version_origin,
)
from ckstore.objects.documents import ManifestDocument
from ckstore.runtime.cached import cached_property
from ckstore.storage import change_log
from ckstore.storage.catalog import key
from ckstore.storage.pack import PackInfo
from ckstore.storage.scan_packs import DamagedPack, ScannedPack, scan_pack

if TYPE_CHECKING:
    from ckstore.repository import Repository

#: A pack is rewritten if at least this fraction, or this many bytes, of it are garbage.
GARBAGE_SHARE = 0.1
GARBAGE_BYTES = 1 << 20

#: Seconds for which an unreferenced file must be unmodified before it is deleted, by default.
GRACE = 3600.0


def removed_packs(records: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the packs that collections have removed, by the log."""
    return {name for record in records if record["change"] == "gc" for name in record["removed"]}


def unused_segments(repository: Repository, records: Callable[[], Iterable[Mapping[str, Any]]]) -> list[str]:
    """Return the intact segments to which the catalog does not refer.

    Raise `IntegrityError` if it lacks packs there that no collection removed: it is older, perhaps from a copy.
    """
    catalog, packs = repository.catalog, repository.packs
    segments = packs.segments().keys()
    used = catalog.joined().keys() if segments else set()
    removed = removed_packs(records()) if segments - used else set()
    found = []
    for segment in segments - used:
        with suppress(FileNotFoundError):
            names = set(packs.names_in(segment))
            if packs.damage_of(segment):
                continue
            if names - removed - catalog.known_packs(names):
                raise IntegrityError(f"The catalog lacks packs in {segment}; run `ckstore recover`, then free space.")
            found.append(segment)
    return found


class GcPlan:
    """Packs to remove and packs to rewrite.

    Attributes
    ----------
    state
        The state that it was made from.
    survey
        The contents of the catalog's packs.
    removed, rewritten
        Packs of the catalog that nothing needs, and packs with enough garbage.
    files
        Unreferenced packs that are old enough.
    kept
        Forgotten versions that stay for a time.
    """

    def __init__(
        self,
        repository: Repository,
        grace: float | None,
        own: Sequence[PackInfo] = (),
        *,
        ahead: bool = False,
        without: Collection[int] = (),
        changed: Changes | None = None,
    ) -> None:
        self._repository = repository
        self._stamp = repository.catalog.state()
        self.state = State.of(repository) if changed is None else changed_state(repository)
        if without:
            left = [row for row in self.state.versions if row.number not in without]
            self.state = replace(self.state, versions=left)
        self._grace = GRACE if grace is None else grace
        self._since = "" if changed is None or self.state.files else repository.catalog.swept()
        # Packs and rows that need nothing that is removed: those of the plan, and later ones once they are checked.
        self._sound_packs = {row.name for row in self.state.packs}
        self._sound_rows = {(row.number, row.uid, row.pack, row.manifest_offset) for row in self.state.versions}
        unused_segments(repository, repository.catalog.log_records)
        names = {info.name for info in own}
        scanned = list(self._scanned([info for info in self.state.files if info.name not in names]))
        # Of each commit, the time of its last file: a commit is one leftover.
        self._ended = _ends(scanned, repository.packs.written()) if scanned else {}
        self._leftovers = [pack for pack in scanned if self._is_left_over(pack)]
        self.files = [pack.info for pack in self._leftovers]
        staying = [pack for pack in scanned if pack not in self._leftovers]
        self.kept = kept(repository, grace)
        self.survey: Survey
        if changed is None:
            self.survey = survey(repository, self.state, staying, ahead=ahead, forgotten=self.kept.rows)
        else:
            self.state, self.survey = changed_survey(
                repository, self.state, changed.packs, _may_go, staying, ahead=ahead, forgotten=self.kept.rows
            )
            self._count_held()
        if self.survey.lost and not self.is_current():
            raise IntegrityError("The store was changed during the plan; free space again.")
        contents = self.survey.packs.values()
        self.removed = [pack for pack in contents if not pack.is_needed]
        self.rewritten = [pack for pack in contents if pack.is_needed and _is_worth_it(pack)]
        self._due = (*self.removed, *self.rewritten)
        if not self.is_empty:
            self._prove(without)

    @property
    def is_empty(self) -> bool:
        """Whether the transaction would change nothing."""
        return not (self.removed or self.rewritten or self.files or self.survey.dead)

    def is_current(self) -> bool:
        """Return whether nothing has changed since the plan."""
        if self.state.part is not None:
            return self._repository.catalog.state() == self._stamp
        return State.of(self._repository) == self.state

    def _count_held(self) -> None:
        """Add the bytes that the rest of the store holds; raise `IntegrityError` if all of it has to be looked at."""
        catalog, part = self._repository.catalog, self.state.part
        assert part is not None
        self.survey.held += catalog.held(part.packs)
        rows = chain.from_iterable(self.kept.rows.values())
        if self.survey.held and catalog.totals().bytes > catalog.original_bytes() + sum(
            row.original_bytes for row in rows
        ):
            raise IntegrityError("The store may be larger than its files.")

    def settled(self, copies: Mapping[str, str]) -> dict[str, int]:
        """Return the packs in which the committed plan leaves nothing to look at, with the bytes that they hold.

        `copies` are the names of the copies of rewritten packs. Call it before anything is changed: changes since the
        plan have to be looked at.
        """
        if self._repository.catalog.state() != self._stamp or self.survey.in_full:
            return {}
        unfinished = {pack.name for pack in self._due} - copies.keys()
        settled, decided = self.survey.settled, self.survey.packs
        return {
            copies.get(name, name): held for name, held in settled.items() if name in decided and name not in unfinished
        }

    def _prove(self, without: Collection[int]) -> None:
        """Raise `IntegrityError` if a version is in a pack of the catalog, but not in the catalog, without a reason.

        A reason is a record in the log: it was forgotten or replaced, or an earlier collection removed it. The versions
        of the numbers `without` count as forgotten.
        """
        if self.state.part is None:  # Otherwise all rows that were read are proven, and counted.
            self._repository.catalog.prove()
        unexplained = self._unexplained(without)
        if unexplained and self._since:
            self._read_whole_log()  # Earlier collections may have seen them go.
            unexplained = self._unexplained(without)
        if unexplained:
            raise IntegrityError(
                f"Version {unexplained[0][1]} has a pack, but no row in the catalog, and was not forgotten;"
                " run `ckstore recover`, then free space."
            )

    def _unexplained(self, without: Collection[int]) -> list[Origin]:
        """Return the versions that are not in the catalog, without a reason in the log."""
        found = gone_versions(self.survey.packs.values(), self.survey.present)
        gone = [origin for origin in found if not self._is_present(origin)]
        forgotten = change_log.forgotten(self._records)
        return [
            (uid, number, parent, created)
            for uid, number, parent, created in gone
            if self._number(uid, number) not in without
            and forgotten.isdisjoint({(uid, self._number(uid, number)), ("", self._number(uid, number))})
            and not self._is_logged((uid, number, parent, created))
        ]

    def _read_whole_log(self) -> None:
        """Read the records before the last collection, too."""
        self._since = ""
        for name in ("_records", "_collections", "_logged", "_numbers"):
            vars(self).pop(name, None)

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        return self._repository.catalog.log_records(self._since)

    @cached_property
    def _collections(self) -> list[dict[str, Any]]:
        return [record for record in self._records if record.get("change") == "gc"]

    def _number(self, uid: str, number: int) -> int:
        """Return the current number of a version with a number in its manifest."""
        return self._numbers.get((uid, number), number)

    def _is_logged(self, origin: Origin) -> bool:
        """Return whether an earlier collection recorded a version as gone."""
        return (origin[0], self._number(*origin[:2])) in self._logged

    @cached_property
    def _logged(self) -> set[tuple[str, int]]:
        return {(origin[0], origin[1]) for record in self._collections for origin in record["versions"]}

    @cached_property
    def lost(self) -> list[Origin]:
        """The versions whose manifests are removed."""
        without = [*self.removed, *(pack for pack in self.rewritten if not pack.is_present)]
        return [origin for origin in gone_versions(without, self.survey.present) if not self._is_present(origin)]

    @cached_property
    def _now(self) -> float:
        """The storage's clock at the first use: a later value would only make more files old."""
        return self._repository.packs.now()

    @cached_property
    def _numbers(self) -> dict[tuple[str, int], int]:
        """The current number of each version that `recover` renumbered, by its id and former number."""
        renumbered = [record for record in self._records if record.get("change") == "renumber"]
        return {(record["uid"], record["from"]): record["version"] for record in renumbered}

    def _is_present(self, origin: Origin) -> bool:
        """Return whether a version exists, perhaps renumbered; a thinned version has another manifest."""
        uid, number, _, created = origin
        if self.state.part is None:
            return (self._number(uid, number), created) in self._present
        catalog = self._repository.catalog
        with suppress(NotFoundError):
            if catalog.version(self._number(uid, number)).created == created:
                return True
        if self._since and catalog.with_uid(uid):  # It was renumbered before the last collection, or came back since.
            self._read_whole_log()
            return self._is_present(origin)
        return False

    @cached_property
    def _present(self) -> set[tuple[int, str]]:
        return {(row.number, row.created) for row in self.state.versions}

    @property
    def expired(self) -> list[int]:
        """Numbers of the log's records of forgotten versions that this collection does not keep."""
        return sorted({*self.kept.expired, *self.survey.lost})

    def holds(self, written: Collection[str]) -> bool:
        """Return whether the plan is still valid: nothing committed since needs an object that it removes.

        A pack or version that stays, stays with its whole chain. So only the names in new versions and records need a
        check: nothing that is removed can be further below. The packs `written` are the plan's own.
        """
        if self.state.part is not None:
            return self.is_current() and self._knows_files(written)
        return self._still_holds(written)

    def _still_holds(self, written: Collection[str]) -> bool:
        catalog, resolver = self._repository.catalog, self._repository.resolver
        packs = {pack.name for pack in catalog.packs()}
        outgoing = {pack.name: pack for pack in (*self.removed, *self.rewritten)}
        if catalog.identity() != self.state.catalog:
            return False
        # Where others' packs are always on their way, a commit checks its bases itself.
        if catalog.is_only:
            known = {*packs, *written, *(info.name for info in self.state.files)}
            if any(info.name not in known for info in self._repository.packs.list_packs()):
                return False
        dead = set(self.survey.dead)
        arrivals = packs - self._sound_packs
        unread = set()
        for name in arrivals:
            named = catalog.named_with(name)
            if named is None or not outgoing.keys().isdisjoint(named[1]):
                unread.add(name)
            elif not dead.isdisjoint(named[0]):
                return False
        resolver.prefetch_manifests(unread)
        for name in unread:
            for record in resolver.manifest(name).document.records:
                ids = (record.id, record.base, record.origin)
                if not dead.isdisjoint(key(identity) for identity in ids if identity is not None):
                    return False
        self._sound_packs |= arrivals
        fresh = [described for described in catalog.described() if described not in self._sound_rows]
        for row in [catalog.version(number) for number, _, pack, _ in fresh if pack in unread or pack not in arrivals]:
            document = resolver.document(row)
            if not dead.isdisjoint(map(key, document.objects)):
                return False
            if row.pack in outgoing and not outgoing[row.pack].is_present:
                return False
            for ref in document.blobs():
                holder = outgoing.get(ref.pack or row.pack)
                if holder is not None and ref.name not in holder.wanted:
                    return False
        self._sound_rows.update(fresh)
        return True

    def _knows_files(self, written: Collection[str]) -> bool:
        """Return whether all files of packs are of the catalog, of the plan, or `written` for it.

        Where others' packs are always on their way, a commit checks its bases itself.
        """
        catalog = self._repository.catalog
        if not catalog.is_only:
            return True
        names = {*self._repository.packs.apart()} - {*written, *(info.name for info in self.state.files)}
        return catalog.known_packs(names) == names

    def origins_to_log(self, committed: Collection[str]) -> list[Origin]:
        """Return versions to log as gone: formerly present or never committed, and not in the log yet.

        They have their last numbers. Entries of `files` that were committed since the plan do not count.
        """
        found = gone_versions(self.survey.packs.values(), self.survey.present)
        files = [pack for pack in self._leftovers if pack.info.name not in committed]
        documents = [described_version(pack.document) for pack in files]
        found += [version_origin(document) for document in documents if document is not None]
        return [
            (uid, self._number(uid, number), parent, created)
            for uid, number, parent, created in found
            if not self._is_logged((uid, number, parent, created))
            and not self._is_present((uid, number, parent, created))
        ]

    def _is_left_over(self, pack: ScannedPack) -> bool:
        """Return whether an unreferenced pack is the leftover of a process that is gone."""
        if any(pack.info.name in record["removed"] for record in self._collections):
            return True  # A `gc` was killed before it deleted the file.
        if pack.document.number == 0 and self._repository.catalog.is_only:
            return True  # It would have stored objects again; its writer has no lease, or this plan is not committed.
        copied = pack.document.stands_for
        if copied and self._repository.catalog.known_packs(copied[-1:]):
            return True  # A `gc` was killed before it committed the copy.
        ended = self._ended.get(_commit(pack))
        return ended is not None and ended <= self._now - self._grace

    def _scanned(self, files: Sequence[PackInfo]) -> Iterator[ScannedPack]:
        """Yield the unreferenced packs; raise `IntegrityError` if the catalog may be too old, or a pack is damaged."""
        catalog = self._repository.catalog
        # Before the last number: others may commit in between.
        known = catalog.reserved_numbers()
        last = catalog.last_number()
        for info in files:
            found = scan_pack(self._repository.packs, info, ManifestDocument)
            if isinstance(found, DamagedPack):
                if info not in self._repository.packs.list_packs():
                    continue  # Its writer removed it since.
                raise IntegrityError(
                    f"Pack {info.name} is damaged ({found.reason}) and not in the catalog; restore it from a copy and"
                    " run `ckstore recover`, or delete the file, then free space."
                )
            if found.document.number > last and found.document.number not in known and catalog.is_only:
                raise IntegrityError(
                    f"The catalog is older than pack {info.name} of version {found.document.number};"
                    " run `ckstore recover`, then free space."
                )
            yield found


def plan_for(
    repository: Repository,
    grace: float | None,
    own: Sequence[PackInfo] = (),
    *,
    ahead: bool = False,
    without: Collection[int] = (),
    whole: bool = False,
) -> GcPlan:
    """Return a plan for the current state.

    `own` are finished packs that are not committed yet, `grace` is that of `gc`. The plan is that of the state after
    objects were stored in full if it looks `ahead`, and after the versions of the numbers `without` were forgotten. It
    is made from the changes since the last collection, unless that takes, or is to be, the `whole` store.
    """
    changed = None if whole or without else changes(repository)
    if changed is not None:
        # Where anything there contradicts, the whole store is looked at.
        with suppress(IntegrityError, NotFoundError):
            return GcPlan(repository, grace, own, ahead=ahead, changed=changed)
    while True:
        before = State.of(repository)
        try:
            return GcPlan(repository, grace, own, ahead=ahead, without=without)
        except (IntegrityError, NotFoundError):
            # Data from before and after a concurrent commit may contradict.
            if State.of(repository) == before:
                raise


def _commit(pack: ScannedPack) -> tuple[int, str]:
    """Return the number and time of a pack's commit."""
    return pack.document.number, pack.document.created


def _ends(packs: Iterable[ScannedPack], written: Mapping[str, float]) -> dict[tuple[int, str], float]:
    """Return the time at which the last pack of each commit was written."""
    ends: dict[tuple[int, str], float] = {}
    for pack in packs:
        if pack.info.name in written:
            ends[_commit(pack)] = max(written[pack.info.name], ends.get(_commit(pack), 0.0))
    return ends


def _is_worth_it(pack: PackContents, more: int = 0) -> bool:
    return pack.garbage + more >= min(GARBAGE_BYTES, GARBAGE_SHARE * pack.bytes)


def _may_go(pack: PackContents, doubtful: int) -> bool:
    """Return whether a pack is removed or rewritten, or would be if its `doubtful` bytes were not needed."""
    return not (pack.is_present or pack.slots) or _is_worth_it(pack, doubtful)
