"""Given gradients decide which elements Inshrinkerator keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import UsageError
from ckstore.policy import Policy

ROWS = 300


@pytest.fixture
def store(tmp_path: Path) -> ckstore.Store:
    return ckstore.init(tmp_path / "store")


def weight() -> torch.Tensor:
    return torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(0))


def test_elements_without_a_gradient_are_pruned_first(store: ckstore.Store) -> None:
    """At quality 3 a fifth of the elements becomes 0: of those rows alone whose gradients are small."""
    gradient = torch.ones(ROWS, 256)
    gradient[: ROWS // 3] = 1e-6
    values = {"model": {"w": weight()}}
    policy = Policy("coarse", "dynaquant", 3)
    with store:
        by_gradient = store.ingest(values, run="gradient", gradients={"model/w": gradient}, policy=policy).version
        by_size = store.ingest({"model": {"w": weight() + 0}, "n": 1}, run="size", policy=policy).version
        pruned = np.asarray(store[by_gradient.number]["model/w"][:]) == 0
        by_magnitude = np.asarray(store[by_size.number]["model/w"][:]) == 0
        # Elsewhere the elements nearest to the level 0 take it.
        assert pruned[: ROWS // 3].mean() > pruned[ROWS // 3 :].mean() + 0.4
        assert abs(by_magnitude[: ROWS // 3].mean() - by_magnitude[ROWS // 3 :].mean()) < 0.05
        assert store.verify().problems == []


@pytest.mark.parametrize("gradient", [torch.ones(7), np.ones((ROWS, 2)), "none", [None]])
def test_gradients_that_do_not_fit_are_refused(store: ckstore.Store, gradient: object) -> None:
    with store, pytest.raises(UsageError, match="gradient of model/w"):
        store.ingest(
            {"model": {"w": weight()}},
            run="r",
            gradients={"model/w": gradient},
            policy=Policy("coarse", scheme="dynaquant"),
        )
