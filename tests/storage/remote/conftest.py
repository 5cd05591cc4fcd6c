"""Shared by tests of remote stores: a directory for mirrors, and an object store in memory."""

from __future__ import annotations

import pytest

from ckstore.storage.remote import mirror as mirror_module
from tests.storage.remote.simulated import SimulatedServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimulatedServer:
    made = SimulatedServer()
    monkeypatch.setattr(mirror_module, "ObstoreBucket", lambda url, options: made.client(url))
    monkeypatch.setattr("ckstore.storage.remote.retries._PAUSE", 0.001)
    return made
