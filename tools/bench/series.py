"""The series of checkpoints for benchmarks: trained here, from public repositories, or synthetic."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import runs

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Series:
    """Checkpoints of one training run.

    Attributes
    ----------
    name
        Its name in tables.
    versions
        A file or a directory each, oldest first.
    """

    name: str
    versions: tuple[Path, ...]

    def files(self, index: int) -> dict[str, Path]:
        """Return the files of a version, by a name common to all versions; "" for a version of one file."""
        path = self.versions[index]
        if path.is_file():
            return {"": path}
        return {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}

    @property
    def nbytes(self) -> int:
        """Bytes of all versions."""
        return sum(file.stat().st_size for i in range(len(self.versions)) for file in self.files(i).values())


#: Suffixes of the files in a directory that `load` can read.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")

#: Public series: the pattern of their versions in the data's directory.
PUBLIC = {
    "willmore_pinn": "willmore_pinn/*.pt",
    "opt_lora": "opt_lora/checkpoint-*",
    "vdsr": "vdsr/*.pth",
    "espcn": "espcn/*.pth",
    "trades_sgd/model": "trades_sgd/model-*",
    "trades_sgd/opt": "trades_sgd/opt-*",
    "lightning_a": "lightning_a/*.ckpt",
}

#: The trained runs with published figures.
TRAINED = ("gpt", "cnn", "bf16", "frozen", "finetune")

#: Width of the synthetic model; the embedding is the largest tensor and has more than ten chunks.
WIDTH = 512
WORDS = 6144


def find(
    names: list[str], data: Path | None, work: Path, *, tier: str = "small", report: Callable[[str], None] = print
) -> list[Series]:
    """Return series by name; train missing runs.

    Parameters
    ----------
    names
        Trained runs, or members of `PUBLIC`; empty for `TRAINED` and all of `PUBLIC`.
    data
        Directory of the public series; None for `$CKSTORE_TEST_DATA` or else `../shared/data`. If it does not exist,
        public series are left out with a report.
    work
        Directory that keeps the trained runs.
    tier
        Of the trained runs.
    report
        Called with a line on progress.

    Returns
    -------
    list of Series
        Trained ones first.
    """
    data = data or Path(os.environ.get("CKSTORE_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    found = []
    for name in runs.RUNS:
        if name in (names or TRAINED):
            report(f"{name}:")
            paths = runs.train(name, work / "runs" / tier, tier=tier, report=report)
            found.append(Series(name, tuple(paths)))
    for name, pattern in PUBLIC.items():
        if not names or name in names:
            paths = sorted(data.glob(pattern), key=_number)
            if paths:
                found.append(Series(name, tuple(paths)))
            else:
                report(f"{name} left out: no {pattern} in {data}")
    return found


def in_directory(directory: Path) -> Series:
    """Return the checkpoint files of a directory, by the last number in their names.

    Raises
    ------
    ValueError
        There are fewer than two.
    """
    paths = sorted((path for path in directory.glob("*") if path.suffix in SUFFIXES), key=_number)
    if len(paths) < 2:
        raise ValueError(f"{directory} needs two checkpoints or more; their names end in {', '.join(SUFFIXES)}.")
    return Series(directory.resolve().name, tuple(paths))


def load(path: Path) -> Any:
    """Return the state dict of a checkpoint file, of plain containers and tensors only."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def write_versions(directory: Path, megabytes: int, count: int) -> list[Path]:
    """Write checkpoints by `torch.save` of a transformer whose weights walk randomly and whose moments decay.

    The weights move by about 8 % of their size between two versions, like those of the GPT run halfway through.
    """
    import torch

    generator = torch.Generator().manual_seed(1)

    def noise(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {"wte.weight": torch.Size((WORDS, WIDTH))}
    layer = 0
    while 12 * sum(shape.numel() for shape in shapes.values()) < megabytes * 1_000_000:
        shapes[f"h.{layer}.attn.weight"] = torch.Size((3 * WIDTH, WIDTH))
        shapes[f"h.{layer}.up.weight"] = torch.Size((4 * WIDTH, WIDTH))
        shapes[f"h.{layer}.down.weight"] = torch.Size((WIDTH, 4 * WIDTH))
        shapes[f"h.{layer}.norm.weight"] = torch.Size((WIDTH,))
        layer += 1
    model = {name: noise(shape) * 0.02 for name, shape in shapes.items()}
    first = {name: noise(shape) * 1e-4 for name, shape in shapes.items()}
    scale = {}
    for name, shape in shapes.items():
        scale[name] = torch.rand((shape[0], *([1] * (len(shape) - 1))), generator=generator) * 1e-8
    second = {name: (noise(shape) ** 2 + 0.1) * scale[name] for name, shape in shapes.items()}
    paths = []
    for step in range(count):
        state = {
            number: {"step": torch.tensor(float(step)), "exp_avg": first[name], "exp_avg_sq": second[name]}
            for number, name in enumerate(shapes)
        }
        paths.append(directory / f"step{step:03d}.pt")
        torch.save({"model": model, "optimizer": {"state": state}, "step": step}, paths[-1])
        model = {name: value + noise(value.shape) * 0.0016 for name, value in model.items()}
        first = {name: noise(value.shape) * 1e-4 for name, value in first.items()}
        second = {name: 0.8 * old + 0.2 * noise(old.shape) ** 2 * scale[name] for name, old in second.items()}
    return paths


def _number(path: Path) -> tuple[float, str]:
    """Return the sort key: the last number in the name; names without one ("last.ckpt") come last."""
    numbers = re.findall(r"\d+", path.stem)
    return (float(numbers[-1]) if numbers else float("inf"), path.name)
