"""The fit of the restore cost model: measurements of a series, and the recovery of known weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.lineage.cost import Work
from tools.bench import costs
from tools.bench import series as catalogue
from tools.bench.series import Series

pytestmark = [pytest.mark.encoded, pytest.mark.local]


def test_every_version_is_measured(gpt_run: list[Path], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    rows = list(costs.measure(Series("gpt", tuple(gpt_run[:3])), tmp_path / "work", 1))
    assert [row.number for row in rows] == [1, 2, 3]
    assert all(min(row.seconds, row.full_seconds, row.torch_seconds) > 0 for row in rows)
    with ckstore.init(tmp_path / "store") as store:
        for step, path in enumerate(gpt_run[:3]):
            store.ingest(path, run="a", step=step)
        predicted = [row.cost for row in store._catalog.versions()]
    assert [row.predicted for row in rows] == pytest.approx(predicted, abs=1e-3)
    assert predicted[-1] > 1.01 > predicted[0]
    assert not (tmp_path / "work" / "store").exists(), "the next budget begins with an empty directory"


def test_tables(gpt_run: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    series = [Series("gpt", tuple(gpt_run[:2]))]
    monkeypatch.setattr(catalogue, "find", lambda *arguments, **named: series)
    costs.main(["--work", str(tmp_path), "--repeat", "1", "--series", "gpt"])
    head, _, *rows, blank, _, _, summary, _, weights = capsys.readouterr().out.splitlines()
    assert "predicted" in head
    assert [row.split(" | ")[:3] for row in rows] == [["| gpt", "2", "1"], ["| gpt", "2", "2"]]
    assert summary.split(" | ")[:3] == ["| gpt", "2", "2"]
    assert max(row.split(" | ")[5] for row in rows) == summary.split(" | ")[4]
    assert (blank, weights[:16]) == ("", "fitted weights: ")
    assert list(tmp_path.iterdir()) == []


def test_fit() -> None:
    random = np.random.default_rng(0)
    weights = np.where(np.arange(len(Work._fields)) % 3, random.random(len(Work._fields)), 0)
    works = [Work(*row) for row in random.random((40, len(weights))) * 1e9]
    assert costs.fit(works, [float(np.dot(work, weights)) / 1e9 for work in works]) == pytest.approx(weights)
