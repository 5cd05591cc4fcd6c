"""The log: one small checksummed file for each change that is not an ingest, written before the change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckstore.errors import FormatVersionError, IntegrityError, UsageError
from ckstore.storage import durable, root
from ckstore.storage.pack import PACK_NAME
from ckstore.storage.schema import ID, TIME, by, fields, items, optional, plain_object, read_json, rows, text, whole

FORMAT = 1
#: Largest size of a record: hundreds of thousands of packs and versions in one collection.
LARGEST = 1 << 25
_LAST = 10**12 - 1
_VERSION = whole(1)
_PACKS = items(PACK_NAME)
#: Schema of a record, by kind of change.
RECORD = by(
    "change",
    {
        "tag": fields({"tag": text(1), "version": _VERSION}),
        "untag": fields({"tag": text(1)}),
        "rebase": fields({"packs": _PACKS, "versions": items(_VERSION)}),
        "forget": fields({"versions": items(_VERSION)}),
        "thin": fields({"packs": _PACKS, "version": _VERSION}),
        "drop": fields({"packs": _PACKS, "version": _VERSION}),
        "compact": fields({"packs": _PACKS, "version": _VERSION}),
        "metrics": fields({"version": _VERSION, "metrics": plain_object}),
        "policy": fields({"run": text(), "policy": optional(text())}),
        "gc": fields({"written": _PACKS, "removed": _PACKS, "versions": rows(ID, _VERSION, optional(_VERSION), TIME)}),
        "lost": fields({"packs": _PACKS}),
        "found": fields({"packs": _PACKS}),
        "renumber": fields({"uid": ID, "from": _VERSION, "version": _VERSION}),
    },
)
_OWN = fields({"format": whole(), "sequence": whole(1, _LAST), "created": TIME, "digest": ID})
_NAME = re.compile(r"(\d{12})-([0-9a-f]{16})\.json")
_MAYBE = "a tag may be missing or mean an older version, and a version that was forgotten may be back"
_OWN_FIELDS = ("format", "sequence", "created", "digest")


def append(store: Path, record: Mapping[str, Any]) -> Path:
    """Write a record durably. Call it inside the catalog transaction that makes the change.

    The transaction's lock makes the sequence number unique. The record is on disk before the commit, so that `recover`
    can repeat every change that became visible.

    Parameters
    ----------
    store : Path
        The store's directory.
    record : mapping
        JSON-able; `format`, `sequence`, `created` and `digest` are added and must not be in it.

    Returns
    -------
    Path
        The file.
    """
    taken = [field for field in _OWN_FIELDS if field in record]
    if taken:
        raise UsageError(f"A log record must not have a field {taken[0]}; the log adds it itself.")
    directory = store / root.LOG
    directory.mkdir(exist_ok=True)
    sequence = 1 + max((sequence for sequence, _, _ in _files(directory)), default=0)
    if sequence > _LAST:
        raise IntegrityError(f"{directory} has record {_LAST}, which nothing could have written; remove it.")
    content = {"format": FORMAT, "sequence": sequence, "created": durable.timestamp(), **record}
    digest = blake3(_canonical(content)).hexdigest(length=20)
    path = directory / f"{sequence:012d}-{digest[:16]}.json"
    durable.write_file(path, _canonical({**content, "digest": digest}))
    durable.checkpoint("log-written")
    return path


def read_all(store: Path) -> list[dict[str, Any]]:
    """Return all records in order, each with its `sequence`, `created`, `format` and `digest`.

    Raises
    ------
    IntegrityError
        A record is damaged; the message names its file.
    FormatVersionError
        A record was written by a later version of ckstore.
    """
    return [_read(path, sequence, identifier) for sequence, identifier, path in sorted(_files(store / root.LOG))]


def read_whole(store: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the undamaged records, in order, and a sentence for each damaged or missing one.

    Raises
    ------
    FormatVersionError
        A record was written by a later version of ckstore.
    """
    directory = store / root.LOG
    if not directory.is_dir():
        return [], [f"Log {directory} is missing; {_MAYBE}."]
    files = sorted(_files(directory))
    records, problems = [], []
    for sequence, identifier, path in files:
        try:
            records.append(_read(path, sequence, identifier))
        except (IntegrityError, OSError):
            problems.append(f"Log record {path} is damaged; {_MAYBE}.")
    problems += [f"Log record {named} is missing; {_MAYBE}." for named in gaps(sequence for sequence, _, _ in files)]
    return records, problems


def gaps(numbers: Iterable[int]) -> Iterator[str]:
    """Yield the ranges of numbers that are missing between 1 and the largest, as text such as `3` or `5 to 9`.

    Examples
    --------
    >>> list(gaps([2, 4, 9]))
    ['1', '3', '5 to 8']
    """
    before = 0
    for number in sorted(numbers):
        if number > before + 1:
            yield f"{before + 1}" if number == before + 2 else f"{before + 1} to {number - 1}"
        before = number


def _read(path: Path, sequence: int, identifier: str) -> dict[str, Any]:
    descriptor, size = durable.open_file(path)
    with open(descriptor, "rb") as file:
        data = file.read(LARGEST) if size <= LARGEST else b""
    try:
        record = read_json(data, plain_object)
        # Compared as bytes, too: changes that JSON ignores (blanks, escapes) are damage.
        whole = _canonical(record) == data
        digest = record.pop("digest")
        intact = whole and blake3(_canonical(record)).hexdigest(length=20) == digest
        _OWN([{**record, "digest": digest}])
    except (ValueError, KeyError):
        intact = False
    if not intact or digest[:16] != identifier or record.get("sequence") != sequence:
        raise IntegrityError(f"Log record {path} is damaged; restore it from a copy.")
    if record["format"] > FORMAT:
        version = record["format"]
        raise FormatVersionError(f"{path} has format {version}, this ckstore reads {FORMAT}; install a later one.")
    try:
        RECORD([record])
    except ValueError as error:
        raise IntegrityError(f"Log record {path} is damaged ({error}); restore it from a copy.") from error
    return {**record, "digest": digest}


def _files(directory: Path) -> list[tuple[int, str, Path]]:
    matches = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return [(int(match[1]), match[2], path) for match, path in matches if match is not None]


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
