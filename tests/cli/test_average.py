"""`ckstore average`: means of versions, and the tensors that stay those of the last."""

from __future__ import annotations

from pathlib import Path

import torch

from .conftest import checkpoint


def test_average(ckstore, filled: Path) -> None:
    done = ckstore("average", "gpt@0..gpt@10", "-o", "soup.pt")
    assert done.out.endswith(" of 2 versions -> soup.pt\n")
    assert "and taken from gpt@10" in done.err
    soup = torch.load("soup.pt", weights_only=True)["model"]["weight"]
    wanted = sum(checkpoint(step)["model"]["weight"].double() for step in (0, 10)) / 2
    assert torch.equal(soup, wanted.float())
    assert "soup.pt exists" in ckstore("average", "1", "2", "-o", "soup.pt", code=12).sentence
    assert ckstore("average", "1", "2", "-o", "soup.pt", "--force", "--json").json[0]["versions"] == [1, 2]
    assert "Only one of" in ckstore("average", "1..3", "-o", "other.pt", code=12).sentence
