"""Trainings are killed at random moments: each resumes from its last save, bit for bit.

`CKSTORE_KILLS` says how often each is killed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from tests.forked import of_ranks, run_forked
from tests.integrations.trained import digest, digest_of_files

pytestmark = pytest.mark.local

KILLS = int(os.environ.get("CKSTORE_KILLS", "2"))

#: Seconds that a rank gets whose peer was killed, until it is killed as by a launcher.
PATIENCE = 5.0

HEAD = """
    import errno, os
    import torch
    import ckstore
    from tests.integrations.trained import digest, digest_of_files, note

    note("pid", os.getpid())
    steps = int(os.environ["STEPS"])
    torch.set_num_threads(1)
    if "FULL" in os.environ:
        from ckstore.storage.zip_stream import ZipStream

        def put(stream, view, put=ZipStream._put):
            with open(os.environ["LOG"]) as file:
                if "begun 3 " in file.read():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            put(stream, view)

        ZipStream._put = put
"""

#: Each save is followed by a second one at the same step, as with `save_last`.
LIGHTNING = """
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset
    from ckstore.integrations.lightning import StoreIO

    class Noted(StoreIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            step = checkpoint["global_step"]
            note("begun", step, digest(checkpoint["state_dict"], checkpoint["optimizer_states"]))
            super().save_checkpoint(checkpoint, path, storage_options)
            note("done", step)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(100, 100)
        def training_step(self, batch):
            return self.layer(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)
        def on_train_start(self):
            if self.global_step:
                optimizer = self.optimizers(use_pl_optimizer=False)
                note("resumed", self.global_step, digest(self.state_dict(), [optimizer.state_dict()]))

    data = DataLoader(TensorDataset(torch.randn(4000, 100)), batch_size=4)
    with ckstore.open("store", create=True) as store:
        io = Noted(store, "run")
        saving = ModelCheckpoint(
            "pointers", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True
        )
        trainer = lightning.Trainer(
            max_steps=steps, plugins=[io], callbacks=[saving], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(Model(), data, ckpt_path=io.latest)
    note("ended")
"""

TRANSFORMERS = """
    import transformers
    from ckstore.integrations.transformers import StoreCallback, resume_path

    class Noted(StoreCallback):
        def on_save(self, args, state, control, **given):
            directory = f"{args.output_dir}/checkpoint-{state.global_step}"
            states = digest(given["model"].state_dict(), given["optimizer"].state_dict())
            note("begun", state.global_step, states + digest_of_files(directory))
            super().on_save(args, state, control, **given)
            note("done", state.global_step)
        def on_train_begin(self, args, state, control, **given):
            super().on_train_begin(args, state, control, **given)
            if state.global_step:
                states = digest(given["model"].state_dict(), given["optimizer"].state_dict())
                note("resumed", state.global_step, states + digest_of_files(resumed))

    size = {"n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(64, (400, 8))]
    arguments = transformers.TrainingArguments(
        "output", max_steps=steps, save_steps=1, report_to=[], per_device_train_batch_size=2, use_cpu=True,
        disable_tqdm=True, save_total_limit=2,
    )
    with ckstore.open("store", create=True) as store:
        resumed = resume_path(store, "run@latest", "output")
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[Noted(store, "run")])
        trainer.train(resume_from_checkpoint=resumed)
    note("ended")
"""

ACCELERATE = """
    import accelerate
    from ckstore.integrations.accelerate import load_state, save_state

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(100, 100)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    with ckstore.open("store", create=True) as store:
        first = load_state(accelerator, store, "run@latest") or 0
        if first:
            note("resumed", first, digest(model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
        for step in range(first + 1, steps + 1):
            accelerator.backward(model(torch.randn(8, 100)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            note("begun", step, digest(model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
            for _ in range(2):
                save_state(accelerator, store, run="run", step=step, replace=True)
            note("done", step)
    note("ended")
"""

DCP = """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from ckstore.integrations.dcp import StoreReader, StoreWriter

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    model = torch.nn.Linear(101, 103)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def state_at(step):
        names = get_state_dict(model, optimizer)
        return {"model": names[0], "optimizer": names[1], "step": step}

    first = 0
    if dist.get_rank() == 0:
        ckstore.open("store", create=True).close()
    dist.barrier()
    with ckstore.open("store") as store:
        found = [store._catalog.latest("run") is not None]
    dist.broadcast_object_list(found)
    if found[0]:
        state = state_at(0)
        dcp.load(state, storage_reader=StoreReader("store", "run@latest"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
        note("resumed", first, digest(state_at(first)))
    for step in range(first + 1, steps + 1):
        model(torch.randn(8, 101)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = state_at(step)
        note("begun", step, digest(state))
        for _ in range(2):
            dcp.save(state, storage_writer=StoreWriter("store", "run", step, replace=True))
        note("done", step)
    dist.barrier()
    dist.destroy_process_group()
    note("ended")
"""

PROGRAMS = {
    "lightning": (LIGHTNING, 1),
    "transformers": (TRANSFORMERS, 1),
    "accelerate": (ACCELERATE, 1),
    "dcp": (DCP, 2),
}


class Training:
    """A program of `PROGRAMS` that trains, saves each step, and resumes, in a directory."""

    def __init__(self, guest: str, place: Path) -> None:
        if guest != "dcp" and importlib.util.find_spec(guest) is None:
            pytest.skip(f"{guest} is not installed: `pip install --group frameworks`")
        program, self.world = PROGRAMS[guest]
        self.place = place
        (place / "train.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(program))

    def run(self, steps: int, **variables: str) -> list[tuple[int, str]]:
        """Return exit codes and output of the ranks."""
        environments = of_ranks(self.world) if self.world > 1 else [{}]
        logged = [
            {**rank, **variables, "STEPS": str(steps), "LOG": str(self.place / f"log-{number}")}
            for number, rank in enumerate(environments)
        ]
        return run_forked("torch", Path("train.py"), *logged, cwd=self.place)

    def lines(self, rank: int) -> list[list[str]]:
        """Return the lines that a rank has written so far."""
        with suppress(FileNotFoundError):
            return [line.split() for line in (self.place / f"log-{rank}").read_text().splitlines()]
        return []

    def run_until_killed(self, chance: random.Random) -> list[tuple[int, str]]:
        """Run, and kill a rank some time after it has begun one of its next saves."""
        victim = chance.randrange(self.world)
        before = [len(self.lines(rank)) for rank in range(self.world)]
        saves, delay = chance.randint(0, 2), chance.uniform(0, 0.3)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run, 10_000)
            while not running.done():
                begun = [line for line in self.lines(victim)[before[victim] :] if line[0] == "begun"]
                if len(begun) > saves:
                    break
                time.sleep(0.005)
            time.sleep(delay)
            self._kill(victim, before)
            with suppress(TimeoutError):
                return running.result(PATIENCE)
            for rank in range(self.world):
                self._kill(rank, before)
            return running.result()

    def _kill(self, rank: int, before: list[int]) -> None:
        for line in self.lines(rank)[before[rank] :]:
            if line[0] == "pid":
                with suppress(ProcessLookupError):
                    os.kill(int(line[1]), signal.SIGKILL)

    def check(self) -> int:
        """Check that each resumed state was saved, and is no older than the last save that was reported.

        Returns how often it was resumed.
        """
        resumed = []
        for rank in range(self.world):
            begun: dict[int, set[str]] = {}
            done = 0
            resumed.append([])
            for word, *rest in self.lines(rank):
                if word == "begun":
                    begun.setdefault(int(rest[0]), set()).add(rest[1])
                elif word == "done":
                    done = int(rest[0])
                elif word == "resumed":
                    step = int(rest[0])
                    assert rest[1] in begun[step], (rank, step)
                    assert done <= step <= done + 1, (rank, step, done)
                    begun = {step: {rest[1]}}
                    done = step
                    resumed[rank].append(step)
        return len(resumed[0])


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("guest", PROGRAMS)
def test_a_training_resumes_its_saved_state(guest: str, tmp_path: Path) -> None:
    training = Training(guest, tmp_path)
    chance = random.Random(guest)
    for _ in range(KILLS):
        found = training.run_until_killed(chance)
        assert -signal.SIGKILL in [code for code, _ in found], found
        training.check()
    with ckstore.open(tmp_path / "store") as store:
        latest = store._catalog.latest("run")
        step = 0 if latest is None else latest.step or 0
    found = training.run(step + 2)
    assert [code for code, _ in found] == [0] * training.world, found
    assert training.check() >= 1
    with ckstore.open(tmp_path / "store") as store:
        assert store.verify().problems == []
        assert [row.step for row in store._catalog.versions("run")] == list(range(1, step + 3))
        store.gc(grace=0)
        assert not list((tmp_path / "store" / "packs").glob(".tmp*"))


def state_of(guest: str, version: ckstore.Version, place: Path, rank: int) -> str:
    """The digest of what a rank resumes from a version."""
    if guest == "lightning":
        state = version.state_dict()
        return digest(state["state_dict"], state["optimizer_states"])
    if guest == "dcp":
        return digest(part_of(version.state_dict(), rank))
    version.checkout(place)
    if guest == "transformers":
        return digest_of_files(place)
    from safetensors.torch import load_file

    generators = torch.load(place / "random_states_0.pkl", weights_only=False)
    model, optimizer = load_file(place / "model.safetensors"), torch.load(place / "optimizer.bin")
    return digest(model, optimizer, generators["torch_manual_seed"])


def part_of(state: Any, rank: int) -> Any:
    """What a rank of two has of a state under FSDP."""
    if isinstance(state, dict):
        return {key: part_of(value, rank) for key, value in state.items()}
    if isinstance(state, list):
        return [part_of(value, rank) for value in state]
    return state.chunk(2)[rank] if isinstance(state, torch.Tensor) and state.ndim else state


@pytest.mark.long
@pytest.mark.parametrize("guest", PROGRAMS)
def test_a_save_without_room_fails_the_training_and_a_thinned_version_resumes(guest: str, tmp_path: Path) -> None:
    training = Training(guest, tmp_path)
    found = training.run(5, FULL="1")
    assert all(code not in (0, -signal.SIGKILL) and "No space" in printed for code, printed in found), found
    assert not list(tmp_path.glob("store.*"))
    with ckstore.open(tmp_path / "store") as store:
        assert [row.step for row in store.versions("run")] == [1, 2]
    found = training.run(4)
    assert [code for code, _ in found] == [0] * training.world, found
    assert training.check() == 1
    with ckstore.open(tmp_path / "store") as store:
        store.thin(run="run")
        assert [row.fidelity for row in store.versions("run")] == ["coarse"] * 4
        version = store["run@4"]
        expected = [state_of(guest, version, tmp_path / f"out-{rank}", rank) for rank in range(training.world)]
    found = training.run(5)
    assert [code for code, _ in found] == [0] * training.world, found
    for rank in range(training.world):
        (resumed,) = [line for line in training.lines(rank) if line[:2] == ["resumed", "4"]]
        assert resumed[2].endswith(expected[rank])
        assert resumed[2] not in [line[2] for line in training.lines(rank) if line[0] == "begun"]
    with ckstore.open(tmp_path / "store") as store:
        assert store["run@5"].fidelity == "exact"
        assert store.verify().problems == []
