"""Writing a large file to disk while it grows, so that the fsync at its end has little left to do."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

#: Bytes that are written before the disk is asked for the first, and for the next time.
_STEP = 32 << 20


class Writeback:
    """Syncs a growing file in a thread of its own.

    Parameters
    ----------
    descriptor
        Of the file; it must stay open until `finish` or `cancel`.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def wrote(self, nbytes: int) -> None:
        """Take note that the file grew."""
        self._written += nbytes
        if self._written >= _STEP:
            self.begin()

    def begin(self) -> None:
        """Let the disk write what has come, unless it is still busy with what came before."""
        if not self._written or (self._pending is not None and not self._pending.done()):
            return
        self._written = 0
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckstore-writeback")
        elif self._pending is not None:
            self._pending.result()
        self._pending = self._pool.submit(os.fdatasync, self._descriptor)

    def finish(self) -> None:
        """Make everything durable; raises what a sync raised, even one that came before."""
        try:
            if self._pending is not None:
                self._pending.result()
            os.fsync(self._descriptor)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Wait for a sync under way and start no other."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
