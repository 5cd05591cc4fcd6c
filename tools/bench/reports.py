"""Time and peak memory of a report on a run, and of loading its files with torch, each in a process of its own.

Both begin without the files in the page cache, as far as the system drops them on request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import ckstore
from tools import runs

_MEASURED = """
import json, sys, time
def measured(work):
    start, used = time.perf_counter(), time.process_time()
    work()
    [peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(json.dumps([time.perf_counter() - start, time.process_time() - used, int(peak) / 1e3]))
"""
_REPORT = (
    _MEASURED
    + """
def work():
    import ckstore
    with ckstore.open(sys.argv[1], "r") as store:
        store.report().to_json()
measured(work)
"""
)
_LOAD = (
    _MEASURED
    + """
def work():
    import torch
    for path in sys.argv[1:]:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file
            load_file(path)
        else:
            torch.load(path, weights_only=True)
measured(work)
"""
)


def drop(paths: Iterable[Path]) -> None:
    """Ask the system to drop files from its page cache."""
    for path in paths:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(program: str, arguments: Sequence[object], cache: Path) -> list[float]:
    """Return wall seconds, CPU seconds and peak memory in MB of a program."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE, check=True, env=os.environ | {"CKSTORE_CACHE": str(cache)},
    )  # fmt: skip
    found: list[float] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="tools/bench/report", description=__doc__)
    parser.add_argument("--run", choices=runs.RUNS, default="gpt")
    parser.add_argument("--tier", choices=runs.TIERS, default="tiny")
    parser.add_argument("--data", type=Path, help="directory of trained runs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        files = runs.train(options.run, options.data or Path(scratch, "runs"), tier=options.tier)
        place = Path(scratch, "store")
        with ckstore.open(place, create=True) as store:
            for path in files:
                store.ingest(path, run=options.run)
            store.encode()
        cache = Path(scratch, "cache")
        size = sum(path.stat().st_size for path in files)
        print(f"{options.run} {options.tier}: {len(files)} files, {size / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        print(f"{'':<28}{'wall s':>8}{'CPU s':>8}{'peak MB':>9}")
        for label, program, given in (
            ("torch loads every file", _LOAD, files),
            ("first report", _REPORT, [place]),
            ("second report", _REPORT, [place]),
        ):
            drop([*files, *place.rglob("*")])
            wall, used, peak = timed(program, given, cache)
            print(f"{label:<28}{wall:>8.2f}{used:>8.2f}{peak:>9.0f}")


if __name__ == "__main__":
    main()
