"""Forks wait, with a limit, until no other thread holds a lock that a child would miss."""

from __future__ import annotations

import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckstore.errors import CkstoreError
from ckstore.runtime import forks
from ckstore.runtime.cached import cached_property
from tests.children import MOMENT, exit_code, fork, held, in_child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


def test_no_lock_is_held_in_a_child() -> None:
    locks = [forks.Lock() for _ in range(3)]

    def work() -> None:
        forks.check()
        for lock in locks:
            assert lock.acquire(timeout=0)

    with held(locks[0]), held(locks[2]):
        assert in_child(work) == 0
    for lock in locks:
        assert lock.acquire(timeout=0), "the fork released its lock"
        assert not held_elsewhere(lock)


def held_elsewhere(lock: forks.Lock) -> bool:
    found: list[bool] = []
    lock.release()
    thread = threading.Thread(target=lambda: found.append(lock.acquire(timeout=0)))
    thread.start()
    thread.join()
    return not found[0]


def test_guarded_data_is_whole_in_a_child() -> None:
    lock, pair = forks.Lock(), [0, 0]
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            with lock:
                pair[0] += 1
                time.sleep(0.0005)
                pair[1] += 1

    def work() -> None:
        assert pair[0] == pair[1]
        assert lock.acquire(timeout=0)

    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        start = time.monotonic()
        codes = [in_child(work) for _ in range(20)]
        assert codes == [0] * 20
        assert time.monotonic() - start < forks.PATIENCE, "threads that take a lock again and again give way"
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_a_thread_that_holds_a_lock_takes_another_one_before_a_fork() -> None:
    first, second = forks.Lock(), forks.Lock()

    @contextmanager
    def both() -> Iterator[None]:
        with first:
            yield
            with second:
                pass

    with held(both()):
        assert in_child(forks.check) == 0


def test_threads_fork_at_once() -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(in_child(forks.check))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 4


def test_a_child_of_a_child() -> None:
    before = forks.generation()

    def work() -> None:
        assert forks.generation() == before + 1
        with held(forks.Lock()):
            assert in_child(grandchild) == 0

    def grandchild() -> None:
        assert forks.generation() == before + 2
        forks.check()

    assert in_child(work) == 0
    assert forks.generation() == before


def test_a_fork_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.2)
    lock, other, is_done = forks.Lock(), forks.Lock(), threading.Event()

    def work() -> None:
        with pytest.raises(CkstoreError, match=r"forked while its parent was using a store.*spawn or forkserver"):
            forks.check()
        for one in (lock, other):
            assert one.acquire(timeout=0), "nothing that a child inherits is waited for"
        assert in_child(grandchild) == 0

    def grandchild() -> None:
        with pytest.raises(CkstoreError, match="forked while"):
            forks.check()

    with held(lock, is_done.wait):
        try:
            assert in_child(work) == 0
        finally:
            is_done.set()
    forks.check()
    assert in_child(forks.check) == 0, "the next fork finds it free"


def test_a_thread_that_forks_with_a_lock() -> None:
    lock = forks.Lock()

    def work() -> None:
        with pytest.raises(CkstoreError, match="forked while"):
            forks.check()

    with lock:
        assert in_child(work) == 0
        forks.check()
    assert not lock.is_own()


def test_a_child_does_not_share_a_file_lock(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    descriptor = forks.open_unshared(path, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    told, tell = os.pipe()
    child = fork(lambda: os.read(told, 1) and forks.close_unshared(descriptor))
    forks.close_unshared(descriptor)
    try:
        with path.open() as file:
            while True:  # The child closes its copy a moment after the fork.
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.001)
    finally:
        os.write(tell, b".")
    assert exit_code(child) == 0
    os.close(told)
    os.close(tell)


def test_a_module_that_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_slow_module.py").write_text(f"import time\ntime.sleep({MOMENT})\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=__import__, args=("a_slow_module",))
    thread.start()
    while "a_slow_module" not in sys.modules:
        time.sleep(0.001)

    def work() -> None:
        import a_slow_module  # type: ignore[import-not-found]

        assert a_slow_module.value == 1

    assert in_child(work) == 0
    thread.join()


def test_a_value_that_another_thread_computes() -> None:
    class Holder:
        @cached_property
        def value(self) -> object:
            """A value."""
            is_begun.set()
            may_end.wait(self.patience)
            return object()

        patience: float | None = None

    is_begun, may_end = threading.Event(), threading.Event()
    slow, other = Holder(), Holder()
    other.patience = 0
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(slow.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    is_begun.wait()
    try:
        assert in_child(lambda: other.value and None) == 0
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
    assert found == [slow.value] * 2, "all get the same"
    assert Holder.value.__doc__ == "A value."
    assert not isinstance(Holder.value, functools.cached_property)
