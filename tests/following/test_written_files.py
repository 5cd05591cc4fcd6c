"""Files that are written in parts have the digest of all their bytes."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from ckstore.following.written_files import WrittenFiles


@pytest.mark.parametrize("size", [0, 1, 1024, 5 << 20, (5 << 20) + 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_digest_is_that_of_written_and_other_bytes(tmp_path: Path, size: int, share: float) -> None:
    generator = np.random.default_rng(size)
    before, after = generator.integers(0, 256, (2, size), np.uint8)
    path = tmp_path / "file"
    path.write_bytes(before.tobytes())
    descriptor = os.open(path, os.O_RDWR)
    cuts = [0, *sorted(generator.integers(0, size + 1, 9).tolist()), size]
    parts = [(7, low, low, high) for low, high in pairwise(cuts) if low < high]
    chosen = [part for part in parts if generator.random() < share]
    files = WrittenFiles({7: descriptor}, {7: size})
    for start in range(0, len(chosen), 2):
        files.note(files.write(after, chosen[start : start + 2]))
    expected = before.copy()
    for _, first, low, high in chosen:
        expected[first : first + high - low] = after[low:high]
    assert files.digests() == {7: blake3(expected.tobytes()).hexdigest()}
    assert path.read_bytes() == expected.tobytes()
    files.close()
    os.close(descriptor)
