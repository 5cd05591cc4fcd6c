from __future__ import annotations

import json

import numcodecs
import numpy as np
import pytest
from numcodecs.registry import get_codec, register_codec

from ckstore.codecs.huffman import Huffman
from ckstore.codecs.integers import encode_integers
from ckstore.errors import IntegrityError, UsageError

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def arrays(dtype):
    rng = np.random.default_rng(1)
    info = np.iinfo(dtype)
    yield rng.integers(info.min, info.max, 1000, dtype=dtype, endpoint=True)
    yield rng.poisson(2, 5000).astype(dtype)
    yield np.zeros((10, 20, 3), dtype)
    yield rng.poisson(0.1, (40, 50)).astype(dtype)
    yield np.asfortranarray(rng.poisson(1, (40, 50)).astype(dtype))
    yield np.empty(0, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(dtype):
    codec = Huffman(dtype=dtype)
    for array in arrays(dtype):
        flat = array.reshape(-1, order="A")
        payload = codec.encode(array)
        assert isinstance(payload, bytes)
        for buffer in (flat.tobytes(), bytearray(flat.tobytes()), memoryview(flat.tobytes())):
            assert codec.encode(buffer) == payload
        for kind in (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)):
            decoded = codec.decode(kind(payload))
            assert decoded.dtype == dtype
            assert (decoded == flat).all()
        out = np.empty_like(array)
        assert codec.decode(payload, out=out) is not None
        assert (out == array).all()
        out_bytes = bytearray(array.nbytes)
        codec.decode(payload, out=out_bytes)
        assert out_bytes == flat.tobytes()


def test_config_goes_through_json_and_the_registry():
    register_codec(Huffman)
    codec = Huffman(dtype="<i4")
    config = json.loads(json.dumps(codec.get_config()))
    assert config == {"id": "ckstore.huffman", "dtype": "int32"}
    assert get_codec(config) == codec
    assert Huffman.from_config({"dtype": "int32"}) == codec


def test_repr_evaluates_back():
    codec = Huffman(dtype="uint16")
    assert repr(codec) == "Huffman(dtype='uint16')"
    assert eval(repr(codec)) == codec
    assert isinstance(codec, numcodecs.abc.Codec)


@pytest.mark.parametrize("dtype", ["float32", ">i4", "bool", "S4"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UsageError):
        Huffman(dtype=dtype)


def test_other_elements_are_refused():
    codec = Huffman(dtype="int32")
    with pytest.raises(UsageError):
        codec.encode(np.zeros(4, np.float32))
    with pytest.raises(UsageError):
        codec.encode(b"abc")
    payload = codec.encode(np.arange(8, dtype=np.int32))
    with pytest.raises(IntegrityError, match="integers of 4 bytes"):
        Huffman(dtype="int16").decode(payload)
    with pytest.raises(IntegrityError, match="output"):
        codec.decode(payload, out=np.empty(7, np.int32))
    with pytest.raises(IntegrityError):
        codec.decode(payload[:-1])


def test_a_stated_size_is_not_allocated_blindly():
    payload = bytes((1, 0)) + bytes(4) + bytes((128 + 40,)) + b"x"
    with pytest.raises(IntegrityError, match="2 GiB"):
        Huffman(dtype="int8").decode(payload)


def test_a_payload_with_classes_decodes_to_coded_order():
    rng = np.random.default_rng(2)
    values = rng.integers(-9, 9, 2000).astype(np.int32)
    classes = rng.integers(0, 5, 2000).astype(np.uint8)
    decoded = Huffman(dtype="int32").decode(encode_integers(values, classes))
    assert (decoded == values[np.argsort(classes, kind="stable")]).all()
