"""`ckstore.open(path, create=True)`: a script that may run again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.storage.remote import mirror
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer


def test_a_store_is_made_where_there_is_none_and_opened_where_there_is_one(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "store"
    source = tmp_path / "file"
    source.write_bytes(b"content")
    for count in range(2):
        with ckstore.open(place, create=True) as store:
            assert len(store._catalog.versions()) == count
            store.ingest(source, step=count, force=True)
    with pytest.raises(ckstore.ConflictError):
        ckstore.init(place)


def test_several_processes_may_begin_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(10):
            list(pool.map(lambda _, place=tmp_path / str(number): ckstore.open(place, create=True).close(), range(8)))


@pytest.mark.local
@pytest.mark.parametrize("is_other", [False, True])
def test_a_program_may_enter_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_other: bool) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    if is_other:
        ckstore.init(tmp_path / "b" / "s").close()
    monkeypatch.chdir(tmp_path / "a")
    with ckstore.open("s", create=True) as store:
        store.ingest({"w": np.ones(3)}, run="r", step=1)
        monkeypatch.chdir(tmp_path / "b")
        store.ingest({"w": np.zeros(3)}, run="r", step=2)
        assert store["r@1"]["w"][0] == 1
        assert store.path == tmp_path / "a" / "s"
    with ckstore.open(tmp_path / "a" / "s", "r") as store:
        assert len(store) == 2


@pytest.mark.local
def test_nothing_else_is_taken_for_a_store(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"content")
    with pytest.raises(ckstore.ConflictError, match="not empty"):
        ckstore.open(tmp_path, create=True)
    with pytest.raises(ckstore.ConflictError, match="is a file"):
        ckstore.open(tmp_path / "mine", create=True)
    lost = tmp_path / "lost"
    with ckstore.init(lost) as store:
        store.ingest(tmp_path / "mine", force=True)
    (lost / "catalog.sqlite").unlink()
    with pytest.raises(ckstore.ConflictError, match="recover"):
        ckstore.open(lost, create=True)


def test_stores_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    for call in (lambda: ckstore.open(create=True), lambda: ckstore.open(tmp_path / "a", "r", create=True)):
        with pytest.raises(ckstore.UsageError, match="give its path"):
            call()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_closed_store_refuses_calls(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer()
    monkeypatch.setattr(mirror, "ObstoreBucket", lambda url, options: SimulatedBucket(server))
    where = tmp_path / "store" if place == "directory" else "s3://models/store"
    state = {"large": torch.randn(300, 300), "small": torch.ones(3)}
    with ckstore.init(where, cache=tmp_path / "cache") as store:
        store.ingest(state, run="r", step=1)
        version, run = store["r@1"], store.run("r")
        tensor = version["large"]
        assert tensor[:2].shape == (2, 300)
        fresh = store[1]
    requests: list[Callable[[], object]] = [
        store.versions, lambda: store["r@1"], lambda: store.run("r"), lambda: store.ingest(state, run="r", step=2),
        store.verify, store.gc, store.stats, lambda: store.tag(1, "best"), lambda: store.forget([1]),
        lambda: version["small"][:], lambda: tensor[:2], version.state_dict, lambda: version.state_dict(mmap=True),
        lambda: version.checkout(tmp_path / "out"), lambda: version.arrays["large"][:1], lambda: fresh._stored.paths,
        lambda: run.arrays["large"][0, :1], lambda: fresh._stored.document,
    ]  # fmt: skip
    for request in requests:
        with pytest.raises(ckstore.UsageError, match=r"^The store is closed; open it again"):
            request()
    store.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.ingest({"w": np.ones(4)}), lambda store: list(store.ingest_many([])),
        lambda store: list(store.watch(".")), lambda store: store.saver("a"), lambda store: store.tag("a@1", "x"),
        lambda store: store.rename_run("a", "z"),
        lambda store: store.untag("x"), lambda store: store.set_policy(None),
        lambda store: store.set_metrics("a@1", {"loss": 1.0}), lambda store: store.forget("a@1"),
        lambda store: store.encode(), lambda store: store.thin("a@1"), lambda store: store.rebase("a@1"),
        lambda store: store.retain(), lambda store: store.gc(),
    ],
)  # fmt: skip
def test_a_store_open_for_reading_refuses_to_write(write: Callable[[ckstore.Store], Any], tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": np.zeros(4)}, run="a", step=1)
    with ckstore.open(tmp_path / "store", mode="r") as store, pytest.raises(ckstore.ReadOnlyError, match="mode='a'"):
        write(store)
