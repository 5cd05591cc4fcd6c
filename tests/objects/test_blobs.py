"""Skeletons against their parents': round trips, small where little changed, and damage is found."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import IntegrityError
from ckstore.objects.blobs import (
    _CHANGES,
    _changed,
    _changes,
    _digest,
    compress_against,
    compress_quickly,
    expand_against,
)
from ckstore.storage import deflate, zstd


def skeleton_of(path: Path) -> bytes:
    """Return a torch zip without its storages, CRC fields zeroed."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        members, directory = archive.infolist(), archive.start_dir
    cuts = []
    for member in members:
        name, extra = struct.unpack_from("<HH", data, member.header_offset + 26)
        start = member.header_offset + 30 + name + extra
        data[member.header_offset + 14 : member.header_offset + 18] = bytes(4)
        end = start + member.file_size
        if data[end : end + 4] == b"PK\x07\x08":
            data[end + 4 : end + 8] = bytes(4)
        data[directory + 16 : directory + 20] = bytes(4)
        directory += 46 + sum(struct.unpack_from("<HHH", data, directory + 28))
        if member.filename.rpartition("/")[2].isdigit():
            cuts.append((start, end))
    for start, end in sorted(cuts, reverse=True):
        del data[start:end]
    return bytes(data)


@pytest.fixture(scope="module")
def skeletons(tmp_path_factory) -> dict[str, bytes]:
    """Skeletons of checkpoints of one small model, by file name."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    result = {}
    for name, step in [("last", 100), ("final", 140), ("step_180", 180), ("step_1000", 1000)]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            schedule.step()
        path = tmp_path_factory.mktemp("checkpoints") / f"{name}.pt"
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**states, "step": step, "loss": 1 / step}, path)
        result[name] = skeleton_of(path)
    return result


@pytest.mark.parametrize(
    ("reference", "name", "limit"),
    [("last", "last", 30), ("last", "final", 1350), ("final", "step_180", 1350), ("step_180", "step_1000", 1350)],
)
def test_the_next_skeleton_is_small(skeletons, reference, name, limit):
    data = skeletons[name]
    blob = compress_against(data, skeletons[reference])
    assert expand_against(blob, skeletons[reference]) == data
    assert len(data) > 20_000
    assert len(blob) < limit


def test_changes_of_every_kind_cost_little():
    source = random.Random(1)
    reference = source.randbytes(200_000)
    changed = bytearray(reference)
    for place in range(0, 200_000, 10_007):
        changed[place] ^= 255
    moved = changed[150_000:] + changed[:150_000]
    inserted = moved[:50_000] + b"a few inserted bytes" + moved[50_000:90_000] + moved[90_100:]
    blob = compress_against(bytes(inserted), reference)
    assert expand_against(blob, reference) == inserted
    assert len(blob) < 400


edits = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200), st.binary(max_size=60)), max_size=6)


@given(st.binary(max_size=40).flatmap(lambda block: st.just(block * 60)), edits)
def test_round_trip(reference, changes):
    data = reference
    for start, removed, added in changes:
        data = data[:start] + added + data[start + removed :]
    for base in (reference, None, b"", data, b"unrelated"):
        assert expand_against(compress_against(data, base), base) == data


def test_strings_with_nothing_in_common_stay_their_size():
    source = random.Random(2)
    data, reference = source.randbytes(100_000), source.randbytes(100_000)
    blob = compress_against(data, reference)
    assert expand_against(blob, reference) == data
    assert len(blob) < len(data) + 40


@pytest.mark.parametrize("with_reference", [True, False])
def test_every_flip_and_every_truncation_is_found(with_reference):
    text = b"".join(b"tensor %d at %d;" % (number, number * 64) for number in range(40))
    reference = text if with_reference else None
    blob = compress_against(text.replace(b"tensor 1", b"weight 1"), reference)
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            expand_against(bytes(flipped), reference)
    for length in range(len(blob)):
        with pytest.raises(IntegrityError):
            expand_against(blob[:length], reference)


def test_another_reference_is_found():
    reference = random.Random(3).randbytes(5000)
    blob = compress_against(reference[:4000] + b"x", reference)
    for other in (None, b"", reference[::-1], reference[:100]):
        with pytest.raises(IntegrityError):
            expand_against(blob, other)


@pytest.mark.parametrize("data", [b"", b"a", bytes(1000), bytes(1 << 22), random.Random(4).randbytes(5000)])
def test_blobs_of_one_writing_come_back(data):
    assert expand_against(compress_quickly(data), None) == data
    assert expand_against(compress_against(data, None), None, len(data)) == data
    with pytest.raises(IntegrityError, match="out of bounds"):
        expand_against(compress_against(data, None), None, len(data) + 1)


def crafted(method: int, payload: bytes, result: bytes) -> bytes:
    rest = bytes([method]) + payload
    return _digest(rest, result) + rest


@pytest.mark.parametrize(("method", "reference"), [(2, None), (2, b""), (3, None), (3, b""), (4, b"a"), (255, b"a")])
def test_crafted_methods_are_refused(method, reference):
    with pytest.raises(IntegrityError):
        expand_against(crafted(method, zstd.compress(b"abc", 3), b"abc"), reference)


def test_a_blob_expands_to_the_limit_and_its_reference():
    """Zeros take few bytes: a crafted blob must not become gigabytes, and ours of as many are stored otherwise."""
    reference = bytes(1 << 20)
    for megabytes, method, whole in ((1, 1, True), (3, 1, False), (2, 2, True), (4, 2, False)):
        size = megabytes << 20
        blob = crafted(method, zstd.compress(bytes(size), 19, reference if method == 2 else b""), bytes(size))
        assert len(blob) < 800
        if whole:
            assert expand_against(blob, reference) == bytes(size)
        else:
            with pytest.raises(IntegrityError, match="out of bounds"):
                expand_against(blob, reference)
        assert expand_against(compress_against(bytes(size), reference), reference) == bytes(size)


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.2]))
def test_changed_bytes_come_back(size, seed, share):
    source = random.Random(seed)
    reference = source.randbytes(size)
    data = bytes(byte ^ source.randrange(256) if source.random() < share else byte for byte in reference)
    changes = _changes(data, reference)
    if changes is None:
        assert sum(a != b for a, b in zip(data, reference, strict=True)) > size // 8
    else:
        assert len(changes) <= 2 * (size // 8 + size // 255 + 1)
        assert _changed(changes, reference) == data


@pytest.mark.parametrize("place", [0, 1, 254, 255, 256, 509, 510, 511, 765, 9999])
def test_one_changed_byte_anywhere_takes_few_bytes(place):
    reference = random.Random(6).randbytes(10_000)
    data = reference[:place] + bytes([reference[place] ^ 1]) + reference[place + 1 :]
    blob = compress_against(data, reference)
    assert blob[8] == _CHANGES
    assert len(blob) < 25
    assert expand_against(blob, reference, len(data)) == data


def test_strings_that_differ_in_names_of_one_length_are_compared_at_once(skeletons, monkeypatch):
    monkeypatch.delattr(zstd, "compress")
    data = skeletons["last"]
    renamed = data.replace(b"last/", b"next/")
    blob = compress_against(renamed, data)
    assert len(blob) < 400
    assert expand_against(blob, data) == renamed


def test_comparing_other_strings_takes_little_memory():
    data, reference = (random.Random(seed).randbytes(1 << 20) for seed in (1, 2))
    tracemalloc.start()
    try:
        assert _changes(data, reference) is None
        assert tracemalloc.get_traced_memory()[1] < 2.5 * (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        b"a",
        bytes([100, 1]),
        bytes([9, 0, 1, 2]),
        bytes([99, 1, 1, 1]),
        bytes(200),
        bytes([255]) * 14 + bytes(14),
        bytes(2 * (100 // 8 + 2)),
    ],
)
def test_crafted_changes_are_refused(changes):
    with pytest.raises(IntegrityError, match="A skeleton is damaged"):
        expand_against(crafted(3, deflate.compress(changes), bytes(100)), bytes(100))


def test_changes_take_little_memory_and_time():
    """A few KB of changes of one byte in eight, of a string of a megabyte."""
    reference = bytes(1 << 20)
    entries = len(reference) // 8
    blob = crafted(3, deflate.compress(b"\0" + bytes([8]) * (entries - 1) + b"\1" * entries), b"")
    assert len(blob) < 2000
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="its checksum"):
            expand_against(blob, reference)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(reference)
    finally:
        tracemalloc.stop()
