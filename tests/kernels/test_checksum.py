"""CRC-32C by the kernel against the library."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs import checksum
from ckstore.kernels.checksum import BLOCK, crc32c_of_blocks, folds


@pytest.mark.skipif(not folds(), reason="the processor has no carry-less products of vectors")
@given(st.integers(1, 300), st.integers(0, BLOCK - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_blocks_have_the_checksum_of_the_library(blocks, rest, start, seed):
    data = np.random.default_rng(seed).integers(0, 256, 3 + BLOCK * blocks + rest).astype(np.uint8)
    data[: seed % data.size // 2] = 0
    view = data[3:]
    view.flags.writeable = False
    assert crc32c_of_blocks(view, start) == google_crc32c.extend(start, bytes(view[: BLOCK * blocks]))


@pytest.mark.parametrize(
    "size", [0, 1, 511, 8192, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 18) + 511, (1 << 18) + 512, (1 << 20) + 77]
)
@pytest.mark.parametrize("start", [0, 1, 2**32 - 1])
def test_buffers_of_every_size_and_kind_have_the_checksum_of_the_library(size, start):
    checksum.use_kernel()
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8).tobytes()
    wanted = google_crc32c.extend(start, data)
    assert checksum.crc32c(data, start) == wanted
    assert checksum.crc32c(bytearray(data), start) == wanted
    assert checksum.crc32c(memoryview(b"x" + data)[1:], start) == wanted
    assert checksum.crc32c(np.frombuffer(data, np.uint8), start) == wanted
