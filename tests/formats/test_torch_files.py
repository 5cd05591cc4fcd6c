"""Files that torch writes: every kind of tensor, container and layout, as a zip and as a legacy stream."""

from __future__ import annotations

import argparse
import io
import pickle
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from ckstore.errors import InputError
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout, TensorRef, Unknown
from ckstore.formats.paths import path_to_text
from tests.formats.reading import assert_comes_back, assert_tree_equals, in_memory, saved, unzipped, zipped

LEGACY = {"_use_new_zipfile_serialization": False}
both = pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
UNTYPED = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def check(value: Any, options: dict[str, Any]) -> FileLayout:
    """Save, take apart, put together, compare every tensor with torch's reading."""
    data = saved(value, **options)
    layout = assert_comes_back(data)
    assert layout.kind == ("torch-legacy" if "_use_new_zipfile_serialization" in options else "torch-zip")
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert assert_tree_equals(data, layout, layout.tree, loaded) == len(layout.tensors)
    return layout


@both
def test_every_dtype(options: dict[str, Any]) -> None:
    dtypes = DTYPES if options else DTYPES + UNTYPED
    layout = check({str(dtype): random_bits(dtype, 3, 5) for dtype in dtypes}, options)
    assert {extent.path[0]: extent.dtype for extent in layout.extents} == {
        str(dtype): str(dtype).removeprefix("torch.") for dtype in dtypes
    }
    assert {extent.shape for extent in layout.extents} == {(3, 5)}


_FLAT, _BASE, _SMALL = torch.randn(100), torch.randn(8, 6), torch.randn(24)
#: Tensors, and the paths and shapes of the extents that their storages are cut into.
CUTS: dict[str, tuple[dict[str, torch.Tensor], list[tuple[Any, tuple[int, ...]]]]] = {
    "shapes": (
        {
            "scalar": torch.tensor(1.5), "one": torch.tensor([2.5]), "empty": torch.empty(0),
            "hollow": torch.empty(3, 0, 2), "thin": torch.randn(1, 4, 1),
        },
        [(("scalar",), ()), (("one",), (1,)), (("thin",), (1, 4, 1))],
    ),
    "tensors of a flat storage": (
        {"a": _FLAT[10:22].view(3, 4), "b": _FLAT[22:30], "c": _FLAT[60:90].view(5, 6)},
        [
            (("a", "__rest__", 0), (10,)), (("a",), (3, 4)), (("b",), (8,)), (("a", "__rest__", 1), (30,)),
            (("c",), (5, 6)), (("a", "__rest__", 2), (10,)),
        ],
    ),
    "strided views": (
        {"columns": _BASE[:, ::2], "rows": _BASE[1::3], "window": _BASE[2:5, 1:4]}, [(("columns",), (48,))],
    ),
    "permuted tensors": (
        {
            "fortran": torch.randn(3, 5).t(), "transposed_row": torch.randn(1, 5).t(),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
        [(("fortran",), (3, 5)), (("transposed_row",), (5, 1)), (("channels_last",), (2, 4, 5, 3))],
    ),
    "expanded": (
        {"x": torch.randn(3, 1).expand(3, 4), "y": torch.tensor(2.0).expand(5, 5)}, [(("x",), (3,)), (("y",), (1,))],
    ),
    "a small view of a big storage": (
        {"x": torch.randn(100_000)[500:510]},
        [(("x", "__rest__", 0), (500,)), (("x",), (10,)), (("x", "__rest__", 1), (99_490,))],
    ),
    "tied tensors": ({"embedding": _BASE, "head": _BASE, "view": _BASE.detach()}, [(("embedding",), (8, 6))]),
    "parameters": (
        {"p": torch.nn.Parameter(torch.randn(3, 2)), "buffer": torch.nn.Buffer(torch.ones(2))},
        [(("p",), (3, 2)), (("buffer",), (2,))],
    ),
    "a view around others": ({"part": _SMALL[4:8], "whole": _SMALL.view(4, 6)}, [(("whole",), (4, 6))]),
}  # fmt: skip


@both
@pytest.mark.parametrize("kind", CUTS)
def test_storages_are_cut_into_extents(kind: str, options: dict[str, Any]) -> None:
    value, extents = CUTS[kind]
    layout = check(value, options)
    assert sorted((extent.path, extent.shape) for extent in layout.extents) == sorted(extents)
    assert [tensor.extent < 0 for tensor in layout.tensors] == [0 in one.shape for one in value.values()]
    assert [tensor.strides for tensor in layout.tensors] == [one.stride() for one in value.values()]


@both
def test_nested_containers(options: dict[str, Any]) -> None:
    value = {
        "list": [torch.randn(2), {"deep": (torch.randn(3), None, True)}],
        "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}, -7: torch.ones(1)},
        "ordered": OrderedDict(a=torch.ones(2), b=1),
        "plain": [1, -1, 2**40, -(2**70), 1.5, "text ü \ud800", b"\x00\xff", None, False, 1 + 2j, {1, 2}],
        "size": torch.Size([1, 2]),
    }
    check(value, options)


@both
def test_names_that_must_not_collide(options: dict[str, Any]) -> None:
    value = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.zeros(1)},
        "a/b": torch.zeros(1),
        1: torch.zeros(1),
        "1": torch.zeros(1),
        "[1]": torch.zeros(1),
        2.5: torch.zeros(1),
        "2.5": torch.zeros(1),
        None: torch.zeros(1),
        "None": torch.zeros(1),
        "": torch.zeros(1),
    }
    layout = check(value, options)
    texts = [path_to_text(tensor.path) for tensor in layout.tensors]
    assert len(set(texts)) == len(value)
    assert not any(other.startswith(f"{text}/") for text in texts for other in texts)


@both
def test_a_tensor_alone(options: dict[str, Any]) -> None:
    layout = check(torch.randn(3), options)
    assert layout.tensors[0].path == ("tensor",)


class Marked(torch.Tensor):
    def __init__(self, data: torch.Tensor) -> None:
        self.mark = "lost with the type"


@both
def test_attributes_of_tensors_and_subclasses(options: dict[str, Any]) -> None:
    tensor = torch.nn.Parameter(torch.randn(3))
    tensor.mark = "kept by torch"  # type: ignore[attr-defined]
    data = saved({"x": tensor, "y": Marked(torch.ones(2))}, **options)
    layout = assert_comes_back(data)
    assert layout.tree == {"x": Unknown("torch.Tensor", (TensorRef(0),), {"mark": "kept by torch"}), "y": TensorRef(1)}


@both
def test_whole_model(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.LSTM(4, 3, 2), torch.nn.Linear(2, 2, bias=False)
    )
    data = saved({"model": model, "epoch": 7}, **options)
    layout = assert_comes_back(data)
    assert layout.facts == {"epoch": 7}
    found = {path_to_text(tensor.path): tensor for tensor in layout.tensors}
    state = model.state_dict()
    assert set(found) >= {"model/" + name.replace(".", "/") for name in state}
    for name, value in state.items():
        tensor = found["model/" + name.replace(".", "/")]
        assert_tree_equals(data, layout, TensorRef(layout.tensors.index(tensor)), value)
    assert isinstance(layout.tree["model"], Unknown)


@both
def test_unknown_classes(options: dict[str, Any]) -> None:
    namespace = argparse.Namespace(lr=0.1, mean=torch.ones(3))
    value = {
        "args": namespace,
        "numpy": np.arange(5),
        "scalar": np.float64(2.5),
        "defaults": defaultdict(list, a=torch.ones(2)),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "range": slice(1, 2),
        "bytes": bytearray(b"abc"),
    }
    layout = assert_comes_back(saved(value, **options))
    assert [path_to_text(tensor.path) for tensor in layout.tensors] == ["args/mean", "defaults/a"]
    tree = layout.tree
    assert tree["args"].name == "argparse.Namespace"
    assert tree["args"].state == {"lr": 0.1, "mean": TensorRef(0)}
    assert tree["numpy"].state[4] == np.arange(5).tobytes()
    assert tree["device"] == Unknown("torch.device", ("cpu",))
    assert tree["dtype"] == Unknown("torch.float16", None)
    assert tree["defaults"] == {"a": TensorRef(1)}


@both
def test_parameters_as_keys(options: dict[str, Any]) -> None:
    """Old optimisers kept their state under the parameters themselves."""
    parameter = torch.nn.Parameter(torch.ones(2))
    layout = assert_comes_back(saved({"state": {parameter: {"m": torch.zeros(2)}, (1, "a"): torch.ones(1)}}, **options))
    assert layout.tree["state"].name == "builtins.dict"
    assert len(layout.tensors) == 3


@both
def test_shared_and_cyclic_containers(options: dict[str, Any]) -> None:
    shared = {"w": torch.ones(2)}
    cycle: dict[str, Any] = {"a": shared, "b": shared}
    cycle["self"] = cycle
    layout = assert_comes_back(saved(cycle, **options))
    assert layout.tree == {"a": {"w": TensorRef(0)}, "b": {"w": TensorRef(1)}, "self": Unknown("ckstore.cycle")}
    assert layout.tensors[0].extent == layout.tensors[1].extent == 0


def test_views_of_other_dtypes() -> None:
    """torch refuses to save these in typed storages; untyped ones hold any view."""
    raw = torch.arange(16, dtype=torch.uint8)
    half = raw.view(torch.uint16)
    wide = raw.view(torch.uint32)
    layout = assert_comes_back(saved({"half": half, "eight": raw.view(torch.float8_e5m2), "wide": wide}))
    assert [tensor.path for tensor in layout.tensors] == [("half",)]
    assert layout.tree["eight"] == Unknown("torch.Tensor.view")
    assert [(extent.dtype, extent.shape) for extent in layout.extents] == [("uint16", (8,))]


def test_lost_views_in_shared_containers() -> None:
    """Renumbering the tensors visits a shared container once."""
    raw = torch.arange(4, dtype=torch.uint8)
    bomb: Any = ("x",)
    for _ in range(60):
        bomb = (bomb, bomb)
    data = saved({"a": raw.view(torch.uint16), "b": raw.view(torch.uint32), "bomb": bomb})
    assert len(parse(in_memory(data)).tensors) == 1


def test_names_like_those_of_rests() -> None:
    target = io.BytesIO(saved({"__storage__": {"9": torch.ones(2)}}))
    with zipfile.ZipFile(target, "a") as archive:
        archive.writestr("archive/data/9", b"abcd")
    layout = assert_comes_back(target.getvalue())
    assert {extent.path for extent in layout.extents} == {("__storage__", "9"), ("__storage__", "9", "~2")}


def test_quantised_and_sparse() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    layout = assert_comes_back(saved({"q": quantised, "s": sparse}))
    assert [tensor.dtype for tensor in layout.tensors] == ["int8", "int64", "float32"]
    assert layout.tree["q"].name == "torch._utils._rebuild_qtensor"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@both
def test_pickle_protocols(options: dict[str, Any], protocol: int) -> None:
    value = {"a": torch.ones(3), "b": {"c": [1, (2, 3), "x" * 300, b"y" * 300]}}
    options = {**options, "pickle_protocol": protocol}
    if protocol == 2:
        check(value, options)
        return
    data = saved(value, **options)
    layout = assert_comes_back(data)
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert assert_tree_equals(data, layout, layout.tree, loaded) == 1


def test_entries_that_the_pickle_does_not_know() -> None:
    entries = unzipped(saved({"a": torch.ones(3)}))
    others = {"archive/data/17": b"x" * 100, "archive/extra/notes": b"y" * 70_000}
    layout = assert_comes_back(zipped(entries | others))
    assert {extent.path for extent in layout.extents} == {
        ("a",),
        ("__storage__", "17"),
        ("__entry__", "archive/extra/notes"),
    }


def test_trailing_bytes_of_a_legacy_stream() -> None:
    data = saved({"a": torch.ones(3)}, **LEGACY)
    assert len(assert_comes_back(data + b"x" * 100).extents) == 1
    assert assert_comes_back(data + b"x" * 100_000).extents[1].path == ("__trailer__",)


def test_legacy_pickle_longer_than_the_first_read() -> None:
    value = {f"key{index}": torch.ones(1) for index in range(3000)} | {"text": "x" * 400_000}
    check(value, LEGACY)


def test_torchscript_is_opaque() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), buffer)
    assert assert_comes_back(buffer.getvalue()).kind == "opaque"


def test_other_archives_are_opaque() -> None:
    texts = zipped({"a.txt": bytes(300)})
    deflated = zipped({"archive/data.pkl": pickle.dumps({}, 2)}, zipfile.ZIP_DEFLATED)
    for data in (texts, deflated, texts[:200], b"PK\x03\x04"):
        assert assert_comes_back(data).kind == "opaque"


@pytest.mark.parametrize("content", [b"", b"x", b"{}", pickle.dumps({"a": 1}, 2), bytes(70_000), b"x" * 65_535])
def test_opaque_files(content: bytes) -> None:
    layout = assert_comes_back(content)
    assert layout.kind == "opaque"
    assert not layout.tensors
    assert [extent.nbytes for extent in layout.extents] == ([len(content)] if len(content) >= 65_536 else [])


def test_big_endian_files_are_opaque() -> None:
    data = zipped(unzipped(saved({"a": torch.ones(3)})) | {"archive/byteorder": b"big"})
    assert parse(in_memory(data)).kind == "opaque"
    legacy = saved({"a": torch.ones(3)}, **LEGACY)
    assert legacy.count(b"little_endian") == 1
    place = legacy.index(b"\x88", legacy.index(b"little_endian"))
    assert parse(in_memory(legacy[:place] + b"\x89" + legacy[place + 1 :])).kind == "opaque"


def test_wrong_crc_of_the_pickle_is_refused() -> None:
    data = bytearray(saved({"name": torch.ones(3)}))
    data[data.index(b"name")] ^= 1
    with pytest.raises(InputError, match=r"x\.pt .*CRC of archive/data\.pkl is wrong.*`force`"):
        parse(in_memory(bytes(data)), "x.pt")


def test_facts() -> None:
    assert parse(in_memory(saved({"epoch": 3, "global_step": 70, "step": 9}))).facts == {"step": 70, "epoch": 3}
    assert parse(in_memory(saved({"epoch": torch.tensor(3), "step": True, "iter": 5}))).facts == {"step": 5}
    assert parse(in_memory(saved([1, 2]))).facts == {}


def test_archives_one_behind_another() -> None:
    """One `torch.save` behind another is no damaged file."""
    one, other = saved({"a": torch.ones(3)}), saved(torch.arange(4))
    layout = assert_comes_back(one + other + saved("text"))
    assert (layout.kind, layout.tree) == ("dcp", [{"a": TensorRef(0)}, TensorRef(1), "text"])
    assert [tensor.path for tensor in layout.tensors] == [(0, "a"), (1,)]
    for data in (one + one[:-30], one[:300] + one[340:], one[:300] + bytes(40) + one[300:]):
        with pytest.raises(InputError, match="not a sound torch-zip file"):
            parse(in_memory(data))
    damaged = one + one[:200] + bytes([one[200] ^ 1]) + one[201:] + other
    with pytest.raises(InputError, match="not a sound dcp file"):
        parse(in_memory(damaged))
    layout = assert_comes_back(one + zipped({"notes": b"text"}))
    assert layout.kind == "opaque"
    assert layout.bytes_for == {"": "consecutive archives, not all written by torch"}


def test_a_file_of_freed_memory_is_told() -> None:
    freed = torch.arange(1000.0)
    freed.untyped_storage().resize_(0)
    file = io.BytesIO()
    torch.save({"freed": freed}, file)
    with pytest.raises(InputError, match="the memory of storage '0' was freed before it was saved"):
        parse(in_memory(file.getvalue()), "freed.pt")
