"""Records in manifests: values that no ingest writes are refused before anything is computed with them."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from ckstore.errors import IntegrityError
from ckstore.objects.records import ContentRecord, LatticeRecord
from tests.crafted import read_record

LINEAR: dict[str, Any] = {
    "layer": "coarse", "id": "a" * 40, "kind": "linear", "dtype": "float32", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": [400, 2000], "step": -12, "width": 100, "origin": "c" * 40,
}  # fmt: skip
ORDINAL: dict[str, Any] = {
    "layer": "coarse", "id": "a" * 40, "kind": "ordinal", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": [400, 0], "context": True, "factor": 0.5,
}  # fmt: skip
PATCHED: dict[str, Any] = {
    "layer": "coarse", "id": "a" * 40, "kind": "ordinal", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 50], "alone": [400, 0], "patches": [20, 0, 30, 0],
}  # fmt: skip
EXACT: dict[str, Any] = {
    "layer": "exact", "id": "a" * 40, "lattice": "b" * 40, "mode": "chained", "parent": "c" * 40, "at": 100,
    "lengths": [10, 20, 30, 40], "factor": 0.5,
}  # fmt: skip


def exponents(*values: int) -> str:
    return b64encode(np.array(values, "<i2").tobytes()).decode()


@pytest.mark.parametrize("document", [LINEAR, ORDINAL, PATCHED, EXACT], ids=["linear", "ordinal", "patched", "exact"])
def test_records_come_back(document: dict[str, Any]) -> None:
    assert read_record(document).to_json() == document


def test_a_record_ends_behind_its_bytes() -> None:
    assert LatticeRecord.from_json(LINEAR, "p").end == 600
    assert ContentRecord.from_json(EXACT, "p").end == 200


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
        (LINEAR, {"factor": 0.5}),
        (LINEAR, {"kind": "cubic"}),
        (LINEAR, {"at": [-1, 500]}),
        (LINEAR, {"at": [1, -500]}),
        (LINEAR, {"alone": [-1, 0]}),
        (LINEAR, {"id": "short"}),
        (LINEAR, {"base": 7}),
        (LINEAR, {"origin": "../../../../etc/passwd"}),
        (ORDINAL, {"dtype": "complex64"}),
        (ORDINAL, {"dtype": "int32"}),
        (ORDINAL, {"factor": float("nan")}),
        (ORDINAL, {"factor": "2"}),
        (ORDINAL, {"base": None}),
        (ORDINAL, {"debt": 1.5}),
        (PATCHED, {"patches": [20, 0, 30]}),
        (PATCHED, {"patches": [20, 0, 31, 0]}),
        (PATCHED, {"patches": [20, 0, 31, -1]}),
        (PATCHED, {"patches": [50]}),
        (PATCHED, {"patches": "all"}),
        (PATCHED, {"base": None}),
        (PATCHED, {"context": True}),
        (PATCHED, {"factor": 0.5}),
        (PATCHED, {"kind": "rounded", "shift": 4, "level": 0, "width": 10}),
        (PATCHED, {"kind": "codebook", "centroids": ""}),
        (EXACT, {"mode": "patched"}),
        (EXACT, {"at": -1}),
        (EXACT, {"lengths": [10, -20, 30, 40]}),
        (EXACT, {"factor": float("inf")}),
        (EXACT, {"mode": "free"}),
        (EXACT, {"mode": "own"}),
        (EXACT, {"parent": None}),
        (EXACT, {"lattice": ""}),
    ],
    ids=lambda value: ",".join(f"{name}={str(said)[:12]}" for name, said in value.items()) if len(value) < 3 else "",
)
def test_values_out_of_bounds_are_refused(document: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read_record(document | changes)
