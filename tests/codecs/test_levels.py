"""Levels, rounded ordinals and ordinals, in numcodecs and in plain Zarr arrays."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr

from ckstore.codecs.levels import Levels
from ckstore.codecs.zarr_huffman import HuffmanCodec
from ckstore.codecs.zarr_levels import LevelsCodec
from ckstore.errors import IntegrityError, UsageError


def text(*levels: float) -> str:
    return b64encode(np.array(levels, "<f4").tobytes()).decode()


BOOK = {"centroids": text(-1.5, 0, 0.25, 3)}
SETTINGS: list[dict[str, Any]] = [
    {}, {"precision": "bfloat16"}, BOOK, {**BOOK, "protected": True}, {**BOOK, "precision": "float16"}, {"shift": 18},
    {"shift": 3, "level": -40, "precision": "bfloat16"},
    {"shift": 18, "level": 7, "rows": [0, 3, -2], "cols": "PQPP", "width": 4},
]  # fmt: skip


def values() -> np.ndarray:
    found = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    found[0] = [0, 0.25, -1.5, 3]
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_decoded_values_stay_and_the_configuration_goes_through_json(settings: dict[str, Any]) -> None:
    codec = Levels("float32", **settings)
    integers = codec.encode(values())
    assert integers.shape == (3, 4)
    decoded = codec.decode(integers)
    assert decoded.dtype == np.float32
    again = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
    assert again == codec
    assert eval(repr(codec)) == codec
    assert np.array_equal(again.encode(decoded), integers)
    if "rows" not in settings:  # Bytes have no rows.
        for buffer in (integers.tobytes(), bytearray(integers.tobytes())):
            assert np.array_equal(codec.decode(buffer), decoded.reshape(-1))
    out = np.empty_like(decoded)
    codec.decode(integers, out=out)
    assert np.array_equal(out, decoded)


def test_ordinals_keep_every_bit_and_the_order() -> None:
    for dtype, unsigned in (("float32", "u4"), ("float64", "u8")):
        odd = np.array([-np.inf, -1.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, np.inf, np.nan], dtype)
        integers = Levels(dtype).encode(odd)
        assert np.array_equal(np.sort(integers), integers)
        assert np.array_equal(Levels(dtype).decode(integers).view(unsigned), odd.view(unsigned))


def test_levels_are_the_nearest_ones_or_keep_16_bits() -> None:
    given = np.array([0.2, 0.25, -7.0, 1.0], "float32")
    assert Levels("float32", **BOOK).encode(given).tolist() == [1, 1, -1, 1]
    assert Levels("float32", **BOOK).decode(np.array([1, -1, 2, 0], "i4")).tolist() == [0.25, -1.5, 3, 0]
    kept = Levels("float32", **BOOK, protected=True)
    assert kept.decode(kept.encode(given)).tolist() == pytest.approx([0.2, 0.25, -7.0, 1.0], rel=2**-8)
    for wrong in (-2, 1 << 20):
        with pytest.raises(IntegrityError, match="no level"):
            kept.decode(np.array([wrong], "i4"))


def test_rounded_ordinals_are_even_on_a_logarithmic_scale() -> None:
    given = np.exp2(np.linspace(-100, 100, 999)).astype("float32")
    codec = Levels("float32", shift=20)
    assert np.abs(codec.decode(codec.encode(given)) / given - 1).max() < 2.0**-3


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"centroids": text(1, 0)}, "float32"),
        ({"centroids": "AAAA"}, "float32"),
        ({"centroids": "?"}, "float32"),
        ({"centroids": text(0, float("nan"))}, "float32"),
        ({"centroids": text(0, 1), "shift": 3}, "float32"),
        ({"centroids": text(0, 1), "protected": 7}, "float32"),
        ({"shift": 32}, "float32"),
        ({"shift": 1.5}, "float32"),
        ({"shift": 2, "level": 1 << 20}, "float32"),
        ({"shift": 2, "rows": "\\", "width": 4}, "float32"),
        ({"shift": 2, "steps": 4}, "float32"),
        ({"shift": 2}, "float64"),
        ({"precision": "int8"}, "float32"),
        ({"precision": "bfloat16"}, "float64"),
        ({}, "float16"),
    ],
)
def test_settings_without_a_lattice_are_refused(settings: dict[str, Any], dtype: str) -> None:
    with pytest.raises(UsageError):
        Levels(dtype, **settings)


def test_rows_and_columns_of_other_shapes_are_refused() -> None:
    for settings in ({"cols": [1, 2, 3], "width": 2}, {"rows": [1, 2, 3, 4], "width": 6}):
        with pytest.raises(UsageError, match="one number each"):
            Levels("float32", shift=9, **settings).encode(values())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shards", [None, (6, 4)])
def test_plain_zarr_arrays(settings: dict[str, Any], shards: tuple[int, int] | None) -> None:
    store = zarr.storage.MemoryStore()
    whole = np.concatenate([values(), np.zeros((3, 4), "f4"), values() * 2, values() * 3])
    array = zarr.create_array(
        store, shape=whole.shape, chunks=(3, 4), shards=shards, dtype="float32", fill_value=0.0, compressors=None,
        filters=[LevelsCodec.parsed(**settings)], serializer=HuffmanCodec(),
    )  # fmt: skip
    array[:] = whole
    array = zarr.open_array(store, mode="r")
    codec = Levels("float32", **settings)
    for first in (0, 6, 9):
        part = slice(first, first + 3)
        assert np.array_equal(array[part], codec.decode(codec.encode(whole[part])))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="has no steps"):
        LevelsCodec.from_dict({"name": "ckstore.levels", "configuration": {"steps": 1}})
