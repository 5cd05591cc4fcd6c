"""Times contenders in turn, so that what the machine does meanwhile meets all of them alike.

Those that get checkpoints back run in processes of their own, which stay: how fast fresh memory comes depends on what
a process did before, and ckstore, NumPy and torch ask for it in different ways.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.bench.speed_figures import Timing

#: Bytes of memory that are made ready before anything is timed: more than a round takes.
READY = 1 << 30

#: Processes that contenders run in, by name.
_processes: dict[str, ProcessPoolExecutor] = {}


@dataclass(frozen=True)
class Contender:
    """Something that is timed in every round.

    Attributes
    ----------
    name
        What its timings are called.
    work, before
        What is timed, and what has to be done first and is not; both are given the round's number.
    apart
        Name of the process that it is timed in, if not in this one; the work must be picklable then.
    """

    name: str
    work: Callable[[int], Any]
    before: Callable[[int], Any] = lambda number: None
    apart: str = ""


def race(contenders: Sequence[Contender], rounds: Sequence[int], *, warm: bool = True) -> dict[str, list[Timing]]:
    """Timings of every contender, a round after the other: A B A B; `warm` runs the first round once more before."""
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
    """A process that stays, and does one thing at a time."""
    if name not in _processes:
        _processes[name] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    return _processes[name]


def end_processes() -> None:
    """End all processes that contenders run in."""
    while _processes:
        _processes.popitem()[1].shutdown()


def timed(work: Callable[[int], Any], number: int, ready: int) -> Timing:
    """The time of one round of some work, with so many bytes of memory made ready."""
    settle()
    ready_memory(ready)
    processor = processor_seconds()
    begin = time.perf_counter()
    result = work(number)
    seconds = time.perf_counter() - begin
    taken = processor_seconds() - processor
    del result  # Giving memory back is not part of the work, as it is not in the life of a training process.
    return Timing(seconds, taken)


def settle() -> None:
    """Let nothing that was done before be in the way: write it all to the medium, give freed memory to the system.

    Otherwise whoever comes first would pay for everybody's fresh pages.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    os.sync()


def ready_memory(size: int) -> None:
    """Have the machine hold the memory that is taken next.

    A virtual machine may give free memory back to its host, and waits for it page by page, for several times as long as
    writing takes. What overwrites its last file hardly meets that; what keeps its files, as a store does, always would.
    """
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended, user and system together."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
