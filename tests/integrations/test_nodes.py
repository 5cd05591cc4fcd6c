"""Ranks on hosts of their own: meshes of all kinds, one after the other, in a bucket and in a shared directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.writing.compact import compact
from tests.network import network
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif("CKSTORE_NODES" not in os.environ, reason="CKSTORE_NODES is not set; needs root"),
]

#: Meshes and numbers of ranks on which a training goes on: first always on one, then on others.
MESHES = {"one": [("fsdp", 4)] * 3, "others": [("fsdp", 4), ("tp", 8), ("hsdp", 4), ("fsdp", 2)]}


def all_succeed(found: list[Any]) -> list[Any]:
    assert [code for code, _, _ in found] == [0] * len(found), "\n".join(printed for _, printed, _ in found)[-6000:]
    return [written for _, _, written in found]


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("kind", ["bucket", "directory"])
def test_a_training_goes_on_on_any_mesh(tmp_path: Path, hosts: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are equal, few bytes more than those stored go to the bucket, and deltas do not depend on the mesh."""
    with network(hosts) as made:
        for name, value in made.bucket.anywhere.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "mine"))
        place = f"{made.bucket.url}/nodes" if kind == "bucket" else str(tmp_path / "store")
        ckstore.init(place).close()
        for run, meshes in MESHES.items():
            step = 0
            for mesh, world in meshes:
                before = made.received()
                found = all_succeed(
                    run_ranks(world, "train", tmp_path, network=made, store=place, run=run, kind=mesh, steps=2)
                )
                assert {rank["first"] for rank in found} == {step + 1}
                if step:
                    assert all(rank["equal"].startswith("All ") for rank in found), found
                step += 2
                assert {(rank["saved"], rank["error"]) for rank in found} == {(step, "")}
                with ckstore.open(place) as store:
                    stored = sum(store[f"{run}@{number}"].stored_bytes for number in (step - 1, step))
                    print(kind, hosts, run, mesh, world, "stored", stored, "sent", made.received() - before)
        with ckstore.open(place) as store:
            compact(store._repository, store._catalog.hot())
            assert store.verify().problems == []
            sizes = {run: [store[f"{run}@{step}"].stored_bytes for step in range(3, 7)] for run in MESHES}
        print(sizes, sum(sizes["others"]) / sum(sizes["one"]))
        assert sum(sizes["others"]) < 1.01 * sum(sizes["one"])
