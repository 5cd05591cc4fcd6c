"""Sources: bytes in memory, files on disk, files put together from their parts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import InputError
from ckstore.formats.sources import CompositeSource, FileSource


def test_file_source_reads(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    with FileSource(path) as source:
        assert source.size == 100
        assert source.mtime_ns == path.stat().st_mtime_ns
        assert source.pread(10, 5) == bytes(range(10, 15))
        assert source.pread(100, 0) == b""
        source.check_unchanged()
        for offset, length in ((96, 5), (-1, 1), (0, -1), (101, 0)):
            with pytest.raises(InputError):
                source.pread(offset, length)
    source.close()


@pytest.mark.parametrize("change", ["grow", "touch", "replace", "remove"])
def test_changes_are_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 10)
    with FileSource(path) as source:
        if change == "grow":
            path.write_bytes(b"a" * 11)
        elif change == "touch":
            os.utime(path, ns=(1, 1))
        elif change == "replace":
            other = tmp_path / "y"
            other.write_bytes(b"b" * 10)
            os.utime(other, ns=(source.mtime_ns, source.mtime_ns))
            other.rename(path)
        else:
            path.unlink()
        with pytest.raises(InputError, match=r"changed while|vanished while"):
            source.check_unchanged()


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 10)
    with FileSource(path) as source:
        os.truncate(path, 5)
        with pytest.raises(InputError, match="shorter"):
            source.pread(0, 10)


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
        for path in (tmp_path, tmp_path / "fifo", tmp_path / "socket", tmp_path / "absent", Path(os.devnull)):
            with pytest.raises(InputError):
                FileSource(path)


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), max_size=6))
def test_composite_source(data: bytes, steps: list[tuple[int, int]]) -> None:
    extents: list[tuple[int, int]] = []
    position = 0
    for gap, nbytes in steps:
        if position + gap + nbytes <= len(data):
            extents.append((position + gap, nbytes))
            position += gap + nbytes
    inside = {index for start, nbytes in extents for index in range(start, start + nbytes)}
    skeleton = bytes(byte for index, byte in enumerate(data) if index not in inside)
    whole = CompositeSource(
        skeleton, extents, len(data), lambda index, offset, nbytes: data[extents[index][0] + offset :][:nbytes]
    )
    zeros = CompositeSource(skeleton, extents, len(data))
    expected = bytes(0 if index in inside else byte for index, byte in enumerate(data))
    for start in range(len(data) + 1):
        for stop in range(start, len(data) + 1):
            assert whole.pread(start, stop - start) == data[start:stop]
            assert zeros.pread(start, stop - start) == expected[start:stop]


@pytest.mark.parametrize(
    ("skeleton", "extents", "size"),
    [(b"ab", [(0, 2)], 3), (b"a", [(2, 2), (0, 1)], 4), (b"", [(0, 2), (1, 2)], 3), (b"", [(0, 5)], 4)],
)
def test_parts_that_do_not_fit(skeleton: bytes, extents: list[tuple[int, int]], size: int) -> None:
    with pytest.raises(InputError):
        CompositeSource(skeleton, extents, size)
