"""Python's garbage collector, kept from walking repeatedly over large structures that are being built."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.runtime.forks import Lock

#: Number of new objects after which the next collection is due; Python's own value is 700 to 2,000.
SELDOM = 100_000

_lock = Lock()
_users = 0
_before: tuple[int, int, int] | None = None


@contextmanager
def collection_seldom() -> Iterator[None]:
    """Collect cyclic garbage a hundred times less often during the block, in all threads.

    A checkpoint of thousands of tensors makes hundreds of thousands of objects, none of them garbage: collections take
    longer than making them. Garbage of a concurrent training loop is still collected. A collector that is off stays
    off, and thresholds that others set during the block remain.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _raise_threshold()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore_threshold()


def _raise_threshold() -> None:
    global _before
    before = gc.get_threshold()
    if 0 < before[0] < SELDOM:
        _before = before
        gc.set_threshold(SELDOM, *before[1:])


def _restore_threshold() -> None:
    global _before
    if _before is not None and gc.get_threshold() == (SELDOM, *_before[1:]):
        gc.set_threshold(*_before)
    _before = None


def _begin_child() -> None:
    """Reset the state in a forked process, which has none of the threads that use it."""
    global _users
    _users = 0
    _restore_threshold()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
