"""Every real checkpoint goes in and comes out with the same SHA-256: at once, after a rebase, after a recovery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckstore
from ckstore.encoding.budget import PLANNED
from ckstore.recovery.recover import recover
from tests.checkpoints import described

SERIES = ["willmore_pinn", "vdsr", "espcn", "lightning_a", "trades_sgd", "opt_lora"]


def ordered(folder: Path) -> list[Path]:
    """Return the checkpoints of a series in the order of the numbers in their names; others come last."""
    return sorted(folder.iterdir(), key=lambda path: [*map(int, re.findall(r"\d+", path.name)), 1 << 62])


def check(store: ckstore.Store, sources: dict[int, Path], out: Path) -> None:
    for number, source in sources.items():
        store[number].checkout(out, force=True)
        # A directory keeps its files' names and times; a lone file takes the name that it is given.
        assert described(out) == described(source), source.name
        if out.is_dir():
            for path in sorted(out.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            out.rmdir()
        else:
            out.unlink()


@pytest.mark.long
@pytest.mark.parametrize("series", SERIES)
def test_a_series(shared_data: Path, store: ckstore.Store, directory: Path, series: str) -> None:
    paths = ordered(shared_data / series)
    assert len(paths) >= 3
    sources = {}
    for path in paths:
        # Weights and optimiser of one epoch are two files: two runs, each with that step.
        run = path.name.split("-epoch")[0].split("-checkpoint")[0] if series == "trades_sgd" else series
        sources[store.ingest(path, run=run).version.number] = path
    assert len(sources) == len(paths)
    assert store.verify().problems == []
    check(store, sources, directory / "out")
    store.encode()
    store.rebase(max_restore_cost=1.0)
    last = max(sources)
    store.rebase([last])
    assert store[last].depth == 0
    check(store, sources, directory / "out")
    store.close()
    (store.path / "catalog.sqlite").unlink()
    report = recover(store.place)
    assert (report.versions, report.problems) == (len(paths), [])
    with ckstore.open(store.place, "r") as again:
        assert again.verify().problems == []
        check(again, sources, directory / "out")


@pytest.mark.encoded
@pytest.mark.local  # In a bucket chains are shorter.
def test_deltas_of_small_tensors_are_small(shared_data: Path, store: ckstore.Store) -> None:
    """484,563 bytes; 491,000 with histograms that were too coarse for the groups of a tensor of 2^14 elements."""
    for path in ordered(shared_data / "espcn")[:4]:
        store.ingest(
            path, run="espcn", max_restore_cost=2.0 * 0.9 / PLANNED
        )  # The planned share as it was when measured.
    assert sum(row.stored_bytes for row in store._catalog.versions()[1:]) < 487_000


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt_run", "cnn_run", "bf16_run", "frozen_run", "ema_run"])
def test_a_trained_run(kind: str, store: ckstore.Store, directory: Path, request: pytest.FixtureRequest) -> None:
    paths: list[Path] = request.getfixturevalue(kind)
    sources = {store.ingest(path, verify=True).version.number: path for path in paths}
    check(store, sources, directory / "out")
    store.encode()
    assert max(store[number].depth for number in sources) > 0
    check(store, sources, directory / "out")
    store.rebase([max(sources)])
    check(store, sources, directory / "out")
    store.close()
    (store.path / "catalog.sqlite").unlink()
    assert recover(store.place).problems == []
    with ckstore.open(store.place, "r") as again:
        check(again, sources, directory / "out")
        assert again.verify().problems == []
