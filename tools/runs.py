"""The trained runs that tests, demo and benchmarks use: small real models, the same for the same build of torch.

A run's checkpoints are in `<directory>/<name>/`, next to a stamp with their settings, so that a run is trained once and
found afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.training import ImageSettings, TextSettings

#: Part of every stamp: raised when the same settings write different files.
REVISION = 2

#: Every run and the pattern of its checkpoints' names.
RUNS = {
    "gpt": "step*.pt",
    "cnn": "epoch*.pt",
    "bf16": "step*.safetensors",
    "mixed": "step*.pt",
    "compiled": "step*.pt",
    "lora": "step*.pt",
    "policy": "step*.safetensors",
    "embedding": "step*.pt",
    "frozen": "step*.pt",
    "ema": "step*.pt",
    "finetune": "step*.pt",
    "slow": "step*.pt",
}

#: The runs with the steps of `gpt`.
OF_GPT = ("gpt", "bf16", "mixed", "compiled")

#: `tiny` is for tests and takes seconds; `small` is for figures and takes minutes; `full` is for judging fidelity.
TIERS = ("tiny", "small", "full")

_STAMP = "run.json"


def train(name: str, out: Path, *, tier: str = "tiny", report: Callable[[str], None] | None = None) -> list[Path]:
    """Train a run unless it exists.

    Parameters
    ----------
    name
        A key of `RUNS`.
    out
        Directory with a subdirectory per run; created if absent. Several processes may train into it at once.
    tier
        One of `TIERS`. A run of another tier in `out` is replaced.
    report
        Called with a line after every checkpoint.

    Returns
    -------
    list of Path
        The checkpoints, oldest first.

    Raises
    ------
    FileExistsError
        If `out/name` holds files that no run wrote.
    """
    if name in ("bf16", "mixed", "compiled", "lora", "policy", "frozen", "finetune"):
        train("gpt", out, tier=tier, report=report)
    out.mkdir(parents=True, exist_ok=True)
    target = out / name
    with _lock(out / f".{name}.lock"):
        if _stamp(target) != _wanted(name, tier):
            if target.exists() and _stamp(target) is None:
                raise FileExistsError(f"{target} was not written by tools/train; remove it or choose another directory")
            with tempfile.TemporaryDirectory(dir=out, prefix=f".{name}-") as scratch:
                made = Path(scratch) / name
                made.mkdir()
                _train(name, tier, out, made, report or (lambda line: None))
                (made / _STAMP).write_text(json.dumps(_wanted(name, tier)))
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
    return sorted(target.glob(RUNS[name]))


def _train(name: str, tier: str, out: Path, made: Path, report: Callable[[str], None]) -> None:
    import torch

    from tools import training

    chosen: Any = _settings(name, tier)
    threads = torch.get_num_threads()
    # Sums depend on the number of threads, which therefore belongs to the run rather than the machine.
    torch.set_num_threads(1 if tier == "tiny" else 2)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            match name:
                case "gpt":
                    training.gpt(chosen, made, report)
                case "ema":
                    training.ema(chosen, made, report)
                case "cnn":
                    training.cnn(chosen, made, report)
                case "bf16":
                    training.bf16(sorted((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "mixed":
                    training.mixed(sorted((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "compiled":
                    training.compiled(sorted((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "lora":
                    training.lora(chosen, max((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "policy":
                    training.policy(chosen, max((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "embedding":
                    training.embedding(chosen, made, report)
                case "frozen":
                    training.frozen(chosen, max((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "finetune":
                    training.finetune(chosen, max((out / "gpt").glob(RUNS["gpt"])), made, report)
                case "slow":
                    training.slow(chosen, made, report)
    finally:
        torch.set_num_threads(threads)


def image_settings(tier: str) -> ImageSettings:
    """Return the training settings of the CNN of a tier."""
    from tools.training import ImageSettings

    return ImageSettings((32, 64, 128), 1, epochs=8) if tier == "tiny" else ImageSettings((64, 128, 256), 2, epochs=60)


def text_settings(name: str, tier: str) -> TextSettings:
    """Return the training settings of any other run of a tier."""
    from tools.training import TextSettings

    if name == "finetune":
        return replace(text_settings("gpt", tier), every=10, rate=1e-4, steps=30 if tier == "tiny" else 200)
    if name == "lora":
        return replace(text_settings("gpt", tier), batch=4, every=5, steps=40 if tier == "tiny" else 80)
    if name == "policy":
        return replace(text_settings("gpt", tier), batch=4, every=1, rate=1e-6, steps=12 if tier == "tiny" else 24)
    if name == "embedding":
        batch, steps = {"tiny": (1000, 12), "small": (5700, 16), "full": (28_600, 8)}[tier]
        return replace(text_settings("gpt", tier), context=5, every=1, rate=0.05, width=32, batch=batch, steps=steps)
    if name == "slow":
        slow = replace(text_settings("gpt", tier), batch=4, every=20, rate=2e-5)
        if tier == "tiny":
            return replace(slow, steps=40, every=10)
        return replace(slow, width=512, layers=7, heads=8, steps=160)
    if tier == "tiny":
        steps, every = (60, 10) if name == "ema" else (120, 20)
        return TextSettings(width=128, layers=4, heads=4, context=64, batch=4, steps=steps, every=every)
    if tier == "full":
        steps = 1000 if name in OF_GPT else 320
        return TextSettings(width=384, layers=6, heads=6, context=64, batch=16, steps=steps, every=40)
    steps = 800 if name in OF_GPT else 320
    return TextSettings(width=256, layers=6, heads=8, context=64, batch=16, steps=steps, every=40)


def _settings(name: str, tier: str) -> TextSettings | ImageSettings:
    return image_settings(tier) if name == "cnn" else text_settings(name, tier)


def _wanted(name: str, tier: str) -> dict[str, Any]:
    import torch

    return {"revision": REVISION, "run": name, "settings": repr(_settings(name, tier)), "torch": torch.__version__}


def _stamp(directory: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads((directory / _STAMP).read_text())
    except FileNotFoundError:
        return None
    return stamp


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> None:
    """Train the runs named on the command line and print their directories."""
    parser = argparse.ArgumentParser(
        prog="tools/train", description="Train small real models; write their checkpoints."
    )
    parser.add_argument("run", nargs="+", choices=[*RUNS, "all"])
    parser.add_argument("--tier", choices=TIERS, default="tiny", help="tiny: seconds; small: minutes (default: tiny)")
    parser.add_argument("--out", type=Path, required=True, help="directory that gets one directory a run")
    chosen = parser.parse_args(arguments)
    for name in RUNS if "all" in chosen.run else chosen.run:
        paths = train(name, chosen.out, tier=chosen.tier, report=lambda line: print(line, file=sys.stderr))
        print(f"{paths[0].parent}: {len(paths)} checkpoints, {sum(p.stat().st_size for p in paths):,} bytes")


if __name__ == "__main__":
    main()
