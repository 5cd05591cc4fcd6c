"""HDF5 files: datasets in one piece are tensors where the library says that they lie, all else stays bytes."""

from __future__ import annotations

import io
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckstore.errors import InputError
from ckstore.formats.detect import holds_tensors, parse
from ckstore.formats.layout import FileLayout
from tests.formats.reading import assert_comes_back, bits, in_memory
from tests.formats.written import hdf5_bytes, keras_bytes

h5py = pytest.importorskip("h5py")

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "f2", "f4", "f8"]


def compare(data: bytes, layout: FileLayout) -> int:
    """Compare the tensors with the library's contiguous datasets; returns their number."""
    found = {"/".join(map(str, tensor.path)): tensor for tensor in layout.tensors}
    count = 0

    def visit(name: str, dataset: Any) -> None:
        nonlocal count
        if not isinstance(dataset, h5py.Dataset) or name not in found:
            return
        tensor, array = found[name], np.asarray(dataset)
        assert tensor.shape == array.shape
        if array.dtype.kind != "V":
            assert tensor.dtype == array.dtype.name
        if array.size:
            assert layout.extents[tensor.extent].start == dataset.id.get_offset()
        assert bits(data, layout, tensor).tobytes() == array.tobytes()
        count += 1

    with h5py.File(io.BytesIO(data)) as file:
        file.visititems(visit)
    assert count == len(found)
    return count


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "v112", "latest"])
def test_files_of_the_library(libver: str) -> None:
    generator = np.random.default_rng(0)
    tree = {
        "few": {str(number): generator.standard_normal((3, number + 1)) for number in range(6)},
        "dtypes": {"a": {dtype: np.arange(5).astype(dtype) for dtype in DTYPES[:6]},
                   "b": {dtype: np.arange(5).astype(dtype) for dtype in DTYPES[6:]}},
        "scalar": np.float32(3), "empty": np.zeros((0, 4), "f4"), "large": generator.standard_normal((400, 300)),
    }  # fmt: skip
    layout = assert_comes_back(data := hdf5_bytes(tree, libver=libver))
    assert (layout.kind, layout.bytes_for) == ("hdf5", {})
    assert compare(data, layout) == 21
    assert holds_tensors(in_memory(data))
    assert layout.tree["few"].keys() == tree["few"].keys()


def test_a_group_of_many() -> None:
    """Some hundred members take several nodes of a tree; in the latest format, a heap that is not read."""
    tree = {"g": {f"dataset {number}": np.full(3, number) for number in range(700)}, "one": np.ones(2)}
    layout = assert_comes_back(data := hdf5_bytes(tree))
    assert compare(data, layout) == 701
    layout = assert_comes_back(data := hdf5_bytes(tree, libver="latest"))
    assert compare(data, layout) == 1
    assert layout.bytes_for == {"g": "a group whose members are in a fractal heap"}


def test_bfloat16_as_keras_writes_it() -> None:
    out = io.BytesIO()
    values = np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4)
    with h5py.File(out, "w") as file:
        file.create_dataset("0", data=values).attrs["dtype"] = "bfloat16"
        file.create_dataset("1", data=values)
    layout = assert_comes_back(out.getvalue())
    assert [(tensor.path, tensor.dtype) for tensor in layout.tensors] == [(("0",), "bfloat16")]
    assert bits(out.getvalue(), layout, layout.tensors[0]).tobytes() == values.tobytes()


def test_non_tensors_stay_bytes() -> None:
    out = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(30_000)
    with h5py.File(out, "w") as file:
        file["w"] = np.ones(3)
        file["texts"] = ["a", "bc"]
        file["bytes"] = np.array([b"abc"])
        file["complex"] = np.ones(3, "c8")
        file["big-endian"] = np.ones(3, ">f4")
        file["pairs"] = np.zeros(3, [("a", "<f4"), ("b", "<i2")])
        file["null"] = h5py.Empty("f4")
        file.create_dataset("chunks", data=noise, chunks=True)
        file.create_dataset("packed", data=noise, compression="gzip")
        file.create_dataset("unwritten", (5,), "f4")
        file.create_dataset("elsewhere", (4,), "f4", external=[("other.raw", 0, 16)])
        file["enum"] = np.zeros(2, h5py.enum_dtype({"x": 0, "y": 1}, "i1"))
        file["named"] = np.dtype("f4")
        file.create_dataset("of named", (3,), file["named"])[:] = 1
    layout = assert_comes_back(out.getvalue())
    assert [tensor.path for tensor in layout.tensors] == [("w",)]
    assert {name: why.split()[0] for name, why in layout.bytes_for.items()} == {
        "texts": "text,", "bytes": "text,", "complex": "text,", "big-endian": "text,", "pairs": "text,", "null": "no",
        "chunks": "compact,", "packed": "compact,", "unwritten": "nothing", "elsewhere": "in", "enum": "text,",
        "of named": "a",
    }  # fmt: skip
    # Large unread parts do not go into the skeleton.
    assert sum(extent.nbytes for extent in layout.extents if extent.path[0] == "__bytes__") > 400_000


def test_links() -> None:
    for libver in ("earliest", "latest"):
        out = io.BytesIO()
        with h5py.File(out, "w", libver=libver) as file:
            file["g/w"] = np.arange(4.0)
            file["g/itself"] = file["g"]
            file["tied"] = file["g/w"]
            file["soft"] = h5py.SoftLink("/g/w")
            file["out"] = h5py.ExternalLink("/etc/passwd", "/x")
        layout = assert_comes_back(out.getvalue())
        assert sorted(tensor.path for tensor in layout.tensors) == [("g", "w"), ("tied",)]
        assert {tensor.extent for tensor in layout.tensors} == {0}


def test_versions_that_are_not_read_are_bytes() -> None:
    block = io.BytesIO()
    with h5py.File(block, "w", userblock_size=512) as file:
        file["w"] = np.ones(3)
    assert assert_comes_back(block.getvalue()).kind == "opaque"
    data = bytearray(hdf5_bytes({"w": np.ones(3)}))
    data[8] = 9
    layout = assert_comes_back(bytes(data))
    assert (layout.tensors, list(layout.bytes_for)) == ([], [""])


def test_a_keras_file() -> None:
    weights = {"layers": {"dense": {"vars": {"0": np.ones((300, 300), "f4"), "1": np.arange(4)}}}}
    layout = assert_comes_back(keras_bytes(weights))
    assert layout.kind == "zip"
    assert [tensor.path for tensor in layout.tensors] == [
        ("model.weights", "layers", "dense", "vars", "0"), ("model.weights", "layers", "dense", "vars", "1"),
    ]  # fmt: skip


def test_contradictory_files_are_refused() -> None:
    data = hdf5_bytes({"a": np.arange(1.0, 4.0), "b": np.arange(11.0, 14.0)})
    with pytest.raises(InputError, match="not a sound hdf5 file: the file ends before its end of data"):
        parse(in_memory(data[:-8]))
    first, second = (data.index(np.float64(value).tobytes()) for value in (1, 11))
    layout = struct.pack("<BBQQ", 3, 1, second, 24)
    assert data.count(layout) == 1
    for place, words in (
        (first + 8, "its datasets overlap"), (96, "its datasets overlap"), (len(data) - 8, "the file ends within"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            parse(in_memory(data.replace(layout, struct.pack("<BBQQ", 3, 1, place, 24))))
    with pytest.raises(InputError, match="'b' has another size than its shape and dtype"):
        parse(in_memory(data.replace(layout, struct.pack("<BBQQ", 3, 1, second, 16))))
    tied = data.replace(layout, struct.pack("<BBQQ", 3, 1, first, 24))
    assert len(assert_comes_back(tied).extents) == 1


def test_nodes_that_lead_in_circles_are_refused() -> None:
    data = hdf5_bytes({f"{number}": np.ones(1) for number in range(300)})
    tree = data.index(b"TREE\0")
    child = struct.unpack_from("<Q", data, tree + 32)[0]
    with pytest.raises(InputError, match="a node of a group occurs twice"):
        parse(in_memory(data.replace(struct.pack("<Q", child), struct.pack("<Q", tree))))
