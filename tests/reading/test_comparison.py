"""The numbers of a comparison, against NumPy in float64, for all dtypes and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckstore
from ckstore.dtypes import ITEM_SIZES
from ckstore.reading.real_values import from_float64, to_float64

FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
FLOAT8 = [name for name in ITEM_SIZES if name.startswith("float8")]
OTHERS = ["int64", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"]


def values(dtype: str, seed: int, shape: tuple[int, ...] = (700, 300)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind.is_complex:
        return torch.randn(shape, dtype=kind, generator=generator)
    found = torch.randn(shape, generator=generator) * 3
    return found > 1 if kind == torch.bool else found.to(torch.int8 if kind == torch.uint8 else kind).view(kind)


def wide(tensor: torch.Tensor) -> Any:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def changed(tmp_path: Path, before: Any, after: Any, **named: Any) -> tuple[ckstore.TensorChange, ...]:
    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate([before, after]):
            torch.save(state, tmp_path / "state.pt")
            store.ingest(tmp_path / "state.pt", run="r", step=step, hot=0)
        forth, back = store.diff(1, 2, **named), store.diff(2, 1, **named)
        assert [item.rms for item in forth.changes if item.rms] == pytest.approx(
            [item.rms for path in forth.changes for item in back.changes if item.path == path.path and item.rms]
        )
        return forth.changes


@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
def test_numbers(tmp_path: Path, dtype: str) -> None:
    before, after = values(dtype, 0), values(dtype, 1)
    after[:300] = before[:300]
    [change] = changed(tmp_path, {"w": before}, {"w": after})
    one, other = wide(before).ravel(), wide(after).ravel()
    assert change.share == np.mean(one != other)
    assert change.drift == pytest.approx(np.linalg.norm(other - one) / np.linalg.norm(one), rel=1e-12)
    assert change.rms == pytest.approx(np.sqrt(np.mean(np.abs(other - one) ** 2)), rel=1e-12)
    assert change.max_abs == pytest.approx(np.abs(other - one).max(), rel=1e-12)
    cosine = np.vdot(one, other).real / np.linalg.norm(one) / np.linalg.norm(other)
    assert change.cosine == pytest.approx(cosine, rel=1e-12)


def test_tensors_of_any_layout(tmp_path: Path) -> None:
    base, moved = values("float32", 0), values("float32", 1)
    layouts = {"turned": lambda t: t.T, "every second": lambda t: t[::2, 1::3], "scalar": lambda t: t[3, 4]}
    changes = changed(tmp_path, {k: f(base) for k, f in layouts.items()}, {k: f(moved) for k, f in layouts.items()})
    for change in changes:
        one, other = (wide(layouts[change.path](tensor)) for tensor in (base, moved))
        assert change.rms == pytest.approx(np.sqrt(np.mean((other - one) ** 2)))
    assert len(changes) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float8_e5m2"])
def test_infinities_and_nans_are_left_out(tmp_path: Path, dtype: str) -> None:
    before, after = values(dtype, 0), values(dtype, 1)
    before[5, :7] = float("nan")
    after[5, 2:9] = float("inf")
    [change] = changed(tmp_path, {"w": before}, {"w": after})
    one, other = wide(before), wide(after)
    finite = np.isfinite(one) & np.isfinite(other)
    assert change.nonfinite == (7, 7)
    assert change.rms == pytest.approx(np.sqrt(np.mean(np.abs(other - one)[finite] ** 2)))
    assert change.max_abs == pytest.approx(np.abs(other - one)[finite].max())


def test_packed_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    kind = getattr(torch, "float4_e2m1fn_x2", None)
    if kind is None:
        pytest.skip("torch has no float4")
    before, after = (torch.arange(64, dtype=torch.uint8) % modulus for modulus in (64, 32))
    [change] = changed(tmp_path, {"w": before.view(kind)}, {"w": after.view(kind)})
    one, other = (side.numpy().repeat(2).reshape(-1, 2) >> [0, 4] & 15 for side in (before, after))
    one, other = (codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float) for codes in (one, other))
    moved = np.linalg.norm(other - one)
    assert (change.share, change.drift) == (0.5, pytest.approx(moved / np.linalg.norm(one)))
    assert (change.rms, change.max_abs) == (pytest.approx(moved / 128**0.5), np.abs(other - one).max())


def test_values_whose_squares_are_too_large_have_no_distances(tmp_path: Path) -> None:
    before, after = (torch.randn(1000, dtype=torch.float64) * 1e200 for _ in range(2))
    [change] = changed(tmp_path, {"w": before}, {"w": after})
    assert (change.share, change.drift, change.rms, change.cosine) == (1.0, None, None, None)
    assert change.max_abs == (after - before).abs().max().item()


def test_an_unknown_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckstore.UsageError, match="drift, path, share, rms"):
        changed(tmp_path, {"w": torch.ones(3)}, {"w": torch.zeros(3)}, sort="size")


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_that_of_torch(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(to_float64(codes, dtype), expected)


def test_bfloat16_is_rounded_once() -> None:
    magnitudes = np.random.default_rng(0).integers(0, 0x7F00, 1 << 14).astype(np.uint32)
    odd = (magnitudes << 16) | np.tile(np.array([0, 1 << 31], np.uint32), 1 << 13)
    above, below = (odd + np.uint32(0x8000)).view(np.float32).astype(np.float64), odd.view(np.float32)
    for factor in (1, 1 + 2**-40, 1 - 2**-40):  # Ties, and values that float32 rounds to ties.
        wanted = above * factor
        found = to_float64(from_float64(wanted, "bfloat16"), "bfloat16")
        assert found is not None
        fine = np.abs(wanted) > 1e-37
        up = (odd + np.uint32(0x10000)).view(np.float32).astype(np.float64)
        nearer_up = np.abs(up - wanted) < np.abs(below - wanted)
        tie = np.abs(up - wanted) == np.abs(below - wanted)
        expected = np.where(nearer_up | (tie & (odd >> 16 & 1 == 1)), up, below)
        np.testing.assert_array_equal(found[fine], expected[fine])
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    found = to_float64(from_float64(special, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(found, special)
