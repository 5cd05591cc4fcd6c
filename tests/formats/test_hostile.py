"""Damaged and malicious files: each is parsed or refused with `InputError`, in bounded time; nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import InputError
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout
from ckstore.formats.skeleton import pieces
from ckstore.formats.torch.live_state import StateDictSource
from ckstore.formats.torch.tree_reader import MAX_DEPTH
from tests.formats.reading import in_memory, saved, split_skeleton, unzipped, zipped
from tests.formats.written import flax_bytes, gguf_bytes, hdf5_bytes, initialiser, learner_bytes, onnx_bytes, tar_bytes

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def sane(data: bytes) -> FileLayout | None:
    """Parse; accepted files are consistent."""
    try:
        layout = parse(in_memory(data), "x")
    except InputError as error:
        message = str(error)
        assert message.startswith("x is not a sound ")
        assert message.endswith("`force` stores its bytes unchanged.")
        assert len(message) < 400
        assert message.isprintable()
        return None
    stretches = list(pieces(layout))
    position = 0
    for piece in stretches:
        assert piece.start == position
        assert piece.stop > position
        position = piece.stop
    assert position == layout.size == len(data)
    for tensor in layout.tensors:
        if tensor.extent >= 0:
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
            assert tensor.offset >= 0
            assert tensor.offset + reach < layout.extents[tensor.extent].count
    split_skeleton(in_memory(data), layout)
    return layout


VALUE = {"a": torch.arange(3.0), "s": {0: torch.ones(2)[::2]}, "epoch": 3}
LARGER = VALUE | {"b": torch.ones(250)}
#: The model and the optimizer of a learner.
LEARNT = {"a": torch.arange(3.0)}, {"s": {0: torch.ones(2)[::2]}}


def small_files() -> dict[str, bytes]:
    value = VALUE
    source = StateDictSource(value)
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"step":"3"}}'
    array, text = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3.0).reshape(3, 1))
    np.save(text, np.array(["a", "b"]))
    arrays = {"a.npy": array.getvalue(), "b.npy": text.getvalue()}
    tar = tar_bytes({"a.npy": arrays["a.npy"], "model.pt": saved(LARGER)})
    others = {}
    if find_spec("h5py"):
        others = {
            "hdf5": hdf5_bytes({"a": np.arange(6.0), "g": {"b": np.ones(2, "f2")}}),
            "late hdf5": hdf5_bytes({"a": np.arange(6.0), "g": {"b": np.ones(2, "f2")}}, libver="latest"),
        }
    return others | {
        "zip": saved(value),
        "own-zip": source.pread(0, source.size),
        "zipfile": zipped(unzipped(saved(value))),
        "series": saved(value) + saved(torch.ones(2)),
        "legacy": saved(value, _use_new_zipfile_serialization=False),
        "safetensors": struct.pack("<Q", len(header)) + header + bytes(8),
        "npy": arrays["a.npy"],
        "npz": zipped(arrays),
        "flax": flax_bytes({"a": np.arange(20.0), "b": {"c": [1, None, "x"], "s": np.float32(2)}, "step": 3}),
        "learner": learner_bytes(*LEARNT),
        "gguf": gguf_bytes([("a", (2, 3), 0, 24), ("q", (1, 32), 2, 18)], 8),
        "onnx": onnx_bytes([initialiser("w", 1, (2, 3), bytes(24)), initialiser("b", 7, (), bytes(8))]),
        # With the first one of the blocks of zeros at its end; the others may be missing.
        "tar": tar[: (len(tar.rstrip(b"\0")) // 512 + 2) * 512],
    }


SMALL = small_files()


# A model of ONNX begins with no magic number: one that is cut off is opaque.
@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(SMALL.keys() - {"onnx"}))
def test_every_truncation(kind: str) -> None:
    data = SMALL[kind]
    assert sane(data) is not None
    refused = 0
    for length in range(len(data)):
        refused += sane(data[:length]) is None
    # Nearly all are refused; the rest no longer look like the kind they are of.
    assert refused > 0.85 * len(data)


class Watched:
    """A source that remembers which of its bytes were read."""

    def __init__(self, data: bytes) -> None:
        self.source = in_memory(data)
        self.size = self.source.size
        self.read = bytearray(self.size)

    def pread(self, offset: int, length: int) -> bytes:
        self.read[offset : offset + length] = b"\1" * len(self.read[offset : offset + length])
        return self.source.pread(offset, length)


def inner_places(data: bytes) -> set[int]:
    """Return the positions in torch files that another file holds."""
    found = set()
    for inner in map(saved, (VALUE, LARGER, torch.ones(2), {}, *LEARNT)):
        start = data.find(inner)
        if start >= 0 and inner != data:
            found.update(range(start, start + len(inner)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", SMALL)
def test_every_byte_changed(kind: str) -> None:
    """Each byte that the parser reads, in three ways; in one where the byte is of a file of another kind here."""
    data = bytearray(SMALL[kind])
    watched = Watched(SMALL[kind])
    parse(watched, "x")
    inner = inner_places(SMALL[kind])
    for index in np.flatnonzero(watched.read):
        original = data[index]
        masks = (0x01, 0x80, 0xFF)
        for mask in masks[index % 3 : index % 3 + 1] if index in inner else masks:
            data[index] = original ^ mask
            sane(bytes(data))
        data[index] = original


@pytest.mark.long
@pytest.mark.parametrize("kind", SMALL)
@given(edits=st.data())
def test_changes_in_several_places(kind: str, edits: st.DataObject) -> None:
    data = bytearray(SMALL[kind])
    for _ in range(edits.draw(st.integers(1, 6))):
        place = edits.draw(st.integers(0, len(data) - 1))
        change = edits.draw(st.binary(min_size=1, max_size=8))
        data[place : place + edits.draw(st.sampled_from([0, len(change)]))] = change
    sane(bytes(data))


@given(st.sampled_from([MAGIC, MAGIC + pickle.dumps(1001, 2), b"PK\x03\x04", b"\x40\0\0\0\0\0\0\0{"]), st.binary())
def test_any_bytes_behind_a_known_beginning(head: bytes, tail: bytes) -> None:
    sane(head + tail)


def torch_zip(stream: bytes, storages: dict[str, bytes]) -> bytes:
    entries = {"data.pkl": stream, "byteorder": b"little"}
    entries |= {f"data/{key}": data for key, data in storages.items()} | {"version": b"3\n"}
    return zipped({f"archive/{name}": data for name, data in entries.items()})


def torch_legacy(stream: bytes, keys: Any, tail: bytes) -> bytes:
    parts = [MAGIC, pickle.dumps(1001, 2), pickle.dumps(SYSTEM, 2), stream, pickle.dumps(keys, 2), tail]
    return b"".join(parts)


def item(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def storage(kind: str = "torch FloatStorage", key: Any = "0", count: Any = 4, more: bytes = b"") -> bytes:
    module, name = kind.split()
    head = b"(" + item("storage") + f"c{module}\n{name}\n".encode()
    return head + item(key) + item("cpu") + item(count) + more + b"tQ"


def tensor(offset: Any = 0, shape: Any = (4,), strides: Any = (1,), where: bytes | None = None) -> bytes:
    head = b"ctorch._utils\n_rebuild_tensor_v2\n(" + (storage() if where is None else where)
    return head + item(offset) + item(shape) + item(strides) + b"\x89NtR"


def stream(*values: bytes) -> bytes:
    return b"\x80\x02](" + b"".join(values) + b"e."


def test_the_crafted_files_are_sound() -> None:
    for data in (
        torch_zip(stream(tensor()), {"0": bytes(16)}),
        torch_legacy(stream(tensor()), ["0"], struct.pack("<q", 4) + bytes(16)),
    ):
        layout = sane(data)
        assert layout is not None
        assert [extent.shape for extent in layout.extents] == [(4,)]


@pytest.mark.parametrize(
    "value",
    [
        tensor(shape=(5,)),
        tensor(offset=1),
        tensor(offset=-1),
        tensor(shape=(-4,)),
        tensor(strides=(-1,)),
        tensor(strides=(2,)),
        tensor(shape=(2, 2)),
        tensor(shape=(2**62, 2**62), strides=(2**62, 1)),
        tensor(shape=(2**100,), strides=(0,)),
        tensor(shape=(1,) * 1000, strides=(1,) * 1000),
        tensor(offset=2**62),
        tensor(where=storage(count=5)),
        tensor(where=storage(count=2**62)),
        tensor(where=storage(count=-1)),
        tensor(where=storage(count="4")),
        tensor(where=storage(count=True)),
        tensor(where=storage(key="7")),
        tensor(where=storage(key=0)),
        tensor(where=storage(key=("0",))),
        tensor(where=storage("torch DoubleStorage")),
        tensor(where=storage("torch NoStorage")),
        tensor(where=storage("os system")),
        tensor(where=storage(more=item(("v", 2, 3)))),
        tensor(where=storage(more=item(("v", -1, 2)))),
        tensor(where=storage(more=item(("v", 2)))),
        tensor() + storage(count=8),
        storage(more=item(1) + item(2)),
        item("x") + b"Q",
        item(("other", 1)) + b"Q",
        item(()) + b"Q",
    ],
)
def test_lies_about_storages(value: bytes) -> None:
    assert sane(torch_zip(stream(value), {"0": bytes(16)})) is None
    assert sane(torch_legacy(stream(value), ["0"], struct.pack("<q", 4) + bytes(16))) is None


@pytest.mark.parametrize(
    ("keys", "tail"),
    [
        (["0"], b""),
        (["0"], struct.pack("<q", 4) + bytes(15)),
        (["0"], struct.pack("<q", 5) + bytes(20)),
        (["0"], struct.pack("<q", -4) + bytes(16)),
        (["0"], struct.pack("<q", 2**62) + bytes(16)),
        (["0", "0"], (struct.pack("<q", 4) + bytes(16)) * 2),
        (["0", "1"], (struct.pack("<q", 4) + bytes(16)) * 2),
        ([], struct.pack("<q", 4) + bytes(16)),
        ([0], struct.pack("<q", 4) + bytes(16)),
        ([["0"]], struct.pack("<q", 4) + bytes(16)),
        ("0", struct.pack("<q", 4) + bytes(16)),
    ],
)
def test_lies_about_legacy_storages(keys: Any, tail: bytes) -> None:
    assert sane(torch_legacy(stream(tensor()), keys, tail)) is None


@pytest.mark.parametrize(
    "value",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n)R",
        b"ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR",
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage() + b"NNNtR",
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage() + item(0) + item((4,)) + item((1,)) + b"\x89NNtR",
        b"ctorch._utils\n_rebuild_parameter\n(K\x01tR",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(NNNNtR",
        b"ccollections\nOrderedDict\n(K\x01tR",
        b"ccollections\nOrderedDict\n](K\x01K\x02e\x85R",
        b"ctorch\nSize\n(K\x01tR",
        b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR",
        b"c__builtin__\ncomplex\n(X\x01\0\0\0aK\x01tR",
        b"c__builtin__\nset\n(K\x05tR",
        b"ccopy_reg\n_reconstructor\n(K\x05tR",
        b"ccollections\ndefaultdict\n(cos\nsystem\ntR",
    ],
)
def test_calls_with_other_arguments_are_only_noted(value: bytes) -> None:
    assert sane(torch_zip(stream(value), {"0": bytes(16)})) is not None


def _archives(data: bytes) -> Iterator[tuple[str, bytes]]:
    end = data.rindex(b"PK\x05\x06")
    directory = struct.unpack_from("<L", data, end + 16)[0]
    for name, place, form, value in (
        ("directory offset", end + 16, "<L", directory + 1),
        ("directory offset beyond the file", end + 16, "<L", 0xFFFFFFF0),
        ("directory size", end + 12, "<L", 5),
        ("number of entries", end + 8, "<2H", (1, 1)),
        ("other disk", end + 4, "<H", 1),
        ("entry offset", directory + 42, "<L", 7),
        ("entry offset beyond the file", directory + 42, "<L", 0x7FFFFFFF),
        ("entry size", directory + 20, "<2L", (0x7FFFFFFF, 0x7FFFFFFF)),
        ("two sizes", directory + 24, "<L", 1),
        ("64-bit size that is not there", directory + 20, "<2L", (0xFFFFFFFF, 0xFFFFFFFF)),
        ("name length", directory + 28, "<H", 60_000),
        ("crc", directory + 16, "<L", 1),
        ("local crc", 14, "<L", 1),
        ("local name length", 26, "<H", 3),
        ("local extra length", 28, "<H", 60_000),
        ("flags", directory + 8, "<H", 8),
    ):
        changed = bytearray(data)
        struct.pack_into(form, changed, place, *(value if isinstance(value, tuple) else (value,)))
        yield name, bytes(changed)


def test_lies_in_archives() -> None:
    data = torch_zip(stream(tensor()), {"0": bytes(16)})
    for name, changed in _archives(data):
        assert sane(changed) is None, name


def test_entries_that_overlap_or_occur_twice() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", stream(tensor()))
        archive.writestr("archive/data/0", bytes(16))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("archive/data/0", bytes(16))
    assert sane(out.getvalue()) is None
    data = torch_zip(stream(tensor(), tensor(where=storage(key="1"))), {"0": bytes(16), "1": bytes(16)})
    one = data.index(b"archive/data/0", data.index(b"PK\x01\x02")) - 46
    two = data.index(b"archive/data/1", one) - 46
    changed = bytearray(data)
    changed[two + 42 : two + 46] = changed[one + 42 : one + 46]
    assert sane(bytes(changed)) is None


class Command:
    """An object whose pickle runs a command."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, legacy: bool) -> None:
    trace = tmp_path / "trace"
    value = {
        "system": Command(os.system, f"touch {trace}"),
        "popen": Command(subprocess.check_output, ["touch", str(trace)]),
        "eval": Command(eval, f"open({str(trace)!r}, 'w')"),
        "import": Command(__import__, "antigravity"),
        "a": torch.ones(2),
    }
    layout = sane(saved(value, _use_new_zipfile_serialization=not legacy))
    assert layout is not None
    assert not trace.exists()
    assert layout.tree["system"].args == (f"touch {trace}",)
    assert [one.path for one in layout.tensors] == [("a",)]


@pytest.mark.long
def test_bombs() -> None:
    doubled = b"".join(b"q\x00h\x00\x86" for _ in range(100))
    storages = {"0": bytes(16)}
    assert sane(torch_zip(b"\x80\x02" + item(1) + doubled + b".", storages)) is not None
    assert sane(torch_zip(b"\x80\x02)" + b"\x85" * 1_000_000 + b".", storages)) is None
    assert sane(torch_zip(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", storages)) is None
    assert sane(torch_zip(b"\x80\x02" + b"(" * 500_000 + b".", storages)) is None


def test_deep_objects_stay_below_the_recursion_limit() -> None:
    """Each object in the state of the next: the tree takes most frames a level for modules."""
    levels = MAX_DEPTH // 2 - 2
    module = b"cm\nM\n)\x81}(" + item("_parameters") + b"}" + item("_modules") + b"}" + item("x")
    assert sane(torch_zip(b"\x80\x02" + module * levels + b"N" + b"ub" * levels + b".", {})) is not None
    assert sane(torch_zip(b"\x80\x02" + module * 500 + b"N" + b"ub" * 500 + b".", {})) is None
    plain = b"cm\nM\n)\x81}(" + item("x")
    for count in (levels, 500):
        sane(torch_zip(b"\x80\x02" + plain * count + b"N" + b"ub" * count + b".", {}))
    typed = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    for count in (levels, 5000):
        sane(torch_zip(b"\x80\x02" + typed + (b"(" + typed * 2) * count + b")" + b"Nt" * count + b"R.", {}))


@pytest.mark.parametrize(
    ("limit", "number", "value"),
    [
        ("MAX_TENSORS", 10_000, tensor() + b"".join(b"q\x00h\x00\x86" for _ in range(100))),
        # A long list with one tensor, shared many times: few tensors, many values.
        ("MAX_NODES", 100_000, b"](" + tensor() + b"N" * 5000 + b"eq\x00(" + b"h\x00" * 500 + b"t"),
    ],
)
def test_bombs_of_tensors(monkeypatch: pytest.MonkeyPatch, limit: str, number: int, value: bytes) -> None:
    monkeypatch.setattr(f"ckstore.formats.torch.tree_reader.{limit}", number)
    assert sane(torch_zip(b"\x80\x02" + value + b".", {"0": bytes(16)})) is None


def test_many_equal_segments_do_not_cost_their_square() -> None:
    key = b"cm\nC\n)\x81"
    entries = (key + tensor()) * 5000
    layout = sane(torch_zip(b"\x80\x02}(" + entries + b"u.", {"0": bytes(16)}))
    assert layout is not None
    assert len({one.path for one in layout.tensors}) == 5000


def test_names_of_entries_are_never_paths() -> None:
    """A key is only looked up among the entries: it names no file."""
    data = torch_zip(stream(tensor(where=storage(key="../../x"))), {"../../x": bytes(16)})
    layout = sane(data)
    assert layout is not None
    assert layout.extents[0].path == (0,)
