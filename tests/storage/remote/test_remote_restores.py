"""Restores over a link: requests and their order; requests that opening a store waits for."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.reading import stored_version
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage.remote import block_cache as cache_module
from ckstore.storage.remote import mirror as mirror_module
from ckstore.storage.remote.block_cache import BLOCK
from tests.checkpoints import draw
from tests.equality import assert_same
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer
from tools.bench import series

pytestmark = pytest.mark.local

URL = "s3://models/team-a"


@pytest.mark.long
def test_no_version_reads_much_more_than_its_file(server: SimulatedServer, directory: Path) -> None:
    """A local store may read half as much again, which costs little there.

    In a bucket, deltas that save little are not worth their reads: a version is stored in full.
    """
    paths = series.write_versions(directory, 12, 9)
    with ckstore.init(directory / "local") as local, ckstore.init(URL, cache=directory / "a") as remote:
        for step, path in enumerate(paths):
            local.ingest(path, run="r", step=step, hot=0)
            remote.ingest(path, run="r", step=step, hot=0)
        ours, theirs = local._catalog.versions(), remote._catalog.versions()
        assert max(map(read_by, (local[row.number]._stored for row in ours))) > 1.3 * ours[0].original_bytes
    assert sum(row.stored_bytes for row in theirs) < 1.05 * sum(row.stored_bytes for row in ours)
    for row, path in zip(theirs, paths, strict=True):
        server.bytes.clear()
        with ckstore.open(URL, cache=directory / f"b{row.number}") as store:
            assert_same(store[row.number].state_dict(), torch.load(path, weights_only=False))
            assert read_by(store[row.number]._stored) < 1.1 * row.original_bytes
        # Besides, manifests of packs, and partly used blocks.
        assert server.bytes["read"] < 1.1 * row.original_bytes + 4 * (1 + row.depth) * BLOCK


def test_deltas_that_save_much_are_as_small_as_in_a_directory(server: SimulatedServer, directory: Path) -> None:
    """The additional reads are worth it: half of a version."""
    weight = draw(1024, 512)
    with ckstore.init(directory / "local") as local, ckstore.init(URL, cache=directory / "a") as remote:
        for step in range(6):
            for store in (local, remote):
                store.ingest({"w": weight}, run="r", step=step, hot=0)
            weight = weight + draw(*weight.shape, seed=step + 1, scale=2e-7)
        ours, theirs = local._catalog.versions(), remote._catalog.versions()
    assert sum(row.stored_bytes for row in ours) < 0.75 * sum(row.original_bytes for row in ours)
    assert sum(row.stored_bytes for row in theirs) < 1.02 * sum(row.stored_bytes for row in ours)


def test_a_tight_budget_leaves_deltas(server: SimulatedServer, directory: Path) -> None:
    """A version in full is within every budget, so that the rest of a budget is for deltas."""
    weight = draw(1024, 512)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(4):
            store.ingest({"w": weight}, run="r", step=step, hot=0, max_restore_cost=1.5)
            weight = weight + draw(*weight.shape, seed=step + 1, scale=2e-8)
        rows = store._catalog.versions()
        assert max(row.depth for row in rows) > 0
        assert min(row.stored_bytes for row in rows) < 0.5 * rows[0].stored_bytes
        for row in rows:
            assert read_by(store[row.number]._stored) < 1.5 * rows[0].stored_bytes


def test_a_table_is_as_small_as_in_a_directory(server: SimulatedServer, directory: Path) -> None:
    """Its patches take few bytes, and levels above all: they may take as much of a budget as elsewhere."""
    table = draw(1 << 14, 64)
    with ckstore.init(directory / "local") as local, ckstore.init(URL, cache=directory / "a") as remote:
        for step in range(24):
            table[step::512] += 1e-3 * draw(32, 64, seed=step)
            for store in (local, remote):
                store.ingest({"table": table}, run="r", step=step, hot=0)
        ours, theirs = local._catalog.versions(), remote._catalog.versions()
    assert max(row.depth for row in theirs) > 0.8 * max(row.depth for row in ours)
    assert sum(row.stored_bytes for row in theirs) < 1.1 * sum(row.stored_bytes for row in ours)


def read_by(version: StoredVersion) -> int:
    """Return the bytes of all layers that a version takes."""
    reader = version.repository.reader
    records = {record for identity in version.document.objects for record in reader.chains.records(identity)}
    return sum(length for record in records for _, length in reader.stored.ranges(record, None))


def test_the_log_is_listed_while_a_snapshot_comes(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = threading.Event()

    def turn(kind: str, name: str) -> AbstractContextManager[object]:
        if kind == "list" and name.startswith("log/"):
            listed.set()
        if kind == "read" and name.startswith("snapshots/"):
            assert listed.wait(30), "nobody lists the log before the snapshot exists"
        return nullcontext()

    server.client = lambda url: SimulatedBucket(server, turn)
    monkeypatch.setattr(mirror_module, "EVERY", 16)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest({"w": draw(8)}, run="r", step=0)
        for number in range(40):
            store.tag("r@0", f"t{number}")
        tags = store._catalog.tags()
    listed.clear()
    with ckstore.open(URL, cache=directory / "b") as store:
        assert store._catalog.tags() == tags
    # A damaged snapshot is none: the list of records behind it is not enough.
    listed.clear()
    for name, (data, modified) in list(server.objects.items()):
        if name.startswith("snapshots/"):
            server.objects[name] = data[:-1], modified
    with ckstore.open(URL, cache=directory / "c") as store:
        assert store._catalog.tags() == tags


def test_layers_come_in_the_order_in_which_they_are_decoded(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else most of a version is decoded when its last byte has come."""
    # Moments of small tensors are stored together, behind all others, and the first of them is needed early.
    paths = series.write_versions(directory, 24, 2)
    monkeypatch.setattr(SimulatedBucket, "read_price", 0.0)  # As if reads cost nothing: these deltas save little.
    with ckstore.init(URL, cache=directory / "a") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="r", step=step, hot=0)
        store[2].state_dict()  # Whatever is compiled is.
    monkeypatch.setattr(cache_module, "_REQUESTS", 1)
    monkeypatch.setattr(cache_module, "_TOGETHER", 1)
    monkeypatch.setattr(stored_version, "_BEGUN", 0)
    fetched = []
    chunk = StoredVersion.chunk

    def decoded(version: StoredVersion, *arguments: Any, **named: Any) -> Any:
        found = chunk(version, *arguments, **named)
        fetched.append(server.bytes["read"])
        return found

    monkeypatch.setattr(StoredVersion, "chunk", decoded)
    with ckstore.open(URL, cache=directory / "b") as store:
        assert store[2].depth == 1
        server.latency = 0.02
        assert_same(store[2].state_dict(), torch.load(paths[1], weights_only=False))
    assert fetched[len(fetched) // 2] < 0.7 * fetched[-1]


def test_manifests_of_many_packs_are_asked_for_at_once(server: SimulatedServer, directory: Path) -> None:
    """More than the parameters that SQLite takes, as `gc` of a store of many versions does."""
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest({"w": draw(8)}, run="r", step=0, hot=0)
        pack = store[1]._stored.row.pack
        names = [f"{number:040x}.zip" for number in range(300_000)]
        assert store._catalog.manifest_offsets([*names, pack]) == {pack: store[1]._stored.row.manifest_offset}
