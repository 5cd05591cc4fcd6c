"""Compiles kernels on a second core, too, if a verb needs uncompiled ones: in half of the time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from ckstore.runtime import compiling
from ckstore.runtime.threads import worker_count


class SecondCore:
    """A process that compiles in parallel from the first compilation on, which it reports to `say`."""

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
            # -P: import nothing from the working directory.
            command = [sys.executable, "-P", "-m", "ckstore.codecs.helper", helped]
            with suppress(OSError):  # If no process can start, this one compiles alone.
                self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent)

    def finish(self) -> None:
        """End the other process: none may outlive the program."""
        compiling.on_first(None)
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
            helper.communicate()
