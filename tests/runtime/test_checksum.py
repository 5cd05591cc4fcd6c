"""Checksums of any buffer equal those of zlib and RFC 3720."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from ckstore.runtime.checksum import crc32, crc32c

SIZES = [0, 1, 7, 8, 15, 16, 17, 255, 256, 511, 1000, 5119, 5120, 5121, 1 << 16, (1 << 18) + 511]


def plain_crc32c(data: bytes) -> int:
    """Compute the checksum bit by bit."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 1, 2**32 - 1])
def test_crc32_is_that_of_zlib_for_every_kind_of_buffer(size: int, start: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8).tobytes()
    frozen = np.frombuffer(data, np.uint8)
    buffers = data, bytearray(data), memoryview(b"x" + data)[1:], frozen, frozen.copy()
    assert {crc32(buffer, start) for buffer in buffers} == {zlib.crc32(data, start)}


@pytest.mark.parametrize("array", [np.empty((1 << 16, 0)), np.arange(12.0).reshape(3, 4), np.ones(5, bool)])
def test_crc32_of_arrays_is_that_of_their_bytes(array: np.ndarray) -> None:
    assert crc32(array, 3) == zlib.crc32(array.tobytes(), 3)


@pytest.mark.parametrize("size", SIZES[:-3])
def test_crc32c_is_that_of_its_definition(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8).tobytes()
    assert crc32c(data) == plain_crc32c(data)
