"""The quantising codec in numcodecs and in plain Zarr arrays."""

from __future__ import annotations

import json

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.quantized_residual import QuantizedResidual
from ckstore.codecs.zarr_huffman import HuffmanCodec
from ckstore.codecs.zarr_quantized_residual import QuantizedResidualCodec
from ckstore.errors import UsageError


@given(st.sampled_from(["float32", "float64"]), st.integers(-20, 20), st.integers(0, 2**32 - 1), st.booleans())
def test_values_round_trip_within_half_a_step(dtype, step, seed, shaped):
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(5, 6)) * 2.0**step * 100).astype(dtype)
    exponents = rng.integers(-3, 4, 6).tolist() if shaped else []
    codec = QuantizedResidual(dtype=dtype, step=step, cols=exponents)
    integers = codec.encode(values)
    assert integers.dtype == np.int32
    assert integers.shape == values.shape
    decoded = codec.decode(integers)
    assert decoded.dtype == dtype
    half = np.ldexp(0.5, step + np.array(exponents or [0] * 6))
    assert np.all(np.abs(decoded - values) <= half)
    assert np.array_equal(codec.encode(decoded), integers)
    out = np.empty_like(values)
    codec.decode(integers, out=out)
    assert np.array_equal(out, decoded)


def test_bytes_are_taken_as_floats_and_integers():
    codec = QuantizedResidual(dtype="float32", step=-3)
    values = np.array([0.3, -1.0], "float32")
    for buffer in (values.tobytes(), bytearray(values.tobytes())):
        assert codec.encode(buffer).tolist() == [2, -8]
    assert codec.decode(np.array([2, -8], "int32").tobytes()).tolist() == [0.25, -1.0]


def test_non_finite_values_decode_to_zero():
    codec = QuantizedResidual(dtype="float64", step=0)
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300])
    assert codec.decode(codec.encode(values)).tolist() == [0.0, 0.0, 0.0, 0.0, 2.0**24]
    assert not np.signbit(codec.decode(codec.encode(values))).any()


def test_configuration_goes_through_json_the_registry_and_repr():
    codec = QuantizedResidual(dtype="float32", step=-7, rows=[0, 1, -3], cols="PQ", width=2, precision="bfloat16")
    again = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
    assert again == codec
    assert eval(repr(codec)) == codec


@pytest.mark.parametrize(
    "settings",
    [
        ("int32", 0),
        ("float32", -127),
        ("float32", -120, (), (-10,)),
        ("float32", -120, (-4,), (-3,)),
        ("float32", 0, "\\"),
        ("float64", 0, (), (), None, "bfloat16"),
        ("float32", 0, (), (), None, "int8"),
        ("float32", 0, (1 << 15,)),
    ],
)
def test_lattices_that_do_not_exist_are_refused(settings):
    with pytest.raises(UsageError):
        QuantizedResidual(*settings)


def test_rows_of_another_length_are_refused():
    with pytest.raises(UsageError, match="give one for each"):
        QuantizedResidual("float32", 0, cols=[1, 2, 3]).encode(np.zeros((4, 2), "float32"))
    with pytest.raises(UsageError, match="give one for each"):
        QuantizedResidual("float32", 0, [1, 2, 3]).encode(np.zeros((2, 2), "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_and_columns_have_exponents_of_their_own(dtype):
    rows, cols = np.array([0, 3, -2]), np.array([1, -1, 0, 50])
    integers = np.arange(-6, 6, dtype="int32").reshape(3, 4)
    codec = QuantizedResidual(dtype, -5, rows.tolist(), cols.tolist())
    expected = np.ldexp(integers.astype(dtype), -5 + rows[:, None] + cols)
    assert np.array_equal(codec.decode(integers), expected)
    assert np.array_equal(codec.encode(expected), integers)
    assert np.array_equal(numcodecs.get_codec(codec.get_config()).decode(integers), expected)
    # As packs have it: in one axis, the last chunk filled up.
    flat = QuantizedResidual(dtype, -5, rows.tolist(), cols.tolist(), width=4)
    padded = np.concatenate([integers.reshape(-1), np.ones(7, "int32")])
    assert np.array_equal(flat.decode(padded), np.concatenate([expected.reshape(-1), np.zeros(7, dtype)]))


@pytest.mark.parametrize(("precision", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_values_are_rounded_to_a_shorter_dtype(precision, bits):
    codec = QuantizedResidual("float32", 0, precision=precision)
    values = codec.decode(np.array([(1 << bits) + 1, (1 << bits) + 3, -5], "int32"))
    assert values.dtype == np.float32
    assert values.tolist() == [1 << bits, (1 << bits) + 4, -5]
    assert codec.encode(np.array([3.2, -5], "float32")).tolist() == [3, -5]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shards", [None, (8, 12)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_zarr_arrays(dtype, shards, order):
    values = np.asarray(np.random.default_rng(0).normal(size=(16, 12)), dtype, order=order)
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(
        store, shape=values.shape, chunks=(4, 6), shards=shards, dtype=dtype, fill_value=0.0, compressors=None,
        filters=[QuantizedResidualCodec(-5, rows=(0, 0, -1, 0), cols=(0, 1, 0, -1, 2, 0))],
        serializer=HuffmanCodec(),
    )  # fmt: skip
    array[:] = values
    array = zarr.open_array(store, mode="r")
    codec = QuantizedResidual(dtype, -5, [0, 0, -1, 0] * 4, [0, 1, 0, -1, 2, 0] * 2)
    assert np.array_equal(array[:], codec.decode(codec.encode(np.ascontiguousarray(values))))
    assert array[5, 7] == array[:][5, 7]


def test_unknown_settings_are_refused():
    data = {"name": "ckstore.quantized_residual", "configuration": {"step": 0, "exponents": [1]}}
    with pytest.raises(UsageError, match="has no exponents"):
        QuantizedResidualCodec.from_dict(data)
