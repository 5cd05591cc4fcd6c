"""The log: order, checksums, later formats."""

from __future__ import annotations

import json

import pytest
from blake3 import blake3

from ckstore.errors import FormatVersionError
from ckstore.storage import change_log, durable, root
from ckstore.storage.directory_storage import DirectoryStorage

UNTAG = {"change": "untag", "tag": "a"}


def records_of(store):
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert problems == []
    return records


def assert_refused(store, path):
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert records == []
    assert path.name in problems[0]


def test_records_come_back_in_order(store):
    records = [{"change": "tag", "tag": "ä", "version": number, "extra": [None, 1.5]} for number in range(1, 13)]
    names = [change_log.append(DirectoryStorage(store), record) for record in records]
    assert [name.removeprefix(change_log.PREFIX).partition("-")[0] for name in names] == [
        f"{number:012d}" for number in range(1, 13)
    ]
    read = records_of(store)
    assert [record["sequence"] for record in read] == list(range(1, 13))
    assert [{name: record[name] for name in records[0]} for record in read] == records
    assert all(record["format"] == 1 for record in read)
    (store / root.LOG / ".tmp-1-00").write_bytes(b"left over")
    assert records_of(store) == read
    assert change_log.append(DirectoryStorage(store), UNTAG).startswith("log/000000000013-")


def test_intact_records_of_a_damaged_log_are_read(store):
    paths = [
        store / change_log.append(DirectoryStorage(store), {"change": "tag", "tag": "a", "version": number})
        for number in range(1, 6)
    ]
    assert len(records_of(store)) == 5
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[3].unlink()
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert [record["version"] for record in records] == [1, 3, 5]
    assert [paths[1].name in problems[0], "record 4 is missing" in problems[1]] == [True, True]
    assert change_log.append(DirectoryStorage(store), UNTAG).startswith("log/000000000006-")


def test_a_missing_log_is_made(store):
    (store / root.LOG).rmdir()
    assert change_log.read_all(DirectoryStorage(store)) == ([], [])
    change_log.append(DirectoryStorage(store), UNTAG)
    assert len(records_of(store)) == 1


def test_flips_and_truncations_are_found(store):
    path = store / change_log.append(DirectoryStorage(store), {**UNTAG, "note": "\u00e4/"})
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        assert_refused(store, path)
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert_refused(store, path)


def test_a_renamed_record_is_found(store):
    path = store / change_log.append(DirectoryStorage(store), UNTAG)
    assert_refused(store, path.rename(path.with_name("000000000002" + path.name[12:])))


def test_a_later_format_is_distinguished_from_damage(store):
    record = {"format": change_log.FORMAT + 1, "sequence": 1, "created": durable.timestamp(), "what": "ever"}
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    digest = blake3(canonical).hexdigest(length=20)
    content = json.dumps({**record, "digest": digest}, sort_keys=True, separators=(",", ":"))
    (store / root.LOG / f"000000000001-{digest[:16]}.json").write_text(content)
    with pytest.raises(FormatVersionError):
        change_log.read_all(DirectoryStorage(store))


@pytest.mark.parametrize("content", [b"[]", b"7", b"null", b"{}", b"[" * 100_000, b'{"digest":7}', b'{"digest":null}'])
def test_crafted_records_are_refused(store, content):
    path = store / root.LOG / f"000000000001-{'0' * 16}.json"
    path.write_bytes(content)
    assert_refused(store, path)
