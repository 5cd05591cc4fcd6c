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
def test_values_come_back_within_half_a_step(dtype, step, seed, shaped):
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=(5, 6)) * 2.0**step * 100).astype(dtype)
    exponents = rng.integers(-3, 4, 6).tolist() if shaped else []
    codec = QuantizedResidual(dtype=dtype, step=step, exponents=exponents)
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


def test_what_is_not_finite_comes_back_as_zero():
    codec = QuantizedResidual(dtype="float64", step=0)
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300])
    assert codec.decode(codec.encode(values)).tolist() == [0.0, 0.0, 0.0, 0.0, 2.0**24]
    assert not np.signbit(codec.decode(codec.encode(values))).any()


def test_configuration_goes_through_json_the_registry_and_repr():
    codec = QuantizedResidual(dtype="float32", step=-7, exponents=[0, 1])
    again = numcodecs.get_codec(json.loads(json.dumps(codec.get_config())))
    assert again == codec
    assert eval(repr(codec)) == codec


@pytest.mark.parametrize("settings", [("int32", 0, ()), ("float32", -127, ()), ("float32", -120, (-10,))])
def test_lattices_that_do_not_exist_are_refused(settings):
    with pytest.raises(UsageError):
        QuantizedResidual(*settings)


def test_rows_of_another_length_are_refused():
    with pytest.raises(UsageError, match="give one for each"):
        QuantizedResidual("float32", 0, [1, 2, 3]).encode(np.zeros((4, 2), "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shards", [None, (8, 12)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_plain_zarr_arrays(dtype, shards, order):
    values = np.asarray(np.random.default_rng(0).normal(size=(16, 12)), dtype, order=order)
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(
        store, shape=values.shape, chunks=(4, 6), shards=shards, dtype=dtype, fill_value=0.0, compressors=None,
        filters=[QuantizedResidualCodec(step=-5, exponents=(0, 1, 0, -1, 2, 0))], serializer=HuffmanCodec(),
    )  # fmt: skip
    array[:] = values
    array = zarr.open_array(store, mode="r")
    codec = QuantizedResidual(dtype, -5, [0, 1, 0, -1, 2, 0] * 2)
    assert np.array_equal(array[:], codec.decode(codec.encode(np.ascontiguousarray(values))))
    assert array[5, 7] == array[:][5, 7]
