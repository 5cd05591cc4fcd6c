"""Versions whose tensors were renamed are compared, averaged and read under the names of the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.reading.renames import renamed_text

NAMES = ("a.weight", "a.bias", "b.weight", "b.bias")


def weights(step: int, wrapper: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {wrapper + name: torch.randn(40, 30, generator=generator) + step for name in NAMES}


@pytest.fixture
def renamed(tmp_path: Path) -> ckstore.Store:
    """A store of three versions of a run; the model is wrapped in the last two."""
    store = ckstore.init(tmp_path / "store")
    for step in range(3):
        store.ingest({"model": weights(step, "module." if step else "")}, run="r", step=step)
    return store


def test_a_diff_names_renamed_tensors_once(renamed: ckstore.Store) -> None:
    report = renamed.diff("r@0", "r@1")
    assert report.compared == 4
    assert {change.change for change in report.changes} == {"values"}
    assert report.renames == {f"model/module.{name}": f"model/{name}" for name in NAMES}
    assert not renamed.diff("r@1", "r@2").renames
    back = renamed.diff("r@1", "r@0", ["model/a*"])
    assert back.renames == {f"model/{name}": f"model/module.{name}" for name in NAMES if name.startswith("a")}


def test_an_array_of_a_run_goes_over_a_rename(renamed: ckstore.Store) -> None:
    arrays = renamed.run("r").arrays
    for name in NAMES:
        expected = np.stack([weights(step)[name].numpy() for step in range(3)])
        assert np.array_equal(arrays[f"model/module.{name}"][:], expected)
    assert arrays.attrs["left_out"] == {"missing": [], "changed": []}
    assert arrays.attrs["renamed"] == {f"model/{name}": f"model/module.{name}" for name in NAMES}


def test_statistics_follow_a_rename(renamed: ckstore.Store) -> None:
    rows = renamed.run("r").statistics(["change"])
    assert len(rows) == 12
    assert {row["path"] for row in rows} == {f"model/module.{name}" for name in NAMES}
    assert sum(row["change"] is not None and row["change"] > 0 for row in rows) == 8


def test_an_average_follows_a_rename(renamed: ckstore.Store, tmp_path: Path) -> None:
    report = renamed.average("r@0..r@2", tmp_path / "mean.pt")
    assert len(report.averaged) == 4
    found: Any = torch.load(tmp_path / "mean.pt")
    for name in NAMES:
        assert torch.allclose(found["model"][f"module.{name}"], weights(1)[name])


def test_a_wrapped_state_equals_the_version_of_the_plain_one(renamed: ckstore.Store) -> None:
    report = renamed["r@0"].compare({"model": weights(0, "_orig_mod.")})
    assert report
    assert str(report) == "All 4 tensors and 0 values are equal. 4 tensors renamed: model/* → model/_orig_mod.*."
    other = renamed["r@0"].compare({"model": {**weights(0, "_orig_mod."), "_orig_mod.a.bias": torch.zeros(40, 30)}})
    assert other.differing == ("model/_orig_mod.a.bias",)


def test_other_tensors_are_added_and_removed(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"head.weight": np.ones((9, 9)), "x": np.ones(3)}, run="r", step=0)
        store.ingest({"score.weight": np.ones((9, 9)), "x": np.ones(3)}, run="r", step=1)
        assert [change.change for change in store.diff("r@0", "r@1").changes] == ["added", "removed"]


def test_names_are_told_by_their_beginnings() -> None:
    assert renamed_text({"a.w": "b.w"}) == "1 tensor renamed: a.* → b.*"
    both = {f"model/{name}": f"model/module.{name}" for name in NAMES} | {"x/w": "y/w"}
    assert renamed_text(both) == "5 tensors renamed: model/* → model/module.*, x/* → y/*"
