"""`ckstore init`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKSTORE", raising=False)


@pytest.mark.local
def test_the_default_place(ckstore, tmp_path: Path) -> None:
    assert ".ckstore" in ckstore("init").out
    assert (tmp_path / ".ckstore" / "catalog.sqlite").is_file()
    ckstore("log")


def test_a_named_place(ckstore, tmp_path: Path) -> None:
    ckstore("init", "a/b")
    ckstore("--store", "c", "init")
    ckstore("--store", "a/b", "log")
    ckstore("--store", "c", "log")
    assert not (tmp_path / ".ckstore").exists()


@pytest.mark.local
def test_nothing_is_overwritten(ckstore, tmp_path: Path) -> None:
    ckstore("init", "store")
    before = (tmp_path / "store" / "catalog.sqlite").read_bytes()
    assert "is already a store" in ckstore("init", "store", code=12).sentence
    assert (tmp_path / "store" / "catalog.sqlite").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "not empty" in ckstore("init", "full", code=12).sentence
    (tmp_path / "file").touch()
    assert "is a file" in ckstore("init", "file", code=12).sentence


@pytest.mark.local
def test_a_store_below_another_says_so(ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckstore("init").out == "Made a store at .ckstore.\n"
    said = ckstore("init", "backup").out.splitlines()
    assert said == ["Made a store at backup.", "Without --store, commands still use .ckstore."]
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    said = ckstore("init").out.splitlines()
    assert said == ["Made a store at .ckstore.", "Commands in its directory use it now, no longer ../../.ckstore."]
    monkeypatch.setenv("CKSTORE", str(tmp_path / ".ckstore"))
    assert ckstore("init", "named").out == "Made a store at named.\n"
    monkeypatch.delenv("CKSTORE")
    monkeypatch.chdir(tmp_path / "backup" / "packs")
    said = ckstore("init", "inside").out.splitlines()
    assert said == ["Made a store at inside.", "Without --store, commands still use ..."]
    assert ckstore("init", "--shared", "s3://bucket/store", code=2).sentence.endswith("are those of the bucket.")


@pytest.mark.local
def test_git_ignores_a_store(ckstore, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    ckstore("init")
    (tmp_path / "mine").touch()
    git("add", "-A")
    assert git("ls-files") == "mine\n"
    # An interrupted `init` leaves this file, whose author is known by its content.
    (tmp_path / "begun").mkdir()
    shutil.copy(".ckstore/.gitignore", "begun/.gitignore")
    ckstore("init", "begun")
    (tmp_path / "yours").mkdir()
    (tmp_path / "yours" / ".gitignore").write_text("*.pt\n")
    assert "not empty (it has .gitignore)" in ckstore("init", "yours", code=12).sentence
