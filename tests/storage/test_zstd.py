"""zstd frames: with any dictionary, and bounded by the length that they state."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckstore.storage import zstd


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([1, 9, 16]))
def test_round_trip(data, dictionary, level):
    frame = zstd.compress(data, level, dictionary)
    assert zstd.length_of(frame) == len(data)
    assert zstd.expand(frame, len(data), dictionary) == data


def test_the_whole_dictionary_is_in_reach():
    """The window would be too short for it, were it made for the data alone."""
    dictionary = random.Random(1).randbytes(3 << 20)
    for data in (dictionary, dictionary[:5000], dictionary[1 << 20 :] + dictionary[: 1 << 20]):
        frame = zstd.compress(data, 9, dictionary)
        assert len(frame) < 1000
        assert zstd.expand(frame, len(data), dictionary) == data


def framed(head: bytes, blocks: bytes) -> bytes:
    return zstandard.MAGIC_NUMBER.to_bytes(4, "little") + head + blocks


#: One block of 3 zeros, the last one.
_ZEROS = (1 | 1 << 1 | 3 << 3).to_bytes(3, "little") + b"\0"


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"abcd",
        zstd.compress(b"abc", 3) + b"d",
        zstd.compress(b"abc", 3) * 2,
        zstd.compress(b"abc", 3)[:-1],
        zstd.compress(b"abcd", 3),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"),
        framed(b"\x20\x04", _ZEROS),
        framed(b"\x20\x02", _ZEROS),
        # A dictionary's id, and a reserved bit.
        framed(b"\x21\x07\x03", _ZEROS),
        framed(b"\x28\x03", _ZEROS),
    ],
)
def test_frames_that_are_not_of_that_length_are_refused(frame):
    assert zstd.expand(framed(b"\x20\x03", _ZEROS), 3) == bytes(3)
    with pytest.raises(ValueError, match="its compressed bytes"):
        zstd.expand(frame, 3)


def test_the_window_of_a_crafted_frame_takes_no_memory():
    # Eight bytes of length, and a window of 128 MB, the largest one that is accepted at all.
    head = b"\xc0" + bytes([17 << 3]) + (3).to_bytes(8, "little")
    tracemalloc.start()
    for frame in (framed(head, _ZEROS), framed(head, _ZEROS[:-1])):
        try:
            assert zstd.expand(frame, 3) == bytes(3)
        except ValueError:
            assert len(frame) < len(framed(head, _ZEROS))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_densest_frames_expand_at_the_speed_of_memory():
    """100 KB of blocks of one repeated byte, 128 KB each, with all that a blob of this size may become."""
    blocks = 100
    block = (1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"a"
    last = (1 | 1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"a"
    size = (blocks + 1) << 17
    frame = framed(b"\xe0" + size.to_bytes(8, "little"), block * blocks + last)
    before = time.process_time()
    assert zstd.expand(frame, size) == b"a" * size
    assert time.process_time() - before < 1
