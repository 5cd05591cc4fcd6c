"""Models of ONNX: initialisers that have their numbers in one stretch are tensors; other models are bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ckstore.formats.containers import onnx
from ckstore.formats.detect import parse
from tests.formats.reading import assert_comes_back, bits, in_memory
from tests.formats.written import field, initialiser, onnx_bytes

FLOAT, INT64, FLOAT16, BFLOAT16, INT4, STRING = 1, 7, 10, 16, 22, 8
WEIGHT = initialiser("w", FLOAT, (2, 3), np.arange(6, dtype="<f4").tobytes())


def test_initialisers_are_tensors() -> None:
    data = onnx_bytes([
        WEIGHT,
        initialiser("packed", FLOAT, (3,), struct.pack("<3f", 1, 2, 3), 4),
        initialiser("doubles", 11, (1, 1), struct.pack("<d", 5), 10),
        initialiser("scalar", INT64, (), struct.pack("<q", -1)),
        initialiser("half", BFLOAT16, (2,), b"\x80\x3f\0\0"),
        initialiser("empty", FLOAT, (0, 4), b""),
        field(1, b"\x02\x01") + field(2, FLOAT16) + field(8, b"sizes in one field") + field(9, bytes(4)),
    ])  # fmt: skip
    layout = assert_comes_back(data)
    assert layout.kind == "onnx"
    found = {str(one.path[0]): (one.dtype, one.shape) for one in layout.tensors}
    assert found == {
        "w": ("float32", (2, 3)), "packed": ("float32", (3,)), "doubles": ("float64", (1, 1)), "scalar": ("int64", ()),
        "half": ("bfloat16", (2,)), "empty": ("float32", (0, 4)), "sizes in one field": ("float16", (2, 1)),
    }  # fmt: skip
    for number, expected in enumerate(([0, 1, 2, 3, 4, 5], [1, 2, 3], [5])):
        tensor = layout.tensors[number]
        np.testing.assert_array_equal(bits(data, layout, tensor).reshape(-1).view(tensor.dtype), expected)


def test_other_initialisers_are_bytes_with_a_reason() -> None:
    outside = field(1, 2) + field(2, FLOAT) + field(8, b"outside") + field(14, 1)
    layout = assert_comes_back(onnx_bytes([
        WEIGHT, initialiser("int4", INT4, (4,), bytes(2)), initialiser("text", STRING, (1,), b"x", 6), outside,
    ]))  # fmt: skip
    assert [tensor.path for tensor in layout.tensors] == [("w",)]
    assert layout.bytes_for == {
        "int4": "of a dtype or form that is not read", "text": "of a dtype or form that is not read",
        "outside": "in another file",
    }  # fmt: skip


def test_large_parts_stay_out_of_the_skeleton() -> None:
    data = onnx_bytes([initialiser("int4", INT4, (200_000,), bytes(100_000)), WEIGHT], field(10, bytes(200_000)))
    layout = assert_comes_back(data + field(14, bytes(300_000)))
    assert [extent.count for extent in layout.extents] == [200_000, 100_000, 6, 300_000]


@pytest.mark.parametrize(
    "data",
    [
        onnx_bytes([WEIGHT])[:-1],
        onnx_bytes([WEIGHT, WEIGHT]),
        onnx_bytes([initialiser("", FLOAT, (1,), bytes(4))]),
        onnx_bytes([initialiser("w", FLOAT, (2,), bytes(4))]),
        onnx_bytes([initialiser("w", FLOAT, (1 << 62, 1 << 62), bytes(4))]),
        onnx_bytes([initialiser("w", FLOAT, (1,) * 65, bytes(4))]),
        onnx_bytes([field(1, b"\1" * 200) + initialiser("w", FLOAT, (), bytes(4))]),
        onnx_bytes([initialiser("w", FLOAT, (1,), bytes(4)).replace(b"w", b"\xff")]),
        onnx_bytes([WEIGHT], before=b"\x0b"),
        onnx_bytes([WEIGHT], before=b"\x52" + b"\xff" * 9),
        onnx_bytes([WEIGHT], before=b"\x55\0"),
        onnx_bytes([]),
        field(1, 1) + field(2, field(2, b"a saved model of TensorFlow")),
    ],
)
def test_others_are_opaque(data: bytes) -> None:
    assert parse(in_memory(data)).kind == "opaque"


def test_many_fields_are_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    data = onnx_bytes([WEIGHT], before=field(1, b"") * 1000)
    assert parse(in_memory(data)).kind == "onnx"
    monkeypatch.setattr(onnx, "_MAX_FIELDS", 1000)
    assert parse(in_memory(data)).kind == "opaque"
