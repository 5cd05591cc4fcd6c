"""Says that kernels are being compiled, where someone waits and asked to be told: the first use ever takes seconds.

Compiled code is kept beside the sources or, where these cannot be written to, in the user's cache directory
(`NUMBA_CACHE_DIR` chooses another); later processes load it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from ckstore.threads import worker_count

MESSAGE = "compiling kernels; this happens once and takes some seconds."

_say: Callable[[str], None] | None = None
_helper: subprocess.Popen[bytes] | None = None


def tell(say: Callable[[str], None]) -> None:
    """Have `say` called with `MESSAGE` once, if anything must be compiled, and compile on a second core as well.

    To be asked for before any kernel is loaded, by a process that ends with `finish`.
    """
    global _say
    _say = say


def finish() -> None:
    """Wait for the second core: nothing goes on when the program has ended."""
    global _helper
    helper, _helper = _helper, None
    if helper is not None:
        helper.wait()


def listen() -> None:
    """Wait for the first compilation; the package of kernels calls this when it is imported."""
    if _say is None:
        return
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: event.Event) -> None:
            _begin()

        def on_end(self, event: event.Event) -> None:
            pass

    event.register("numba:compile", Listener())


def _begin() -> None:
    global _say, _helper
    say, _say = _say, None
    if say is None:
        return
    say(MESSAGE)
    if worker_count() > 1:
        silent = subprocess.DEVNULL
        # Not from the working directory (-P): whatever lies there is none of ours.
        command = [sys.executable, "-P", "-m", "ckstore.prepare"]
        _helper = subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)
