"""Followers of a store in a bucket: requests and bytes are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.storage.remote.bucket import ObstoreBucket
from tests.following.test_follow import CHECKOUT, LOCAL, MODEL, tree, write_model
from tests.object_store import object_store

pytestmark = [pytest.mark.local, pytest.mark.encoded]


class Traffic:
    """The requests of all buckets of this process, and the bytes that they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[str] = []
        self.nbytes = 0
        for name in ("read", "read_range"):
            self._count(monkeypatch, name)
        listed = ObstoreBucket.list

        def list_counted(bucket: ObstoreBucket, *given: Any, **named: Any) -> Any:
            self.requests.append("list")
            return listed(bucket, *given, **named)

        monkeypatch.setattr(ObstoreBucket, "list", list_counted)

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        method = getattr(ObstoreBucket, name)

        def counted(bucket: ObstoreBucket, *given: Any) -> bytes:
            data: bytes = method(bucket, *given)
            self.requests.append(name)
            self.nbytes += len(data)
            return data

        monkeypatch.setattr(ObstoreBucket, name, counted)

    def taken(self) -> tuple[list[str], int]:
        """Return requests and bytes since the last call."""
        found = self.requests, self.nbytes
        self.requests, self.nbytes = [], 0
        return found


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    with object_store() as server:
        for variable, value in server.anywhere.items():
            monkeypatch.setenv(variable, value)
        yield f"{server.url}/policy"


def test_an_update_reads_the_changes_and_a_look_is_one_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(url, create=True, cache="trainer") as store, ckstore.open(url, "r", cache="rollout") as reader:
        write_model(MODEL, 0)
        store.ingest(MODEL, run="policy", step=0)
        followed = reader.follow("policy", LOCAL, poll=0.001)
        next(followed)
        traffic = Traffic(monkeypatch)
        for step in (1, 2, 3):
            write_model(MODEL, step)
            report = store.ingest(MODEL, run="policy", step=step)
            traffic.taken()
            item = next(followed)
            requests, nbytes = traffic.taken()
            assert item.version.step == step
            # The changes, the manifest and the record of the log.
            assert item.bytes_read < report.version.stored_bytes
            assert nbytes < 1.2 * report.version.stored_bytes + 8000
            assert len(requests) < 12
            store["policy"].checkout(CHECKOUT, force=True)
            assert tree(LOCAL) == tree(CHECKOUT)
        for _ in range(3):
            reader._repository.catalog.refresh()
        assert traffic.taken()[0][-3:] == ["list"] * 3
