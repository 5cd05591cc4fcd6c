"""Says that kernels are being compiled, where someone waits and asked to be told: the first use ever takes seconds.

Compiled code is kept beside the sources or, where these cannot be written to, in the user's cache directory
(`NUMBA_CACHE_DIR` chooses another); later processes load it.
"""

from __future__ import annotations

from collections.abc import Callable

MESSAGE = "compiling kernels; this happens once and takes some seconds."

_say: Callable[[str], None] | None = None


def tell(say: Callable[[str], None]) -> None:
    """Have `say` called with `MESSAGE` once, if anything must be compiled; ask before any kernel is loaded."""
    global _say
    _say = say


def listen() -> None:
    """Wait for the first compilation; the package of kernels calls this when it is imported."""
    if _say is None:
        return
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: event.Event) -> None:
            global _say
            say, _say = _say, None
            if say is not None:
                say(MESSAGE)

        def on_end(self, event: event.Event) -> None:
            pass

    event.register("numba:compile", Listener())
