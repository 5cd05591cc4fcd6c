"""Reading a version once: every object comes out with its values, whatever fits the memory that is set aside."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.scanning import hashing
from ckstore.scanning.inputs import scan_state_dict
from tests.checkpoints import sha256


def state(seed: int = 0) -> dict[str, Any]:
    """Large and small tensors of several dtypes; the members of bundles lie far apart."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(6):
        tensors[f"h.{layer}.weight"] = torch.randn(300, 256, generator=generator)
        tensors[f"h.{layer}.bias"] = torch.randn(3000, generator=generator)
        tensors[f"h.{layer}.scale"] = torch.randn(900, generator=generator).to(torch.bfloat16)
        tensors[f"h.{layer}.double"] = torch.randn(70_000, generator=generator).double()
    return {"model": tensors, "step": seed}


@pytest.mark.parametrize("window", [1 << 12, 1 << 17, 1 << 20, 32 << 20])
def test_each_object_comes_once_with_its_values(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "WINDOW", window)
    hashed, held = scan_state_dict(state()), scan_state_dict(state())
    hashing.hash_version(hashed, force=False)
    seen: list[int] = []
    waiting: deque[list[tuple[int, Any]]] = deque()
    in_memory: set[int] = set()
    for numbers in hashing.held_windows(held):
        # As an ingest does: one window is still coded and one estimated while the next one is read.
        for number, values in itertools.chain(*waiting):
            unit = hashed.units[number]
            assert (unit.members[0] in held.held) == (number in in_memory)
            np.testing.assert_array_equal(values, hashed.read(unit, 0, values.size))
        if len(waiting) == 2:
            waiting.popleft()
        waiting.append([])
        for number in numbers:
            unit = held.units[number]
            if unit.members[0] in held.held:
                in_memory.add(number)
            values = held.read(unit, 0, unit.count)
            assert not values.flags.writeable
            waiting[-1].append((number, values))
            held.check(unit, values)
        seen += numbers
    for number, values in itertools.chain(*waiting):
        np.testing.assert_array_equal(values, hashed.read(hashed.units[number], 0, values.size))
    assert sorted(seen) == list(range(len(hashed.units)))
    assert held.contents == hashed.contents
    assert held.is_hashed
    for fact in ("blake3", "skeleton", "crcs", "digests"):
        assert getattr(held.files[0], fact) == getattr(hashed.files[0], fact)
    assert (in_memory == set(seen)) == (window > 1 << 12)


@pytest.mark.long
@pytest.mark.parametrize("block", [1 << 10, 1 << 18, 4 << 20])
@pytest.mark.parametrize("window", [1 << 12, 1 << 17, 1 << 19, 32 << 20])
def test_versions_are_restored_with_any_windows(
    tmp_path: Path, window: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "WINDOW", window)
    monkeypatch.setattr(hashing, "BLOCK", block)
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            path = tmp_path / f"{seed}.pt"
            torch.save(state(seed), path)
            store.ingest(path)
    with ckstore.open(tmp_path / "store", "r") as store:
        for seed in range(3):
            store[seed + 1].checkout(tmp_path / "out.pt", force=True)
            assert sha256(tmp_path / "out.pt") == sha256(tmp_path / f"{seed}.pt")


def test_memory_of_a_window_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "WINDOW", 1 << 20)
    scanned = scan_state_dict({f"w{i}": torch.full((70_000,), float(i)) for i in range(40)})
    places = set()
    most = 0
    for numbers in hashing.held_windows(scanned):
        most = max(most, len(scanned.held))
        places |= {scanned.held[scanned.units[number].members[0]].ctypes.data for number in numbers}
    assert most <= 3 * ((1 << 20) // 280_000)
    assert len(places) <= 4 * ((1 << 20) // 280_000)


def test_short_windows_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_SHORT", 1 << 20)
    tensors = {f"w{i}": torch.full((70_000,), float(i)) for i in range(40)}
    scanned = scan_state_dict(tensors | {"large": torch.full((700_000,), 0.5)})
    windows, held = [], []
    for numbers in hashing.held_windows(scanned, short=True):
        windows.append(sum(scanned.units[number].nbytes for number in numbers))
        held.append(sum(values.nbytes for values in scanned.held.values()))
    assert sorted(windows)[-2] <= 1 << 20
    assert max(held) <= (3 << 20) + 2_800_000  # and the largest object


def test_a_tensor_that_is_called_like_a_part_of_another(tmp_path: Path) -> None:
    """Parts of a large tensor differ by a number that may occur in another tensor's name as well."""
    large = torch.randn(2100, 2048, generator=torch.Generator().manual_seed(1))
    torch.save({"w": large, "w#0": large[:300] + 1, "w#1": large[-40:] - 1}, tmp_path / "0.pt")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "0.pt")
        store[1].checkout(tmp_path / "out.pt")
    assert sha256(tmp_path / "out.pt") == sha256(tmp_path / "0.pt")


def test_memory_does_not_grow_with_the_number_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several bundles fit one window."""
    monkeypatch.setattr(hashing, "WINDOW", 16 << 20)
    scanned = scan_state_dict({f"{i:04}.lora": torch.full((12_000,), float(i)) for i in range(2000)})
    seen = []
    for numbers in hashing.held_windows(scanned):
        assert sum(scanned.units[number].nbytes for number in numbers) <= 16 << 20
        assert sum(values.nbytes for values in scanned.held.values()) <= 48 << 20
        seen += numbers
    assert sorted(seen) == list(range(len(scanned.units)))
    assert all(len(unit.members) > 1 for unit in scanned.units)
