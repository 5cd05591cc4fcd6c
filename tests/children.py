"""Forks children, and waits for them with a limit."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

#: Seconds after which a child counts as hanging.
PATIENCE = 120.0
#: Seconds for which a thread continues the work that a fork waits for.
MOMENT = 0.3


def fork(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and exits with 0, or with 1 where that raises; its id."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return child


def exit_code(child: int, patience: float | None = None) -> int:
    """Return the exit code of a child; -SIGKILL where it did not come to an end."""
    until = time.monotonic() + (PATIENCE if patience is None else patience)
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], None], patience: float | None = None) -> int:
    """Return the exit code of a forked child that does `work`; -SIGKILL where it did not come to an end."""
    return exit_code(fork(work), patience)


def flushed(work: Callable[[], bytes], place: Path) -> bytes:
    """Return the result of `work` in a forked child that flushes subnormal numbers to 0; `place` is its file."""
    torch = pytest.importorskip("torch")

    def flush() -> None:
        assert torch.set_flush_denormal(True)
        assert (torch.tensor([1e-40]) * 1).item() == 0
        assert np.float32(1e-38) / np.float32(4) == 0
        place.write_bytes(work())

    assert in_child(flush) == 0
    return place.read_bytes()


@contextmanager
def held(block: AbstractContextManager[object], until: Callable[[], object] | None = None) -> Iterator[None]:
    """Another thread is inside of `block`: for a moment from now on, or until a call returns."""
    is_inside = threading.Event()

    def hold() -> None:
        with block:
            is_inside.set()
            time.sleep(MOMENT) if until is None else until()

    thread = threading.Thread(target=hold)
    thread.start()
    is_inside.wait()
    try:
        yield
    finally:
        thread.join()
