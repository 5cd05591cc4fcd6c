"""The trained runs: the same files again from the same settings, and no second training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools import runs


@pytest.mark.long
@pytest.mark.usefixtures("short_runs")
def test_every_run_is_trained_once_and_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    runs.main(["all", "--out", str(tmp_path)])
    assert torch.equal(torch.get_rng_state(), state), "training changes the caller's random numbers"
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [str(tmp_path / name) for name in runs.RUNS]
    for name, pattern in runs.RUNS.items():
        assert len(list((tmp_path / name).glob(pattern))) >= 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.*")}
    runs.main(["all", "--out", str(tmp_path)])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.*")} == before
    for left, right in zip(runs.train("ema", tmp_path), runs.train("ema", tmp_path / "again"), strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_foreign_directory_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "cnn" / "epoch01.pt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(FileExistsError, match="not written by tools/train"):
        runs.train("cnn", tmp_path)
    assert kept.read_text() == "mine"
