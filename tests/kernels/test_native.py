"""The shared library: all levels of processors return the same bytes, and arrays that do not fit are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckstore.codecs.integer_plan import make_plan
from ckstore.kernels import coarse, entropy, lattice, native

REPOSITORY = Path(__file__).parents[2]


def digests(level: str, threads: int) -> str:
    command = [sys.executable, "-m", "tests.kernels.digests", level, str(threads)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_all_levels_and_threads_return_the_same_bytes() -> None:
    levels = native.LEVELS[: native.LEVELS.index(native.level) + 1]
    expected = digests(native.level, 2)
    assert expected.count("\n") > 60
    for level in levels:
        assert digests(level, 1) == expected, f"{level} differs"


def test_arrays_of_other_types_and_sizes_are_refused() -> None:
    words, fewer = np.zeros(8, np.uint32), np.zeros(7, np.uint32)
    fixed = words.copy()
    fixed.flags.writeable = False
    for out in (fewer, words.view(np.int32), words.view(np.uint16), np.zeros(16, np.uint32)[::2], fixed):
        with pytest.raises(ValueError, match="do not fit"):
            lattice.ordinal_difference(words, None, False, out)
    unaligned = np.zeros(33, np.uint8)[1:].view(np.uint32)
    for bits in (unaligned, words.astype(">u4"), words.astype(np.float32), words.astype(object)):
        with pytest.raises(ValueError, match="do not fit"):
            lattice.ordinal_difference(bits, None, False, words)
    with pytest.raises(ValueError, match="do not fit"):
        entropy.widen(np.zeros(3, np.int32), np.zeros(3, np.int16))
    with pytest.raises(ValueError, match="do not fit"):
        entropy.to_coded_order(words, np.zeros(7, np.uint8), np.zeros((4, 256), np.int64), words.copy())


def test_copies_past_caches_end_where_the_array_ends() -> None:
    data = np.random.default_rng(0).integers(1, 256, 4096 + 64, np.uint8)
    for size in (0, 1, 255, 256, 257, 4095, 4096):
        for first in (0, 1, 63):
            out = np.zeros(5000, np.uint8)
            native.copy_past_caches(data[first : first + size], out[first : first + size])
            assert np.array_equal(out[first : first + size], data[first : first + size])
            assert not out[:first].any()
            assert not out[first + size :].any()
    for other in (data[:-1], data.view(np.int8), data.view(np.uint16), data[::2], data[::-1]):
        with pytest.raises(ValueError, match="do not fit"):
            native.copy_past_caches(other, np.zeros(data.size, np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        native.copy_past_caches(data[::2], np.zeros(8320, np.uint8)[::4])


def test_payloads_without_room_are_refused() -> None:
    values = np.arange(3000, dtype=np.int32)
    plan = make_plan(values, None)
    room = plan.room
    room.groups["count"][0] += 1
    with pytest.raises(ValueError, match="do not fit"):
        entropy.plan_payload(values, False, 1, room.tables, room.encoder)
    longer = np.zeros(1 << 20, np.int8)
    room.groups["count"][0] = longer.size
    with pytest.raises(ValueError, match="do not fit"):
        entropy.plan_payload(longer, False, 1, room.tables, room.encoder)
    plan = make_plan(values, None)
    for size in (plan.size - 1, plan.size + 1):
        with pytest.raises(ValueError, match="do not fit"):
            entropy.write_payload(plan.coded, False, 0, room.tables, room.encoder, np.empty(size, np.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        entropy.narrow(np.zeros(3, np.int16), np.zeros(3, np.int32))


def test_exponents_beyond_any_float_are_refused() -> None:
    none, integers = np.zeros(0, np.int16), np.ones(8, np.int32)
    for step in (2**31, -(2**63)):
        with pytest.raises(ValueError, match="do not fit"):
            coarse.linear_values(integers, step, none, none, 8, 0, np.zeros(8, np.float32))
