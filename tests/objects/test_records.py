"""Records in manifests: values that no ingest writes are refused before anything is computed with them."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from ckstore.errors import IntegrityError
from ckstore.objects.records import Record
from tests.crafted import read_record

LINEAR: dict[str, Any] = {
    "id": "a" * 40, "kind": "linear", "dtype": "float32", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": 400, "step": -12, "width": 100, "origin": "c" * 40,
}  # fmt: skip
ORDINAL: dict[str, Any] = {
    "id": "a" * 40, "kind": "ordinal", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": 400, "context": True,
}  # fmt: skip
PATCHED: dict[str, Any] = {
    "id": "a" * 40, "kind": "ordinal", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 50], "alone": 400, "patches": [20, 0, 30, 0],
}  # fmt: skip


def exponents(*values: int) -> str:
    return b64encode(np.array(values, "<i2").tobytes()).decode()


@pytest.mark.parametrize("document", [LINEAR, ORDINAL, PATCHED], ids=["linear", "ordinal", "patched"])
def test_records_come_back(document: dict[str, Any]) -> None:
    assert read_record(document).to_json() == document


def test_a_record_ends_behind_its_bytes() -> None:
    assert Record.from_json(LINEAR, "p").end == 600


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (LINEAR, {"count": 0}),
        (LINEAR, {"count": 1 << 48}),
        (LINEAR, {"count": 1000.0}),
        (LINEAR, {"chunk": 0}),
        (LINEAR, {"chunk": (1 << 18) + 1}),
        (LINEAR, {"width": 0}),
        (LINEAR, {"width": True}),
        (LINEAR, {"step": -127}),
        (LINEAR, {"step": 107}),
        (LINEAR, {"step": None}),
        (LINEAR, {"rows": exponents(*range(9))}),
        (LINEAR, {"cols": exponents(*range(101))}),
        (LINEAR, {"rows": exponents(*[-115] * 10)}),
        (LINEAR, {"rows": exponents(*[60] * 10), "cols": exponents(*[60] * 100)}),
        (LINEAR, {"dtype": "int8"}),
        (LINEAR, {"context": True}),
        (LINEAR, {"kind": "cubic"}),
        (LINEAR, {"at": [-1, 500]}),
        (LINEAR, {"at": [1, -500]}),
        (LINEAR, {"alone": -1}),
        (LINEAR, {"id": "short"}),
        (LINEAR, {"base": 7}),
        (LINEAR, {"origin": "../../../../etc/passwd"}),
        (ORDINAL, {"dtype": "complex64"}),
        (ORDINAL, {"dtype": "int32"}),
        (ORDINAL, {"base": None}),
        (ORDINAL, {"debt": 1.5}),
        (PATCHED, {"patches": [20, 0, 30]}),
        (PATCHED, {"patches": [20, 0, 31, 0]}),
        (PATCHED, {"patches": [20, 0, 31, -1]}),
        (PATCHED, {"patches": [50]}),
        (PATCHED, {"patches": "all"}),
        (PATCHED, {"base": None}),
        (PATCHED, {"context": True}),
        (PATCHED, {"kind": "linear", "dtype": "float32", "step": -12, "width": 100}),
        (PATCHED, {"kind": "rounded", "shift": 4, "level": 0, "width": 10}),
        (PATCHED, {"kind": "codebook", "centroids": ""}),
    ],
    ids=lambda value: ",".join(f"{name}={str(said)[:12]}" for name, said in value.items()) if len(value) < 3 else "",
)
def test_values_out_of_bounds_are_refused(document: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read_record(document | changes)
