"""Writing a large file to disk while it grows, so that the fsync at its end has little left to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ckstore.storage import durable

#: Bytes written before the first and the next sync.
_STEP = 32 << 20
#: Bytes for which a thread is worth its start.
_LEAST = 1 << 20


class Writeback:
    """Syncs a growing file in a separate thread; its descriptor must stay open until `finish` or `cancel`.

    Parameters
    ----------
    threads
        Threads that several files share, whose owner ends them; by default one of its own.
    """

    def __init__(self, descriptor: int, threads: ThreadPoolExecutor | None = None) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._is_ending = False

    def wrote(self, nbytes: int) -> None:
        """Record that the file grew."""
        self._written += nbytes
        if self._written >= _STEP:
            self.begin()

    def begin(self) -> None:
        """Start a sync, unless the last one is still running, or `finish` can do it as soon."""
        if self._written >= _LEAST and all(one.done() for one in self._pending):
            self._submit(durable.sync_contents)

    def end(self) -> None:
        """Start the last sync, for which `finish` waits: nothing is written any more."""
        if self._written >= _LEAST or self._pending:
            self._submit(durable.sync_file)
            self._is_ending = True

    def finish(self) -> None:
        """Make everything durable; raise the error of this or of an earlier sync."""
        try:
            for one in self._pending:
                one.result()
            if not self._is_ending:
                durable.sync_file(self._descriptor)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Wait for a running sync and start no other."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _submit(self, sync: Callable[[int], None]) -> None:
        self._written = 0
        threads = self._threads or self._pool
        if threads is None:
            threads = self._pool = syncing_threads(1)
        self._pending.append(threads.submit(sync, self._descriptor))


def syncing_threads(most: int) -> ThreadPoolExecutor:
    """Return threads that sync files; none begins before there is work for it."""
    return ThreadPoolExecutor(most, thread_name_prefix="ckstore-writeback")
