"""Records that no ckstore writes: refused, or read without the fields that their kind does not have."""

from __future__ import annotations

from typing import Any

import pytest

from ckstore.errors import IntegrityError
from ckstore.objects.documents import ManifestDocument
from ckstore.recovery.found_objects import FoundObjects
from tests.crafted import read_record

IDENTITY = "ab" * 20


def document(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "id": IDENTITY, "dtype": "int32", "count": 6, "chunk": 6, "at": [0, 30], "alone": 0, **fields}


@pytest.mark.parametrize("value", [7, "cd" * 20, None, [1]])
def test_fields_of_other_kinds_are_ignored(value: Any) -> None:
    record = read_record(document("full", base=value, additive=value, origin=value))
    assert (record.base, record.origin) == (None, None)
    assert not hasattr(record, "additive")
    found = FoundObjects()
    manifest = ManifestDocument(kind="encoded", number=1, created="2026-07-01T12:00:00.000000Z", records=[record])
    found.add("p.zip", "encoded", manifest)
    found.resolve()
    assert len(found.places) == 1


def test_integers_have_no_context_order() -> None:
    with pytest.raises(IntegrityError, match="out of bounds"):
        read_record(document("delta", base="cd" * 20, context=True))


def test_a_cast_is_no_part_of_its_base() -> None:
    cast = document("cast", base="cd" * 20, sizes=[30]) | {"dtype": "bfloat16"}
    assert not read_record(cast).part
    with pytest.raises(IntegrityError, match="out of bounds"):
        read_record(cast | {"part": True})
