"""Places of objects that are in several packs."""

from __future__ import annotations

import pytest

from ckstore.objects.documents import ManifestDocument
from ckstore.objects.records import Delta, Full, Record
from ckstore.recovery.found_objects import FoundObjects
from ckstore.storage.catalog import key

IDS = [digit * 40 for digit in "123"]
KEYS = [*map(key, IDS)]


def full(identity: str) -> Record:
    return Full(id=identity, dtype="float32", count=1, chunk=1, at=(0, 1), alone=1)


def delta(identity: str, base: str) -> Record:
    return Delta(id=identity, dtype="float32", count=1, chunk=1, at=(0, 1), alone=1, base=base)


def added(objects: FoundObjects, name: str, kind: str, *records: Record) -> None:
    document = ManifestDocument(number=1, created="2026-01-01T00:00:00.000000Z", kind="encoded", records=[*records])
    objects.add(name, kind, document)


@pytest.mark.parametrize("kind", ["encoded", "raw"])
def test_a_pack_that_was_read_has_no_other_object(kind: str) -> None:
    """The catalog says that it does; packs that were not read are taken at its word."""
    objects = FoundObjects()
    added(objects, "read", kind, full(IDS[0]))
    objects.resolve([(KEYS[1], "read", 1), (KEYS[2], "other", 0)])
    assert objects.places == {KEYS[0]: (KEYS[0], "read", 0), KEYS[2]: (KEYS[2], "other", 0)}


@pytest.mark.parametrize("kind", ["encoded", "raw"])
def test_of_several_copies_the_one_of_the_catalog_stays(kind: str) -> None:
    for present in range(3):
        objects = FoundObjects()
        for number in range(3):
            added(objects, f"{number}", kind, full(IDS[0]))
        objects.resolve([(KEYS[0], f"{present}", 0)])
        assert objects.places == {KEYS[0]: (KEYS[0], f"{present}", 0)}


def test_a_copy_whose_base_is_lost_does_not_stay() -> None:
    objects = FoundObjects()
    added(objects, "a", "encoded", delta(IDS[0], IDS[1]))
    added(objects, "b", "encoded", full(IDS[0]))
    objects.resolve([(KEYS[0], "a", 0)])
    assert objects.places == {KEYS[0]: (KEYS[0], "b", 0)}
