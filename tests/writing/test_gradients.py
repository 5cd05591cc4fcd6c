"""Gradients of a version come by path, nested as in the state, or in a file of either."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckstore
from ckstore.policy import Policy
from ckstore.writing.gradients import Gradients, _boxes

COARSE = Policy("coarse", "dynaquant", 3)


def weight() -> torch.Tensor:
    return torch.randn(300, 256, generator=torch.Generator().manual_seed(0))


def gradient() -> torch.Tensor:
    """Return the gradient of a weight whose first rows matter little, exact in bfloat16."""
    gradient = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    gradient[:100] *= 2.0**-20
    return gradient


def torch_file(place: Path) -> Path:
    torch.save({"model/w": gradient()}, place / "sums.pt")
    return place / "sums.pt"


def nested_file(place: Path) -> Path:
    torch.save({"model": {"w": gradient().bfloat16()}}, place / "sums.pt")
    return place / "sums.pt"


def safetensors_file(place: Path) -> Path:
    save_file({"model/w": gradient().double()}, place / "sums.safetensors")
    return place / "sums.safetensors"


def transposed(place: Path) -> dict[str, torch.Tensor]:
    return {"model/w": gradient().T.contiguous().T}


FORMS: list[Callable[[Path], Any]] = [
    lambda place: {"model": {"w": gradient().numpy()}},
    lambda place: {"model/w": gradient().bfloat16()},
    torch_file,
    nested_file,
    safetensors_file,
    transposed,
]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_rank_alike(store: ckstore.Store, tmp_path: Path, form: Callable[[Path], Any]) -> None:
    values = {"model": {"w": weight()}}
    store.ingest(values, run="plain", gradients={"model/w": gradient()}, policy=COARSE)
    store.ingest(values | {"n": 1}, run="form", gradients=form(tmp_path), policy=COARSE)
    shown = [store[f"{run}@latest"]["model/w"][...] for run in ("plain", "form")]
    assert np.array_equal(*shown)
    pruned = shown[0] == 0
    assert pruned[:100].mean() > pruned[100:].mean() + 0.4


def test_a_part_is_read_like_the_whole(tmp_path: Path) -> None:
    whole = gradient().reshape(-1).numpy()
    for form in FORMS:
        with Gradients(form(tmp_path), tmp_path / "store") as found:
            assert found.shapes == {"model/w": (300, 256)}
            assert np.array_equal(found.read("model/w", (0, 1), 1000, 40_000), whole[1000:40_000])


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 5), (7, 43), (100, 2519), (0, 2520), (2519, 2520)])
def test_parts_in_any_order_of_axes_read_few_other_elements(tmp_path: Path, first: int, last: int) -> None:
    values = torch.arange(2520.0).reshape(5, 6, 7, 12).permute(2, 0, 3, 1)
    wanted = values.permute(3, 1, 0, 2).reshape(-1).numpy()[first:last]
    with Gradients({"w": values}, tmp_path / "store") as found:
        assert np.array_equal(found.read("w", (3, 1, 0, 2), first, last), wanted)
    boxes = [np.prod([len(positions) for positions in wanted]) for wanted, _ in _boxes((6, 5, 7, 12), first, last)]
    assert sum(boxes) <= 3 * (last - first)


@pytest.mark.parametrize("is_gradient_too", [False, True])
def test_weights_in_another_order_in_memory_meet_their_gradients(store: ckstore.Store, is_gradient_too: bool) -> None:
    values = torch.randn(192, 64, 3, 3, generator=torch.Generator().manual_seed(0))
    slope = torch.ones_like(values)
    slope[:64] = 1e-6
    if is_gradient_too:
        slope = slope.to(memory_format=torch.channels_last)
    state = {"w": values.to(memory_format=torch.channels_last)}
    store.ingest(state, run="r", gradients={"w": slope}, policy=COARSE)
    pruned = store["r@latest"]["w"][...] == 0
    assert pruned[:64].mean() > pruned[64:].mean() + 0.3


def test_a_gradient_of_another_shape_is_refused(store: ckstore.Store) -> None:
    with pytest.raises(ckstore.UsageError, match=r"has the shape \(256, 300\), the tensor \(300, 256\)"):
        store.ingest({"w": weight()}, run="r", gradients={"w": gradient().T}, policy=COARSE)
    assert store._catalog.versions() == []


def test_large_tensors_of_several_objects_get_their_rows(store: ckstore.Store) -> None:
    rows = 4096
    values = torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0))
    slope = torch.ones_like(values)
    slope[: rows // 2] = 1e-6
    store.ingest({"w": values}, run="r", gradients={"w": slope}, policy=COARSE)
    assert len(store["r@latest"]._stored.document.objects) > 1
    pruned = store["r@latest"]["w"][...] == 0
    assert pruned[: rows // 2].mean() > pruned[rows // 2 :].mean() + 0.3


def repeated(place: Path) -> Path:
    """Return a file of four bytes that claims a million gradients."""
    torch.save({"w": torch.ones(1).expand(10**6)}, place / "sums.pt")
    return place / "sums.pt"


def cut_off(place: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    (place / "sums.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    return place / "sums.safetensors"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def executing(place: Path) -> Path:
    torch.save({"w": Evil()}, place / "sums.pt")
    return place / "sums.pt"


def checkpoint(place: Path) -> Path:
    torch.save({"model": {"w": torch.ones(8)}, "step": 4}, place / "sums.pt")
    return place / "sums.pt"


@pytest.mark.parametrize(
    ("form", "hint"),
    [
        (repeated, "gradient of w is not an array of floats"),
        (cut_off, "not a sound safetensors file"),
        (executing, "gradient of w is not an array of floats"),
        (checkpoint, "gradient of step is not an array of floats"),
        (lambda place: place, "is a directory|holds no checkpoint|no tensors"),
        (lambda place: place / "none.pt", "does not exist"),
        (lambda place: {"w": torch.ones(8, dtype=torch.int64)}, "not an array of floats"),
        (lambda place: {"w": torch.ones(8, dtype=torch.complex64)}, "not an array of floats"),
        (lambda place: {"w": Evil()}, "gradient of w is not an array of floats"),
    ],
)
def test_other_sources_are_refused(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Callable[[Path], Any], hint: str
) -> None:
    place = tmp_path / "given"
    place.mkdir()
    monkeypatch.chdir(place)
    with pytest.raises((ckstore.InputError, ckstore.UsageError), match=hint):
        store.ingest({"w": torch.ones(8)}, run="r", gradients=form(place), policy=COARSE)
    assert not Path("executed").exists()
    assert store._catalog.versions() == []


def test_many_checkpoints_take_no_gradients(store: ckstore.Store, tmp_path: Path) -> None:
    paths = []
    for step in range(2):
        paths.append(tmp_path / f"step{step}.npy")
        np.save(paths[-1], np.full(4, step))
    options = ckstore.IngestOptions(gradients=torch_file(tmp_path))
    with pytest.raises(ckstore.UsageError, match="single checkpoint"):
        store.ingest_many(paths, options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_gradients_on_a_gpu_move_in_parts(tmp_path: Path) -> None:
    """No whole copy of one is made on either side."""
    large = torch.randn(1 << 24, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Gradients({"w": large}, tmp_path) as found:
        assert np.array_equal(found.read("w", 1000, 2000), large[1000:2000].cpu().numpy())
    assert torch.cuda.max_memory_allocated() - before < large.nbytes / 8


@pytest.mark.parametrize("policy", [None, COARSE], ids=["exact", "coarse"])
def test_small_tensors_may_be_trained_alone(tmp_path: Path, policy: Policy | None) -> None:
    state = {"base": weight(), "adapter": torch.ones(4)}
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            gradients = {"adapter": torch.ones(4)}
            assert store.ingest(state, step=step, policy=policy, gradients=gradients, hot=0).is_new
        with pytest.raises(ckstore.UsageError, match="path of a tensor"):
            store.ingest(state, step=2, policy=policy, gradients={"adaptor": torch.ones(4)}, hot=0)
