"""The log: order, checksums, later formats."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from ckstore.errors import CkstoreError, DiskFullError, FormatVersionError, IntegrityError
from ckstore.storage import change_log, durable, log_files, root, rows, schema
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.remote.calls import check_calls
from ckstore.storage.rows import VersionRow, plain_row

UNTAG = {"change": "untag", "tag": "a"}


def append(store, *records):
    """Append records, each of a transaction of its own."""
    names = []
    for record in records:
        known, _ = change_log.read_all(DirectoryStorage(store))
        follows = log_files.name_of(known[-1]) if known else ""
        names.append(change_log.append(DirectoryStorage(store), record, follows))
    return names


def path_of(store, name):
    return store / root.LOG / f"{name}.json"


def records_of(store):
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert problems == []
    return records


def assert_refused(store, path):
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert records == []
    assert path.name in problems[0]


def test_records_are_checked_by_types_that_were_made_before(monkeypatch):
    """A type that is made for one check is never freed."""
    log_files.check_record(UNTAG)
    monkeypatch.setattr(schema.msgspec.json, "Decoder", None)
    log_files.check_record(UNTAG)


def test_records_come_back_in_order(store):
    records = [{"change": "tag", "tag": "ä", "version": number, "extra": [None, 1.5]} for number in range(1, 13)]
    names = append(store, *records)
    assert [name.partition("-")[0] for name in names] == [f"{number:012d}" for number in range(1, 13)]
    read = records_of(store)
    assert [record["sequence"] for record in read] == list(range(1, 13))
    assert [{name: record[name] for name in records[0]} for record in read] == records
    assert all(record["format"] == 1 for record in read)
    (store / root.LOG / ".tmp-1-00").write_bytes(b"left over")
    assert records_of(store) == read
    assert append(store, UNTAG)[0].startswith("000000000013-")


def test_intact_records_of_a_damaged_log_are_read(store):
    names = append(store, *({"change": "tag", "tag": "a", "version": number} for number in range(1, 6)))
    paths = [path_of(store, name) for name in names]
    assert len(records_of(store)) == 5
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    paths[3].unlink()
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert [record["version"] for record in records] == [1, 3, 5]
    assert [paths[1].name in problems[0], "record 4 is missing" in problems[1]] == [True, True]
    assert append(store, UNTAG)[0].startswith("000000000006-")


def test_a_missing_log_is_made(store):
    (store / root.LOG).rmdir()
    assert change_log.read_all(DirectoryStorage(store)) == ([], [])
    append(store, UNTAG)
    assert len(records_of(store)) == 1


def test_flips_and_truncations_are_found(store):
    path = path_of(store, *append(store, {**UNTAG, "note": "\u00e4/"}))
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
    path = path_of(store, *append(store, UNTAG))
    assert_refused(store, path.rename(path.with_name("000000000002" + path.name[12:])))


def test_a_record_of_a_transaction_that_failed_does_not_count(store):
    """The next record names the one that it follows; a damaged disk may keep the failed one from being deleted."""
    [first] = append(store, UNTAG)
    storage = DirectoryStorage(store)
    killed = change_log.append(storage, {"change": "forget", "versions": [7], "uids": []}, first)
    assert [record["change"] for record in records_of(store)] == ["untag", "forget"]  # It may have been committed.
    other = change_log.append(storage, {"change": "tag", "tag": "a", "version": 1}, first)
    more = change_log.append(storage, {"change": "tag", "tag": "b", "version": 1}, first, 1)
    assert [record["change"] for record in records_of(store)] == ["untag", "tag", "tag"]
    [last] = append(store, UNTAG)
    assert [log_files.name_of(record) for record in records_of(store)] == [first, other, more, last]
    tagged = change_log.append(storage, {"change": "tag", "tag": "c", "version": 1}, last)  # Nothing is lost by it.
    after = change_log.append(storage, UNTAG, last)
    assert [log_files.name_of(record) for record in records_of(store)] == [first, other, more, last, tagged, after]
    change_log.withdraw(storage, [killed, tagged])
    assert [log_files.name_of(record) for record in records_of(store)] == [first, other, more, last, after]


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("way", ["missing", "damaged"])
def test_a_lost_part_of_a_change_is_named_and_the_others_count(store, lost, way):
    storage = DirectoryStorage(store)
    [first] = append(store, UNTAG)
    forgets = [{"change": "forget", "versions": [number], "uids": []} for number in range(1, 5)]
    names = [change_log.append(storage, record, first, part) for part, record in enumerate(forgets)]
    append(store, UNTAG)
    path = path_of(store, names[lost])
    if way == "missing":
        path.unlink()
    else:
        path.write_bytes(b"{}")
    records, [problem] = change_log.read_all(storage)
    left = [number for number in range(1, 5) if number != lost + 1]
    assert [record["versions"] for record in records[1:-1]] == [[number] for number in left]
    assert f"record {lost + 2} is missing" in problem if way == "missing" else path.name in problem


def test_a_change_that_was_not_committed_neither_moves_a_tag_nor_sets_metrics(store):
    storage = DirectoryStorage(store)
    [first] = append(store, {"change": "tag", "tag": "a", "version": 1})
    change_log.append(storage, {"change": "tag", "tag": "a", "version": 2}, first)
    change_log.append(storage, {"change": "metrics", "version": 1, "metrics": {}}, first)
    healed = {"change": "forget", "versions": [1], "uids": []}, {"change": "tag", "tag": "a", "version": 3}
    for part, record in enumerate(healed):  # A version that heals another takes its tags, if `recover` finds it.
        change_log.append(storage, record, first, part)
    change_log.append(storage, UNTAG, first)
    assert [record.get("version") for record in records_of(store)] == [1, 3, None]


def test_a_catalog_that_lacks_committed_records_writes_none(store):
    names = append(store, UNTAG, UNTAG, UNTAG)
    with pytest.raises(IntegrityError, match="run `ckstore recover`"):
        change_log.append(DirectoryStorage(store), UNTAG, names[0])
    assert len(records_of(store)) == 3


@pytest.mark.parametrize(
    "later", [{"format": log_files.FORMAT + 1, "other": "field"}, {"format": 1, "change": "other"}]
)
def test_a_later_format_is_distinguished_from_damage(store, later):
    record = {**later, "sequence": 1, "follows": "", "created": durable.timestamp()}
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    digest = blake3(canonical).hexdigest(length=8)
    content = json.dumps({**record, "digest": digest}, sort_keys=True, separators=(",", ":"))
    (store / root.LOG / f"000000000001-{digest}.json").write_text(content)
    for read in (change_log.read_all, lambda storage: change_log.append(storage, UNTAG)):
        with pytest.raises(FormatVersionError, match="install a later"):
            read(DirectoryStorage(store))


def test_a_record_that_could_not_be_read_back_is_not_written(store, monkeypatch):
    names = append(store, UNTAG, UNTAG)
    monkeypatch.setattr(log_files, "LARGEST", path_of(store, names[1]).stat().st_size)
    append(store, UNTAG)
    with pytest.raises(CkstoreError, match="make it for fewer versions at once"):
        append(store, {"change": "forget", "versions": [1], "uids": ["0" * 40]})
    assert len(records_of(store)) == 3


@pytest.mark.parametrize("content", [b"[]", b"7", b"null", b"{}", b"[" * 100_000, b'{"digest":7}', b'{"digest":null}'])
def test_crafted_records_are_refused(store, content):
    path = store / root.LOG / f"000000000001-{'0' * 16}.json"
    path.write_bytes(content)
    assert_refused(store, path)


def segments(store):
    return sorted(path.name for path in (store / root.LOG).glob("*.log"))


def filled(store, monkeypatch, count):
    """Append records, with segments of four numbers; return their names."""
    monkeypatch.setattr(change_log, "SEGMENT", 4)
    return append(store, *({"change": "tag", "tag": "a", "version": number} for number in range(1, count + 1)))


def test_records_are_joined(store, monkeypatch):
    names = filled(store, monkeypatch, 10)
    assert segments(store) == ["000000000003.log", "000000000007.log"]
    assert sorted(path.stem for path in (store / root.LOG).glob("*.json")) == names[7:]
    assert [log_files.name_of(record) for record in records_of(store)] == names


def test_an_uncommitted_record_is_not_joined_before_its_successor(store, monkeypatch):
    monkeypatch.setattr(change_log, "SEGMENT", 4)
    storage = DirectoryStorage(store)
    first = change_log.append(storage, UNTAG)
    left = change_log.append(storage, {**UNTAG, "tag": "left"}, first)
    later = change_log.append(storage, UNTAG, first)
    last = change_log.append(storage, UNTAG, later)
    assert segments(store) == ["000000000003.log"]
    change_log.append(storage, UNTAG, last)
    assert left not in [log_files.name_of(record) for record in records_of(store)]


def test_large_and_damaged_records_are_not_joined(store, monkeypatch):
    names = append(store, {**UNTAG, "note": "x" * (1 << 16)}, UNTAG, UNTAG)
    path_of(store, names[1]).write_bytes(b"{}")
    filled(store, monkeypatch, 1)
    assert segments(store) == ["000000000003.log"]
    assert path_of(store, names[0]).exists()
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert [record["sequence"] for record in records] == [1, 3, 4]
    assert names[1] in problems[0]


@pytest.mark.parametrize("deleted", [0, 1, 3])
def test_a_process_may_die_while_it_joins_records(store, monkeypatch, deleted):
    names = filled(store, monkeypatch, 3)
    storage = DirectoryStorage(store)

    def die(step):
        if step == "log-joined":
            log_files.delete(storage, names[:deleted])
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(durable, "checkpoint", die)
        with pytest.raises(KeyboardInterrupt):
            change_log.append(storage, UNTAG, names[-1])
    assert [log_files.name_of(record) for record in records_of(store)] == names
    names += append(store, UNTAG)
    assert [log_files.name_of(record) for record in records_of(store)] == names
    assert len(list((store / root.LOG).glob("*.json"))) == 1


def test_a_full_disk_leaves_records_apart(store, monkeypatch):
    names = filled(store, monkeypatch, 3)

    def fail(self, name, data):
        raise DiskFullError("full")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStorage, "put", fail)
        names += append(store, UNTAG)
    assert segments(store) == []
    assert [log_files.name_of(record) for record in records_of(store)] == names


def test_a_catalog_before_a_segment_is_refused(store, monkeypatch):
    names = filled(store, monkeypatch, 4)
    for follows in ("", names[0], names[1]):
        with pytest.raises(IntegrityError, match="lacks changes"):
            change_log.append(DirectoryStorage(store), UNTAG, follows)
    change_log.append(DirectoryStorage(store), UNTAG, names[2])


def test_damage_to_a_segment_is_found(store, monkeypatch):
    names = filled(store, monkeypatch, 5)
    path = store / root.LOG / segments(store)[0]
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        records, problems = change_log.read_all(DirectoryStorage(store))
        assert problems
        assert {log_files.name_of(record) for record in records} < set(names)
    path.write_bytes(data[:100])
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert len(records) == 2
    assert names[0] in problems[0]
    path.unlink()
    records, problems = change_log.read_all(DirectoryStorage(store))
    assert [log_files.name_of(record) for record in records] == names[3:]
    assert problems == [f"Log record 3 is missing; {change_log.LOSS}."]


def test_a_reader_meets_records_that_are_being_joined(store, monkeypatch):
    names = filled(store, monkeypatch, 3)
    read = DirectoryStorage.read
    joined = []

    def reading(self, name):
        if not joined:
            joined.append(name)
            log_files.join(DirectoryStorage(store), names[-1])
        return read(self, name)

    monkeypatch.setattr(DirectoryStorage, "read", reading)
    assert [log_files.name_of(record) for record in records_of(store)] == names


def test_an_append_lists_few_files_whatever_the_number_of_records(store, monkeypatch):
    filled(store, monkeypatch, 200)
    assert len(segments(store)) == 50
    assert len(list((store / root.LOG).glob("*.json"))) <= 4


def test_a_record_whose_directory_cannot_be_synced_is_not_left(store, monkeypatch):
    def fail(directory):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(durable, "sync_directory", fail)
    with pytest.raises(OSError, match="broken"):
        change_log.append(DirectoryStorage(store), UNTAG)
    assert list((store / root.LOG).iterdir()) == []


def test_nothing_follows_the_largest_number(store):
    storage = DirectoryStorage(store)
    record = {**UNTAG, "format": 1, "sequence": 10**12 - 2, "follows": "", "created": durable.timestamp()}
    last = change_log.append(storage, UNTAG, log_files.write(storage, record))
    with pytest.raises(IntegrityError, match="remove it"):
        change_log.append(storage, UNTAG, last)


def test_marks_follow_the_records():
    records = [
        {"change": "supersede", "superseded": ["a", "b"], "present": ["c"]},
        {"change": "forget", "uids": ["b", "e"]},
    ]
    assert change_log.superseded(records, ["c", "d", "e"]) == {"a", "d"}


def test_changes_that_can_be_undone(filled):
    rows = [plain_row(filled.version(number)) for number in (1, 2)]
    records = [
        {"change": "forget", "sequence": 1, "versions": [1], "rows": rows[:1]},
        {"change": "thin", "sequence": 2, "version": 2, "before": rows[1]},
        {"change": "thin", "sequence": 3, "version": 1},
        {"change": "forget", "sequence": 4, "versions": [9]},
    ]
    for later, left in (
        ({"change": "drop", "version": 1}, [1, 2]),
        ({"change": "drop", "version": 2}, [1]),
        ({"change": "forget", "versions": [2]}, [1]),
        ({"change": "undo", "undone": 1}, [2]),
        ({"change": "gc"}, [1, 2]),
        ({"change": "gc", "expired": [2]}, [1]),
    ):
        assert [record["sequence"] for record in change_log.undoable([*records, later])] == left
    renamed = {"change": "rename", "run": "other", "uids": [filled.version(1).uid]}
    first, second = change_log.undoable([*records, renamed])
    assert [row.run for row in (*first["rows"], *second["rows"])] == ["other", "gpt"]


def test_forgotten_versions_have_ids_and_numbers():
    records = [
        {"change": "forget", "uids": ["a", "b"], "versions": [1, 2]},
        {"change": "forget", "uids": [], "versions": [3]},
        {"change": "undo", "uids": ["a"], "versions": [1]},
    ]
    assert change_log.forgotten(records) == {("b", 2), ("", 3)}


def test_facts_that_only_the_log_confirms():
    records = [
        {"change": "tag", "tag": "a", "version": 1},
        {"change": "policy", "run": "a", "policy": "p"},
        {"change": "policy", "run": "x", "policy": "q"},
        {"change": "rename", "from": "a", "run": "b"},
        {"change": "gc", "created": "2", "versions": [("u", 7, None, "1")]},
        {"change": "supersede", "superseded": ["u"], "present": []},
        {"change": "supersede", "superseded": ["v"], "present": []},
    ]
    records = [{**record, "sequence": number, "digest": ""} for number, record in enumerate(records)]
    logged = log_files.name_of(records[5])
    facts = ({"u": True, "v": False}, {"a": 1}, {"a": "p", "b": "p", "x": "q"}, "2", lambda number: number == 7)
    assert list(change_log.contradictions(records, logged, *facts)) == []
    assert len(list(change_log.contradictions(records[:4], logged, {}, {}, {}, "2", bool))) == 1
    others = [
        ({"u": False}, "Version u is not superseded"),
        ({"a": 2}, "Tag a points at version 2"),
        ({"b": "q"}, "The policy of b is q"),
        ("1", "The catalog has a garbage collection at 1"),
        (lambda number: number < 7, "The catalog does not know version 7"),
    ]
    for at, (fact, said) in enumerate(others):
        [problem] = change_log.contradictions(records, logged, *facts[:at], fact, *facts[at + 1 :])
        assert problem.startswith(said)


def test_the_last_record_of_a_catalog_is_missed_once(store):
    [first] = append(store, UNTAG)
    last = f"{2:012d}-{'0' * 16}"
    [problem] = change_log.lost_last(records_of(store), ["another problem"], last)
    assert "record 2 is missing" in problem
    for known in (problem, f"Log record {last} is damaged."):
        assert list(change_log.lost_last(records_of(store), [known], last)) == []
    assert list(change_log.lost_last(records_of(store), [], first)) == []


PLAIN = VersionRow(
    3, "ab" * 20, "r", 1, None, "2026-01-01T00:00:00.000000Z", f"{'0' * 40}.zip", 9, 9, 8, 7, 6, 1, 1, 0, 1.0,
    True, "exact",
)  # fmt: skip
MORE = replace(PLAIN, number=4, uid="cd" * 20, superseded=True, dropped=("w/*",), metrics={"loss": 0.5}, source="a.pt")


def records_with(*found: list[Any]) -> list[dict[str, Any]]:
    """Return a record of forgotten versions with some rows, and one of a thinning with each."""
    numbers, uids = [3, 4][: len(found)], ["ab" * 20, "cd" * 20][: len(found)]
    thin = {"change": "thin", "packs": [], "version": 3, "began": PLAIN.created, "sequence": 1}
    return [
        {"change": "forget", "versions": numbers, "uids": uids, "rows": list(found), "children": [[] for _ in found],
         "sequence": 1},
        *({**thin, "before": row} for row in found),
    ]  # fmt: skip


def check_all(*found: list[Any]) -> Iterator[None]:
    """Check records and calls with these rows."""
    for record in records_with(*found):
        yield log_files.check_record(record)
    for row in found:
        yield check_calls([["commit_version", {"row": row}]])


@pytest.mark.parametrize("versions", [[PLAIN], [MORE], [PLAIN, MORE]])
def test_rows_in_records_may_lack_their_last_columns(versions: list[VersionRow]) -> None:
    """As those of an earlier ckstore would: these have their default."""
    plain = [json.loads(json.dumps(rows.plain_row(row))) for row in versions]
    shorter = [row[:18] if row[0] == PLAIN.number else row for row in plain]
    for found in (plain, shorter):
        assert all(said is None for said in check_all(*found))
        whole, *single = [change_log.undoable([record])[0]["rows"] for record in records_with(*found)]
        assert whole == [row for [row] in single] == versions


def test_rows_with_more_columns_are_of_a_later_ckstore() -> None:
    values = [*rows.plain_row(MORE), None]
    for check in (*records_with(values), *records_with(rows.plain_row(PLAIN), values)[:1]):
        with pytest.raises(FormatVersionError, match=r"unknown columns; install a later ckstore"):
            log_files.check_record(check)
    for name in ("commit_version", "replace_version", "restore_version"):
        with pytest.raises(FormatVersionError, match=r"unknown columns; install a later ckstore"):
            check_calls([[name, {"row": values}]])


@pytest.mark.parametrize("values", [[], rows.plain_row(PLAIN)[:17], [*rows.plain_row(PLAIN)[:22], 7], {"number": 3}])
def test_rows_without_a_value_are_damaged(values: Any) -> None:
    for check in (*records_with(values), [["commit_version", {"row": values}]]):
        with pytest.raises(ValueError) as raised:
            (check_calls if isinstance(check, list) else log_files.check_record)(check)
        assert not isinstance(raised.value, FormatVersionError)
