from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tools.bench import peaks


def test_memory_of_a_process_is_seen_while_it_lasts() -> None:
    """Memory that was given back counts; the child's own, not the watcher's."""
    script = "import time; data = bytearray(60_000_000); time.sleep(0.2); del data; time.sleep(0.1)"
    largest = peaks.watch([sys.executable, "-c", script])
    assert 60e6 < largest < 120e6
    with pytest.raises(subprocess.CalledProcessError):
        peaks.watch([sys.executable, "-c", "raise SystemExit(3)"])


def test_every_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "ROWS", 300)
    found = list(peaks.measure(1, tmp_path, "exact"))
    assert len(found) == 4
    assert all(megabytes > 5 for _, megabytes in found)
    tensors = load_file(tmp_path / "out")
    assert len(tensors) == round(1e6 / (4 * 300 * 300))
    assert (tensors["layers.1.weight"] == peaks.weights(1, 1)).all()
