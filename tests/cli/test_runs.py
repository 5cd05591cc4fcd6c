"""`ckstore runs`: list, rename."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_runs(ckstore, filled: Path) -> None:
    """A line for each run; versions of several runs are grouped."""
    ckstore("ingest", "in/step0.pt", "--run", "other", "--parent", "gpt@10", "--metric", "loss=2")
    ckstore("ingest", "in/step10.pt", "--run", "gpt", "--step", "5", "--metric", "loss=1.5")
    assert [line.split()[1:3] for line in ckstore("log").out.splitlines()[1:]] == [
        ["gpt", "0"], ["gpt", "5"], ["gpt", "10"], ["gpt", "20"], ["other", "0"],
    ]  # fmt: skip
    assert [row["version"] for row in ckstore("log", "--json").json] == [1, 2, 3, 4, 5]
    assert ckstore("log", "gpt", "--json").json[-1]["parent"] == 1
    heading, *lines = ckstore("runs").out.splitlines()
    assert heading.split() == ["RUN", "VERSIONS", "STEPS", "LAST", "BEST", "SIZE", "STORED", "PARENT", "TAGS"]
    assert lines[0].split()[:4] == ["gpt", "4", "0..20", "gpt@20"]
    assert "loss 1.5 at 5" in lines[0]
    assert lines[1].split()[:4] == ["other", "1", "0", "other@0"]
    assert lines[1].split()[-2:] == ["2", "-"]
    ckstore("metric", "other@0", "--", "-loss=3", "step=7", "a=nan")
    assert "-loss 3 at 0, loss 2 at 0, step 7 at 0  " in ckstore("runs").out


def test_forms(ckstore, filled: Path) -> None:
    assert [row["run"] for row in ckstore("runs", "--json").json] == ["gpt"]
    assert ckstore("runs", "--format", "csv").out.startswith("run,versions,steps,last,best,size,stored,parent,tags\n")
    assert ckstore("runs", "gpt").out == ckstore("runs").out


def test_a_run_gets_another_name(ckstore, filled: Path) -> None:
    assert ckstore("runs", "gpt", "--rename", "small").out == "Run gpt is small.\n"
    assert [row["run"] for row in ckstore("log", "--json").json] == ["small"] * 3
    assert ckstore("show", "best", "--json").json["run"] == "small"
    ckstore("runs", "small", "--rename", "gpt")
    assert ckstore("tag", "gpt", "final").out == "final is gpt@20, version 3.\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["gtp"], 13, "Unknown run gtp (near: gpt); `ckstore runs` lists the runs."),
        (["gtp", "--rename", "x"], 13, "near: gpt"),
        (["gpt", "--rename", "best"], 2, "best is a tag"),
        (["gpt", "--rename", "17"], 2, "is a number"),
        (["gpt", "--rename", "gpt"], 12, "There is a run gpt already"),
        (["--rename", "x"], 2, "ckstore runs RUN --rename NAME"),
        (["gpt", "--rename", "x", "--json"], 2, "leave it out, or --rename"),
        (["--format", "csv", "--json"], 2, "leave it out, or --rename and --format csv"),
    ],
)
def test_refused(ckstore, filled: Path, arguments: list[str], code: int, sentence: str) -> None:
    assert sentence in ckstore("runs", *arguments, code=code).sentence
    assert [row["run"] for row in ckstore("runs", "--json").json] == ["gpt"]


def test_nothing_there(ckstore, place: Path) -> None:
    assert "ckstore ingest" in ckstore("runs").err
    assert ckstore("runs", "--json").json == []
