"""`ckstore ls`: tensors, globs over their paths, and how they are stored."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


def test_json(ckstore, filled: Path) -> None:
    tensors = {item["path"]: item for item in ckstore("ls", "best", "--json").json}
    assert tensors == {
        "model/weight": {"path": "model/weight", "dtype": "float32", "shape": [320, 256], "elements": 81920},
        "model/frozen": {"path": "model/frozen", "dtype": "float32", "shape": [300, 256], "elements": 76800},
        "model/bias": {"path": "model/bias", "dtype": "float32", "shape": [7], "elements": 7},
        "model/scale": {"path": "model/scale", "dtype": "float32", "shape": [3], "elements": 3},
        "model/late": {"path": "model/late", "dtype": "bfloat16", "shape": [2, 2], "elements": 4},
        "order/[0]": {"path": "order/[0]", "dtype": "int64", "shape": [5], "elements": 5},
    }


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        (["model"], ["weight", "frozen", "bias", "scale", "late"]),
        (["model/*s", "*/late"], ["bias", "late"]),
        (["order/[0]"], ["[0]"]),
        (["model/?ias"], ["bias"]),
    ],
)
def test_globs(ckstore, filled: Path, globs: list[str], names: list[str]) -> None:
    assert [item["path"].split("/")[-1] for item in ckstore("ls", "best", *globs, "--json").json] == names


def test_nothing_matches(ckstore, filled: Path) -> None:
    assert "model/weight" in ckstore("ls", "best", "model/wieght", code=13).sentence


def test_long(ckstore, filled: Path) -> None:
    tensors = {item["path"]: item for item in ckstore("ls", "best", "-l", "--json").json}
    weight, bias, frozen = (tensors[f"model/{name}"] for name in ("weight", "bias", "frozen"))
    assert not weight["bundled"]
    assert bias["bundled"]
    assert weight["form"] == "delta"
    assert frozen["form"] == "full"
    assert frozen["depth"] == 0
    assert 1 <= weight["depth"] <= 2
    assert 0 < weight["bits"] < 32


def test_table(ckstore, filled: Path) -> None:
    heading, *lines = ckstore("ls", "best").out.splitlines()
    assert heading.split() == ["DTYPE", "SHAPE", "ELEMENTS", "PATH"]
    assert ["float32", "320x256", "81,920", "model/weight"] in [line.split() for line in lines]
    heading, *lines = ckstore("ls", "best", "-l").out.splitlines()
    assert heading.split()[3:] == ["FORM", "DEPTH", "BITS", "PATH"]
    assert any("(bundle)" in line for line in lines)


def test_a_moving_name_is_resolved_in_the_output(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step10.pt", "--run", "gpt", "--step", 5)
    for name in ("latest", "gpt@latest", "gpt"):
        number, step = (4, 5) if name == "latest" else (3, 20)
        assert ckstore("ls", name).sentence == f"{name} is gpt@{step}, version {number}."
        assert ckstore("diff", "1", name).sentence == f"{name} is gpt@{step}, version {number}."
        assert ckstore("verify", name).sentence == f"{name} is gpt@{step}, version {number}."
    for name in ("1", "best", "gpt@10"):
        assert ckstore("ls", name).err == ""


#: Names in a tar of torch before 0.1.10.
OLD_TAR = ("sys_info", "pickle", "storages", "tensors")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("x.pt.gz", lambda data: gzip.compress(data), "compressed with gzip: unpack it"),
        ("x.zst", lambda data: bytes.fromhex("28b52ffd") + data, "compressed with zstd: unpack it"),
        ("x.tar", lambda data: tarred(data), "a tar archive in which no file holds tensors"),
        ("x.pkl", lambda data: pickle.dumps({"a": 1}), "a pickle that was not written by torch"),
        (
            "x.old",
            lambda data: tarred(data, "sys_info", "pickle", "storages", "tensors"),
            "a tar of torch before 0.1.10",
        ),
        (
            "x.jit",
            lambda data: scripted(),
            "a program of TorchScript: for tensors and deltas, store its `state_dict()`",
        ),
        ("x.zip", lambda data: zipped(data), "a zip archive in which no stored file holds tensors"),
        ("x.txt", lambda data: b"text", "of a kind whose tensors cannot be read"),
        ("x.pt", lambda data: data[:-500], "damaged (the archive has no directory at its end: the file is cut off)"),
        (
            "x.pt",
            lambda data: data.replace(bytes(3999), b"!" * 3999),
            "stored with `ckstore ingest --force`, or before files",
        ),
    ],
)
def test_why_a_file_is_bytes(ckstore, here: Path, name: str, make: Callable[[bytes], bytes], why: str) -> None:
    torch.save({"a": torch.zeros(100_000)}, here / "whole")
    (here / name).write_bytes(make((here / "whole").read_bytes()))
    ckstore("init")
    ckstore("ingest", name, "--run", "a", "--step", "1", "--force")
    assert ckstore("ls", "a@1").err.startswith(f"ckstore: {name} is bytes: {why}")


def tarred(data: bytes, *names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names or ("x.pt",):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO(data))
    return out.getvalue()


def scripted() -> bytes:
    out = io.BytesIO()
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 3), torch.zeros(1, 2)), out)
    return out.getvalue()


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.pt", data)
    return out.getvalue()


def test_a_directory_of_orbax_is_bytes_and_says_so(ckstore, here: Path) -> None:
    manifest = b"\x0c\xdb\x3a\x2aq" + bytes(200)
    root = here / "checkpoints/100"
    for place, data in (
        ("_CHECKPOINT_METADATA", b"{}"), ("_METADATA", b"{}"), ("manifest.ocdbt", manifest),
        ("ocdbt.process_0/manifest.ocdbt", manifest), ("ocdbt.process_0/d/43c1e03b4df6b9ad", bytes(range(256)) * 400),
    ):  # fmt: skip
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_bytes(data)
    ckstore("init")
    ckstore("ingest", str(root), "--run", "a")
    said = ckstore("ls", "a@100").err
    assert said.startswith(
        "ckstore: manifest.ocdbt, ocdbt.process_0/manifest.ocdbt are bytes: a database of Orbax, whose"
    )
    ckstore("checkout", "a@100", "-o", str(here / "back"))
    for path in root.rglob("*"):
        if path.is_file():
            assert (here / "back" / path.relative_to(root)).read_bytes() == path.read_bytes()
    proposed = ckstore("ingest", str(here / "checkpoints"), "--recursive", "--dry-run", "--json").json
    assert [item["path"] for item in proposed] == [str(root)]
    assert proposed[0]["note"].startswith("holds no tensors: a database of Orbax")
