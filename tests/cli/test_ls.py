"""`ckstore ls`: tensors, globs over their paths, and how they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_json(ckstore, filled: Path) -> None:
    tensors = {item["path"]: item for item in ckstore("ls", "best", "--json").json}
    assert tensors == {
        "model/weight": {"path": "model/weight", "dtype": "float32", "shape": [320, 256], "elements": 81920},
        "model/frozen": {"path": "model/frozen", "dtype": "float32", "shape": [300, 256], "elements": 76800},
        "model/bias": {"path": "model/bias", "dtype": "float32", "shape": [7], "elements": 7},
        "model/scale": {"path": "model/scale", "dtype": "float32", "shape": [3], "elements": 3},
        "model/late": {"path": "model/late", "dtype": "bfloat16", "shape": [2, 2], "elements": 4},
        "order/[0]": {"path": "order/[0]", "dtype": "int64", "shape": [5], "elements": 5},
    }


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        (["model"], ["weight", "frozen", "bias", "scale", "late"]),
        (["model/*s", "*/late"], ["bias", "late"]),
        (["order/[0]"], ["[0]"]),
        (["model/?ias"], ["bias"]),
    ],
)
def test_globs(ckstore, filled: Path, globs: list[str], names: list[str]) -> None:
    assert [item["path"].split("/")[-1] for item in ckstore("ls", "best", *globs, "--json").json] == names


def test_nothing_matches(ckstore, filled: Path) -> None:
    assert "model/weight" in ckstore("ls", "best", "model/wieght", code=13).sentence


def test_long(ckstore, filled: Path) -> None:
    tensors = {item["path"]: item for item in ckstore("ls", "best", "-l", "--json").json}
    weight, bias, frozen = (tensors[f"model/{name}"] for name in ("weight", "bias", "frozen"))
    assert weight["lattice"].startswith("linear 2^-")
    assert not weight["bundled"]
    assert bias["bundled"]
    assert weight["layers"].startswith("delta+")
    assert frozen["layers"].startswith("base")
    assert frozen["depth"] == 0
    assert 1 <= weight["depth"] <= 2
    assert 0 < weight["bytes_per_element"] < 4


def test_table(ckstore, filled: Path) -> None:
    heading, *lines = ckstore("ls", "best").out.splitlines()
    assert heading.split() == ["DTYPE", "SHAPE", "ELEMENTS", "PATH"]
    assert ["float32", "320x256", "81,920", "model/weight"] in [line.split() for line in lines]
    heading, *lines = ckstore("ls", "best", "-l").out.splitlines()
    assert heading.split()[3:] == ["LATTICE", "LAYERS", "DEPTH", "BYTES/EL", "PATH"]
    assert any("(bundle)" in line for line in lines)


def test_a_name_that_moves_says_what_it_is(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step10.pt", "--run", "gpt", "--step", 5)
    for name in ("latest", "gpt@latest", "gpt"):
        number, step = (4, 5) if name == "latest" else (3, 20)
        assert ckstore("ls", name).sentence == f"{name} is gpt@{step}, version {number}."
        assert ckstore("diff", "1", name).sentence == f"{name} is gpt@{step}, version {number}."
        assert ckstore("verify", name).sentence == f"{name} is gpt@{step}, version {number}."
    for name in ("1", "best", "gpt@10"):
        assert ckstore("ls", name).err == ""
