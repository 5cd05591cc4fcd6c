"""The fit of the restore cost model: measurements of a series, and the recovery of known weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.lineage.cost import Work
from tools import runs
from tools.bench import costs
from tools.bench import series as catalogue
from tools.bench.series import Series

pytestmark = [pytest.mark.encoded, pytest.mark.local]


@pytest.mark.usefixtures("short_runs")
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paths = runs.train("gpt", tmp_path / "runs")[:3]
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(catalogue, "find", lambda *arguments, **named: [Series("gpt", tuple(paths))])
    monkeypatch.setattr(costs, "_OFTEN", 1)
    costs.main(["--work", str(work), "--repeat", "1", "--series", "gpt"])
    head, _, *rows, blank, _, _, summary, _, weights = capsys.readouterr().out.splitlines()
    assert "predicted" in head
    assert [row.split(" | ")[:3] for row in rows] == [["| gpt", "2", f"{number}"] for number in (1, 2, 3)]
    with ckstore.init(tmp_path / "store") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="a", step=step)
        predicted = [row.cost for row in store._catalog.versions()]
    assert [row.split(" | ")[5] for row in rows] == [f"{cost:.2f}" for cost in predicted]
    assert predicted[-1] > 1.01 > predicted[0]
    assert summary.split(" | ")[:3] == ["| gpt", "2", "3"]
    assert summary.split(" | ")[4] == f"{max(predicted):.2f}"
    assert (blank, weights[:16]) == ("", "fitted weights: ")
    assert list(work.iterdir()) == []


def test_fit() -> None:
    random = np.random.default_rng(0)
    weights = np.where(np.arange(len(Work._fields)) % 3, random.random(len(Work._fields)), 0)
    works = [Work(*row) for row in random.random((40, len(weights))) * 1e9]
    assert costs.fit(works, [float(np.dot(work, weights)) / 1e9 for work in works]) == pytest.approx(weights)
