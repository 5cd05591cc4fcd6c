"""Decoders of damaged payloads and directories: nothing is read or written outside, as guards and sanitizers show.

`python -m tools.compile_kernels --sanitize` compiles the library that shows reads as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckstore.codecs import integer_header
from ckstore.codecs.integer_plan import workspace
from ckstore.codecs.integers import decode_integers
from ckstore.errors import IntegrityError

PAYLOADS = sorted((Path(__file__).parents[1] / "fixtures" / "payloads").glob("format-*.bin"))
TURNS = int(os.environ.get("CKSTORE_FUZZ_SECONDS", "0")) * 100 or 60

#: Numbers that a directory never has, or has at the ends of its ranges.
EXTREMES = [-(2**63), -(2**40), -1, 0, 1, 2, 3, 8, 44, 45, 62, 63, 64, 255, 4096, 4097, 2**31, 2**40, 2**62, 2**63 - 1]


def read(payload: np.ndarray, header: integer_header.Header, number: int, coded: np.ndarray) -> int:
    room = workspace()
    planes = header.planes if header.streamed else 0
    return room.kernels.read_streams(payload, planes, room.tables, number, coded)


@pytest.mark.parametrize("path", PAYLOADS, ids=[path.stem for path in PAYLOADS])
def test_damage_stays_inside(path: Path) -> None:
    rng = np.random.default_rng(len(path.name))
    original = path.read_bytes()
    header = integer_header.read_header(memoryview(original))
    room = workspace()
    outcomes = set()
    for turn in range(TURNS):
        number = room.kernels.read_directory(
            np.frombuffer(original, np.uint8), header.directory, header.planes, header.grouped, header.count,
            room.tables,
        )  # fmt: skip
        room.ends[:3] = header.streams
        payload = np.frombuffer(original, np.uint8).copy()
        if turn:
            for _ in range(rng.integers(1, 4)):
                damage(rng, payload, header, max(number, 1))
        guard = np.full((header.count + 64) * header.narrow, 77, np.uint8)
        coded = guard[32 * header.narrow : (32 + header.count) * header.narrow].view(f"i{header.narrow}")
        outcomes.add(read(payload, header, number, coded))
        assert (guard[: 32 * header.narrow] == 77).all()
        assert (guard[(32 + header.count) * header.narrow :] == 77).all()
        if not turn:
            assert outcomes == {0}
    assert outcomes == ({0, 1} if header.count else {0}) or not header.streamed


def damage(rng: np.random.Generator, payload: np.ndarray, header: integer_header.Header, number: int) -> None:
    """Change the payload's planes and streams, or the directory in memory."""
    room = workspace()
    index = int(rng.integers(number))
    kind = rng.integers(6)
    if kind == 0 and header.streamed:
        payload[rng.integers(header.planes, payload.size)] ^= 1 << rng.integers(8)
    elif kind == 1:
        name = rng.choice(room.groups.dtype.names)
        room.groups[name][index] = rng.choice(EXTREMES)
    elif kind == 2:
        room.lowers[index, rng.integers(8)] = rng.choice(EXTREMES)
    elif kind == 3:
        room.raws[index, rng.integers(8)] = rng.integers(256)
    elif kind == 4:
        room.lengths[index, rng.integers(8)] = rng.integers(20)
    else:
        room.ends[rng.integers(3)] = rng.choice(EXTREMES)


def test_a_payload_that_is_cut_is_refused() -> None:
    for path in PAYLOADS:
        original = path.read_bytes()
        header = integer_header.read_header(memoryview(original))
        for end in range(0, len(original), max(len(original) // 50, 1)):
            with pytest.raises(IntegrityError):
                decode_integers(original[:end], np.empty(header.count, f"i{header.width}"))
