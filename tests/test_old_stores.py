"""Stores of earlier releases stay readable: each opens, returns the ingested files, is recovered and goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.recovery.recover import recover
from ckstore.storage import connection
from ckstore.storage.remote import mirror
from tests.checkpoints import scratch, sha256
from tests.fixtures.make_store import BUCKET
from tests.storage.remote.simulated import SimulatedServer

pytestmark = pytest.mark.local

STORES = Path(__file__).parent / "fixtures" / "stores"


def formats() -> list[str]:
    return sorted(path.name for path in STORES.iterdir() if path.is_dir())


@pytest.fixture(params=formats())
def old(request: pytest.FixtureRequest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A copy of a store, and its expected content."""
    source = STORES / request.param
    with scratch() as directory:
        # Version control keeps no empty directories, and files that may be written to.
        shutil.copytree(source / "store", directory / "store")
        yield directory / "store", json.loads((source / "expected.json").read_text())


def test_the_present_format_is_among_them() -> None:
    assert str(connection.FORMAT) in formats()


def check(store: ckstore.Store, expected: dict[str, Any], out: Path) -> None:
    assert [row.number for row in store._catalog.versions()] == sorted(
        version["number"] for version in expected["versions"]
    )
    for version in expected["versions"]:
        row = store[version["number"]]._stored.row
        assert (row.run, row.step) == (version["run"], version["step"])
        store[row.number].checkout(out)
        for name, digest in version["sha256"].items():
            assert sha256(out / name if name else out) == digest
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    assert [row.number for row in store._catalog.versions() if row.superseded] == expected["superseded"]
    assert store._catalog.tags() == expected["tags"]
    assert store["best"]["model/w"][3].tolist() == expected["value"]
    assert store.verify().problems == []


def test_old_stores_are_read(old: tuple[Path, dict[str, Any]]) -> None:
    path, expected = old
    with ckstore.open(path, "r") as store:
        check(store, expected, path.parent / "out")


def test_old_stores_are_recovered(old: tuple[Path, dict[str, Any]]) -> None:
    path, expected = old
    (path / "catalog.sqlite").unlink()
    assert recover(path).problems == []
    with ckstore.open(path, "r") as store:
        check(store, expected, path.parent / "out")


def test_old_stores_take_new_versions(old: tuple[Path, dict[str, Any]]) -> None:
    path, expected = old
    with ckstore.open(path) as store:
        weights = store["a@3"].state_dict()
        weights["model"]["w"] += 1e-3
        torch.save(weights, path.parent / "more.pt")
        number = store.ingest(path.parent / "more.pt", run="a", step=100, verify=True).version.number
        store[number].checkout(path.parent / "out")
        assert sha256(path.parent / "out") == sha256(path.parent / "more.pt")
        (path.parent / "out").unlink()
        expected["versions"].append({"number": number, "run": "a", "step": 100, "sha256": {}})
        check(store, expected, path.parent / "out")


@pytest.mark.parametrize("version", formats())
def test_old_buckets_are_read_and_take_new_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the snapshot, and from the log alone."""
    source, server = STORES / version / "bucket", SimulatedServer()
    monkeypatch.setattr(mirror, "ObstoreBucket", lambda url, options: server.client(url))
    for path in filter(Path.is_file, source.rglob("*")):
        server.objects[path.relative_to(source).as_posix()] = path.read_bytes(), server.now()
    expected = json.loads((STORES / version / "expected.json").read_text())["bucket"]
    with scratch() as directory:
        for name in ("snapshot", "log"):
            with ckstore.open(BUCKET, cache=directory / name) as store:
                assert store.tags().keys() == {"best"}
                assert {f"{found.step}" for found in store.versions("b")} >= expected.keys()
                for step, digest in expected.items():
                    store[f"b@{step}"].checkout(directory / f"{name}{step}")
                    assert sha256(directory / f"{name}{step}") == digest
                assert store.verify().problems == []
                store.ingest({"w": store["b@4"].state_dict()["w"] + 1}, run="b", step=len(store) + 10)
            root = json.loads(server.objects[mirror.ROOT][0])
            root.pop("snapshot", None)
            server.objects[mirror.ROOT] = json.dumps(root).encode(), server.now()
