"""Leftovers of a killed checkout are removed by the next one into the same directory, and nothing else is."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.reading import unfinished
from ckstore.storage import durable

KILLED = """
import os, signal, sys
import ckstore
from ckstore.reading import checkout
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
checkout.os.replace = killed
checkout.durable.remove = killed
with ckstore.open(sys.argv[1]) as store:
    store[sys.argv[2]].checkout(sys.argv[3], force=True)
"""


@pytest.fixture
def store(store: ckstore.Store, directory: Path) -> ckstore.Store:
    """A store with a version of one file, a@0, and one of a directory, b@0."""
    torch.save({"w": torch.ones(300, 300)}, directory / "in.pt")
    store.ingest(directory / "in.pt", run="a", step=0)
    (directory / "tree").mkdir()
    torch.save({"w": torch.zeros(300)}, directory / "tree" / "model.pt")
    store.ingest(directory / "tree", run="b", step=0)
    return store


def kill(store: ckstore.Store, version: str, target: Path) -> Path:
    """Return the leftovers of a checkout that is killed when all is written."""
    command = [sys.executable, "-c", KILLED, str(store.place), version, str(target)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    [left] = target.parent.glob(".tmp-*")
    return left


def age(path: Path) -> None:
    os.utime(path, (time.time() - 2 * unfinished.GRACE,) * 2)


def test_the_next_checkout_removes_leftovers_of_a_killed_one(store: ckstore.Store, tmp_path: Path) -> None:
    left = kill(store, "a@0", tmp_path / "out.pt")
    store["a@0"].checkout(tmp_path / "out.pt")
    assert left.exists(), "another host may have begun it just now"
    age(left)
    store["a@0"].checkout(tmp_path / "again.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.pt", "out.pt"]


def test_previous_content_of_the_target_is_not_removed(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"precious")
    left = kill(store, "b@0", tmp_path / "out")
    age(left)
    store["a@0"].checkout(tmp_path / "file")
    assert (left / "former" / "mine").read_bytes() == b"precious"


@pytest.mark.parametrize("case", ["file", "link", "name", "content", "locked", "running"])
def test_paths_of_other_programs_stay(tmp_path: Path, case: str) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    process = os.getpid() if case == "running" else dead.pid
    path = tmp_path / f".tmp-{process}-{'0123456789abcdef' if case != 'name' else 'abc'}"
    lock = -1
    if case == "file":
        path.write_bytes(b"")
    elif case == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        (path / ("made" if case != "content" else "notes.txt")).write_bytes(b"")
    if case == "locked":
        lock = os.open(path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    if case != "link":
        age(path)
    else:
        os.utime(path, (time.time() - 7200,) * 2, follow_symlinks=False)
    unfinished.sweep(tmp_path)
    assert os.path.lexists(path)
    if case == "locked":
        os.close(lock)
        unfinished.sweep(tmp_path)
        assert not path.exists()


def test_a_place_is_locked_while_it_is_in_use(tmp_path: Path) -> None:
    with unfinished.begin(tmp_path) as (made, _):
        made.write_bytes(b"")
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(made.parent, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(tmp_path.iterdir()) == []
    assert durable.find_temporaries(tmp_path, -1) == []
