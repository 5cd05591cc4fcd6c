"""A process that is forked off one that used a store goes on with it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
        opened["a@0"].state_dict()  # what is compiled for it is not compiled by a child
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
def test_a_child_verifies_what_its_parent_has_verified(store: ckstore.Store) -> None:
    def work() -> None:
        assert store.verify().problems == []

    assert in_child(work) == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_reads_and_writes(store: ckstore.Store, tmp_path: Path) -> None:
    def work() -> None:
        assert store["a@0"].state_dict()["w"].shape == (1000, 1500)
        store["a@0"].checkout(tmp_path / "out.pt")
        store.ingest({"w": torch.ones(300, 300)}, run="b", step=1)
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
