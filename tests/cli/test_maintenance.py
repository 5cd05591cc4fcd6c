"""`ckstore stats`, `verify`, `rebase` and `recover`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckstore.storage import connection, durable, log_files, manifest
from ckstore.storage.catalog import Catalog
from ckstore.storage.directory_storage import DirectoryStorage
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
    assert ckstore("rebase", "best", "--dry-run", "--json").json[0]["bytes"] is None
    assert depths() == before
    [report] = ckstore("rebase", "best", "--json").json
    assert [item["version"] for item in report["versions"]] == [3]
    assert report["objects"] > 0
    assert report["bytes"] > 0
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


def later_writers(store: Path) -> None:
    """Give a store a later format that only writers must know."""
    with Catalog.open(store, "a") as catalog, catalog.transaction():
        catalog._write(connection.WRITERS, str(connection.FORMAT + 1))


def test_a_later_format_of_writers_is_read_by_every_verb_that_reads(ckstore, filled: Path) -> None:
    later_writers(filled / ".ckstore")
    before = contents(filled / ".ckstore")
    for arguments in (
        ["log"], ["ls", "best"], ["show", "best"], ["runs"], ["tag"], ["stats", "--ledger"], ["verify"],
        ["diff", "gpt@0", "gpt@10"], ["checkout", "gpt@10", "-o", "out.pt"],
        ["checkout", "gpt@10", "-o", "out.safetensors"], ["gc", "--dry-run"], ["forget", "gpt@0", "--dry-run"],
        ["policy"], ["follow", "gpt@10", "live", "--once"],
    ):  # fmt: skip
        ckstore(*arguments)
    assert (filled / "out.pt").read_bytes() == (filled / "in" / "step10.pt").read_bytes()
    for arguments in (
        ["ingest", "in/step0.pt", "--run", "other"], ["tag", "gpt@0", "first"], ["forget", "gpt@0"], ["undo"],
        ["thin", "gpt@0"], ["rebase", "gpt@20"], ["encode"], ["gc"], ["metric", "gpt@0", "loss=1"], ["recover"],
        ["policy", "gpt", "--keep-last", "1"], ["runs", "--rename", "gpt", "other"],
    ):  # fmt: skip
        said = ckstore(*arguments, code=14).sentence
        assert "has format 2, this ckstore only reads it and writes up to 1; install a later ckstore" in said
    assert contents(filled / ".ckstore") == before


@pytest.mark.parametrize("later", ["catalog", "log", "manifest"])
def test_verify_of_a_later_format_is_no_damage(ckstore, filled: Path, monkeypatch, later: str) -> None:
    """Its exit code is that of other verbs."""
    store = filled / ("other" if later == "manifest" else ".ckstore")
    if later == "manifest":
        ckstore("init", store)
        with monkeypatch.context() as patched:
            patched.setattr(manifest, "FORMAT", 2)
            ckstore("--store", store, "ingest", filled / "in" / "step0.pt", "--run", "gpt")
    elif later == "catalog":
        with Catalog.open(store, "a") as catalog:
            catalog._connection.execute("PRAGMA user_version = 2")
    else:
        [record] = (store / "log").iterdir()
        content = {**json.loads(record.read_text()), "format": 2}
        record.unlink()
        del content["digest"]
        log_files.write(DirectoryStorage(store), content)
    for verb in (["verify"], ["verify", "--json"], ["verify", "gpt@0"]):
        said = ckstore("--store", store, *verb, code=14).err
        assert "has format 2, this ckstore reads up to 1; install a later ckstore" in said


def test_recover_refuses_a_log_of_a_later_format_of_writers(ckstore, filled: Path) -> None:
    store = filled / ".ckstore"
    (store / "catalog.sqlite").unlink()
    record = {"change": "untag", "tag": "none", "format": 1, "writers": 2, "sequence": 9}
    [name] = [path.stem for path in (store / "log").iterdir()]
    log_files.write(DirectoryStorage(store), {**record, "follows": name, "created": durable.timestamp()})
    before = contents(store)
    said = ckstore("recover", code=14).sentence
    assert "has format 2, this ckstore only reads it and writes up to 1; install a later ckstore" in said
    assert contents(store) == before
