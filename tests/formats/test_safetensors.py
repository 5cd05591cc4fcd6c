"""safetensors files: files of the reference implementation are read, files that it refuses are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

import ckstore
from ckstore.errors import InputError
from ckstore.formats.detect import parse
from tests.equality import assert_same
from tests.formats.reading import assert_comes_back, bits, in_memory, torch_bits
from tests.formats.test_torch_files import DTYPES, UNTYPED, random_bits

WITHOUT = (torch.complex128,)


def crafted(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype() -> None:
    dtypes = [dtype for dtype in DTYPES + UNTYPED if dtype not in WITHOUT]
    tensors = {f"{dtype}.w/x": random_bits(dtype, 2, 3) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)}
    data = save(tensors, metadata={"format": "pt", "step": "17"})
    layout = assert_comes_back(data)
    assert layout.facts == {"metadata": {"format": "pt", "step": "17"}, "step": 17}
    assert {tensor.path for tensor in layout.tensors} == {(name,) for name in tensors}
    for tensor in layout.tensors:
        value = tensors[str(tensor.path[0])]
        assert tensor.dtype == str(value.dtype).removeprefix("torch.")
        assert tensor.shape == tuple(value.shape)
        np.testing.assert_array_equal(bits(data, layout, tensor), torch_bits(value))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("F4", [4, 3], 6), ("F4", [2, 2, 1], 2), ("F6_E2M3", [4], 3), ("F6_E3M2", [8], 6)]
)
def test_packed_dtypes_are_bytes(dtype: str, shape: list[int], nbytes: int) -> None:
    layout = assert_comes_back(crafted({"a": entry(dtype, shape, 0, nbytes)}, bytes(nbytes)))
    assert (layout.tensors[0].dtype, layout.tensors[0].shape) == ("uint8", (nbytes,))


@pytest.mark.parametrize("data", [crafted({}), crafted({"__metadata__": {}}), crafted({"a": entry("F32", [0], 0, 0)})])
def test_without_data(data: bytes) -> None:
    assert assert_comes_back(data).kind == "safetensors"


@pytest.mark.parametrize(
    "data",
    [
        crafted({"a": entry()}, bytes(3)),
        crafted({"a": entry()}, bytes(5)),
        crafted({"a": entry()}, bytes(4), length=1000),
        crafted({"a": entry(end=8)}, bytes(8)),
        crafted({"a": entry(begin=4, end=8)}, bytes(8)),
        crafted({"a": entry(), "b": entry(begin=2, end=6)}, bytes(6)),
        crafted({"a": entry(), "b": entry()}, bytes(4)),
        crafted({"a": entry(), "b": entry(begin=8, end=12)}, bytes(12)),
        crafted({"a": entry(begin=4, end=0)}, bytes(4)),
        crafted({"a": entry("F99")}, bytes(4)),
        crafted({"a": entry(["F32"])}, bytes(4)),
        crafted({"a": entry(shape=[-1])}, bytes(4)),
        crafted({"a": entry(shape=[1.0])}, bytes(4)),
        crafted({"a": entry(shape=[True])}, bytes(4)),
        crafted({"a": entry(shape=[2**62, 2**62, 0], end=0)} | {"b": entry(shape=[2**64])}, bytes(4)),
        crafted({"a": entry(shape=[1] * 10_000)}, bytes(4)),
        crafted({"a": entry("F4", [3], 0, 1)}, bytes(1)),
        crafted({"a": entry() | {"more": 1}}, bytes(4)),
        crafted({"a": [1]}, bytes(4)),
        crafted({"__metadata__": {"a": 1}}),
        crafted({"__metadata__": []}),
        crafted(b'{"a":1,"a":2}'),
        crafted(b'{"a":' + b"[" * 100_000),
        crafted(b'{"a":' + b"9" * 10_000 + b"}"),
        crafted(b'{"\xff":1}'),
        crafted(b"{]"),
    ],
)
def test_lies_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match=r"x is not a sound safetensors file: .*`force`"):
        parse(in_memory(data), "x")


@pytest.mark.parametrize("data", [b"\0" * 8 + b"{", struct.pack("<Q", 100_000_001) + b"{}", crafted([]), b"\x02"])
def test_other_content_is_opaque(data: bytes) -> None:
    assert parse(in_memory(data)).kind == "opaque"


def test_float4_is_torchs_in_both_directions(tmp_path: Path) -> None:
    packed = random_bits(torch.float4_e2m1fn_x2, 3, 2)
    save_file({"w": packed}, tmp_path / "a.safetensors")
    with ckstore.open(tmp_path / "store", create=True) as store:
        version = store[store.ingest(tmp_path / "a.safetensors", run="a", step=1).version]
        assert (version["w"].dtype_name, version["w"].shape) == ("float4_e2m1fn_x2", (3, 2))
        assert_same(version.state_dict()["w"], packed)
        live = store[store.ingest({"w": packed}, run="b", step=1).version]
        live.checkout(tmp_path / "b.safetensors")
    assert_same(load_file(tmp_path / "b.safetensors")["w"], packed)
