"""The integration of JAX, in a process of its own: other tests fork theirs, which JAX's threads are not made for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("flax") is None,
    reason="jax and flax are not installed: `pip install --group frameworks`",
)
def test_trees_come_back() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integrations/jax_checks.py"],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
