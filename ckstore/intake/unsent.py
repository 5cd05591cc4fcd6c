"""Versions that ranks of several machines have saved: durable on their disks first, then in the bucket.

unsent.keep(packs)           # each rank: its finished pack stays on this disk until it is sent
unsent.keep_version(...)     # the coordinator: the version's pack, and the names of all ranks' packs
unsent.send()                # the packs of this machine
unsent.commit()              # versions whose packs are all in the bucket, in the order of their saves
unsent.finish()              # versions of an earlier job
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from ckstore.commit.change import Change
from ckstore.commit.naming import DEFAULT_RUN, policy_of
from ckstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.runtime import forks
from ckstore.storage import durable, root
from ckstore.storage.pack import PackInfo, PackName
from ckstore.storage.schema import Positive, canonical_json, decode, fields
from ckstore.writing.ingest import ingest

if TYPE_CHECKING:
    from ckstore.objects.documents import ManifestDocument
    from ckstore.repository import Repository
    from ckstore.storage.catalog import VersionRow
    from ckstore.writing.ingest import IngestReport
    from ckstore.writing.ranks import Written
    from ckstore.writing.request import IngestOptions

#: Directory of the mirror, and the permissions of its directories.
_UNSENT, _MODE = "unsent", 0o770
#: The packs of a version; the last one has its manifest.
_PACKS = fields({"packs": Annotated[list[tuple[PackName, Positive]], Meta(min_length=1)]})
#: Seconds between looks for the packs of other machines, and after an error.
_LOOK, _AGAIN = 0.5, 5.0

_log = logging.getLogger("ckstore")


class Unsent:
    """The packs and versions on this machine's disk that a bucket lacks; a thread sends them once it is started.

    Several processes of the machine share them. Each commits the versions that it has kept, whose files have its name;
    it locks a file of that name as long as it runs.
    """

    def __init__(self, repository: Repository) -> None:
        if repository.catalog.is_only:
            raise UsageError(
                f"{repository.place} is a directory; only saves into a bucket are durable elsewhere first."
            )
        repository.require_writable()
        self._repository = repository
        self._directory = repository.path / _UNSENT
        durable.new_directory(self._directory, _MODE)
        self._alive = ExitStack()
        is_own = False
        while not is_own:  # Until it is locked, another process takes it for that of a dead one.
            self._owner = self._directory / f"{secrets.token_hex(8)}.lock"
            durable.touch(self._owner)
            is_own = self._alive.enter_context(_claimed(self._owner, waits=True))
        self._arrived: dict[PackInfo, ManifestDocument] = {}
        self._futures: dict[str, Future[VersionRow]] = {}
        self._last: VersionRow | None = None
        self._goes_back = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ckstore-unsent", daemon=True)
        self._encoder = BackgroundEncoder(repository)

    def start(self) -> None:
        """Begin to send in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def close(self) -> None:
        """End the thread; packs that it has not sent stay on the disk."""
        self.stop()
        self._encoder.close(finish=False)
        if not [*self._directory.glob(f"{self._owner.stem}-*.json")]:
            self._owner.unlink(missing_ok=True)
        self._alive.close()
        for future in self._futures.values():
            future.cancel()

    def keep(self, packs: Sequence[str]) -> None:
        """Keep finished packs until they are sent."""
        for name in packs:
            with suppress(FileExistsError):
                os.link(self._repository.path / root.PACKS / name, self._directory / name)
        durable.sync_directory(self._directory)

    def keep_version(self, written: Written, options: IngestOptions) -> IngestReport:
        """Keep a version that ranks have written; `pushed` tells when the bucket has it."""
        repository = self._repository
        after = self._last
        is_named = options.parent is not None or after is None or after.run != (options.run or DEFAULT_RUN)
        if after is not None and (is_named or repository.catalog.with_uid(after.uid)):
            after = None
        promise = partial(self._promise, {pack.name for pack, _ in written.packs})
        goes_back = self._goes_back and after is not None
        kept = replace(written, keep=promise, after=after, goes_back=goes_back)
        try:
            with repository.resolver.under_way() as hold:
                hold(record for _, records in written.packs for record in records)
                report = ingest(repository, written.filled(repository), options, written=kept)
                if report.is_new:
                    self._goes_back = goes_back or repository.resolver.document(report.version).goes_back
                return report
        finally:
            repository.resolver.forget()  # No later version relies on objects that may never be committed.

    def pushed(self, pack: str) -> Future[VersionRow]:
        """Return a future of the row of a version that was kept, by the pack with its manifest."""
        return self._futures.setdefault(pack, Future())

    def _promise(self, of_ranks: Set[str], row: VersionRow, packs: Sequence[PackInfo]) -> None:
        said = canonical_json({"packs": [[pack.name, pack.bytes] for pack in packs]})
        path = self._directory / f"{self._owner.stem}-{row.number:015d}.json"
        durable.write_file(path, said)  # First: if the disk is full, no pack of the version is sent.
        try:
            self.keep([pack.name for pack in packs if pack.name not in of_ranks])
        except OSError:
            path.unlink()
            raise
        self._last = row

    def _work(self) -> None:
        said, pause = "", _LOOK
        while not self._stopped.wait(pause):
            try:
                self.send(waits=False)
                self.commit()
                pause = _LOOK
            except Exception as error:  # The futures wait for this thread.
                if str(error) != said:
                    _log.warning("%s has not all versions yet: %s", self._repository.place, error)
                said, pause = str(error), _AGAIN

    def send(self, *, waits: bool = True) -> None:
        """Send packs; with `waits`, also wait for other processes of this machine that send some."""
        for path in sorted(self._directory.glob("*.zip")):
            with _claimed(path, waits=waits) as is_own:
                if is_own:
                    with suppress(FileExistsError):
                        os.link(path, self._repository.path / root.PACKS / path.name)
                    self._repository.packs.publish([path.name])
                    path.unlink()

    def commit(self) -> None:
        """Commit the versions that this process has kept, in order, as far as all their packs are in the bucket."""
        self._commit(self._owner.stem, refuses=False)

    def finish(self) -> None:
        """Commit the versions of dead processes; refuse versions that lack packs, which no machine will send."""
        for lock in sorted(self._directory.glob("*.lock")):
            with _claimed(lock, waits=False) as is_dead:
                if is_dead:
                    self._commit(lock.stem, refuses=True)
                    lock.unlink()

    def _commit(self, owner: str, *, refuses: bool) -> None:
        for path in sorted(self._directory.glob(f"{owner}-*.json")):
            try:
                if not self._settle(path, refuses=refuses):
                    return
            except IntegrityError as error:  # Perhaps of the mirror's catalog: nothing is given up.
                raise IntegrityError(
                    f"The version in {path} cannot be committed ({error}) If that cannot be mended, delete the file:"
                    " the version is lost."
                ) from error

    def _settle(self, path: Path, *, refuses: bool) -> bool:
        """Commit or refuse a version; return False if it waits for packs."""
        catalog, packs = self._repository.catalog, _packs_in(path)
        missing = {pack.name for pack in packs if not self._has_arrived(pack)}
        catalog.refresh(within=_AGAIN if missing else 0.0)
        is_freed = bool(missing) and not missing.isdisjoint(catalog.gone())
        if missing and not (refuses or is_freed):
            return False
        future, error = self.pushed(packs[-1].name), None
        try:
            if missing:
                fate = "`gc` has freed" if is_freed else "were only on a machine that is lost"
                raise NotFoundError(
                    f"A version that was saved on several machines lacks {len(missing)} of its {len(packs)} packs,"
                    f" which {fate}; it was left out."
                )
            row = self._committed(packs)
        except (ConflictError, NotFoundError) as raised:
            error = raised
            _log.warning("%s", error)
        else:
            self._encoder.begin(row.run, policy_of(catalog, row.run).kept_hot, row)
        for pack in packs:
            self._arrived.pop(pack, None)
        path.unlink()
        if not future.done():  # Perhaps it was cancelled.
            future.set_result(row) if error is None else future.set_exception(error)
        return True

    def _has_arrived(self, pack: PackInfo) -> bool:
        """Return whether the bucket has a pack; read its manifest."""
        if pack not in self._arrived and self._repository.packs.is_there(pack.name, pack.bytes):
            self._arrived[pack] = self._repository.resolver.manifest(pack.name).document
        return pack in self._arrived

    def _committed(self, packs: Sequence[PackInfo]) -> VersionRow:
        catalog = self._repository.catalog
        found = [(pack, self._arrived[pack]) for pack in packs]
        with catalog.lease("unsent") as lease, Change.of_packs(self._repository, found) as change:
            return catalog.version(change.commit_kept(lease))


def _packs_in(path: Path) -> list[PackInfo]:
    try:
        return [PackInfo(*pack) for pack in decode(path.read_bytes(), _PACKS)["packs"]]
    except ValueError as error:
        raise IntegrityError(f"Its file is damaged: {error}.") from error


@contextmanager
def _claimed(path: Path, *, waits: bool) -> Iterator[bool]:
    """Lock a file; yield False if another process has locked or removed it."""
    import fcntl

    try:
        descriptor = forks.open_unshared(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        is_own = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_own = False
        yield is_own and path.exists()
    finally:
        forks.close_unshared(descriptor)
