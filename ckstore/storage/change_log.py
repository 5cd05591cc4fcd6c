"""The log: one small checksummed file for each change that is not an ingest, written before the change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from ckstore.errors import FormatVersionError, IntegrityError
from ckstore.storage import durable, root
from ckstore.storage.interface import Listed, Storage
from ckstore.storage.pack import PACK_NAME
from ckstore.storage.schema import (
    ID,
    TIME,
    by,
    canonical_json,
    fields,
    items,
    optional,
    plain_object,
    read_json,
    rows,
    text,
    whole,
)

FORMAT = 1
#: Prefix of the records' names.
PREFIX = f"{root.LOG}/"
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
        "forget": fields({"versions": items(_VERSION), "uids": items(ID)}),
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
#: Possible losses with a damaged or missing log.
LOSS = "a tag may be missing or mean an older version, and a version that was forgotten may be back"


def append(storage: Storage, record: Mapping[str, Any], last: str = "") -> str:
    """Write a record durably. Call it inside the catalog transaction that makes the change.

    The transaction's lock makes the sequence number unique. The record is on disk before the commit, so that `recover`
    can repeat every change that became visible. Return its name. Records before the known one `last` are not listed.
    """
    names = [last, *(item.name for _, _, item in _listed(storage, last))]
    sequence = 1 + int(max(names).removeprefix(PREFIX)[:12] or 0)
    if sequence > _LAST:
        raise IntegrityError(f"The log has record {_LAST}, which nothing could have written; remove it.")
    content = {**record, "format": FORMAT, "sequence": sequence, "created": durable.timestamp()}
    digest = blake3(canonical_json(content)).hexdigest(length=20)
    name = f"{PREFIX}{sequence:012d}-{digest[:16]}.json"
    storage.put_absent(name, canonical_json({**content, "digest": digest}))
    durable.checkpoint("log-written")
    return name


def read_all(storage: Storage) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the undamaged records, in order, and a sentence for each damaged or missing one.

    Raise `FormatVersionError` if a later version of ckstore wrote one.
    """
    records, problems = [], []
    listed = _listed(storage)
    for sequence, identifier, item in listed:
        try:
            records.append(_read(storage, sequence, identifier, item))
        except (IntegrityError, OSError):
            problems.append(f"Log record {item.name} is damaged; {LOSS}.")
    problems += [f"Log record {named} is missing; {LOSS}." for named in gaps(sequence for sequence, _, _ in listed)]
    return records, problems


def contradictions(
    records: Sequence[Mapping[str, Any]],
    tags: Mapping[str, int],
    policies: Mapping[str, str],
    collected: str,
    last_number: int,
) -> Iterator[str]:
    """Yield a sentence for each fact of a catalog that only the log can confirm, and does not.

    The log may have a change that was interrupted before the commit; never the other way round.
    """
    tagged = {(record["tag"], record["version"]) for record in records if record["change"] == "tag"}
    for tag, number in tags.items():
        if (tag, number) not in tagged:
            yield f"Tag {tag} points at version {number}, but not in the log; run `ckstore recover`."
    known = {(record["run"], record["policy"]) for record in records if record["change"] == "policy"}
    for run, policy in policies.items():
        if (run, policy) not in known:
            yield f"The policy of {run or 'the store'} is {policy}, but not in the log; run `ckstore recover`."
    collections = [record["created"] for record in records if record["change"] == "gc"]
    if collected and (not collections or collected < collections[0]):
        yield f"The catalog has a garbage collection at {collected}, but the log has none; run `ckstore recover`."
    highest = max((number for record in records for number in _numbers(record)), default=0)
    if last_number < highest:
        yield f"The catalog does not know version {highest} in the log; run `ckstore recover`."


def _numbers(record: Mapping[str, Any]) -> list[int]:
    """Return the numbers of versions in a log record."""
    listed = record.get("versions", [record["version"]] if "version" in record else [])
    return [item if isinstance(item, int) else item[1] for item in listed]


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


def _read(storage: Storage, sequence: int, identifier: str, item: Listed) -> dict[str, Any]:
    data = storage.read(item.name) if item.size <= LARGEST else b""
    try:
        record = read_json(data, plain_object)
        # Compared as bytes, too: changes that JSON ignores (blanks, escapes) are damage.
        whole = canonical_json(record) == data
        digest = record.pop("digest")
        intact = whole and blake3(canonical_json(record)).hexdigest(length=20) == digest
        _OWN([{**record, "digest": digest}])
    except (ValueError, KeyError):
        intact = False
    if not intact or digest[:16] != identifier or record.get("sequence") != sequence:
        raise IntegrityError(f"Log record {item.name} is damaged; restore it from a copy.")
    if record["format"] > FORMAT:
        version = record["format"]
        raise FormatVersionError(f"{item.name} has format {version}, this ckstore reads {FORMAT}; install a later one.")
    try:
        RECORD([record])
    except ValueError as error:
        raise IntegrityError(f"Log record {item.name} is damaged ({error}); restore it from a copy.") from error
    return {**record, "digest": digest}


def _listed(storage: Storage, after: str = "") -> list[tuple[int, str, Listed]]:
    """Return number, digest and object of every record after a name, in order."""
    matches = ((_NAME.fullmatch(item.name.removeprefix(PREFIX)), item) for item in storage.list(PREFIX, after))
    return [(int(match[1]), match[2], item) for match, item in matches if match is not None]
