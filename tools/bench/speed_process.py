"""Measures the overhead of the command line: the time of a verb with little work."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import ckstore
from tools.bench.speed_figures import Section, Spread
from tools.bench.speed_frame import Bench, Contender, race

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
    shutil.rmtree(directory)
    return Section(
        "Start of a verb",
        "One process from start to end, on a checkpoint of 1 MB. *First slice*: a program opens a store and slices "
        "a tensor.",
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


def run(root: Path, *verb: str) -> None:
    """Run a verb on a store in a new process.

    Raises
    ------
    RuntimeError
        It failed; the message has its output.
    """
    command = [sys.executable, "-m", "ckstore", "--store", str(root), *verb]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ckstore {' '.join(verb)}: exit code {done.returncode}\n{done.stderr}")
