"""The files of the log: a checksummed one for each new record, and segments, in which older ones are joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from blake3 import blake3
from msgspec import Meta

from ckstore.errors import AccessError, CkstoreError, FormatVersionError, IntegrityError
from ckstore.storage import durable, root
from ckstore.storage.interface import Listed, Storage
from ckstore.storage.names import Name, Title
from ckstore.storage.pack import PackName
from ckstore.storage.rows import check_row
from ckstore.storage.schema import (
    FORMAT,
    Id,
    Plain,
    Positive,
    Text,
    Time,
    Whole,
    canonical_json,
    check,
    decode,
    fields,
    refuse_later,
)

#: Prefix of the files' names.
PREFIX = f"{root.LOG}/"
#: Largest size of a record: millions of packs and versions in one collection, or the rows and configurations of 10,000
#: forgotten versions.
LARGEST = 1 << 28
#: Records are joined each time that their number passes a multiple of this, unless they are larger than `_JOINED`.
SEGMENT = 256
_JOINED = 1 << 16
LAST = 10**12 - 1
_Packs, _Versions, _Ids, _Children = list[PackName], list[Positive], list[Id], list[list[Positive]]
#: The type of every record, and those of each kind of change.
_CHANGE = fields({"change": str})
RECORDS: Mapping[str, Any] = {
    "tag": fields({"tag": Name, "version": Positive}),
    "untag": fields({"tag": Name}),
    "rebase": fields({"packs": _Packs, "versions": _Versions}),
    "forget": fields({"versions": _Versions, "uids": _Ids}, {"rows": list[list[Any]], "children": _Children}),
    "undo": fields({"versions": _Versions, "uids": _Ids, "undone": Positive}, {"packs": _Packs}),
    "thin": fields({"packs": _Packs, "version": Positive}, {"before": list[Any], "began": Time}),
    "drop": fields({"packs": _Packs, "version": Positive}),
    "encode": fields({"packs": _Packs, "version": Positive}),
    "metrics": fields({"version": Positive, "metrics": Plain}),
    "policy": fields({"run": Title, "policy": Text | None}),
    "gc": fields(
        {"written": _Packs, "removed": _Packs, "versions": list[tuple[Id, Positive, Positive | None, Time]]},
        {"expired": list[Positive]},
    ),
    "lost": fields({"packs": _Packs}),
    "found": fields({"packs": _Packs}),
    "supersede": fields({"by": Id, "superseded": _Ids, "present": _Ids}),
    "rename": fields({"run": Name, "uids": _Ids}, {"from": Name}),
    "renumber": fields({"uid": Id, "from": Positive, "version": Positive}),
}
#: A catalog that was restored from a copy.
BEHIND = "The catalog lacks changes that are in the log; run `ckstore recover`."
#: The name of the last record before another; empty if there is none.
Follows = Annotated[str, Meta(pattern=r"\A([0-9]{12}-[0-9a-f]{16})?\Z")]
_OWN = fields(
    {
        "format": Whole,
        "sequence": Annotated[int, Meta(ge=1, le=LAST)],
        "follows": Follows,
        "created": Time,
        "digest": Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")],
    },
    {"part": Positive, "writers": Positive},
)
_NAME = re.compile(rb"(\d{12}-[0-9a-f]{16}) ")
_FILE = re.compile(r"(\d{12}-[0-9a-f]{16})\.json")
_SEGMENT = re.compile(r"(\d{12})\.log")


class Found(NamedTuple):
    """A record, and where it is; None if it is damaged. The name begins with its number, or that of its segment."""

    name: str
    record: dict[str, Any] | None
    place: str


def name_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record that was read."""
    return f"{record['sequence']:012d}-{record['digest']}"


def check_record(record: Any) -> None:
    """Raise `ValueError` unless the fields of a record are those of its kind of change.

    Raise `FormatVersionError` for an unknown kind.
    """
    check(record, _CHANGE)
    if record["change"] not in RECORDS:
        raise FormatVersionError(
            f"The log has a change of the unknown kind {record['change']!r:.200}; install a later ckstore."
        )
    check(record, RECORDS[record["change"]])
    for row in (*record.get("rows", ()), *([record["before"]] if "before" in record else ())):
        check_row(row)
    if len(record.get("rows", ())) != len(record.get("children", ())):
        raise ValueError("it has children of other versions")


def write(storage: Storage, content: Mapping[str, Any]) -> str:
    """Write a record durably, with its digest; return its name. Raise `CkstoreError` if it could not be read back."""
    record = {**content, "digest": blake3(canonical_json(content)).hexdigest(length=8)}
    data = canonical_json(record)
    if len(data) > LARGEST:
        raise CkstoreError(
            f"The change takes {len(data):,} bytes of the log, above {LARGEST:,}; make it for fewer versions at once."
        )
    storage.put_absent(f"{PREFIX}{name_of(record)}.json", data)
    return name_of(record)


def delete(storage: Storage, names: Iterable[str]) -> None:
    """Delete records that were not joined."""
    storage.delete([f"{PREFIX}{name}.json" for name in names])


def read_after(storage: Storage, name: str) -> list[Found]:
    """Return the records after a committed one; raise `IntegrityError` if later ones were joined, so committed."""
    found: list[Found] = []
    for item in _listed(storage, name):
        if _number(item) > int(name[:12] or 0):
            raise IntegrityError(BEHIND)
        found += _read_file(storage, item)
    return found


def read_files(storage: Storage, after: str = "") -> list[Found]:
    """Return all records in order, each once; only those after one if that has a name."""
    while True:
        found: list[Found] = []
        try:
            for item in _listed(storage, after):
                found += _read_segment(storage, item) if _number(item) else _read_file(storage, item)
        except FileNotFoundError:
            continue  # Another process joined records since they were listed.
        intact = {item.name: item for item in found if item.record is not None}
        damaged = [item for item in found if item.name not in intact]
        return sorted((item for item in (*intact.values(), *damaged) if item.name > after), key=lambda item: item.name)


def join(storage: Storage, last: str) -> None:
    """Move the records up to a committed one into a segment, but for damaged and large ones.

    Call it inside a catalog transaction. A record is in both places if the process dies in between.
    """
    lines: dict[bytes, None] = {}
    joined = []
    segment = f"{PREFIX}{last[:12]}.log"
    with suppress(FileNotFoundError):  # A process died before it deleted the records.
        lines |= dict.fromkeys(storage.read(segment).splitlines(keepends=True))
    size = sum(map(len, lines))
    for item in _listed(storage):
        match = _FILE.fullmatch(item.name.removeprefix(PREFIX))
        if match is None or match[1] > last or item.size > _JOINED or size > LARGEST - 2 * _JOINED:
            continue
        size += item.size
        data = storage.read(item.name)
        with suppress(IntegrityError):
            _parsed(data, match[1], item.name)
            lines[b"%s %s\n" % (match[1].encode(), data)] = None
            joined.append(match[1])
    if joined:
        storage.put(segment, b"".join(sorted(lines)))
        durable.checkpoint("log-joined")
        delete(storage, joined)


def _listed(storage: Storage, after: str = "") -> Iterator[Listed]:
    """Return the files after a record, if that has a name, in order."""
    return storage.list(PREFIX, f"{PREFIX}{after}.json" if after else "")


def _number(item: Listed) -> int:
    """Return the number of the last record in a segment; 0 for another file."""
    match = _SEGMENT.fullmatch(item.name.removeprefix(PREFIX))
    return 0 if match is None else int(match[1])


def _read_file(storage: Storage, item: Listed) -> Iterator[Found]:
    match = _FILE.fullmatch(item.name.removeprefix(PREFIX))
    if match is not None:
        try:
            yield Found(match[1], _parsed(_data(storage, item), match[1], item.name), item.name)
        except (AccessError, FileNotFoundError):
            raise
        except (IntegrityError, OSError):
            yield Found(match[1], None, item.name)


def _read_segment(storage: Storage, item: Listed) -> Iterator[Found]:
    try:
        lines = _data(storage, item).splitlines(keepends=True)
    except AccessError:
        raise
    except (IntegrityError, OSError):
        lines = [b""]
    for line in lines:
        match = _NAME.match(line)
        name = item.name.removeprefix(PREFIX) if match is None else match[1].decode()
        try:
            yield Found(name, _parsed(line[30:-1] * line.endswith(b"\n"), name, f"{name} in {item.name}"), item.name)
        except IntegrityError:
            yield Found(name, None, item.name if match is None else f"{name} in {item.name}")


def _data(storage: Storage, item: Listed) -> bytes:
    """Return the bytes of a file; none if it is too large."""
    return storage.read(item.name) if item.size <= LARGEST else b""


def _parsed(data: bytes, name: str, place: str) -> dict[str, Any]:
    """Return the record of a name; raise `IntegrityError` if it is damaged."""
    try:
        record: dict[str, Any] = decode(data, Plain)
        # Compared as bytes, too: changes that JSON ignores (blanks, escapes) are damage.
        whole = canonical_json(record) == data
        digest = record.pop("digest")
        intact = whole and blake3(canonical_json(record)).hexdigest(length=8) == digest
        record["digest"] = digest
        check(record, _OWN)
    except (ValueError, KeyError):
        intact = False
    if not intact or name_of(record) != name:
        raise IntegrityError(f"Log record {place} is damaged; restore it from a copy.")
    refuse_later(place, record["format"], FORMAT)
    try:
        check_record(record)
    except FormatVersionError:
        raise
    except ValueError as error:
        raise IntegrityError(f"Log record {place} is damaged ({error}); restore it from a copy.") from error
    return record
