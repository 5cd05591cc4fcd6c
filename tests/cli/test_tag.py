"""`ckstore tag`: set, move, list, remove."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_tags(ckstore, filled: Path) -> None:
    assert ckstore("tag", "gpt@0", "first").out == "first is gpt@0, version 1.\n"
    assert ckstore("tag", "--json").json == [
        {"tag": "best", "version": 3, "run": "gpt", "step": 20},
        {"tag": "first", "version": 1, "run": "gpt", "step": 0},
    ]
    assert ckstore("tag", "2", "best").out == "best is gpt@10, version 2, no longer version 3.\n"
    ckstore("tag", "--delete", "best")
    assert [item["tag"] for item in ckstore("tag", "--json").json] == ["first"]


def test_none(ckstore, place: Path) -> None:
    assert ckstore("tag").out == ""
    assert ckstore("tag", "--json").json == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["best"], 2),
        (["best", "7"], 2),
        (["best", "latest"], 2),
        (["best", "gpt"], 2),
        (["best", "a@b"], 2),
        (["best", "x" * 100_000], 2),
        (["best", "x", "--delete", "best"], 2),
        (["--delete", "bset"], 13),
        (["gtp@0", "x"], 13),
        (["swapped", "gpt@0"], 2),
        (["gpt@0", "first", "--json"], 2),
        (["--delete", "best", "--json"], 2),
    ],
)
def test_refused(ckstore, filled: Path, arguments: list[str], code: int) -> None:
    before = ckstore("tag", "--json").json
    assert ckstore("tag", *arguments, code=code).sentence
    assert ckstore("tag", "--json").json == before


def test_swapped_arguments_are_named(ckstore, filled: Path) -> None:
    assert "name the version first: `ckstore tag gpt@0 first`" in ckstore("tag", "first", "gpt@0", code=2).sentence


def test_a_run_and_a_tag_do_not_hide_each_other(ckstore, filled: Path) -> None:
    source = "in/step0.pt"
    assert "choose another tag" in ckstore("ingest", source, "--run", "lora", "--tag", "lora", code=2).sentence
    assert "choose another tag" in ckstore("ingest", source, "--run", "lora", "--tag", "gpt", code=2).sentence
    sentence = ckstore("ingest", source, "--run", "best", code=2).sentence
    assert "ckstore tag --delete best" in sentence
    assert ckstore("ingest", source, "--run", "latest", code=2).sentence
    assert len(ckstore("log", "--json").json) == 3
    ckstore("tag", "--delete", "best")
    ckstore("ingest", source, "--run", "best")
