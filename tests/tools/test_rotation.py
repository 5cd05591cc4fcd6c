"""The bench of rotated matrices: what its coders restore, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.fidelity.rotation import SCHEMES, Coder, Scheme, table, versions
from tools.fidelity.states import State


def states(count: int) -> list[State]:
    """Return states of a matrix that moves in two directions."""
    draws = torch.Generator().manual_seed(0)
    directions = torch.randn(2, 32, generator=draws)
    weight = torch.randn(48, 32, generator=draws)
    found = []
    for _ in range(count):
        weight = weight + 0.1 * torch.randn(48, 2, generator=draws) @ directions
        moment = torch.randn(48, 2, generator=draws) @ directions
        moments = {"exp_avg": moment, "exp_avg_sq": torch.ones(48, 32)}
        found.append({"model": {"h.0.up.weight": weight}, "optimizer": {"state": {0: moments}}})
    return found


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("part", ["weights", "moments"])
def test_versions_hold_the_coarse_part_alone_and_a_turned_moment_stays_close(
    tmp_path: Path, name: str, part: str
) -> None:
    exact = states(6)
    paths = [tmp_path / f"{place}.pt" for place in range(len(exact))]
    for path, state in zip(paths, exact, strict=True):
        torch.save(state, path)
    coded = list(versions(paths, SCHEMES[name], 0.25, part))
    assert [bool(shares) for _, _, shares in coded] == [False] * 5 + [True]
    for state, (bits, found, _) in zip(exact, coded, strict=True):
        assert bits > 0
        weight, moment = state["model"]["h.0.up.weight"], state["optimizer"]["state"][0]["exp_avg"]
        near, other = found["model"]["h.0.up.weight"], found["optimizer"]["state"][0]["exp_avg"]
        assert torch.equal(weight, near) == (part == "moments")
        assert torch.equal(moment, other) == (part == "weights")
        assert (near - weight).square().mean() < 0.01 * weight.square().mean()
        assert (other - moment).square().mean() < 0.5 * moment.square().mean()


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(left=True, right=True), Scheme(right=True, lags=True)])
def test_an_error_is_at_most_half_a_step_in_the_directions_of_the_basis(scheme: Scheme) -> None:
    weights = [state["model"]["h.0.up.weight"][None] for state in states(6)]
    coder = Coder(scheme, weights[0])
    for weight in weights:
        coder.add(weight, (torch.full((1, 48, 1), -4.0), torch.zeros(1, 1, 32)))
        assert coder._turned((weight - coder.decoded) / coder.steps).abs().max() < 0.501


def test_the_table_has_means_and_the_worst_version() -> None:
    row = {
        "run": "gpt", "every": 1, "part": "weights", "scheme": "lattice", "quality": 1.5, "bits": [9.0, 1.0, 2.0],
        "rises": [0.001, 0.003], "shares": [[0.5, 0.25]],
    }  # fmt: skip
    line = table([{"name": "exact", "losses": []}, row]).splitlines()[-1]
    assert line == "| gpt, every 1 | weights | lattice, 1.5 | 1.500 | +0.200% (+0.300%) | 0.50, 0.25 |"
