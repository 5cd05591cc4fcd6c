"""Shards of tensors: the elements that they share with a stretch of the tensor, and their places there."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckstore.writing.ranks import Shard


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    first = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, first, strict=True))
    whole = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    first = tuple(0 if full else start for full, start in zip(whole, first, strict=True))
    sizes = tuple(size if full else own for full, size, own in zip(whole, shape, sizes, strict=True))
    return Shard(0, 0, shape, first, sizes)


@given(shards(), st.data(), st.sampled_from(["u1", "i4"]))
def test_a_stretch_gets_the_elements_of_all_shards(shard: Shard, data: st.DataObject, dtype: str) -> None:
    count = prod(shard.shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(1, count + 1).astype(dtype).reshape(shard.shape)
    box = tuple(slice(first, first + size) for first, size in zip(shard.first, shard.sizes, strict=True))
    own = np.ascontiguousarray(numbers[box]).reshape(-1)
    low, high = shard.overlap(start, stop)
    mask = np.zeros(shard.shape, bool)
    mask[box] = True
    inside = mask.reshape(-1)[start:stop]
    assert (own[low:high] == numbers.reshape(-1)[start:stop][inside]).all()
    assert high - low == inside.sum()
    target = np.zeros(stop - start, dtype)
    if low < high:
        size = target.itemsize
        shard.place(low, high, own.view(np.uint8)[low * size : high * size], start, target.view(np.uint8), size)
    assert (target == np.where(inside, numbers.reshape(-1)[start:stop], 0)).all()
