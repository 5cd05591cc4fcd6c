"""A limit for the store's bytes: the oldest versions of all runs are forgotten."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Retention, UsageError


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(20_000).astype(np.float32)


@pytest.mark.encoded
def test_the_oldest_versions_of_all_runs_go(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(6):
            store.ingest({"w": weights(step)}, run="ab"[step % 2], step=step)
        store.tag("a@0", "base")
        size = store._catalog.totals().bytes
        store.set_policy(Policy(retention=Retention(max_bytes=size * 9 // 12)))
        predicted = store.retain(dry_run=True).forgotten
        assert [row.step for row in predicted] == [1, 2]
        assert [row.step for row in store.retain().forgotten] == [1, 2]
        assert store._catalog.totals().bytes <= size * 9 // 12
        assert store.retain().forgotten == []
        store.set_policy(Policy(retention=Retention(max_bytes=1)))
        assert [row.step for row in store.retain().forgotten] == [3]
        assert [(row.run, row.step) for row in store._catalog.versions()] == [("a", 0), ("a", 4), ("b", 5)]
        np.testing.assert_array_equal(store["a@0"]["w"][:], weights(0))


@pytest.mark.encoded
def test_forgotten_versions_go_first(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(4):
            store.ingest({"w": weights(step)}, run="a", step=step)
        store.forget("a@2")
        size = store._catalog.totals().bytes
        store.set_policy(Policy(retention=Retention(max_bytes=size - 1)))
        assert store.retain().forgotten == []
        assert store._catalog.totals().bytes < size
        assert store.run("a").steps == [0, 1, 3]


def test_a_limit_is_of_the_store(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store, pytest.raises(UsageError, match="without a run"):
        store.set_policy(Policy(retention=Retention(max_bytes=10)), "a")
