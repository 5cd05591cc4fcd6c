"""The fit of the restore cost model: what is measured of a series, and weights that are known come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.lineage.cost import Work, cost
from tools.bench import costs
from tools.bench.series import Series


def test_every_version_is_measured(gpt_run: list[Path], tmp_path: Path) -> None:
    rows = list(costs.measure(Series("gpt", tuple(gpt_run[:3])), tmp_path, 1))
    assert [number for number, *_ in rows] == [1, 2, 3]
    assert all(seconds > 0 for *_, seconds in rows)
    with ckstore.open(tmp_path / "store", "r") as store:
        foretold = [row.cost for row in store.versions()]
    assert [cost(work) / cost(full) for _, work, full, _ in rows] == pytest.approx(foretold, abs=1e-4)
    assert foretold[-1] > 1.01 > foretold[0]


def test_fit() -> None:
    random = np.random.default_rng(0)
    weights = np.where(np.arange(len(Work._fields)) % 3, random.random(len(Work._fields)), 0)
    works = [Work(*row) for row in random.random((40, len(weights))) * 1e9]
    assert costs.fit(works, [float(np.dot(work, weights)) / 1e9 for work in works]) == pytest.approx(weights)
