"""Tar archives of files: tensors of each file are named after it; unusual and hostile archives stay bytes."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError
from ckstore.formats import tar_headers
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout
from tests.formats.reading import assert_comes_back, bits, in_memory, saved, zipped
from tests.formats.written import tar_bytes

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def header(name: bytes = b"a.pt", size: bytes = b"00000000000\0", kind: bytes = b"0", **fields: bytes) -> bytes:
    """Return a header with a checksum."""
    block = bytearray(512)
    for start, data in ((0, name), (124, size), (156, kind), (257, b"ustar\x0000")):
        block[start : start + len(data)] = data
    for place, data in fields.items():
        block[int(place[1:]) : int(place[1:]) + len(data)] = data
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * 32)
    return bytes(block)


def member(data: bytes, **fields: bytes) -> bytes:
    return header(size=b"%011o\0" % len(data), **fields) + data + bytes(-len(data) % 512)


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"encoder.weight": torch.randn(300, 300, generator=generator), "step": torch.tensor(seed)}


def nemo(seed: int = 0) -> dict[str, bytes]:
    tokenizer = np.random.default_rng(1).bytes(100_000)
    weights = saved(state(seed))
    return {"./model_config.yaml": b"name: asr\n", "./model_weights.ckpt": weights, "./tokenizer.model": tokenizer}


@pytest.mark.parametrize("form", FORMS)
def test_a_nemo_file(form: str) -> None:
    data = tar_bytes(nemo(7), FORMS[form])
    layout = assert_comes_back(data)
    assert (layout.kind, layout.bytes_for) == ("tar", {})
    found = {tensor.path: bits(data, layout, tensor).tobytes() for tensor in layout.tensors}
    assert found == {("model_weights", name): tensor.numpy().tobytes() for name, tensor in state(7).items()}
    assert ("__entry__", "tokenizer.model") in [extent.path for extent in layout.extents]


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_long_names_and_names_in_directories(form: str) -> None:
    name = "ä" * 90 + "/" + "b" * 200 + "/weights.pt"
    data = tar_bytes({name: saved(torch.ones(2)), "sub/weights.pt": saved({"w": torch.ones(3)})}, FORMS[form])
    paths = [tensor.path for tensor in assert_comes_back(data).tensors]
    assert paths == [(name.removesuffix(".pt"),), ("sub/weights", "w")]


def test_a_name_in_two_parts() -> None:
    name = "d" * 100 + "/weights.pt"
    data = tar_bytes({name: saved({"w": torch.ones(2)})}, tarfile.USTAR_FORMAT)
    assert [tensor.path for tensor in assert_comes_back(data).tensors] == [(name.removesuffix(".pt"), "w")]


def test_files_of_all_kinds() -> None:
    array = io.BytesIO()
    np.save(array, np.ones(3))
    layout = assert_comes_back(
        tar_bytes({
            "a.npy": array.getvalue(), "a.pt": saved({"w": torch.ones(2)}), "empty": b"", "tar.tar": tar_bytes(nemo()),
            "old.pt": saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False),
            "zip.zip": zipped({"inner.pth": saved({"a": torch.ones(2)})}),
        })
    )  # fmt: skip
    assert [tensor.path for tensor in layout.tensors] == [("a.npy",), ("a.pt", "w"), ("old", "w")]


def test_a_store_shares_tensors_between_archives_and_gives_them_back(tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / f"{seed}.nemo").write_bytes(tar_bytes(nemo(seed)))
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(2):
            store.ingest(tmp_path / f"{seed}.nemo", run="asr", step=seed, hot=0)
        for seed in range(2):
            found = store[f"asr@{seed}"].state_dict()
            assert torch.equal(found["model_weights"]["encoder.weight"], state(seed)["encoder.weight"])
            store[f"asr@{seed}"].checkout(tmp_path / "out", force=True)
            assert (
                hashlib.sha256((tmp_path / "out").read_bytes()).digest()
                == hashlib.sha256((tmp_path / f"{seed}.nemo").read_bytes()).digest()
            )
        # The second one lacks the tokenizer's 100 kB.
        assert store["asr@1"].stored_bytes < 380_000
        assert store.verify().problems == []


def test_bytes_after_the_archive() -> None:
    data = tar_bytes(nemo())
    extra = np.random.default_rng(0).bytes(80_000)
    assert assert_comes_back(data + extra).extents[-1].path == ("__trailer__",)


def is_opaque(data: bytes) -> bool:
    layout = assert_comes_back(data)
    return layout.kind == "opaque" and not layout.tensors


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_archives_stay_bytes(mode: str) -> None:
    assert is_opaque(tar_bytes(nemo(), mode=mode))


def test_archives_of_old_torch_stay_bytes() -> None:
    # As torch wrote them: the sizes of storages, then of tensors, each followed by them.
    storage = pickle.dumps(1, 2) + pickle.dumps(("0", "cpu", "torch.FloatStorage"), 2) + np.ones(4, "f4").tobytes()
    files = {"sys_info": pickle.dumps({"little_endian": True}, 2), "pickle": pickle.dumps({}, 2), "tensors": b""}
    assert is_opaque(tar_bytes(files | {"storages": storage}))
    assert is_opaque(tar_bytes(files | {"storages": saved({"w": torch.ones(2)})}))


WEIGHTS = saved({"w": torch.ones(30)})
#: Archives with a readable file that are too unusual, or hostile.
UNREAD: dict[str, Callable[[], bytes]] = {
    "no file with tensors": lambda: tar_bytes({"a.txt": b"a" * 70_000}),
    "a sparse file": lambda: member(WEIGHTS) + header(kind=b"S"),
    "a sparse file of pax": lambda: member(b"22 GNU.sparse.major=1\n", kind=b"x") + member(WEIGHTS),
    "a part of another volume": lambda: member(WEIGHTS) + header(kind=b"M"),
    "an unknown type": lambda: member(WEIGHTS) + header(kind=b"!"),
    "a directory with data": lambda: member(WEIGHTS) + header(kind=b"5", size=b"00000001000\0"),
    "a negative size": lambda: member(WEIGHTS) + header(b"b", size=b"\xff" * 12),
    "a size that is no number": lambda: member(WEIGHTS) + header(b"b", size=b"0000000009\0"),
    "a name twice": lambda: member(WEIGHTS) + member(WEIGHTS),
    "a name twice, once below the current directory": lambda: member(WEIGHTS) + member(WEIGHTS, name=b"./a.pt"),
    "a damaged record": lambda: member(b"99 path=b\n", kind=b"x") + member(WEIGHTS),
    "a record of no length": lambda: member(b"0 path=b\n", kind=b"x") + member(WEIGHTS),
    "a name for all files": lambda: member(b"9 path=b\n", kind=b"g") + member(WEIGHTS),
    "a long name beyond the end": lambda: member(WEIGHTS) + header(kind=b"L", size=b"00077777777\0"),
    "a huge long name": lambda: member(bytes(2 << 20), kind=b"L") + member(WEIGHTS),
    "a first header that is damaged": lambda: b"b" + member(WEIGHTS)[1:],
    "many small files": lambda: member(WEIGHTS) + b"".join(member(b"x" * 60_000, name=b"%d" % n) for n in range(1200)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_unusual_archives_stay_bytes(name: str) -> None:
    assert is_opaque(UNREAD[name]() + bytes(1024))


def test_too_many_headers_stay_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_headers, "MAX_HEADERS", 1000)
    data = [member(WEIGHTS) + header(kind=b"5") * count + bytes(1024) for count in (990, 1000)]
    few, many = (parse(in_memory(one)) for one in data)
    assert few.kind == "tar"
    assert (many.kind, many.tensors) == ("opaque", [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: data[: len(data) // 2], "archive ends within a.pt|a.pt: "),
        (lambda data: data + header(b"b", size=b"\x80" + b"\x7f" * 11), "the archive ends within b"),
        (lambda data: data + header(b"b", size=b"77777777777\0"), "the archive ends within b"),
        (lambda data: data + b"x" * 512, "the header at byte .* is damaged"),
        (lambda data: data + b"x" * 100, "cut off before the zeros at its end"),
        (lambda data: data, "cut off before the zeros at its end"),
        (lambda data: data[:-1], "cut off before the zeros at its end"),
    ],
)
def test_damaged_archives_of_checkpoints_are_refused(make: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(in_memory(make(member(WEIGHTS))))


def test_names_lead_nowhere(tmp_path: Path) -> None:
    names = [b"../../up.pt", b"/etc/passwd.pt", b"a\n\xff.pt", b"link.pt"]
    data = b"".join(member(saved({"w": torch.ones(3) * n}), name=name) for n, name in enumerate(names))
    data += header(b"link", kind=b"2", _157=b"/etc/passwd") + bytes(1024)
    assert len(assert_comes_back(data).tensors) == 4
    (tmp_path / "a.tar").write_bytes(data)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "a.tar")
        assert len(store[1].state_dict()) == 4
        assert len(store[1].arrays) == 4
        store[1].checkout(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "out", "store"]


def test_every_flip_of_a_header_is_bounded() -> None:
    data = bytearray(member(b"x" * 600, name=b"b") + member(WEIGHTS) + bytes(1024))
    places = [*range(512), *range(1536, 2048)]
    for place in places:
        for bit in (0x01, 0x80):
            changed = bytearray(data)
            changed[place] ^= bit
            try:
                layout: FileLayout | None = parse(in_memory(bytes(changed)))
            except InputError:
                layout = None
            assert layout is None or layout.size == len(data)
