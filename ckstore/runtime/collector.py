"""Python's garbage collector, kept from walking over large structures again and again while they are being built."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.runtime.forks import Lock

#: Objects made since the last look for garbage, after which the next one is due; Python's own value is 700 to 2,000.
SELDOM = 100_000

_lock = Lock()
_users = 0
_before: tuple[int, int, int] | None = None


@contextmanager
def collection_seldom() -> Iterator[None]:
    """Cyclic garbage is looked for a hundred times less often within, by this thread and by all others.

    A checkpoint of thousands of tensors makes hundreds of thousands of objects, none of them garbage: looking for some
    among them takes longer than making them. What a training loop beside it leaves is still collected. A collector that
    is off stays off, and thresholds that are set meanwhile stay as they are set.
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
    """In a forked process none of those who asked for it goes on."""
    global _users
    _users = 0
    _restore_threshold()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
