"""Faults of servers and networks, one at a time, and the messages that a user sees."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import ConflictError, UnreachableError
from ckstore.storage.remote import retries as retries_module
from ckstore.storage.remote.bucket import ObstoreBucket
from ckstore.storage.remote.retries import prove, put_own
from tests.checkpoints import draw, scratch
from tests.fault_proxy import FaultProxy
from tests.object_store import object_store


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with object_store() as server:
        yield server.endpoint


class Scripted(FaultProxy):
    """A proxy that applies a list of faults to the next requests that they fit, and forwards the others."""

    def __init__(self, target: str) -> None:
        super().__init__(target, {})
        self.next: list[str] = []

    def fault(self, *, conditional: bool) -> str | None:
        if not self.next or (self.next[0] == "409" and not conditional):
            return None
        return self.next.pop(0)


@pytest.fixture
def proxy(target: str) -> Iterator[Scripted]:
    with Scripted(target) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with scratch() as path:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-this-down")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield path


def bucket(proxy: Scripted) -> ObstoreBucket:
    return ObstoreBucket(f"s3://models/{secrets.token_hex(4)}", {"endpoint": proxy.url})


@pytest.mark.parametrize("fault", ["lost", "cut", "500", "503", "429", "409"])
def test_a_fault_is_neither_a_conflict_nor_a_second_object(directory: Path, proxy: Scripted, fault: str) -> None:
    there = bucket(proxy)
    proxy.next = [fault, fault]
    assert put_own(there, "log/1", b"ours")
    assert there.read("log/1") == b"ours"
    proxy.next = [fault]
    assert not put_own(there, "log/1", b"theirs")
    assert there.read("log/1") == b"ours"
    assert proxy.next == []


@pytest.mark.parametrize("fault", ["lost", "cut", "500", "503", "429", "409"])
def test_a_store_is_made_despite_faults(directory: Path, proxy: Scripted, fault: str) -> None:
    url = f"s3://models/{secrets.token_hex(4)}"
    first = [] if fault == "409" else [fault]  # Nobody else writes under the name that is proven with.
    proxy.next = list(first)
    prove(ObstoreBucket(url, {"endpoint": proxy.url}), url)
    proxy.next = list(first)
    with ckstore.init(url, options={"endpoint": proxy.url}, cache=directory / "a") as store:
        proxy.next = [fault, fault]
        assert store.ingest({"w": draw(30, 40)}, run="r", step=0, hot=0).version.number == 1
        assert [row.number for row in store._catalog.versions()] == [1]
        assert proxy.next == []
    with pytest.raises(ConflictError, match="is already a store"):
        ckstore.init(url, options={"endpoint": proxy.url}, cache=directory / "b")


def test_a_server_that_never_answers_is_given_up(
    directory: Path, proxy: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries_module, "PATIENCE", 3.0)
    monkeypatch.setattr("ckstore.storage.remote.bucket._CLIENT_PATIENCE", 1)
    there = bucket(proxy)
    proxy.next = ["503"] * 1000
    start = time.monotonic()
    with pytest.raises(UnreachableError, match="could not be used for log/1"):
        put_own(there, "log/1", b"ours")
    assert time.monotonic() - start < 20
