"""Costs of operations, counted instead of timed: a guard against work that creeps in.

Every bound is the count when it was written, with room for a few more; one that is exceeded asks for a reason.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.objects import reader as objects
from ckstore.scanning.inputs import InputFile
from ckstore.storage import connection
from ckstore.storage.pack_reader import PackReader

pytestmark = pytest.mark.encoded


def checkpoint(path: Path, tensors: int, elements: int, seed: int) -> Path:
    """Return a model whose tensors all move a little from seed to seed."""
    state: dict[str, Any] = {}
    for number in range(tensors):
        base = np.random.default_rng(number).normal(size=elements).astype(np.float32)
        move = np.random.default_rng(1000 * seed + number).normal(size=elements).astype(np.float32)
        state[f"layer.{number}.weight"] = torch.from_numpy(base + 0.01 * seed * move)
    torch.save({"model": state, "step": seed}, path)
    return path


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read of inputs and of packs, syncs, payloads decoded, and SQL statements, from now on."""
    found: Counter[str] = Counter()
    lock = threading.Lock()

    def count(key: str, number: int) -> None:
        with lock:
            found[key] += number

    def wrapped(owner: Any, name: str, key: str, size: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            count(key, size(*arguments))
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    wrapped(InputFile, "read_into", "input", lambda _, offset, target: len(target))
    wrapped(InputFile, "pread", "input again", lambda _, offset, length: length)
    wrapped(PackReader, "pread", "packs", lambda _, pack, offset, length: length)
    wrapped(PackReader, "pread", "reads", lambda *_: 1)
    wrapped(PackReader, "read_into", "packs", lambda _, pack, offset, target: len(target))
    wrapped(PackReader, "read_into", "reads", lambda *_: 1)
    wrapped(os, "fsync", "syncs", lambda *_: 1)
    wrapped(objects, "decode_integers", "decoded", lambda *_: 1)
    connect = sqlite3.connect

    def traced(*arguments: Any, **named: Any) -> sqlite3.Connection:
        database = connect(*arguments, **named)
        last = [""]

        def traced_statement(statement: str) -> None:
            # Its triggers show it again; they are added once.
            count("statements", statement != last[0] and not statement.startswith("CREATE TEMP TRIGGER"))
            last[0] = statement

        database.set_trace_callback(traced_statement)
        return database

    monkeypatch.setattr(connection.sqlite3, "connect", traced)
    return found


def test_an_ingest_reads_its_input_once_and_each_parent_chunk_once(tmp_path: Path, counts: Counter[str]) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(checkpoint(tmp_path / "0.pt", 4, 1 << 19, 0))
    path = checkpoint(tmp_path / "1.pt", 4, 1 << 19, 1)
    with ckstore.open(tmp_path / "store", cache_bytes=64 << 20) as store:
        packs = sum(pack.bytes for pack in store._catalog.packs())
        counts.clear()
        store.ingest(path)
    assert counts["input"] == path.stat().st_size
    assert counts["input again"] < 0.02 * path.stat().st_size  # Its directory and its pickle.
    # Each of the parent's 8 chunks at most once.
    assert 0 < counts["decoded"] <= 8
    assert counts["packs"] <= 1.02 * packs


def test_syncs_do_not_depend_on_the_number_of_tensors(tmp_path: Path, counts: Counter[str]) -> None:
    found = []
    for tensors in (2, 40):
        with ckstore.init(tmp_path / f"store{tensors}") as store:
            path = checkpoint(tmp_path / "x.pt", tensors, 70_000, 0)
            counts.clear()
            store.ingest(path)
            found.append(counts["syncs"])
    assert found[0] == found[1] <= 5


def test_statements_do_not_grow_with_tensors_or_versions(tmp_path: Path, counts: Counter[str]) -> None:
    found = {}
    for tensors in (5, 60):
        with ckstore.init(tmp_path / f"store{tensors}") as store:
            for seed in range(6):
                path = checkpoint(tmp_path / "x.pt", tensors, 2000, seed)
                counts.clear()
                store.ingest(path)
                found[tensors, seed] = counts["statements"]
    assert max(found.values()) <= 1.2 * found[5, 1]
    assert found[5, 1] <= 60


def test_reading_a_version_takes_each_of_its_chunks_once(
    tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One thread: two threads may decode the same chunk twice when one of them waits, which is no work that crept in.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            store.ingest(checkpoint(tmp_path / "x.pt", 4, 1 << 19, seed))
    for work in (lambda version: version.state_dict(), lambda version: version.checkout(tmp_path / "out", force=True)):
        with ckstore.open(tmp_path / "store", "r") as store:
            records = {
                record.id: record
                for one in store[3]._stored.document.objects
                for record in store._repository.reader.chains.records(one)
            }
            counts.clear()
            work(store[3])
            assert store._repository.reader.decoded_chunks <= 8 * len(records) // 4
            stored = sum(pack.bytes for pack in store._catalog.packs())
            assert counts["packs"] <= 1.05 * stored


def test_a_row_touches_one_chunk_of_each_level(tmp_path: Path, counts: Counter[str]) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            store.ingest(checkpoint(tmp_path / "x.pt", 1, 1 << 20, seed))
    with ckstore.open(tmp_path / "store", "r") as store:
        version = store[3]
        levels = len(store._repository.reader.chains.records(version._stored.document.objects[0]))
        counts.clear()
        version["model/layer.0.weight"][1000:1500]
        assert store._repository.reader.decoded_chunks <= levels
        # An index and a chunk of each level.
        assert counts["reads"] <= 2 * levels + 2


def test_a_version_takes_the_place_of_its_parent_in_the_cache(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            path = checkpoint(tmp_path / "x.pt", 4, 1 << 19, seed)
            store.ingest(path)
        version, parent = (set(store[number]._stored.document.objects) for number in (3, 2))
        held = store._repository.reader.cache.identities
        assert version <= held
        assert not parent & held
        # Values of the version; samples of the chain's end.
        assert store._repository.reader.cache.nbytes <= 1.6 * path.stat().st_size
        decoded = store._repository.reader.decoded_chunks
        store.ingest(checkpoint(tmp_path / "x.pt", 4, 1 << 19, 3))
        # Both chunks of each object of the older ancestor that this version is stored against; nothing for estimates.
        assert store._repository.reader.decoded_chunks - decoded <= 8


def test_the_first_file_of_a_process_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """Nothing may follow it; a second version, or one from memory, is likely to be followed by another."""
    for seed in range(3):
        checkpoint(tmp_path / f"{seed}.pt", 4, 1 << 19, seed)
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            store.ingest(tmp_path / f"{seed}.pt")
            assert bool(store._repository.reader.cache.nbytes) == (seed > 0)
    with ckstore.init(tmp_path / "other") as store:
        store.ingest(torch.load(tmp_path / "0.pt"))
        assert store._repository.reader.cache.nbytes
