"""Bundles of TensorFlow variables have no tensors; they come back byte for byte, equal stretches are stored once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ckstore

NAMES = ("variables.index", "variables.data-00000-of-00002", "variables.data-00001-of-00002")


def test_a_bundle_of_variables_comes_back_and_is_deduplicated(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            folder = tmp_path / f"step{step}" / "variables"
            folder.mkdir(parents=True)
            changed = bytes([step]) * 1000 + data[1000:]
            for name, content in zip(
                NAMES, (bytes([step]) * 300, changed[:2_000_000], changed[2_000_000:]), strict=True
            ):
                (folder / name).write_bytes(content)
            store.ingest(folder.parent, run="r", step=step, hot=0, force=True)
        for step in range(2):
            assert not list(store[f"r@{step}"])
            store[f"r@{step}"].checkout(tmp_path / "out", force=True)
            for name in NAMES:
                came, went = (tmp_path / root / "variables" / name for root in ("out", f"step{step}"))
                assert came.read_bytes() == went.read_bytes()
        assert store["r@1"].stored_bytes < 400_000
