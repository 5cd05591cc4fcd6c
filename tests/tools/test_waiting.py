"""The waits of saves in a loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import waiting

pytestmark = pytest.mark.local


def test_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting.main(["--seconds", "1", "--work", str(tmp_path)])
    alone, found, beyond = capsys.readouterr().out.splitlines()
    assert alone.startswith("Nothing to encode: ")
    assert found.startswith("Defaults: ")
    assert "peak" in beyond
