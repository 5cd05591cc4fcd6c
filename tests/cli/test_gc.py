"""`ckstore gc`: freed bytes, output and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckstore as library
from ckstore.gc import collect
from tests.checkpoints import change_pack, listing, pack_bytes, packs_of


def size(place: Path) -> int:
    return pack_bytes(place / ".ckstore")


def test_gc_frees_forgotten_versions(ckstore, filled: Path) -> None:
    assert ckstore("gc").out == "Nothing to do: no garbage.\n"
    ckstore("forget", "gpt@0", "gpt@10")
    before, files = size(filled), listing(filled / ".ckstore")
    said = ckstore("gc", "--dry-run").out
    assert said.startswith("Would free ")
    [expected] = ckstore("gc", "--dry-run", "--json").json
    assert listing(filled / ".ckstore") == files
    [report] = ckstore("gc", "--grace", "0", "--json").json
    assert report["bytes"] == before - size(filled) > 0
    assert {**report, "bytes": 0} == {**expected, "bytes": 0, "dry_run": False}
    assert "No problems" in ckstore("verify").out
    ckstore("checkout", "gpt@20", "-o", "out.pt")
    assert (filled / "out.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    rows = ckstore("log", "--json").json
    ckstore("recover")
    assert ckstore("log", "--json").json == rows


def test_bytes_of_forgotten_versions_are_explained(ckstore, filled: Path) -> None:
    ckstore("forget", "gpt@0", "gpt@10")
    assert "of forgotten versions are left: `ckstore gc` frees their garbage" in ckstore("stats").sentence
    ckstore("gc", "--grace", "0")
    said = ckstore("gc", "--grace", "0")
    assert said.out == "Nothing to do: no garbage.\n"
    assert "need the rest until `ckstore rebase` stores them in full" in said.sentence
    ckstore("rebase", "--run", "gpt")
    ckstore("gc", "--grace", "0")
    assert ckstore("stats").err == ckstore("gc").err == ""
    assert size(filled) < 1.1 * (filled / "in" / "step20.pt").stat().st_size


@pytest.mark.local
def test_files_that_were_left(ckstore, filled: Path) -> None:
    left = filled / ".ckstore" / "packs" / ".tmp-999999999-00"
    left.write_bytes(b"half a pack")
    assert "Nothing to do" in ckstore("gc").out
    assert ckstore("gc", "--grace", "0").out == "Freed 11 B: 1 file of killed processes.\n"
    assert not left.exists()
    ckstore("gc", "--grace", "-1", code=2)


def test_damage(ckstore, filled: Path) -> None:
    pack = packs_of(filled / ".ckstore")[0]
    data = change_pack(filled / ".ckstore", pack, None)
    change_pack(filled / ".ckstore", pack, data[:100])
    ckstore("forget", "gpt@0")
    before = listing(filled / ".ckstore")
    assert pack in ckstore("gc", code=4).sentence
    assert listing(filled / ".ckstore") == before


def test_another_one_at_work(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "PATIENCE", 0.1)
    with library.open(filled / ".ckstore") as store, store._catalog.lease("gc"):
        assert str(os.getpid()) in ckstore("gc", code=11).sentence
