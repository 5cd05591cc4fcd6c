"""`ckstore stats`, `verify`, `rebase` and `recover`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoints import change_pack, contents, flip, listing, packs_of


def restored(ckstore, place: Path) -> None:
    for step in (0, 10, 20):
        ckstore("checkout", f"gpt@{step}", "-o", "out.pt", "--force")
        assert (place / "out.pt").read_bytes() == (place / "in" / f"step{step}.pt").read_bytes()


def test_stats(ckstore, filled: Path) -> None:
    [stats] = ckstore("stats", "--json").json
    assert stats["versions"] == 3
    assert stats["original_bytes"] == sum(path.stat().st_size for path in (filled / "in").iterdir())
    size = sum(len(data) for _, data in contents(filled / ".ckstore").values())
    assert stats["stored_bytes"] == size
    assert "ledger" not in stats
    [stats] = ckstore("stats", "--ledger", "--json").json
    assert sum(stats["ledger"].values()) == stats["stored_bytes"] == size
    out = ckstore("stats").out
    assert "ledger" not in out
    assert "CAUSE" not in out
    lines = ckstore("stats", "--ledger").out.splitlines()
    assert lines[-1].split() == ["total", *lines[-1].split()[1:3], f"{size:,}", "100.0", "%"]


def test_verify(ckstore, filled: Path) -> None:
    assert "No problems" in ckstore("verify").out
    [report] = ckstore("verify", "best", "gpt@0", "--json").json
    assert (report["versions"], report["problems"]) == (2, [])
    assert report["bytes"] > 0
    ckstore("verify", "--sample", "0.5")
    ckstore("verify", "nowhere", code=13)


def test_verify_finds_a_flipped_bit(ckstore, filled: Path) -> None:
    sizes = listing(filled / ".ckstore")
    pack = max(packs_of(filled / ".ckstore"), key=lambda name: sizes[f"packs/{name}"])
    flip(filled / ".ckstore", pack, lambda length: length // 2)
    result = ckstore("verify", code=4)
    assert pack in result.err
    assert all(line.startswith("ckstore: ") for line in result.err.splitlines())
    assert "problem" in result.err.splitlines()[-1]
    result = ckstore("verify", "--json", code=4)
    assert any(pack in problem for problem in result.json[0]["problems"])


def test_verify_finds_a_lost_pack(ckstore, filled: Path) -> None:
    pack = packs_of(filled / ".ckstore")[0]
    change_pack(filled / ".ckstore", pack, None)
    assert pack in ckstore("verify", code=4).err


def test_rebase(ckstore, filled: Path) -> None:
    def depths() -> list[int]:
        return [row["depth"] for row in ckstore("log", "--json").json]

    before = depths()
    assert max(before) > 0
    assert "Would store" in ckstore("rebase", "best", "--dry-run").out
    assert depths() == before
    [report] = ckstore("rebase", "best", "--json").json
    assert [item["version"] for item in report["versions"]] == [3]
    assert report["objects"] > 0
    assert depths()[2] == 0
    restored(ckstore, filled)
    ckstore("rebase", "--run", "gpt")
    assert depths() == [0, 0, 0]
    restored(ckstore, filled)
    assert "Nothing to do" in ckstore("rebase", "--max-restore-cost", "1.5").out
    ckstore("verify")


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["best", "--run", "gpt"], 2), (["nowhere"], 13), (["--run", "x"], 13)]
)
def test_rebase_refuses(ckstore, filled: Path, arguments: list[str], code: int) -> None:
    assert ckstore("rebase", *arguments, code=code).sentence


@pytest.mark.local
@pytest.mark.parametrize("damage", ["lost", "damaged", "cut"])
def test_recover(ckstore, filled: Path, damage: str) -> None:
    ckstore("tag", "gpt@0", "first")
    rows = ckstore("log", "--json").json
    catalog = filled / ".ckstore" / "catalog.sqlite"
    if damage == "lost":
        catalog.unlink()
    elif damage == "damaged":
        catalog.write_bytes(b"no database" * 500)
    else:
        os.truncate(catalog, 5000)
    assert "3 versions" in ckstore("recover").out
    assert ckstore("log", "--json").json == rows
    restored(ckstore, filled)


@pytest.mark.local
def test_recover_names_damaged_packs(ckstore, filled: Path) -> None:
    pack = packs_of(filled / ".ckstore")[0]
    flip(filled / ".ckstore", pack, lambda _: 100)
    (filled / ".ckstore" / "catalog.sqlite").unlink()
    assert pack in ckstore("recover", code=4).err
    assert (filled / ".ckstore" / "packs" / pack).is_file()
    assert any(pack in problem for problem in ckstore("recover", "--json", code=4).json[0]["problems"])
