"""CRC-32C and CRC-32 by the kernel against the libraries."""

from __future__ import annotations

import zlib

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.kernels.checksum import BLOCK, fold_blocks, folds, keys

#: Polynomial and function of the library.
LIBRARIES = {
    0x11EDC6F41: lambda data, start: google_crc32c.extend(start, bytes(data)),
    0x104C11DB7: lambda data, start: zlib.crc32(data, start),
}


@pytest.mark.skipif(not folds(), reason="the processor has no carry-less products of vectors")
@pytest.mark.parametrize("polynomial", LIBRARIES)
@given(st.integers(1, 300), st.integers(0, BLOCK - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_blocks_have_the_checksum_of_the_library(polynomial, blocks, rest, start, seed):
    data = np.random.default_rng(seed).integers(0, 256, 3 + BLOCK * blocks + rest).astype(np.uint8)
    data[: seed % data.size // 2] = 0
    view = data[3:]
    view.flags.writeable = False
    folded = np.empty(8, np.uint64)
    fold_blocks(view, start, keys(polynomial), folded)
    library = LIBRARIES[polynomial]
    assert library(folded, 0xFFFFFFFF) == library(view[: BLOCK * blocks], start)
