"""The conformance kit of places: each test holds in a directory, in a bucket, and behind a server that fails."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import IntegrityError
from ckstore.storage import root
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.interface import Storage
from ckstore.storage.pack import PackWriter
from ckstore.storage.remote import mirror as mirror_module
from ckstore.storage.remote.bucket import ObstoreBucket
from ckstore.storage.remote.hub import HubRepository
from ckstore.storage.remote.retries import RetryingStorage, prove, put_own
from tests.hub_server import OF_CLIENT, REPOSITORY, on_hub
from tests.object_store import object_store
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

PLACES = ["directory", "memory", "failing", "server", pytest.param("hub", marks=OF_CLIENT)]


@pytest.fixture(scope="module")
def server() -> Iterator[ObstoreBucket]:
    with object_store() as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in server.credentials.items():
            patch.setenv(variable, value)
        yield ObstoreBucket(f"{server.url}/kit", server.options)


@pytest.fixture
def hub_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepository]:
    with on_hub(monkeypatch) as made:
        yield HubRepository(f"hf://{REPOSITORY}", {"endpoint": made.endpoint})


def loses_first() -> SimulatedBucket:
    """Return a bucket that loses the first response to each request."""
    told = set()

    def loses(kind: str, name: str) -> bool:
        is_first = (kind, name) not in told
        told.add((kind, name))
        return is_first

    return SimulatedBucket(SimulatedServer(), loses=loses)


@pytest.fixture(params=PLACES)
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr("ckstore.storage.remote.retries._PAUSE", 0.001)
    if request.param == "directory":
        return DirectoryStorage(tmp_path / "store")
    if request.param == "hub":
        return request.getfixturevalue("hub_place")  # type: ignore[no-any-return]
    if request.param == "server":
        bucket: ObstoreBucket = request.getfixturevalue("server")
        bucket.delete([item.name for item in bucket.list("")])
        return bucket
    return RetryingStorage(loses_first() if request.param == "failing" else SimulatedBucket(SimulatedServer()))


def names(storage: Storage, prefix: str, after: str = "") -> list[str]:
    return [item.name for item in storage.list(prefix, after)]


def test_objects_come_back_and_are_overwritten(storage: Storage, tmp_path: Path) -> None:
    for data in (b"first", b"", os.urandom(100_000)):
        storage.put("packs/a", data)
        assert storage.read("packs/a") == data
    (tmp_path / "file").write_bytes(b"of a file")
    storage.put("packs/a", tmp_path / "file")
    assert storage.read("packs/a") == b"of a file"
    assert [(item.name, item.size) for item in storage.list("packs/")] == [("packs/a", 9)]


def test_ranges(storage: Storage) -> None:
    data = os.urandom(5000)
    storage.put("packs/a", data)
    for offset, length in ((0, 1), (4999, 1), (10, 100), (0, 5000)):
        assert storage.read_range("packs/a", offset, length) == data[offset : offset + length]
    for offset, length in ((4999, 2), (5000, 1), (6000, 1), (0, 5001)):
        with pytest.raises(EOFError):
            storage.read_range("packs/a", offset, length)


def test_a_missing_object(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read("packs/a")
    with pytest.raises(FileNotFoundError):
        storage.read_range("packs/a", 0, 1)
    storage.delete(["packs/a"])
    storage.delete([])
    assert names(storage, "packs/") == []


def test_names_are_listed_in_order(storage: Storage) -> None:
    for name in ("log/2", "log/10", "log/1", "logs/3", "b", "packs/a"):
        storage.put(name, b"x")
    assert names(storage, "log/") == ["log/1", "log/10", "log/2"]
    assert names(storage, "log/", after="log/1") == ["log/10", "log/2"]
    assert names(storage, "log/", after="log/2") == []
    assert names(storage, "") == ["b", "log/1", "log/10", "log/2", "logs/3", "packs/a"]
    storage.delete(["log/1", "log/absent", "log/2"])
    assert names(storage, "log/") == ["log/10"]


def test_times_follow_one_clock(storage: Storage) -> None:
    for number in range(3):
        storage.put(f"log/{number}", b"x")
    written = [item.modified for item in storage.list("log/")]
    assert written == sorted(written)
    assert written[0].tzinfo is not None


def test_one_of_several_writers_puts_a_record(storage: Storage) -> None:
    for record in range(4):
        start = threading.Barrier(6)

        def write(data: bytes, name: str = f"log/{record}", start: threading.Barrier = start) -> bool:
            start.wait(30)
            return put_own(storage, name, data)

        records = [secrets.token_bytes(50) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(write, records))
        assert sum(won) == 1
        assert storage.read(f"log/{record}") == records[won.index(True)]
        assert not put_own(storage, f"log/{record}", b"later")


def test_a_place_is_proven(storage: Storage) -> None:
    prove(storage, "here")
    assert names(storage, "") == []


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    with ExitStack() as stack:
        if request.param == "bucket":
            monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "cache"))
            server = SimulatedServer()
            monkeypatch.setattr(mirror_module, "ObstoreBucket", lambda url, options: SimulatedBucket(server))
        yield stack.enter_context(ckstore.init("s3://models/a" if request.param == "bucket" else tmp_path / "store"))


def test_packs(store: ckstore.Store) -> None:
    """A pack that is written, published, read in every way, and removed."""
    packs, path = store._repository.packs, store.path
    with PackWriter(path, "raw") as writer:
        content = os.urandom(300_000)
        entry = writer.add_bytes("0", content)
        pack = writer.finish()
    packs.publish([pack.name])
    for is_local in (True, False):
        if not is_local and packs.read_price:  # As another mirror has it.
            (path / root.PACKS / pack.name).unlink()
            packs.forget(pack.name)
        assert packs.list_packs() == [pack]
        assert packs.written().keys() == {pack.name}
        assert abs(packs.now() - packs.written()[pack.name]) < 60
        assert packs.size(pack.name) == pack.bytes
        packs.prefetch([(pack.name, entry.offset, entry.length)])
        assert packs.pread(pack.name, entry.offset, entry.length) == content
        target = bytearray(1000)
        packs.read_into(pack.name, entry.offset + 5, memoryview(target))
        assert target == content[5:1005]
        assert packs.find_entry(pack.name, "0/c/0") == entry
        assert packs.is_intact(pack.name)
        assert packs.damaged({pack.name: pack.bytes}) == set()
    assert bytes(packs.mapped(pack.name)[entry.offset :][: entry.length]) == content
    assert (root.PACKS, pack.name, pack.bytes) in list(packs.files())
    packs._storage.delete([f"{root.PACKS}/{pack.name}"])
    packs.remove(pack.name)
    with pytest.raises(IntegrityError, match="is missing"):
        packs.size(pack.name)
    assert packs.list_packs() == []


def test_a_pack_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    """A reader that stays open sees a pack that was restored from a copy."""
    pytest.importorskip("torch")
    with ckstore.init(tmp_path / "store") as store:
        row = store.ingest({"weight": np.arange(100_000.0)}, run="r", hot=0).version
        path = store.path / root.PACKS / row.pack
        whole = path.read_bytes()
        (store.path / "damaged").write_bytes(bytes(len(whole)))
        os.replace(store.path / "damaged", path)
        with ckstore.open(store.path, "r") as reader:
            with pytest.raises(IntegrityError):
                reader[row.number].state_dict()
            (store.path / "copy").write_bytes(whole)
            os.replace(store.path / "copy", path)
            assert reader[row.number].state_dict()["weight"][-1] == 99_999
            assert not reader._repository.packs.distrust([row.pack])
