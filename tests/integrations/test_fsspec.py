"""Files of versions by URL: every byte, ranges that decode few chunks, and the libraries that read through fsspec."""

from __future__ import annotations

import hashlib
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

import ckstore
from ckstore.integrations.fsspec import CkstoreFileSystem
from ckstore.storage.remote.mirror import VARIABLE as CACHE
from tests.checkpoints import sha256
from tests.object_store import object_store

fsspec.register_implementation("ckstore", CkstoreFileSystem, clobber=True)


@pytest.fixture
def files(tmp_path: Path) -> CkstoreFileSystem:
    generator = torch.Generator().manual_seed(0)
    state = {f"h.{layer}": torch.randn(300, 300, generator=generator) for layer in range(30)}
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    with ckstore.init(tmp_path / "store") as store:
        for step in (1, 2):
            state = {name: value + 0.001 for name, value in state.items()}
            torch.save(state, tmp_path / f"s{step}.pt")
            store.ingest(tmp_path / f"s{step}.pt", run="team/gpt", step=step, hot=0)
        fresh = {name: torch.randn(300, 300, generator=generator) for name in state}
        save_file(fresh, model / "m.safetensors")
        (model / "deep" / "table.csv").write_text("a,b\n1,2\n3,4\n")
        store.ingest(model, run="folder", step=7, hot=0)
    return CkstoreFileSystem(str(tmp_path / "store"), skip_instance_cache=True)


def test_listings(files: CkstoreFileSystem) -> None:
    assert files.ls("", detail=False) == ["team", "folder@7"]
    assert files.ls("team", detail=False) == ["team/gpt@1", "team/gpt@2"]
    assert files.info("team")["type"] == "directory"
    assert files.ls("ckstore://team/gpt@2", detail=False) == ["team/gpt@2/s2.pt"]
    assert sorted(files.ls("folder@7", detail=False)) == ["folder@7/deep", "folder@7/m.safetensors"]
    assert files.find("folder@latest") == ["folder@latest/deep/table.csv", "folder@latest/m.safetensors"]
    assert files.info("folder@7/deep/table.csv")["size"] == 12
    assert files.isdir("folder@7/deep")
    assert not files.exists("folder@7/none")
    with pytest.raises(FileNotFoundError, match="Unknown version nothing"):
        files.ls("nothing@3")


def test_every_version_is_listed_once(files: CkstoreFileSystem, tmp_path: Path) -> None:
    """Also superseded ones, whose step another version may have, and runs below a run."""
    with ckstore.open(tmp_path / "store") as store:
        for value, (run, parent) in enumerate([("team/gpt", "team/gpt@1"), ("team/gpt/ema", None)]):
            torch.save({"w": torch.full((9,), value)}, tmp_path / f"{value}.pt")
            store.ingest(tmp_path / f"{value}.pt", run=run, step=2, parent=parent)
    files = CkstoreFileSystem(str(tmp_path / "store"), skip_instance_cache=True)
    found = sorted(files.find(""))
    assert found == [
        "2/s2.pt", "folder@7/deep/table.csv", "folder@7/m.safetensors", "team/gpt/ema@2/1.pt", "team/gpt@1/s1.pt",
        "team/gpt@2/0.pt",
    ]  # fmt: skip
    assert files.cat_file("2/s2.pt") == (tmp_path / "s2.pt").read_bytes()
    for value, run in enumerate(("team/gpt", "team/gpt/ema")):
        assert files.cat_file(f"{run}@2/{value}.pt") == (tmp_path / f"{value}.pt").read_bytes()


def test_a_file_object_has_a_size_and_an_end(files: CkstoreFileSystem) -> None:
    path = "folder@7/deep/table.csv"
    with files.open(path) as file:
        assert file.size == 12
        file.seek(13)
        assert file.read() == b""
    assert files.read_block(path, 4, 20) == b"1,2\n3,4\n"


def test_the_default_store_is_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("a", "b"):
        with ckstore.init(tmp_path / run) as store:
            store.ingest({"w": torch.ones(3)}, run=run, step=1)
        monkeypatch.setenv("CKSTORE", str(tmp_path / run))
        assert fsspec.filesystem("ckstore").ls("", detail=False) == [f"{run}@1"]


def test_every_byte(files: CkstoreFileSystem, tmp_path: Path) -> None:
    for name, path in (
        ("team/gpt@1/s1.pt", "s1.pt"), ("team/gpt@2/s2.pt", "s2.pt"), ("folder@7/m.safetensors", "model/m.safetensors"),
        ("folder@7/deep/table.csv", "model/deep/table.csv"),
    ):  # fmt: skip
        data = (tmp_path / path).read_bytes()
        assert blake3(files.cat_file(name)).hexdigest() == files.info(name)["blake3"]
        assert files.cat_file(name) == data
        ranges = [(0, 5), (7, 300_001), (-20, None), (3, -7), (len(data) + 5, None)]
        found = files.cat_ranges([name] * len(ranges), *map(list, zip(*ranges, strict=True)))
        assert found == [data[first:last] for first, last in ranges]
        with files.open(name) as file:
            file.seek(-9, 2)
            assert file.read() == data[-9:]


def test_one_tensor_reads_few_bytes(files: CkstoreFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header and one of 30 tensors read below 5 % of the version's bytes in packs."""
    data = (tmp_path / "model/m.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    stored = files._store["folder@7"]._stored
    packs, amounts = stored.repository.packs, []
    pread, read_into = packs.pread, packs.read_into
    monkeypatch.setattr(packs, "pread", lambda pack, at, size: amounts.append(size) or pread(pack, at, size))
    monkeypatch.setattr(packs, "read_into", lambda pack, at, to: amounts.append(len(to)) or read_into(pack, at, to))
    assert files.cat_file("folder@7/m.safetensors", 0, start) == data[:start]
    found = files.cat_file("folder@7/m.safetensors", start, start + 300 * 300 * 4)
    assert found == data[start : start + 300 * 300 * 4]
    assert 0 < sum(amounts) < 0.05 * stored.row.stored_bytes


def test_libraries(files: CkstoreFileSystem, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with fsspec.open("ckstore://team/gpt@2/s2.pt", store=store) as file:
        assert torch.equal(torch.load(file)["h.3"], torch.load(tmp_path / "s2.pt")["h.3"])
    with fsspec.open(f"ckstore://team/gpt@1/s1.pt::{store}") as file:
        assert file.read(2) == b"PK"
    local = fsspec.open_local("simplecache::ckstore://folder@7/m.safetensors", ckstore={"store": store})
    with safe_open(local, "pt") as tensors, safe_open(tmp_path / "model/m.safetensors", "pt") as original:
        assert tensors.keys() == original.keys()
        assert torch.equal(tensors.get_tensor("h.7"), original.get_tensor("h.7"))
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv("ckstore://folder@7/deep/table.csv", storage_options={"store": store})
    assert table["b"].to_list() == [2, 4]
    dask = pytest.importorskip("dask.bytes")
    _, [[block]] = dask.read_bytes("ckstore://folder@7/deep/table.csv", store=store)
    assert block.compute(scheduler="sync") == b"a,b\n1,2\n3,4\n" or block.compute()[1].startswith(b"a,b")


def test_coarse_files_have_coarse_values(files: CkstoreFileSystem, tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store") as store:
        store.thin("team/gpt@1")
        store["team/gpt@1"].checkout(tmp_path / "coarse.pt")
    fresh = CkstoreFileSystem(str(tmp_path / "store"), skip_instance_cache=True)
    assert fresh.cat_file("team/gpt@1/s1.pt") == (tmp_path / "coarse.pt").read_bytes()
    assert "blake3" not in fresh.info("team/gpt@1/s1.pt")


def test_nothing_is_written(files: CkstoreFileSystem) -> None:
    with pytest.raises(ckstore.UsageError, match="never change"):
        files.open("team/gpt@1/s1.pt", "wb")
    assert np.frombuffer(files.cat_file("team/gpt@1/s1.pt", 0, 2), np.uint8).size == 2


@pytest.mark.local
def test_a_store_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(300_000.0)}, tmp_path / "s.pt")
    data = (tmp_path / "s.pt").read_bytes()
    with object_store() as server:
        for name, value in {**server.credentials, CACHE: str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        with ckstore.init(f"{server.url}/gpt", options=server.options) as store:
            store.ingest(tmp_path / "s.pt", run="gpt", step=1, hot=0)
        named = {"store": f"{server.url}/gpt", "options": dict(server.options)}
        with fsspec.open("ckstore://gpt@1/s.pt", **named) as file:
            assert hashlib.sha256(file.read()).hexdigest() == sha256(tmp_path / "s.pt")
        files = CkstoreFileSystem(**named, skip_instance_cache=True)
        assert files.cat_file("gpt@1/s.pt", 500_000, 500_100) == data[500_000:500_100]
        scheme, _, rest = named["store"].partition("://")
        chained = CkstoreFileSystem(fo=rest, target_protocol=scheme, options=named["options"], skip_instance_cache=True)
        assert chained.ls("", detail=False) == ["gpt@1"]
