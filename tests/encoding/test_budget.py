"""The restore budget of a version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError

pytestmark = pytest.mark.encoded


def test_a_version_of_objects_that_the_store_has_keeps_its_budget(tmp_path: Path) -> None:
    """The weights of a checkpoint, stored again without its optimiser: their chains were budgeted with it."""
    generator = np.random.default_rng(1)
    values = (generator.standard_normal((600, 600)) * 0.02).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(8):
            state = {
                "model": {"w": values},
                "optimizer": {
                    "exp_avg": (generator.standard_normal((600, 600)) * 1e-4).astype(np.float32),
                    "exp_avg_sq": (generator.random((600, 600)) * 1e-8).astype(np.float32),
                },
            }
            whole = store.ingest(state, run="a", step=step).version
            assert whole.cost <= 2.0
            part = store.ingest({"w": values}, run=f"w{step}", step=0).version
            assert part.cost <= 2.0, f"step {step}: {part.cost}"
            moved = generator.random((600, 600)) < 0.16
            change = (generator.standard_normal((600, 600)) * 1e-4).astype(np.float32)
            values = np.where(moved, values + change, values)
        assert store.verify().problems == []


def test_a_budget_is_kept_and_a_larger_one_takes_fewer_bytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    steps = [(generator.standard_normal((512, 512)) * 0.02).astype(np.float32)]
    for _ in range(6):
        change = (generator.standard_normal((512, 512)) * 1e-5).astype(np.float32)
        steps.append(np.where(generator.random((512, 512)) < 0.5, steps[-1] + change, steps[-1]))
    stored = {}
    for budget in (1.0, 1.5, 1e9):
        with ckstore.init(tmp_path / str(budget)) as store:
            for step, values in enumerate(steps):
                store.ingest({"w": values}, run="r", step=step, max_restore_cost=budget)
            rows = store._catalog.versions()
            assert all(row.cost <= budget * 1.001 for row in rows), [row.cost for row in rows]
            stored[budget] = sum(row.stored_bytes for row in rows)
    assert stored[1e9] < stored[1.5] < stored[1.0]


def test_weights_have_the_budget_that_moments_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several windows as in one: sizes are alike."""
    stored = []
    for window in (1 << 30, 1 << 20):
        monkeypatch.setattr("ckstore.writing.storing.WINDOW", window)
        generator = np.random.default_rng(3)
        weights = [(generator.standard_normal((512, 512)) * 0.02).astype(np.float32) for _ in range(4)]
        with ckstore.init(tmp_path / str(window)) as store:
            for step in range(20):
                weights = [one + (generator.standard_normal(one.shape) * 1e-5).astype(np.float32) for one in weights]
                moments = [(generator.standard_normal(one.shape) * 1e-4).astype(np.float32) for one in weights]
                states = {number: {"exp_avg": one, "exp_avg_sq": one**2} for number, one in enumerate(moments)}
                model = {str(number): one for number, one in enumerate(weights)}
                state = {"model": model, "optimizer": {"state": states}}
                assert (
                    store.ingest(state, run="r", step=step, policy="coarse", hot=0, max_restore_cost=1.2).version.cost
                    <= 1.2
                )
            stored.append(sum(version.stored_bytes for version in store.run("r").versions))
    assert stored[1] < 1.02 * stored[0], stored


def test_casts_are_within_the_budget_of_their_masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several windows as in one: a cast pays for its master's chain again."""
    torch = pytest.importorskip("torch")
    stored = []
    for window in (1 << 30, 1 << 20):
        monkeypatch.setattr("ckstore.writing.storing.WINDOW", window)
        generator = torch.Generator().manual_seed(3)
        masters = {str(number): torch.randn(512, 512, generator=generator) * 0.02 for number in range(4)}
        with ckstore.init(tmp_path / str(window)) as store:
            for step in range(12):
                for master in masters.values():
                    master += torch.randn(master.shape, generator=generator) * 1e-5
                moments = [torch.randn(512, 512, generator=generator) * 1e-4 for _ in masters]
                states = {number: {"exp_avg": one, "exp_avg_sq": one**2} for number, one in enumerate(moments)}
                model = {name: master.bfloat16() for name, master in masters.items()}
                state = {"master": masters, "model": model, "optimizer": {"state": states}}
                store.ingest(state, run="r", step=step, policy="coarse", hot=0)
            stored.append(sum(version.stored_bytes for version in store.run("r").versions))
    assert stored[1] < 1.02 * stored[0], stored


@pytest.mark.parametrize("budget", [0.5, 0.0, -1.0, float("nan")])
def test_budgets_below_one_are_refused(tmp_path: Path, budget: float) -> None:
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="1 or more"):
            store.ingest({"w": np.zeros(3, np.float32)}, max_restore_cost=budget)
        with pytest.raises(UsageError, match="1 or more"):
            store.rebase(max_restore_cost=budget)
        assert store._catalog.versions() == []
