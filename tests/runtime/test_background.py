"""Processes in the background, until they have settled."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ckstore.runtime.background import BackgroundContext


def test_no_process_of_a_pool_is_interrupted_before_it_has_settled() -> None:
    """A pool starts them one by one, each when it is needed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ProcessPoolExecutor(3, mp_context=BackgroundContext()) as pool:
        blocked = list(pool.map(_blocked, [0.3] * 3))
    assert len(blocked) == 3
    assert all(blocked)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def _blocked(seconds: float) -> bool:
    """Return whether SIGINT has been blocked since the process began."""
    time.sleep(seconds)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
