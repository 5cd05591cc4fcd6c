"""The table of states of many tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import many_tensors

pytestmark = pytest.mark.local


def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many_tensors.main(["--tensors", "50", "--rounds", "1", "--work", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0][2:] for line in lines[2:]] == [*many_tensors._PEERS]
    assert lines[2].endswith("| 1.00 |")
    assert not list(tmp_path.iterdir())
