"""`ckstore forget`: its output, its refusals, and its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.cli.output import size_text
from tests.checkpoints import listing


def steps(ckstore) -> list[int]:
    return [row["step"] for row in ckstore("log", "--json").json]


def test_versions_and_ranges(ckstore, filled: Path) -> None:
    predicted = ckstore("forget", "gpt@0..gpt@10", "--dry-run").out
    out = ckstore("forget", "gpt@0..gpt@10").out.splitlines()
    assert out[:2] == ["gpt@0 (version 1)", "gpt@10 (version 2)"]
    frees = ckstore("gc", "--grace", "0", "--dry-run", "--json").json[0]["bytes"]
    after = "`ckstore undo` brings them back. After 7 days `ckstore gc` frees"
    assert predicted.splitlines()[2] == f"Would forget 2 versions; {after} {size_text(frees)}."
    assert out[2] == f"Forgot 2 versions; {after} the bytes that no other version needs."
    assert steps(ckstore) == [20]
    ckstore("checkout", "gpt@20", "-o", "out.pt")
    assert (filled / "out.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    assert "(near: gpt@20)" in ckstore("forget", "gpt@10", code=13).sentence


@pytest.mark.parametrize("verb", ["forget", "thin"])
def test_the_name_of_a_run_says_that_it_is_one_version(ckstore, filled: Path, verb: str) -> None:
    said = "gpt is its last version, gpt@20; --run gpt selects all 3."
    assert said in ckstore(verb, "gpt", "--keep-last", 1).err
    assert said not in ckstore(verb, "--run", "gpt", "--keep-last", 1, "--keep-tagged", "--dry-run").err


def test_a_dry_run(ckstore, filled: Path) -> None:
    before = listing(filled / ".ckstore")
    assert "Would forget 1 version; `ckstore undo` " in ckstore("forget", "gpt@0", "--dry-run").out
    [report] = ckstore("forget", "--run", "gpt", "--keep-last", "1", "--dry-run", "--json").json
    assert report == {
        "versions": [{"version": 1, "run": "gpt", "step": 0}, {"version": 2, "run": "gpt", "step": 10}],
        "freed": report["freed"],
        "dry_run": True,
    }
    assert report["freed"] > 100_000
    assert steps(ckstore) == [0, 10, 20]
    assert listing(filled / ".ckstore") == before


def test_undo(ckstore, filled: Path) -> None:
    before = ckstore("log", "--json").json
    ckstore("undo", code=13)
    ckstore("forget", "gpt@0..gpt@10")
    assert [row["step"] for row in ckstore("log", "--forgotten", "--json").json] == [0, 10]
    assert ckstore("undo").out == "gpt@0 (version 1)\ngpt@10 (version 2)\nBrought back 2 versions.\n"
    assert ckstore("log", "--json").json == [{**row, "hot": False} for row in before]
    assert ckstore("log", "--forgotten").err == "No version can be brought back.\n"
    ckstore("checkout", "gpt@0", "-o", "out.pt")
    assert (filled / "out.pt").read_bytes() == (filled / "in" / "step0.pt").read_bytes()


def test_pruning_frees_at_once(ckstore, filled: Path) -> None:
    size = sum(listing(filled / ".ckstore").values())
    assert ckstore("forget", "gpt@0", "gpt@10", "--prune").out.splitlines()[2].endswith(", for good.")
    assert sum(listing(filled / ".ckstore").values()) < 0.8 * size
    ckstore("undo", code=13)


def test_a_tagged_version(ckstore, filled: Path) -> None:
    said = ckstore("forget", "--run", "gpt", code=12).sentence
    assert "`ckstore tag --delete best`" in said
    assert steps(ckstore) == [0, 10, 20]
    ckstore("tag", "--delete", "best")
    ckstore("forget", "--run", "gpt")
    assert ckstore("log", "--json").json == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2), (["gpt@0", "--run", "gpt"], 2), (["gpt@20..gpt@0"], 2), (["gpt@0.."], 2), (["nowhere"], 13),
        (["--run", "x"], 13), (["gpt", "--keep-last", "0"], 2),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(ckstore, filled: Path, arguments: list[str], code: int) -> None:
    assert ckstore("forget", *arguments, code=code).sentence
    assert steps(ckstore) == [0, 10, 20]
