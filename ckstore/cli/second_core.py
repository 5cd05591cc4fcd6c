"""Compiles kernels on a second core as well, where a verb needs some that are not compiled: half of the time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from ckstore.runtime import compiling
from ckstore.runtime.threads import worker_count


class SecondCore:
    """The process that compiles beside this one, from the first compilation to the end of the program.

    Parameters
    ----------
    say
        Called with a sentence when anything must be compiled.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reads = True
        self._helper: subprocess.Popen[bytes] | None = None

    def watch(self, *, reads: bool) -> None:
        """Wait for the first compilation of a program that only `reads`, or also stores."""
        self._reads = reads
        compiling.on_first(self._begin)

    def _begin(self, message: str) -> None:
        self._say(message)
        if worker_count() > 1:
            silent = subprocess.DEVNULL
            helped = compiling.READS if self._reads else compiling.STORES
            # Not from the working directory (-P): whatever lies there is none of ours.
            command = [sys.executable, "-P", "-m", "ckstore.codecs.warm_up", helped]
            with suppress(OSError):  # A machine that lets no process begin compiles on one core.
                self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)

    def finish(self) -> None:
        """End the other process: nothing goes on when the program has ended."""
        compiling.on_first(None)
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
            helper.communicate()
