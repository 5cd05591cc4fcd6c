"""Versions that packs, log and catalog contradict each other about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from ckstore.recovery.found_versions import FoundVersion, FoundVersions


class Document(Struct):
    """The fields of a version's document that tell which versions there are."""

    number: int
    parent: int | None = None
    step: int | None = None
    created: str = "1"
    replaces: int | None = None
    goes_back: bool = False


def version(number: int, uid: str, **fields: Any) -> FoundVersion:
    document: Any = Document(number, **fields)
    pack: Any = None
    return FoundVersion(pack, document, number, uid, document.step, "a")


def resolved(
    found: list[FoundVersion], records: list[dict[str, Any]], present: dict[str, int] | None = None, marks: str = ""
) -> FoundVersions:
    """Return the versions; `present` are the numbers in the current catalog by id."""
    rows: Any = present and {
        uid: SimpleNamespace(number=number, run="a", step=None, pack="") for uid, number in present.items()
    }
    return FoundVersions(found, records, rows, 0, set(marks), {}, lambda _: True)


def test_of_copies_the_one_of_the_catalog_stays_or_the_last() -> None:
    for present, kept in ((None, 2), ({"x": 1, "y": 3}, 1), ({"x": 2, "y": 3}, 2), ({"y": 3}, 2)):
        child = version(3, "y", parent=1)
        versions = resolved([version(1, "x"), version(2, "x"), child], [], present)
        assert sorted(versions.versions) == [kept, 3]
        assert (versions.meant(1, "2"), versions.meant(2, "2"), versions.parent(child)) == (kept, kept, kept)
        assert (versions.dropped, versions.problems) == ([3 - kept], [])


def test_a_change_of_marks_that_was_overtaken_is_taken_back() -> None:
    """Version 4 went back to version 2, which version 3 had superseded, but version 5 went on after version 3."""
    found = [
        version(1, "p"),
        version(2, "q", parent=1),
        version(3, "r", parent=1, goes_back=True),
        version(4, "s", parent=2, goes_back=True),
        version(5, "t", parent=3),
    ]
    records = [
        {"change": "supersede", "by": "r", "superseded": ["q"], "present": [], "follows": ""},
        {"change": "supersede", "by": "s", "superseded": ["r"], "present": ["q"], "follows": "1"},
    ]
    versions = resolved(found, records, marks="r")
    assert [number for number, one in sorted(versions.versions.items()) if one.superseded] == [2, 4]
    assert versions.marked == {"s": (["s", "q"], ["r"])}
