"""The log: one small checksummed file for each change that is not an ingest, written before the change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3

from ckstore.errors import AccessError, FormatVersionError, IntegrityError
from ckstore.storage import durable, root
from ckstore.storage.interface import Listed, Storage
from ckstore.storage.names import names, names_or_empty
from ckstore.storage.pack import PACK_NAME
from ckstore.storage.schema import (
    ID,
    TIME,
    by,
    canonical_json,
    fields,
    items,
    matching,
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
        "tag": fields({"tag": names, "version": _VERSION}),
        "untag": fields({"tag": names}),
        "rebase": fields({"packs": _PACKS, "versions": items(_VERSION)}),
        "forget": fields({"versions": items(_VERSION), "uids": items(ID)}),
        "thin": fields({"packs": _PACKS, "version": _VERSION}),
        "drop": fields({"packs": _PACKS, "version": _VERSION}),
        "compact": fields({"packs": _PACKS, "version": _VERSION}),
        "metrics": fields({"version": _VERSION, "metrics": plain_object}),
        "policy": fields({"run": names_or_empty, "policy": optional(text())}),
        "gc": fields({"written": _PACKS, "removed": _PACKS, "versions": rows(ID, _VERSION, optional(_VERSION), TIME)}),
        "lost": fields({"packs": _PACKS}),
        "found": fields({"packs": _PACKS}),
        "supersede": fields({"by": ID, "superseded": items(ID), "present": items(ID)}),
        "renumber": fields({"uid": ID, "from": _VERSION, "version": _VERSION}),
    },
)
#: Schema of the name of the last record before another; empty if there is none.
FOLLOWS = matching(re.compile(r"(\d{12}-[0-9a-f]{16})?"), "a record's name, or empty")
_OWN = fields(
    {
        "format": whole(),
        "sequence": whole(1, _LAST),
        "follows": FOLLOWS,
        "part": whole(),
        "created": TIME,
        "digest": ID,
    }
)
#: Changes that take something away: they count only if they were committed.
_TAKING = ("forget", "gc", "metrics", "policy", "supersede", "untag")
_NAME = re.compile(r"(\d{12})-([0-9a-f]{16})\.json")
#: Possible losses with a damaged or missing log.
LOSS = "a tag may be missing or mean an older version, and a version that was forgotten may be back"


def append(storage: Storage, record: Mapping[str, Any], follows: str = "", part: int = 0) -> str:
    """Write a record durably; return its name. Call it inside the catalog transaction that makes the change.

    The transaction's lock makes the sequence number unique. The record is on disk before the commit, so that `recover`
    can repeat every change that became visible. `follows` names the last record of the transaction that was committed
    last: records between the two belong to transactions that were not. `part` counts the records of one transaction.
    Raise `IntegrityError` if the log shows that transactions were committed after `follows`.
    """
    later = _listed(storage, f"{PREFIX}{follows}.json" if follows else "")
    for sequence, identifier, item in later:
        before = follows
        with suppress(IntegrityError, OSError):
            before = _read(storage, sequence, identifier, item)["follows"]
        if before > follows:
            raise IntegrityError("The catalog lacks changes that are in the log; run `ckstore recover`.")
    sequence = 1 + int(max([follows, *(item.name.removeprefix(PREFIX) for _, _, item in later)])[:12] or 0)
    if sequence > _LAST:
        raise IntegrityError(f"The log has record {_LAST}, which nothing could have written; remove it.")
    order = {"format": FORMAT, "sequence": sequence, "follows": follows, "part": part}
    content = {**record, **order, "created": durable.timestamp()}
    digest = blake3(canonical_json(content)).hexdigest(length=20)
    name = _name(sequence, digest)
    storage.put_absent(f"{PREFIX}{name}.json", canonical_json({**content, "digest": digest}))
    durable.checkpoint("log-written")
    return name


def withdraw(storage: Storage, names: Iterable[str]) -> None:
    """Delete the records of a transaction that failed, while it still holds the lock."""
    with suppress(OSError):  # The next record says that they do not count.
        storage.delete([f"{PREFIX}{name}.json" for name in names])


def name_of(record: Mapping[str, Any]) -> str:
    """Return the name of a record that was read."""
    return _name(record["sequence"], record["digest"])


def read_all(storage: Storage) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of committed transactions, in order, and a sentence for each damaged or missing record.

    The last transaction may have been interrupted before its commit. Of earlier ones that were, the records that take
    something away, or move a tag, are left out. Raise `FormatVersionError` if a later version of ckstore wrote one.
    """
    intact: list[dict[str, Any]] = []
    problems = []
    for sequence, identifier, item in _listed(storage):
        try:
            intact.append(_read(storage, sequence, identifier, item))
        except AccessError:
            raise
        except (IntegrityError, OSError):
            problems.append(f"Log record {item.name} is damaged; {LOSS}.")
    damaged = {int(problem.split()[2].removeprefix(PREFIX)[:12]) for problem in problems}
    known = damaged | {record["sequence"] for record in intact}
    records: list[dict[str, Any]] = []
    uncommitted = set()
    while intact:
        last = intact.pop()
        records.append(last)
        # The other parts of its change have the numbers right before it.
        first, lost = max(last["sequence"] - last["part"], 1), last["sequence"]
        while intact and intact[-1]["sequence"] >= first and intact[-1]["follows"] == last["follows"]:
            records.append(intact.pop())
        while lost >= first and lost in known:
            lost -= 1
        if lost >= first:
            problems.append(_missing(lost))
        while intact and name_of(intact[-1]) > last["follows"]:
            records.append(intact.pop())
            uncommitted.add(records[-1]["sequence"])
        before = name_of(intact[-1]) if intact else ""
        if before != last["follows"] and int(last["follows"][:12]) not in damaged:
            problems.append(_missing(int(last["follows"][:12])))
    return [*_counting(records[::-1], uncommitted)], problems


def _missing(number: int) -> str:
    return f"Log record {number} is missing; {LOSS}."


def _counting(records: Iterable[dict[str, Any]], uncommitted: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yield the records that count: all but those of changes that were not committed and would take something away.

    A version that heals another takes its tags, if `recover` finds it: these tags are not the first of their change.
    """
    tags = set()
    for record in records:
        change, tag = record["change"], record.get("tag")
        moves = change == "tag" and tag in tags and record["part"] == 0
        if record["sequence"] in uncommitted and (change in _TAKING or moves):
            continue
        if change == "tag":
            tags.add(tag)
        elif change == "untag":
            tags.discard(tag)
        yield record


def lost_last(records: Iterable[Mapping[str, Any]], problems: Iterable[str], logged: str) -> Iterator[str]:
    """Yield a sentence if the log lacks the last record that a catalog has, which no later record names."""
    if logged and logged not in map(name_of, records):
        said = _missing(int(logged[:12]))
        if not any(logged in problem or problem == said for problem in problems):
            yield said


def superseded(records: Iterable[Mapping[str, Any]], before: Iterable[str] = ()) -> set[str]:
    """Return the ids of the versions that are superseded after some records, given those before them."""
    found = set(before)
    for record in records:
        if record["change"] == "supersede":
            found.difference_update(record["present"])
            found.update(record["superseded"])
        elif record["change"] == "forget":
            found.difference_update(record["uids"])
    return found


def _name(sequence: int, digest: str) -> str:
    return f"{sequence:012d}-{digest[:16]}"


def contradictions(
    records: Sequence[Mapping[str, Any]],
    logged: str,
    marks: Mapping[str, bool],
    tags: Mapping[str, int],
    policies: Mapping[str, str],
    collected: str,
    last_number: int,
) -> Iterator[str]:
    """Yield a sentence for each fact of a catalog that only the log can confirm, and does not.

    `logged` is the last record that the catalog has, and `marks` tell for each id whether that version is superseded.
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
    known_marks = superseded(record for record in records if name_of(record) <= logged)
    for uid, mark in marks.items():
        if mark != (uid in known_marks):
            yield f"Version {uid} is {'' if mark else 'not '}superseded, unlike in the log; run `ckstore recover`."
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
