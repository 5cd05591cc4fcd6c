"""Python's garbage collector, kept from walking over large structures again and again while they are being built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage is collected within; pauses of several threads add up, and a collector that is off stays off.

    A checkpoint of thousands of tensors makes hundreds of thousands of objects, none of them garbage: looking for some
    among them takes longer than making them.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
