"""`ckstore log`: which versions, in which order, in which form."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

import ckstore as library
from tests.checkpoints import pack_bytes

KEYS = {
    "version", "id", "run", "step", "parent", "base", "depth", "bytes", "stored", "ratio", "cost", "fidelity",
    "hot", "superseded", "dropped", "elements", "tensors", "files", "tags", "metrics", "config", "made",
    "source", "created",
}  # fmt: skip


def test_json(ckstore, filled: Path) -> None:
    rows = ckstore("log", "--json").json
    assert all(row.keys() == KEYS for row in rows)
    assert [(row["version"], row["run"], row["step"], row["parent"], row["tags"]) for row in rows] == [
        (1, "gpt", 0, None, []),
        (2, "gpt", 10, 1, []),
        (3, "gpt", 20, 2, ["best"]),
    ]
    assert rows[0]["base"]
    assert [row["bytes"] for row in rows] == [(filled / "in" / f"step{step}.pt").stat().st_size for step in (0, 10, 20)]
    assert sum(row["stored"] for row in rows) == pack_bytes(filled / ".ckstore")


def test_table(ckstore, filled: Path) -> None:
    heading, *lines = ckstore("log").out.splitlines()
    names = heading.lower().split()
    assert names[:6] == ["version", "run", "step", "parent", "kind", "depth"]
    assert names[6:] == ["size", "stored", "ratio", "cost", "tags", "created", "(utc)"]
    assert [line.split()[:4] for line in lines] == [
        ["1", "gpt", "0", "-"],
        ["2", "gpt", "10", "1"],
        ["3", "gpt", "20", "2"],
    ]
    assert "best" in lines[2]
    assert len({line.index("gpt") for line in lines}) == 1


def test_one_run_and_the_last(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "other")
    assert [row["step"] for row in ckstore("log", "gpt", "-n", 2, "--json").json] == [10, 20]
    assert [row["run"] for row in ckstore("log", "--run", "other", "--json").json] == ["other"]
    assert ckstore("log", "-n", 0, "--json").json == []
    assert len(ckstore("log", "-n", 99, "--json").json) == 4
    ckstore("log", "gpt", "--run", "other", code=2)


def test_several_runs(ckstore, filled: Path) -> None:
    for number, loss in enumerate((3, 1, 2)):
        ckstore("ingest", f"in/step{number * 10}.pt", "--run", "abc"[number], "--metric", f"loss={loss}")
    best = ckstore("log", "a", "c", "--sort", "best:loss", "-n", 1, "--json").json
    assert [row["run"] for row in best] == ["c"]
    assert [row["run"] for row in ckstore("log", "c", "gpt", "c", "--json").json] == ["gpt", "gpt", "gpt", "c"]
    assert [row["run"] for row in ckstore("log", "c", "gpt", "-n", 2, "--json").json] == ["gpt", "c"]
    ckstore("log", "gpt", "none", code=13)


def test_a_graph_of_forks(ckstore, filled: Path) -> None:
    """A fork from another run, a run of its own, and a version whose parent was forgotten."""
    ckstore("ingest", "in/step10.pt", "--run", "fork", "--step", 30, "--parent", "gpt@10")
    (filled / "in" / "alone.bin").write_bytes(b"not like the others")
    ckstore("ingest", "in/alone.bin", "--run", "alone", "--step", 5, "--force")
    ckstore("ingest", "in/step20.pt", "--run", "alone", "--step", 6)
    heading, *lines = ckstore("log", "--graph").out.splitlines()
    assert heading.split()[:4] == ["GRAPH", "VERSION", "RUN", "STEP"]
    assert [line[:5].rstrip() for line in lines] == ["*", "*", "  *", "* |", "|/", "*", "*"]
    assert [line[5:].split()[:1] for line in lines] == [["6"], ["5"], ["4"], ["3"], [], ["2"], ["1"]]
    ckstore("forget", "gpt@10")
    lines = ckstore("log", "--graph", "--columns", "step,run").out.splitlines()[1:]
    assert sum("*" in line for line in lines) == 5
    assert len(ckstore("log", "gpt", "--graph", "-n", 1).out.splitlines()) == 2
    assert "of its own" in ckstore("log", "--graph", "--json", code=2).sentence


def test_a_graph_of_many_forks() -> None:
    """Lines of three forks join one by one, and no version is drawn twice or left out."""
    from ckstore.cli.graph import drawn

    rows = list(drawn([(7, 2), (6, 3), (5, 2), (4, 2), (3, 1), (2, 1), (1, None)]))
    assert [text for _, text in rows] == [
        "*", "| *", "| | *", "| | | *", "| * | |", "|_|_|/", "|_|/", "* |", "|/", "*",
    ]  # fmt: skip
    assert [number for number, _ in rows if number] == [7, 6, 5, 4, 3, 2, 1]


def test_metrics_are_shown_sorted_and_compared(ckstore, filled: Path) -> None:
    for step, loss in ((0, 3.0), (10, 1.25)):
        ckstore("metric", f"gpt@{step}", f"val_loss={loss}")
    heading, *lines = ckstore("log", "--sort", "val_loss").out.splitlines()
    assert heading.split()[-1] == "VAL_LOSS"
    assert [line.split()[0] for line in lines] == ["2", "1", "3"]
    assert [line.split()[-1] for line in lines] == ["1.25", "3", "-"]
    assert [row["step"] for row in ckstore("log", "--where", "val_loss<2", "--json").json] == [10]
    assert [row["step"] for row in ckstore("log", "--where", "tags=best", "--json").json] == [20]
    table = ckstore("log", "--columns", "step,val_loss,size", "--sort", "-step").out.splitlines()
    assert table[0].split() == ["STEP", "VAL_LOSS", "SIZE"]
    assert table[2].split()[:2] == ["10", "1.25"]
    assert ckstore("log", "--columns", "step,val_loss", "--json").json[1] == {"step": 10, "val_loss": 1.25}
    assert "there are version, " in ckstore("log", "--sort", "nothing", code=2).sentence
    assert "not a condition" in ckstore("log", "--where", "val_loss", code=2).sentence


def test_best_versions_come_first_and_nan_last(ckstore, filled: Path) -> None:
    for step, loss, accuracy in ((0, 3.0, 0.1), (10, 1.25, 0.5), (20, "nan", 0.9)):
        ckstore("metric", f"gpt@{step}", f"val_loss={loss}", f"accuracy={accuracy}")
    steps = [line.split()[2] for line in ckstore("log", "--sort", "best:val_loss").out.splitlines()[1:]]
    assert steps == ["10", "0", "20"]
    assert [row["step"] for row in ckstore("log", "--sort", "best:accuracy", "--limit", 2, "--json").json] == [20, 10]
    assert [row["step"] for row in ckstore("log", "--where", "isnan(val_loss)", "--json").json] == [20]
    assert [row["step"] for row in ckstore("log", "--where", "val_loss<9 and step>0", "--json").json] == [10]
    assert ckstore("show", "best:val_loss", "--json").json["step"] == 10
    assert "NaN" in ckstore("log").out


def test_nan_is_red(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckstore("metric", "gpt@0", "loss=nan")
    monkeypatch.setattr(click.utils, "should_strip_ansi", lambda *_: False)
    assert re.search(r"\x1b\[31m *NaN\x1b\[0m", ckstore("log").out)


def test_versions_of_the_last_days(ckstore, filled: Path) -> None:
    assert len(ckstore("log", "--where", "age<2d", "--json").json) == 3
    assert ckstore("log", "--where", "age>2d", "--json").json == []
    assert "is not a duration" in ckstore("log", "--where", "age<soon", code=2).sentence


def test_a_narrow_terminal_drops_columns(ckstore, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    result = ckstore("log")
    assert max(map(len, click.unstyle(result.out).splitlines())) <= 80
    assert click.unstyle(result.out).split()[:4] == ["VERSION", "RUN", "STEP", "PARENT"]
    assert result.err.startswith("ckstore: --columns all also shows cost, depth")
    assert "COST" in ckstore("log", "--columns", "all").out


def test_sizes_have_one_unit_a_column(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step0.pt", "--run", "copy")
    rows = [line.split("  ") for line in ckstore("log", "--columns", "stored").out.splitlines()[1:]]
    assert {row[-1].split()[-1] for row in rows} == {"kB"}


def test_comma_separated_values(ckstore, filled: Path) -> None:
    ckstore("metric", "gpt@0", "loss=1.5")
    lines = ckstore("log", "--columns", "step,loss,tags,size", "--format", "csv").out.splitlines()
    size = (filled / "in" / "step0.pt").stat().st_size
    assert lines[:2] == ["step,loss,tags,size", f"0,1.5,,{size}"]
    assert lines[3].startswith("20,,best,")
    assert ckstore("log", "--format", "csv").out.startswith("version,run,step,parent,kind,")


def test_all_columns_have_all_metrics(ckstore, filled: Path) -> None:
    with library.open(filled / ".ckstore") as store:
        store.set_metrics("gpt@0", {"loss": float("inf"), "note": "spiked", "tasks": ["a", "b"], "acc": 0.5})
    heading, *rows = ckstore("log", "--columns", "all", "--format", "csv").out.splitlines()
    assert heading.endswith(",loss,note,tasks,acc")
    assert rows[0].endswith(",Infinity,spiked,a b,0.5")
    assert ckstore("log").out.split("\n")[0].endswith("CREATED (UTC)            LOSS  ACC")
    assert ckstore("log", "--columns", "all").out.split("\n")[1].split()[-5:] == [
        "Infinity",
        "spiked",
        "a,",
        "b",
        "0.5",
    ]


def test_metrics_of_several_versions_are_next_to_each_other(ckstore, filled: Path) -> None:
    ckstore("metric", "1", "val_loss=3", "note=first")
    ckstore("metric", "2", "val_loss=1.5")
    lines = [line.split() for line in ckstore("metric", "1", "gpt@10").out.splitlines()]
    assert lines == [["METRIC", "GPT@0", "GPT@10"], ["val_loss", "3", "1.5"], ["note", "first", "-"]]
    assert ckstore("metric", "1", "2", "--json").json == [{"val_loss": 3, "note": "first"}, {"val_loss": 1.5}]
    assert "not of the form NAME=VALUE" in ckstore("metric", "1", "2", "a=1", code=2).sentence


def test_versions_are_named_by_metrics(ckstore, filled: Path) -> None:
    ckstore("metric", "1", "val_loss=3", "accuracy=0.9", "note=first")
    ckstore("metric", "2", "val_loss=1.5", "accuracy=0.5")
    for name, number in (
        ("best:val_loss", 2), ("best:accuracy", 1), ("most:val_loss", 1), ("least:accuracy", 2),
        ("gpt@best:val_loss", 2),
    ):  # fmt: skip
        assert ckstore("show", name, "--json").json["version"] == number
    assert "there are accuracy, note, val_loss" in ckstore("show", "best:loss", code=13).sentence
    assert ckstore("metric", "1", "--json").json == [{"val_loss": 3, "accuracy": 0.9, "note": "first"}]
    assert "note" not in ckstore("metric", "1", "--delete", "note").out
    sentence = ckstore("metric", "1", "--delete", "note", code=13).sentence
    assert "has no metric note; it has val_loss, accuracy." in sentence
    ckstore("recover")
    assert ckstore("metric", "best:val_loss", "--json").json == [{"val_loss": 1.5, "accuracy": 0.5}]


def test_nothing_there(ckstore, place: Path) -> None:
    result = ckstore("log")
    assert result.out == ""
    assert "ckstore ingest" in result.err
    assert ckstore("log", "--json").json == []
    assert "Unknown run gpt" in ckstore("log", "gpt", code=13).sentence
