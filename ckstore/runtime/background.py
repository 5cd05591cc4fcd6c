"""A process in the background: it ends with its parent, hears no signals, and takes what others leave of the cores."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess

#: Linux: the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1

#: What a terminal or a scheduler sends to a program and all that it started; it is for the program to end the process.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class _UnheardProcess(SpawnProcess):
    """A process that is not interrupted before it has settled: it would print where it was."""

    def start(self) -> None:
        """Start it with SIGINT blocked, as it inherits that."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class BackgroundContext(SpawnContext):
    """Spawned processes that are to `settle`, whichever call of a pool starts them."""

    Process = _UnheardProcess


def settle(parent: int, nice: int) -> None:
    """Make this process one in the background.

    Parameters
    ----------
    parent
        Id of the process that started it; where that is gone already, this one ends at once.
    nice
        Added to its niceness.
    """
    for name in _SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError, AttributeError):
        os.nice(nice)
        # Whoever wakes it goes on, instead of waiting until it has run for a while.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
