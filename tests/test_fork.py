"""A process that is forked off one that used a store goes on with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.storage.catalog import Catalog
from tests.checkpoints import scratch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

#: Seconds after which a child counts as hanging.
PATIENCE = 120


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    """An open store that was verified, by several threads."""
    with scratch() as directory, ckstore.init(directory / "store") as opened:
        opened.ingest({"w": torch.randn(1000, 1500)}, run="a", step=0)
        # What is compiled for this is not compiled by a child, which takes minutes on a busy machine.
        opened["a@0"].checkout(directory / "out.pt")
        opened["a@0"].state_dict()
        with ckstore.init(directory / "other") as other:
            other.ingest({"w": torch.ones(300, 300)}, run="b", step=1)
            other.gc()
        assert opened.verify().problems == []
        yield opened


def in_child(work: Callable[[], None]) -> int:
    """The exit code of a forked child that does `work`; -SIGKILL where it did not come to an end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    for _ in range(PATIENCE * 20):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_verifies_what_its_parent_has_verified(store: ckstore.Store) -> None:
    def work() -> None:
        assert store.verify().problems == []

    assert in_child(work) == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_reads_and_writes(store: ckstore.Store, tmp_path: Path) -> None:
    def work() -> None:
        assert store["a@0"].state_dict()["w"].shape == (1000, 1500)
        store["a@0"].checkout(tmp_path / "out.pt")
        store.ingest({"w": np.ones((300, 300), np.float32)}, run="b", step=1)  # torch itself cannot compute in a child
        store.tag("b@1", "child")
        store.gc()

    assert in_child(work) == 0
    assert (tmp_path / "out.pt").exists()
    assert store.catalog.tags() == {"child": 2}
    store.ingest({"w": torch.zeros(300, 300)}, run="b", step=2)
    assert store.verify().problems == []


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_transaction_stays_the_parents(store: ckstore.Store) -> None:
    """What a child does to its copy of a connection must not give up locks that the parent holds."""
    with store.catalog.transaction():
        store.catalog.set_policy("a", "{}")

        def work() -> None:
            assert store.catalog.policies() == {}
            store.close()

        assert in_child(work) == 0
        with Catalog(store.path, "a", timeout=0.1) as other, pytest.raises(ckstore.LockedError):
            other.set_policy("b", "{}")
    assert store.catalog.policies() == {"a": "{}"}
