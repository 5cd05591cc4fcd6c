"""The growth of costs with the number of versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import scales

pytestmark = pytest.mark.local


def test_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scales, "_INGESTS", 2)
    monkeypatch.setattr(scales, "_VERBS", {"log": ("log",)})
    scales.main(["--versions", "3,6", "--runs", "2", "--tensors", "1", "--elements", "64", "--work", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | 3 | 6 | ratio |"
    cells = {line.split(" | ")[0][2:]: line.split(" | ")[1:3] for line in lines[2:]}
    assert "log, CPU s" in cells
    assert float(cells["files"][0]) < float(cells["files"][1])
