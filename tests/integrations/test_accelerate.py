"""The state of an Accelerator: saved, loaded, on several ranks, and no directory left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import of_ranks
from tests.integrations.programs import run_with

HEAD = """
    import os, sys, warnings
    import accelerate, torch
    import ckstore
    from ckstore.errors import ConflictError, NotFoundError
    from ckstore.integrations.accelerate import load_state, save_state
    from tests.checkpoints import flip

    def prepared(**options):
        accelerator = accelerate.Accelerator(cpu=True, **options)
        model = torch.nn.Linear(30, 30)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(accelerator, model, optimizer):
        accelerator.backward(model(torch.randn(8, 30)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def weight(accelerator, model):
        return accelerator.unwrap_model(model).weight.detach().clone()
    """

ONE = """
    accelerator, model, optimizer = prepared()
    store = ckstore.init("store")
    assert load_state(accelerator, store, "a/b@latest") is None
    train(accelerator, model, optimizer)
    report = save_state(accelerator, store, run="a/b", step=1, metrics={"loss": 0.5})
    assert (report.version.step, report.version.metrics) == (1, {"loss": 0.5})
    train(accelerator, model, optimizer)
    first = weight(accelerator, model)
    assert load_state(accelerator, store, "a/b@1") == 1
    train(accelerator, model, optimizer)
    assert torch.equal(weight(accelerator, model), first), "the numbers of a generator go on where they were"

    try:
        save_state(accelerator, store, run="a/b", step=1)
    except ConflictError:
        pass
    else:
        raise AssertionError("the step is taken")
    for run in ("a/b", "a/b/ema"):
        kept = save_state(accelerator, store, run=run, step=2).version
        assert load_state(accelerator, store, f"{run}@2") == 2 and kept.run == run
    for step in (3, 4):
        save_state(accelerator, store, run="a/b", step=step)
    before = weight(accelerator, model)
    assert load_state(accelerator, store, "a/b@1") == 1
    for step in (2, 3):
        train(accelerator, model, optimizer)
        train(accelerator, model, optimizer)
        save_state(accelerator, store, run="a/b", step=step)
    rows = store._catalog.versions("a/b")
    assert [(row.step, row.superseded) for row in rows] == [
        (1, False), (2, True), (3, True), (4, True), (2, False), (3, False)
    ], rows
    assert [store[f"a/b@{step}"].parent for step in (2, 3)] == [rows[0].number, rows[4].number]
    assert load_state(accelerator, store, "a/b@latest") == 3
    assert load_state(accelerator, store, str(rows[3].number)) == 4
    assert torch.equal(weight(accelerator, model), before)
    save_state(accelerator, store, run="fork", step=5)
    assert store["fork@5"].parent == rows[3].number and not store["fork@5"].superseded
    save_state(accelerator, store, run="a/b", step=1, replace=True, safe_serialization=False)
    assert "pytorch_model.bin/weight" in store["a/b@1"]
    try:
        load_state(accelerator, store, "a/b@7")
    except NotFoundError:
        pass
    else:
        raise AssertionError("there is no such version")
    assert not set(os.listdir()) - {"store"}
    assert not any(name.startswith("ckstore") for name in os.listdir(os.environ["TMPDIR"]))
    store.close()
    """

NAMED = """
    options = accelerate.utils.ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer = prepared(project_config=options)
    with ckstore.init("store") as store:
        for step in (10, 20, 30):
            train(accelerator, model, optimizer)
            save_state(accelerator, store, run="acc", step=step)
        assert sorted(os.listdir("project/checkpoints")) == ["checkpoint_1", "checkpoint_2"]
        assert [row.step for row in store._catalog.versions("acc")] == [10, 20, 30]
        assert load_state(accelerator, store, "acc@10") == 10
    """

#: A loop that gathers gradients; an evaluation chooses the setting.
GRADIENTS = """
    from safetensors.torch import load_file

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(300, 300)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    accumulator = ckstore.GradientAccumulator({"model.safetensors": accelerator.unwrap_model(model)}, every=2)
    evaluated = []

    def loss(path):
        evaluated.append(path)
        return float(load_file(path / "model.safetensors")["weight"].abs().sum())

    with ckstore.init("store") as store:
        store.set_policy(ckstore.Policy("coarse", "dynaquant"))
        for step in (1, 2):
            accelerator.backward(model(torch.randn(8, 300)).square().mean())
            accumulator.after_backward(step)
            optimizer.step()
            accumulator.before_clearing()
            optimizer.zero_grad()
        save_state(
            accelerator, store, run="acc", step=2, gradients=accumulator.gradients(),
            search=ckstore.Search(loss, 0.2),
        )
        assert store["acc@2"]._stored.document.coarse.parameters["evaluations"] == len(evaluated) - 1 > 1
        assert (store["acc@2"]["model.safetensors/weight"][...] == 0).any()
    """

#: Two ranks of one machine.
RANKS = """
    accelerator, model, optimizer = prepared()
    assert accelerator.num_processes == 2
    torch.manual_seed(accelerator.process_index)
    store = ckstore.open("store", create=True)
    train(accelerator, model, optimizer)
    report = save_state(accelerator, store, run="acc", step=1)
    assert (report is None) == (accelerator.process_index == 1)
    train(accelerator, model, optimizer)
    first = weight(accelerator, model)
    assert load_state(accelerator, store, "acc@latest") == 1
    train(accelerator, model, optimizer)
    assert torch.equal(weight(accelerator, model), first)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = {entry.path for entry in store["acc@1"]._stored.document.files}
        assert {"random_states_0.pkl", "random_states_1.pkl"} <= files
        assert not set(os.listdir()) - {"store"}
        assert not any(name.startswith("ckstore") for name in os.listdir(os.environ["TMPDIR"]))

    save_state(accelerator, store, run="acc", step=2)
    if accelerator.is_main_process:
        flip("store", store["acc@2"]._stored.row.pack, lambda size: size // 2)
    store.close()
    accelerator.wait_for_everyone()
    store = ckstore.open("store", "r")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert load_state(accelerator, store, "acc@latest") == 1, "on each rank"
    told = any("The training resumes from acc@1" in str(warning.message) for warning in said)
    assert told == accelerator.is_local_main_process
    store.close()
    accelerator.end_training()
    """


@pytest.mark.long
def test_a_state_is_saved_and_loaded_and_leaves_no_directory(tmp_path: Path) -> None:
    run_with("accelerate", HEAD + ONE, tmp_path)


def test_directories_that_accelerate_names_stay(tmp_path: Path) -> None:
    run_with("accelerate", HEAD + NAMED, tmp_path)


def test_a_loop_gathers_gradients_for_its_states(tmp_path: Path) -> None:
    run_with("accelerate", HEAD + GRADIENTS, tmp_path)


def test_all_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    run_with("accelerate", HEAD + RANKS, tmp_path, of_ranks(2))


#: A training whose optimizer starts empty.
CHECKED = """
    accelerator, model, optimizer = prepared()
    store = ckstore.init("store")
    train(accelerator, model, optimizer)
    save_state(accelerator, store, run="acc", step=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_state(accelerator, store, "acc@latest")
        assert not [one for one in caught if "The training is not as" in str(one.message)]
        optimizer.optimizer.state.clear()
        optimizer.load_state_dict = lambda state: None
        load_state(accelerator, store, "acc@latest")
    [said] = [str(one.message) for one in caught if "The training is not as" in str(one.message)]
    assert "optimizer.bin" in said, said
    """


def test_an_optimizer_that_starts_empty_is_told(tmp_path: Path) -> None:
    run_with("accelerate", HEAD + CHECKED, tmp_path)
