"""Encodes hot versions and applies retention policies in a background thread of low priority."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from contextlib import suppress
from weakref import WeakSet

from ckstore.errors import CkstoreError
from ckstore.repository import Repository
from ckstore.retention.retain import Changed, note_changes, retain
from ckstore.runtime import forks
from ckstore.writing.compact import compact, due

_log = logging.getLogger("ckstore")

#: Added to the thread's niceness: it yields to other work.
_NICE = 10

#: Most versions that wait for the thread; beyond it, the next ingest compacts the first of them.
_WAITING = 1


#: Compactors that have had a thread.
_begun: WeakSet[Compactor] = WeakSet()


@atexit.register
def _leave() -> None:
    """Stop all threads before the interpreter unloads modules."""
    for compactor in list(_begun):
        compactor.close(finish=False)


class _GivenUp(Exception):  # noqa: N818 - ends a compaction, and is no error
    pass


class Compactor:
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
        self._lock = forks.Lock()
        self._runs: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._compacting = threading.Lock()
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

    def catch_up(self, run: str, keep: int) -> None:
        """Compact the backlog of the thread now, except for the allowed waiting versions, to bound the raw packs."""
        while len(due(self._repository, run, keep=keep)) > _WAITING:
            with self._compacting:  # Wait for the thread's own compaction, then check again.
                if len(rows := due(self._repository, run, keep=keep)) > _WAITING:
                    compact(self._repository, rows[:1])

    def begin(self, run: str, keep: int) -> None:
        """Give a run to the thread; its latest `keep` versions stay hot."""
        with self._lock:
            if self._is_closed:
                return
            self._runs[run] = keep
            if self._thread is None:
                _begun.add(self)
                self._thread = threading.Thread(target=self._work, name="ckstore-compactor", daemon=True)
                self._thread.start()

    def forget_changed(self, run: str) -> None:
        """Leave out of `take_changed` the changes so far; do not wait for the running step."""
        self._changed.pop(run, None)

    def take_changed(self, run: str) -> Changed:
        """Return what the thread has changed in a run by its policy since the last call, after its running step."""
        with self._retaining:
            return self._changed.pop(run, {})

    def close(self, *, finish: bool = True) -> None:
        """Wait for the running compaction, or abort it; other versions stay hot."""
        with self._lock:
            self._is_closed = True
            self._is_given_up = not finish
            self._runs.clear()
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
            if not self._runs:
                self._thread = None
                return None
            return self._runs.popitem()

    def _work(self) -> None:
        with suppress(AttributeError, OSError):  # Linux has a priority for each thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._work_off()
        except Exception as error:
            if threading.main_thread().is_alive() and "shutdown" not in str(error):
                raise
            # The interpreter exits without closing the store: no new tasks or threads can start.
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _work_off(self) -> None:
        while (item := self._next()) is not None:
            run, keep = item
            self._may_go_on.wait()
            try:
                if self._opened is None:
                    self._opened = self._repository.reopened("a", self._repository.cache_bytes)
                with self._compacting:
                    rows = due(self._opened, run, keep=keep)
                    compact(self._opened, rows[:1], progress=self._step)
                with self._retaining:
                    retained = retain(self._opened, run, progress=self._step)
                    note_changes(self._changed.setdefault(run, {}), retained)
                if rows or retained.thinned or retained.dropped or retained.freed:
                    self._repository.resolver.forget()  # Objects were moved.
            except _GivenUp:
                return
            except (CkstoreError, OSError) as error:
                _log.warning("Older versions of run %s remain unchanged: %s", run, error)
                rows = []
            with self._lock:
                if rows and not self._is_closed:  # Another version may be due.
                    self._runs.setdefault(run, keep)

    def _step(self, nbytes: int) -> None:
        """Pause or abort the thread if requested; called after each few megabytes."""
        self._may_go_on.wait()
        if self._is_given_up:
            raise _GivenUp
