"""Transfer: versions of one store go into another one, each in a commit of its own.

missing = find_missing(version, target)        # looked up by ids, under a lease of the target's
missing.write(writer)                          # payloads as they are, into packs of the version's own
document, blobs = missing.described(...)       # a number and a parent of the target's; id, time and lineage stay
Change.finish(document); Change.commit()       # once everything that arrived was looked at

A version that is there already, by its id or by its content at its run and step, is passed over: what was interrupted
and is repeated sends the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckstore.encoding.writer import ObjectWriter
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
from ckstore.operations.commit import Change
from ckstore.operations.missing import find_missing
from ckstore.operations.naming import check_run, check_run_is_no_tag, tag
from ckstore.operations.verify import check_objects, check_restores
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage import reserve
from ckstore.storage.catalog import VersionRow
from ckstore.storage.durable import sweep_temporaries
from ckstore.storage.pack import PackWriter
from ckstore.storage.pack_reader import MissingPackError
from ckstore.storage.root import PACKS

if TYPE_CHECKING:
    from ckstore.repository import Repository

Progress = Callable[[int], None]

#: How often a version is begun again because its store, or the target, has changed meanwhile.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Transferred:
    """A version that was sent, or would be.

    Attributes
    ----------
    version
        Its row in the store that it came from.
    arrived
        Its row where it is now; None in a dry run.
    bytes
        Bytes of the packs that were written; in a dry run of the layers that would be.
    """

    version: VersionRow
    arrived: VersionRow | None
    bytes: int


@dataclass(frozen=True, slots=True)
class NotTransferred:
    """A version that could not be sent, and why."""

    version: VersionRow
    error: CkstoreError


@dataclass(slots=True)
class TransferReport:
    """What a transfer did or would do.

    Attributes
    ----------
    versions
        What was sent.
    there
        Versions that the target had already; rows of the store that they would have come from.
    failed
        What could not be sent: it is damaged, or stored against what is, or other content is at its run and step.
    """

    versions: list[Transferred] = field(default_factory=list)
    there: list[VersionRow] = field(default_factory=list)
    failed: list[NotTransferred] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all that was sent."""
        return sum(item.bytes for item in self.versions)


def transfer(
    source: Repository,
    target: Repository,
    rows: Sequence[VersionRow],
    *,
    dry_run: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> TransferReport:
    """Let another store have versions, with all that restoring them takes; what it has is not sent again.

    Parameters
    ----------
    source, target
        Where the versions are, and where they go. Of the source nothing is changed.
    rows
        The versions, by number: ancestors first.
    dry_run
        Only say what would be sent.
    verify
        Decode every version that arrived and compare, before it becomes visible.
    progress
        Called with numbers of bytes of versions that are done, as they count in `original_bytes`.

    Raises
    ------
    DiskFullError, LockedError
        What was sent before is there; the next transfer sends the rest.
    """
    work = _Transfer(source, target, verify=verify, progress=progress)
    if dry_run:
        return work.run(rows, dry_run=True)
    target.require_writable()
    with suppress(OSError):  # What a killed transfer left behind is only in the way of the disk.
        sweep_temporaries(target.path / PACKS)
    with reserve.kept(target.path):
        return work.run(rows, dry_run=False)


class _Transfer:
    def __init__(self, source: Repository, target: Repository, *, verify: bool, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._verify = verify
        self._progress = progress or (lambda count: None)
        self._rows = {row.number: row for row in source.catalog.versions()}
        self._tags = _tags_by_number(source.catalog.tags())
        # Packs of the source that are what their names say.
        self._trusted: set[str] = set()
        # Versions of the target by the numbers of the source's versions that have their content.
        self._same: dict[int, VersionRow] = {}
        self._look()

    def _look(self) -> None:
        """See which versions the target has."""
        self._there = {row.uid: row for row in self._target.catalog.versions()}
        self._steps = {(row.run, row.step): row for row in self._there.values() if row.step is not None}

    def run(self, rows: Sequence[VersionRow], *, dry_run: bool) -> TransferReport:
        report = TransferReport()
        planned: set[str] = set()
        for row in rows:
            try:
                there, sent = self._standing(row), 0
                if there is None and dry_run:
                    sent = find_missing(StoredVersion(self._source, row), self._target, planned).nbytes
                elif there is None:
                    there, sent = self._sent(row)
                if there is None or sent:
                    report.versions.append(Transferred(row, there, sent))
                else:
                    report.there.append(row)
                    self._progress(row.original_bytes)
                if there is not None and not dry_run:
                    self._tag(row, there)
            except (DiskFullError, LockedError):
                raise
            except CkstoreError as error:
                report.failed.append(NotTransferred(row, error))
        return report

    def _standing(self, row: VersionRow) -> VersionRow | None:
        """The version in the target that is this one, by its id or by its content at its run and step.

        Raises
        ------
        ConflictError
            Other content is at that run and step.
        """
        there = self._there.get(row.uid)
        if there is None and row.step is not None:
            there = self._steps.get((row.run, row.step))
            if there is not None and not _is_same(self._source, row, self._target, there):
                raise ConflictError(
                    f"{row.run}@{row.step} holds other content in {self._target.place}, as version {there.number};"
                    " forget it there, or name other versions."
                )
        if there is not None:
            self._same[row.number] = there
        return there

    def _sent(self, row: VersionRow) -> tuple[VersionRow, int]:
        """The version where it arrived, and the bytes of its packs: none where another process was first."""
        for left in reversed(range(_TRIES)):
            try:
                return self._send(row)
            except (ConflictError, NotFoundError, IntegrityError) as error:
                # Something was moved, compacted or forgotten in either store since it was looked up; what is taken for
                # damage may be what was looked up before that.
                if isinstance(error, IntegrityError) and not isinstance(error, MissingPackError) and left < _TRIES - 1:
                    raise
                self._source.resolver.forget()
                row = self._source.catalog.version(row.number)
                self._source.packs.close()
                self._target.resolver.forget()
                self._look()
                there = self._standing(row)
                if there is not None:
                    return there, 0
                if not left:
                    raise
        raise AssertionError

    def _send(self, row: VersionRow) -> tuple[VersionRow, int]:
        target = self._target
        catalog, version = target.catalog, StoredVersion(self._source, row)
        check_run(version.document.run)
        check_run_is_no_tag(catalog, version.document.run)
        number = committed = 0
        try:
            with ExitStack() as held:
                with catalog.transaction():  # Each commit waits for the disk: one for both.
                    number = catalog.reserve_number()
                    lease = held.enter_context(catalog.lease(f"transfer {number}"))
                missing = find_missing(version, target)
                coarse = held.enter_context(PackWriter(target.path, "coarse"))
                beside = held.enter_context(PackWriter(target.path, "raw" if missing.raw else "exact"))
                writer = ObjectWriter(coarse, beside)
                share = _Share(self._progress, row.original_bytes, missing.nbytes)
                missing.write(writer, self._trusted, share.done)
                with Change(target, writer) as change:
                    change.foresee()
                    document, blobs = missing.described(target, number, self._parent(row))
                    change.finish(document, blobs)
                    with change.version() as arrived:
                        _check(arrived)
                        if self._verify:
                            check_objects(arrived)
                            check_restores(arrived)
                    change.commit(needs=missing.needs, lease=lease)
                    assert change.row is not None
                    committed = change.row.number
                    sent = sum(pack.bytes for pack in change.packs)
        except BaseException:
            if number:
                catalog.release_number(number)
            target.resolver.forget()
            raise
        share.end()
        there = self._there[row.uid] = self._same[row.number] = catalog.version(committed)
        return there, sent

    def _parent(self, row: VersionRow) -> VersionRow | None:
        """The nearest ancestor that the target has."""
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

    def _tag(self, row: VersionRow, there: VersionRow) -> None:
        """Let the version's tags mean it in the target too, where these are free."""
        catalog = self._target.catalog
        for name in self._tags.get(row.number, ()):
            with suppress(UsageError):  # A run has that name.
                catalog.commit(partial(self._tag_free, there, name))

    def _tag_free(self, there: VersionRow, name: str) -> None:
        if name not in self._target.catalog.tags():
            tag(self._target, there, name)


class _Share:
    """Turns bytes of layers that were written into bytes of a version that are done."""

    def __init__(self, progress: Progress, whole: int, layers: int) -> None:
        self._progress = progress
        self._whole = whole
        self._layers = layers
        self._written = 0
        self._said = 0

    def done(self, count: int) -> None:
        """So many bytes more were written."""
        self._written += count
        self._say(self._whole * self._written // max(self._layers, 1))

    def end(self) -> None:
        """All were."""
        self._say(self._whole)

    def _say(self, done: int) -> None:
        self._progress(done - self._said)
        self._said = done


def _check(version: StoredVersion) -> None:
    """Raise `IntegrityError` unless all of a version is there, in bounds, and cut as its layout says."""
    repository = version.repository
    for lattice, content in set(version.document.objects):
        for record in repository.reader.records(lattice, content):
            if record.end > repository.packs.size(record.pack):
                raise IntegrityError(f"Pack {record.pack} is too short for object {record.id}; see `ckstore verify`.")
    for file, layout in enumerate(version.layout.files):
        version.skeleton(file)
        for extent in range(len(layout.extents)):
            version.require(file, extent)


def _is_same(source: Repository, row: VersionRow, target: Repository, there: VersionRow) -> bool:
    """Whether two versions hold the same: of one file its bytes, of a directory also names and modes."""
    said, known = source.resolver.document(row), target.resolver.document(there)
    if not (said.is_directory or known.is_directory):
        return [file.sha256 for file in said.files] == [file.sha256 for file in known.files]
    return _tree(said) == _tree(known)


def _tree(document: VersionDocument) -> tuple[object, ...]:
    files = {(file.path, file.sha256, file.mode) for file in document.files}
    return document.is_directory, files, set(document.links), set(document.directories)


def _tags_by_number(tags: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, number in tags.items():
        found.setdefault(number, []).append(name)
    return found
