"""Checkpoint directories of transformers' Trainer: those it makes versions, and those it keeps."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.integrations.transformers import StoreCallback, resume_path
from tests.forked import of_ranks
from tests.integrations.programs import run_with
from tests.integrations.trained import digest_of_files


class Trainer:
    """Calls a callback as the Trainer does; a directory is its weights and the state."""

    def __init__(self, output: Path, callback: StoreCallback, *, load_best: bool = False) -> None:
        self.args: Any = SimpleNamespace(output_dir=str(output), load_best_model_at_end=load_best)
        self.state = SimpleNamespace(
            global_step=0, is_world_process_zero=True, log_history=[], best_model_checkpoint=None
        )  # fmt: skip
        self.callback = callback

    def begin(self, step: int = 0, **parts: Any) -> None:
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, None, **{"model": None, **parts})

    def save(self, step: int, value: float = 0.0, *, best: bool = False, **logs: float) -> Path:
        directory = Path(self.args.output_dir, f"checkpoint-{step}")
        directory.mkdir(parents=True)
        torch.save({"w": torch.full((300,), step + value)}, directory / "pytorch_model.bin")
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        self.state.global_step = step
        self.state.log_history += [{**logs, "step": step}]
        if best:
            self.state.best_model_checkpoint = str(directory)
        assert self.callback.on_save(self.args, self.state, None, model=None) is None
        return directory


def test_a_directory_becomes_a_version_with_logged_metrics(store: ckstore.Store, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf"))
    trainer.begin()
    trainer.state.log_history += [{"loss": 9.0, "step": 2}, {"loss": 8.0, "step": 4}]
    trainer.save(5, eval_loss=0.5)
    trainer.save(10)
    trainer.save(15, loss=7.0)
    found = [(row.step, row.metrics) for row in store._catalog.versions("hf")]
    assert found == [(5, {"loss": 8.0, "eval_loss": 0.5}), (10, {}), (15, {"loss": 7.0})]
    assert sorted(os.listdir(tmp_path / "output")) == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    assert {entry.path for entry in store["hf@5"]._stored.document.files} == {"pytorch_model.bin", "trainer_state.json"}


def test_two_trainings_at_once_keep_their_steps_apart(store: ckstore.Store, tmp_path: Path) -> None:
    """As of a generator and its discriminator; a directory that is saved again replaces its own version."""
    first, second = (Trainer(tmp_path / name, StoreCallback(store, "hf")) for name in ("one", "two"))
    first.begin()
    second.begin()
    directories = {}
    for step in (5, 10):
        directories[f"hf@{step}"] = first.save(step)
        directories[f"hf/two@{step}"] = second.save(step, 0.5)
    directories["hf/two@12"] = second.save(12, 0.5)
    shutil.rmtree(tmp_path / "two" / "checkpoint-12")
    second.save(12, 0.75)
    directories["hf@12"] = first.save(12)
    assert {version.name for version in store.versions()} == directories.keys()
    for name, directory in directories.items():
        found = resume_path(store, name, tmp_path / "found")
        assert found is not None
        assert digest_of_files(found) == digest_of_files(directory)


def test_directories_go_on_demand_and_the_best_stays(store: ckstore.Store, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf", remove=True), load_best=True)
    trainer.begin()
    for step, is_best, left in ((5, False, set()), (10, True, {10}), (15, False, {10}), (20, True, {20})):
        trainer.save(step, best=is_best)
        assert {int(name.removeprefix("checkpoint-")) for name in os.listdir(tmp_path / "output")} == left
    assert [row.step for row in store._catalog.versions("hf")] == [5, 10, 15, 20]


def test_a_directory_that_could_not_be_stored_stays(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf", remove=True))
    trainer.begin()

    def full(*_: Any, **__: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(ckstore.Store, "ingest", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save(5)
    assert os.listdir(tmp_path / "output" / "checkpoint-5")


def test_a_version_is_written_where_the_trainer_had_it(store: ckstore.Store, tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert resume_path(store, "hf@latest", output) is None
    assert not output.exists()
    trainer = Trainer(output, StoreCallback(store, "hf", remove=True))
    trainer.begin()
    for step in (5, 10):
        trainer.save(step)
    torn = output / "checkpoint-10" / "torn"
    torn.parent.mkdir()
    torn.touch()
    assert resume_path(store, "hf@latest", output) == str(output / "checkpoint-10")
    assert sorted(os.listdir(output / "checkpoint-10")) == ["pytorch_model.bin", "trainer_state.json"]
    assert resume_path(store, "hf@5", tmp_path / "elsewhere") == str(tmp_path / "elsewhere" / "checkpoint-5")
    with pytest.raises(NotFoundError, match="hf@7"):
        resume_path(store, "hf@7", output)


@pytest.mark.parametrize("by_path", [True, False])
def test_a_resumed_training_keeps_what_it_leaves(store: ckstore.Store, tmp_path: Path, by_path: bool) -> None:
    """Also from a directory that the Trainer has kept itself."""
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf", remove=True))
    trainer.begin()
    for step in (5, 10, 15):
        trainer.save(step)
    if by_path:
        assert resume_path(store, "hf@5", tmp_path / "output")
    again = Trainer(tmp_path / "output", StoreCallback(store, "hf", remove=True))
    again.begin(5)
    for step in (8, 10):
        again.save(step, 0.5)
    rows = store._catalog.versions("hf")
    assert [(row.step, row.superseded) for row in rows] == [
        (5, False), (10, True), (15, True), (8, False), (10, False)
    ]  # fmt: skip
    assert [store[f"hf@{step}"].parent for step in (8, 10)] == [store["hf@5"].number, store["hf@8"].number]
    assert [store[number]["pytorch_model.bin/w"][0] for number in (2, 5)] == [10, 10.5]
    assert resume_path(store, "hf@latest", tmp_path / "output") == str(tmp_path / "output" / "checkpoint-10")
    assert torch.load(tmp_path / "output" / "checkpoint-10" / "pytorch_model.bin")["w"][0] == 10.5


def test_a_training_that_lost_its_optimiser_is_warned(store: ckstore.Store, tmp_path: Path) -> None:
    """Tied weights, one of them in the file, and files that are not compared are no difference."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    directory = tmp_path / "output" / "checkpoint-5"
    directory.mkdir(parents=True)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(
        {n: v for n, v in model.state_dict().items() if n != "1.weight"}, directory / "model.safetensors"
    )
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    torch.save({"rng": torch.zeros(3)}, directory / "rng_state.pth")
    store.ingest(directory, run="hf", step=5)
    Trainer(tmp_path / "output", StoreCallback(store, "hf")).begin(5, model=model, optimizer=optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"not as hf@5 has it. .* 9 missing: optimizer.pt/state/\[0\]/"):
        Trainer(tmp_path / "output", StoreCallback(store, "hf")).begin(5, model=model, optimizer=fresh)


def test_a_resumed_training_may_have_a_new_run(store: ckstore.Store, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf"))
    trainer.begin()
    for step in (5, 10):
        trainer.save(step)
    resume_path(store, "hf@5", tmp_path / "fork")
    for run, step in (("fork", 5), ("new", 0)):
        other = Trainer(tmp_path / run, StoreCallback(store, run))
        other.begin(step)
        other.save(step + 3)
    assert [store[name].parent for name in ("fork@8", "new@3")] == [store["hf@5"].number, None]
    assert not any(version.superseded for version in store.versions())


def test_ranks_without_a_process_group_are_refused(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf"))
    trainer.begin()
    trainer.save(5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="create `TrainingArguments` before"):
        resume_path(store, "hf@5", tmp_path / "output")


@pytest.mark.parametrize("step", [0, 7])
def test_a_training_from_elsewhere_needs_a_run_of_its_own(store: ckstore.Store, tmp_path: Path, step: int) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf"))
    trainer.begin()
    trainer.save(5)
    with pytest.raises(ConflictError, match="give `StoreCallback` a new run"):
        Trainer(tmp_path / "other", StoreCallback(store, "hf")).begin(step)
    Trainer(tmp_path / "other", StoreCallback(store, "fork")).begin(step)


def test_other_ranks_store_nothing(store: ckstore.Store, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "output", StoreCallback(store, "hf", remove=True))
    trainer.state.is_world_process_zero = False
    trainer.begin()
    assert trainer.save(5).exists()
    assert store._catalog.versions() == []


def test_other_events_are_ignored(store: ckstore.Store) -> None:
    callback = StoreCallback(store, "hf")
    assert callback.on_step_end(None, None, None, model=None) is None
    with pytest.raises(AttributeError, match="has no attribute state"):
        callback.state  # noqa: B018
    assert repr(callback) == "<ckstore.integrations.transformers.StoreCallback of hf>"


#: A Trainer that evaluates, loads its best model in the end, and leaves no directory but that one.
BEST = """
    import os, torch, transformers
    import ckstore
    from ckstore.integrations.transformers import StoreCallback

    transformers.set_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(16, (16, 8))]
    arguments = transformers.TrainingArguments(
        "output", max_steps=6, save_steps=2, eval_steps=2, logging_steps=1, eval_strategy="steps", report_to=[],
        load_best_model_at_end=True, metric_for_best_model="loss", per_device_train_batch_size=4, disable_tqdm=True,
    )
    with ckstore.init("store") as store:
        callback = StoreCallback(store, "hf", remove=True)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, eval_dataset=texts, callbacks=[callback])
        trainer.train()
        losses = {row.step: row.metrics["eval_loss"] for row in store._catalog.versions("hf")}
        assert list(losses) == [2, 4, 6]
        best = min(losses, key=losses.get)
        assert os.listdir("output") == [f"checkpoint-{best}"], os.listdir("output")
        weight = store[f"hf@{best}"]["model.safetensors/transformer.wte.weight"][...]
        assert (model.transformer.wte.weight.detach().numpy() == weight).all()
        store[f"hf@{best}"].checkout("model")
        transformers.GPT2LMHeadModel.from_pretrained("model")
    """


#: Two ranks, each writing a file of its own.
RANKS = """
    import os, torch, transformers
    import ckstore
    from ckstore.integrations.transformers import StoreCallback, resume_path

    transformers.set_seed(0)
    size = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 16}
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(16, (16, 8))]
    store = ckstore.open("store", create=True)
    for steps in (4, 6):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        arguments = transformers.TrainingArguments(
            "output", max_steps=steps, save_steps=2, report_to=[], per_device_train_batch_size=2, use_cpu=True,
            ddp_backend="gloo", disable_tqdm=True,
        )
        callback = StoreCallback(store, "hf", remove=True)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume_path(store, "hf@latest", "output"))
    if trainer.is_world_process_zero():
        assert [row.step for row in store._catalog.versions()] == [2, 4, 6]
        for step in (2, 4, 6):
            files = {entry.path for entry in store[f"hf@{step}"]._stored.document.files}
            assert {"rng_state_0.pth", "rng_state_1.pth"} <= files, files
    store.close()
    """


def test_the_files_of_all_ranks_are_stored(tmp_path: Path) -> None:
    run_with("transformers", RANKS, tmp_path, of_ranks(2))


def test_the_trainer_finds_its_best_directory(tmp_path: Path) -> None:
    run_with("transformers", BEST, tmp_path)


#: A Trainer that gathers gradients; an evaluation chooses the setting.
GRADIENTS = """
    import torch, transformers
    import ckstore
    from ckstore.integrations.transformers import StoreCallback
    from safetensors.torch import load_file

    transformers.set_seed(0)
    size = {"n_embd": 256, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    texts = [{"input_ids": text, "labels": text} for text in torch.randint(16, (16, 8))]
    arguments = transformers.TrainingArguments(
        "output", max_steps=4, save_steps=2, report_to=[], per_device_train_batch_size=4, use_cpu=True,
        disable_tqdm=True, optim="sgd",
    )
    seen = []

    def loss(path):
        seen.append(load_file(path / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"])
        return float(seen[-1].abs().sum())

    accumulator = ckstore.GradientAccumulator({"model.safetensors": model}, every=2)
    with ckstore.init("store") as store:
        store.set_policy(ckstore.Policy("coarse", "dynaquant"))
        callback = StoreCallback(store, "hf", gradients=accumulator, search=ckstore.Search(loss, 0.2))
        transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
        assert "model.safetensors/transformer.h.0.mlp.c_fc.weight" in accumulator.gradients()
        assert accumulator._last == 4
        for step in (2, 4):
            found = store[f"hf@{step}"]._stored.document.coarse
            assert found.parameters["evaluations"] > 1, found
    assert len(seen) > 4
    """


def test_a_trainer_gathers_gradients_for_its_directories(tmp_path: Path) -> None:
    run_with("transformers", GRADIENTS, tmp_path)


@dataclass
class Arguments:
    output_dir: str
    lr: float = 1e-3
    seed: int = 42
    hub_token: str = ""
    load_best_model_at_end: bool = False


def test_arguments_that_differ_from_their_defaults_are_kept(store: ckstore.Store, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, StoreCallback(store, "hf"))
    trainer.args = Arguments(str(tmp_path), seed=1, hub_token="abc")
    trainer.begin()
    trainer.save(5)
    assert store["hf"].config == {"output_dir": str(tmp_path), "seed": 1}
