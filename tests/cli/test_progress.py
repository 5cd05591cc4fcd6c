"""Progress bars appear on terminals only."""

from __future__ import annotations

import sys

import pytest

from ckstore.cli.progress import progress_bar


def test_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("x", 10) as update:
        assert update is None
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("step10.pt", 10) as update:
        assert update is not None
        update(4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "step10.pt" in err
    assert err.rstrip().endswith("100%\x1b[?25h")
    with progress_bar("x", 10, shown=False) as update:
        assert update is None
