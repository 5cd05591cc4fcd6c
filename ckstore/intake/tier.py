"""A store on a local disk in front of a bucket: versions are durable here first, then in the bucket.

tier.find(name)      # a name's version, fetched from the bucket if that has a newer one
tier.pushed(name)    # the second stage of a save: done once the bucket has the version
"""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from ckstore.commit.naming import policy_of
from ckstore.errors import CkstoreError, ConflictError, NotFoundError, UnreachableError
from ckstore.gc.collect import gc
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.retention.forget import forget
from ckstore.storage.catalog import RECENT
from ckstore.transfer.transfer import Transfer

if TYPE_CHECKING:
    from ckstore.repository import Address, Repository
    from ckstore.storage.catalog import VersionRow

#: Seconds between looks for new versions, and after an error.
_LOOK, _AGAIN = 0.5, 5.0

#: Latest versions of a run that stay here although the bucket has them: trainings read them.
_KEPT = 2

_log = logging.getLogger("ckstore")


class Tier:
    """Sends the versions of a local store to a bucket, in a background thread.

    Closing it waits for versions that the bucket lacks, unless that is out of reach; the next tier goes on.
    """

    def __init__(self, local: Repository, remote: Address) -> None:
        self._local = local
        self._address = remote
        self._changed = threading.Condition()
        #: Rows in the bucket by id, and the ids by the number here.
        self._futures: dict[str, Future[VersionRow]] = {}
        self._uids: dict[int, str] = {}
        self._is_closed = self._has_ended = False
        self._remote = remote.open("r")
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
        self._remote.catalog.refresh(within=RECENT)
        future: Future[VersionRow] = Future()
        future.set_result(self._remote.catalog.resolve(name))
        return future

    def find(self, name: str) -> str:
        """Return the id of the version of a name, or the name itself if the bucket has no newer one than this store."""
        remote, local = self._remote, self._local
        with suppress(NotFoundError, UnreachableError):
            remote.catalog.refresh(within=RECENT)
            row = remote.catalog.resolve(name)
            with suppress(NotFoundError):
                here = local.catalog.resolve(name)
                if here.uid == row.uid or here.created >= row.created:
                    return name
            if not local.catalog.with_uid(row.uid):
                other = None if row.step is None else local.catalog.at_step(row.run, row.step)
                if other is not None and not row.superseded:
                    _log.warning("%s is another version in the bucket, which is newer.", other.name)
                    forget(local, [other])
                report = Transfer(remote, local, restore=True).run([row])
                for failed in report.failed:
                    raise failed.error
            return row.uid
        return name

    def close(self) -> None:
        """Wait until the bucket has all versions, or the thread fails."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
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
                        self._send_all(local, remote)
                    return
                except (CkstoreError, OSError) as error:
                    if is_last or str(error) != said:
                        _log.warning("%s has not all versions of %s yet: %s", self._address.place, local.place, error)
                        said = str(error)
                    if is_last:
                        return
                    pause = _AGAIN

    def _send_all(self, local: Repository, remote: Repository) -> None:
        """Send versions until the tier is closed; raise an error of the bucket."""
        transfer, encoder = Transfer(local, remote), BackgroundEncoder(remote)
        known: set[str] = set()
        number = math.nan
        try:
            while True:
                with self._changed:
                    is_last = self._is_closed
                latest = local.catalog.latest()
                if latest is not None and latest.number != number:
                    for row in local.catalog.versions():
                        if row.uid not in known:
                            self._send(transfer, local, remote, encoder, row)
                            known.add(row.uid)
                    number = latest.number
                    _free(local, remote)
                self._note_forgotten(local, remote)
                if is_last:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _LOOK)
        finally:
            encoder.close(finish=False)

    def _send(
        self, transfer: Transfer, local: Repository, remote: Repository, encoder: BackgroundEncoder, row: VersionRow
    ) -> None:
        """Send a version; a run that went on in the bucket without it keeps it out."""
        remote.catalog.refresh(within=RECENT)
        last = remote.catalog.latest(row.run)
        error: CkstoreError | None = None
        if last is not None and last.created > row.created and not local.catalog.with_uid(last.uid):
            error = ConflictError(f"Run {row.run} in {remote.place} went on without {row.name}, which stays here.")
        else:
            report = transfer.run([row])
            error = report.failed[0].error if report.failed else None
            if isinstance(error, UnreachableError):
                raise error
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


def _free(local: Repository, remote: Repository) -> None:
    """Forget versions that are whole in the bucket, but for the latest of each run and tagged ones."""
    tagged = set(local.catalog.tags().values())
    for run in local.catalog.runs():
        rows = local.catalog.versions(run.name)
        gone = [row for row in rows[:-_KEPT] if row.number not in tagged and _is_whole(remote, row.uid)]
        if gone:
            forget(local, gone, for_good=True)
            gc(local)


def _is_whole(remote: Repository, uid: str) -> bool:
    """Return whether the bucket has a version and its packs, which others may have deleted."""
    catalog, packs = remote.catalog, remote.packs
    return any(
        all(packs.is_there(pack, catalog.pack_bytes(pack) or 0) for pack in catalog.uses([row.number])[row.number])
        for row in catalog.with_uid(uid)
    )
