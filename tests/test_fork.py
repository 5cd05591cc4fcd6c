"""A process that is forked off one that used a store goes on with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.recovery.recover import recover
from ckstore.runtime import forks
from ckstore.storage.catalog import Catalog
from ckstore.storage.connection import PlaceLock
from tests.checkpoints import scratch
from tests.children import MOMENT, exit_code, fork, held, in_child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    """An open store that was verified, by several threads."""
    with scratch() as directory, ckstore.init(directory / "store") as opened:
        opened.ingest({"w": torch.randn(1000, 1500)}, run="a", step=0)
        # Compile kernels in the parent; a child takes minutes for it on a busy machine.
        opened["a@0"].checkout(directory / "out.pt")
        opened["a@0"].state_dict()
        with ckstore.init(directory / "other") as other:
            other.ingest({"w": torch.ones(300, 300)}, run="b", step=1)
            other.gc()
        assert opened.verify().problems == []
        yield opened


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_verifies_objects_that_its_parent_has_verified(store: ckstore.Store) -> None:
    def work() -> None:
        assert store.verify().problems == []

    assert in_child(work) == 0


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
    assert store._catalog.tags() == {"child": 2}
    store.ingest({"w": torch.zeros(300, 300)}, run="b", step=2)
    assert store.verify().problems == []


@contextmanager
def two_tags(catalog: Catalog) -> Iterator[None]:
    """A transaction that sets a tag, does something else, and sets another one."""
    with catalog.transaction():
        catalog.set_tag("first", 1)
        yield
        catalog.set_tag("second", 1)


@pytest.mark.local  # The client of an object store does not survive a fork.
@pytest.mark.parametrize("is_new", [False, True])
def test_a_fork_waits_for_a_transaction_of_another_thread(store: ckstore.Store, is_new: bool) -> None:
    def work() -> None:
        # Of the lock that SQLite believes to have, a child would never be rid.
        catalog = Catalog(store.path, "a", timeout=5) if is_new else store._catalog
        assert catalog.tags() == {"first": 1, "second": 1}
        catalog.set_tag("third", 1)

    with held(two_tags(store._catalog)):
        assert in_child(work) == 0
    assert store._catalog.tags() == {"first": 1, "second": 1, "third": 1}


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_fork_does_not_wait_for_another_process(store: ckstore.Store) -> None:
    """A thread that waits for the write lock holds nothing of SQLite's."""
    told, tell = os.pipe()
    has, gets = os.pipe()

    def hold() -> None:
        with Catalog(store.path, "a") as catalog, catalog.transaction():
            os.write(gets, b".")
            os.read(told, 1)

    holder = fork(hold)
    os.read(has, 1)
    writer = threading.Thread(target=store._catalog.set_tag, args=("tag", 1))
    writer.start()
    try:
        assert in_child(lambda: forks.check() or (store._catalog.tags() and None)) == 0
        assert writer.is_alive()
    finally:
        os.write(tell, b".")
        writer.join()
    assert exit_code(holder) == 0
    assert store._catalog.tags() == {"tag": 1}
    for descriptor in (told, tell, has, gets):
        os.close(descriptor)


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_recovery_does_not_wait_for_a_child(store: ckstore.Store) -> None:
    """A child does not keep the catalog in its place, however long it lives."""
    told, tell = os.pipe()
    with held(PlaceLock(store.path)):
        child = fork(lambda: os.read(told, 1) and None)
    recovery = threading.Thread(target=recover, args=(store.path,), daemon=True)
    recovery.start()
    recovery.join(60)
    try:
        assert not recovery.is_alive()
    finally:
        os.write(tell, b".")
        assert exit_code(child) == 0
        recovery.join()
        os.close(told)
        os.close(tell)


def refuses(store: ckstore.Store, pack: str) -> None:
    """Check that every use of a store is refused in one sentence."""

    def says(use: Callable[[], object]) -> None:
        with pytest.raises(ckstore.CkstoreError, match=r"forked while its parent was using a store.*spawn.*forkserver"):
            use()

    says(store._catalog.tags)
    says(lambda: store.tag("a@0", "tag"))
    says(lambda: ckstore.open(store.path))
    says(lambda: ckstore.init(store.path.parent / "third"))
    says(lambda: store["a@0"].state_dict())
    says(lambda: store._repository.packs.pread(pack, 0, 1))
    store.close()


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_forked_amid_a_long_transaction(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", MOMENT)
    pack, is_done = store._catalog.packs()[0].name, threading.Event()
    with held(two_tags(store._catalog), is_done.wait):
        try:
            assert in_child(lambda: refuses(store, pack)) == 0
            with Catalog(store.path, "a", timeout=0.1) as other, pytest.raises(ckstore.LockedError):
                other.set_policy("b", "{}")
        finally:
            is_done.set()
    assert store._catalog.tags() == {"first": 1, "second": 1}
    assert in_child(lambda: store.tag("a@0", "third")) == 0


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_transaction_stays_the_parents(store: ckstore.Store) -> None:
    """A child's use of its copy of a connection must not give up locks that the parent holds."""
    pack = store._catalog.packs()[0].name
    with store._catalog.transaction():
        store._catalog.set_policy("a", "{}")
        assert in_child(lambda: refuses(store, pack)) == 0
        with Catalog(store.path, "a", timeout=0.1) as other, pytest.raises(ckstore.LockedError):
            other.set_policy("b", "{}")
    assert store._catalog.policies() == {"a": "{}"}


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_that_ends_leaves_a_transaction_alone(tmp_path: Path) -> None:
    """Not even Python's teardown at exit closes a connection of the parent's."""
    program = """
import os, sys
import ckstore
store = ckstore.init(sys.argv[1])
try:
    with store._catalog.transaction():
        store._catalog.set_policy("a", "{}")
        if child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            assert (store.path / "catalog.sqlite-journal").exists()
except ckstore.CkstoreError:
    sys.exit(3)
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    with ckstore.open(tmp_path / "store") as store:
        assert store._catalog.policies() == {"a": "{}"}


@pytest.mark.local  # The client of an object store does not survive a fork.
def test_a_child_does_not_refer_to_uncommitted_objects_of_its_parent(store: ckstore.Store) -> None:
    with store._repository.resolver.under_way() as hold:
        store._repository.resolver.forget()
        found = store._repository.resolver.record(store["a@0"]._stored.document.objects[0])
        hold([found])

        def work() -> None:
            assert store._repository.resolver._records == {}
            assert store._repository.resolver._under_way == {}

        assert in_child(work) == 0
    assert store._repository.resolver._records
