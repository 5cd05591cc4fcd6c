"""Records in manifests: values that no ingest writes are refused before anything is computed with them."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from ckstore.errors import IntegrityError
from tests.crafted import plainly, read_record

LINEAR: dict[str, Any] = {
    "id": "a" * 40, "kind": "linear", "dtype": "float32", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": 400, "step": -12, "width": 100, "origin": "c" * 40,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "id": "a" * 40, "kind": "delta", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 500], "alone": 400, "context": True, "debt": 7,
}  # fmt: skip
PATCHED: dict[str, Any] = {
    "id": "a" * 40, "kind": "patches", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 50], "alone": 400, "sizes": [20, 0, 30, 0],
}  # fmt: skip


CAST: dict[str, Any] = {**PATCHED, "kind": "cast", "sizes": [20, 4, 22, 4]}
RAW: dict[str, Any] = {
    "id": "a" * 40, "kind": "raw", "dtype": "bfloat16", "count": 1000, "chunk": 300, "at": [128, 2000], "alone": 2000,
    "crcs": [1, 2, 3, 4],
}  # fmt: skip
FULL: dict[str, Any] = {
    "id": "a" * 40, "kind": "full", "dtype": "int8", "count": 1000, "chunk": 300, "at": [100, 500], "alone": 500,
}  # fmt: skip
COPY: dict[str, Any] = {
    "id": "a" * 40, "kind": "linear", "dtype": "bfloat16", "count": 1000, "chunk": 300,
    "base": "b" * 40, "at": [100, 0], "alone": 400, "step": -12, "width": 100, "cast": True,
}  # fmt: skip
CODEBOOK: dict[str, Any] = {
    "id": "a" * 40, "kind": "codebook", "dtype": "float32", "count": 1000, "chunk": 300, "at": [100, 500], "alone": 400,
    "centroids": b64encode(np.array([-1, 0, 1, 2], "<f4").tobytes()).decode(), "protected": True,
}  # fmt: skip
FACTORS: dict[str, Any] = {
    "id": "a" * 40, "kind": "factors", "dtype": "float32", "count": 1000, "chunk": 300, "base": "b" * 40,
    "at": [100, 500], "alone": 400, "step": -12, "width": 100, "rank": 10,
}  # fmt: skip


def exponents(*values: int) -> str:
    return b64encode(np.array(values, "<i2").tobytes()).decode()


@pytest.mark.parametrize(
    "document",
    [LINEAR, RAW, FULL, DELTA, PATCHED, CAST, COPY, CODEBOOK, FACTORS],
    ids=lambda document: document["kind"],
)
def test_records_come_back(document: dict[str, Any]) -> None:
    assert plainly(read_record(document)) == document


def test_a_record_ends_behind_its_bytes() -> None:
    assert read_record(LINEAR).end == 600


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (CAST, {"sizes": [20, 4, 23, 3]}),
        (CAST, {"sizes": [20, 4, 26]}),
        (CAST, {"sizes": [20, 4, 22, 5]}),
        (CAST, {"dtype": "float32"}),
        (CAST, {"dtype": "float8_e5m2"}),
        (CAST, {"base": None}),
        (COPY, {"dtype": "float32"}),
        (COPY, {"base": None}),
        (COPY, {"dtype": "float16", "step": -49}),
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
        (LINEAR, {"kind": "cubic"}),
        (LINEAR, {"at": [-1, 500]}),
        (LINEAR, {"at": [1, -500]}),
        (LINEAR, {"alone": -1}),
        (LINEAR, {"id": "short"}),
        (LINEAR, {"base": 7}),
        (LINEAR, {"origin": "../../../../etc/passwd"}),
        (DELTA, {"dtype": "complex64"}),
        (DELTA, {"base": None}),
        (DELTA, {"debt": 1.5}),
        (PATCHED, {"sizes": [20, 0, 30]}),
        (PATCHED, {"sizes": [20, 0, 31, 0]}),
        (PATCHED, {"sizes": [20, 0, 31, -1]}),
        (PATCHED, {"sizes": [50]}),
        (PATCHED, {"sizes": "all"}),
        (PATCHED, {"base": None}),
        (RAW, {"crcs": [1, 2, 3]}),
        (RAW, {"crcs": [1, 2, 3, 1 << 32]}),
        (RAW, {"at": [128, 1999]}),
        (FULL, {"dtype": "complex64"}),
        (CODEBOOK, {"additive": True}),
        (CODEBOOK, {"centroids": "AAAA"}),
        (FACTORS, {"base": None}),
        (FACTORS, {"dtype": "float64"}),
        (FACTORS, {"rank": 0}),
        (FACTORS, {"rank": 11}),
        (FACTORS, {"rank": 257, "width": 1 << 10, "count": 1 << 20, "chunk": 1 << 18}),
        (FACTORS, {"width": 0}),
        (FACTORS, {"width": 300}),
        (FACTORS, {"width": 200}),
        (FACTORS, {"width": 1 << 40}),
        (FACTORS, {"count": 1001}),
        (FACTORS, {"count": 1 << 40, "width": 100}),
        (FACTORS, {"step": -127}),
        (FACTORS, {"step": 107}),
    ],
    ids=lambda value: ",".join(f"{name}={str(said)[:12]}" for name, said in value.items()) if len(value) < 3 else "",
)
def test_values_out_of_bounds_are_refused(document: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read_record(document | changes)
