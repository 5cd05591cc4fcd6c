"""Says that kernels are being compiled, where someone waits and asked to be told: the first use ever takes seconds.

Compiled code is kept beside the sources or, where these cannot be written to, in the user's cache directory
(`NUMBA_CACHE_DIR` chooses another); later processes load it.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from ckstore.runtime.threads import worker_count

MESSAGE = "compiling kernels; this happens once and takes some seconds."

_say: Callable[[str], None] | None = None
_reads = False
_helper: subprocess.Popen[bytes] | None = None


def tell(say: Callable[[str], None], *, reads: bool) -> None:
    """Have `say` called with `MESSAGE` once, if anything must be compiled, and compile on a second core as well.

    To be asked for before any kernel is loaded, by a process that ends with `finish`, and that only `reads` or also
    stores.
    """
    global _say, _reads
    _say, _reads = say, reads


def finish() -> None:
    """Help the second core with what it has left to do: nothing goes on when the program has ended."""
    global _helper
    helper, _helper = _helper, None
    if helper is None:
        return
    if _reads:
        helper.wait()
    else:
        from ckstore.cli.warm_up import steps

        for step in reversed(steps()):
            if helper.poll() is not None:
                break
            step()
    # All of it is compiled now. This closes the other one's input, so that it does not load what was compiled here.
    helper.communicate()


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
            _begin()
            self._collected.append(gc.isenabled())
            gc.disable()

        def on_end(self, event: event.Event) -> None:
            if self._collected.pop():
                gc.enable()

    event.register("numba:compile", Listener())


def _begin() -> None:
    global _say, _helper
    say, _say = _say, None
    if say is None:
        return
    say(MESSAGE)
    if worker_count() > 1:
        from ckstore.cli.warm_up import READS, STORES

        silent = subprocess.DEVNULL
        # Not from the working directory (-P): whatever lies there is none of ours.
        command = [sys.executable, "-P", "-m", "ckstore.cli.warm_up", READS if _reads else STORES]
        with suppress(OSError):  # A machine that lets no process begin compiles on one core.
            _helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)
