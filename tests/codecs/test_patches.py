"""Patches: changes are restored bit for bit, and invalid patches of a chunk are refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.patches import apply_patch, find_changes
from ckstore.errors import IntegrityError
from ckstore.runtime.checksum import crc32
from tests.format_reader import patched

Bits = npt.NDArray[Any]

FLOAT = {1: "float8_e5m2", 2: "float16", 4: "float32", 8: "float64"}

#: Bits of float32: both zeros, subnormals, infinities, NaNs with payloads of both signs.
ODD = [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000001]


def applied(patch: bytes, before: Bits, *, is_float: bool) -> Bits:
    bits = before.copy()
    apply_patch(memoryview(patch), bits, is_float=is_float)
    undone = bits.copy()
    apply_patch(memoryview(patch), undone, is_float=is_float, is_undone=True)
    assert np.array_equal(undone, before)
    return bits


def drawn(generator: np.random.Generator, count: int, size: int) -> Bits:
    return np.frombuffer(generator.bytes(count * size), f"u{size}")


@given(
    st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.integers(1, 700), st.booleans(), st.booleans(),
    st.integers(0, 64),
)  # fmt: skip
def test_any_change_round_trips_and_the_reader_of_the_format_agrees(
    seed: int, size: int, count: int, is_float: bool, rows: bool, bits: int
) -> None:
    generator = np.random.default_rng(seed)
    before = drawn(generator, count, size)
    after = before.copy()
    mask = generator.random(count) < generator.random()
    if rows:
        mask = np.repeat(mask[: -(-count // 9)], 9)[:count]
    # Training makes changes of few bits; changes of many bits reach the ends of the range.
    after[mask] ^= drawn(generator, count, size)[mask] >> min(bits, 8 * size - 1)
    changes = find_changes(after, before, is_float=is_float)
    assert changes.places.tolist() == np.flatnonzero(after != before).tolist()
    patch = changes.patch()
    if patch is None:
        assert np.array_equal(after, before)
        return
    assert np.array_equal(applied(patch, before, is_float=is_float), after)
    assert np.array_equal(patched(before, patch, FLOAT[size] if is_float else "uint8"), after)


def test_odd_floats_become_each_other() -> None:
    before = np.repeat(np.array(ODD, np.uint32), len(ODD))
    after = np.tile(np.array(ODD, np.uint32), len(ODD))
    patch = find_changes(after, before, is_float=True).patch()
    assert patch is not None
    assert np.array_equal(applied(patch, before, is_float=True), after)


def test_a_patch_takes_little_more_than_the_entropy_of_its_places() -> None:
    generator = np.random.default_rng(0)
    before = np.zeros(1 << 18, np.uint16)
    for share in (0.0002, 0.002, 0.01, 0.05):
        after = (generator.random(before.size) < share).astype(np.uint16)
        count = int(np.count_nonzero(after))
        patch = find_changes(after, before, is_float=False).patch()
        assert patch is not None
        entropy = -before.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) + count
        assert 8 * len(patch) < 1.08 * entropy + 400


def test_the_size_of_a_patch_follows_its_changes() -> None:
    generator = np.random.default_rng(0)
    before = generator.standard_normal((8192, 32)).astype(np.float32)
    after = before.copy()
    after[generator.permutation(8192)[:160]] += np.float32(1e-3)
    patch = find_changes(after.reshape(-1).view(np.uint32), before.reshape(-1).view(np.uint32), is_float=True).patch()
    assert patch is not None
    assert len(patch) < 160 * 32 * 3


def test_a_long_number_makes_the_others_of_its_block_no_longer() -> None:
    before = np.zeros(32, np.uint64)
    after = before + np.uint64(1)
    small = find_changes(after, before, is_float=False).patch()
    after[7] = 1 << 7
    large = find_changes(after, before, is_float=False).patch()
    assert small is not None
    assert large is not None
    assert np.array_equal(applied(large, before, is_float=False), after)
    assert len(large) <= len(small) + 8


def test_chunks_of_other_sizes_are_refused() -> None:
    for other in (np.zeros(4, np.uint32), np.zeros(5, np.uint16)):
        with pytest.raises(IntegrityError, match="do not fit"):
            find_changes(np.zeros(5, np.uint32), other, is_float=True)


def resealed(body: bytes) -> bytes:
    """A patch with a checksum that is right."""
    return crc32(body).to_bytes(4, "little") + body


def test_a_flipped_bit_is_found() -> None:
    before = np.arange(300, dtype=np.uint32)
    patch = find_changes(before ^ np.uint32(5), before, is_float=True).patch()
    assert patch is not None
    for bit in range(8 * len(patch)):
        damaged = bytearray(patch)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(IntegrityError, match="damaged"):
            applied(bytes(damaged), before, is_float=True)
    for length in range(len(patch)):
        with pytest.raises(IntegrityError, match="damaged"):
            applied(patch[:length], before, is_float=True)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes((value & 127 | 128,)), value >> 7
    return out + bytes((value,))


def crafted(count: int, places: bytes, blocks: bytes, padding: int = 8) -> bytes:
    return resealed(varint(count) + varint(len(places)) + places + blocks + bytes(padding))


ONE = bytes((1, 0))  # One number of one bit.


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        bytes(3),
        resealed(bytes(9)),
        crafted(0, b"", b""),
        crafted(1, b"", ONE),
        crafted(1, b"\x08\x00", ONE),
        crafted(1, varint(2**55) + b"\x00", ONE),
        crafted(1, b"\x00" + varint(2**55), ONE),
        crafted(2, b"\x07\x01", ONE),
        crafted(9, b"\x00\x08", ONE),
        crafted(1, b"\x00\x01", ONE),
        crafted(1, b"\x00\x00\x00", ONE),
        crafted(1, b"\x00", ONE),
        crafted(1, b"\x80" * 20, ONE),
        crafted(1, b"", bytes((1, 3, 0b100))),
        crafted(2, b"", bytes((1, 0, 0b100))),
        crafted(1, b"", bytes((1, 32, 0b10))),
        crafted(1, b"", bytes((1, 0, 0b10, 0))),
        crafted(1, b"", bytes((1, 0)) + (1 << 56).to_bytes(8, "little")),
        crafted(1, b"", bytes((129, 0, 1, 0b10))),
        crafted(1, b"", bytes((33, 0)) + bytes(5)),
        crafted(1, b"\x00\x00", b""),
        crafted(1, b"\x00\x00", b"\x01"),
        crafted(1, b"\x00\x00", bytes((33,)) + bytes(5)),
        crafted(1, b"\x00\x00", bytes((8,))),
        crafted(1, b"\x00\x00", bytes((129, 1, 0))),
        crafted(1, b"\x00\x00", bytes((129, 1, 0, 1, 1))),
        crafted(1, b"\x00\x00", bytes((129, 2, 0, 0, 1, 0, 1))),
        crafted(1, b"\x00\x00", bytes((129, 255, 0)) + bytes(510)),
        crafted(1, b"\x00\x00", ONE + b"\0"),
        crafted(1, b"\x00\x00", ONE, padding=7),
        resealed(b"\xff" * 30),
        resealed(varint(1) + varint(2**50) + bytes(20)),
    ],
)
def test_invalid_patches_of_the_chunk_are_refused(patch: bytes) -> None:
    with pytest.raises(IntegrityError, match="damaged"):
        applied(patch, np.zeros(8, np.uint32), is_float=True)


@given(st.binary(max_size=120), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40))
def test_bytes_with_a_right_checksum_are_refused_or_change_the_chunk_alone(body: bytes, size: int, count: int) -> None:
    whole = np.zeros(count + 64, f"u{size}")
    whole.fill(3)
    with suppress(IntegrityError):
        apply_patch(memoryview(resealed(body)), whole[32:-32], is_float=True)
    assert (whole[:32] == 3).all()
    assert (whole[-32:] == 3).all()
