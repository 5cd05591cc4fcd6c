"""A store on a local disk in front of a bucket: versions are durable here first, then in the bucket.

tier.find(name)      # a name's version, fetched from the bucket if that has a newer one
tier.pushed(row)     # the second stage of a save: done once the bucket has the version
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
from ckstore.retention.compactor import Compactor
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
        self._futures: dict[str, Future[VersionRow]] = {}
        self._is_closed = False
        self._remote = remote.open("r")
        self._thread = threading.Thread(target=self._work, name="ckstore-tier", daemon=True)
        self._thread.start()

    def pushed(self, row: VersionRow) -> Future[VersionRow]:
        """Return a future of a version's row in the bucket."""
        with self._changed:
            self._changed.notify_all()
            return self._future(row.uid)

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
                for other in local.catalog.versions():
                    if row.step is not None and (other.run, other.step) == (row.run, row.step):
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
        for future in self._futures.values():
            future.cancel()

    def _future(self, uid: str) -> Future[VersionRow]:
        return self._futures.setdefault(uid, Future())

    def _work(self) -> None:
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
        transfer, compactor = Transfer(local, remote), Compactor(remote)
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
                            self._send(transfer, local, remote, compactor, row)
                            known.add(row.uid)
                    number = latest.number
                    _free(local, remote)
                if is_last:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _LOOK)
        finally:
            compactor.close(finish=False)

    def _send(
        self, transfer: Transfer, local: Repository, remote: Repository, compactor: Compactor, row: VersionRow
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
            future = self._future(row.uid)
        if future.done():
            return
        if arrived:
            future.set_result(arrived[0])
            compactor.begin(row.run, policy_of(remote.catalog, row.run).kept_hot, arrived[0])
            return
        error = error or NotFoundError(f"{remote.place} has forgotten {row.name}, or has its content already.")
        _log.warning("%s", error)
        future.set_exception(error)


def _free(local: Repository, remote: Repository) -> None:
    """Forget versions that the bucket has, but for the latest of each run and tagged ones."""
    tagged = set(local.catalog.tags().values())
    for run in local.catalog.runs():
        rows = local.catalog.versions(run.name)
        gone = [row for row in rows[:-_KEPT] if row.number not in tagged and remote.catalog.with_uid(row.uid)]
        if gone:
            forget(local, gone, for_good=True)
            gc(local)
