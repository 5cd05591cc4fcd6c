"""Programs of `torch.export.save`: weights and constants are tensors under their names; lies about them are bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckstore.formats.detect import parse
from tests.formats.reading import assert_comes_back, bits, in_memory, torch_bits, zipped

FLOAT = 7


def meta(sizes: Any, strides: Any, dtype: Any = FLOAT, offset: Any = 0, **others: Any) -> dict[str, Any]:
    said = {name: [{"as_int": size} for size in part] for name, part in (("sizes", sizes), ("strides", strides))}
    return {"dtype": dtype, "storage_offset": {"as_int": offset}, "layout": 7} | said | others


def weight(*args: Any, path_name: str = "weight_0", **others: Any) -> dict[str, Any]:
    return {"path_name": path_name, "use_pickle": False, "tensor_meta": meta(*args, **others)}


def program(config: Any, data: bytes = bytes(24), byteorder: bytes = b"little") -> bytes:
    return zipped({
        "m/archive_format": b"pt2", "m/byteorder": byteorder, "m/models/model.json": b"{}",
        "m/data/weights/model_weights_config.json": json.dumps({"config": config}).encode(),
        "m/data/weights/weight_0": data,
    })  # fmt: skip


@pytest.mark.skipif(find_spec("torch.export.pt2_archive") is None, reason="an earlier torch writes another archive")
@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.export.save(torch.export.export(model.eval(), (torch.ones(2, 3),)), tmp_path / "m.pt2")
    data = (tmp_path / "m.pt2").read_bytes()
    layout = assert_comes_back(data)
    tensors = {str(one.path[0]): one for one in layout.tensors}
    state = model.state_dict()
    assert state.keys() <= tensors.keys()
    for name, value in state.items():
        assert torch_bits(value).tobytes() == bits(data, layout, tensors[name]).tobytes()


def test_tied_and_strided_weights_share_an_entry() -> None:
    layout = assert_comes_back(program({"a": weight((2, 3), (3, 1)), "b.c": weight((3, 2), (1, 3))}))
    assert [(one.path, one.shape, one.strides, one.extent) for one in layout.tensors] == [
        (("a",), (2, 3), (3, 1), 0), (("b.c",), (3, 2), (1, 3), 0),
    ]  # fmt: skip


def test_a_large_description_is_in_the_skeleton() -> None:
    config = {"a": weight((2, 3), (3, 1))} | {f"{number}": "x" * 1000 for number in range(100)}
    layout = assert_comes_back(program(config))
    assert [extent.path for extent in layout.extents] == [("a",)]


@pytest.mark.parametrize(
    "config",
    [
        {"a": weight((7,), (1,))},
        {"a": weight((2,), (1,), offset=5)},
        {"a": weight((2,), (2**62,))},
        {"a": weight((-1,), (1,))},
        {"a": weight((2,), (-1,))},
        {"a": weight((2,), ())},
        {"a": weight((1,) * 65, (1,) * 65)},
        {"a": weight((2.0,), (1,))},
        {"a": weight((2,), (1,), dtype=99)},
        {"a": weight((2,), (1,), dtype=[1])},
        {"a": weight((2,), (1,), layout=2)},
        {"a": weight((2,), (1,), path_name="../weight_0")},
        {"a": weight((2,), (1,), path_name="model_weights_config.json")},
        {"a": weight((2,), (1,)) | {"use_pickle": True}},
        {"m/data/weights/weight_0": weight((2,), (1,))},
        {"a": weight((2,), (1,)) | {"tensor_meta": 1}},
        {"a": 1, "b": None, "c": "path_name", "d": ["path_name"]},
        ["a"],
    ],
)
def test_lies_are_bytes(config: Any) -> None:
    assert not parse(in_memory(program(config))).tensors


def test_big_endian_programs_are_bytes() -> None:
    assert not parse(in_memory(program({"a": weight((2,), (1,))}, byteorder=b"big"))).tensors
