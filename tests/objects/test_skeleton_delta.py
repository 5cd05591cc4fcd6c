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
from ckstore.objects import skeleton_delta
from ckstore.objects.skeleton_delta import _digest, compress_against, expand_against
from ckstore.storage import deflate, zstd
from ckstore.varint import varint


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
    [("last", "last", 30), ("last", "final", 900), ("final", "step_180", 2000), ("step_180", "step_1000", 2000)],
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


def test_strings_that_differ_in_short_places_are_compared_at_once(skeletons, monkeypatch):
    data = skeletons["last"]
    renamed = data.replace(b"last/", b"next/")
    by_search = list(skeleton_delta._matches(renamed, data))
    assert list(skeleton_delta._unchanged(renamed, data)) == by_search
    assert len(by_search) > 100
    monkeypatch.delattr(skeleton_delta, "_matches")
    blob = compress_against(renamed, data)
    assert expand_against(blob, data) == renamed


def test_bytes_that_move_within_a_string_of_one_length_are_found():
    reference = random.Random(5).randbytes(20_000)
    data = b"begin" + reference[:9000] + reference[9005:]
    assert skeleton_delta._unchanged(data, reference) is None
    assert len(compress_against(data, reference)) < 100


def test_comparing_other_strings_takes_little_memory():
    data, reference = (random.Random(seed).randbytes(1 << 20) for seed in (1, 2))
    tracemalloc.start()
    try:
        assert skeleton_delta._unchanged(data, reference) is None
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


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


def test_short_copies_are_refused() -> None:
    """A crafted code of zeros has 128 times the bytes of its blob: as many empty copies would take seconds."""

    def blob(length: int) -> bytes:
        code = varint(1) * 3 + varint(0) * 2 + varint(length)
        rest = b"\x02" + varint(length) + varint(len(code)) + deflate.compress(code)
        return _digest(rest, bytes(length)) + rest

    assert expand_against(blob(12), bytes(20)) == bytes(12)
    with pytest.raises(IntegrityError, match="a short copy"):
        expand_against(blob(11), bytes(20))


def test_many_copies_take_the_memory_of_their_code() -> None:
    """Lists of the numbers of a crafted code would take eight times its bytes."""
    count = 50_000
    code = varint(count) + varint(count) * 2 + bytes(count) + b"\0" + b"\x17" * (count - 1) + b"\x0c" * count
    rest = b"\x03" + varint(12 * count) + varint(len(code)) + zstd.compress(code, 3)
    tracemalloc.start()
    assert expand_against(_digest(rest, bytes(12 * count)) + rest, bytes(12)) == bytes(12 * count)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * 12 * count


def test_a_common_beginning_may_be_short() -> None:
    reference = b"alike" + bytes(range(200)) * 3
    data = b"alikX" + bytes(range(199, 0, -1)) + bytes(range(200)) * 3
    blob = compress_against(data, reference)
    assert expand_against(blob, reference) == data
