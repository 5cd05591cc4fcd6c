"""Follows the name of a version: looks for its newest version, updates a directory, and yields it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from ckstore.errors import (
    CkstoreError,
    ConflictError,
    DiskFullError,
    IntegrityError,
    LockedError,
    NotFoundError,
    UnreachableError,
)
from ckstore.following.marker import Marker, current, held, point, prepare, prepare_twins, read_marker, twins
from ckstore.following.update import Amounts, update
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.rows import VersionRow

#: Seconds between looks.
POLL = 1.0

#: The longest pause in seconds after repeated errors; it doubles from the time between looks on.
_PAUSE = 60.0


class NotAppliedError(CkstoreError):
    """A version could not be applied; a follower tries it again."""


#: Errors after which a later look may succeed: of the store, or of a version that changed or was forgotten.
_PASSING = (
    UnreachableError, LockedError, DiskFullError, NotFoundError, IntegrityError, ConflictError, NotAppliedError,
    OSError,
)  # fmt: skip

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Followed:
    """A version that a directory holds completely.

    Attributes
    ----------
    path
        The directory.
    version
        The version's row in the catalog.
    was_applied
        Whether the directory's marker says that the version was applied before, such as by a follower that restarted.
    bytes_read
        Bytes of the store that the update needed; 0 if another follower of the directory made it.
    bytes_written
        Bytes written to the directory.
    is_mended
        Whether files differed from those of the last update.
    seconds
        Time of the update.
    lag
        Seconds from the version's creation to the end of the update, by the clocks of both machines.

    Examples
    --------
    >>> for followed in store.follow("gpt", "served", once=True):
    ...     followed.path.name, followed.version, followed.bytes_written > 0
    ('served', <ckstore.VersionRow 3 gpt@300>, True)
    """

    path: Path
    version: VersionRow
    was_applied: bool
    bytes_read: int
    bytes_written: int
    is_mended: bool
    seconds: float
    lag: float

    @property
    def name(self) -> str:
        """`run@step`, or the run of a version without step."""
        return self.version.run if self.version.step is None else f"{self.version.run}@{self.version.step}"


def follow(
    repository: Repository,
    name: str,
    root: Path,
    *,
    once: bool = False,
    poll: float = POLL,
    stop: Event | None = None,
    apply: Callable[[Followed], None] | None = None,
    swap: bool = False,
    include: Sequence[str] = (),
    every: int = 1,
    signed_by: Path | None = None,
) -> Iterator[Followed]:
    """Yield each newest version once the directory holds it; see `Store.follow`.

    `apply` is called before a version is yielded. If it raises `NotAppliedError`, it is called again after a pause,
    with a newer version if there is one by then. A version counts as applied once the caller asks for the next.
    """
    follower = _Follower(
        repository, name, root, poll, stop or Event(), apply, swap=swap, include=tuple(include), every=every,
        signed_by=signed_by,
    )  # fmt: skip
    return follower.run(once=once)


class _Follower:
    """One reader of a run, with the id of the version that it yielded last."""

    def __init__(
        self,
        repository: Repository,
        name: str,
        root: Path,
        poll: float,
        stop: Event,
        apply: Callable[[Followed], None] | None,
        *,
        swap: bool,
        include: tuple[str, ...],
        every: int,
        signed_by: Path | None,
    ) -> None:
        self._repository = repository
        self._name = name
        self._root = root
        self._poll = poll
        self._stop = stop
        self._apply = apply
        self._swap = swap
        self._include = include
        self._every = every
        self._signed_by = signed_by
        self._trusted: str | None = None
        self._last: str | None = None
        self._said = ""

    def run(self, *, once: bool) -> Iterator[Followed]:
        """Yield versions until stopped; with `once`, the present one."""
        (prepare_twins if self._swap else prepare)(self._root)
        pause = self._poll
        while not self._stop.is_set():
            try:
                yield from self._delivered(self._newest())
                pause, self._said = self._poll, ""
                failed: Exception | None = None
            except _PASSING as error:
                failed = error
            if failed is not None:
                if once:
                    raise failed
                self._say(failed)
                pause = min(2 * pause, _PAUSE)
            elif once:
                return
            self._stop.wait(pause)

    @property
    def _here(self) -> Path:
        """The directory that readers use."""
        if not self._swap:
            return self._root
        found = current(self._root)
        return twins(self._root)[0] if found == self._root else found

    def _delivered(self, row: VersionRow) -> Iterator[Followed]:
        """Yield a version once the directory holds it, unless it was yielded before and the files are as they were."""
        start, amounts = time.perf_counter(), None
        while not self._stop.is_set():
            here = self._here
            if amounts is None and row.uid == self._last and self._present(here, row) is not None:
                return
            with held(here, self._stop, exclusive=False) as is_held:
                marker = self._present(here, row) if is_held and here == self._here else None
                if marker is not None:
                    item = self._item(row, marker, amounts or Amounts(0, 0, False), time.perf_counter() - start)
                    if self._apply is not None:
                        self._apply(item)
                    self._last = row.uid
                    yield item
                    _note_applied(here, row)
                    return
            # A version that the directory holds is yielded even if there is a newer one by then.
            row, amounts = self._updated(here) or (self._newest(), amounts)

    def _updated(self, here: Path) -> tuple[VersionRow, Amounts] | None:
        """Bring the directory to the newest version, or its twin, to which the link leads then.

        Return the version and the work; None if another follower has done it.
        """
        one, other = twins(self._root)
        target = here if not self._swap else one if here == other or not self._root.is_symlink() else other
        with held(target, self._stop, exclusive=True) as is_held:
            if not is_held or here != self._here:
                return None
            # Another follower may have waited less, and found a newer version.
            row = self._newest()
            if self._present(here, row) is not None and (not self._swap or self._root.is_symlink()):
                return None
            version = self._stored(row)
            # Readers of a directory that swaps see nothing before it is complete.
            compare_first = self._signed_by is not None and not self._swap
            _, amounts = update(version, target, read_marker(target), self._include, compare_first=compare_first)
            if self._swap:
                point(self._root, target)
            return row, amounts

    def _stored(self, row: VersionRow) -> StoredVersion:
        """Return a version; raise `IntegrityError` unless it is signed by whom the caller named."""
        version = StoredVersion(self._repository, row)
        if self._signed_by is not None:
            from ckstore.reading.signature import require_signed

            require_signed(version, self._signed_by)
            self._trusted = row.uid
        return version

    def _item(self, row: VersionRow, marker: Marker, amounts: Amounts, seconds: float) -> Followed:
        lag = (datetime.now(UTC) - datetime.fromisoformat(row.created)).total_seconds()
        return Followed(
            self._root, row, marker.applied == row.uid, amounts.read, amounts.written, amounts.mended, seconds, lag
        )

    def _newest(self) -> VersionRow:
        self._repository.catalog.refresh()
        row = self._repository.catalog.resolve(self._name)
        found: VersionRow | None = row
        if self._every > 1 and (row.step is None or row.step % self._every):
            found = None if row.step is None else self._repository.catalog.below(row.run, row.step, self._every)
        if found is None:
            raise NotFoundError(f"No step up to that of {self._name} is a multiple of {self._every}; give another one.")
        if self._trusted != found.uid:
            self._stored(found)
        return found

    def _present(self, directory: Path, row: VersionRow) -> Marker | None:
        """Return the marker if a directory holds the version, and its files are as the update left them."""
        marker = read_marker(directory)
        if marker is None or not marker.is_complete or (marker.id, marker.include) != (row.uid, self._include):
            return None
        return None if marker.changed(directory) else marker

    def _say(self, error: Exception) -> None:
        """Log an error once."""
        if str(error) != self._said:
            self._said = str(error)
            _log.warning("%s Still following %s.", error, self._name)


def _note_applied(directory: Path, row: VersionRow) -> None:
    marker = read_marker(directory)
    if marker is not None and marker.is_complete and row.uid == marker.id != marker.applied:
        marker.as_applied().write(directory)
