"""`ckstore log`: which versions, in which order, in which form."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import pack_bytes

KEYS = {
    "version", "id", "run", "step", "parent", "base", "depth", "bytes", "stored", "ratio", "cost", "fidelity",
    "hot", "dropped", "elements", "tensors", "files", "tags", "metrics", "source", "created",
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
    assert names[6:] == ["size", "stored", "ratio", "cost", "tags", "created"]
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


def test_nothing_there(ckstore, place: Path) -> None:
    result = ckstore("log")
    assert result.out == ""
    assert "ckstore ingest" in result.err
    assert ckstore("log", "--json").json == []
    assert "Unknown run gpt" in ckstore("log", "gpt", code=13).sentence
