"""The log: a checksummed record of each change that is not an ingest, written before the change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import Any

from ckstore.errors import CkstoreError, IntegrityError
from ckstore.storage import durable, log_files
from ckstore.storage.interface import Storage
from ckstore.storage.log_files import BEHIND, LAST, SEGMENT, name_of
from ckstore.storage.rows import VersionRow, row_of
from ckstore.storage.schema import FORMAT

#: Changes that take something away: they count only if they were committed.
_TAKING = ("forget", "gc", "metrics", "policy", "rename", "supersede", "undo", "untag")
#: Possible losses with a damaged or missing log.
LOSS = "a tag may be missing or mean an older version, a run have its former name, and a forgotten version be back"


def append(storage: Storage, record: Mapping[str, Any], follows: str = "", part: int = 0) -> str:
    """Write a record durably; return its name. Call it inside the catalog transaction that makes the change.

    The transaction's lock makes the sequence number unique. The record is on disk before the commit, so that `recover`
    can repeat every change that became visible. `follows` names the last record of the transaction that was committed
    last: records between the two belong to transactions that were not. `part` counts the records of one transaction.
    Raise `IntegrityError` if the log shows that transactions were committed after `follows`.
    """
    later = log_files.read_after(storage, follows)
    if any(item.record is not None and item.record["follows"] > follows for item in later):
        raise IntegrityError(BEHIND)
    sequence = 1 + int(max([follows, *(item.name for item in later)])[:12] or 0)
    if sequence > LAST:
        raise IntegrityError(f"The log has record {LAST}, which nothing could have written; remove it.")
    if follows and sequence // SEGMENT > int(follows[:12]) // SEGMENT:
        with suppress(CkstoreError, OSError):  # The next one that is due does it.
            log_files.join(storage, follows)
    order = {"format": FORMAT, "sequence": sequence, "follows": follows, **({"part": part} if part else {})}
    name = log_files.write(storage, {**record, **order, "created": durable.timestamp()})
    durable.checkpoint("log-written")
    return name


def withdraw(storage: Storage, names: Iterable[str]) -> None:
    """Delete the records of a transaction that failed, while it still holds the lock."""
    with suppress(OSError):  # The next record says that they do not count.
        log_files.delete(storage, names)


def read_all(storage: Storage, after: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of committed transactions, in order, and a sentence for each damaged or missing record.

    Only those after a committed one, if that has a name; then the sentences may be wrong.
    The last transaction may have been interrupted before its commit. Of earlier ones that were, the records that take
    something away, or move a tag, are left out. Raise `FormatVersionError` if a later version of ckstore wrote one.
    """
    found = log_files.read_files(storage, after)
    intact = [item.record for item in found if item.record is not None]
    broken = [item for item in found if item.record is None]
    problems = [f"Log record {item.place} is damaged; {LOSS}." for item in broken]
    damaged = {int(item.name[:12]) for item in broken}
    known = damaged | {record["sequence"] for record in intact}
    records: list[dict[str, Any]] = []
    uncommitted = set()
    while intact:
        last = intact.pop()
        records.append(last)
        # The other parts of its change have the numbers right before it.
        first, lost = max(last["sequence"] - last.get("part", 0), 1), last["sequence"]
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


def undoable(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records of forgotten and thinned versions that can come back, with their `rows` as before.

    They were neither undone, nor freed by a collection. The rows (`VersionRow`) name the runs as they are called now.
    """
    found: dict[int, Mapping[str, Any]] = {}
    for record in records:
        change = record["change"]
        if change == "forget" and record.get("rows"):
            found[record["sequence"]] = {**record, "rows": list(map(row_of, record["rows"]))}
        elif change == "thin" and "before" in record:
            found[record["sequence"]] = {**record, "rows": [row_of(record["before"])]}
        elif change in ("forget", "drop"):  # For good: the exact values, too.
            going = record.get("versions", [record.get("version")])
            found = {
                sequence: kept
                for sequence, kept in found.items()
                if kept["change"] != "thin" or kept["version"] not in going
            }
        elif change == "undo":
            found.pop(record["undone"], None)
        elif change == "gc":
            for sequence in record.get("expired", ()):
                found.pop(sequence, None)
        elif change == "rename":
            for sequence, kept in found.items():
                found[sequence] = {**kept, "rows": [_renamed(row, record) for row in kept["rows"]]}
    return list(found.values())


def _renamed(row: VersionRow, record: Mapping[str, Any]) -> VersionRow:
    return replace(row, run=record["run"]) if row.uid in record["uids"] else row


def forgotten(records: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """Return ids and numbers of the versions that were forgotten and did not come back.

    The id is empty for a version that a recovery left out.
    """
    found: set[tuple[str, int]] = set()
    for record in records:
        if record["change"] in ("forget", "undo"):
            change = found.update if record["change"] == "forget" else found.difference_update
            change(zip(record["uids"] or repeat(""), record["versions"], strict=False))
    return found


def renamed(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the run of each version whose run was renamed since the version was written, by id."""
    return {uid: record["run"] for record in records if record["change"] == "rename" for uid in record["uids"]}


def _missing(number: int) -> str:
    return f"Log record {number} is missing; {LOSS}."


def _counting(records: Iterable[dict[str, Any]], uncommitted: Collection[int]) -> Iterator[dict[str, Any]]:
    """Yield the records that count: all but those of changes that were not committed and would take something away.

    A version that heals another takes its tags, if `recover` finds it: these tags are not the first of their change.
    """
    tags = set()
    for record in records:
        change, tag = record["change"], record.get("tag")
        moves = change == "tag" and tag in tags and "part" not in record
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


def contradictions(
    records: Sequence[Mapping[str, Any]],
    logged: str,
    marks: Mapping[str, bool],
    tags: Mapping[str, int],
    policies: Mapping[str, str],
    collected: str,
    is_known: Callable[[int], bool],
) -> Iterator[str]:
    """Yield a sentence for each fact of a catalog that only the log can confirm, and does not.

    `logged` is the last record that the catalog has, and `marks` tell for each id whether that version is superseded.
    The log may have a change that was interrupted before the commit; never the other way round.
    """
    tagged = {(record["tag"], record["version"]) for record in records if record["change"] == "tag"}
    for tag, number in tags.items():
        if (tag, number) not in tagged:
            yield f"Tag {tag} points at version {number}, but not in the log; run `ckstore recover`."
    known: set[tuple[str, str | None]] = set()
    for record in records:
        if record["change"] == "policy":
            known.add((record["run"], record["policy"]))
        elif record["change"] == "rename":
            known |= {(record["run"], policy) for run, policy in known if run == record.get("from")}
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
    if highest and not is_known(highest):
        yield f"The catalog does not know version {highest} in the log; run `ckstore recover`."


def _numbers(record: Mapping[str, Any]) -> list[int]:
    """Return the numbers of versions in a log record."""
    listed = record.get("versions", [record["version"]] if "version" in record else [])
    return [item if isinstance(item, int) else item[1] for item in listed]


def gaps(numbers: Iterable[int]) -> Iterator[str]:
    """Yield the ranges of numbers that are missing between 1 and the largest, as text such as `3` or `5 to 9`.

    Examples
    --------
    >>> list(gaps([2, 4, 5, 9]))
    ['1', '3', '6 to 8']
    """
    before = 0
    for number in sorted(numbers):
        if number > before + 1:
            yield f"{before + 1}" if number == before + 2 else f"{before + 1} to {number - 1}"
        before = number
