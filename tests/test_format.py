"""docs/format.md is enough to read a store: a reader written from it returns the ingested files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

import ckstore
from ckstore.commit.join import join
from tests.format_reader import Reader, bucket_log, bucket_snapshot, identifier

pytestmark = [pytest.mark.encoded, pytest.mark.local]

FIXTURE = Path(__file__).parent / "fixtures" / "stores" / "1"


def checkpoint(step: int) -> dict[str, Any]:
    """Return a run whose tensors take every layer: moving, constant, scaled, widening; floats, complex, integers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    moving, still, wide = draw(1100, 256), draw(300, 256), draw(280, 256)
    rows, table, counts = draw(3000, 64).half(), draw(3000, 64), torch.arange(90_000)
    half, single, parts = draw(300, 256).bfloat16(), draw(200), torch.complex(draw(40), draw(40))
    decayed, shrunk = draw(70_000, scale=1e-3), draw(70_000).bfloat16()
    for number in range(1, step + 1):
        generator.manual_seed(number)
        moving = moving + draw(*moving.shape, scale=2e-2)
        still = torch.where(draw(*still.shape) > 2.2, still + 1e-4, still)
        wide = wide + draw(*wide.shape, scale=4.0**number * 1e-3)
        half = (half.float() + draw(*half.shape, scale=1e-3)).bfloat16()
        decayed, shrunk = decayed * 0.9, (shrunk.float() * 0.9).bfloat16()
        rows[torch.randperm(3000, generator=generator)[:40]] += 0.125
        table[torch.randperm(3000, generator=generator)[:40]] += 0.5
        counts[torch.randperm(90_000, generator=generator)[:180]] -= torch.randint(1 << 40, (180,), generator=generator)
        single = single + draw(200, scale=1e-3)
    single[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    moving[0, :4] = single[:4]
    model = {"moving": moving, "still": still, "wide": wide, "half": half, "single": single, "parts": parts}
    model |= {"rows": rows, "table": table, "counts": counts}
    for dtype in (torch.bfloat16, torch.float16):
        model[f"cast/{dtype}"] = moving.to(dtype)
        model[f"cast/{dtype}"][3, ::7] += 1
    state = {0: {"exp_avg": decayed, "shrunk": shrunk, "step": torch.tensor(step)}}
    return {"model": model, "optimizer": {"state": state}, "mask": torch.arange(100) % 3 == 0, "step": step}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of five versions, one of them stored in full again, with a tag; the files next to it."""
    place = tmp_path_factory.mktemp("format")
    with ckstore.init(place / "store") as store:
        for step in range(5):
            torch.save(checkpoint(step), place / f"step{step}.pt")
            store.ingest(place / f"step{step}.pt", run="r", metrics={"größe": 0.5})
        store.tag("r@2", "mittlere")
        store.rebase(["r@3"])
    return place


def test_a_reader_written_from_the_format_restores_every_file(written: Path):
    reader = Reader(written / "store")
    assert sorted(reader.versions) == [1, 2, 3, 4, 5]
    for number, (_, version) in reader.versions.items():
        [(path, data)] = reader.files(number)
        assert data == (written / path).read_bytes()
        assert blake3(data).hexdigest() == version["files"][0][2]


def test_the_reader_restores_tensors_that_shrink(tmp_path: Path) -> None:
    """Of one chunk and of several, whose elements all change, or few; of a chunk that begins as two others do."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(3000, 2900), (20_000, 19_000), (9000, 8000), (70_000, 65_000)]
    tensors = [torch.randn(before, 32 if before < 70_000 else 1, generator=generator) for before, _ in sizes]
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            if step == 1:
                tensors = [tensor[:after].clone() for tensor, (_, after) in zip(tensors, sizes, strict=True)]
            state = {f"all{number}": tensor + step * 1e-5 for number, tensor in enumerate(tensors)}
            for number, tensor in enumerate(tensors):
                state[f"some{number}"] = tensor.clone()
                state[f"some{number}"][:: 97 + step] += step
            torch.save(state, tmp_path / f"step{step}.pt")
            store.ingest(tmp_path / f"step{step}.pt", run="r")
    reader = Reader(tmp_path / "store")
    kinds = {record["kind"] for _, record in reader.objects.values() if record.get("part")}
    assert kinds == {"delta", "patches"}
    for number in reader.versions:
        [(path, data)] = reader.files(number)
        assert data == (tmp_path / path).read_bytes()


def test_the_reader_restores_a_hot_version(tmp_path: Path) -> None:
    for step in range(3):
        torch.save(checkpoint(step), tmp_path / f"step{step}.pt")
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest(tmp_path / f"step{step}.pt", run="r", step=step, hot=3)
        store.encode([1])
        assert [row.hot for row in store._catalog.versions()] == [False, True, True]
    reader = Reader(tmp_path / "store")
    for number in reader.versions:
        [(path, data)] = reader.files(number)
        assert data == (tmp_path / path).read_bytes()


def test_the_reader_finds_packs_in_segments(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            (tmp_path / f"{step}.bin").write_bytes(bytes([step]) * 5000)
            store.ingest(tmp_path / f"{step}.bin", run="r", step=step, allow_empty=True)
        join(store._repository, store._catalog.small_packs(2))
    assert len([*(tmp_path / "store" / "packs").iterdir()]) == 2
    reader = Reader(tmp_path / "store")
    assert [data[:1] for number in (1, 2, 3) for _, data in reader.files(number)] == [b"\0", b"\1", b"\2"]


def test_the_store_takes_every_form_that_the_format_describes(written: Path):
    reader = Reader(written / "store")
    records = [record for pack in reader.packs.values() for record in pack.document["records"]]
    assert {record["kind"] for record in records} == {"full", "delta", "patches", "cast"}
    described = {"kind", "id", "dtype", "count", "chunk", "at", "alone", "base", "context", "debt", "sizes"}
    assert {field for record in records for field in record} <= described
    patched = {record["dtype"] for record in records if record["kind"] == "patches"}
    assert patched >= {"float32", "float16", "int64"}
    assert any(record.get("context") for record in records)
    assert any(pack.document.get("rebase") for pack in reader.packs.values())
    blobs = [version["files"][0][5] for _, version in reader.versions.values()]
    assert any("against" in reference for reference in blobs)


def test_ids_and_places_in_the_catalog_follow_the_format(written: Path):
    reader = Reader(written / "store")
    with contextlib.closing(sqlite3.connect(written / "store" / "catalog.sqlite")) as catalog:
        assert catalog.execute("PRAGMA application_id").fetchone() == (0x434B5354,)
        assert catalog.execute("PRAGMA user_version").fetchone() == (1,)
        names = dict(catalog.execute("SELECT id, name FROM packs"))
        placed = {key: (names[pack], slot) for key, pack, slot in catalog.execute("SELECT * FROM objects")}
        assert placed == {
            int(key[:16], 16) >> 1: (pack.name, pack.document["records"].index(record))
            for key, (pack, record) in reader.objects.items()
        }
        rows = catalog.execute("SELECT number, uid, pack, manifest_offset FROM versions").fetchall()
    for number, uid, pack, offset in rows:
        held, version = reader.versions[number]
        said = [
            version["run"], version["step"], version["created"],
            [[path, digest] for path, _, digest, *_ in version["files"]],
        ]  # fmt: skip
        assert identifier(json.dumps(said, separators=(",", ":")).encode()) == uid.hex()
        assert names[pack] == held.name
        assert held.data[offset : offset + 4] == b"CKM1"


def test_the_log_follows_the_format(written: Path):
    tagged, rebased = Reader(written / "store").log
    assert (rebased["change"], rebased["versions"]) == ("rebase", [4])
    assert {key: value for key, value in tagged.items() if key != "created"} == {
        "format": 1,
        "sequence": 1,
        "follows": "",
        "change": "tag",
        "tag": "mittlere",
        "version": 3,
    }


def test_the_reader_reads_a_bucket(tmp_path: Path) -> None:
    """Its calls make the versions, tags and runs of the catalog that ckstore makes of them."""
    expected = json.loads((FIXTURE / "expected.json").read_text())["bucket"]
    reader, records = Reader(FIXTURE / "bucket"), bucket_log(FIXTURE / "bucket")
    number, catalog = bucket_snapshot(FIXTURE / "bucket")
    (tmp_path / "catalog.sqlite").write_bytes(catalog)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database:
        [[head]] = database.execute("SELECT value FROM meta WHERE key = 'mirror:head'")
        applied = int(head.split()[0])
        rows = {row for (row,) in database.execute("SELECT number FROM versions")}
        tags = dict(database.execute("SELECT name, version FROM tags"))
    assert number <= applied < len(records)
    assert state_of(records[:applied]) == (rows, tags)
    present, tags = state_of(records)
    assert {reader.versions[number][1]["step"] for number in present} == {*map(int, expected)}
    assert tags == {"best": 2}
    assert records[-1]["notes"][0]["run"] == "b"
    for number in present:
        [(_, data)] = reader.files(number)
        assert hashlib.sha256(data).hexdigest() == expected[str(reader.versions[number][1]["step"])]


def state_of(records: list[dict[str, Any]]) -> tuple[set[int], dict[str, int]]:
    """Return the numbers of the versions, and the tags, that the calls of a bucket's records make."""
    numbers: set[int] = set()
    tags: dict[str, int] = {}
    for record in records:
        for name, arguments in record["calls"]:
            if name == "commit_version":
                numbers.add(arguments["row"][0])
            elif name == "forget_versions":
                numbers -= {*arguments["numbers"]}
            elif name == "set_tag":
                tags[arguments["name"]] = arguments["number"]
    return numbers, tags
