"""The bytes that `verify` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.checking.verify import bytes_to_check


def test_verify_reads_packs_and_not_the_cache(tmp_path: Path) -> None:
    """An ingest leaves its chunks in the store's cache: they would verify the input, not the stored bytes."""
    values = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        version = store.ingest({"w": values, "n": np.arange(70_000)}, run="a", step=0).version
        store._repository.reader.cache.clear()
        for identity in store[version.number]._stored.document.objects:
            store._repository.reader.cache.put((identity, 0), np.zeros(3, np.uint32))
        assert store.verify().problems == []


@pytest.mark.encoded  # Which objects are still raw would depend on the background compaction.
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
