"""Encodes hot versions and applies retention policies in a background thread of low priority."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet

from ckstore.commit.join import join_due
from ckstore.errors import CkstoreError, NotFoundError
from ckstore.repository import Repository
from ckstore.retention.retain import Changed, note_changes, retain
from ckstore.runtime import forks
from ckstore.writing.encode import encode

if TYPE_CHECKING:
    from ckstore.storage.catalog import VersionRow

_log = logging.getLogger("ckstore")

#: Added to the thread's niceness: it yields to other work.
_NICE = 10

#: Ingests wait while more versions of a run than this are due, or while these take more than a part of the free disk.
_MOST, _PART = 64, 0.25


#: The thread's caches hold these bytes and some versions: more would only keep parents that are no longer needed.
_LEAST_CACHE, _CACHED = 8 << 20, 8
#: Encoders that have had a thread.
_begun: WeakSet[BackgroundEncoder] = WeakSet()


@atexit.register
def _leave() -> None:
    """Stop all threads before the interpreter unloads modules."""
    for encoder in list(_begun):
        encoder.close(finish=False)


class _GivenUp(Exception):  # noqa: N818 - ends an encoding, and is no error
    pass


class BackgroundEncoder:
    """Encodes the hot versions of runs beyond their policy's limit, and thins and forgets older versions.

    The thread opens the program's store separately: it must not refer to uncommitted objects of an ingest.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._is_closed = False
        self._is_given_up = False
        self._start()
        forks.in_child(self._start)

    def _start(self) -> None:
        """Reset to no thread, at first and after a fork."""
        self._opened: Repository | None = None
        self._held = 0  # Bytes of its caches.
        self._lock = forks.Lock()
        self._moved = threading.Condition(self._lock)
        self._runs: dict[str, int] = {}
        self._run: str | None = None  # The one that the thread is at.
        self._due: dict[str, dict[int, int]] = {}  # Bytes by number of version.
        self._free: int | None = None  # Bytes of the disk, as seen last.
        self._thread: threading.Thread | None = None
        self._retaining = threading.Lock()
        self._changed: dict[str, Changed] = {}
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def pause(self) -> None:
        """Pause the thread, within a few megabytes, until `resume`."""
        self._may_go_on.clear()

    def resume(self) -> None:
        """Resume the thread."""
        self._may_go_on.set()

    def begin(self, run: str, keep: int, added: VersionRow | None = None) -> None:
        """Give a run to the thread, with a version that was just `added`; its latest `keep` versions stay hot."""
        with self._lock:
            if self._is_closed:
                return
            self._runs[run] = keep
            if added is not None and added.hot:
                self._due.setdefault(run, {})[added.number] = added.stored_bytes
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ckstore-encoder", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # The interpreter exits, or the system has no more threads.
                    self._runs.clear()
                    _warn(run, error)
                    return
                _begun.add(self)
                self._thread = thread

    def wait(self, run: str) -> None:
        """Wait while too much of a run is due, unless the thread fails: then its versions stay hot."""
        with self._lock:
            while self._is_full(run) and self._thread is not None and run in {*self._runs, self._run}:
                self._moved.wait()

    def _is_full(self, run: str) -> bool:
        if self._free is None:  # Later the thread looks: a call of the system may wait for its turn.
            self._free = shutil.disk_usage(self._repository.path).free
        due = self._due.get(run, {})
        return len(due) > _MOST or sum(due.values()) > _PART * self._free

    def forget_changed(self, run: str) -> None:
        """Leave out of `take_changed` the changes so far; do not wait for the running step."""
        self._changed.pop(run, None)

    def take_changed(self, run: str) -> Changed:
        """Return the changes of the thread in a run by its policy since the last call, after its running step."""
        with self._retaining:
            return self._changed.pop(run, {})

    def close(self, *, finish: bool = True) -> None:
        """Wait until one more version of each given run is encoded, or abort; other versions stay hot."""
        with self._lock:
            self._is_closed = True
            self._is_given_up = not finish
            if not finish:
                self._runs.clear()
            self._moved.notify_all()
            thread = self._thread
        self.resume()
        if thread is threading.current_thread():
            return
        if thread is not None:
            thread.join()
        if self._opened is not None:
            self._opened.close()

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            self._run = None
            self._moved.notify_all()
            if not self._runs:
                self._thread = None
                return None
            self._run = next(iter(self._runs))  # In turn: an ingest may wait for any run.
            return self._run, self._runs.pop(self._run)

    def _work(self) -> None:
        with suppress(AttributeError, OSError):  # Linux has a priority for each thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._work_off()
        except Exception as error:
            if threading.main_thread().is_alive() and "shutdown" not in str(error):
                _warn(str(self._run), error)
                raise
            # The interpreter exits without closing the store: no new tasks or threads can start.
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None
                self._moved.notify_all()

    def _work_off(self) -> None:
        while (item := self._next()) is not None:
            run, keep = item
            self._may_go_on.wait()
            rows: list[VersionRow] = []
            try:
                if self._opened is None:
                    self._opened = self._repository.reopened("a", self._repository.cache_bytes)
                rows = self._look(self._opened, run, keep)
                for row in rows:
                    self._held = max(self._held, _LEAST_CACHE + _CACHED * row.original_bytes)
                    self._opened.reader.limit_caches(self._held)
                encode(self._opened, rows, progress=self._step)
                with self._retaining:
                    retained = retain(self._opened, run, progress=self._step)
                    note_changes(self._changed.setdefault(run, {}), retained)
                with suppress(CkstoreError, OSError):  # The versions do not wait for it; `gc` tells the reason.
                    join_due(self._opened)
                if rows or retained.thinned or retained.dropped or retained.freed:
                    self._repository.resolver.forget()  # Objects were moved.
            except _GivenUp:
                return
            except (CkstoreError, OSError) as error:
                if not _is_forgotten(self._opened, rows):
                    _warn(run, error)
                    rows = []
            with self._lock:
                for row in rows:
                    self._due[run].pop(row.number, None)
                if rows and not self._is_closed:  # Another version may be due.
                    self._runs.setdefault(run, keep)

    def _look(self, opened: Repository, run: str, keep: int) -> list[VersionRow]:
        """Return the first due version of a run, if any; note all of them, and the free space of the disk."""
        free = shutil.disk_usage(self._repository.path).free
        with self._lock:
            known = set(self._due.get(run, ()))
        sizes = opened.catalog.hot_sizes(run, keep)
        with self._lock:
            self._free = free
            added = {number: size for number, size in self._due.get(run, {}).items() if number not in known}
            self._due[run] = sizes | added
        for number in sizes:
            with suppress(NotFoundError):  # It was forgotten since.
                return [opened.catalog.version(number)]
        return []

    def _step(self, nbytes: int) -> None:
        """Pause or abort the thread if requested; called after each few megabytes."""
        self._may_go_on.wait()
        if self._is_given_up:
            raise _GivenUp


def _is_forgotten(opened: Repository | None, rows: Sequence[VersionRow]) -> bool:
    """Return whether a version was forgotten since it was due."""
    with suppress(CkstoreError):
        return opened is not None and not all(opened.catalog.with_uid(row.uid) for row in rows)
    return False


def _warn(run: str, error: Exception) -> None:
    _log.warning("Older versions of run %s remain unchanged: %s", run, error)
