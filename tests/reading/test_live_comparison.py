"""States in memory against versions: equal ones are not decoded, others are named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.reading import live_comparison


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **rest: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}


@pytest.mark.parametrize("hot", [0, 1])
def test_an_equal_state_is_told_by_ids(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, hot: int) -> None:
    """Nothing is decoded. A module or an optimiser counts as its state dict."""
    model, optimizer = trained()
    rest = {"step": 7, "rate": 0.5, "nan": math.nan, "name": "x", "large": torch.randn(5, 1 << 20)}
    store.ingest(state_of(model, optimizer, **rest), run="a", step=7, hot=hot)

    def refused(*given: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(live_comparison, "read_tensor", refused)
    report = store["a@7"].compare({"model": model, "optimizer": optimizer, **rest})
    assert report, str(report)
    assert report.tensors == 4 + 3 * 4 + 1
    assert str(report).startswith("All 17 tensors and ")


def test_what_differs_is_named(store: ckstore.Store) -> None:
    model, optimizer = trained()
    store.ingest(state_of(model, optimizer, step=7, done=[1, 2]), run="a", step=7)
    fresh = torch.optim.AdamW(model.parameters())
    report = store["a@7"].compare(state_of(model, fresh, step=7, done=[1, 2]))
    assert not report
    assert len(report.missing) == 12
    assert all(name.startswith("optimizer/state/") for name in report.missing)
    assert "12 missing: optimizer/state/0/" in str(report)
    with torch.no_grad():
        model[1].bias[3] = torch.nextafter(model[1].bias[3], torch.tensor(9.0))
    state = state_of(model, optimizer, step=8, done=[1, 3], more=torch.ones(2))
    state["model"]["0.weight"] = state["model"]["0.weight"].double()
    report = store["a@7"].compare(state)
    assert report.differing == ("done/1", "model/1.bias", "step")
    assert report.forms == ("model/0.weight",)
    assert report.fresh == ("more",)
    assert report.missing == ()


def test_bits_count(store: ckstore.Store) -> None:
    """Also of tensors in another order in memory, without elements, of arrays and of coarse versions."""
    state = {
        "zero": torch.zeros(3), "nan": torch.full((3,), math.nan), "turned": torch.randn(300, 400).T,
        "none": torch.ones(0),
        "complex": torch.randn(300, 300, dtype=torch.complex64), "array": np.arange(5),
        "half": torch.randn(9).bfloat16(),
        "conj": torch.randn(4, dtype=torch.complex64).conj(), "scalar": torch.tensor(5),
        "view": torch.randn(9, 9)[2:, 3:],
    }  # fmt: skip
    store.ingest(state, run="a", step=1)
    assert store["a"].compare(state), str(store["a"].compare(state))
    assert store["a"].compare({**state, "turned": state["turned"].contiguous()})
    assert store["a"].compare({**state, "zero": -torch.zeros(3)}).differing == ("zero",)
    changed = state["complex"].clone()
    changed[299, 299] = 5
    assert store["a"].compare({**state, "complex": changed}).differing == ("complex",)
    rough = {"w": torch.randn(500, 500)}
    store.ingest(rough, run="b", policy="coarse")
    assert store["b"].compare(rough).differing == ("w",)
    assert store["b"].compare(store["b"].state_dict())
