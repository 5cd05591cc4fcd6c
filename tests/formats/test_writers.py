"""Written files: torch, safetensors and NumPy read them, and they are parsed as they were planned."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file

from ckstore.dtypes import NATIVE
from ckstore.errors import InputError, UsageError
from ckstore.formats.detect import parse
from ckstore.formats.flat_writers import write_npz, write_safetensors
from ckstore.formats.layout import Extent, FileLayout, Tensor, TensorRef, Unknown
from ckstore.formats.sources import CompositeSource
from ckstore.formats.torch.zip_writer import plan_torch, write_torch
from ckstore.formats.trees import plain_tree, select_tensors, tensor_numbers
from tests.equality import assert_same
from tests.formats.reading import assert_comes_back, assert_tree_equals, bits, in_memory, saved, torch_bits
from tests.formats.test_torch_files import DTYPES, UNTYPED, random_bits


def reader(data: bytes, layout: FileLayout) -> Callable[[int], Iterator[bytes]]:
    """Hands out extents in pieces that end in the middle of elements."""

    def read(number: int) -> Iterator[bytes]:
        extent = layout.extents[number]
        for start in range(extent.start, extent.stop, 13):
            yield data[start : min(start + 13, extent.stop)]

    return read


def rewritten(data: bytes, tree: Any = None) -> bytes:
    layout = parse(in_memory(data))
    out = io.BytesIO()
    size = write_torch(out, layout.tree if tree is None else tree, layout.tensors, layout.extents, reader(data, layout))
    written = out.getvalue()
    assert size == len(written)
    assert_comes_back(written)
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        assert archive.testzip() is None
    return written


def test_torch_files_load_with_weights_only() -> None:
    flat = torch.randn(40)
    value = {
        "dtypes": [random_bits(dtype, 2, 3) for dtype in DTYPES + UNTYPED],
        "empties": [torch.empty(0, 2, dtype=dtype) for dtype in DTYPES + UNTYPED],
        "scalar": torch.tensor(2.5),
        "tied": [flat, flat],
        "views": {"a": flat[3:9], "b": flat.view(8, 5).t(), "c": flat[::3]},
        "state": {0: {"step": torch.tensor(1.0)}, "x": {1, 2, "a"}},
        "plain": [1, -1, 300, 70_000, 2**40, -(2**70), 1.5, "ü\ud800", b"\x00\xff", None, True, 1j, (), (1,), []],
    }
    data = rewritten(saved(value))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert_same(loaded, value)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert loaded["views"]["a"].data_ptr() == loaded["tied"][0].data_ptr() + 12


def test_torch_files_load_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    value = {"a": torch.randn(1000), "b": torch.randn(3, 4)}
    path.write_bytes(rewritten(saved(value)))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert_same(loaded, value)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())


def test_unknown_classes_become_plain() -> None:
    class_free = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    data = rewritten(saved({"model": class_free, "epoch": 1, "dtype": torch.float16}))
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert_same(loaded["model"], dict(class_free.state_dict()))
    assert loaded["dtype"] == {"__class__": "torch.float16"}
    assert loaded["epoch"] == 1


def test_plain_tree() -> None:
    tree = {"o": Unknown("m.C", (1,), {"a": Unknown("m.D")}, ((1, 2),)), "s": {1}}
    assert plain_tree(tree) == {
        "o": {"__class__": "m.C", "args": (1,), "state": {"a": {"__class__": "m.D"}}, "items": ((1, 2),)},
        "s": {1},
    }


def test_selected_tensors() -> None:
    tree = {
        "a": TensorRef(0),
        "b": [TensorRef(1), 5, TensorRef(2)],
        "c": {"d": TensorRef(3), "e": 1},
        "f": {"g": 2},
        "h": Unknown("m.C", state={"i": TensorRef(4)}),
        "j": (TensorRef(5),),
    }
    assert select_tensors(tree, {2}) == {"b": [None, 5, TensorRef(2)], "f": {"g": 2}}
    assert select_tensors(tree, {3, 4}) == {
        "c": {"d": TensorRef(3), "e": 1},
        "f": {"g": 2},
        "h": Unknown("m.C", state={"i": TensorRef(4)}),
    }
    assert select_tensors(tree, range(6)) == tree
    assert select_tensors(tree, ()) is None
    assert list(tensor_numbers(tree)) == [0, 1, 2, 3, 4, 5]
    value = {"a": torch.ones(2), "b": torch.zeros(3), "step": 4}
    data = saved(value)
    layout = parse(in_memory(data))
    selected = rewritten(data, select_tensors(layout.tree, {1}))
    assert_same(torch.load(io.BytesIO(selected), weights_only=True), {"b": torch.zeros(3), "step": 4})


def test_shared_containers_are_walked_once() -> None:
    bomb: Any = ()
    module: Any = Unknown("m.M", state={"_parameters": {}, "_modules": {}})
    for _ in range(80):
        bomb = (bomb, bomb)
        module = Unknown("m.M", state={"_parameters": {}, "_modules": {"a": module, "b": module}})
    tree = {"bomb": bomb, "module": module, "a": TensorRef(0)}
    assert list(tensor_numbers(tree)) == [0]
    assert select_tensors(tree, {0}).keys() == tree.keys()
    assert plain_tree(tree)["module"] == {}
    extents = [Extent(0, "float32", (1,), ("a",))]
    plan = plan_torch(plain_tree(tree), [Tensor(("a",), "float32", (1,), (1,), 0, 0)], extents)
    assert len(plan.skeleton) < 5000


@pytest.mark.long
def test_real_files(shared_data: Path) -> None:
    for pattern in (
        "lightning_a/last.ckpt",
        "vdsr/model_epoch_1.pth",
        "espcn/model_epoch_1.pth",
        "opt_lora/*500/*.pt*",
    ):
        for path in sorted(shared_data.glob(pattern)):
            data = path.read_bytes()
            written = rewritten(data)
            loaded = torch.load(io.BytesIO(written), weights_only=True)
            layout = parse(in_memory(written))
            assert assert_tree_equals(written, layout, layout.tree, loaded) == len(parse(in_memory(data)).tensors)


def test_short_reads_are_noticed() -> None:
    extents = [Extent(0, "float32", (3,), ("a",))]
    tensors = [Tensor(("a",), "float32", (3,), (1,), 0, 0)]
    with pytest.raises(InputError, match="8 bytes rather than 12"):
        write_torch(io.BytesIO(), {"a": TensorRef(0)}, tensors, extents, lambda number: [bytes(8)])
    with pytest.raises(InputError, match="8 bytes rather than 12"):
        write_safetensors(io.BytesIO(), [("a", "float32", (3,))], lambda number: [bytes(8)])


class _Sparse(io.RawIOBase):
    """A file of any size that is read from a source."""

    def __init__(self, source: CompositeSource) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._source.size)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        size = self._source.size - self._position if size < 0 else min(size, self._source.size - self._position)
        data = self._source.pread(self._position, size)
        self._position += size
        return data


def test_more_than_4_gigabytes() -> None:
    """Storages beyond 2^31 elements and 2^32 bytes, by arithmetic: their bytes are zeros that nobody writes."""
    counts = [3, (1 << 31) + 5, 7, 1 << 30]
    extents = [Extent(0, "float32", (count,), (str(count),)) for count in counts]
    tensors = [Tensor((str(count),), "float32", (count,), (1,), i, 0) for i, count in enumerate(counts)]
    tree = {str(count): TensorRef(index) for index, count in enumerate(counts)}
    plan = plan_torch(tree, tensors, extents)
    assert plan.layout.size > 4 * sum(counts)
    assert [extent.shape for extent in plan.layout.extents] == [(count,) for count in counts]
    source = CompositeSource(plan.skeleton, [(one.start, one.nbytes) for one in plan.layout.extents], plan.layout.size)
    with zipfile.ZipFile(_Sparse(source)) as archive:  # type: ignore[arg-type]
        assert [archive.getinfo(f"archive/data/{key}").file_size for key in range(4)] == [4 * count for count in counts]
        for key, storage in enumerate(plan.layout.extents):
            entry = archive.getinfo(f"archive/data/{key}")
            header = source.pread(entry.header_offset, 30)
            assert entry.header_offset + 30 + sum(struct.unpack("<2H", header[26:])) == storage.start
    for lie in (4, 8):
        place = plan.layout.checked[1].stop + lie
        changed = bytearray(plan.skeleton)
        before = sum(one.nbytes for one in plan.layout.extents[:2])
        changed[place - before] ^= 1
        places = [(one.start, one.nbytes) for one in plan.layout.extents]
        with pytest.raises(InputError):
            parse(CompositeSource(bytes(changed), places, plan.layout.size))


def test_safetensors(tmp_path: Path) -> None:
    dtypes = [dtype for dtype in DTYPES + UNTYPED if dtype is not torch.complex128]
    value = {str(dtype): random_bits(dtype, 3, 2) for dtype in dtypes} | {"s": torch.tensor(1.0), "e": torch.empty(0)}
    data = saved(value)
    layout = parse(in_memory(data))
    items = [("/".join(map(str, one.path)), one.dtype, one.shape) for one in layout.tensors]
    out = io.BytesIO()
    size = write_safetensors(
        out, items, lambda number: [bits(data, layout, layout.tensors[number]).tobytes()], {"format": "pt"}
    )
    assert size == len(out.getvalue())
    assert assert_comes_back(out.getvalue()).kind == "safetensors"
    described = safetensors.deserialize(out.getvalue())
    assert sorted(name for name, _ in described) == sorted(value)
    for name, entry in described:
        packed = value[name].dtype is torch.float4_e2m1fn_x2
        assert tuple(entry["shape"]) == tuple(value[name].shape[:-1]) + ((4,) if packed else value[name].shape[-1:])
        assert bytes(entry["data"]) == torch_bits(value[name]).tobytes()
    known = {"torch.float32", "torch.bfloat16", "torch.uint16", "torch.complex64", "torch.float8_e5m2", "s", "e"}
    known |= {"torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2"}
    few = [number for number, item in enumerate(items) if item[0] in known]
    out = io.BytesIO()
    write_safetensors(
        out,
        [items[number] for number in few],
        lambda number: [bits(data, layout, layout.tensors[few[number]]).tobytes()],
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(out.getvalue())
    got = load_file(path)
    assert set(got) == known
    for name, tensor in got.items():
        assert_same(tensor, value[name])


def test_values_that_safetensors_cannot_hold() -> None:
    for items in (
        [("a", "complex128", (1,))],
        [("a", "float4_e2m1fn_x2", ())],
        [("__metadata__", "float32", (1,))],
        [("a", "float32", (1,)), ("a", "float32", (1,))],
    ):
        out = io.BytesIO()
        with pytest.raises(UsageError, match="`format` pt"):
            write_safetensors(out, items, lambda number: [])
        assert not out.getvalue()


def test_npz() -> None:
    value = {f"x/{dtype}": random_bits(dtype, 3, 2) for dtype in DTYPES + UNTYPED if str(dtype)[6:] in NATIVE}
    value |= {"s": torch.tensor(1.0), "e": torch.empty(0, 3), "v": torch.ones(4), "b": torch.ones(4) > 0}
    data = saved(value)
    layout = parse(in_memory(data))
    items = [(str(one.path[0]), one.dtype, one.shape) for one in layout.tensors]
    out = io.BytesIO()
    write_npz(out, items, lambda number: [bits(data, layout, layout.tensors[number]).tobytes()])
    out.seek(0)
    with np.load(out) as arrays:
        assert set(arrays) == set(value)
        for name, dtype, shape in items:
            array = arrays[name]
            assert array.shape == shape
            np.testing.assert_array_equal(
                np.ascontiguousarray(array).reshape(-1).view(np.uint8), torch_bits(value[name]).reshape(-1)
            )
            assert array.dtype.name == dtype


def test_npz_names_must_differ() -> None:
    with warnings.catch_warnings(), pytest.raises(UsageError, match="Two tensors are called a"):
        write_npz(io.BytesIO(), [("a", "int8", (0,)), ("a", "int8", (0,))], lambda number: [])
