"""The growth of costs with the number of versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.bench import scales

pytestmark = pytest.mark.local


def cells_of(
    arguments: list[str], work: Path, monkeypatch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]
) -> Any:
    """Return the cells of the table of 3 and 6 versions by their row's name."""
    monkeypatch.setattr(scales, "_INGESTS", 2)
    monkeypatch.setattr(scales, "_VERBS", {"log": ("log",)})
    small = ["--versions", "3,6", "--runs", "2", "--tensors", "1", "--elements", "64", "--work", str(work)]
    scales.main([*arguments, *small])
    lines = output.readouterr().out.splitlines()
    assert lines[0] == "| | 3 | 6 | ratio |"
    return {line.split(" | ")[0][2:]: line.split(" | ")[1:3] for line in lines[2:]}


def test_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = cells_of([], tmp_path, monkeypatch, capsys)
    assert "log, CPU s" in cells
    assert float(cells["files"][0]) < float(cells["files"][1])


def test_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = cells_of(["--bucket"], tmp_path, monkeypatch, capsys)
    assert cells["warm open, requests"] == cells["log, requests"] == ["1", "1"]
    assert cells["slice, requests"][0] == cells["slice, requests"][1]
    assert float(cells["objects"][0]) < float(cells["objects"][1])
    assert "log, CPU s" in cells
    assert not list(tmp_path.iterdir())
