"""Compacts what a program has stored hot, in a thread of low priority, while the program goes on."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress

from ckstore.errors import CkstoreError
from ckstore.operations.compact import compact, due
from ckstore.repository import Repository

_log = logging.getLogger("ckstore")

#: Added to the thread's niceness, so that it takes what others leave.
_NICE = 10

#: Versions that may wait for the thread; when there are more, whoever stores the next one compacts the first of them.
_WAITING = 1


class Compactor:
    """Encodes the hot versions of runs that are beyond what their policy keeps.

    Parameters
    ----------
    repository
        Shared with the program's other threads.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._lock = threading.Lock()
        self._runs: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._is_closed = False

    def catch_up(self, run: str, keep: int) -> None:
        """Compact now what the thread has not come to, but for what may wait: a store does not fill with raw packs."""
        while len(rows := due(self._repository, run, keep=keep)) > _WAITING:
            compact(self._repository, rows[:1])

    def begin(self, run: str, keep: int) -> None:
        """Let the thread look after a run, of which so many versions stay as they are."""
        with self._lock:
            if self._is_closed:
                return
            if self._process != os.getpid():  # A forked child has no thread.
                self._process, self._thread = os.getpid(), None
            self._runs[run] = keep
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckstore-compactor", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for the version that is being compacted; others stay hot."""
        with self._lock:
            self._is_closed = True
            self._runs.clear()
            thread = self._thread if self._process == os.getpid() else None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _next(self) -> tuple[str, int] | None:
        with self._lock:
            item = next(iter(self._runs.items()), None)
            if item is None:
                self._thread = None
            return item

    def _work(self) -> None:
        with suppress(AttributeError, OSError):  # Linux has a priority for each thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (item := self._next()) is not None:
            run, keep = item
            try:
                rows = due(self._repository, run, keep=keep)
                if rows:
                    compact(self._repository, rows[:1])
            except (CkstoreError, OSError) as error:
                _log.warning("Versions of run %s stay as they were written: %s", run, error)
                rows = []
            with self._lock:
                if len(rows) <= 1 and self._runs.get(run) == keep:
                    del self._runs[run]
