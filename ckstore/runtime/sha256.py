"""SHA-256 of a file's blocks in a separate thread."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Self

#: Bytes that are hashed in one task.
_BATCH = 1 << 20

#: Largest number of queued tasks.
_PENDING = 8


class StreamSha256:
    """SHA-256 of blocks in order, computed in a separate thread; use it as a context manager.

    Blocks must not change before they are hashed; see `wait`. `update` waits while more than `pending` tasks are
    queued, if that is not None.
    """

    def __init__(self, pending: int | None = _PENDING) -> None:
        self._most = inf if pending is None else pending
        self._sha = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckstore-sha256")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._batch: list[bytes | memoryview] = []
        self._size = 0
        self._unhashed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def update(self, block: bytes | memoryview) -> None:
        """Hash `block` after the earlier ones."""
        self._batch.append(block)
        self._size += len(block)
        self._unhashed += 1
        if self._size >= _BATCH:
            self._submit()
            while len(self._pending) > self._most:
                self._finish_one()

    def wait(self, blocks: int) -> None:
        """Wait until all blocks but the last `blocks` are hashed."""
        while self._unhashed > blocks:
            if not self._pending:
                self._submit()
            self._finish_one()

    def hexdigest(self) -> str:
        """Return the digest of all blocks so far."""
        self.wait(0)
        return self._sha.hexdigest()

    def _submit(self) -> None:
        if self._batch:
            self._pending.append((self._pool.submit(self._hash, self._batch), len(self._batch)))
            self._batch, self._size = [], 0

    def _finish_one(self) -> None:
        future, blocks = self._pending.popleft()
        future.result()
        self._unhashed -= blocks

    def _hash(self, blocks: list[bytes | memoryview]) -> None:
        for block in blocks:
            self._sha.update(block)
