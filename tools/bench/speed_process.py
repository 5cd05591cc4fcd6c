"""Measures the overhead of the command line: the time of a verb with little work."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

import ckstore
from tools.bench.speed_figures import Section, Spread, digits
from tools.bench.speed_frame import Bench, Contender, race

#: Names the directory of compiled kernels.
CACHE = "NUMBA_CACHE_DIR"

#: A program that slices a tensor of an encoded version.
_SLICE = "import ckstore, sys; ckstore.open(sys.argv[1], 'r')[1]['model/layer0.weight'][0]"


def start(bench: Bench) -> Section:
    """Measure verbs that have little to do."""
    bench.report("start of verbs")
    # As in installed packages; otherwise the start would include reading the sources.
    compileall.compile_dir(Path(ckstore.__file__).parent, quiet=1)
    directory = bench.work / "start"
    directory.mkdir()
    root, out = directory / "store", directory / "out.pt"
    paths = [_tiny(directory / f"step{step}.pt", step) for step in range(bench.repeat + 1)]
    with ckstore.init(root) as store:
        store.ingest(paths[0], run="run", hot=0)

    def contender(name: str, *verb: str) -> Contender:
        return Contender(f"`ckstore {name}`", lambda _: run(root, name, *verb), lambda _: out.unlink(missing_ok=True))

    contenders = [
        contender("log"),
        contender("show", "latest"),
        contender("ls", "latest"),
        # Every round has another version: an ingest of a version that the store already holds takes no time.
        Contender("`ckstore ingest`", lambda number: run(root, "ingest", "--run", "run", str(paths[number]))),
        contender("checkout", "latest", "-o", str(out)),
        Contender("first slice", lambda _: subprocess.run([sys.executable, "-c", _SLICE, str(root)], check=True)),
    ]
    rows = [["measurement", "figure"]]
    for name, timings in race(contenders, range(1, len(paths)), warm=False).items():
        rows.append([name, f"{Spread.of([timing.seconds for timing in timings])} s"])
    rows.extend(_first_use(directory / "first", paths))
    shutil.rmtree(directory)
    return Section(
        "Start of a verb",
        "One process from start to end, on a checkpoint of 1 MB. *First slice*: a program opens a store and slices "
        "a tensor. *First use*: two ingests and a checkout on a machine that has compiled nothing yet.",
        [rows],
    )


def _tiny(path: Path, step: int) -> Path:
    """Write a weight, large enough for its own object, and a bias, as AdamW saves them."""
    base, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + step)
    model, state = {}, {}
    for number, shape in enumerate([(256, 256), (64,)]):
        change, first, second = (torch.randn(shape, generator=noise) for _ in range(3))
        model[f"layer{number}.weight"] = torch.randn(shape, generator=base) + 0.05 * change
        moments = {"exp_avg": 1e-4 * first, "exp_avg_sq": 1e-8 * (second**2 + 0.1)}
        state[number] = {"step": torch.tensor(float(step)), **moments}
    torch.save({"model": model, "optimizer": {"state": state}, "step": step}, path)
    return path


def _first_use(root: Path, paths: Sequence[Path]) -> list[list[str]]:
    environment = {CACHE: str(root.with_name("cache"))}
    run(root, "init", str(root))
    verbs = {
        "ingest": ("ingest", str(paths[0])),
        "next ingest": ("ingest", str(paths[1])),
        "checkout": ("checkout", "latest", "-o", str(root.with_suffix(".pt"))),
    }
    contenders = [Contender(name, partial(_run_verb, root, verb, environment)) for name, verb in verbs.items()]
    timings = {name: found[0] for name, found in race(contenders, [0], warm=False).items()}
    seconds = {name: timing.seconds for name, timing in timings.items()}
    seconds |= {"all": sum(seconds.values()), "processor time": sum(timing.processor for timing in timings.values())}
    return [[f"first use, {name}", f"{digits(taken)} s"] for name, taken in seconds.items()]


def _run_verb(root: Path, verb: Sequence[str], environment: Mapping[str, str], _: int) -> None:
    run(root, *verb, more=environment)


def run(root: Path, *verb: str, more: Mapping[str, str] | None = None) -> None:
    """Run a verb on a store in a new process, with more in its environment.

    Raises
    ------
    RuntimeError
        It failed; the message has its output.
    """
    command = [sys.executable, "-m", "ckstore", "--store", str(root), *verb]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **(more or {})})
    if done.returncode:
        raise RuntimeError(f"ckstore {' '.join(verb)}: exit code {done.returncode}\n{done.stderr}")
