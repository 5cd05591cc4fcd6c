"""What `verify` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckstore


def test_what_is_verified_comes_from_the_packs_and_not_from_the_cache(tmp_path: Path) -> None:
    """An ingest leaves its chunks in the store's cache: taking them would verify what went in, not what is stored."""
    values = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    with ckstore.init(tmp_path / "store") as store:
        version = store.ingest({"w": values, "n": np.arange(70_000)}, run="a", step=0).version
        store.reader.cache.clear()
        for lattice, content in store[version.number].document.objects:
            for identity in {lattice, content or lattice}:
                store.reader.cache.put((identity, 0), np.zeros(3, np.uint32))
        assert store.verify().problems == []
