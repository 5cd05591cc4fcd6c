"""The bytes that `verify` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.checking import verify as verify_module
from ckstore.checking.verify import bytes_to_check
from ckstore.objects import resolver
from ckstore.storage import manifest
from tests.catalog_edits import sign, without_triggers


def test_verify_reads_packs_and_not_the_cache(tmp_path: Path) -> None:
    """An ingest leaves its chunks in the store's cache: they would verify the input, not the stored bytes."""
    values = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        version = store.ingest({"w": values, "n": np.arange(70_000)}, run="a", step=0).version
        store._repository.reader.cache.clear()
        for identity in store[version.number]._stored.document.objects:
            store._repository.reader.cache.keep((identity, 0), np.zeros(3, np.uint32))
        assert store.verify().problems == []


@pytest.mark.encoded  # Which objects are still raw would depend on the background encoding.
def test_progress_adds_up_to_its_total(tmp_path: Path) -> None:
    """Packs are part of it, and an object of many versions counts once."""
    weights = torch.randn(300, 256)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(5):
            store.ingest({"frozen": weights, "moves": weights + step + 1}, step=step)
    with ckstore.open(tmp_path / "store", "r") as store:
        done: list[int] = []
        store.verify(progress=done.append)
        versions = [store[row.number]._stored for row in store._catalog.versions()]
        assert sum(done) == bytes_to_check(store._repository, versions)
        assert done[0] == store._catalog.packs()[0].bytes
        assert bytes_to_check(store._repository, versions, 0.5) == round(0.5 * sum(done))
        packs = sum(pack.bytes for pack in store._catalog.packs())
        assert sum(done) - packs == pytest.approx(6 * weights.nbytes, rel=0.01)


@pytest.mark.parametrize("column", ["cost = cost + 0.5", "depth = depth + 1", "base = NOT base"])
def test_the_cost_of_a_hot_version_is_that_of_its_ingest(tmp_path: Path, column: str) -> None:
    """Also where another version encodes an object that both hold, and after all costs were computed again."""
    weights = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": weights}, run="a", step=0, hot=3)
        store.ingest({"w": weights, "n": weights + 1}, run="b", step=0, hot=3)
        store.encode("a@0")
        for step in range(3):
            store.ingest({"w": weights + step * 1e-3}, run="c", step=step, hot=0, parent="a@0")
        store.rebase("c@2")
        store.thin("c@1")
        assert store["b@0"].hot
        assert store.verify().problems == []
        if isinstance(store.place, str):
            return
        with without_triggers(tmp_path / "store" / "catalog.sqlite") as database:
            database.execute(f"UPDATE versions SET {column} WHERE hot")
            sign(database)
    with ckstore.open(tmp_path / "store") as store:
        [problem] = store.verify().problems
        assert "contradicts the manifest of version 2 (cost)" in problem
    assert ckstore.recover(tmp_path / "store").problems == []
    with ckstore.open(tmp_path / "store") as store:
        assert store.verify().problems == []


def test_a_manifest_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has fewer manifests than the store. Chains lead back to some of the slice before."""
    monkeypatch.setattr(resolver, "_MANIFESTS", 16)
    monkeypatch.setattr(verify_module, "_SLICE", 8)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(40):
            store.ingest({"w": np.arange(300, dtype=np.float32) + step}, run="a", step=step, hot=0)
    decoded, decode = [], manifest.decode_manifest
    monkeypatch.setattr(manifest, "decode_manifest", lambda *given: decoded.append(1) or decode(*given))
    with ckstore.open(store.place) as store:
        assert store.verify().versions == 40
        assert len(decoded) <= 1.5 * len(store._catalog.packs())
