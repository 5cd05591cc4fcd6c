"""`ckstore checkout`: the same bytes, other formats, and what is refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckstore.storage.catalog import Catalog
from tests.checkpoints import without_compiling

from .conftest import checkpoint


@pytest.mark.parametrize("step", [0, 10, 20])
def test_the_same_bytes(ckstore, filled: Path, step: int) -> None:
    original = filled / "in" / f"step{step}.pt"
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert digest in ckstore("checkout", f"gpt@{step}", "-o", "out.pt").out
    assert (filled / "out.pt").read_bytes() == original.read_bytes()
    assert (filled / "out.pt").stat().st_mtime_ns == original.stat().st_mtime_ns


def test_the_default_name(ckstore, filled: Path) -> None:
    ckstore("checkout", "best")
    assert (filled / "step20.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    (filled / "into").mkdir()
    ckstore("checkout", "best", "-o", "into")
    assert (filled / "into" / "step20.pt").is_file()


def test_nothing_is_overwritten_unless_forced(ckstore, filled: Path) -> None:
    (filled / "step20.pt").write_text("mine")
    assert "--force" in ckstore("checkout", "best", code=12).sentence
    assert (filled / "step20.pt").read_text() == "mine"
    ckstore("checkout", "best", "--force")
    assert (filled / "step20.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()


def test_a_link_is_not_written_through(ckstore, filled: Path) -> None:
    (filled / "mine").write_text("mine")
    (filled / "step20.pt").symlink_to("mine")
    ckstore("checkout", "best", code=12)
    ckstore("checkout", "best", "--force")
    assert (filled / "mine").read_text() == "mine"
    assert not (filled / "step20.pt").is_symlink()


def test_a_directory(ckstore, place: Path) -> None:
    tree = place / "checkpoint-5"
    (tree / "sub").mkdir(parents=True)
    shutil.copy(place / "in" / "step0.pt", tree / "sub" / "model.pt")
    (tree / "config.json").write_text("{}")
    (tree / "link").symlink_to("config.json")
    ckstore("ingest", "checkpoint-5")
    shutil.move(tree, place / "original")
    assert "2 files" in ckstore("checkout", "main@0").out
    assert (tree / "sub" / "model.pt").read_bytes() == (place / "in" / "step0.pt").read_bytes()
    assert os.readlink(tree / "link") == "config.json"
    ckstore("checkout", "main@0", code=12)
    assert "directory" in ckstore("checkout", "main@0", "-o", "-", code=2).sentence


def test_stdout(filled: Path) -> None:
    command = [sys.executable, "-m", "ckstore", "checkout", "best", "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == (filled / "in" / "step20.pt").read_bytes()
    assert without_compiling(done.stderr.decode()) == ""


@pytest.mark.parametrize("form", ["safetensors", "pt", "npz"])
def test_other_formats(ckstore, filled: Path, form: str) -> None:
    ckstore("checkout", "gpt@10", "--format", form, "--include", "model/*", "--exclude", "model/frozen")
    path = filled / f"step10.{form}"
    if form == "safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
    elif form == "npz":
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
    else:
        found = torch.load(path, weights_only=True)
        found = found.get("model", found)
    expected = checkpoint(10)["model"]
    names = {name.removeprefix("model/").removeprefix("model."): name for name in found}
    assert names.keys() == expected.keys() - {"frozen"}
    assert all(torch.equal(found[name], expected[short]) for short, name in names.items())


def test_another_format_is_not_overwritten(ckstore, filled: Path) -> None:
    (filled / "w.pt").write_text("mine")
    ckstore("checkout", "best", "--format", "pt", "-o", "w.pt", code=12)
    assert (filled / "w.pt").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--include", "model/*"],
        ["--exclude", "x"],
        ["--format", "tar"],
        ["--format", "npz", "-o", "-"],
        ["-o", "no/dir"],
    ],
)
def test_calls_that_cannot_be_meant(ckstore, filled: Path, arguments: list[str]) -> None:
    before = sorted(filled.iterdir())
    assert ckstore("checkout", "best", *arguments, code=2).sentence
    assert sorted(filled.iterdir()) == before


@pytest.mark.parametrize(("name", "near"), [("bset", "best"), ("gpt@11", "gpt@10"), ("gtp", "gpt"), ("99", "log")])
def test_near_matches(ckstore, filled: Path, name: str, near: str) -> None:
    assert near in ckstore("checkout", name, code=13).sentence


def test_require_exact(ckstore, filled: Path) -> None:
    ckstore("checkout", "best", "--require-exact", "-o", "exact.pt")
    with Catalog.open(filled / ".ckstore", "a") as catalog:
        catalog.update_version(3, fidelity="coarse")
    assert "no exact values" in ckstore("checkout", "best", "--require-exact", "-o", "coarse.pt", code=4).sentence
    assert not (filled / "coarse.pt").exists()


def test_a_damaged_pack(ckstore, filled: Path) -> None:
    for pack in (filled / ".ckstore" / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
        pack.write_bytes(data)
    ckstore("checkout", "best", "-o", "out.pt", code=4)
    assert not (filled / "out.pt").exists()
    assert [path for path in filled.iterdir() if path.name.startswith(".tmp")] == []


@pytest.mark.parametrize("target", ["/proc/out.pt", "x" * 300, "/dev/null/out.pt", "in/step0.pt/out.pt"])
@pytest.mark.parametrize("options", [[], ["--format", "npz"]], ids=["original", "npz"])
def test_an_impossible_place_is_one_sentence(ckstore, filled: Path, target: str, options: list[str]) -> None:
    sentence = ckstore("checkout", "best", "-o", target, *options, code=2).sentence
    assert "choose another path" in sentence or "make it first" in sentence
