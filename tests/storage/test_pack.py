"""Packs: Zarr reads them, they are found and read back, and failed ones leave nothing."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.runtime import zip_records
from ckstore.storage import durable, pack_reader
from ckstore.storage import pack as pack_module
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.pack import PackEntry, PackWriter
from ckstore.storage.pack_reader import PackReader, read_shard_index
from ckstore.storage.segments import FoundPlaces

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True)
def arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are Zarr arrays as well."""
    monkeypatch.setattr(pack_module, "_SMALL", 0)


BYTES = [{"name": "bytes", "configuration": {"endian": "little"}}]


def chunks_of(values: np.ndarray, chunk: int) -> list[bytes | None]:
    padded = np.zeros(-(-len(values) // chunk) * chunk, values.dtype)
    padded[: len(values)] = values
    parts = padded.reshape(-1, chunk)
    return [part.tobytes() if part.any() else None for part in parts]


@settings(max_examples=20)
@given(
    count=st.integers(1, 40),
    chunk=st.integers(1, 12),
    nonzero=st.lists(st.integers(0, 39), max_size=6),
    dtype=st.sampled_from(["int32", "uint8", "int64"]),
)
def test_zarr_reads_arrays_of_one_chunk_and_of_several(tmp_path_factory, count, chunk, nonzero, dtype):
    store = tmp_path_factory.mktemp("store")
    (store / "packs").mkdir()
    values = np.zeros(count, dtype)
    for place in nonzero:
        values[place % count] = place + 1
    payloads = chunks_of(values, min(chunk, count))
    codecs = BYTES if dtype != "uint8" else [{"name": "bytes"}]
    with PackWriter(store, "encoded") as writer:
        entry = writer.add_array("0", count, chunk, dtype, codecs, {"id": "a"}, payloads)
        other = writer.add_bytes("other", [b"ab", bytearray(b"cde"), memoryview(b"f")])
        info = writer.finish()
    with zarr.storage.ZipStore(store / "packs" / info.name, mode="r") as zipped:
        group = zarr.open_group(zipped, mode="r")
        assert sorted(name for name, _ in group.arrays()) == ["0", "other"]
        assert group.attrs["ckstore"] == {"kind": "encoded"}
        assert group["0"].attrs["id"] == "a"
        np.testing.assert_array_equal(group["0"][:], values)
        assert group["0"].dtype == dtype
        assert group["other"][:].tobytes() == b"abcdef"

    reader = PackReader.of(store)
    shard = reader.pread(info.name, entry.offset, entry.length)
    if len(payloads) == 1:
        assert shard == (payloads[0] or b"")
        index = []
    else:
        index = read_shard_index(shard, len(payloads), entry.length)
    for payload, place in zip(payloads, index, strict=len(payloads) > 1):
        assert payload == (None if place is None else shard[place[0] : place[0] + place[1]])
    assert reader.pread(info.name, other.offset, other.length) == b"abcdef"
    if entry.length:
        assert reader.find_entry(info.name, "0/c/0") == entry
    assert reader.find_entry(info.name, "other/c/0") == other


def write(store: Path, content: bytes = b"content", kind: pack_module.PackKind = "encoded") -> tuple[str, PackEntry]:
    with PackWriter(store, kind) as writer:
        entry = writer.add_bytes("0", content)
        return writer.finish().name, entry


def test_a_pack_is_named_by_its_bytes(store):
    first, _ = write(store)
    again, _ = write(store)
    raw, _ = write(store, kind="raw")
    data = (store / "packs" / first).read_bytes()
    assert first == again == blake3(data).hexdigest(length=20) + ".zip"
    assert raw.endswith(".raw.zip")
    reader = PackReader.of(store)
    assert reader.digest(first) + ".zip" == first
    assert reader.size(first) == len(data)
    assert [info.name for info in reader.list_packs()] == sorted([first, raw])
    assert sorted(os.listdir(store / "packs")) == sorted([first, raw])


def test_an_array_costs_little(store):
    """Metadata and zip headers of an array that is named by a slot number stay below 400 bytes."""

    def size(arrays: int) -> int:
        codec = [{"name": "ckstore.huffman", "configuration": {"dtype": "int32", "groups": 1}}]
        with PackWriter(store, "encoded") as writer:
            for slot in range(arrays):
                identifier = blake3(bytes([slot])).hexdigest(length=20)
                writer.add_array(str(slot), 10**6 + slot, 2**18, "int32", codec, {"id": identifier}, [None] * 4)
            return writer.finish().bytes

    index = 16 * 4 + 4
    assert (size(90) - size(10)) / 80 - index < 460


def test_large_members_use_zip64(store, monkeypatch):
    monkeypatch.setattr(zip_records, "LIMIT", 1000)
    content = os.urandom(5000)
    name, entry = write(store, content)
    reader = PackReader.of(store)
    assert reader.pread(name, entry.offset, entry.length) == content
    assert reader.find_entry(name, "0/c/0") == entry
    with zipfile.ZipFile(store / "packs" / name) as archive:
        assert archive.testzip() is None


def test_an_unfinished_pack_leaves_nothing(store):
    with PackWriter(store, "encoded") as writer:
        writer.add_bytes("a", b"x")
        assert len(os.listdir(store / "packs")) == 1
    assert os.listdir(store / "packs") == []
    with pytest.raises(UsageError):
        writer.add_bytes("b", b"x")
    with pytest.raises(ZeroDivisionError), PackWriter(store, "encoded") as writer:
        raise ZeroDivisionError
    assert os.listdir(store / "packs") == []


@pytest.mark.parametrize("is_there", [False, True])
def test_a_failed_pack_leaves_an_equal_one_alone(store, monkeypatch, is_there):
    names = [write(store)[0]] if is_there else []

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durable, "sync_directory", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(store)
    assert os.listdir(store / "packs") == names


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "zarr.json", "small", "__x", "a", "ä"])
def test_names_that_would_break_the_group_are_refused(store, name):
    with PackWriter(store, "encoded") as writer:
        writer.add_bytes("a", b"x")
        with pytest.raises(UsageError):
            writer.add_bytes(name, b"x")


def test_empty_and_mismatched_arrays_are_refused(store):
    with PackWriter(store, "encoded") as writer:
        with pytest.raises(UsageError):
            writer.add_bytes("a", [])
        with pytest.raises(UsageError):
            writer.add_array("a", 5, 2, "uint8", [{"name": "bytes"}], None, [b"x"])
        with pytest.raises(UsageError):
            writer.add_array("a", 0, 2, "uint8", [{"name": "bytes"}], None, [])


def test_a_limit_on_files_is_one_sentence_and_leaves_nothing(store):
    """A child may write files of 1 MB only."""
    code = (
        "import resource, sys; from pathlib import Path; from ckstore.storage.pack import PackWriter\n"
        "from ckstore.errors import CkstoreError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    with PackWriter(Path(sys.argv[1]), 'encoded') as writer:\n"
        "        writer.add_bytes('a', bytes(int(sys.argv[2])))\n"
        "        writer.finish()\n"
        "except CkstoreError as error:\n"
        "    print(error)\n"
    )
    assert resource.RLIMIT_FSIZE >= 0
    # In the middle of a member; and in the end, when only the zip's directory no longer fits.
    for size in (5 << 20, (1 << 20) - 320):
        done = subprocess.run(
            [sys.executable, "-c", code, str(store), str(size)], capture_output=True, text=True, check=True
        )
        assert "`ulimit -f`" in done.stdout, done.stderr
        assert "; raise the limit" in done.stdout
        assert os.listdir(store / "packs") == []


def test_a_full_disk_names_the_needed_bytes(store, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_module.ZipStream, "add_stored", full)
    with pytest.raises(CkstoreError, match="2,097,152 more bytes are needed"), PackWriter(store, "raw") as writer:
        writer.add_bytes("a", bytes(2 << 20))
    assert os.listdir(store / "packs") == []


def test_short_missing_and_misnamed_packs(store):
    name, entry = write(store)
    path = store / "packs" / name
    reader = PackReader.of(store)
    for offset, length in [(0, path.stat().st_size + 1), (-1, 1), (0, -1), (2**70, 1), (0, 2**70)]:
        with pytest.raises(IntegrityError, match=name):
            reader.pread(name, offset, length)
    with pytest.raises(IntegrityError, match="not/c/0"):
        reader.find_entry(name, "not/c/0")
    absent = "0" * 40 + ".zip"
    for read in (reader.size, reader.digest, lambda pack: reader.find_entry(pack, "0/c/0")):
        with pytest.raises(IntegrityError, match=absent):
            read(absent)
        with pytest.raises(IntegrityError, match="not the name of a pack"):
            read("../catalog.sqlite")
    reader.forget(name)
    os.truncate(path, entry.offset + 2)
    with pytest.raises(IntegrityError, match=name):
        reader.pread(name, entry.offset, entry.length)
    with pytest.raises(IntegrityError, match=name):
        reader.find_entry(name, "0/c/0")


def test_a_truncation_while_open_is_found(store):
    name, _ = write(store, bytes(10_000))
    reader = PackReader.of(store)
    size = reader.size(name)
    os.truncate(store / "packs" / name, 100)
    with pytest.raises(IntegrityError, match=name):
        reader.pread(name, 0, size)


def test_open_files_are_bounded_and_shared_by_threads(store, monkeypatch):
    names = [write(store, bytes([number]) * 1000) for number in range(12)]
    for usual in ("_FEW", "_MANY"):
        monkeypatch.setattr(pack_reader, usual, 3)
    reader = PackReader(DirectoryStorage(store), store, FoundPlaces(store))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    wrong = []

    def read() -> None:
        for _ in range(30):
            for number, (name, entry) in enumerate(names):
                if reader.pread(name, entry.offset, entry.length) != bytes([number]) * 1000:
                    wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    if before:
        assert len(os.listdir("/proc/self/fd")) - before <= 3
    reader.close()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


def test_every_flip_in_a_shard_index_is_found(store):
    with PackWriter(store, "encoded") as writer:
        entry = writer.add_array("0", 4, 2, "uint8", [{"name": "bytes"}], None, [b"ab", None])
        name = writer.finish().name
    shard = PackReader.of(store).pread(name, entry.offset, entry.length)
    tail = shard[-36:]
    assert read_shard_index(tail, 2, len(shard)) == [(0, 2), None]
    for bit in range(8 * len(tail)):
        flipped = bytearray(tail)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            read_shard_index(bytes(flipped), 2, len(shard))
    with pytest.raises(IntegrityError):
        read_shard_index(tail[1:], 2, len(shard))
    with pytest.raises(IntegrityError):
        read_shard_index(tail, 2, 37)


def test_a_pack_that_cannot_be_begun(tmp_path):
    with pytest.raises(CkstoreError, match="No pack can be created"):
        PackWriter(tmp_path / "nowhere", "encoded")


def test_a_copied_array_is_the_same(tmp_path):
    (tmp_path / "packs").mkdir()
    with PackWriter(tmp_path, "encoded") as writer:
        writer.add_bytes("before", b"x" * 1000)
        first = writer.add_array("0", 5, 2, "int32", BYTES, {"id": "a"}, [b"\1" * 8, None, b"\2" * 8])
        source = writer.finish()
    reader = PackReader.of(tmp_path)
    metadata = reader.array_metadata(source.name)
    with PackWriter(tmp_path, "encoded") as writer:
        entry = writer.add_copy("0", metadata["0"], reader.pread(source.name, first.offset, first.length))
        with pytest.raises(UsageError, match="taken"):
            writer.add_copy("0", metadata["0"], b"")
        copy = writer.finish()
    same = reader.pread(source.name, first.offset, first.length)
    assert reader.pread(copy.name, entry.offset, entry.length) == same
    assert reader.array_metadata(copy.name)["0"] == metadata["0"]
    with zarr.storage.ZipStore(tmp_path / "packs" / copy.name, mode="r") as zipped:
        array = zarr.open_group(zipped, mode="r")["0"]
        assert array.attrs["id"] == "a"
        assert array[:].tolist() == [0x01010101, 0x01010101, 0, 0, 0x02020202]
    with pytest.raises(IntegrityError, match="is missing"):
        reader.array_metadata("0" * 40 + ".zip")


def test_small_arrays_share_a_member(store, monkeypatch):
    """Also if they are copied from a pack in which they were Zarr arrays."""
    monkeypatch.setattr(pack_module, "_SMALL", 100)
    parts = [b"first", b"", bytes(100), b"last"]
    codec = [{"name": "bytes"}]
    with PackWriter(store, "encoded") as writer:
        added = [
            writer.add_array(str(n), 100, 100, "uint8", codec, None, [part or None]) for n, part in enumerate(parts)
        ]
        copied = writer.add_copy("copy", None, b"copied")
        place = writer.gather()
        writer.add_manifest({}, {})
        info = writer.finish()
    reader = PackReader.of(store)
    for entry, data in zip([*added, copied], [*parts, b"copied"], strict=True):
        assert reader.pread(info.name, place(entry.offset), entry.length) == data
    assert reader.array_metadata(info.name).keys() == {"2"}
    with zipfile.ZipFile(store / "packs" / info.name) as archive:
        assert archive.namelist() == ["zarr.json", "2/c/0", "small", "manifest"]
        assert archive.read("small") == b"firstlastcopied"


def test_small_arrays_are_not_forgotten(store):
    with PackWriter(store, "encoded") as writer:
        writer.add_copy("a", None, b"x")
        with pytest.raises(UsageError, match="gather"):
            writer.finish()


def test_a_pack_without_arrays_is_no_zarr_hierarchy(store, monkeypatch):
    monkeypatch.setattr(pack_module, "_SMALL", 100)
    with PackWriter(store, "encoded") as writer:
        writer.add_bytes("a", b"x")
        writer.gather()
        entry = writer.add_manifest({}, {})
        info = writer.finish()
    reader = PackReader.of(store)
    assert reader.array_metadata(info.name) == {}
    assert reader.find_entry(info.name, "manifest") == entry
    assert info.bytes - entry.length < 222


@pytest.mark.parametrize("exponents", ["ab" * (1 << 20), [-100] * (1 << 20)], ids=["letters", "numbers"])
def test_metadata_with_exponents_of_many_rows(store: Path, exponents: str | list[int]) -> None:
    steps = {"name": "ckstore.quantized_residual", "configuration": {"step": 0, "rows": exponents, "width": 2}}
    with PackWriter(store, "encoded") as writer:
        writer.add_array("0", 4, 4, "float32", BYTES, None, [bytes(16)], filters=[steps])
        name = writer.finish().name
    assert PackReader.of(store).array_metadata(name)["0"]["codecs"][0] == steps


def test_the_last_member_is_found_without_the_directory(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of arrays; members before it, and zips with other ends, are found as usual."""
    with PackWriter(store, "encoded") as writer:
        entries = {f"a{number}": writer.add_bytes(f"a{number}", bytes([number]) * 50) for number in range(100)}
        entries["PK"] = writer.add_bytes("PK", b"PK\1\2" * 40)
        info = writer.finish()
    reader = PackReader.of(store)
    assert reader.find_entry(info.name, "a7/c/0") == entries["a7"]

    def refused(*_: object) -> None:
        raise AssertionError("the directory was read")

    monkeypatch.setattr("zipfile.ZipFile", refused)
    assert reader.find_entry(info.name, "PK/c/0") == entries["PK"]
    with pytest.raises(AssertionError):
        reader.find_entry(info.name, "a7/c/0")
