"""In a coarse version the 16-bit copy of a float32 tensor is the rounding of the coarse values, and takes no bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.writing.drop import drop
from tests.encoding.test_casts import DTYPES, masters

EXACT, COARSE = ckstore.Policy(hot=0), ckstore.Policy("coarse", hot=0)


def state(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    names = dict(enumerate(weights))
    moments = {
        number: {"exp_avg": 1e-3 * weights[name], "exp_avg_sq": 1e-6 * weights[name] ** 2}
        for number, name in names.items()
    }
    return {
        "model": {name: value.to(dtype) for name, value in weights.items()},
        "optimizer": {"fp32": weights, "state": moments},
    }


def consistent(version: ckstore.Version, dtype: torch.dtype) -> bool:
    found = version.state_dict()
    return all(torch.equal(found["model"][name], value.to(dtype)) for name, value in found["optimizer"]["fp32"].items())


def casts(version: ckstore.Version) -> int:
    stored = version._stored
    return sum(
        getattr(stored.repository.resolver.record(identity), "cast", False) for identity in stored.document.objects
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("thinned", [False, True])
def test_copies_of_coarse_values_are_their_roundings(tmp_path: Path, dtype: torch.dtype, thinned: bool) -> None:
    series = [masters(0)]
    series += [masters(step, series[0]) for step in range(1, 4)]
    sizes = {}
    for name in ("both", "alone"):
        with ckstore.init(tmp_path / name) as store:
            for step, item in enumerate(series):
                values = state(item, dtype)
                if name == "alone":
                    del values["model"]
                store.ingest(values, run="r", step=step, policy=EXACT if thinned else COARSE)
            if thinned:
                store.thin(store.run("r"))
                store.gc(grace=0)
            sizes[name] = [version.stored_bytes for version in store.run("r")]
            assert not store.verify().damaged
            if name == "both":
                assert all(casts(version) == 2 and consistent(version, dtype) for version in store.run("r"))
                assert all(version.cost <= 2 for version in store.run("r"))
    assert all(more - less < 4000 for more, less in zip(sizes["both"], sizes["alone"], strict=True))


def test_copies_follow_their_masters_through_the_life_of_a_store(tmp_path: Path) -> None:
    weights = masters(0)
    with ckstore.init(tmp_path / "store") as store, ckstore.init(tmp_path / "copy") as copy:
        for step in range(4):
            weights = masters(step, weights) if step else weights
            store.ingest(state(weights, torch.bfloat16), run="r", step=step, policy=COARSE)
        store.push(copy, ["r@2"])
        assert casts(copy["r@2"]) == 2
        assert consistent(copy["r@2"], torch.bfloat16)
        store.rebase(["r@2"])
        before = store["r@1"].state_dict()["model"]
        drop(store._repository, [store["r@1"]._stored.row], ("optimizer/*",))
        store.forget("r@0")
        store.gc(grace=0)
        after = store["r@1"].state_dict()["model"]
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(consistent(store[f"r@{step}"], torch.bfloat16) for step in (2, 3))
        assert not store.verify().damaged
        without = {"model": state(masters(4, weights), torch.bfloat16)["model"]}
        store.ingest(without, run="r", step=5, policy=COARSE)
        assert casts(store["r@5"]) == 0
        assert not store.verify().damaged


def test_elements_that_are_no_roundings_keep_their_own_values(tmp_path: Path) -> None:
    weights = masters(0)
    item = state(weights, torch.bfloat16)
    item["model"]["weight"][7, ::9] += 1
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(item, run="r", step=0, policy=COARSE)
        assert casts(store["r@0"]) == 2
        error = (store["r@0"].state_dict()["model"]["weight"] - item["model"]["weight"]).abs().max()
        assert error < 0.1


def test_a_copy_of_a_master_that_stays_exact_is_its_exact_rounding(tmp_path: Path) -> None:
    weights = masters(0)
    weights["weight"][0, 0] = float("inf")
    with ckstore.init(tmp_path / "store") as store:
        item = state(weights, torch.bfloat16)
        item["model"]["weight"][0, 0] = 1
        del item["optimizer"]["state"]
        store.ingest(item, run="r", step=0, policy=COARSE)
        assert torch.equal(store["r@0"].state_dict()["model"]["weight"], item["model"]["weight"])
        assert casts(store["r@0"]) == 1


def test_masters_with_the_same_values_have_no_casts(tmp_path: Path) -> None:
    """One of them decides how both become coarse, perhaps not on the lattice of the other."""
    weights = masters(0)
    item = state(weights, torch.bfloat16)
    item["ema"] = {name: value.clone() for name, value in weights.items()}
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(item, run="r", step=0, policy=COARSE)
        assert casts(store["r@0"]) == 0
        assert not store.verify().damaged
