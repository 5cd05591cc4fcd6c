from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import zarr
from zarr.registry import register_codec

from ckstore.codecs.integers import encode_integers
from ckstore.codecs.zarr_huffman import HuffmanCodec
from ckstore.errors import IntegrityError, UsageError

register_codec("ckstore.huffman", HuffmanCodec)


def sample(dtype, shape):
    rng = np.random.default_rng(3)
    values = rng.poisson(0.4, shape).astype(dtype)
    values.flat[:3] = np.iinfo(dtype).max, np.iinfo(dtype).min, 1
    return values


@pytest.mark.parametrize("shards", [None, (32, 64)])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_arrays_read_back_after_opening_them_again(dtype, shards):
    store = zarr.storage.MemoryStore()
    values = sample(dtype, (50, 100))
    array = zarr.create_array(
        store,
        shape=values.shape,
        chunks=(16, 32),
        shards=shards,
        dtype=dtype,
        serializer=HuffmanCodec(),
        compressors=None,
    )
    array[:] = values
    again = zarr.open_array(store, mode="r")
    codecs = again.metadata.to_dict()["codecs"]
    innermost = codecs[0]["configuration"]["codecs"][0] if shards else codecs[0]
    assert innermost == {"name": "ckstore.huffman", "configuration": {}}
    assert (again[:] == values).all()
    assert (again[17, 3:90] == values[17, 3:90]).all()


@pytest.mark.parametrize("dtype", [">i4", ">u2"])
def test_big_endian_arrays_read_back(dtype):
    store = zarr.storage.MemoryStore()
    values = np.arange(100, dtype=dtype)
    array = zarr.create_array(store, shape=100, chunks=30, dtype=dtype, serializer=HuffmanCodec(), compressors=None)
    array[:] = values
    assert (array[:] == values).all()


def test_transposed_chunks_read_back():
    store = zarr.storage.MemoryStore()
    values = sample("int32", (40, 60))
    array = zarr.create_array(
        store, shape=values.shape, chunks=(20, 20), dtype="int32", serializer=HuffmanCodec(), compressors=None,
        filters=[zarr.codecs.TransposeCodec(order=(1, 0))],
    )  # fmt: skip
    array[:] = np.asfortranarray(values)
    assert (zarr.open_array(store, mode="r")[:] == values).all()


def test_a_chunk_is_a_plain_payload():
    store = zarr.storage.MemoryStore()
    values = np.arange(24, dtype=np.int32).reshape(4, 6)
    array = zarr.create_array(
        store, shape=(4, 6), chunks=(4, 6), dtype="int32", serializer=HuffmanCodec(), compressors=None
    )
    array[:] = values
    assert store._store_dict["c/0/0"].to_bytes() == encode_integers(values.reshape(-1))


def test_a_damaged_chunk_raises():
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(
        store, shape=1000, chunks=1000, dtype="int16", serializer=HuffmanCodec(), compressors=None
    )
    array[:] = np.arange(1000)
    data = bytearray(store._store_dict["c/0"].to_bytes())
    data[-20] ^= 1
    store._store_dict["c/0"] = zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(bytes(data))
    with pytest.raises(IntegrityError):
        array[:]


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_other_dtypes_are_refused(dtype):
    array = zarr.create_array({}, shape=10, chunks=10, dtype=dtype, serializer=HuffmanCodec(), compressors=None)
    with pytest.raises(UsageError):
        array[:] = 1


def test_metadata_goes_through_its_dictionary():
    codec = HuffmanCodec()
    assert HuffmanCodec.from_dict(codec.to_dict()) == codec
    assert HuffmanCodec.from_dict({"name": "ckstore.huffman"}) == codec


def test_only_the_zarr_codec_imports_zarr_and_coding_imports_kernels():
    program = (
        "import sys, ckstore.codecs.integers, ckstore.codecs.huffman;"
        "assert 'zarr' not in sys.modules and 'ckstore.kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
