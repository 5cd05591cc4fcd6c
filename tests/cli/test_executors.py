"""`--executor` of the command line; `tests/test_executors.py` tests executors themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from ckstore.cli.executors import executor_of

from .conftest import Ckstore


@pytest.mark.long
def test_a_cluster_stores_a_folder(ckstore: Ckstore, place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Warnings of the cluster's own code are not ours to mend.
        distributed = pytest.importorskip("distributed")
        with distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None, host="127.0.0.1"
        ) as cluster:
            address = cluster.scheduler_address.removeprefix("tcp://")
            done = ckstore("ingest", "in", "--recursive", "--executor", f"dask={address}", "--json").json
    assert [(item["run"], item["step"]) for item in done] == [("in", 0), ("in", 10), ("in", 20)]
    ckstore("verify")


def test_an_interrupted_pool_leaves_no_thread() -> None:
    """Python's exit handler fails if a pool's thread ends while it runs."""

    def interrupted() -> None:
        with executor_of("processes=2") as pool:
            assert pool is not None
            for _ in range(2):
                pool.submit(time.sleep, 60)
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("name", ["processes", "processes=0", "processes=many", "dask=there", "dask=:1", "threads=2"])
def test_unknown_executors_are_refused(ckstore: Ckstore, place: Path, name: str) -> None:
    sentence = ckstore("ingest", "in", "--recursive", "--executor", name, code=2).sentence
    assert f"{name!r} is not of the form processes=N or dask=HOST:PORT" in sentence


def test_a_scheduler_that_is_not_there_is_one_sentence(
    ckstore: Ckstore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("ckstore.cli.executors._PATIENCE", 0.5)
    sentence = ckstore("ingest", "in", "--recursive", "--executor", "dask=127.0.0.1:9", code=2).sentence
    assert "No scheduler of dask answers at 127.0.0.1:9" in sentence


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.0, 0.4, 2.0])
def test_an_interruption_is_one_sentence_and_ends_the_processes(filled: Path, seconds: float) -> None:
    """Whenever it comes, to the program and to all that it started, as from a terminal."""
    slow = "import sys, time; time.sleep(8)"
    for run in ("a", "b"):
        shutil.copytree(filled / "in", filled / "both" / run)
    command = [sys.executable, "-m", "ckstore", "ingest", "both", "--recursive", "--executor", "processes=2",
               "--max-degradation", "1%", "--eval", f"{sys.executable} -c '{slow}' {{}}"]  # fmt: skip
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(workers_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        workers = workers_of(process.pid)
        assert len(workers) == 2
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.split("\n")[-2:] == ["ckstore: interrupted; the store is consistent.", ""], said
    assert "Traceback" not in said
    deadline = time.monotonic() + 5
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(runs, workers))


def runs(process: int) -> bool:
    """Return whether the process exists, and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def workers_of(parent: int) -> list[int]:
    """Return the processes of a pool."""
    found = []
    for place in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{place}/cmdline").read_bytes():
                found.append(int(place))
    return found
