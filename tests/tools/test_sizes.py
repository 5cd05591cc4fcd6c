"""The size benchmark on a short series: every byte of the store is counted, and the tables hold the measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import runs
from tools.bench import chains, ours, sizes
from tools.bench.peers import PEERS
from tools.bench.series import PUBLIC, TRAINED, Series, find

pytestmark = pytest.mark.local


@pytest.mark.long
@pytest.mark.usefixtures("short_runs")
def test_measure_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = runs.train("gpt", tmp_path / "runs")
    work = tmp_path / "work"
    work.mkdir()

    def ratio(slow: chains.Prepare, fast: chains.Prepare) -> float:
        slow()()
        fast()()
        return 1.5

    monkeypatch.setattr(chains, "time_ratio", ratio)
    monkeypatch.setattr(ours, "time_ratio", ratio)
    row = sizes.measure(Series("gpt", tuple(paths)), work)
    assert row.original == sum(path.stat().st_size for path in paths)
    assert sum(row.ours.ledger.values()) == row.ours.total
    assert 0 < row.ours.later < row.ours.total < row.original
    assert row.ours.entropy < row.ours.coded < row.ours.total
    assert list(row.peers) == [peer.name for peer in PEERS]
    table = sizes.markdown([row])
    for number in (row.ours.total, row.ours.later, row.peers["BitX"].pairs, *row.ours.ledger.values()):
        assert f"{number:,}" in table
    assert f"{row.ours.coded / row.ours.entropy - 1:+.2%}" in table
    assert list(work.iterdir()) == []


def test_public_series(shared_data: Path, tmp_path: Path) -> None:
    found = {series.name: series for series in find(list(PUBLIC), shared_data, tmp_path)}
    assert list(found) == list(PUBLIC)
    assert [path.stem for path in found["espcn"].versions] == [f"model_epoch_{n}" for n in range(1, 30)]
    assert found["lightning_a"].versions[-1].name == "last.ckpt"
    assert [path.name for path in found["opt_lora"].versions][0::5] == ["checkpoint-500", "checkpoint-3000"]
    assert len(found["opt_lora"].files(0)) == 8


def test_absent_public_series_are_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    assert find(["vdsr"], tmp_path, tmp_path, report=said.append) == []
    assert said == [f"vdsr left out: no vdsr/*.pth in {tmp_path}"]
    assert not set(TRAINED) & set(PUBLIC)
