"""Transfer: copies versions from one store into another, each in its own commit.

missing = find_missing(version, target)        # compares ids, under a lease of the target
missing.write(writer)                          # copies payloads into new packs
document, blobs = missing.described(...)       # new number and parent; same id and time
Change.finish(document)                        # the packs are durable
Change.commit_version()                        # after checking the copied objects

A version is skipped if the target has it, by its id or by its content at its run and step. So repeating an interrupted
transfer sends the rest. Superseded versions are so in the target, too. A version that the target has forgotten, by its
log, is sent only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckstore.checking.verify import check_arrival
from ckstore.commit.change import Change
from ckstore.commit.going_back import Marks, marks_of
from ckstore.commit.naming import check_run, check_run_is_no_tag, set_metrics, tag
from ckstore.encoding.budget import BUDGET
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.errors import (
    CkstoreError,
    ConflictError,
    DiskFullError,
    IntegrityError,
    LockedError,
    NotFoundError,
    UsageError,
)
from ckstore.objects.documents import VersionDocument
from ckstore.reading.stored_version import StoredVersion
from ckstore.runtime.cached import cached_property
from ckstore.storage import change_log, reserve
from ckstore.storage.catalog import VersionRow
from ckstore.storage.durable import sweep_temporaries
from ckstore.storage.pack import PackWriter
from ckstore.storage.pack_reader import MissingPackError
from ckstore.storage.root import PACKS
from ckstore.transfer.missing import find_missing
from ckstore.writing.rebase import within_budget

if TYPE_CHECKING:
    from ckstore.repository import Repository

Progress = Callable[[int], None]

#: Attempts to send a version while either store changes.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Transferred:
    """A version that was sent; after a dry run, would be.

    Attributes
    ----------
    version, arrived
        Its rows in the source and in the target; after a dry run, the latter is None.
    bytes
        Bytes of the written packs; after a dry run, of the objects to send.
    """

    version: VersionRow
    arrived: VersionRow | None
    bytes: int


@dataclass(frozen=True, slots=True)
class NotTransferred:
    """A version that could not be sent, and the error."""

    version: VersionRow
    error: CkstoreError


@dataclass(slots=True)
class TransferReport:
    """Result of a transfer, or a prediction.

    Attributes
    ----------
    versions
        The versions that were sent.
    there
        Rows, in the source, of the versions that the target already had.
    forgotten
        Rows, in the source, of the versions that the target has forgotten, and that were not sent.
    failed
        The versions that could not be sent: damaged, stored against damaged objects, or in conflict.

    Examples
    --------
    >>> with ckstore.open("copy", create=True) as copy:
    ...     report = store.push(copy, "best", dry_run=True)
    ...     print(report.versions[0].version, report.bytes > 0)
    <ckstore.VersionRow 2 gpt@200> True
    """

    versions: list[Transferred] = field(default_factory=list)
    there: list[VersionRow] = field(default_factory=list)
    forgotten: list[VersionRow] = field(default_factory=list)
    failed: list[NotTransferred] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Sum of the sent bytes."""
        return sum(item.bytes for item in self.versions)


def transfer(
    source: Repository,
    target: Repository,
    rows: Sequence[VersionRow],
    *,
    dry_run: bool = False,
    verify: bool = False,
    restore: bool = False,
    progress: Progress | None = None,
) -> TransferReport:
    """Copy versions into another store, with all objects that restoring them takes and the target lacks.

    The rows are ordered by number, so that ancestors come first. With `restore`, versions that the target has forgotten
    are sent, too. With `verify`, every received version is decoded and
    compared with its digests before it becomes visible. `progress` gets bytes of processed versions, as in
    `original_bytes`. After a `DiskFullError` or `LockedError`, the next transfer sends the rest.
    """
    work = Transfer(source, target, verify=verify, restore=restore, progress=progress)
    if dry_run:
        for repository in (source, target):
            repository.resolver.forget()  # Another process may have encoded raw objects since.
        return work.run(rows, dry_run=True)
    target.require_writable()
    with suppress(OSError):  # Files that a killed transfer left only take space.
        sweep_temporaries(target.path / PACKS)
    with reserve.kept(target.path):
        return work.run(rows, dry_run=False)


class Transfer:
    """Copies versions; the source may get further ones between two runs."""

    def __init__(
        self,
        source: Repository,
        target: Repository,
        *,
        verify: bool = False,
        restore: bool = False,
        tags: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._verify = verify
        self._restore = restore
        self._progress = progress or (lambda count: None)
        self._rows = {row.number: row for row in source.catalog.versions()}
        self._tags = source.catalog.tags() if tags else {}
        # Packs of the source whose digests were checked.
        self._trusted: set[str] = set()
        # Versions of the target with the content of the source's versions, by the latter's numbers.
        self._same: dict[int, VersionRow] = {}
        self._list_target()

    def _list_target(self) -> None:
        """List the versions of the target."""
        self._has_marked = False
        self._there = {row.uid: row for row in self._target.catalog.versions()}
        self._steps: dict[tuple[str, int], list[VersionRow]] = {}
        for row in self._there.values():
            if row.step is not None:
                self._steps.setdefault((row.run, row.step), []).append(row)

    def run(self, rows: Sequence[VersionRow], *, dry_run: bool = False) -> TransferReport:
        """Copy versions of the source."""
        self._rows |= {row.number: row for row in rows}
        report = TransferReport()
        planned: set[str] = set()
        for row in rows:
            try:
                there, sent = self._existing(row), 0
                if there is None and not self._restore and row.uid in self._forgotten:
                    report.forgotten.append(row)
                    self._progress(row.original_bytes)
                    continue
                if there is None and dry_run:
                    missing = find_missing(StoredVersion(self._source, row), self._target, planned, verify=self._verify)
                    sent = missing.nbytes
                elif there is None:
                    there, sent = self._sent(row)
                if there is None or sent:
                    report.versions.append(Transferred(row, there, sent))
                else:
                    report.there.append(row)
                    self._progress(row.original_bytes)
                if there is not None and not dry_run:
                    self._tag(row, there)
                    self._add_metrics(row, there)
            except (DiskFullError, LockedError):
                raise
            except CkstoreError as error:
                report.failed.append(NotTransferred(row, error))
        return report

    @cached_property
    def _forgotten(self) -> set[str]:
        """Ids of the versions that the target has forgotten, since its log began."""
        return {uid for uid, _ in change_log.forgotten(self._target.catalog.log_records())}

    def _existing(self, row: VersionRow) -> VersionRow | None:
        """Find a version in the target, by its id or by its content; raise `ConflictError` if its step has another.

        That conflicts unless one of them is superseded, or will be when this version arrives.
        """
        there = self._there.get(row.uid)
        for standing in self._steps.get((row.run, row.step), ()) if there is None and row.step is not None else ():
            if standing.superseded != row.superseded:
                continue
            if _is_same(self._source, row, self._target, standing):
                there = standing
                break
            if row.superseded:
                continue
            parent = self._parent(row)
            marks = self._marks(row, replace(row, parent=None if parent is None else parent.number))[1]
            if standing.number not in {item.number for item in marks.superseded}:
                raise ConflictError(
                    f"{row.run}@{row.step} holds other content in {self._target.place}, as version {standing.number};"
                    " forget it there, or name other versions."
                )
        if there is not None:
            self._same[row.number] = there
        return there

    def _sent(self, row: VersionRow) -> tuple[VersionRow, int]:
        """Send a version; return its row in the target and the sent bytes: 0 if another process was first."""
        for left in reversed(range(_TRIES)):
            try:
                return self._send(row)
            except (ConflictError, NotFoundError, IntegrityError) as error:
                # A version or object was moved, encoded or forgotten in either store since it was looked up.
                # Apparent damage may only be an outdated lookup.
                if isinstance(error, IntegrityError) and not isinstance(error, MissingPackError) and left < _TRIES - 1:
                    raise
                self._source.resolver.forget()
                row = self._source.catalog.version(row.number)
                self._source.packs.close()
                self._target.resolver.forget()
                self._list_target()
                there = self._existing(row)
                if there is not None:
                    return there, 0
                if not left:
                    raise
        raise AssertionError

    def _send(self, row: VersionRow) -> tuple[VersionRow, int]:
        target = self._target
        catalog, version = target.catalog, StoredVersion(self._source, row)
        check_run(row.run)
        check_run_is_no_tag(catalog, row.run)
        number = committed = 0
        try:
            with ExitStack() as held:
                with catalog.transaction():  # Each commit waits for the disk: one commit for both.
                    number = catalog.reserve_number()
                    lease = held.enter_context(catalog.lease(f"transfer {number}"))
                missing = find_missing(version, target, verify=self._verify)
                encoded = held.enter_context(PackWriter(target.path, "encoded"))
                raw = held.enter_context(PackWriter(target.path, "raw")) if missing.raw else None
                writer = ObjectWriter(encoded, raw)
                share = _Share(self._progress, row.original_bytes, missing.nbytes)
                missing.write(writer, self._trusted, share.done)
                with Change(target, writer) as change:
                    document, blobs = missing.described(target, number, self._parent(row))
                    change.finish(document, blobs)
                    with change.version() as arrived:
                        _check(arrived)
                        if self._verify:
                            check_arrival(arrived, missing.bases)
                    committed = change.commit_version(
                        missing.needs, lease, run=row.run, marks=partial(self._marks, row)
                    )
                    sent = sum(pack.bytes for pack in change.packs)
        except BaseException:
            if number:
                catalog.release_number(number)
            target.resolver.forget()
            raise
        share.end()
        # Content that the target has already may lie deeper there.
        there = within_budget(target, catalog.version(committed), max(BUDGET, row.cost))
        if self._has_marked:
            self._list_target()
        self._there[row.uid] = self._same[row.number] = there
        return there, sent

    def _parent(self, row: VersionRow) -> VersionRow | None:
        """Return the nearest ancestor in the target."""
        passed: set[int] = set()
        number = row.parent
        while number in self._rows and number not in passed:
            passed.add(number)
            ancestor = self._rows[number]
            there = self._there.get(ancestor.uid) or self._same.get(number)
            if there is not None:
                return there
            number = ancestor.parent
        return None

    def _marks(self, row: VersionRow, arriving: VersionRow) -> tuple[bool, Marks]:
        """Return whether a version is superseded in the target, and the versions there that it marks.

        `arriving` is its row in the target. It supersedes the counterparts of the source's superseded versions, and all
        that came after its parent if it goes back, or if the run in the target went on from elsewhere.
        """
        if row.superseded:
            return True, Marks()
        catalog = self._target.catalog
        marks = Marks()
        parent = None if arriving.parent is None else catalog.version(arriving.parent)
        if parent is not None and (parent.superseded or self._source.resolver.document(row).goes_back):
            marks = marks_of(catalog, row.run, parent.number)
        superseded = {item.number: item for item in marks.superseded}
        for item in self._superseded.get(row.run, ()):
            there = self._same.get(item.number) or self._there.get(item.uid)
            if there is not None:
                with suppress(NotFoundError):  # It was forgotten there.
                    present = catalog.version(there.number)
                    if not present.superseded and present.run == row.run:
                        superseded[present.number] = present
        self._has_marked = self._has_marked or bool(superseded or marks.present)
        back = {item.number for item in marks.present}
        return False, Marks([item for number, item in superseded.items() if number not in back], marks.present)

    @cached_property
    def _superseded(self) -> dict[str, list[VersionRow]]:
        """The superseded versions of the source, by run."""
        found: dict[str, list[VersionRow]] = {}
        for row in self._rows.values():
            if row.superseded:
                found.setdefault(row.run, []).append(row)
        return found

    def _tag(self, row: VersionRow, there: VersionRow) -> None:
        """Copy the version's tags to the target, unless they are taken there."""
        catalog = self._target.catalog
        for name in [name for name, number in self._tags.items() if number == row.number]:
            with suppress(UsageError):  # A run has that name.
                catalog.commit(partial(self._tag_free, there, name))

    def _tag_free(self, there: VersionRow, name: str) -> None:
        if name not in self._target.catalog.tags():
            tag(self._target, there, name)

    def _add_metrics(self, row: VersionRow, there: VersionRow) -> None:
        """Copy metrics that the version got since, a signature too, to the target unless it has others of that name."""
        later = {name: value for name, value in row.metrics.items() if name not in there.metrics}
        if later and there.uid == row.uid:
            set_metrics(self._target, there, later, ())


class _Share:
    """Converts bytes of written objects into progress in bytes of the version."""

    def __init__(self, progress: Progress, whole: int, expected: int) -> None:
        self._progress = progress
        self._whole = whole
        self._expected = expected
        self._written = 0
        self._reported = 0

    def done(self, count: int) -> None:
        """Report `count` more written bytes."""
        self._written += count
        # Bytes of objects that are encoded in full are an estimate.
        self._report(min(self._whole * self._written // max(self._expected, 1), self._whole))

    def end(self) -> None:
        """Report the rest."""
        self._report(self._whole)

    def _report(self, done: int) -> None:
        self._progress(done - self._reported)
        self._reported = done


def _check(version: StoredVersion) -> None:
    """Raise `IntegrityError` unless a version is complete, in bounds, and cut as its layout requires."""
    version.check_present()
    for file, layout in enumerate(version.layout.files):
        for extent in range(len(layout.extents)):
            version.require(file, extent)


def _is_same(source: Repository, row: VersionRow, target: Repository, there: VersionRow) -> bool:
    """Return whether two versions have the same bytes and, for directories, the same names and modes."""
    said, known = source.resolver.document(row), target.resolver.document(there)
    if not (said.is_directory or known.is_directory):
        return [file.blake3 for file in said.files] == [file.blake3 for file in known.files]
    return _tree(said) == _tree(known)


def _tree(document: VersionDocument) -> tuple[object, ...]:
    files = {(file.path, file.blake3, file.mode) for file in document.files}
    return document.is_directory, files, set(document.links), set(document.directories)
