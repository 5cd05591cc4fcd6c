"""Measures the first and the second report on a run, and loading its files with torch, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckstore.policy import FIDELITIES
from tools.bench.speed_figures import Section, digits
from tools.bench.speed_frame import Bench

#: Rounds at most.
ROUNDS = 3

_MEASURED = """
import json, sys, time
start = time.perf_counter()
{work}
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([time.perf_counter() - start, time.process_time(), int(peak) * 1024 / 1e6]))
"""
_REPORT = _MEASURED.format(work="import ckstore; ckstore.open(sys.argv[1], 'r').report().to_html()")
_LOAD = _MEASURED.format(work="from tools.bench.series import load, Path\nfor path in sys.argv[1:]: load(Path(path))")


def report(bench: Bench) -> Section:
    """Measure reports on the series, stored exact and coarse, and loads of all its files."""
    files, stores = bench.series(), {fidelity: bench.store(fidelity) for fidelity in FIDELITIES}
    bench.report(f"reports, load {os.getloadavg()[0]:.1f}")
    found: dict[str, list[list[float]]] = {}
    for _ in range(min(bench.repeat, ROUNDS)):
        found.setdefault("torch loads every file", []).append(_measured(_LOAD, files))
        for fidelity, store in stores.items():
            with tempfile.TemporaryDirectory(dir=bench.work) as cache:
                for name in ("first", "second"):
                    figures = _measured(_REPORT, [store], cache)
                    found.setdefault(f"{name} report, {fidelity}", []).append(figures)
    theirs = found["torch loads every file"]
    rows = [["measurement", "wall s", "CPU s", "peak MB", "CPU s, of torch's"]]
    for name, mine in found.items():
        ratio = statistics.median(own[1] / other[1] for own, other in zip(mine, theirs, strict=True))
        rows.append([name, *(digits(statistics.median(column)) for column in zip(*mine, strict=True)), digits(ratio)])
    size = sum(path.stat().st_size for path in files)
    return Section(
        "Report",
        f"A report as a page on {len(files)} versions, {digits(size / 1e9)} GB of files, in a process of its own, with "
        "imports. The first one has no cache of measures. Files and store are dropped from the page cache before each "
        f"measurement. Load of the machine: {os.getloadavg()[0]:.0f}; wall-clock time follows it.",
        [rows],
    )


def _measured(program: str, paths: Sequence[Path], cache: str = "") -> list[float]:
    """Return wall seconds, CPU seconds and peak memory in MB of a program that begins without its files in memory."""
    _drop(file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)],
        stdout=subprocess.PIPE, check=True, env={**os.environ, "CKSTORE_CACHE": cache},
    )  # fmt: skip
    found: list[float] = json.loads(done.stdout)
    return found


def _drop(paths: Iterable[Path]) -> None:
    """Ask the system to drop files from its page cache."""
    for path in paths:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if sys.platform == "linux":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
