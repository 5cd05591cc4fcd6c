"""The zip files of packs equal `zipfile`'s byte for byte, and it reads them beyond four gigabytes too."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
from blake3 import blake3

from ckstore.runtime import zip_records
from ckstore.storage.zip_stream import ZipStream, digest_file


def reference(members: list[tuple[str, bytes, bool]]) -> bytes:
    """Return the same members, written by `zipfile`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data, deflated in members:
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
            member.create_system = 3
            member.external_attr = 0o600 << 16
            if deflated:
                archive.writestr(member, data, compresslevel=9)
                archive.filelist.insert(0, archive.filelist.pop())
            else:
                member.file_size = len(data)
                with archive.open(member, "w") as target:
                    target.write(data)
    return stream.getvalue()


def write(path: Path, members: list[tuple[str, bytes, bool]]) -> str:
    stream = ZipStream(path)
    for name, data, deflated in members:
        if deflated:
            stream.add_deflated(name, data)
        else:
            half = len(data) // 3
            offset, length = stream.add_stored(name, [memoryview(data)[:half], memoryview(data)[half:]])
            assert (length, offset) == (len(data), stream.size - len(data))
    digest = stream.finish()
    stream.close()
    return digest


def test_the_bytes_equal_those_of_zipfile(tmp_path: Path) -> None:
    members = []
    for number, size in enumerate([0, 1, 1000, 65_535, 65_536, 65_537, 200_000, 3_000_000, 17]):
        members.append((f"a{number}/zarr.json", b'{"zarr_format": 3}' * (number + 1), True))
        members.append((f"a{number}/c/0", os.urandom(size), False))
    members.append(("zarr.json", os.urandom(70_000), True))
    digest = write(tmp_path / "pack.zip", members)
    data = (tmp_path / "pack.zip").read_bytes()
    assert data == reference(members)
    whole = blake3()
    with zipfile.ZipFile(tmp_path / "pack.zip") as archive:
        position = 0
        for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
            start = member.header_offset + 30 + len(member.filename)
            if member.compress_size >= 1 << 16:
                stop = start + member.compress_size
                whole.update(data[position:start]).update(blake3(data[start:stop]).digest())
                position = stop
    assert digest == whole.update(data[position:]).hexdigest(length=20)
    assert digest == digest_file(io.BytesIO(data))
    inside = data.index(b"a8/") - 100
    assert digest_file(io.BytesIO(data[:inside])) == ""
    for place in (10, 40, len(data) // 2, inside, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        assert digest_file(io.BytesIO(changed)) != digest


@pytest.mark.long
def test_more_members_than_two_bytes_count(tmp_path: Path) -> None:
    members = [(f"m{number}", b"x", False) for number in range(70_000)]
    write(tmp_path / "pack.zip", members)
    assert (tmp_path / "pack.zip").read_bytes() == reference(members)


def test_sizes_and_offsets_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of a few bytes every field of ZIP64 is used; `zipfile` does not care how large the numbers are."""
    monkeypatch.setattr(zip_records, "LIMIT", 100)
    members = [("a", b"1" * 50, False), ("b", b"2" * 5000, False), ("c", b"3" * 50, True), ("d", b"4" * 9000, True)]
    write(tmp_path / "pack.zip", members)
    with zipfile.ZipFile(tmp_path / "pack.zip") as archive:
        assert archive.testzip() is None
        for name, data, _ in members:
            assert archive.read(name) == data


def test_a_member_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Its bytes are counted, and never written."""
    stream = ZipStream(tmp_path / "pack.zip")
    written: list[bytes] = []

    def put(view: memoryview) -> None:
        written.append(bytes(view))

    stream._put = put  # type: ignore[method-assign]
    stream._begin("large/c/0", 0, 7, 5 << 30, 5 << 30)
    stream.size += 5 << 30
    stream.add_stored("next/c/0", [memoryview(b"abc")])
    stream.finish()
    stream.close()
    head = written[0]
    assert head[18:26] == b"\xff" * 8
    assert int.from_bytes(head[30 + 9 + 4 : 30 + 9 + 12], "little") == 5 << 30
