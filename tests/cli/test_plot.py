"""`ckstore plot`: a line of blocks for each tensor, or a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.cli.plot import sparkline


def test_a_line_for_each_tensor(ckstore, filled: Path) -> None:
    table = ckstore("plot", "gpt", "--measure", "rms", "--json").json
    paths = list(dict.fromkeys(row["path"] for row in table if row["rms"] is not None))
    heading, *lines = ckstore("plot", "gpt").out.splitlines()
    assert heading.split() == ["FIRST", "OVER", "STEPS", "LAST", "PATH"]
    assert [line.split()[-1] for line in lines] == paths
    first = [row["rms"] for row in table if row["path"] == paths[0]]
    assert lines[0].split()[:3] == [f"{first[0]:.4g}", sparkline(first, 60), f"{first[-1]:.4g}"]
    assert len(ckstore("plot", "gpt", paths[0]).out.splitlines()) == 2


def test_many_versions_fit_the_line() -> None:
    line = sparkline([float(place) for place in range(1000)], 16)
    assert len(line) == 16
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([2.0, 2.0], 16) == "▁▁"


def test_a_picture(ckstore, filled: Path) -> None:
    pytest.importorskip("matplotlib")
    ckstore("plot", "gpt", "-o", "rms.png")
    assert (filled / "rms.png").read_bytes().startswith(b"\x89PNG")
    assert "svg" in ckstore("plot", "gpt", "-o", "rms.nothing", code=2).sentence


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["gpt", "--measure", "norm"], 2, "choose from change, ratio, rms"),
        (["gpt", "nothing/*"], 13, "No tensor of gpt that matches nothing/* has the measure rms; `ckstore ls gpt`"),
        (["nowhere"], 13, "nowhere"),
        (["gpt", "--json", "-o", "x.png"], 2, "leave -o out"),
        (["gpt", "nope", "--json"], 13, "No tensor of gpt that matches nope"),
    ],
)
def test_refusals(ckstore, filled: Path, arguments: list[str], code: int, words: str) -> None:
    assert words in ckstore("plot", *arguments, code=code).sentence
