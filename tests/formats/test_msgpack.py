"""MessagePack files as flax writes them: arrays are tensors, all else is in the tree, other files are left alone."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

from ckstore.errors import InputError
from ckstore.formats.containers import msgpack as msgpack_files
from ckstore.formats.detect import holds_tensors, parse
from ckstore.formats.layout import TensorRef, Unknown
from tests.formats.reading import assert_comes_back, bits, in_memory
from tests.formats.written import flax_bytes


def array(shape: Any = (2,), dtype: Any = "float32", data: Any = bytes(8), kind: int = 1) -> bytes:
    """A file with one array, described as told."""
    return bytes(msgpack.packb({"a": msgpack.ExtType(kind, msgpack.packb((shape, dtype, data)))}))


def test_a_train_state() -> None:
    generator = np.random.default_rng(0)
    state = {
        "step": 7,
        "params": {"dense": {"kernel": generator.standard_normal((64, 300), dtype=np.float32), "bias": np.ones(3)}},
        "opt_state": {"0": {"count": np.int32(5), "mu": np.ones((4, 5), ml_dtypes.bfloat16)}, "1": {}},
        "flags": [True, None, -3, -200, 1 << 40, 0.5, "x" * 40, b"raw", 2 + 1j, np.zeros((0, 3), np.int8)],
        "names": {str(number): number for number in range(20)},
    }
    data = flax_bytes(state)
    layout = assert_comes_back(data)
    assert (layout.kind, layout.facts, layout.bytes_for) == ("msgpack", {"step": 7}, {})
    assert holds_tensors(in_memory(data))

    def compare(tree: Any, value: Any) -> None:
        if isinstance(value, np.ndarray | np.generic):
            assert isinstance(tree, TensorRef)
            tensor = layout.tensors[tree.index]
            assert (tensor.dtype, tensor.shape) == (value.dtype.name, value.shape)
            assert bits(data, layout, tensor).tobytes() == value.tobytes()
        elif isinstance(value, dict):
            assert list(tree) == list(value)
            for key in value:
                compare(tree[key], value[key])
        elif isinstance(value, list):
            for one, other in zip(tree, value, strict=True):
                compare(one, other)
        else:
            assert type(tree) is type(value)
            assert tree == value

    compare(layout.tree, state)
    assert [tensor.path for tensor in layout.tensors] == [
        ("params", "dense", "kernel"), ("params", "dense", "bias"), ("opt_state", "0", "count"),
        ("opt_state", "0", "mu"), ("flags", 9),
    ]  # fmt: skip


def test_files_of_flax() -> None:
    flax = pytest.importorskip("flax.serialization")
    state = {"a": np.arange(6.0).reshape(2, 3), "b": {"c": 1 + 2j, "n": np.float32(3)}, "step": 5}
    assert flax.msgpack_serialize(state) == flax_bytes(state)


def test_large_text_and_unknown_arrays_stay_bytes() -> None:
    noise = np.random.default_rng(0).integers(0, 255, 70_000, np.uint8).tobytes()
    inner = msgpack.packb(((70_000,), "int4", noise))
    data = bytes(msgpack.packb({
        "w": msgpack.ExtType(1, msgpack.packb(((2,), "float32", bytes(8)))),
        "q": msgpack.ExtType(1, inner), "raw": noise, "text": "x" * 70_000, "other": msgpack.ExtType(9, b"abc"),
    }))  # fmt: skip
    layout = assert_comes_back(data)
    assert layout.bytes_for == {"q": "dtype int4"}
    assert [extent.path for extent in layout.extents] == [("w",), ("q",), ("raw", "__bytes__"), ("text", "__bytes__")]
    assert layout.tree == {
        "w": TensorRef(0), "q": Unknown("msgpack.ndarray"), "raw": Unknown("msgpack.bin"),
        "text": Unknown("msgpack.str"), "other": Unknown("msgpack.ext.9"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"a": [1, 2, {"b": "c"}]}),
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({b"a": 1}),
        b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0",
        b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\xc0" * 2000,
        b"\x81\xa1a\xc1",
        b"\x81\xa1\xff\xc0",
        b"\x8f" + b"\xbf" * 100,
        b"\x81\xc4\x01a\xc0",
        array(kind=7),
        msgpack.packb({"a": msgpack.ExtType(1, b"\x93\x91")}),
        msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb([1]))}),
        msgpack.packb({"a": msgpack.ExtType(2, msgpack.packb([1]))}),
        array(shape=3),
        array(shape=[-1]),
        array(shape=[True]),
        array(shape=[1] * 65),
        array(dtype=3),
        array(data="text"),
    ],
)
def test_other_files_are_opaque(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack_files, "_MAX_VALUES", 1000)
    assert assert_comes_back(bytes(data)).kind == "opaque"
    assert not holds_tensors(in_memory(bytes(data)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (array()[:-1], "the file ends within a value"),
        (array() + b"\0", "it continues after its end"),
        (array(shape=[3]), "an array has another size than its shape and dtype"),
        (array(shape=[1 << 62, 1 << 62, 1 << 62, 4]), "an array has another size"),
        (b"\x82\xa1b" + array()[3:] + b"\xa1b\xc0", "a key of a map is neither text nor a number, or occurs twice"),
        (b"\x82\xa1b" + array()[3:] + b"\xc0\xc0", "a key of a map"),
        (b"\x82\xa1b" + array()[3:] + b"\xa1a" + b"\x91" * 200, "it is nested implausibly deep"),
    ],
)
def test_damaged_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=f"not a sound msgpack file: {words}"):
        parse(in_memory(data))
    assert holds_tensors(in_memory(data))


def test_an_extension_of_another_length_is_refused() -> None:
    data = bytearray(array())
    place = data.index(b"\xc7") + 1
    assert struct.unpack_from(">B", data, place)[0] == len(data) - place - 2
    data[place] -= 1
    with pytest.raises(InputError, match="an array and its extension have different ends"):
        parse(in_memory(bytes(data)))
