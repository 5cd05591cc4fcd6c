"""GGUF files: plain numbers are tensors, quantised blocks stay bytes, damaged headers are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.containers import gguf
from ckstore.formats.detect import holds_tensors, parse
from tests.formats.reading import assert_comes_back, bits, in_memory
from tests.formats.written import gguf_bytes

F32, F16, Q4_0, BF16 = 0, 1, 2, 30


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A file as the library writes it."""
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    arrays = {
        "token_embd.weight": generator.standard_normal((300, 64), dtype=np.float32),
        "blk.0.ffn.weight": generator.standard_normal((32, 64)).astype(np.float16),
        "output_norm.weight": generator.standard_normal(64, dtype=np.float32),
        "ids": np.arange(7, dtype=np.int32),
    }
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_token_list([f"token {number}" for number in range(3000)])
    writer.add_array("scores", [0.5, 1.5])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    half = (generator.standard_normal((16, 64), dtype=np.float32).view("u4") >> 16).astype("u2")
    writer.add_tensor("half", half.view("u1"), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name, rows in (("small.q", 8), ("large.q", 4000)):
        blocks = gguf.quants.quantize(
            generator.standard_normal((rows, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_0
        )
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf", arrays | {"half": half}


def test_files_of_the_library(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, arrays = written
    data = path.read_bytes()
    layout = assert_comes_back(data)
    assert layout.kind == "gguf"
    assert holds_tensors(in_memory(data))
    assert {str(tensor.path[0]): (tensor.dtype, tensor.shape) for tensor in layout.tensors} == {
        name: ("bfloat16" if name == "half" else array.dtype.name, array.shape) for name, array in arrays.items()
    }
    for tensor in layout.tensors:
        array = arrays[str(tensor.path[0])]
        found = np.ascontiguousarray(bits(data, layout, tensor)).view(array.dtype).reshape(array.shape)
        np.testing.assert_array_equal(found, array, strict=True)
    assert layout.bytes_for == {"small.q": "quantised, Q4_0", "large.q": "quantised, Q4_0"}
    assert [extent.nbytes for extent in layout.extents if extent.path == ("large.q",)] == [4000 * 64 // 32 * 18]
    assert ("small.q",) not in {extent.path for extent in layout.extents}


def test_the_hand_made_file_is_one_for_the_library(tmp_path: Path) -> None:
    """The file that the other tests change is sound."""
    gguf = pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(gguf_bytes([("a", (2, 3), F32, 24), ("b", (4,), BF16, 8)]))
    tensors = gguf.GGUFReader(tmp_path / "x.gguf").tensors
    assert [(tensor.name, tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in tensors] == [
        ("a", "F32", 24), ("b", "BF16", 8),
    ]  # fmt: skip


def test_alignment_and_empty_tensors() -> None:
    layout = assert_comes_back(gguf_bytes([("a", (3,), F32, 12), ("b", (0, 5), F16, 0), ("c", (2,), F16, 4)], 8))
    assert [(tensor.path, tensor.shape, tensor.extent) for tensor in layout.tensors] == [
        (("a",), (3,), 0), (("b",), (0, 5), -1), (("c",), (2,), 1),
    ]  # fmt: skip
    assert layout.extents[1].start == layout.extents[0].start + 16
    assert assert_comes_back(gguf_bytes([])).tree is None


def test_every_type_of_the_library_is_known() -> None:
    library = pytest.importorskip("gguf")
    known = {kind: (1, ITEM_SIZES[dtype]) for kind, dtype in gguf._DTYPES.items()}
    known |= {kind: (elements, size) for kind, (_, elements, size) in gguf._QUANTISED.items()}
    assert library.GGML_QUANT_SIZES.items() <= known.items()


def test_types_to_come_are_bytes_up_to_the_next_tensor() -> None:
    layout = assert_comes_back(gguf_bytes([("a", (2,), 99, 70_000), ("b", (2,), F32, 8)]))
    assert layout.bytes_for == {"a": "quantised, type 99"}
    assert [extent.path for extent in layout.extents] == [("a",), ("b",)]
    assert 70_000 <= layout.extents[0].nbytes < 70_032


def test_versions_that_are_not_read_are_bytes() -> None:
    data = gguf_bytes([("a", (2,), F32, 8)])
    for version, why in ((1, "version 1 of the format"), (0x03000000, "big-endian")):
        changed = data[:4] + struct.pack("<I", version) + data[8:] + bytes(70_000)
        layout = assert_comes_back(changed)
        assert (layout.tensors, layout.bytes_for, len(layout.extents)) == ([], {"": why}, 1)


SOUND: dict[str, Any] = {"tensors": [("a", (2, 3), F32, 24), ("b", (4,), F16, 8)]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gguf_bytes(**SOUND)[:-32], "the file ends within 'b'"),
        (gguf_bytes(**SOUND)[:60], "the file ends within its header"),
        (gguf_bytes([("q", (64, 32), Q4_0, 100)]), "the file ends within 'q'"),
        (gguf_bytes([("a", (2,), F32, 8), ("a", (2,), F32, 8)]), "names a tensor twice"),
        (gguf_bytes(**SOUND, offsets=[0, 0]), "its extents overlap"),
        (gguf_bytes(**SOUND, offsets=[0, 7]), "the place of 'b' is not aligned"),
        (gguf_bytes(**SOUND, offsets=[0, 1 << 63]), "'b' has an impossible shape or place"),
        (gguf_bytes(**SOUND, alignment=24), "its alignment is 24, which is not a power of two"),
        (gguf_bytes(**SOUND, alignment=0), "its alignment is 0, which is not a power of two"),
        (gguf_bytes(**SOUND, count=1 << 60), "the file ends within its header"),
        (gguf_bytes(**SOUND, values=1 << 60), "its header has an implausibly long name"),
        (gguf_bytes([("a", (1, 1, 1, 1, 1), F32, 4)]), "'a' has 5 axes"),
        (gguf_bytes([("a", (1 << 40, 1 << 40), F32, 4)]), "the file ends within 'a'"),
        (gguf_bytes([(b"\xff", (1,), F32, 4)]), "the name of a tensor is not UTF-8"),
        (gguf_bytes([], key=struct.pack("<Q", 1 << 40)), "implausibly long name"),
        (gguf_bytes([], key=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 60)), "the file ends within its header"),
        (gguf_bytes([], key=struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50), "an unknown type"),
    ],
)  # fmt: skip
def test_contradictory_files_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match="not a sound gguf file: .*" + words):
        parse(in_memory(data))


def test_a_vocabulary_is_skipped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 200,000 words took a second: reads of the header are counted."""
    words = b"".join(struct.pack("<Q", length) + bytes(length) for length in (5, 9, 0, 300_000) * 5000 if length < 10)
    words += struct.pack("<Q", 3_000_000) + bytes(3_000_000)
    key = b"tokenizer.ggml.tokens"
    value = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 15_001) + words
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value
    taken = 0
    take = gguf._Header.take

    def counted(self: Any, nbytes: int) -> bytes:
        nonlocal taken
        taken += 1
        return take(self, nbytes)

    monkeypatch.setattr(gguf._Header, "take", counted)
    assert parse(in_memory(head)).kind == "gguf"
    assert taken < 20
    for cut in (len(head) - 1, len(head) - 3_000_001, 1000):
        with pytest.raises(InputError, match="ends within its header"):
            parse(in_memory(head[:cut]))
