"""Measures how costs grow with the number of versions of a store: CPU seconds, resident memory, files and bytes.

The states drift as weights in training do, and are ingested live in turn into several runs, with the defaults. At each
number of versions, the means of the next ingests and one process for each verb are measured.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ckstore

#: Ingests whose mean is printed.
_INGESTS = 50
#: Verbs by name in the table; `{}` is a version. The second collection finds a clean store; later verbs do not name the
#: version that was forgotten.
_VERBS = {
    "show": ("show", "{}"),
    "log -n 5": ("log", "-n", "5"),
    "stats": ("stats",),
    "gc, first": ("gc",),
    "gc, again": ("gc",),
    "forget --prune, with its gc": ("forget", "{}", "--prune"),
    "verify": ("verify",),
    "recover": ("recover",),
}
_SLICE = "import ckstore, sys; ckstore.open(sys.argv[1], 'r')[sys.argv[2]]['w0'][0]"

State = dict[str, npt.NDArray[np.float32]]


def states(runs: int, tensors: int, elements: int) -> Iterator[tuple[int, int, State]]:
    """Yield number of run, step and state, in turn for each run, without end."""
    generator = np.random.default_rng(0)
    shape = (elements // 32, 32) if elements % 32 == 0 else (elements,)

    def noise() -> npt.NDArray[np.float32]:
        return generator.standard_normal(shape, np.float32)

    current = [{f"w{number}": noise() for number in range(tensors)} for _ in range(runs)]
    step = 0
    while True:
        for run in range(runs):
            current[run] = {name: values + 1e-3 * noise() for name, values in current[run].items()}
            yield run, step, current[run]
        step += 1


def measured(place: Path, last: str) -> dict[str, float]:
    """Return CPU seconds of a process for each verb, and the bytes and files of a store."""
    found = {"slice, CPU s": _cpu([sys.executable, "-c", _SLICE, str(place), last])}
    for name, verb in _VERBS.items():
        arguments = [part.format(last) for part in verb]
        found[f"{name}, CPU s"] = _cpu([sys.executable, "-m", "ckstore", "--store", str(place), *arguments])
    with ckstore.open(place, "r") as store:
        versions = len(store)
    sizes = {path: path.stat().st_size for path in place.rglob("*") if path.is_file()}
    found["files"] = len(sizes)
    for part in ("catalog.sqlite", "log", "packs"):
        found[f"{part}, bytes a version"] = sum(sizes[path] for path in sizes if part in path.parts) / versions
    return found


def _cpu(command: Sequence[str]) -> float:
    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run(command, check=True, capture_output=True)
    return spent() - before


def grown(place: Path, numbers: Sequence[int], runs: int, tensors: int, elements: int) -> dict[int, dict[str, float]]:
    """Return the costs at each number of versions."""
    found = {}
    source = states(runs, tensors, elements)
    made = 0
    with ckstore.init(place) as store:
        for number in numbers:
            while made < number - _INGESTS:
                run, step, state = next(source)
                store.ingest(state, run=f"run{run}", step=step)
                made += 1
            thread = process = wall = 0.0
            for _ in range(number - made):
                run, step, state = next(source)
                before = time.thread_time(), time.process_time(), time.perf_counter()
                store.ingest(state, run=f"run{run}", step=step)
                thread += time.thread_time() - before[0]
                process += time.process_time() - before[1]
                wall += time.perf_counter() - before[2]
                made += 1
            print(f"{number:,} versions", file=sys.stderr)
            costs = {
                "ingest, CPU s": process / _INGESTS,
                "ingest, CPU s of its thread": thread / _INGESTS,
                "ingest, wall s": wall / _INGESTS,
                "resident MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            }
            found[number] = costs | measured(place, f"run{run}@{step}")
    return found


def table(found: dict[int, dict[str, float]]) -> str:
    """Return the costs as a table, with the ratio of the last to the first column."""
    numbers = list(found)
    lines = [
        "| | " + " | ".join(f"{number:,}" for number in numbers) + " | ratio |",
        "| --- |" + " ---: |" * (len(numbers) + 1),
    ]
    for name in found[numbers[0]]:
        values = [found[number][name] for number in numbers]
        cells = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} | {values[-1] / values[0] if values[0] else float('nan'):.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", default="100,1000,10000")
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--elements", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args(arguments)
    numbers = [int(number) for number in chosen.versions.split(",")]
    with tempfile.TemporaryDirectory(dir=chosen.work) as directory:
        print(table(grown(Path(directory) / "store", numbers, chosen.runs, chosen.tensors, chosen.elements)))


if __name__ == "__main__":
    main()
