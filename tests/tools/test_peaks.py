from __future__ import annotations

import subprocess
import sys

import pytest

from tools.bench import peaks


def test_memory_of_a_process_is_seen_while_it_lasts() -> None:
    """Memory that was given back counts; the child's own, not the watcher's."""
    script = "import time; data = bytearray(60_000_000); time.sleep(0.2); del data; time.sleep(0.1)"
    largest = peaks.watch([sys.executable, "-c", script])
    assert 60e6 < largest < 120e6
    with pytest.raises(subprocess.CalledProcessError):
        peaks.watch([sys.executable, "-c", "raise SystemExit(3)"])
