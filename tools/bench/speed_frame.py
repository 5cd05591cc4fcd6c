"""The frame of the speed benchmark: its settings, and a clock by which contenders take turns.

Disturbances of the machine affect contenders that take turns alike. Contenders that restore checkpoints run in
persistent processes: the speed of new memory depends on the earlier work of a process, and ckstore, NumPy and torch
request it in different ways.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ckstore
from ckstore.policy import Fidelity
from tools.bench.series import Series, write_versions
from tools.bench.speed_figures import Timing

#: Bytes of memory that are made resident before timing: more than a round takes.
READY = 1 << 30

#: Processes of contenders, by name.
_processes: dict[str, ProcessPoolExecutor] = {}


@dataclass
class Bench:
    """One run of the benchmark.

    Attributes
    ----------
    work
        The directory of all reads and writes; its file system is measured.
    megabytes, versions
        Size of a synthetic checkpoint in MB (10^6 bytes), and the maximal number of versions of the run.
    repeat
        Rounds of operations that do not each need a version.
    chosen
        The series; None for a synthetic one.
    report
        Called with a line on progress.
    """

    work: Path
    megabytes: int = 300
    versions: int = 9
    repeat: int = 9
    chosen: Series | None = None
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    _series: dict[tuple[int, int], list[Path]] = field(default_factory=dict)

    def series(self) -> list[Path]:
        """Return the versions of the series, oldest first."""
        if self.chosen is not None:
            return list(self.chosen.versions[: self.versions])
        return self.synthetic(self.megabytes, self.versions)

    def synthetic(self, megabytes: int, versions: int) -> list[Path]:
        """Return synthetic checkpoints of one run, written at the first request."""
        key = megabytes, versions
        if key not in self._series:
            self.report(f"writing {versions} checkpoints of {megabytes} MB")
            directory = self.work / f"series-{megabytes}-{versions}"
            directory.mkdir()
            self._series[key] = write_versions(directory, megabytes, versions)
        return self._series[key]

    def store(self, fidelity: Fidelity = "exact", *, hot: int = 0) -> Path:
        """Return a store of the whole series as one run, with `hot` of its latest versions unencoded."""
        root = self.work / f"store-{fidelity}-{hot}"
        if not root.exists():
            self.report(f"filling a store, {fidelity}")
            with ckstore.init(root) as store:
                for path in self.series():
                    store.ingest(path, run="run", hot=hot, policy=fidelity)
        return root


def deepest(root: Path) -> int:
    """Return the number of the version with the longest chain in a store, the latest one of several."""
    with ckstore.open(root, "r") as store:
        return max(store.versions(), key=lambda row: (row.depth, row.number)).number


@dataclass(frozen=True)
class Contender:
    """A contender that is timed in every round.

    Attributes
    ----------
    name
        The name of its timings.
    work, before
        The timed work, and untimed preparation; both receive the round's number.
    apart
        Name of its process, if it has its own; the work must be picklable then.
    """

    name: str
    work: Callable[[int], Any]
    before: Callable[[int], Any] = lambda number: None
    apart: str = ""


def race(contenders: Sequence[Contender], rounds: Sequence[int], *, warm: bool = True) -> dict[str, list[Timing]]:
    """Return timings of every contender, round by round: A B A B; with `warm`, the first round runs twice."""
    timings: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
    if warm:
        for contender in contenders:
            _timed(contender, rounds[0])
    for number in rounds:
        for contender in contenders:
            timings[contender.name].append(_timed(contender, number))
    return timings


def _timed(contender: Contender, number: int) -> Timing:
    contender.before(number)
    if contender.apart:
        return process(contender.apart).submit(timed, contender.work, number, READY).result()
    return timed(contender.work, number, READY)


def process(name: str) -> ProcessPoolExecutor:
    """Return a persistent process that does one thing at a time."""
    if name not in _processes:
        _processes[name] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    return _processes[name]


def end_processes() -> None:
    """End all processes of contenders."""
    while _processes:
        _processes.popitem()[1].shutdown()


def timed(work: Callable[[int], Any], number: int, ready: int) -> Timing:
    """Return the time of one round of some work, with `ready` bytes of resident memory."""
    settle()
    ready_memory(ready)
    processor = processor_seconds()
    begin = time.perf_counter()
    result = work(number)
    seconds = time.perf_counter() - begin
    taken = processor_seconds() - processor
    del result  # Releasing memory is not part of the work, nor is it in a training process.
    return Timing(seconds, taken)


def settle() -> None:
    """Remove the effects of earlier work: write everything to the medium, return freed memory to the system.

    Otherwise the first contender would pay for the new pages of all.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    os.sync()


def ready_memory(size: int) -> None:
    """Make the memory resident that is allocated next.

    A virtual machine may return free memory to its host, and then waits for it page by page, for several times the time
    of writing. A contender that overwrites its last file hardly suffers from that; one that keeps its files, as a store
    does, always would.
    """
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended children, user and system together."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
