"""Splits the time of a verb: by the rooms of ckstore, its packages, by modules, and by the interpreter's lock.

A thread samples all others every few milliseconds. The processor time of a thread since the last sample counts for the
innermost module of ckstore on its stack. Compiled loops and other libraries have no frame of their own, so their time
is that of the room that calls them. Each sample begins without the interpreter's lock: if the thread has to wait for
it, another one holds it.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import numba
import numpy as np

import ckstore
from tools.bench import speed_frame
from tools.bench.series import load
from tools.bench.speed_figures import Section, digits
from tools.bench.speed_frame import Bench, Contender, deepest, processor_seconds, ready_memory
from tools.bench.speed_rows import CHECKOUT, COARSE, INGEST, LIVE, STATE_DICT, check_out, ingest, state_dict

#: Seconds between two samples, and the number of modules in the table, by their time.
_INTERVAL, _MODULES = 0.004, 12

#: Nanoseconds after which a thread that requests the interpreter's lock has waited for another: it takes a free one in
#: two thousand. And the seconds after which a thread passes it to one that waits.
_WAITED, _SWITCH = 50_000, 0.0005

#: Time outside of ckstore's modules, and seconds of the clock in which a thread held the interpreter's lock.
REST, LOCK = "everything else", "interpreter's lock, s/GB"

_PACKAGE = Path(ckstore.__file__).parent

_sleep, _clock = ctypes.CDLL(None).usleep, ctypes.CDLL(None).clock_gettime
_sleep.argtypes, _clock.argtypes = (ctypes.c_uint,), (ctypes.c_int, ctypes.c_void_p)


@numba.njit(nogil=True)
def _woken(microseconds: int, woken: np.ndarray) -> None:
    """Sleep, and record the seconds and nanoseconds of the monotonic clock (1): all of it without the lock."""
    _sleep(microseconds)
    _clock(1, woken.ctypes)


def _waits_for_lock(woken: np.ndarray) -> bool:
    """Return whether another thread holds the interpreter's lock, a while from now."""
    _woken(int(_INTERVAL * 1e6), woken)
    return time.monotonic_ns() - int(woken[0]) * 1_000_000_000 - int(woken[1]) > _WAITED


@contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Return the processor seconds of all threads of this process inside the block, by module (`room.module`).

    `LOCK` has the seconds in which one of them held the interpreter's lock.
    """
    modules: dict[str, float] = defaultdict(float)
    held: list[bool] = []
    threads: dict[int, tuple[int, float, str]] = {}  # clock, its value, and module, at the last sample
    done = threading.Event()

    def look() -> None:
        for thread, frame in sys._current_frames().items():
            if thread == watcher.ident:
                continue
            try:
                clock, before, module = threads[thread]
                now = time.clock_gettime(clock)
            except (KeyError, OSError):  # The thread is new, or has the number of one that has ended.
                clock, before, module = time.pthread_getcpuclockid(thread), 0.0, ""
                now = time.clock_gettime(clock)
            # A thread that has left ckstore was there just before.
            found = _module(frame)
            threads[thread] = clock, now, found
            modules[found or module or REST] += now - before

    def watch() -> None:
        woken = np.zeros(2, np.int64)
        while not done.is_set():
            held.append(_waits_for_lock(woken))
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    _woken(0, np.zeros(2, np.int64))
    switch = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    look()
    modules.clear()
    start, begun = processor_seconds(), time.monotonic()
    watcher.start()
    try:
        yield modules
    finally:
        seconds = time.monotonic() - begun
        done.set()
        watcher.join()
        sys.setswitchinterval(switch)
        look()
        modules[REST] += processor_seconds() - start - sum(modules.values())
        modules[LOCK] = seconds * sum(held) / max(len(held), 1)


def _module(frame: FrameType | None) -> str:
    """Return the innermost module of ckstore in a stack; empty without one."""
    while frame is not None and not _of_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _of_file(frame.f_code.co_filename)


@cache
def _of_file(name: str) -> str:
    if not Path(name).is_relative_to(_PACKAGE):
        return ""
    parts = Path(name).relative_to(_PACKAGE).with_suffix("").parts
    return ".".join(parts if len(parts) > 1 else ("ckstore", *parts))


def rooms(modules: Mapping[str, float]) -> dict[str, float]:
    """Return processor seconds by package; the modules of `ckstore` itself are one."""
    found: dict[str, float] = defaultdict(float)
    for module, seconds in modules.items():
        found[module.partition(".")[0]] += seconds
    return found


def stages(bench: Bench) -> Section:
    """Measure processor seconds by room, by module, and by verb."""
    modules = dict(_profiles(bench))
    locked = [LOCK, *(digits(column.pop(LOCK)) for column in modules.values())]
    total = ["all", *(digits(sum(column.values())) for column in modules.values())]
    by_room = _rows({verb: rooms(column) for verb, column in modules.items()})
    by_module = [row for row in _rows(modules) if row[0] != REST][:_MODULES]
    return Section(
        "Where processor time goes",
        "Processor seconds for a GB of checkpoint by the rooms (packages) of ckstore, in one process, by samples of "
        "all threads: a sample counts for the innermost module of ckstore on the stack, with compiled loops and "
        "libraries that it calls. The last row is time in which one of the threads held the interpreter's "
        "lock: on any number of cores, a verb takes no less. "
        f"Below, the {_MODULES} modules that take most.",
        [[["room, CPU s/GB", *modules], *by_room, total, locked], [["module, CPU s/GB", *modules], *by_module]],
    )


def _rows(columns: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each name, in descending order of the total over all columns."""
    found = {name for column in columns.values() for name in column}
    names = sorted(found, key=lambda name: -sum(column.get(name, 0.0) for column in columns.values()))
    return [[name, *(digits(column[name]) if name in column else "" for column in columns.values())] for name in names]


def _profiles(bench: Bench) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield verb, and processor seconds per GB by module."""
    paths, again = bench.series(), range(bench.repeat)
    root, live, out = (bench.work / "staged" / name for name in ("store", "live", "out"))
    state: list[Any] = [None]

    def take(number: int) -> None:
        state[0] = load(paths[number])

    def profile(contender: Contender, rounds: Sequence[int]) -> tuple[str, dict[str, float]]:
        found: dict[str, float] = defaultdict(float)
        for number in rounds:
            contender.before(number)
            ready_memory(speed_frame.READY)
            with profiled() as modules:
                contender.work(number)
            for module, seconds in modules.items():
                found[module] += seconds / (len(rounds) * paths[-1].stat().st_size / 1e9)
        return contender.name, found

    with ckstore.init(root) as store, ckstore.init(live) as kept:
        for made in (store, kept):
            made.ingest(paths[0], run="run", hot=0)
        later = range(1, len(paths))
        yield profile(Contender(INGEST, lambda number: ingest(root, paths[number], "exact", number)), later)
        yield profile(Contender(LIVE, lambda _: kept.ingest(state[0], run="run", hot=0), take), later)
    number, coarse = deepest(root), bench.store("coarse")
    yield profile(
        Contender(CHECKOUT, partial(check_out, root, number, out), lambda _: out.unlink(missing_ok=True)), again
    )
    yield profile(Contender(STATE_DICT, partial(state_dict, root, number, None)), again)
    yield profile(Contender(COARSE, partial(state_dict, coarse, deepest(coarse), None)), again)
    shutil.rmtree(root.parent)
