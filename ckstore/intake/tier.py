"""A store on a local disk in front of a bucket: versions are durable here first, then in the bucket.

tier.find(name)      # a name's version, fetched from the bucket if that has a newer one
tier.pushed(name)    # the second stage of a save: done once the bucket has the version
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckstore.commit.naming import policy_of, set_metrics, tag, untag
from ckstore.errors import CkstoreError, ConflictError, NotFoundError, UnreachableError, UsageError
from ckstore.gc.collect import gc
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Address
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.retention.forget import forget, undo
from ckstore.runtime.provenance import own_metrics
from ckstore.storage import change_log, durable, root
from ckstore.storage.catalog import RECENT
from ckstore.storage.names import BY_METRIC, LATEST
from ckstore.storage.opening import ensure_store
from ckstore.storage.rows import metric_value
from ckstore.storage.version_names import is_lowest
from ckstore.transfer.transfer import Transfer

if TYPE_CHECKING:
    from pathlib import Path

    from ckstore.repository import Repository
    from ckstore.storage.catalog import VersionRow

#: Seconds between looks for new versions, and after an error.
_LOOK, _AGAIN = 0.5, 5.0

#: Latest versions of a run that stay here although the bucket has them: trainings read them.
_KEPT = 2

#: The file of a local store that names its bucket.
_BUCKET = "bucket"

#: In place of an id: a tag that was removed is removed from any version.
_ANY = "any"

_log = logging.getLogger("ckstore")


class Tier:
    """Sends the versions of a local store to a bucket, in a background thread.

    Closing it waits for versions that the bucket lacks, unless that is out of reach; the next tier goes on.
    """

    def __init__(self, local: Repository, address: Address, remote: Repository | None) -> None:
        self.place = address.place
        self._local = local
        self._address = address
        self._changed = threading.Condition()
        #: Rows in the bucket by id, and the ids by the number here.
        self._futures: dict[str, Future[VersionRow]] = {}
        self._uids: dict[int, str] = {}
        #: Versions as they were sent, by id, and the ids of tags that were, by the tag.
        self._sent: dict[str, VersionRow] = {}
        self._is_closed = self._has_ended = False
        self._remote = remote
        self._note = _Note.of(local.path)
        #: Versions whose metrics were set since all was sent.
        self._measured: set[int] = set()
        self._tags = self._sent_tags()
        self._thread = threading.Thread(target=self._work, name="ckstore-tier", daemon=True)
        self._thread.start()

    def pushed(self, name: str | int) -> Future[VersionRow]:
        """Return a future of the row in the bucket of a version that is here, or has left since."""
        with self._changed:
            self._changed.notify_all()
            try:
                return self._future(self._local.catalog.resolve(name))
            except NotFoundError:
                if isinstance(name, int):
                    if name in self._uids:
                        return self._futures[self._uids[name]]
                    raise
            remote = self._remote
        if remote is None:
            raise UnreachableError(f"{self.place} is out of reach since the store was opened.")
        remote.catalog.refresh(within=RECENT)
        future: Future[VersionRow] = Future()
        future.set_result(remote.catalog.resolve(name))
        return future

    def find(self, name: str) -> str:
        """Return the id of the version of a name, here or fetched from the bucket; the name itself if there is none."""
        remote, local = self._remote, self._local
        here = self._here(name)
        found = name if here is None else here.uid
        if remote is None:
            return found
        with suppress(NotFoundError, UnreachableError):
            remote.catalog.refresh(within=RECENT)
            row = remote.catalog.resolve(name)
            if here is not None and (here.uid == row.uid or self._is_newer(remote, name, here, row)):
                return found
            if not local.catalog.with_uid(row.uid):
                other = None if row.step is None else local.catalog.at_step(row.run, row.step)
                if other is not None and not row.superseded and row.uid in _left(local):
                    return found  # It was replaced here, which the bucket does not know yet.
                self._fetch(remote, row, None if row.superseded else other)
            return row.uid
        return found

    def _fetch(self, remote: Repository, row: VersionRow, other: VersionRow | None) -> None:
        """Copy a version of the bucket to the disk, in place of another one at its step, if any."""
        if other is not None:
            _log.warning("%s is another version in the bucket, which is newer.", other.name)
            forget(self._local, [other])
        for failed in Transfer(remote, self._local, restore=True, tags=False).run([row]).failed:
            if other is not None:
                undo(self._local)
            raise failed.error

    def _here(self, name: str) -> VersionRow | None:
        """Return the version of a name on the disk; the number of one that was fetched says nothing of its age."""
        with suppress(NotFoundError):
            row = self._local.catalog.resolve(name)
            rows = self._local.catalog.versions() if name == LATEST else [row]
            return max(rows, key=lambda row: row.created)
        return None

    def _is_newer(self, remote: Repository, name: str, here: VersionRow, there: VersionRow) -> bool:
        """Return whether this store has the newer version of a name, or the better one of a metric.

        Clocks tell only if neither store has the other one's version.
        """
        if name in self._local.catalog.tags():
            return self._tags.get(name) != here.uid
        if (named := BY_METRIC.fullmatch(name)) is not None:
            ours, theirs = (metric_value(row.metrics.get(named[3])) for row in (here, there))
            if ours is None or theirs is None:
                return theirs is None
            return ours < theirs if is_lowest(named) else ours > theirs
        is_there, is_here = (
            bool(found.catalog.with_uid(row.uid)) for found, row in ((remote, here), (self._local, there))
        )
        if is_here != is_there:
            return is_here
        return here.created >= there.created or there.uid in _left(self._local)

    def _sent_tags(self) -> dict[str, str]:
        """Return the tags that the bucket has, by the log of the disk: without those set since all was sent."""
        found, remote = _tags(self._local), self._remote
        for name, uid in list(found.items()):
            if remote is not None and not remote.catalog.with_uid(uid):
                del found[name]
        for record in self._local.catalog.log_records(self._note.sent):
            if record["change"] == "tag":
                found.pop(record["tag"], None)
            elif record["change"] == "untag":
                found[record["tag"]] = _ANY
            elif record["change"] == "metrics":
                self._measured.add(record["version"])
        return found

    def close(self) -> None:
        """Wait until the bucket has all versions, or the thread fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._remote is not None:
            self._remote.close()

    def _future(self, row: VersionRow) -> Future[VersionRow]:
        self._uids[row.number] = row.uid
        future = self._futures.setdefault(row.uid, Future())
        if self._has_ended:
            future.cancel()
        return future

    def _work(self) -> None:
        try:
            self._try()
        finally:  # Nobody waits for a thread that has ended, for whatever reason.
            with self._changed:
                self._has_ended = True
                for future in self._futures.values():
                    future.cancel()

    def _try(self) -> None:
        """Send versions, again after errors."""
        pause, said = 0.0, ""
        with self._local.reopened("a") as local:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, pause)
                    is_last = self._is_closed
                try:
                    with self._address.open("a") as remote:
                        self._note_reached()
                        self._send_all(local, remote)
                    return
                except (CkstoreError, OSError) as error:
                    if is_last or str(error) != said:
                        _log.warning("%s has not all versions of %s yet: %s", self._address.place, local.place, error)
                        said = str(error)
                    if is_last:
                        return
                    pause = _AGAIN

    def _note_reached(self) -> None:
        """Open a bucket for reading that was away."""
        if self._remote is None:
            self._remote = self._address.open("r")

    def _send_all(self, local: Repository, remote: Repository) -> None:
        """Send versions until the tier is closed; raise an error of the bucket."""
        self._transfer, encoder = Transfer(local, remote), BackgroundEncoder(remote)
        seen: object = None
        try:
            while True:
                with self._changed:
                    is_last = self._is_closed
                latest = local.catalog.latest()
                now = None if latest is None else latest.number, local.catalog.logged()
                if now != seen:
                    rows = local.catalog.versions()
                    for row in rows:
                        if row.uid not in self._sent:
                            self._send(local, remote, encoder, row)
                        if row.uid in self._sent or row.number in self._measured:
                            _send_metrics(remote, row, self._sent.get(row.uid))
                        self._sent[row.uid] = row
                        self._measured.discard(row.number)
                    self._sent = {row.uid: row for row in rows}  # Without versions that left.
                    self._send_tags(local, remote)
                    self._note = self._note.sent_to(local.path, now[1])
                    seen = now
                    self._free(local, remote)
                self._note_forgotten(local, remote)
                if is_last:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _LOOK)
        finally:
            encoder.close(finish=False)

    def _transferred(self, row: VersionRow) -> CkstoreError | None:
        """Send a version; return its error."""
        report = self._transfer.run([row])
        error = report.failed[0].error if report.failed else None
        if isinstance(error, UnreachableError):
            raise error
        return error

    def _send(self, local: Repository, remote: Repository, encoder: BackgroundEncoder, row: VersionRow) -> None:
        """Send a version; a run that went on in the bucket without it keeps it out."""
        remote.catalog.refresh(within=RECENT)
        last = remote.catalog.latest(row.run)
        error: CkstoreError | None = None
        is_older = last is not None and last.created > row.created and not local.catalog.with_uid(last.uid)
        if last is not None and is_older and last.uid not in _left(local):
            error = ConflictError(f"Run {row.run} in {remote.place} went on without {row.name}, which stays here.")
        elif self._transferred(row) is not None:
            try:
                _forget_replaced(local, remote, row)
                self._transfer = Transfer(local, remote)  # The bucket has changed.
                error = self._transferred(row)
            except ConflictError as conflict:  # That one is tagged.
                error = conflict
        arrived = remote.catalog.with_uid(row.uid)
        with self._changed:
            future = self._future(row)
        if future.done():
            return
        if arrived:
            future.set_result(arrived[0])
            encoder.begin(row.run, policy_of(remote.catalog, row.run).kept_hot, arrived[0])
            return
        error = error or NotFoundError(f"{remote.place} has forgotten {row.name}, or has its content already.")
        _log.warning("%s", error)
        future.set_exception(error)

    def _send_tags(self, local: Repository, remote: Repository) -> None:
        """Set and remove the tags in the bucket that were set or removed here since the last time."""
        tags = _tags(local)
        changed = [name for name in tags.keys() | self._tags.keys() if tags.get(name) != self._tags.get(name)]
        if changed:
            remote.catalog.refresh(within=RECENT)
        for name in sorted(changed):
            try:
                if name in tags:
                    self._send_tag(remote, name, tags[name])
                else:
                    self._remove_tag(remote, name)
            except (NotFoundError, UsageError) as error:
                _log.warning("The tag %s is not changed in %s: %s", name, remote.place, error)

    def _send_tag(self, remote: Repository, name: str, uid: str) -> None:
        for row in remote.catalog.with_uid(uid):  # None if it is not sent yet, or stays here.
            if remote.catalog.tagged(name) != row.number:
                tag(remote, row, name)
            self._tags[name] = uid

    def _remove_tag(self, remote: Repository, name: str) -> None:
        before, present = self._tags[name], remote.catalog.tagged(name)
        if present is not None and before in (_ANY, remote.catalog.version(present).uid):
            untag(remote, name)
        del self._tags[name]

    def _free(self, local: Repository, remote: Repository) -> None:
        """Forget versions that are whole in the bucket, but for the latest of each run and tagged ones."""
        for run in local.catalog.runs():
            tagged = set(local.catalog.tags().values())
            older = [row for row in local.catalog.versions(run.name)[:-_KEPT] if row.number not in tagged]
            whole = [row for row in older if row.uid in self._sent and _is_whole(remote, row.uid)]
            has_left = bool(whole) and local.catalog.commit(partial(self._leave, local, run.name, whole))
            if has_left:
                gc(local)

    def _leave(self, local: Repository, run: str, rows: Sequence[VersionRow]) -> bool:
        """Forget versions; a tag or a metric that was set since keeps one until it is sent."""
        tagged = set(local.catalog.tags().values())
        present = {row.uid: row for row in local.catalog.versions(run) if row.number not in tagged}
        gone = [row for row in rows if row.uid in present and _is_same(present[row.uid], self._sent[row.uid])]
        forget(local, gone, for_good=True)
        return bool(gone)

    def _note_forgotten(self, local: Repository, remote: Repository) -> None:
        """End the futures of versions that left this store before this thread sent them."""
        with self._changed:
            waiting = [(uid, future) for uid, future in self._futures.items() if not future.done()]
        for uid, future in waiting:
            if local.catalog.with_uid(uid):
                continue
            remote.catalog.refresh(within=RECENT)
            if arrived := remote.catalog.with_uid(uid):  # Another process has sent it.
                future.set_result(arrived[0])
            else:
                future.set_exception(NotFoundError(f"Version {uid} was forgotten before {remote.place} had it."))


@dataclass(frozen=True)
class _Note:
    """The note on a disk: its bucket, and the last record of the log whose tags and metrics were sent."""

    bucket: str = ""
    sent: str = ""

    @classmethod
    def of(cls, disk: Path) -> _Note:
        """Read the note of a disk; an empty one if it has none."""
        lines = (disk / _BUCKET).read_text("utf-8", errors="replace").splitlines() if (disk / _BUCKET).is_file() else []
        return cls(*[*lines, "", ""][:2])

    def sent_to(self, disk: Path, record: str) -> _Note:
        """Note that all was sent up to a record."""
        if record == self.sent:
            return self
        durable.write_file(disk / _BUCKET, f"{self.bucket}\n{record}\n".encode())
        return _Note(self.bucket, record)


def reached(disk: Path, address: Address) -> Repository | None:
    """Return the bucket that a local store is in front of, made if it is new; None if an old one's is out of reach.

    Raise `ConflictError` if the local store is in front of another one, or has versions and is in front of none.
    """
    bucket = _Note.of(disk).bucket
    if not bucket and (disk / root.CATALOG).is_file():
        with Address(str(disk)).open("r") as local:
            if local.catalog.latest() is not None:
                raise ConflictError(f"{disk} is a store of its own; name another directory as `local`.")
    if bucket not in ("", address.place):
        raise ConflictError(f"{disk} is in front of {bucket}; name another directory as `local`.")
    try:
        remote = address.open("r")
    except UnreachableError as error:
        if not bucket:
            raise
        _log.warning("%s", error)
        return None
    if not bucket:
        ensure_store(disk)
        durable.write_file(disk / _BUCKET, f"{address.place}\n".encode())
    return remote


def _left(local: Repository) -> set[str]:
    """Return the ids of versions that were replaced on a disk, or have left it."""
    return {uid for uid, _ in change_log.forgotten(local.catalog.log_records())}


def _forget_replaced(local: Repository, remote: Repository, row: VersionRow) -> None:
    """Forget the version in the bucket that a version replaced here, unless that is another machine's."""
    there = None if row.step is None else remote.catalog.at_step(row.run, row.step)
    if there is not None and StoredVersion(local, row).document.replaces is not None and there.uid in _left(local):
        forget(remote, [there], for_good=True)


def _tags(local: Repository) -> dict[str, str]:
    """Return the id of the version of each tag."""
    tags = local.catalog.tags()
    uids = {row.number: row.uid for row in local.catalog.versions()}  # Later: a tag that moves is not missed.
    return {name: uids[number] for name, number in tags.items() if number in uids}


def _is_same(row: VersionRow, other: VersionRow) -> bool:
    """Return whether metrics are equal, with NaN equal to NaN."""
    return repr(row.metrics) == repr(other.metrics)


def _send_metrics(remote: Repository, row: VersionRow, before: VersionRow | None) -> None:
    """Repeat changes of a version's metrics in the bucket; by default all that differ there."""
    if before is not None and _is_same(row, before):
        return
    remote.catalog.refresh(within=RECENT)
    for there in remote.catalog.with_uid(row.uid):
        known = (before or there).metrics
        changed = {
            name: value for name, value in row.metrics.items() if name not in known or repr(known[name]) != repr(value)
        }
        removed = (known.keys() - row.metrics.keys()) & own_metrics(there.metrics).keys()
        if changed or removed:
            set_metrics(remote, there, changed, sorted(removed))


def _is_whole(remote: Repository, uid: str) -> bool:
    """Return whether the bucket has a version and its packs, which others may have deleted."""
    catalog, packs = remote.catalog, remote.packs
    for row in catalog.with_uid(uid):
        sizes = {pack: catalog.pack_bytes(pack) for pack in catalog.uses([row.number])[row.number]}
        return all(size is not None and packs.is_there(pack, size) for pack, size in sizes.items())
    return False
