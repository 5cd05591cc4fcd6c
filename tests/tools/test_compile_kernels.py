"""Compiling the kernels: the same bytes each time, for every Linux of the last ten years, or no library at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import compile_kernels


@pytest.mark.long
@pytest.mark.skipif(compile_kernels.compiler() is None, reason="no compiler")
def test_two_libraries_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_kernels, "_LEVELS", {})  # All levels compile the same sources.
    paths = [tmp_path / "one" / "kernels", tmp_path / "another" / "kernels"]
    for path in paths:
        path.parent.mkdir()
        compile_kernels.compile_kernels(path, ["-O0", "-g"])
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert str(tmp_path).encode() not in first


def test_a_compiler_that_fails_leaves_no_library(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.compile_kernels", str(tmp_path / "library")]
    done = subprocess.run(command, env={**os.environ, "CC": "false"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "could not be compiled by false" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the tag is that of Linux")
def test_the_library_fits_the_tag_of_its_wheel() -> None:
    assert compile_kernels.wheel_platform().startswith("manylinux_2_17_")
    assert compile_kernels.LIBRARY.stat().st_size < 1_500_000
