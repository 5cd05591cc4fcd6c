"""The digest of a file from stretches of it, as several processes compute it."""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckstore.kernels.tree import LEAF
from ckstore.objects.file_digest import FileDigest, stretch_of

_SIZES = st.one_of(st.integers(0, 200), st.sampled_from([LEAF - 1, LEAF, LEAF + 1]), st.integers(0, 9 * LEAF))


@given(st.lists(st.tuples(_SIZES, st.booleans()), max_size=9), st.integers(1, 3 * LEAF))
def test_stretches_give_the_digest_of_the_file(parts: list[tuple[int, bool]], end: int) -> None:
    sizes = [size for size, _ in parts]
    file = np.random.default_rng(sum(sizes)).integers(0, 256, sum(sizes) + end, np.uint8)
    digest = FileDigest()
    start = 0
    for size, is_stretch in parts:
        data = file[start : start + size]
        if is_stretch:
            digest.add_stretch(stretch_of(data, start))
        else:
            digest.add(data.tobytes())
        start += size
    digest.add(file[start:].tobytes())
    assert digest.hexdigest() == blake3(file.tobytes()).hexdigest()


def test_a_stretch_is_short() -> None:
    """Two edges of less than a leaf, and two nodes for each level of the tree at most."""
    data = np.zeros((1 << 24) + 999, np.uint8)
    stretch = stretch_of(data, 64)
    nodes = sum(len(value) + 1 for _, value in stretch.nodes)
    assert len(stretch.before) + len(stretch.after) < 2 * LEAF
    assert nodes <= 33 * 2 * 14
