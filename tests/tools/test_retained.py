"""`tools/bench/retention` at a small scale: kept versions equal the saved states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckstore.policy import Retention
from tools.bench import retained


def test_a_training_under_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(exact_last=4, keep_last=7, drop=("optimizer/*",), whole_last=2)
    monkeypatch.setattr(retained, "RETENTION", retention)
    monkeypatch.setattr(
        sys, "argv", ["retention", "--saves", "12", "--every", "1", "--rows", "2", "--work", str(tmp_path)]
    )
    retained.main()
    *_, last, end = capsys.readouterr().out.splitlines()
    assert end.startswith("verify: no problems")
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "12"
    assert cells[2:6] == ["7", "2", "2", "3"]
    assert float(cells[7]) < float(cells[1]) / 2


def test_one_bit_is_a_difference() -> None:
    torch = pytest.importorskip("torch")
    one = {"a": [torch.zeros(3), 1], "b": 2}
    assert retained.equal(one, {"a": [torch.zeros(3), 1], "b": 2})
    assert not retained.equal(one, {"a": [-torch.zeros(3), 1], "b": 2})
    assert not retained.equal(one, {"a": [torch.zeros(3), 1]})
