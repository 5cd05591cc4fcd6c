"""Versions of a few KB: their store, with its catalog, is smaller than the files compressed one by one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from numcodecs.zstd import Zstd

import ckstore
from ckstore.storage import durable
from ckstore.writing import ingest
from tests.checkpoints import settled

#: How versions of a training in a repository are made, by default.
MADE = {
    "commit": "71c5546b9e465a22edeee7157d988382df02cb96", "dirty": False, "command": "train.py --lr 3e-4",
    "host": "node-1", "python": "3.11.7", "torch": "2.13.0+cu130",
}  # fmt: skip
pytestmark = [pytest.mark.local, pytest.mark.encoded]


def write(path: Path, step: int) -> None:
    """Write a small network with the moments of Adam; each step changes all values."""
    model, state = {}, {}
    start, change = torch.Generator().manual_seed(0), torch.Generator().manual_seed(step)
    for number, shape in enumerate([(8, 8), (8,), (3, 8), (3,)]):
        base, moved = torch.randn(shape, generator=start), torch.randn(shape, generator=change)
        model[f"{number // 2}.{'bias' if number % 2 else 'weight'}"] = base + 0.0003 * moved
        moments = {"exp_avg": 1e-2 * (base + 0.03 * moved), "exp_avg_sq": 1e-4 * (base + 0.003 * moved).square()}
        state[number] = {"step": torch.tensor(float(step)), **moments}
    torch.save({"model": model, "optimizer": {"state": state}, "step": step}, path)


@pytest.mark.parametrize(("made", "limit"), [({}, 0.94), (MADE, 0.96)], ids=["without-origins", "with-origins"])
def test_a_store_is_smaller_than_its_files_compressed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, object], limit: float
) -> None:
    monkeypatch.setattr(ingest, "made", lambda: made)
    # Digests of times and places are keys of the catalog, and chance fills its pages.
    monkeypatch.chdir(directory)
    monkeypatch.setattr(durable, "timestamp", lambda: f"2026-11-30T12:{step:02}:{7 * step % 60:02}.{7919 * step:06}Z")
    step = compressed = 0
    store = ckstore.init(directory / "store")
    for step in range(60):
        path = Path(f"checkpoint_{step}.pt")
        write(path, step)
        os.utime(path, (step, step))
        compressed += len(Zstd(level=3).encode(path.read_bytes()))
        store.ingest(path, run="r", step=step)
    settled(store)
    total = sum(file.stat().st_size for file in store.path.rglob("*") if file.is_file())
    assert total < limit * compressed
    store["r@59"].checkout(directory / "out.pt")
    assert (directory / "out.pt").read_bytes() == path.read_bytes()


def test_no_thread_begins_for_a_tiny_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ckstore.init(directory / "store")
    for step in range(3):
        store.ingest({"weight": torch.full((64, 64), float(step))}, run="r", step=step, hot=9)
    begun: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", begun.append)
    assert len(store.encode().versions) == 3
    store.ingest({"weight": torch.ones(64, 64)}, run="r", step=4, hot=0)
    assert not begun
