"""Pointers in place of Lightning's checkpoints, without Lightning and with it."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.integrations.lightning import StoreIO
from tests.equality import assert_same
from tests.integrations.programs import run_with


@pytest.fixture(autouse=True)
def no_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else imports Lightning into the process of the tests."""
    monkeypatch.setattr("ckstore.integrations.lightning._PARENTS", ())


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    return {"epoch": 0, "global_step": step, "state_dict": {"w": torch.full((3,), step + value)}, "callbacks": {}}


class Custom:
    """A class that no store knows."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_pointer_lies_where_the_checkpoint_would_be(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="lit")
    assert io.latest is None
    io.save_checkpoint(checkpoint(8), tmp_path / "some" / "place" / "a.ckpt")
    assert os.listdir(tmp_path / "some" / "place") == ["a.ckpt"]
    assert (tmp_path / "some" / "place" / "a.ckpt").read_text() == f"ckstore:{store['lit@8'].id}\n"
    assert io.latest == "ckstore:lit@latest"
    for name in (tmp_path / "some" / "place" / "a.ckpt", "ckstore:lit@8", Path("ckstore:lit@8"), io.latest):
        assert_same(io.load_checkpoint(name), checkpoint(8))


def test_a_checkpoint_without_a_step_is_pointed_to_by_its_id(store: ckstore.Store, tmp_path: Path) -> None:
    """Fabric saves such checkpoints."""
    io = StoreIO(store, run="fabric")
    for number in range(2):
        io.save_checkpoint({"w": torch.full((2,), float(number))}, tmp_path / f"{number}.ckpt")
    for number in range(2):
        assert_same(io.load_checkpoint(tmp_path / f"{number}.ckpt"), {"w": torch.full((2,), float(number))})


def test_a_spawned_process_opens_the_store_again(store: ckstore.Store, tmp_path: Path) -> None:
    io = pickle.loads(pickle.dumps(StoreIO(store, run="lit")))
    assert io.store is not store
    io.save_checkpoint(checkpoint(8), tmp_path / "a.ckpt")
    io.store.close()
    assert_same(StoreIO(store, run="lit").load_checkpoint(tmp_path / "a.ckpt"), checkpoint(8))


def test_removing_a_pointer_keeps_the_version(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="lit")
    io.save_checkpoint(checkpoint(8), tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert [row.step for row in store._catalog.versions("lit")] == [8]


def test_hidden_files_are_lightning_s_own(store: ckstore.Store, tmp_path: Path) -> None:
    """Files of its search for a learning rate, and results of a spawned process."""
    io = StoreIO(store, run="lit")
    place = tmp_path / "some" / ".lr_find_1.ckpt"
    io.save_checkpoint(checkpoint(0), place)
    assert_same(io.load_checkpoint(place), checkpoint(0))
    io.remove_checkpoint(place)
    assert store._catalog.versions() == []
    assert os.listdir(tmp_path / "some") == []


def test_checkpoint_files_of_lightning_are_still_read(store: ckstore.Store, tmp_path: Path) -> None:
    torch.save(checkpoint(3), tmp_path / "old.ckpt")
    assert_same(StoreIO(store, run="lit").load_checkpoint(tmp_path / "old.ckpt"), checkpoint(3))


def test_objects_of_a_user_s_own_classes_need_trust(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="lit")
    io.save_checkpoint(checkpoint(3) | {"hyper_parameters": {"model": Custom(7)}}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        io.load_checkpoint(tmp_path / "a.ckpt")
    found = io.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert found["hyper_parameters"]["model"].value == 7
    assert_same(found["state_dict"], checkpoint(3)["state_dict"])


def resumable(step: int, value: float = 0.0, **states: Any) -> dict[str, Any]:
    """A checkpoint of a Trainer."""
    return checkpoint(step, value) | {"pytorch-lightning_version": "2", "optimizer_states": [step]} | states


def weights(step: int, value: float = 0.0) -> dict[str, Any]:
    """A checkpoint of a Trainer with `save_weights_only`."""
    found = {key: part for key, part in resumable(step, value).items() if key not in ("callbacks", "optimizer_states")}
    return found | {"loops": {}}


def test_files_of_one_step_keep_versions_of_their_own(store: ckstore.Store, tmp_path: Path) -> None:
    """`save_last=True` saves a second checkpoint, which knows that it is the last one."""
    io = StoreIO(store, run="lit")
    saved: dict[Path, Any] = {}
    for step in (8, 16):
        for name, found in (
            (f"epoch=0-step={step}.ckpt", resumable(step)),
            ("last.ckpt", resumable(step, callbacks={"last": {"path": "last.ckpt"}})),
            (f"epoch=0-step={step}-v1.ckpt", resumable(step, callbacks={"another": {}})),
            (f"best/epoch=0-step={step}.ckpt", weights(step)),
            (f"ema/step={step}.ckpt", weights(step, 0.5)),
            ("weights.ckpt", weights(step, 0.25)),
        ):
            saved[tmp_path / name] = found
            io.save_checkpoint(found, tmp_path / name)
    for place, found in saved.items():
        assert_same(io.load_checkpoint(place), found)
    runs = {run.name: run.steps for run in store.runs()}
    assert runs == {name: [8, 16] for name in
                    ("lit", "lit/last", "lit/v1", "lit/weights", "lit/weights/ema", "lit/weights/weights")}  # fmt: skip
    assert_same(io.load_checkpoint("ckstore:lit@8"), resumable(8))
    assert_same(io.load_checkpoint("ckstore:lit/last@8"), resumable(8, callbacks={"last": {"path": "last.ckpt"}}))
    assert_same(io.load_checkpoint(io.latest or ""), resumable(16))


def test_weights_alone_never_take_the_run_of_a_trainer_s_checkpoints(store: ckstore.Store, tmp_path: Path) -> None:
    """Also where they are saved first at a step: the run's latest version can be resumed from."""
    io = StoreIO(store, run="lit")
    io.save_checkpoint(weights(2), tmp_path / "best.ckpt")
    assert io.latest is None
    for step in (4, 6):
        io.save_checkpoint(weights(step), tmp_path / "best.ckpt")
        io.save_checkpoint(resumable(step), tmp_path / f"step={step}.ckpt")
    io.save_checkpoint(weights(8), tmp_path / "best.ckpt")
    assert io.load_checkpoint(io.latest or "")["optimizer_states"] == [6]
    assert {run.name: run.steps for run in store.runs()} == {"lit/weights": [2, 4, 6, 8], "lit": [4, 6]}
    with pytest.raises(ConflictError, match="give `StoreIO` a new run"):
        StoreIO(store, run="lit").save_checkpoint(weights(9), tmp_path / "best.ckpt")


def test_a_step_that_only_one_path_has_stays_in_the_run(store: ckstore.Store, tmp_path: Path) -> None:
    """Top-k may skip a step that `last.ckpt` has: it is the latest one to resume from."""
    io = StoreIO(store, run="lit")
    for name, step in (("a", 4), ("last", 4), ("last", 6), ("a", 8), ("last", 8)):
        io.save_checkpoint(resumable(step, callbacks={name: {}}), tmp_path / f"{name}.ckpt")
    assert {run.name: run.steps for run in store.runs()} == {"lit": [4, 6, 8], "lit/last": [4, 8]}
    assert io.load_checkpoint(tmp_path / "last.ckpt")["callbacks"] == {"last": {}}


def test_the_order_of_two_files_does_not_move_them(store: ckstore.Store, tmp_path: Path) -> None:
    """Fabric's states say nothing of their kind: each series stays in its run."""
    io = StoreIO(store, run="fabric")
    for step, names in ((7, ("model", "ema")), (9, ("ema", "model")), (11, ("ema",)), (12, ("model",))):
        for name in names:
            for directory in ("one", "other"):
                state = {"step": step, "w": torch.full((3,), step + len(name + directory) / 16)}
                io.save_checkpoint(state, tmp_path / directory / f"{name}.ckpt")
                assert_same(io.load_checkpoint(tmp_path / directory / f"{name}.ckpt"), state)
    assert {run.name: run.steps for run in store.runs()} == {
        "fabric": [7, 9, 12], "fabric/model": [7, 9, 12], "fabric/ema": [7, 9, 11], "fabric/other-ema": [7, 9, 11],
    }  # fmt: skip


def test_a_path_replaces_what_it_held_alone(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="fabric")
    states = {name: {"step": 7, "w": torch.full((3,), float(value))} for value, name in enumerate("abcd")}
    io.save_checkpoint(states["a"], tmp_path / "a.ckpt")
    io.save_checkpoint(states["a"], tmp_path / "copy.ckpt")
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    io.save_checkpoint(states["b"], tmp_path / "link.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "a.ckpt"), states["a"])
    io.save_checkpoint(states["c"], tmp_path / "a.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "a.ckpt"), states["c"])
    assert_same(io.load_checkpoint(tmp_path / "copy.ckpt"), states["a"])
    assert_same(io.load_checkpoint(tmp_path / "link.ckpt"), states["b"])
    assert len(store) == 3
    store.tag("fabric@7", "kept")
    io.save_checkpoint(states["d"], tmp_path / "a.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "a.ckpt"), states["d"])
    assert_same(store["kept"].state_dict(), states["c"])


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_that_is_killed_leaves_a_pointer_to_a_version(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """Between the commit that replaces a version and the new pointer, or before the commit."""
    io = StoreIO(store, run="lit")
    io.save_checkpoint(resumable(8), tmp_path / "a.ckpt")

    def killed(*given: Any, ingest: Any = ckstore.Store.ingest, **named: Any) -> Any:
        if is_committed:
            ingest(*given, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ckstore.Store, "ingest", killed)
        with pytest.raises(KeyboardInterrupt):
            io.save_checkpoint(resumable(8, 0.5), tmp_path / "a.ckpt")
    assert_same(io.load_checkpoint(tmp_path / "a.ckpt"), resumable(8, 0.5 if is_committed else 0.0))
    io.save_checkpoint(resumable(8, 0.25), tmp_path / "a.ckpt")
    assert len((tmp_path / "a.ckpt").read_text().splitlines()) == len(store) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 2])
def test_every_path_gives_what_was_saved_to_it_last(store: ckstore.Store, tmp_path: Path, seed: int) -> None:
    """Saves of several kinds, removals, links and resumptions in a random order."""
    chance = random.Random(seed)
    io, step, saved, stored = StoreIO(store, run="lit"), 1, {}, {}
    for _ in range(60):
        name = chance.choice(("last", "best", f"step={step}", f"deep/step={step}", "ema", f"rank{step % 2}"))
        place = tmp_path / f"{name}.ckpt"
        match chance.choices(("save", "go on", "remove", "link", "resume"), (8, 2, 1, 4, 1))[0]:
            case "save":
                kind = chance.choice((resumable, weights, checkpoint))
                value = chance.choice((0.0, 0.25, chance.random()))
                io.save_checkpoint(kind(step, value), place)
                saved[place] = kind(step, value)
            case "go on":
                step += 1
            case "remove":
                io.remove_checkpoint(place)
                saved.pop(place, None)
            case "link" if saved:
                other = chance.choice(list(saved))
                if other != place and not other.is_symlink():
                    saved.pop(place, None)
                    place.parent.mkdir(exist_ok=True)
                    place.unlink(missing_ok=True)
                    place.symlink_to(other)
            case "resume" if saved:
                io = StoreIO(store, run="lit")
                step = io.load_checkpoint(chance.choice(list(saved)))["global_step"]
                stored = {version.number: version.state_dict() for version in store.versions() if version.step > step}
        for known, expected in saved.items() if chance.random() < 0.25 else ():
            assert_same(StoreIO(store, "lit").load_checkpoint(known), expected)
        assert stored.keys() <= set(store)
    for number, expected in stored.items():
        assert_same(store[number].state_dict(), expected)


def test_a_pointer_to_a_version_that_is_gone_says_so(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="lit")
    io.save_checkpoint(resumable(8), tmp_path / "a.ckpt")
    store.forget("lit@8")
    store.ingest(resumable(8, 0.5), run="lit", step=8)
    with pytest.raises(NotFoundError, match=r"a\.ckpt names, is not in .* any more"):
        io.load_checkpoint(tmp_path / "a.ckpt")


def test_runs_below_a_run_follow_its_policy(store: ckstore.Store, tmp_path: Path) -> None:
    store.set_policy(ckstore.Policy(retention=ckstore.Retention(keep_last=2)), run="lit")
    io = StoreIO(store, run="lit")
    for name in ("a", "last"):
        io.save_checkpoint(resumable(8, callbacks={name: {}}), tmp_path / f"{name}.ckpt")
    assert store.policies()["lit/last"] == store.policies()["lit"]
    store.set_policy(None, run="lit/last")
    for name in ("a", "last"):
        io.save_checkpoint(resumable(9, callbacks={name: {}}), tmp_path / f"{name}.ckpt")
    assert list(store.policies()) == ["lit"]


def branches(store: ckstore.Store, run: str) -> dict[str, list[int | None]]:
    """Steps of the present versions of a run, and of superseded ones."""
    rows = store._catalog.versions(run)
    return {
        name: [row.step for row in rows if row.superseded == mark] for name, mark in (("now", False), ("old", True))
    }


def test_a_resumed_training_keeps_what_it_leaves(store: ckstore.Store, tmp_path: Path) -> None:
    """Pointers of the abandoned branch hold until their paths are saved again; all its versions stay."""
    first = StoreIO(store, run="lit")
    for step in (4, 8, 12, 16):
        for name in (f"step={step}.ckpt", "last.ckpt", f"once-{step}.ckpt"):
            first.save_checkpoint(resumable(step, callbacks={name: {}}), tmp_path / name)
        first.save_checkpoint(weights(step), tmp_path / f"best-{step}.ckpt")
    old = {version.number: version.state_dict() for version in store.versions()}
    second = StoreIO(store, run="lit")
    assert_same(second.load_checkpoint("ckstore:lit@8"), resumable(8, callbacks={"step=8.ckpt": {}}))
    for step in (10, 12):
        for name in (f"step={step}.ckpt", "last.ckpt"):
            second.save_checkpoint(resumable(step, 0.5, callbacks={name: {}}), tmp_path / name)
            assert_same(second.load_checkpoint(tmp_path / name), resumable(step, 0.5, callbacks={name: {}}))
        second.save_checkpoint(weights(step, 0.5), tmp_path / f"best-{step}.ckpt")
    assert branches(store, "lit") == {"now": [4, 8, 10, 12], "old": [12, 16]}
    assert branches(store, "lit/last") == {"now": [4, 8, 10, 12], "old": [12, 16]}
    assert branches(store, "lit/weights") == {"now": [4, 8, 10, 12], "old": [12, 16]}
    assert branches(store, "lit/once") == {"now": [4, 8, 12, 16], "old": []}
    assert [store[name].parent for name in ("lit@10", "lit@12")] == [store["lit@8"].number, store["lit@10"].number]
    assert_same(second.load_checkpoint(second.latest or ""), resumable(12, 0.5, callbacks={"step=12.ckpt": {}}))
    for number, state in old.items():
        assert_same(store[number].state_dict(), state)
    assert_same(second.load_checkpoint(tmp_path / "step=16.ckpt"), resumable(16, callbacks={"step=16.ckpt": {}}))


def test_equal_steps_after_a_resumption_are_one_branch(store: ckstore.Store, tmp_path: Path) -> None:
    """A training that repeats itself bit for bit has nothing to supersede until it differs."""
    first = StoreIO(store, run="lit")
    for step in (4, 8, 12, 16):
        first.save_checkpoint(resumable(step), tmp_path / f"{step}.ckpt")
    second = StoreIO(store, run="lit")
    second.load_checkpoint("ckstore:lit@4")
    for step, value in ((8, 0.0), (12, 0.0), (16, 0.5)):
        second.save_checkpoint(resumable(step, value), tmp_path / f"{step}.ckpt")
    assert branches(store, "lit") == {"now": [4, 8, 12, 16], "old": [16]}
    assert store["lit@16"].parent == store["lit@12"].number


def test_a_branch_of_a_run_below_is_kept_where_nothing_comes_before(store: ckstore.Store, tmp_path: Path) -> None:
    first = StoreIO(store, run="lit")
    for step in (4, 8):
        first.save_checkpoint(resumable(step), tmp_path / f"{step}.ckpt")
    first.save_checkpoint(resumable(8, 0.25), tmp_path / "last.ckpt")
    second = StoreIO(store, run="lit")
    second.load_checkpoint(tmp_path / "4.ckpt")
    for name in ("8", "last"):
        second.save_checkpoint(resumable(8, 0.5 + len(name) / 16), tmp_path / f"{name}.ckpt")
    assert branches(store, "lit") == {"now": [4, 8], "old": [8]}
    assert_same(store["lit/last@8"].state_dict(), resumable(8, 0.25))
    assert_same(second.load_checkpoint(tmp_path / "last.ckpt"), resumable(8, 0.75))


def test_another_training_needs_a_run_of_its_own(store: ckstore.Store, tmp_path: Path) -> None:
    StoreIO(store, run="lit").save_checkpoint(checkpoint(8), tmp_path / "a.ckpt")
    other = StoreIO(store, run="lit")
    with pytest.raises(ConflictError, match="give `StoreIO` a new run"):
        other.save_checkpoint(checkpoint(5), tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()
    fork = StoreIO(store, run="fork")
    assert_same(fork.load_checkpoint("ckstore:lit@8"), checkpoint(8))
    fork.save_checkpoint(checkpoint(9), tmp_path / "c.ckpt")
    assert [(row.run, row.step) for row in store._catalog.versions()] == [("lit", 8), ("fork", 9)]
    assert store["fork@9"].parent == store["lit@8"].number


def test_a_second_training_with_the_same_plug_in_is_another_one(store: ckstore.Store, tmp_path: Path) -> None:
    """A notebook's cell is run again; the last state of the first training may be saved once more."""
    io = StoreIO(store, run="lit")
    for step in (4, 8):
        io.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    io.teardown()
    io.save_checkpoint(checkpoint(8) | {"epoch": 1}, tmp_path / "final.ckpt")
    for step in (4, 5):
        with pytest.raises(ConflictError, match="give `StoreIO` a new run"):
            io.save_checkpoint(checkpoint(step, 0.5), tmp_path / f"{step}.ckpt")
    assert [row.step for row in store._catalog.versions("lit")] == [4, 8]
    assert_same(io.load_checkpoint("ckstore:lit@4"), checkpoint(4))


def test_testing_a_version_does_not_resume_its_run(store: ckstore.Store, tmp_path: Path) -> None:
    StoreIO(store, run="lit").save_checkpoint(checkpoint(4), tmp_path / "4.ckpt")
    io = StoreIO(store, run="lit")
    io.load_checkpoint("ckstore:lit@4")
    io.teardown()
    with pytest.raises(ConflictError, match="give `StoreIO` a new run"):
        io.save_checkpoint(checkpoint(8), tmp_path / "8.ckpt")


def test_fabric_goes_back_after_loading(store: ckstore.Store, tmp_path: Path) -> None:
    """The step that was loaded is saved again under its path, which held that version."""
    for value in (0.0, 1.0):
        io = StoreIO(store, run="fabric")
        if value:
            io.load_checkpoint("ckstore:fabric@7")
        for step in (7, 9):
            io.save_checkpoint({"step": step, "w": torch.full((3,), value)}, tmp_path / f"{step}.ckpt")
    assert_same(store["fabric@9"].state_dict()["w"], torch.ones(3))
    assert branches(store, "fabric") == {"now": [7, 9], "old": [9]}


def test_the_score_of_a_checkpoint_is_a_metric_of_its_version(store: ckstore.Store, tmp_path: Path) -> None:
    place = str(tmp_path / "a.ckpt")
    states = {
        "ModelCheckpoint": {"monitor": "loss", "best_k_models": {place: torch.tensor(0.25), "b.ckpt": torch.tensor(1)}},
        "Another": {"monitor": "accuracy", "best_k_models": {"c.ckpt": torch.tensor(0.5)}},
        "EarlyStopping": {"wait_count": 1},
    }  # fmt: skip
    StoreIO(store, run="lit").save_checkpoint(checkpoint(8) | {"callbacks": states}, place)
    assert store["lit@8"].metrics == {"loss": 0.25}


def test_scores_of_weights_come_with_the_next_checkpoint(store: ckstore.Store, tmp_path: Path) -> None:
    """A checkpoint without callbacks' states does not have its own score."""
    io = StoreIO(store, run="lit")
    io.save_checkpoint(weights(8), tmp_path / "best.ckpt")
    best = {"monitor": "loss", "best_k_models": {str(tmp_path / "best.ckpt"): torch.tensor(0.25)}}
    io.save_checkpoint(resumable(8, callbacks={"best": best}), tmp_path / "step=8.ckpt")
    assert store["lit/weights@8"].metrics == {"loss": 0.25}
    assert store["lit@8"].metrics == {}


def test_unsupported_calls_are_refused(store: ckstore.Store, tmp_path: Path) -> None:
    io = StoreIO(store, run="lit")
    with pytest.raises(UsageError, match="give ModelCheckpoint a local `dirpath`"):
        io.save_checkpoint(checkpoint(1), "s3://bucket/a.ckpt")
    with pytest.raises(UsageError, match="storage_options"):
        io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(NotFoundError, match="lit@9"):
        io.load_checkpoint("ckstore:lit@9")
    assert store._catalog.versions() == []


#: The beginning of each program with a Trainer; the package is imported as `lightning.`.
MODEL = """
    import os, sys
    import torch
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from torch.utils.data import DataLoader, TensorDataset
    import ckstore
    from ckstore.integrations.lightning import StoreIO

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
        def training_step(self, batch):
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss)
            return loss
        def validation_step(self, batch):
            self.log("weight", self.layer.weight.sum())
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    """

#: Typical use of a Trainer.
TRAINING = (
    MODEL
    + """
    data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    store = ckstore.init("store")

    def trained(run, wrap=lambda io: io, epochs=4, ckpt_path=None, **options):
        saving = ModelCheckpoint(run, filename="{step}", **options)
        trainer = lightning.Trainer(max_epochs=epochs, plugins=[wrap(StoreIO(store, run))], callbacks=[saving], **quiet)
        model = Model()
        trainer.fit(model, data, data, ckpt_path=ckpt_path)
        return trainer, model, saving

    def steps(run):
        return sorted(row.step for row in store._catalog.versions(run))

    trainer, model, saving = trained("twice", monitor="loss", save_top_k=2, save_last=True)
    assert sorted(os.listdir("twice")) == ["last.ckpt", "step=6.ckpt", "step=8.ckpt"], os.listdir("twice")
    assert steps("twice") == [2, 4, 6, 8], steps("twice")
    assert store["twice@6"].metrics["loss"] > float(saving.best_model_score)
    weight = {step: store[f"twice@{step}"]["state_dict/layer.weight"][...].sum() for step in steps("twice")}
    for name, step in (("best", 8), ("last", 8), ("ckstore:twice@4", 4), ("twice/step=6.ckpt", 6)):
        (found,) = trainer.validate(Model(), data, ckpt_path=name, verbose=False)
        assert abs(found["weight"] - weight[step]) < 1e-6, name

    trainer, model, saving = trained("twice", epochs=5, ckpt_path="last", monitor="loss", save_top_k=2,
                                     save_last="link")
    assert steps("twice") == [2, 4, 6, 8, 10] and trainer.global_step == 10
    assert sorted(os.listdir("twice")) == ["last.ckpt", "step=10.ckpt", "step=8.ckpt"], os.listdir("twice")
    assert os.readlink("twice/last.ckpt") == "step=10.ckpt"

    trainer.save_checkpoint("twice/final.ckpt")
    trainer.save_checkpoint("twice/weights.ckpt", weights_only=True)
    assert steps("twice") == [2, 4, 6, 8, 10]
    io = StoreIO(store, "twice")
    assert io.load_checkpoint("twice/final.ckpt")["optimizer_states"]
    assert "optimizer_states" not in io.load_checkpoint("twice/weights.ckpt")
    try:
        trained("twice")
    except ckstore.ConflictError:
        assert steps("twice") == [2, 4, 6, 8, 10]
    else:
        raise AssertionError("another training went into the run")

    best = ModelCheckpoint("pair", filename="{step}", monitor="weight", save_weights_only=True, save_top_k=-1)
    each = ModelCheckpoint("pair", filename="{step}", monitor="loss", every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(max_epochs=6, plugins=[StoreIO(store, "pair")], callbacks=[best, each], **quiet)
    trainer.fit(Model(), data, data)
    assert steps("pair") == [4, 8, 12] and steps("pair/weights") == [2, 4, 6, 8, 10, 12]
    assert all("loss" in row.metrics for row in store._catalog.versions("pair"))
    assert [bool(row.metrics) for row in store._catalog.versions("pair/weights")] == [True] * 5 + [False]
    full = ["optimizer_states" in StoreIO(store, "pair").load_checkpoint(f"pair/{name}") for name in os.listdir("pair")]
    assert sorted(full) == [False] * 6 + [True] * 3
    trainer.fit(Model(), data, data, ckpt_path=StoreIO(store, "pair").latest)

    trained("async", wrap=AsyncCheckpointIO, save_top_k=-1)
    assert steps("async") == [2, 4, 6, 8], steps("async")
    assert len(os.listdir("async")) == 4, os.listdir("async")

    store["twice@8"].checkout("model.ckpt")
    found = Model.load_from_checkpoint("model.ckpt").layer.weight.detach().numpy()
    assert (found == store["twice@8"]["state_dict/layer.weight"][...]).all()
    store.close()
    """
)

#: The same package under its other name has no Fabric.
FABRIC = """
    import torch
    from lightning.fabric import Fabric
    import ckstore
    from ckstore.integrations.lightning import StoreIO

    with ckstore.init("store") as store:
        fabric = Fabric(accelerator="cpu", plugins=[StoreIO(store, run="fabric")])
        model = torch.nn.Linear(2, 2)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        state = {"model": model, "optimizer": optimizer, "step": 7}
        fabric.save("a.ckpt", state)
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        state["step"] = 0
        fabric.load("ckstore:fabric@7", state)
        assert torch.equal(model.weight, before) and state["step"] == 7
        average = {"model": torch.nn.Linear(2, 2), "step": 7}
        fabric.save("model.ckpt", state)
        fabric.save("ema.ckpt", average)
        assert torch.equal(fabric.load("model.ckpt")["model"]["weight"], before)
        assert torch.equal(fabric.load("ema.ckpt")["model"]["weight"], average["model"].weight)
    """


#: Two ranks of one machine; Lightning starts the second one.
RANKS = (
    MODEL
    + """
    if __name__ == "__main__":
        data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)
        store = ckstore.open("store", create=True)
        io = StoreIO(store, "lit")
        for epochs in (1, 2):
            trainer = lightning.Trainer(
                max_epochs=epochs, plugins=[io], strategy="ddp", devices=2,
                callbacks=[ModelCheckpoint("pointers", save_top_k=-1)], **quiet
            )
            trainer.fit(Model(), data, ckpt_path=io.latest)
        if trainer.global_rank == 0:
            assert [row.step for row in store._catalog.versions()] == [2, 4], store._catalog.versions()
            assert len(os.listdir("pointers")) == 2, os.listdir("pointers")
        store.close()
    """
)

#: A training that crashes and is resumed from an earlier version.
CRASH = (
    MODEL
    + """
    from lightning.pytorch import Callback

    class Crash(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 14:
                raise ValueError("crashed")

    data = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4)
    store = ckstore.init("store")

    def train(steps, *callbacks, ckpt_path=None):
        io = StoreIO(store, "lit")
        saving = ModelCheckpoint("pointers", every_n_train_steps=4, save_top_k=-1)
        trainer = lightning.Trainer(max_steps=steps, plugins=[io], callbacks=[saving, *callbacks], **quiet)
        trainer.fit(Model(), data, ckpt_path=ckpt_path)
        return io

    train(20)
    before = {version.number: version["state_dict/layer.weight"][...] for version in store.run("lit")}
    try:
        train(20, Crash(), ckpt_path="ckstore:lit@8")
    except ValueError:
        pass
    rows = store._catalog.versions("lit")
    assert [(row.step, row.superseded) for row in rows] == [
        (4, False), (8, False), (12, True), (16, True), (20, True), (12, False)
    ], rows
    latest = store[StoreIO(store, "lit").latest.removeprefix("ckstore:")]
    run = store.run("lit")
    assert run.steps == run.arrays.attrs["steps"] == [4, 8, 12] and run.latest == latest
    assert (run.arrays["state_dict/layer.weight"][2] == latest["state_dict/layer.weight"][...]).all()
    assert (latest.number, latest.parent) == (rows[-1].number, store["lit@8"].number)
    for number, weight in before.items():
        assert (store[number]["state_dict/layer.weight"][...] == weight).all()
    io = train(20, ckpt_path=StoreIO(store, "lit").latest)
    assert [row.step for row in store._catalog.versions("lit") if not row.superseded] == [4, 8, 12, 16, 20]
    assert store[io.latest.removeprefix("ckstore:")].step == 20 and len(store.versions("lit")) == 8
    assert io.load_checkpoint("pointers/epoch=0-step=16.ckpt")["global_step"] == 16
    store.close()
    """
)


def test_a_crashed_branch_ends_where_its_training_was_resumed(tmp_path: Path) -> None:
    run_with("lightning", CRASH, tmp_path)


@pytest.mark.long
def test_ranks_save_and_resume(tmp_path: Path) -> None:
    run_with("lightning", RANKS, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_trainer_keeps_links_and_resumes_from_pointers(package: str, tmp_path: Path) -> None:
    if package != "lightning" and not os.environ.get("CKSTORE_GUESTS"):
        pytest.skip("the same package under its older name; CKSTORE_GUESTS=1 tries it")
    run_with(package, TRAINING.replace("lightning.pytorch", package) if package != "lightning" else TRAINING, tmp_path)


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    run_with("lightning", FABRIC, tmp_path)


#: A module that gathers gradients; an evaluation chooses the setting.
GRADIENTS = (
    MODEL
    + """
    class Gathering(Model):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(256, 300)
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-2)
        def on_before_optimizer_step(self, optimizer):
            accumulator.after_backward(self.global_step + 1)
        def on_before_zero_grad(self, optimizer):
            accumulator.before_clearing()

    def loss(path):
        return float(torch.load(path, weights_only=True)["state_dict"]["layer.weight"].abs().sum())

    data = DataLoader(TensorDataset(torch.randn(8, 256)), batch_size=4)
    model = Gathering()
    accumulator = ckstore.GradientAccumulator({"state_dict": model}, every=2)
    with ckstore.init("store") as store:
        store.set_policy(ckstore.Policy("coarse", "dynaquant"))
        io = StoreIO(store, "lit", gradients=accumulator, search=ckstore.Search(loss, 0.2))
        saving = ModelCheckpoint("pointers", save_top_k=-1)
        lightning.Trainer(max_epochs=2, plugins=[io], callbacks=[saving], **quiet).fit(model, data, data)
        assert list(accumulator.gradients()) == ["state_dict/layer.weight", "state_dict/layer.bias"]
        for step in (2, 4):
            found = store[f"lit@{step}"]._stored.document.coarse
            assert found.parameters["evaluations"] > 1, found
            assert (store[f"lit@{step}"]["state_dict/layer.weight"][...] == 0).any()
    """
)


def test_a_module_gathers_gradients_for_its_checkpoints(tmp_path: Path) -> None:
    run_with("lightning", GRADIENTS, tmp_path)


#: A training that is resumed twice: as it was saved, and with an empty optimizer.
CHECKED = """
    import logging, warnings
    import lightning.pytorch as lightning, torch
    import ckstore
    from ckstore.integrations.lightning import StoreIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self, forgets=False):
            super().__init__()
            self.layer, self.forgets = torch.nn.Linear(30, 30), forgets

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_load_checkpoint(self, checkpoint):
            for state in checkpoint["optimizer_states"] if self.forgets else ():
                state["state"] = {}

    def train(steps, path=None, forgets=False):
        io = StoreIO(store, run="lit")
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            plugins=[io], callbacks=[io.check_resumed(), ModelCheckpoint("run", "{step}", every_n_train_steps=2)],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Module(forgets), torch.utils.data.DataLoader(torch.randn(64, 30), batch_size=8), ckpt_path=path)
        return [str(one.message) for one in caught if "The training is not as" in str(one.message)]

    store = ckstore.init("store")
    told = []
    logging.getLogger("ckstore").setLevel(logging.INFO)
    logging.getLogger("ckstore").addHandler(logging.Handler())
    logging.getLogger("ckstore").handlers[-1].emit = lambda record: told.append(record.getMessage())
    assert train(2) == [] and not told
    assert train(4, "run/step=2.ckpt") == []
    assert any("Resumed from lit@2: All " in one for one in told), told
    [said] = train(6, "ckstore:lit@latest", forgets=True)
    assert "lit@4" in said and "optimizer_states" in said, said
    """


def test_a_resumed_training_is_compared_with_its_version(tmp_path: Path) -> None:
    run_with("lightning", CHECKED, tmp_path)
