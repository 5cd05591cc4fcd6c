"""Measures how costs grow with the number of versions of a store: CPU seconds, resident memory, files and bytes.

The states drift as weights in training do, and are ingested live in turn into several runs, with the defaults. At each
number of versions, the means of the last ingests, each with the encoding of the version before, and one process for
each verb are measured. In a bucket, which is simulated in this process, the requests and bytes are counted as well; the
verbs run in this process, from a new mirror.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

import ckstore
from ckstore.cli import program
from ckstore.storage.remote.mirror import VARIABLE
from tests.checkpoints import settled
from tools.bench.remotes import URL, Cost, Link
from tools.bench.resident import resident

#: Ingests whose mean is printed.
_INGESTS = 50
#: Verbs by name in the table; `{}` is a version. The second collection finds a clean store; later verbs do not name the
#: version that was forgotten.
_VERBS = {
    "show": ("show", "{}"),
    "log -n 5": ("log", "-n", "5"),
    "stats": ("stats",),
    "runs": ("runs",),
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


def grown(
    place: Path | str, numbers: Sequence[int], source: Iterator[tuple[int, int, State]], link: Link | None = None
) -> dict[int, dict[str, float]]:
    """Return the costs at each number of versions, of a store in a directory or behind a link."""
    found = {}
    made = 0
    for number in numbers:
        with ckstore.open(place, create=True, cache=link.cache("writer") if link else None) as store:
            for run, step, state in islice(source, max(number - _INGESTS - made, 0)):
                store.ingest(state, run=f"run{run}", step=step)
            made = len(settled(store))
            with link.measured() if link else nullcontext():
                costs, last = ingested(store, islice(source, number - made))
        print(f"{number:,} versions", file=sys.stderr)
        if link is None:
            costs["resident MB"] = resident(os.getpid())
            costs |= measured(Path(place), last)
        else:
            spent = link.costs[-1]
            costs |= {f"ingest, {name}": value / (number - made) for name, value in counts(spent).items()}
            costs |= measured_behind(link, number, last)
        found[number] = costs
        made = number
    return found


def ingested(store: ckstore.Store, source: Iterable[tuple[int, int, State]]) -> tuple[dict[str, float], str]:
    """Ingest states; return the mean costs, and the last version's name.

    The background encodes each version before the next ingest: else its share of the costs would depend on its turns.
    """
    spent, last = [], ""
    for run, step, state in source:
        process, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
        store.ingest(state, run=f"run{run}", step=step)
        thread, wall = time.thread_time() - thread, time.perf_counter() - wall
        settled(store)
        spent.append((time.process_time() - process, thread, wall))
        last = f"run{run}@{step}"
    names = ("ingest and encoding, CPU s", "ingest, CPU s of its thread", "ingest, wall s")
    return dict(zip(names, np.mean(spent or [(0.0, 0.0, 0.0)], axis=0).tolist(), strict=True)), last


def counts(spent: Cost) -> dict[str, float]:
    """Return the counts of an operation by name."""
    return {"requests": spent.requests, "bytes": spent.read + spent.put}


def measured_behind(link: Link, number: int, last: str) -> dict[str, float]:
    """Return the costs of the verbs in this process, from a new mirror, and the bytes and number of objects."""
    found: dict[str, float] = {}
    cache = link.cache(f"reader{number}")

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        with link.measured():
            yield
        spent = link.costs[-1]
        found.update({f"{name}, {kind}": value for kind, value in {"CPU s": spent.cpu, **counts(spent)}.items()})

    with noted("cold open"):
        ckstore.open(URL, "r", cache=cache).close()
    objects = link.server.objects
    snapshots = list(objects.named("snapshots/"))
    found["its snapshot, bytes"] = len(objects[snapshots[-1]][0]) if snapshots else 0
    with noted("warm open"):
        store = ckstore.open(URL, "r", cache=cache)
    with store, noted("slice"):
        store[last]["w0"][0]
    for name, verb in _VERBS.items():
        with mock.patch.dict(os.environ, {VARIABLE: str(cache)}), redirect_stdout(StringIO()), noted(name):
            code = program.run(["--store", URL, *(part.format(last) for part in verb)])
        if code:
            raise RuntimeError(f"{name}: exit code {code}")
    found["objects"] = len(objects)
    for part in ("log", "packs", "snapshots"):
        found[f"{part}, bytes a version"] = sum(len(objects[name][0]) for name in objects.named(f"{part}/")) / number
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
    parser = argparse.ArgumentParser(prog="tools/bench/scale", description=__doc__)
    parser.add_argument("--versions", default="100,1000,10000")
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--elements", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args(arguments)
    numbers = [int(number) for number in chosen.versions.split(",")]

    def source() -> Iterator[tuple[int, int, State]]:
        return states(chosen.runs, chosen.tensors, chosen.elements)

    with tempfile.TemporaryDirectory(dir=chosen.work) as directory:
        if not chosen.bucket:
            print(table(grown(Path(directory) / "store", numbers, source())))
            return
        for tried in ([3], numbers):  # The first one imports.
            link = Link(Path(directory) / "mirrors", is_delayed=False)
            try:
                found = grown(URL, tried, source(), link)
            finally:
                link.close()
        print(table(found))


if __name__ == "__main__":
    main()
