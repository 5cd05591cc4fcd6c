"""Reports compilations of kernels: the first use takes seconds, and users want to know why.

`ckstore.kernels.kept` decides where compiled code is stored; later processes load it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ckstore.runtime.address_space import check_before_compiling

#: Environment variable for the process that compiles on a second core: the id of the process that it helps.
READS, STORES = "reads", "stores"

MESSAGE = "compiling kernels for their first use, once: this takes half a minute, and more on a busy machine."


def _warn(message: str) -> None:
    """Log a warning for callers from Python: a program without a handler prints warnings on stderr."""
    import logging

    logging.getLogger("ckstore").warning(message)


_begin: Callable[[str], None] | None = _warn
_message = MESSAGE
_spent = 0.0


def spent() -> float:
    """Return the seconds that this process has spent on compilations."""
    return _spent


def on_first(begin: Callable[[str], None] | None) -> None:
    """Call `begin` once, with a sentence for the user, at the first compilation; None calls nothing."""
    global _begin
    _begin = begin


def kept_in_passing(place: str) -> None:
    """Make the sentence say that compiled code is stored in a temporary directory."""
    global _message
    _message = (
        f"compiling kernels into {place}, where they may not last: no other directory is writable; "
        "set NUMBA_CACHE_DIR to a writable directory, and run `ckstore warm-up`."
    )


def listen() -> None:
    """Start reporting compilations; the package of kernels calls this when it is imported.

    The garbage collector pauses during a compilation: nearly all objects of the compiler stay in use until its end, and
    collections would take a tenth of its time.
    """
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        """Called by one thread at a time, which holds the compiler's lock; compilations may be nested."""

        def __init__(self) -> None:
            self._collected: list[bool] = []
            self._since = 0.0

        def on_start(self, event: event.Event) -> None:
            global _begin
            begin, _begin = _begin, None
            if begin is not None:
                begin(_message)
            if not self._collected:
                self._since = time.perf_counter()
            self._collected.append(gc.isenabled())
            gc.disable()
            check_before_compiling()

        def on_end(self, event: event.Event) -> None:
            global _spent
            if self._collected.pop():
                gc.enable()
            if not self._collected:
                _spent += time.perf_counter() - self._since

    event.register("numba:compile", Listener())
