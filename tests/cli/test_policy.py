"""`ckstore policy`: what is set is what versions to come are, also after a recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckstore as library
from ckstore.operations.recover import recover
from ckstore.policy import Policy


def test_a_run_goes_before_the_store_and_a_call_before_both(ckstore, filled: Path) -> None:
    ckstore("policy", "--quality", "3")
    ckstore("policy", "exact", "--fidelity", "exact")
    ckstore("ingest", "in/step0.pt", "--run", "coarse", "--step", "7")
    ckstore("ingest", "in/step0.pt", "--run", "exact", "--step", "7")
    ckstore("ingest", "in/step0.pt", "--run", "fine", "--step", "7", "--fidelity", "exact")
    with library.open(filled / ".ckstore", "r") as store:
        assert store.policy() == store.policy("any") == Policy("coarse", quality=3.0)
        assert store["exact@7"].fidelity == store["fine@7"].fidelity == "exact"
    listed = ckstore("policy", "--json").json
    assert listed == [
        {"run": None, "fidelity": "coarse", "hot": 0, "scheme": "lattice", "quality": 3.0},
        {"run": "exact", "fidelity": "exact", "hot": 0},
    ]


def test_it_outlives_a_recovery_and_is_cleared(ckstore, filled: Path) -> None:
    ckstore("policy", "gpt", "--max-rel-error", "0.01")
    ckstore("policy", "--quality", "1")
    ckstore("policy", "--clear")
    recover(filled / ".ckstore")
    with library.open(filled / ".ckstore", "r") as store:
        assert store.policy("gpt") == Policy("coarse", max_rel_error=0.01)
        assert store.policy("other") == Policy()
    assert "max-rel-error 0.01" in ckstore("policy", "gpt").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fidelity", "exact", "--quality", "2"),
        ("--quality", "0"),
        ("--quality", "2", "--clear"),
        ("--scheme", "lc", "--max-abs-error", "1"),
    ],
)
def test_what_cannot_be_kept(ckstore, filled: Path, arguments: tuple[str, ...]) -> None:
    ckstore("policy", *arguments, code=2)
    assert ckstore("policy", "--json").json == [{"run": None, "fidelity": "exact", "hot": 0}]
