"""Processes in the background, until they have settled."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from ckstore.runtime.background import BackgroundContext


def test_no_process_of_a_pool_is_interrupted_before_it_has_settled() -> None:
    """A pool starts them one by one, each when it is needed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ProcessPoolExecutor(3, mp_context=BackgroundContext()) as pool:
        blocked = list(pool.map(_blocked, [0.3] * 3))
    assert len(blocked) == 3
    assert all(blocked)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_an_interruption_while_a_process_starts_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the signal, which Python handles in the main thread whatever that one blocks."""
    ready, started = threading.Event(), SpawnProcess.start

    def interrupted(process: SpawnProcess) -> None:
        thread = threading.Thread(target=signal.pthread_kill, args=(other.ident, signal.SIGINT))
        thread.start()
        thread.join()
        time.sleep(0.1)
        started(process)

    other = threading.Thread(target=ready.wait)
    other.start()
    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    process = BackgroundContext().Process(target=time.sleep, args=(0,))
    try:
        with pytest.raises(KeyboardInterrupt):
            process.start()
    finally:
        ready.set()
        other.join()
    process.join()
    assert process.exitcode == 0


def _blocked(seconds: float) -> bool:
    """Return whether SIGINT has been blocked since the process began."""
    time.sleep(seconds)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)
