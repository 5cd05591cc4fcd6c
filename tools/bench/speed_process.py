"""What a user of the command line pays beside the work: memory, and the time until a verb is done with little."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench import peaks
from tools.bench.growth import write_small
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import Contender, race
from tools.bench.speed_figures import Goal, Line, Section, Spread

#: MB (10^6 bytes) of anonymous memory, and seconds, that are to be kept.
MEMORY = Goal("<", 450.0)
LISTING = Goal("<", 0.3)
WORKING = Goal("<", 0.8)
FIRST_USE = Goal("<", 15.0)
SAID = Goal(">=", 1.0)

#: Versions that the memory is measured with: a first one, and one that has a parent.
_VERSIONS = 3

#: Elements of the tensors of the tiny checkpoint that starts are measured with: enough for a chunk of their own.
_TINY = (1 << 16, 64)

#: Names the directory that compiled kernels are kept in.
CACHE = "NUMBA_CACHE_DIR"

_PYTHON = [sys.executable, "-m", "ckstore"]

#: Begins a command whose output nobody reads; the shell makes way for it.
_QUIET = ["sh", "-c", 'exec "$@" >/dev/null', "sh"]


def memory(bench: Bench) -> Section:
    """Anonymous memory of verbs."""
    section = Section(
        "memory",
        "Memory",
        "Largest anonymous memory of a process of the command line, imports included, watched from outside: of the "
        "process that ingests a second version, and of the one that checks it out.",
    )
    place = bench.places[0]
    for megabytes in sorted({bench.settings.megabytes, max(bench.settings.sizes)}):
        paths = bench.series(megabytes, _VERSIONS)[:2]
        found: dict[str, list[float]] = {}
        for _ in range(min(3, bench.settings.repeat)):
            for fidelity in ("exact", "coarse"):
                bench.report(f"memory, {megabytes} MB, {fidelity}")
                root, out = place.directory / "measured", place.directory / "out.pt"
                verbs = [
                    ("", ["init", str(root)]),
                    (f"first {fidelity} ingest", _ingest(root, paths[0], fidelity)),
                    (f"{fidelity} ingest", _ingest(root, paths[1], fidelity)),
                    (f"{fidelity} checkout", ["--store", str(root), "checkout", "latest", "-o", str(out)]),
                ]
                for name, verb in verbs:
                    largest, _ = peaks.watch([*_QUIET, *_PYTHON, *verb])
                    if name:
                        found.setdefault(name, []).append(largest / 1e6)
                shutil.rmtree(root)
                out.unlink()
        section.lines.extend(
            Line(f"{name} of {megabytes} MB", Spread.of(numbers), "MB", MEMORY) for name, numbers in found.items()
        )
    return section


def _ingest(root: Path, path: Path, fidelity: str) -> list[str]:
    return ["--store", str(root), "ingest", str(path), "--run", "run", "--fidelity", fidelity]


def start(bench: Bench) -> Section:
    """Time of verbs that have little to do."""
    section = Section(
        "start",
        "Start of a verb",
        "A process of the command line from its start to its end, on a checkpoint of 1 MB. First use: a first and a "
        "second ingest and a checkout on a machine that has compiled nothing yet; it takes at least its processor time "
        "over the number of cores.",
    )
    directory = bench.work / "start"
    directory.mkdir()
    root, out = directory / "store", directory / "out.pt"
    run(["init", str(root)])
    rounds = range(1, bench.settings.repeat + 1)
    for step in (0, *rounds):
        write_small(directory / f"step{step}.pt", _TINY, step)
    run(_ingest(root, directory / "step0.pt", "exact"))

    def contender(name: str, *verb: str) -> Contender:
        return Contender(name, lambda _: run(["--store", str(root), *verb]), lambda _: out.unlink(missing_ok=True))

    listings = [contender("log", "log"), contender("show", "show", "latest"), contender("ls", "ls", "latest")]
    working = [
        Contender("ingest", lambda step: run(_ingest(root, directory / f"step{step}.pt", "exact"))),
        contender("checkout", "checkout", "latest", "-o", str(out)),
    ]
    bench.report("start of verbs")
    # No round comes twice: a version that the store holds already is ingested in no time.
    timings = race([*listings, *working], rounds, warm=False)
    for goal, contenders in ((LISTING, listings), (WORKING, working)):
        for name in (contender.name for contender in contenders):
            seconds = [timing.seconds for timing in timings[name]]
            section.lines.append(Line(f"`ckstore {name}`", Spread.of(seconds), "s", goal))
    section.lines.extend(_first_use(bench, directory))
    shutil.rmtree(directory)
    return section


def _first_use(bench: Bench, directory: Path) -> list[Line]:
    bench.report("first use")
    root, cache = directory / "first", directory / "cache"
    cache.mkdir()
    run(["init", str(root)])
    said: list[str] = []
    verbs = {
        "ingest": _ingest(root, directory / "step0.pt", "exact"),
        "next ingest": _ingest(root, directory / "step1.pt", "exact"),
        "checkout": ["--store", str(root), "checkout", "latest", "-o", str(directory / "first.pt")],
    }
    contenders = [
        Contender(name, lambda _, verb=verb: said.append(run(verb, {CACHE: str(cache)})))
        for name, verb in verbs.items()
    ]
    timings = race(contenders, [0], warm=False)
    seconds = {name: found[0].seconds for name, found in timings.items()}
    notices = sum("compil" in line for text in said for line in text.splitlines())
    lines = [Line(f"first use, {name}", Spread.of([taken]), "s") for name, taken in seconds.items()]
    return [
        *lines,
        Line("first use, all", Spread.of([sum(seconds.values())]), "s", FIRST_USE),
        Line("first use, processor time", Spread.of([sum(found[0].processor for found in timings.values())]), "s"),
        Line("first use, lines on standard error that say so", Spread.of([float(notices)]), "lines", SAID),
    ]


def run(verb: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a verb in a process of its own; returns what it wrote on standard error.

    Raises
    ------
    RuntimeError
        It failed; says what it wrote.
    """
    done = subprocess.run(
        [*_PYTHON, *verb],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"ckstore {' '.join(verb)}: exit code {done.returncode}\n{done.stderr}")
    return done.stderr
