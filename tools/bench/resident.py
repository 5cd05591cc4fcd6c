"""Measures how the memory of a process grows with the versions that it stores or reads.

Each operation runs on small states in four runs of one store. The saver's process is measured from outside.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import ckstore

_RUNS = 4
#: Number of figures in a line.
_LOOKS = 8

#: Does the operation on the version with a number; and the process whose memory counts.
Operation = tuple[Callable[[int], object], Callable[[], int]]


def resident(process: int) -> float:
    """Return the megabytes of a process's own memory, without mapped files."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise ValueError(f"/proc/{process}/status has no RssAnon")


def states() -> Callable[[int], dict[str, np.ndarray]]:
    """Return a function that makes the state of a number: it drifts, as training does."""
    weight = np.random.default_rng(0).standard_normal(2000, np.float32)
    return lambda number: {"weight": weight * np.float32(1 + 1e-5 * number), "step": np.array(number)}


@contextmanager
def ingest(path: Path, _: int) -> Iterator[Operation]:
    """Store each state with the defaults: the background encodes older ones."""
    state = states()
    with ckstore.init(path / "store") as store:
        yield lambda number: store.ingest(state(number), run=f"run {number % _RUNS}", step=number), os.getpid


@contextmanager
def read(path: Path, versions: int) -> Iterator[Operation]:
    """Read each version of a store once."""
    state = states()
    with ckstore.init(path / "store") as store:
        for number in range(versions):
            store.ingest(state(number), run=f"run {number % _RUNS}", step=number, hot=0)
    with ckstore.open(path / "store", "r", cache_bytes=1 << 20) as store:
        yield lambda number: store[f"run {number % _RUNS}@{number}"].state_dict(), os.getpid


@contextmanager
def watch(path: Path, _: int) -> Iterator[Operation]:
    """Store each file as it appears, and delete it."""
    state, stop = states(), threading.Event()
    (path / "in").mkdir()
    with ckstore.init(path / "store") as store:
        found = store.watch(path / "in", settle=0.01, poll=0.02, delete_source=True, stop=stop)

        def arrive(number: int) -> None:
            np.save(path / "in" / f"step{number}.npy", state(number)["weight"])
            next(found)

        yield arrive, os.getpid
        stop.set()


@contextmanager
def saver(path: Path, _: int) -> Iterator[Operation]:
    """Save each state through a saver, and wait for it."""
    state = states()
    with ckstore.init(path / "store") as store, store.saver("run") as saving:
        yield lambda number: saving.save(state(number), step=number).result(), lambda: process_of(saving)


def process_of(saving: ckstore.Saver) -> int:
    """Return the id of a saver's process."""
    assert saving._process is not None
    return saving._process.pid


OPERATIONS = {"ingest": ingest, "read": read, "watch": watch, "saver": saver}


def main(given: Sequence[str] | None = None) -> None:
    """Print a line for each operation."""
    parser = argparse.ArgumentParser(prog="tools/bench/memory", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--versions", type=int, default=20_000, help="number of versions (default 20000)")
    parser.add_argument("--work", type=Path, help="directory for the stores (default: the system's)")
    parser.add_argument("operations", nargs="*", help="by default all: ingest, read, watch, saver")
    arguments = parser.parse_args(given)
    versions = arguments.versions
    looks = [versions * part // _LOOKS for part in range(1, 1 + _LOOKS)]
    for name in arguments.operations or OPERATIONS:
        with (
            tempfile.TemporaryDirectory(dir=arguments.work) as directory,
            OPERATIONS[name](Path(directory), versions) as (operation, process),
        ):
            found = []
            for number in range(versions):
                operation(number)
                if number + 1 in looks:
                    found.append(resident(process()))
        said = ", ".join(f"{megabytes:.1f}" for megabytes in found)
        print(f"{name}: {said} MB after each eighth of {versions} versions", flush=True)


if __name__ == "__main__":
    main()
