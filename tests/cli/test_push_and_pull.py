"""`ckstore push` and `pull`: output, refusals, and versions that arrive bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckstore.storage import root
from tests.checkpoints import flip, listing, packs_of


@pytest.fixture
def other(filled: Path, ckstore) -> Path:
    ckstore("init", filled / "other")
    return filled / "other"


def test_push_sends_missing_versions(ckstore, filled: Path, other: Path) -> None:
    out = ckstore("push", other, "gpt@10").out.splitlines()
    assert out[0].startswith("gpt@10 -> version 1  ")
    assert out[1].startswith("Sent 1 version, ")
    lines = ckstore("push", other, "--run", "gpt").out.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == [
        "gpt@0 -> version 2",
        "gpt@20 -> version 3, after version 1",
    ]
    assert lines[2].endswith("; 1 version there already.")
    before = listing(other)
    assert ckstore("push", other).out == "Sent 0 versions, 0 B; 3 versions there already.\n"
    assert listing(other) == before
    for step in (0, 10, 20):
        ckstore("--store", other, "checkout", f"gpt@{step}", "-o", "out.pt", "--force")
        assert (filled / "out.pt").read_bytes() == (filled / "in" / f"step{step}.pt").read_bytes()
    ckstore("--store", other, "verify")


def test_pull_names_versions_as_the_other_store_does(ckstore, filled: Path, other: Path) -> None:
    out = ckstore("--store", other, "pull", ".ckstore", "best", "--verify").out
    assert out.startswith("gpt@20 -> version 1  ")
    assert "\nReceived 1 version, " in out
    assert ckstore("--store", other, "tag").out.split()[-4:] == ["best", "1", "gpt", "20"]
    [sent] = ckstore("--store", other, "pull", ".ckstore", "gpt@0..gpt@10", "--json", "--dry-run").json[:1]
    assert (sent["run"], sent["step"], sent["from"]) == ("gpt", 0, 1)
    rows = ckstore("--store", other, "pull", ".ckstore", "--run", "gpt", "--json").json
    assert [(row["version"], row["from"], row["step"]) for row in rows] == [(2, 1, 0), (3, 2, 10)]
    assert all(row["sent"] > 0 for row in rows)
    assert "(near: gpt@20, " in ckstore("--store", other, "pull", ".ckstore", "gpt@21", code=13).sentence


def test_a_dry_run(ckstore, filled: Path, other: Path) -> None:
    before = listing(other)
    lines = ckstore("push", other, "--dry-run").out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["gpt@0", "gpt@10", "gpt@20"]
    assert lines[3].startswith("Would send 3 versions, ")
    assert listing(other) == before


def test_push_and_pull_refuse_invalid_arguments(ckstore, filled: Path, other: Path) -> None:
    missing = ckstore("push", "nowhere", code=10).sentence
    assert missing.startswith(f"{root.place('nowhere')} is not a store; run `ckstore init")
    for verb in ("push", "pull"):
        assert ckstore(verb, "ftp://models/a", code=2).sentence.startswith("ftp://models/a is a URL (ftp), ")
    assert ckstore("push", other, "gpt@0", "--run", "gpt", code=2).sentence == "Give versions or --run, not both."
    assert "see `ckstore push --help`" in ckstore("push", code=2).sentence


def test_a_conflict(ckstore, filled: Path, other: Path) -> None:
    ckstore("--store", other, "ingest", "in/step0.pt", "--run", "gpt", "--step", "10")
    result = ckstore("push", other, "gpt@10", code=12)
    assert result.sentence == (
        f"gpt@10 holds other content in {root.place(other)}, as version 1; forget it there, or name other versions."
    )
    result = ckstore("push", other, code=3)
    assert result.err.splitlines()[1] == "ckstore: 1 of 3 versions could not be sent; the others were."
    [said] = ckstore("push", other, "gpt@10", "--json", code=12).json
    assert (said["version"], said["step"], said["kind"], said["exit_code"]) == (2, 10, "conflict", 12)


def test_damage(ckstore, filled: Path, other: Path) -> None:
    shutil.copytree(filled / ".ckstore", filled / "copy")
    for pack in packs_of(filled / "copy"):
        flip(filled / "copy", pack, lambda _: 1000)
    result = ckstore("--store", "copy", "push", other, code=4)
    assert len(result.err.splitlines()) == 3
    assert "does not match its name; restore it from a copy" in result.err
    assert ckstore("--store", other, "log", "--json").json == []


def test_forgotten_versions_are_counted_and_sent_on_demand(ckstore, filled: Path, other: Path) -> None:
    ckstore("push", other)
    ckstore("--store", other, "tag", "--delete", "best")
    ckstore("--store", other, "forget", "gpt@20")
    assert ckstore("push", other).out.splitlines() == [
        "Sent 0 versions, 0 B; 2 versions there already.",
        "1 version was forgotten there; --restore sends it again.",
    ]
    ckstore("--store", other, "forget", "gpt@0..gpt@10")
    assert ckstore("push", other, "--dry-run").out.splitlines() == [
        "Would send 0 versions, 0 B.",
        "3 versions were forgotten there; --restore sends them again.",
    ]
    assert ckstore("--store", other, "pull", ".ckstore", "--dry-run").out.splitlines() == [
        "Would receive 0 versions, 0 B.",
        "3 versions were forgotten here; --restore fetches them again.",
    ]
    said = ckstore("push", other, "gpt@0", "--json").json
    assert said == [{"version": 1, "run": "gpt", "step": 0, "forgotten": True}]
    assert ckstore("push", other, "--restore").out.splitlines()[-1].startswith("Sent 3 versions, ")
    assert len(ckstore("--store", other, "log", "--json").json) == 3
