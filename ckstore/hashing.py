"""SHA-256 of a stream of blocks beside other work: it takes longer than all else that is hashed."""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

#: Bytes that are hashed as one piece of work.
_BATCH = 1 << 20

#: Pieces of work that wait at most.
_PENDING = 8


class StreamSha256:
    """SHA-256 of blocks in order, in a thread of its own; use it as a context manager.

    Blocks must not change after they were handed over.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckstore-sha256")
        self._pending: deque[Future[None]] = deque()
        self._batch: list[bytes] = []
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def update(self, block: bytes) -> None:
        """Hash `block` after those that came before."""
        self._batch.append(block)
        self._size += len(block)
        if self._size >= _BATCH:
            self._submit()
            if len(self._pending) > _PENDING:
                self._pending.popleft().result()

    def hexdigest(self) -> str:
        """The digest of all blocks so far."""
        self._submit()
        while self._pending:
            self._pending.popleft().result()
        return self._sha.hexdigest()

    def _submit(self) -> None:
        if self._batch:
            self._pending.append(self._pool.submit(self._hash, self._batch))
            self._batch, self._size = [], 0

    def _hash(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self._sha.update(block)
