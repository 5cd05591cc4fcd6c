"""The cache of compiled kernels: reused unless the source of any kernel has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore

CODE = """
import sys
import numpy as np
from ckstore.kernels import lattice
bits = np.arange(9, dtype=np.uint32)
bits.flags.writeable = False
print(lattice.magnitude_top(bits, 0, 5), sum(lattice.magnitude_top.stats.cache_hits.values()))
"""


@pytest.mark.local
def test_a_change_of_another_module_recompiles_kernels(tmp_path: Path) -> None:
    package = tmp_path / "ckstore"
    shutil.copytree(Path(ckstore.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))

    def kept() -> int:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept")}
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
        )
        result, hits = done.stdout.split()
        assert result == "4"
        return int(hits)

    assert (kept(), kept()) == (0, 1)
    words = package / "kernels" / "entropy" / "words.py"
    words.write_text(words.read_text() + "\n# changed\n")
    assert (kept(), kept()) == (0, 1)
