"""Watches for compilations of kernels: the first use ever takes seconds, and someone may want to know.

Compiled code is kept where `ckstore.kernels.kept` says; later processes load it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from ckstore.runtime.address_space import check_before_compiling

#: What the process that compiles on a second core is told: whom it helps.
READS, STORES = "reads", "stores"

MESSAGE = "compiling kernels for their first use, once: this takes half a minute, and more on a busy machine."


def _warn(message: str) -> None:
    """Tell whoever calls from Python: without a handler of its own, a program prints warnings on stderr."""
    import logging

    logging.getLogger("ckstore").warning(message)


_begin: Callable[[str], None] | None = _warn
_message = MESSAGE


def on_first(begin: Callable[[str], None] | None) -> None:
    """Have `begin` called once, with a sentence for the user, when anything must be compiled; None calls nothing."""
    global _begin
    _begin = begin


def kept_in_passing(place: str) -> None:
    """Let the sentence say that compiled code goes into a temporary directory."""
    global _message
    _message = (
        f"compiling kernels into {place}, where they may not last: nothing else can be written to; "
        "set NUMBA_CACHE_DIR to a directory that can, and run `ckstore warm-up`."
    )


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
                begin(_message)
            self._collected.append(gc.isenabled())
            gc.disable()
            check_before_compiling()

        def on_end(self, event: event.Event) -> None:
            if self._collected.pop():
                gc.enable()

    event.register("numba:compile", Listener())
