"""Background processes: they end with their parent, ignore signals, and yield the cores to others."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FrameType

#: Linux: the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1

#: Signals from terminals and schedulers to a program and all its processes; the program ends this process.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class _UnheardProcess(SpawnProcess):
    """A process that cannot be interrupted before it has settled: it would print a traceback."""

    def start(self) -> None:
        """Start the process with SIGINT blocked, which it inherits, and send it all that it waits for.

        An interruption of this process takes effect afterwards. The mask alone would not put it off: another thread may
        take the signal, and the main thread raises `KeyboardInterrupt` whichever thread took it.
        """
        arrived = False

        def put_off(_number: int, _frame: FrameType | None) -> None:
            nonlocal arrived
            arrived = True

        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        try:
            if handler is not None:
                signal.signal(signal.SIGINT, put_off)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            super().start()
        finally:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if arrived:
            signal.raise_signal(signal.SIGINT)


class BackgroundContext(SpawnContext):
    """Context for spawned processes that will `settle`, whichever call of a pool starts them."""

    Process = _UnheardProcess


def settle(parent: int, nice: int) -> None:
    """Make this process a background process; end it at once if its parent, given by id, has died already."""
    for name in _SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError, AttributeError):
        os.nice(nice)
        # A process that wakes this one goes on at once, instead of waiting for its time slice.
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
