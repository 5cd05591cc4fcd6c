"""Writing a large file to disk while it grows, so that the fsync at its end has little left to do."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

#: Bytes written before the first and the next sync.
_STEP = 32 << 20


class Writeback:
    """Syncs a growing file in a separate thread; its descriptor must stay open until `finish` or `cancel`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def wrote(self, nbytes: int) -> None:
        """Record that the file grew."""
        self._written += nbytes
        if self._written >= _STEP:
            self.begin()

    def begin(self) -> None:
        """Start a sync, unless the last one is still running."""
        if not self._written or (self._pending is not None and not self._pending.done()):
            return
        self._written = 0
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckstore-writeback")
        elif self._pending is not None:
            self._pending.result()
        self._pending = self._pool.submit(os.fdatasync, self._descriptor)

    def finish(self) -> None:
        """Make everything durable; raise the error of this or of an earlier sync."""
        try:
            if self._pending is not None:
                self._pending.result()
            os.fsync(self._descriptor)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Wait for a running sync and start no other."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
