"""Followers and publishers that are killed at any moment, next to a writer that forgets: no mixture is marked whole."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3

import ckstore
from ckstore.following.marker import MARKER
from tests.following.test_follow import MODEL, tree, write_model

pytestmark = [pytest.mark.local, pytest.mark.encoded]

#: Kills of followers, and half as many of publishers, more where this variable is set: `CKSTORE_KILLS=500`.
KILLS = int(os.environ.get("CKSTORE_KILLS", "8"))


def digest_of(directory: Path) -> str:
    hasher = blake3()
    for path, data in sorted(tree(directory).items()):
        hasher.update(f"{path}\n".encode() + (data if isinstance(data, bytes) else data.encode()))
    return hasher.hexdigest()


def forked(work: Callable[[], None]) -> int:
    """Fork a process for some work; return its number."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        Path("failed").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def follow() -> None:
    """Follow, and note each version that is loaded with the digest of its files."""
    for item in ckstore.follow("store", "policy", "local", poll=0.001):
        line = f"{item.version.step} {digest_of(Path('local'))}\n"
        with Path("loaded").open("a") as loaded:
            loaded.write(line)


def publish(step: int) -> None:
    """Publish the files of the model, unless they are already there; sometimes forget, and collect garbage."""
    with ckstore.open("store") as store:
        store.ingest(MODEL, run="policy", step=step)
        if step % 5 == 4:
            store.forget(run="policy", keep_last=2)
            store.gc(grace=0)


@pytest.mark.long
def test_no_kill_leaves_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore.init("store").close()
    Path("loaded").touch()
    chance = random.Random(KILLS)
    published: dict[int, str] = {}
    children: list[int] = []
    try:
        for number in range(KILLS):
            while len(children) < 2:
                children.append(forked(follow))
            for step in range(2 * number, 2 * number + 2):
                write_model(MODEL, step % 40, **{f"file{step % 3}": b"x" * step})
                published[step] = digest_of(MODEL)
                if step % 4 == 0:  # A publisher that is killed: the next one repeats its work.
                    child = forked(partial(publish, step))
                    time.sleep(chance.random() * 0.15)
                    kill(child)
                publish(step)
            time.sleep(chance.random() * 0.1)
            assert not Path("failed").exists(), Path("failed").read_text()
            victim = children.pop(chance.randrange(2))
            kill(victim)
            check_marker(published, children)
    finally:
        for child in children:
            kill(child)
    for _ in ckstore.follow("store", "policy", "local", once=True):
        assert digest_of(Path("local")) == published[max(published)]
    loaded = [line.split() for line in Path("loaded").read_text().splitlines()]
    assert loaded
    assert all(published[int(step)] == digest for step, digest in loaded)


def check_marker(published: dict[int, str], children: list[int]) -> None:
    """Assert that files which the marker calls complete are those of its version; the followers are stopped for it."""
    for child in children:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
    try:
        if Path("local", MARKER).exists():
            marker = json.loads(Path("local", MARKER).read_text())
            assert marker["state"] == "updating" or digest_of(Path("local")) == published[marker["step"]]
    finally:
        for child in children:
            os.kill(child, signal.SIGCONT)
