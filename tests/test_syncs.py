"""How often operations wait for the disk: own syncs, and transactions, which SQLite syncs five times each."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.commit.join import join

pytestmark = pytest.mark.local

_CONNECT = sqlite3.connect


class Syncs:
    """Counts syncs of files and directories, and transactions that change a catalog."""

    def __init__(self) -> None:
        self.own = self.transactions = 0

    def count(self, operation: Callable[[], object]) -> tuple[int, int]:
        """Return the numbers of an operation."""
        self.own = self.transactions = 0
        operation()
        return self.own, self.transactions


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    found = Syncs()

    def counted(call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            found.own += 1
            call(descriptor)

        return sync

    class watched(sqlite3.Connection):  # noqa: N801
        def changes(self) -> bytes:
            """Return the number of changes in the head of the catalog; those of the claims are not synced."""
            [path] = [path for _, name, path in super().execute("PRAGMA database_list") if name == "main"]
            return Path(path).read_bytes()[24:28]

        def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
            before = self.changes() if statement == "COMMIT" else b""
            done = super().execute(statement, *arguments)
            found.transactions += statement == "COMMIT" and self.changes() != before
            return done

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **named: _CONNECT(*arguments, factory=watched, **named))
    return found


def test_operations_sync_no_more_than_they_must(syncs: Syncs, tmp_path: Path) -> None:
    def weights(step: int) -> dict[str, Any]:
        return {"w": np.arange(8000, dtype=np.float32) + step}

    with ckstore.init(tmp_path / "store") as store:
        store.ingest(weights(0), run="a", step=0, hot=0)
        # Raw pack, pack with the version, their directory; commit.
        assert syncs.count(lambda: store.ingest(weights(1), run="a", step=1, hot=99)) == (3, 1)
        # Pack, directory; commit.
        assert syncs.count(lambda: store.ingest(weights(2), run="b", step=2, hot=0)) == (2, 1)
        # Pack, directory, record of the log, its directory; commit.
        assert syncs.count(lambda: store.encode("a@1")) == (4, 1)
        # Segment, directory; places.
        names = store._catalog.small_packs(9)
        assert syncs.count(lambda: join(store._repository, names)) == (2, 1)
        assert syncs.count(lambda: store.tag("a@1", "best")) == (2, 1)
