"""Watches for compilations of kernels: the first use ever takes seconds, and someone may want to know.

Compiled code is kept beside the sources or, where these cannot be written to, in the user's cache directory
(`NUMBA_CACHE_DIR` chooses another); later processes load it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

#: What the process that compiles on a second core is told: whom it helps.
READS, STORES = "reads", "stores"

_begin: Callable[[], None] | None = None


def on_first(begin: Callable[[], None] | None) -> None:
    """Have `begin` called once, when anything must be compiled; None calls nothing any more."""
    global _begin
    _begin = begin


def listen() -> None:
    """Wait for compilations; the package of kernels calls this when it is imported.

    While something is compiled nothing is collected: what a compiler makes is nearly all in use until it is done, and
    looking for garbage among it takes a tenth of its time.
    """
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        """Called by one thread at a time, which holds the compiler's lock; one compilation may begin within another."""

        def __init__(self) -> None:
            self._collected: list[bool] = []

        def on_start(self, event: event.Event) -> None:
            global _begin
            begin, _begin = _begin, None
            if begin is not None:
                begin()
            self._collected.append(gc.isenabled())
            gc.disable()

        def on_end(self, event: event.Event) -> None:
            if self._collected.pop():
                gc.enable()

    event.register("numba:compile", Listener())
