"""Memory does not grow with the number of versions that a process stores or reads: `tools/bench/memory` runs longer."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.objects import resolver
from ckstore.retention import encoder
from tests.checkpoints import settled

pytestmark = pytest.mark.local

#: Versions until the caches and the interpreter's free lists are full, and after that: enough for lists that fluctuate.
FIRST, LATER = 48, 72
#: Bytes that a version may leave behind, in the interpreter's free lists: less than the records of its objects.
LARGEST = 450


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all caches be full after few versions."""
    for name in ("_MANIFESTS", "_NUMBERS", "_RECORDS", "_LOOKUPS"):
        monkeypatch.setattr(resolver, name, 2)
    monkeypatch.setattr(resolver, "_BLOBS", 1000)
    monkeypatch.setattr(encoder, "_LEAST_CACHE", 0)


def states() -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function that makes the state of a step."""
    start = torch.randn(500, generator=torch.Generator().manual_seed(0))
    return lambda step: {"weight": start + 1e-4 * step, "step": torch.tensor(step)}


def growth(operation: Callable[[int], object], store: ckstore.Store) -> float:
    """Return the bytes that an operation leaves behind in each stretch of steps, by step.

    Free lists grow and shrink, and the table of interned strings doubles once: a leak is in both stretches.
    """
    tracemalloc.start()
    try:
        held = []
        for steps in pairwise((0, FIRST, FIRST + LATER, FIRST + 2 * LATER)):
            for step in range(*steps):
                operation(step)
            held.append(_settled_bytes(store))
        return min(after - before for before, after in pairwise(held)) / LATER
    finally:
        tracemalloc.stop()


def _settled_bytes(store: ckstore.Store) -> int:
    settled(store)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_ingests_leave_nothing_behind(tmp_path: Path) -> None:
    state = states()
    ckstore.init(tmp_path / "store").close()
    with ckstore.open(tmp_path / "store", cache_bytes=1 << 14) as store:
        left = growth(lambda step: store.ingest(state(step), run=f"run {step % 2}", step=step), store)
    assert left < LARGEST


def test_reads_leave_nothing_behind(tmp_path: Path) -> None:
    state = states()
    with ckstore.init(tmp_path / "store") as store:
        for step in range(FIRST + 2 * LATER):
            store.ingest(state(step), run="run", step=step, hot=0)
    with ckstore.open(tmp_path / "store", "r", cache_bytes=1 << 14) as store:
        left = growth(lambda step: store[f"run@{step}"].state_dict(), store)
    assert left < LARGEST


@pytest.mark.parametrize(
    ("hot", "policy"), [(1, "exact"), (0, "exact"), (0, "coarse"), (0, ckstore.Policy("coarse", scheme="dynaquant"))]
)
def test_states_are_deleted_without_the_garbage_collector(
    tmp_path: Path, hot: int, policy: str | ckstore.Policy
) -> None:
    # It runs seldom while the background encodes: each state in a cycle of references would stay for long.
    generator = torch.Generator().manual_seed(0)
    array = np.random.default_rng(0).standard_normal((300, 300), np.float32)

    def state(step: int) -> dict[str, dict[str, object]]:
        weight = torch.randn(300, 300, generator=generator)
        return {
            "model": {"weight": weight, "half": weight.bfloat16(), "array": array * (step + 1)},
            "optimizer": {"exp_avg": weight / 2, "exp_avg_sq": weight**2},
        }

    def made(step: int, store: ckstore.Store) -> list[weakref.ref[object]]:
        stored = state(step)
        store.ingest(stored, run="run", step=step, hot=hot, policy=policy)
        read = store[f"run@{step}"].state_dict()
        return [weakref.ref(one) for tree in (stored, read) for part in tree.values() for one in part.values()]

    with ckstore.init(tmp_path / "store") as store:
        made(0, store)  # Imports leave cycles.
        settled(store)
        gc.collect()
        gc.disable()
        try:
            references = made(1, store)
            assert len(references) == 10
            assert not any(one() is not None for one in references)
        finally:
            gc.enable()
