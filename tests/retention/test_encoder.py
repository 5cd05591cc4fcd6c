"""The background thread: ingests never encode, wait only beyond the limit, and survive its failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import NotFoundError
from ckstore.formats.torch.live_state import describe_state_dict
from ckstore.retention import encoder as encoder_module
from ckstore.retention.forget import forget
from ckstore.saving.process import Save, Settings, serve
from ckstore.saving.staging import Area, Packed
from ckstore.storage.catalog_reader import CatalogReader
from ckstore.writing import encode as encode_module
from tests.checkpoints import settled
from tests.children import in_child

MOST = 3
#: Seconds after which a blocked call counts as blocked.
SOON = 0.5
#: Seconds for work that ends.
PATIENCE = 60.0


def state(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal((40, 30), np.float32)}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event without which nothing is encoded; at most `MOST` versions wait."""
    opened = threading.Event()
    store_objects = encode_module.store_objects

    def late(*arguments: Any) -> Any:
        assert opened.wait(PATIENCE)
        return store_objects(*arguments)

    monkeypatch.setattr(encoder_module, "_MOST", MOST)
    monkeypatch.setattr(encode_module, "store_objects", late)
    yield opened
    opened.set()


def hot(store: ckstore.Store) -> list[int]:
    return [row.number for row in store._catalog.hot()]


def ingesting(store: ckstore.Store, steps: range, run: str = "a") -> threading.Thread:
    """Ingest in a thread."""

    def work() -> None:
        for step in steps:
            store.ingest(state(step), run=run, step=step)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def waited(store: ckstore.Store, number: int) -> None:
    """Wait until a version exists, and its ingest had time to go on."""
    deadline = time.monotonic() + PATIENCE
    while store._catalog.last_number() < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(SOON)


def test_an_ingest_never_encodes(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_MOST", MOST)
    encoders = set()
    store_objects = encode_module.store_objects

    def slow(*arguments: Any) -> Any:
        encoders.add(threading.current_thread().name)
        time.sleep(0.05)
        return store_objects(*arguments)

    monkeypatch.setattr(encode_module, "store_objects", slow)
    for step in range(4 * MOST):
        store.ingest(state(step), run="a", step=step)
        assert len(hot(store)) <= MOST + 2  # The latest, and the one before it.
    settled(store)
    assert encoders == {"ckstore-encoder"}
    assert len(hot(store)) == 1


def test_an_ingest_waits_beyond_the_limit_once_it_is_durable(store: ckstore.Store, gate: threading.Event) -> None:
    thread = ingesting(store, range(4 * MOST))
    waited(store, MOST + 1)
    assert thread.is_alive()
    assert MOST + 1 <= len(hot(store)) <= MOST + 2
    assert store.verify().problems == []
    gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    settled(store)
    assert len(store) == 4 * MOST
    assert len(hot(store)) == 1


def test_other_runs_do_not_wait(store: ckstore.Store, gate: threading.Event) -> None:
    thread = ingesting(store, range(4 * MOST))
    waited(store, MOST + 1)
    for step in range(MOST):
        store.ingest(state(step), run="b", step=step)
    assert thread.is_alive()
    gate.set()
    thread.join(PATIENCE)
    settled(store)
    assert len(hot(store)) == 2


def test_an_ingest_waits_while_little_of_the_disk_is_free(
    store: ckstore.Store, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_usage(path: Path) -> Any:
        return SimpleNamespace(free=4 * 2.5 * 5_600)  # A version takes 5.5 kB.

    monkeypatch.setattr(encoder_module.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(encoder_module, "_MOST", 100)
    thread = ingesting(store, range(4 * MOST))
    waited(store, 3)
    assert thread.is_alive()
    assert len(hot(store)) in (3, 4)
    gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [OSError("Input/output error"), ckstore.CkstoreError("The disk is full.")])
def test_a_failure_is_a_warning(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(encoder_module, "_MOST", 0)

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(encode_module, "store_objects", fail)
        for step in range(4):
            store.ingest(state(step), run="a", step=step)
        settled(store)
    assert {record.getMessage() for record in caplog.records} == {f"Older versions of run a remain unchanged: {error}"}
    assert hot(store) == [1, 2, 3, 4]
    assert store.verify().problems == []
    store.ingest(state(4), run="a", step=4)
    settled(store)
    assert hot(store) == [5]


def test_a_version_that_is_forgotten_while_it_is_encoded_is_no_warning(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode, forgotten = encoder_module.encode, []

    def forget_first(opened: Any, rows: Any, **named: Any) -> Any:
        if rows and not forgotten:
            forgotten.append(rows[0].name)
            store.forget(forgotten)
            raise NotFoundError("Unknown version 1.")
        return encode(opened, rows, **named)

    monkeypatch.setattr(encoder_module, "encode", forget_first)
    for step in range(4):
        store.ingest(state(step), run="a", step=step)
    settled(store)
    assert forgotten
    assert caplog.messages == []
    assert hot(store) == [4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_ingest_does_not_wait_for_a_thread_that_has_died(
    store: ckstore.Store, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        assert gate.wait(PATIENCE)
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(encode_module, "store_objects", fail)
        thread = ingesting(store, range(MOST + 2))
        waited(store, MOST + 1)
        assert thread.is_alive()
        gate.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        settled(store)
    assert "Older versions of run a remain unchanged: no memory" in caplog.messages
    assert store.verify().problems == []
    store.ingest(state(99), run="a", step=99)
    settled(store)
    assert hot(store) == [len(store)]


def test_without_another_thread_versions_stay_hot(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoder_module, "_MOST", 0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(encoder_module.threading.Thread, "start", refuse)
        for step in range(3):
            store.ingest(state(step), run="a", step=step)
    assert set(caplog.messages) == {"Older versions of run a remain unchanged: can't start new thread"}
    assert hot(store) == [1, 2, 3]
    store.ingest(state(3), run="a", step=3)
    settled(store)
    assert hot(store) == [4]


def test_closing_the_store_ends_the_wait(directory: Path, gate: threading.Event) -> None:
    store = ckstore.init(directory / "store")
    thread = ingesting(store, range(MOST + 2))
    waited(store, MOST + 1)
    assert thread.is_alive()
    closing = threading.Thread(target=store._taking().close)
    closing.start()
    gate.set()
    closing.join(PATIENCE)
    thread.join(PATIENCE)
    assert not closing.is_alive()
    assert not thread.is_alive()
    assert store.verify().problems == []
    store.close()


def test_every_close_encodes_a_version_that_is_due(directory: Path) -> None:
    """Otherwise a program that opens the store for each save would leave all of them hot."""
    for step in range(6):
        with ckstore.open(directory / "store", create=True) as store:
            store.ingest(state(step), run="a", step=step)
            assert len(hot(store)) <= 2
    with ckstore.open(directory / "store") as store:
        assert len(hot(store)) == 1


def test_a_version_that_is_forgotten_while_the_thread_looks_is_passed_over(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        store.ingest(state(step), run="a", step=step, hot=9)
    sizes = CatalogReader.hot_sizes

    def late(catalog: CatalogReader, run: str, keep: int = 0) -> dict[int, int]:
        found = sizes(catalog, run, keep)
        if 1 in found:
            forget(store._repository, [store._catalog.version(1)], for_good=True)
        return found

    monkeypatch.setattr(CatalogReader, "hot_sizes", late)
    encoder = encoder_module.BackgroundEncoder(store._repository)
    encoder.begin("a", 1)
    while encoder._thread is not None:
        time.sleep(0.01)
    encoder.close()
    assert hot(store) == [4]


@pytest.mark.local
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_does_not_wait_for_the_thread_of_its_parent(store: ckstore.Store, gate: threading.Event) -> None:
    thread = ingesting(store, range(MOST + 2))
    waited(store, MOST + 1)
    assert thread.is_alive()
    upcoming = state(50)

    def work() -> None:
        gate.set()
        store.ingest(upcoming, run="b", step=0)
        store.close()

    assert in_child(work) == 0
    assert thread.is_alive()
    gate.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert store.verify().problems == []


PROGRAM = """
    import os, sys, threading, time
    import numpy as np
    import ckstore
    from ckstore.retention import encoder
    from ckstore.writing import encode

    def store_objects(*arguments):
        while True:
            time.sleep(0.01)
            arguments[-1](1)

    encoder._MOST = 1
    encode.store_objects = store_objects
    store = ckstore.open(sys.argv[1], create=True)

    def work():
        for step in range(9):
            store.ingest({"w": np.full((40, 30), step, np.float32)}, run="a", step=step)
            os.write(1, b"%d\\n" % step)  # A buffered stream has a lock, which the end of the program needs.

    threading.Thread(target=work, daemon=True).start()
    sys.stdin.readline()
"""


@pytest.mark.long
@pytest.mark.local
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_program_that_ends_while_it_waits_loses_nothing(directory: Path, end: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(directory / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "0\n"
        time.sleep(2 * SOON)
        with ckstore.open(directory / "store", "r") as store:
            assert 2 <= len(store) <= 3
        if end == "kill":
            child.kill()
        child.stdin.close()
        assert child.wait(PATIENCE) == (-signal.SIGKILL if end == "kill" else 0)
        told = 1 + len(child.stdout.readlines())
    with ckstore.open(directory / "store") as store:
        # At its end nothing holds a program's thread that waits: it may ingest more.
        assert told <= len(hot(store)) == len(store) < 9
        assert store.verify().problems == []
        store.encode()
        assert hot(store) == []


@pytest.mark.local
def test_a_saver_waits_beyond_the_limit_too(store: ckstore.Store, gate: threading.Event) -> None:
    areas = [Area() for _ in range(3 * MOST)]
    here, there = Pipe()
    saves = []
    for number, area in enumerate(areas):
        packed = Packed(describe_state_dict(state(number), "raise"))
        area.reserve(packed.stop)
        area.stage(packed)
        saves.append(Save(number, number, packed.start, packed.stop, number, {}, None, False, None, None))
    descriptors = tuple(area.descriptor for area in areas)
    settings = Settings(os.getppid(), there.fileno(), descriptors, store._repository.address, "a", 1)
    thread = threading.Thread(target=serve, args=(settings, there))
    thread.start()
    for save in saves:
        here.send(save)
    answers = 0
    while here.poll(3 * SOON):
        _, report = here.recv()
        assert report.is_new
        answers += 1
    assert MOST <= answers <= MOST + 2
    assert thread.is_alive()
    gate.set()
    for _ in range(len(areas) - answers):
        assert here.poll(PATIENCE)
        here.recv()
    here.send(None)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(store) == len(areas)
    assert store.verify().problems == []
    for area in areas:
        area.close()
