"""npy and npz files: NumPy's files are read, other arrays stay bytes, and no header is evaluated."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest

from ckstore.errors import InputError
from ckstore.formats.detect import holds_tensors, parse
from ckstore.formats.layout import FileLayout
from tests.formats.reading import assert_comes_back, bits, in_memory, zipped

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asanyarray(array), version)
    return out.getvalue()


def npz(compressed: bool = False, **arrays: Any) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **arrays)
    return out.getvalue()


def crafted(header: str | bytes, data: bytes = b"", version: bytes = b"\1\0", length: int | None = None) -> bytes:
    text = header.encode("latin-1") if isinstance(header, str) else header
    size = len(text) if length is None else length
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", size) + text + data


def described(descr: str = "'<f4'", fortran: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


def values(data: bytes, layout: FileLayout, number: int = 0) -> np.ndarray:
    tensor = layout.tensors[number]
    return np.ascontiguousarray(bits(data, layout, tensor)).view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_order(dtype: str) -> None:
    array = (np.random.default_rng(0).standard_normal((4, 3, 5)) * 50).astype(dtype)
    for one in (array, np.asfortranarray(array), array[:, 1], array[1, 1, 1], array[:0], array.T, array[::2, ::-1]):
        data = npy(one)
        layout = assert_comes_back(data)
        assert layout.kind == "npy"
        assert layout.tensors[0].path == ("array",)
        assert layout.tensors[0].dtype == dtype
        np.testing.assert_array_equal(values(data, layout), one, strict=True)
    together = npz(a=array, b=np.asfortranarray(array), **{"x/y": array[0], "e": array[:0]})
    layout = assert_comes_back(together)
    assert layout.kind == "npz"
    assert [tensor.path for tensor in layout.tensors] == [("a",), ("b",), ("x/y",), ("e",)]
    for number, one in enumerate((array, array, array[0], array[:0])):
        np.testing.assert_array_equal(values(together, layout, number), one, strict=True)
    assert layout.extents[1].shape == (5, 3, 4)
    assert layout.bytes_for == {}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format(version: tuple[int, int]) -> None:
    data = npy(np.arange(6.0), version)
    np.testing.assert_array_equal(values(data, assert_comes_back(data)), np.arange(6.0), strict=True)


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (2,), 'fortran_order': False, 'descr': '<f4'}",
        '{"descr": "<f4", "fortran_order": False, "shape": (2L,), }   ',
        "{ 'descr' : '<f4' , 'fortran_order' : True , 'shape' : ( 2 , 1 ) , }\n\n",
        "{'descr':'<f4','fortran_order':False,'shape':(1,2)}",
    ],
)
def test_other_writers(header: str) -> None:
    data = crafted(header, bytes(8))
    assert "L" in header or np.load(io.BytesIO(data)).nbytes == 8  # A long integer of Python 2 makes NumPy warn.
    assert assert_comes_back(data).tensors[0].dtype == "float32"


NO_TENSORS = {
    "big-endian": np.arange(3, dtype=">f4"),
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "fields": np.zeros(3, [("a", "<f4"), ("b", ">i2", (2,))]),
    "objects": np.array([{}, None]),
    "void": np.zeros(3, "V2"),
    "long double": np.zeros(3, np.longdouble),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize("repeat", [1, 70_000])
def test_non_tensors_stay_bytes(kind: str, repeat: int) -> None:
    array = np.repeat(NO_TENSORS[kind], repeat)
    alone = assert_comes_back(npy(array))
    assert (alone.kind, alone.tensors, alone.tree) == ("npy", [], None)
    assert len(alone.extents) == (repeat > 1)
    assert alone.bytes_for[""].startswith("a dtype with fields" if kind == "fields" else "dtype ")
    layout = assert_comes_back(npz(a=array, b=np.ones(3)))
    assert [tensor.path for tensor in layout.tensors] == [("b",)]
    assert layout.bytes_for == {"a.npy": alone.bytes_for[""]}
    assert sorted(extent.path for extent in layout.extents) == [("a", "__bytes__"), ("b",)][repeat == 1 :]


def test_compressed_entries_stay_bytes() -> None:
    noise = np.random.default_rng(0).bytes(100_000)
    layout = assert_comes_back(npz(compressed=True, a=np.frombuffer(noise, "u1"), b=np.ones(4)))
    assert layout.bytes_for == {"a.npy": "compressed", "b.npy": "compressed"}
    assert (layout.tensors, layout.tree, layout.checked) == ([], None, [])
    assert [extent.path for extent in layout.extents] == [("__entry__", "a.npy")]


def test_other_entries_stay_bytes() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("w.npy", npy(np.ones(5)))
        archive.writestr("note.txt", "small")
        archive.writestr("large.bin", bytes(70_000))
        archive.writestr("w", npy(np.ones(3)))
        archive.writestr("two.npy", npy(np.ones(5)) + npy(np.ones(5)))
        archive.writestr("text.npy", "no array")
        archive.writestr("z.npy", npy(np.ones(6)), zipfile.ZIP_DEFLATED)
    layout = assert_comes_back(out.getvalue())
    assert [tensor.path for tensor in layout.tensors] == [("w.npy",), ("w",)]  # As `np.load` reads them.
    assert layout.bytes_for == {
        "note.txt": "no npy file", "large.bin": "no npy file", "two.npy": "more than one array",
        "text.npy": "no npy file", "z.npy": "compressed",
    }  # fmt: skip


def test_an_archive_is_recognised_by_its_first_entry() -> None:
    other = assert_comes_back(zipped({"readme.txt": "small", "w.npy": npy(np.ones(5))}))
    assert (other.kind, [tensor.path for tensor in other.tensors]) == ("zip", [("w",)])
    assert holds_tensors(in_memory(npz(a=np.ones(1))))
    assert holds_tensors(in_memory(npy(np.ones(1))))


@pytest.mark.parametrize(
    "header",
    [
        described(shape="(3)"),
        described(shape="(-2,)"),
        described(shape="(2.0,)"),
        described(shape="[2]"),
        described(shape="(,)"),
        described(shape="(2,,1)"),
        described(shape="(02,)"),
        described(shape="(True,)"),
        described(shape=f"({'9' * 4000},)"),
        described(shape=f"({'1,' * 65})"),
        described(shape="(2,) + (1,)"),
        described(shape="(\u00b2,)"),
        described(fortran="0"),
        described(descr="None"),
        described(descr="'<f4', 'descr': '<f8'"),
        described() + described(),
        described()[:-3],
        described("__import__('os').system('false')"),
        described("'\\d'"),
        "{'descr': '<f4', 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'more': 1}",
        "{'a': '<f4', 'fortran_order': False, 'shape': (2,)}",
        "{" * 5000,
        "(" * 9000,
        "-" * 9000 + "1",
        "{'descr': '" + " " * 9000,
        "{" + " " * 9900,
        "",
        "\0" * 100,
    ],
)
def test_headers_that_say_something_else_are_bytes(header: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Compiling a header would warn of an escape in it.
        layout = assert_comes_back(crafted(header, bytes(8)))
    assert layout.tensors == []
    assert "header that is not NumPy's" in layout.bytes_for[""]


def test_a_long_header_is_not_read() -> None:
    long = described().rstrip() + " " * 10_000
    assert assert_comes_back(crafted(long, bytes(8))).bytes_for == {"": "a long header"}
    assert assert_comes_back(crafted(described(), bytes(8), b"\4\0")).bytes_for == {
        "": "an unknown version of the format"
    }


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (crafted(described(), bytes(7)), "ends within its array"),
        (crafted(described(shape="(999999999999999999, 999999999999999999)")), "ends within its array"),
        (crafted(described(), length=500), "ends within its header"),
        (crafted(b"", length=0xFFFFFFFF, version=b"\2\0"), "ends within its header"),
        (b"\x93NUMPY\1\0\2", "ends within its header"),
        (b"\x93NUMPY", "ends within its header"),
    ],
)
def test_files_that_are_cut_off_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match=f"not a sound npy file: the file {words}"):
        parse(in_memory(data))
    with pytest.raises(InputError, match=rf"not a sound npz file: a\.npy: the file {words}"):
        parse(in_memory(zipped({"a.npy": data})))


def test_a_damaged_archive_is_refused() -> None:
    data = npz(a=np.arange(1000.0), t=np.array(["text"]))
    with pytest.raises(InputError, match="not a sound npz file: the archive has no directory"):
        parse(in_memory(data[:5000]))
    place = data.index("text".encode("utf-32-le"))
    with pytest.raises(InputError, match=r"the CRC of t\.npy is wrong"):
        parse(in_memory(data[:place] + b"T" + data[place + 1 :]))


@pytest.mark.parametrize("name", ["a.npy", "archive/data.pkl"])
def test_an_empty_directory(name: str) -> None:
    data = zipped({name: npy(np.ones(3))})
    place = data.index(b"PK\1\2")
    empty = data[:place] + b"PK\5\6" + bytes(8) + struct.pack("<2LH", 0, place, 0)
    layout = assert_comes_back(empty)
    assert layout.tensors == []


def test_a_large_number_of_axes() -> None:
    shape = "(" + "1," * 64 + ")"
    assert len(assert_comes_back(crafted(described(shape=shape), bytes(4))).tensors[0].shape) == 64
    assert assert_comes_back(crafted(described(shape="(999999999999999999, 0)"))).tensors[0].extent == -1


def test_no_pickle_is_run(tmp_path: Any) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "run"), "w"))

    data = npz(a=np.array([Bomb()], dtype=object), b=np.ones(2))
    assert pickle.dumps(Bomb())[-1:] == b"."
    assert assert_comes_back(data).bytes_for == {"a.npy": "dtype |O"}
    assert list(tmp_path.iterdir()) == []
