"""Findings: planted oddities are all found, and healthy runs have none."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ckstore import Store
from ckstore.report import statistics
from ckstore.report.findings import Finding, findings

STEPS, EVERY = 160, 20


@functools.cache
def states(
    rate: Callable[[int], float], before: Callable[[nn.Sequential], object]
) -> list[tuple[int, dict[str, torch.Tensor], dict[str, Any]]]:
    """Return step, weights and optimiser of a small network, every 20 steps of its training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.Tanh())), nn.Linear(48, 8))
    before(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(48, 8, generator=generator)
    found = []
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 48, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), (inputs @ target).tanh())
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            found.append((step, weights, copy.deepcopy(optimizer.state_dict())))
    return found


def constant(step: int) -> float:
    return 1e-3


def whole(model: nn.Sequential) -> None:
    """Train every layer."""


def trained(
    store: Store,
    rate: Callable[[int], float] = constant,
    before: Callable[[nn.Sequential], object] = whole,
    spoil: Callable[[int, dict[str, Any]], object] = lambda step, state: None,
) -> list[Finding]:
    """Train a small network, store it every 20 steps, and return the findings of its report.

    `before` changes the model at first, `spoil` the stored state at a step.
    """
    for step, weights, optimizer in states(rate, before):
        state = {"model": {name: value.clone() for name, value in weights.items()}}
        spoil(step, state)
        store.ingest(state | {"optimizer": optimizer}, run="a", step=step)
    return store.report("a").findings["a"]


def test_a_healthy_training_has_none(store: Store) -> None:
    assert trained(store) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "cnn", "bf16", "ema", "finetune", "slow"])
def test_healthy_runs_have_none(store: Store, trained_runs: Path, name: str) -> None:
    from tools import runs

    for path in runs.train(name, trained_runs, tier="tiny"):
        store.ingest(path, run=f"run {name}")
    assert store.report(f"run {name}").findings == {f"run {name}": []}


def test_a_frozen_layer_is_found(store: Store) -> None:
    def freeze(model: nn.Sequential) -> None:
        model[4].requires_grad_(False)

    [found] = trained(store, before=freeze)
    assert (found.kind, found.first, found.last) == ("frozen", 0, 7)
    assert found.text == "model/4 (2 tensors) did not move from step 20 to step 160."


def test_a_layer_that_stops_is_found(store: Store) -> None:
    kept: dict[str, torch.Tensor] = {}

    def stop(step: int, state: dict[str, Any]) -> None:
        if step == 80:
            kept["weight"] = state["model"]["6.weight"].clone()
        if step > 80:
            state["model"]["6.weight"] = kept["weight"]

    [found] = trained(store, spoil=stop)
    assert (found.kind, found.first, found.last) == ("frozen", 3, 7)
    assert "model/6.weight did not move from step 80 to step 160" in found.text


def test_a_frozen_backbone_is_one_line(store: Store, frozen_run: list[Path]) -> None:
    for path in frozen_run:
        store.ingest(path, run="frozen")
    [found] = store.report("frozen").findings["frozen"]
    assert found.kind == "frozen"
    assert found.text.startswith("model/backbone (53 tensors) did not move from step")


def test_nan_at_one_step_is_found(store: Store) -> None:
    def spoil(step: int, state: dict[str, Any]) -> None:
        if step == 100:
            state["model"]["2.weight"][3, 5] = torch.nan

    [found] = trained(store, spoil=spoil)
    assert (found.kind, found.severity, found.first, found.last) == ("nan", "error", 4, 4)
    assert found.text.startswith("model/2.weight has NaN or infinite values at step 100, up to 0.0%")


def test_nan_since_a_step_is_one_line(store: Store) -> None:
    def spoil(step: int, state: dict[str, Any]) -> None:
        if step >= 100:
            for value in state["model"].values():
                value.fill_(torch.inf)

    found = trained(store, spoil=spoil)
    assert (found[0].kind, found[0].first, found[0].last) == ("nan", 4, 7)
    assert found[0].text == "model (14 tensors) has NaN or infinite values since step 100, up to 100.0% of elements."


def test_a_constant_mask_with_infinities_is_no_finding(store: Store) -> None:
    def mask(step: int, state: dict[str, Any]) -> None:
        state["model"]["mask"] = torch.full((8, 8), -torch.inf).triu(1)

    assert trained(store, spoil=mask) == []


def test_a_doubled_learning_rate_is_found(store: Store) -> None:
    [found] = trained(store, rate=lambda step: 1e-3 if step <= 100 else 2e-3)
    assert (found.kind, found.first) == ("rate", 5)
    assert "per step after step 100" in found.text


@pytest.mark.long
@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 1e-3 * min(step / 80, 1),
        lambda step: 1e-3 * 0.5 ** (step / 40),
        lambda step: 1e-3 if step <= 100 else 1e-4,
    ],
    ids=["warm-up", "decay", "step down"],
)
def test_schedules_are_no_findings(store: Store, rate: Callable[[int], float]) -> None:
    assert trained(store, rate=rate) == []


def test_a_norm_that_explodes_is_found(store: Store) -> None:
    def spoil(step: int, state: dict[str, Any]) -> None:
        if step >= 120:
            state["model"]["8.weight"] *= 100

    found = trained(store, spoil=spoil)
    assert (found[0].kind, found[0].first) == ("norm", 5)
    assert found[0].text.startswith("The norm of model/8.weight exploded at step 120")


def test_weights_that_begin_without_finite_values_have_no_usual_norm(store: Store) -> None:
    found = walked(store, 2, lambda step: {"w": torch.full((40, 30), float("inf") if step == 0 else 1.0)})
    assert [finding.kind for finding in found] == ["nan"]


def test_a_layer_with_an_unusual_ratio_is_found(store: Store) -> None:
    def spoil(step: int, state: dict[str, Any]) -> None:
        if step == 100:
            weight = state["model"]["8.weight"]
            weight += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))

    found = trained(store, spoil=spoil)
    assert {(item.kind, item.tensor) for item in found} == {("ratio", found[0].tensor)}
    assert "model/8.weight" in found[0].text
    assert "at step 100" in found[0].text


def test_a_run_of_one_version_has_none(store: Store) -> None:
    store.ingest({"w": torch.ones(3)}, run="a")
    assert store.report("a").findings == {"a": []}


def walked(store: Store, versions: int, state: Callable[[int], dict[str, Any]], sample: int = 1 << 20) -> list[Finding]:
    """Return the findings of versions whose weight `w` moves a bit, with the state of each version, by its number."""
    moving = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    for number in range(versions):
        store.ingest({"w": moving * (1 + number / 1000), **state(number)}, run="a", step=10 * (number + 1))
    with mock.patch.object(statistics, "_LARGEST_MATRIX", 0):
        return findings(statistics.statistics([version._stored for version in store.versions("a")], sample=sample))


def test_a_sampled_tensor_of_which_other_rows_move_moved(store: Store) -> None:
    def state(number: int) -> dict[str, Any]:
        embedding = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
        embedding[400:420] += number
        return {"embedding": embedding, "other": torch.ones(4000, 64), "still": torch.ones(40, 40)}

    found = walked(store, 4, state, sample=8000)
    assert {item.text.split()[0] for item in found} == {"other", "still"}


def test_nan_outside_of_a_sample_is_found(store: Store) -> None:
    def state(number: int) -> dict[str, Any]:
        embedding = torch.randn(4000, 64, generator=torch.Generator().manual_seed(number))
        if number == 2:
            embedding[400:500] = torch.nan
        return {"embedding": embedding}

    with mock.patch.object(statistics, "_BLOCK", 10_000):
        [found] = walked(store, 4, state, sample=8000)
    assert (found.kind, found.first, found.last) == ("nan", 2, 2)
    assert found.text.startswith("embedding has NaN or infinite values at step 30, up to 2.5%")


@pytest.mark.parametrize("name", ["pe", "layers.0.attn.mask", "causal_mask", "rope.freqs_cis"])
def test_buffers_that_never_move_are_no_findings(store: Store, name: str) -> None:
    assert walked(store, 4, lambda number: {"model": {name: torch.ones(8, 8).tril()}}) == []


def test_buffers_of_one_kind_in_all_layers_are_one_line(store: Store) -> None:
    def state(number: int) -> dict[str, Any]:
        moving = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        layers = {
            f"h.{k}.attn.{name}": value for k in range(12) for name, value in (("w", moving), ("far", torch.ones(8)))
        }
        return {"model": layers, "blocks": [{"w": moving, "near": torch.ones(8)} for _ in range(12)]}

    texts = [item.text for item in walked(store, 4, state) if item.kind == "frozen"]
    assert sorted(texts) == [
        "blocks/[*]/near (12 tensors) did not move from step 10 to step 40.",
        "model/h.*.attn.far (12 tensors) did not move from step 10 to step 40.",
    ]


def test_layers_that_all_explode_are_one_line(store: Store) -> None:
    def state(number: int) -> dict[str, Any]:
        moving = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
        return {
            "model": {
                f"{k}.{name}": moving * (1 + 99 * (number > 2) * (name == "w")) for k in range(9) for name in "wv"
            }
        }

    texts = [item.text for item in walked(store, 4, state) if item.kind == "norm"]
    assert len(texts) == 1
    assert texts[0].startswith("The norm of model/*.w (9 tensors) exploded at step 40: ")


@pytest.mark.parametrize(("stopped", "found"), [(2, True), (5, False)])
def test_a_bias_has_stopped_after_some_intervals(store: Store, stopped: int, found: bool) -> None:
    kinds = [item.kind for item in walked(store, 8, lambda number: {"bias": torch.ones(8) * min(number, stopped)})]
    assert kinds == ["frozen"] * found


def test_a_bias_that_often_pauses_has_not_stopped(store: Store) -> None:
    assert walked(store, 11, lambda number: {"bias": torch.ones(8) * (number == 0) + (number > 5)}) == []


def test_intervals_with_a_coarse_end_do_not_count(store: Store) -> None:
    generator = torch.Generator().manual_seed(1)
    layers = [torch.randn(64, 64, generator=generator) for _ in range(7)]

    def state(number: int) -> dict[str, Any]:
        moved = {f"{k}": layer * (1 + 10.0 ** -(k // 2 + 3) * number) for k, layer in enumerate(layers[:6])}
        return {"model": moved, "still": layers[6]}

    before = walked(store, 10, state)
    store.encode()
    store.thin("a@80")
    assert store.report("a").findings["a"] == before
    assert [(item.kind, item.text.split()[0], item.first, item.last) for item in before] == [("frozen", "still", 0, 9)]
