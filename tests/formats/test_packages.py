"""Archives of `torch.package`: the tensors of their pickles are tensors; damaged archives are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.package import PackageExporter

from ckstore.errors import InputError
from ckstore.formats.detect import parse
from tests.formats.reading import assert_comes_back, bits, in_memory, torch_bits, unzipped, zipped

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def package(path: Path, **values: Any) -> bytes:
    with PackageExporter(str(path)) as exporter:
        exporter.extern("torch.**")
        for name, value in values.items():
            exporter.save_pickle("models", f"{name}.pkl", value)
        exporter.save_text("models", "notes.txt", "x" * 100_000)
    return path.read_bytes()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    weight = torch.arange(6.0)
    model = torch.nn.Linear(3, 2)
    return package(tmp_path_factory.mktemp("package") / "p.pt", a={"w": weight, "t": weight[2:]}, b=model)


def test_tensors_are_named_after_their_pickle(data: bytes) -> None:
    layout = assert_comes_back(data)
    tensors = {one.path: one for one in layout.tensors}
    assert set(tensors) == {("models/a", "w"), ("models/a", "t"), ("models/b", "weight"), ("models/b", "bias")}
    assert tensors["models/a", "w"].extent == tensors["models/a", "t"].extent
    found = bits(data, layout, tensors["models/a", "w"])
    assert found.tobytes() == torch_bits(torch.arange(6.0)).tobytes()
    assert [extent.count for extent in layout.extents if extent.path[0] == "__entry__"] == [100_000]


def test_a_pickle_that_is_not_readable_stays_bytes(data: bytes) -> None:
    entries = unzipped(data)
    broken = next(name for name in entries if name.endswith("b.pkl"))
    layout = assert_comes_back(zipped(entries | {broken: b"\x80\x03Q."}))
    assert {one.path[0] for one in layout.tensors} == {"models/a"}


@pytest.mark.parametrize("change", ["missing", "short", "long"])
def test_lies_about_storages_are_refused(data: bytes, change: str) -> None:
    entries = unzipped(data)
    name = next(name for name in entries if name.endswith("/0.storage"))
    storage = entries.pop(name)
    if change != "missing":
        entries[name] = storage[:-4] if change == "short" else storage + bytes(4)
    with pytest.raises(InputError, match="storage '0'"):
        parse(in_memory(zipped(entries)), "x")


def test_other_archives_with_its_marker_are_bytes() -> None:
    for others in ({}, {"p/a.pkl": pickle.dumps({"a": 1}, 2)}, {"other": b"x"}):
        assert not parse(in_memory(zipped({"p/.data/extern_modules": b"", **others}))).tensors
