"""An old folder: runs of two models in files of all kinds, damaged files, and files that are no checkpoints.

    python -m tests.old_folder DIRECTORY [--files 300] [--data ../shared/data]

makes one to look at. The expected run and step of each file follow the owner's intent, not a program's guess.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints import write_safetensors
from tests.formats.written import flax_bytes, gguf_bytes, hdf5_bytes, keras_bytes, learner_bytes

Arrays = dict[str, np.ndarray]

#: Names of the layers of the two models.
GPT, CNN = ("h.0.attn.weight", "h.0.mlp.weight", "wte"), ("conv1.weight", "conv2.weight", "fc.weight")
#: Files of a directory of public checkpoints that are damaged or pointers, and that say no step.
_ODD = "odd"


def arrays_at(names: tuple[str, ...], step: int) -> Arrays:
    """Return the weights of a model at a step."""
    generator, drift = np.random.default_rng(len(names[0])), np.random.default_rng(step)
    return {
        name: generator.standard_normal((40, 30), dtype=np.float32)
        + np.float32(1e-3) * drift.standard_normal((40, 30), dtype=np.float32)
        for name in names
    }


def state_at(names: tuple[str, ...], step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model at a step as torch tensors."""
    return {name: torch.from_numpy(array) for name, array in arrays_at(names, step).items()}


@dataclass
class OldFolder:
    """The folder, and its owner's intent.

    Attributes
    ----------
    root
        The directory.
    runs
        Run and step of each checkpoint, by its path below the root; no step where its name has none.
    left
        Files that must not be stored.
    flipped
        Files of `left` with a flipped bit among their numbers, which only a reader of the numbers can see.
    meant_otherwise
        Checkpoints whose names and content do not show their owner's intent.
    """

    root: Path
    runs: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)
    meant_otherwise: set[str] = field(default_factory=set)

    def file(self, path: str, data: bytes, run: str = "", step: int | None = None) -> Path:
        """Write a file; without a run it is one to leave."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        if run:
            self.runs[path] = run, step
        else:
            self.left.add(path)
        return place

    def torch(self, path: str, content: object, run: str, step: int, **options: bool) -> Path:
        """Write a file with `torch.save`."""
        place = self.file(path, b"", run, step)
        torch.save(content, place, **options)
        return place

    def directory(self, path: str, run: str, step: int, fill: Callable[[Path], None]) -> None:
        """Make a directory that is one checkpoint."""
        (self.root / path).mkdir(parents=True)
        fill(self.root / path)
        self.runs[path] = run, step


def old_folder(root: Path, files: int = 60, data: Path | None = None) -> OldFolder:
    """Make the folder with about `files` checkpoints and other files, and with public checkpoints of others."""
    made = OldFolder(root)
    each = max(2, files // 14)
    steps = range(100, 100 * each + 1, 100)
    _torch_runs(made, steps)
    _directories(made, steps)
    _other_libraries(made, steps)
    _meant_otherwise(made, steps)
    _no_checkpoints(made)
    if data is not None:
        _public(made, data)
    return made


def _torch_runs(made: OldFolder, steps: range) -> None:
    for step in steps:
        epoch = step // 100
        made.torch(f"gpt/baseline/step_{step}.pt", {"model": state_at(GPT, step), "step": step}, "baseline", step)
        made.torch(
            f"cnn/sgd/model_epoch_{epoch}.pth", state_at(CNN, step), "sgd", epoch, _use_new_zipfile_serialization=False
        )
        lightning = {"state_dict": state_at(CNN, step), "global_step": step, "epoch": epoch}
        made.torch(f"cnn/lightning/epoch={epoch}-step={step}.ckpt", lightning, "lightning", step)
        made.torch(f"gan/netG_epoch_4_{epoch}.pth", state_at(GPT, step), "generator", epoch)
        made.torch(f"gan/netD_epoch_4_{epoch}.pth", state_at(CNN, step), "discriminator", epoch)
        tensors = {name: ("float32", array.shape, array) for name, array in arrays_at(GPT, step).items()}
        write_safetensors(made.file(f"gpt/lr1e-3/ckpt-{step}.safetensors", b"", "lr1e-3", step), tensors)
    for step in steps[:3]:
        # Two runs of one model, told apart by a number.
        for seed in (0, 1):
            made.torch(f"sweep/seed{seed}_step{step}.pt", state_at(GPT, step + seed), f"sweep, seed {seed}", step)
    # A file that exists twice: the last one under a name of its own.
    shutil.copy(
        made.root / f"cnn/lightning/epoch={steps[-1] // 100}-step={steps[-1]}.ckpt", made.root / "cnn/last.ckpt"
    )
    (made.root / "cnn/last.ckpt").rename(made.root / "cnn/lightning/last.ckpt")
    made.left.add("cnn/lightning/last.ckpt")


def _directories(made: OldFolder, steps: range) -> None:
    def weights(place: Path, step: int) -> None:
        tensors = {name: ("float32", array.shape, array) for name, array in arrays_at(GPT, step).items()}
        write_safetensors(place / "model.safetensors", tensors)

    for step in steps:

        def trainer(place: Path, step: int = step) -> None:
            weights(place, step)
            torch.save({"state": {0: {"exp_avg": torch.ones(40, 30) / step}}}, place / "optimizer.pt")
            (place / "config.json").write_text("{}")
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))

        def accelerated(place: Path, step: int = step) -> None:
            weights(place, step)
            torch.save({"state": {0: {"exp_avg": torch.ones(40, 30) / step}}}, place / "optimizer.bin")
            torch.save({"last_epoch": 0}, place / "scheduler.bin")
            torch.save({"step": 0, "random_state": (3, (1, 2, 3), None)}, place / "random_states_0.pkl")

        made.directory(f"hf/output/checkpoint-{step}", "trainer", step, trainer)
        made.directory(f"hf/accelerate/checkpoints/checkpoint_{step // 100}", "accelerate", step // 100, accelerated)


def _other_libraries(made: OldFolder, steps: range) -> None:
    for step in steps:
        arrays = arrays_at(GPT, step)
        place = made.file(f"numpy/weights_{step:06}.npz", b"", "numpy", step)
        np.savez(place, **arrays)
        made.file(f"rl/ppo_{step}_steps.zip", learner_bytes(state_at(CNN, step), {}, step), "ppo", step)
        made.file(f"jax/run/checkpoint_{step}", flax_bytes({"params": arrays, "step": step}), "flax", step)
        if find_spec("h5py"):
            made.file(f"keras/model.{step // 100:02}.weights.h5", hdf5_bytes(arrays), "weights", step // 100)
            made.file(f"keras/full/model_{step // 100}.keras", keras_bytes({"layers": arrays}), "keras", step // 100)


def _meant_otherwise(made: OldFolder, steps: range) -> None:
    before = set(made.runs)
    for step in steps[:3]:
        # Dates: several of their numbers vary, and the last is no step.
        made.torch(f"daily/cnn-2021-{step // 100:02}-{28 - step // 100}.pt", state_at(CNN, step), "daily", step // 100)
    made.file("llm/model-f16.gguf", gguf_bytes([("wte", (40, 30), 1, 2400)]), "half precision", 1)
    # The last model next to its checkpoints, as a Trainer saves it.
    made.file("hf/output/config.json", b"{}")
    tensors = {name: ("float32", array.shape, array) for name, array in arrays_at(GPT, steps[-1]).items()}
    write_safetensors(made.file("hf/output/model.safetensors", b"", "trainer", steps[-1] + 1), tensors)
    made.meant_otherwise = set(made.runs) - before


def _no_checkpoints(made: OldFolder) -> None:
    for path, text in (
        ("notes.txt", "learning rate 3e-4\n"), ("gpt/train.py", "import torch\n"), ("gpt/log.csv", "step,loss\n1,2\n"),
        ("cnn/sgd/events.out.tfevents.1616.host", "\x18\0\0\0"), ("hf/config.yaml", "lr: 0.1\n"), ("rl/readme", ""),
    ):  # fmt: skip
        made.file(path, text.encode())
    made.file("gpt/baseline/step_50.pt.gz", gzip.compress((made.root / "gpt/baseline/step_100.pt").read_bytes()))
    made.file("gpt/samples/picture.png", b"\x89PNG\r\n\x1a\n" + bytes(300))
    np.savez_compressed(made.file("numpy/compressed.npz", b""), w=np.ones(30))
    for path, cut in (
        ("gpt/baseline/step_100.pt", "step_99.pt"), ("cnn/sgd/model_epoch_1.pth", "model_epoch_0.pth"),
        ("gpt/lr1e-3/ckpt-100.safetensors", "ckpt-99.safetensors"), ("rl/ppo_100_steps.zip", "ppo_99_steps.zip"),
        ("numpy/weights_000100.npz", "weights_000099.npz"), ("jax/run/checkpoint_100", "checkpoint_99"),
        ("llm/model-f16.gguf", "model-f32.gguf"), ("keras/model.01.weights.h5", "model.00.weights.h5"),
        ("keras/full/model_1.keras", "model_0.keras"),
    ):  # fmt: skip
        if (made.root / path).exists():
            data = (made.root / path).read_bytes()
            made.file(str(Path(path).with_name(cut)), data[: len(data) * 2 // 3])
    made.file("gpt/empty.pt", b"")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    made.file("gpt/pointer.safetensors", pointer)
    data = (made.root / "gpt/baseline/step_100.pt").read_bytes()
    middle = data.index(arrays_at(GPT, 100)["wte"].tobytes()) + 400
    made.file("gpt/baseline/step_98.pt", data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    made.flipped.add("gpt/baseline/step_98.pt")


def _public(made: OldFolder, data: Path) -> None:
    """Copy public checkpoints; their names give run and step."""
    from ckstore.steps import step_of_name

    for path in sorted(data.rglob("*")):
        where = path.relative_to(data)
        if not path.is_file() or len(where.parts) < 2:
            continue
        copied = f"others/{where.as_posix()}"
        made.file(copied, path.read_bytes())
        step = step_of_name(where.parts[1]).step
        if where.parts[0] == _ODD:
            if "bitflip" in where.name:
                made.flipped.add(copied)
            continue
        made.left.remove(copied)
        top = f"others/{where.parts[0]}/{where.parts[1]}"
        kind = where.parts[1].partition("-")[0] if where.parts[0] == "trades_sgd" else ""
        if step is not None:
            made.runs[top] = where.parts[0] + kind, step
        else:
            made.runs[top] = f"{where.parts[0]} last", None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--data", type=Path, help="a directory with public checkpoints")
    parsed = parser.parse_args()
    made = old_folder(parsed.directory, parsed.files, parsed.data)
    print(f"{len(made.runs)} checkpoints, {len(made.left)} other files")


if __name__ == "__main__":
    main()
