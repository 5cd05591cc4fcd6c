"""Floats of 16 bits against the rounding of NumPy, torch and ml_dtypes: ties, subnormals, overflow, signs of zeros."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from ckstore.codecs.rounded import largest_finite
from ckstore.kernels import short_floats as kernels
from tests.kernels import reference
from tests.kernels.test_coarse import finite_bits


def words_for(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """float32 bits around every number of a short dtype: the numbers, the ties between them, and their neighbours."""
    every = np.arange(1 << 15, dtype=np.uint16)
    every = every[every <= largest_finite(dtype)]
    if dtype == "bfloat16":
        words = every.astype(np.uint32) << np.uint32(16)
        ties = words + np.uint32(1 << 15)
    else:
        words = every.view(np.float16).astype(np.float32).view(np.uint32)
        following = np.append(words[1:].view(np.float32), np.float32(65536))
        ties = ((words.view(np.float32) + following) / 2).view(np.uint32)
    near = [edge + np.uint32(step) for edge in (words[1:], ties) for step in (0, 1, 0xFFFFFFFF)]
    anything = finite_bits(rng, "float32", 20_000)
    words = np.concatenate([words, *near, anything])
    return np.concatenate([words, words ^ np.uint32(1 << 31)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_to_short_floats_is_torchs_and_overflow_is_the_largest_number(dtype: str) -> None:
    words = words_for(dtype, np.random.default_rng(0))
    words = words[(words >> 23 & 255) != 255]
    out = np.empty(words.size, np.uint16)
    (kernels.to_bfloat16 if dtype == "bfloat16" else kernels.to_float16)(words, out)
    assert np.array_equal(out, reference.short_floats(words, dtype))
    theirs = torch.from_numpy(words.view(np.float32)).to(getattr(torch, dtype)).view(torch.int16).numpy().view("u2")
    other = words.view(np.float32)
    with np.errstate(over="ignore"):
        other = other.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).view(np.uint16)
    inside = theirs & 0x7FFF <= largest_finite(dtype)
    assert inside.mean() > 0.5
    for expected in (theirs, other):
        assert np.array_equal(out[inside], expected[inside])
    assert set((out[~inside] & 0x7FFF).tolist()) == {largest_finite(dtype)}
    assert np.array_equal(out >> 15, words >> 31)


def test_widening_bfloat16_keeps_every_bit() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    out = np.empty(every.size, np.uint32)
    kernels.from_bfloat16(every, out)
    assert np.array_equal(out, every.astype(np.uint32) << np.uint32(16))


def test_every_float16_widens_to_its_value_and_narrows_back() -> None:
    halves = np.arange(1 << 16).astype(np.uint16)
    words = np.empty(halves.size, np.uint32)
    kernels.from_float16(halves, words)
    expected = halves.view(np.float16)
    finite = np.isfinite(expected)
    assert np.array_equal(words.view(np.float32)[finite], expected[finite].astype(np.float32))
    assert np.array_equal(np.signbit(words.view(np.float32)), np.signbit(expected))
    assert not np.any(np.isfinite(words.view(np.float32)[~finite]))
    back = np.empty_like(halves)
    kernels.to_float16(words, back)
    assert np.array_equal(back[finite], halves[finite])
