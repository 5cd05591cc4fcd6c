"""`ckstore init`."""

from __future__ import annotations

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
