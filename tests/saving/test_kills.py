"""A program or its saver's process is killed at random moments; `CKSTORE_KILLS` says how often."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.storage import durable
from tests.checkpoints import scratch

REPOSITORY = Path(__file__).parents[2]
KILLS = int(os.environ.get("CKSTORE_KILLS", "6"))

#: Saves one state after the other, and says of each when it is durable.
PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    import numpy as np
    import ckstore

    def say(text):
        os.write(1, (text + "\\n").encode())

    store = ckstore.open(sys.argv[1])
    saver = store.saver("a", nbytes=4_000_000)
    while saver._process is None:
        time.sleep(0.001)
    say(f"process {saver._process.pid}")
    for step in range(1000):
        w = np.random.default_rng(step).normal(size=(700, 700)).astype(np.float32)
        future = saver.save({"w": w, "half": w[:350], "step": step})
        w[:] = 0
        future.add_done_callback(lambda future, step=step: future.exception() or say(f"done {step}"))
    """
)


def weights(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(700, 700)).astype(np.float32)


def named_memory() -> set[str]:
    """Return the names in shared memory that ckstore or Python may have given."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "ckstore")) and "-test-" not in name}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self").is_dir() or not Path("/dev/shm").is_dir(), reason="looks into Linux's /proc")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(KILLS))
def test_reported_versions_exist_and_nothing_is_left(number: int) -> None:
    chance = random.Random(number)
    before = named_memory()
    with scratch() as directory:
        ckstore.init(directory / "store").close()
        program = subprocess.Popen(  # Without a buffer, whose lines `communicate` would lose.
            [sys.executable, "-c", PROGRAM, str(directory / "store")],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        assert program.stdout is not None
        process = int(program.stdout.readline().split()[1])
        # A third of the kills may come before anything is durable.
        first = [program.stdout.readline()] if number % 3 else []
        time.sleep(chance.uniform(0, 1.5))
        os.kill(chance.choice([program.pid, process]), signal.SIGKILL)
        said = first + program.communicate(timeout=50)[0].splitlines()
        assert program.returncode  # Without its saver's process a program ends with an error.
        until = time.monotonic() + 10
        while durable.is_running(process):  # Threads may outlive the first one.
            assert time.monotonic() < until
            time.sleep(0.01)
        done = {int(line.removeprefix(b"done ")) for line in said}  # Not in order: callbacks come from two threads.
        with ckstore.open(directory / "store") as store:
            steps = {row.step for row in store._catalog.versions()}
            assert done <= steps
            assert len(steps - done) <= 2  # Durable, and not reported any more.
            for step in steps:
                found = store[f"a@{step}"].state_dict()
                np.testing.assert_array_equal(found["w"], weights(step or 0), strict=True)
                np.testing.assert_array_equal(found["half"], weights(step or 0)[:350], strict=True)
            assert store.verify().problems == []
            # It goes on after that; a thread that encodes would keep gc from looking for leftovers.
            store.ingest({"w": weights(2000), "step": 2000}, run="a", hot=0)
            store.gc(grace=0)
            assert store.verify().problems == []
        assert list((directory / "store" / "packs").glob(".tmp*")) == []
    assert named_memory() <= before
