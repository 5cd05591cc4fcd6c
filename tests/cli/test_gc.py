"""`ckstore gc`: freed bytes, output and refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckstore as library
from ckstore.cli.output import size_text
from ckstore.gc import collect
from tests.checkpoints import change_pack, listing, pack_bytes, packs_of


def size(place: Path) -> int:
    return pack_bytes(place / ".ckstore")


def test_gc_frees_forgotten_versions(ckstore, filled: Path) -> None:
    assert ckstore("gc").out == "Nothing to do: no garbage.\n"
    original = (filled / "in" / "step20.pt").stat().st_size
    [planned] = ckstore("forget", "gpt@0", "gpt@10", "--dry-run", "--json").json
    ckstore("forget", "gpt@0", "gpt@10")
    before, files = size(filled), listing(filled / ".ckstore")
    assert ckstore("gc", "--grace", "0", "--dry-run").out.startswith("Would free ")
    [expected] = ckstore("gc", "--grace", "0", "--dry-run", "--json").json
    assert planned["freed"] == expected["bytes"]
    assert listing(filled / ".ckstore") == files
    [report] = ckstore("gc", "--grace", "0", "--json").json
    assert report["bytes"] == before - size(filled) > 0
    assert report["bytes"] == pytest.approx(expected["bytes"], abs=0.01 * before)
    assert {**report, "bytes": 0} == {**expected, "bytes": 0, "dry_run": False}
    assert report["in_full"] > 0
    assert size(filled) < original, "a store is never larger than the files of the versions that are left"
    assert "No problems" in ckstore("verify").out
    ckstore("checkout", "gpt@20", "-o", "out.pt")
    assert (filled / "out.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    rows = ckstore("log", "--json").json
    ckstore("recover")
    assert ckstore("log", "--json").json == rows


def test_bytes_of_forgotten_versions_are_explained(ckstore, filled: Path) -> None:
    ckstore("forget", "gpt@0", "gpt@10")
    [kept] = ckstore("gc", "--json").json
    said = f"{size_text(kept['kept'])} of forgotten or thinned versions stay for `ckstore undo`, the first until "
    said += f"{kept['until'][:10]} "
    assert kept["bytes"] == 0
    for verb in ("gc", "stats"):
        assert ckstore(verb).sentence.startswith(said)
        assert "`ckstore gc --grace 0` frees them now" in ckstore(verb).sentence
    assert "belong to no version in this list; `ckstore stats` says" in ckstore("log").sentence
    ckstore("gc", "--grace", "0")
    assert ckstore("log").err == ckstore("stats").err == ckstore("gc").err == ""


def test_a_gc_that_frees_nothing_says_what_holds_the_bytes(ckstore, place: Path) -> None:
    """Two runs of patches share one large base: together they take fewer bytes with it than in full."""
    weight = torch.randn(300, 300)
    for name in ("base", "a", "b"):
        torch.save({"weight": weight}, f"{name}.pt")
        weight[0, 0] += 1
    for name, parent in (("base", ()), ("a", ("--parent", "base")), ("b", ("--parent", "base"))):
        ckstore("ingest", f"{name}.pt", "--run", name, *parent)
        ckstore("encode")
    ckstore("forget", "base")
    said = ckstore("gc", "--grace", "0")
    held = ckstore("stats", "--ledger", "--json").json[0]["ledger"]["held"]
    assert held > 0.5 * (place / "a.pt").stat().st_size
    said = ckstore("gc", "--grace", "0")
    assert said.out == "Nothing to do: no garbage.\n"
    assert (
        said.sentence
        == ckstore("stats").sentence
        == (
            f"{size_text(held)} of forgotten versions stay: present ones are stored against them, in fewer bytes than"
            " in full. `ckstore rebase` would save none."
        )
    )
    before = size(place)
    ckstore("rebase", "--run", "a")
    ckstore("rebase", "--run", "b")
    ckstore("gc", "--grace", "0")
    assert size(place) > 1.5 * before


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
    ckstore("forget", "gpt@0")
    with library.open(filled / ".ckstore") as store, store._catalog.lease("gc"):
        assert str(os.getpid()) in ckstore("gc", code=11).sentence
