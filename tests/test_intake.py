"""Batches, folders and watched directories in Python, and the selection of versions."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore import IngestOptions, InputError, Planned
from tests.checkpoints import write_safetensors


def save(path: Path, value: float, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    torch.save({"w": torch.randn(40, 30, generator=generator) + value, **more}, path)
    return path


def test_files_that_say_the_same_step_are_stored_by_their_names(store: ckstore.Store, tmp_path: Path) -> None:
    paths = [save(tmp_path / f"net_{number}.pt", number, step=0) for number in (10, 2, 1)]
    store.ingest(paths[0], run="loop")
    with pytest.raises(ckstore.ConflictError, match=r"`step_from` \(`ingest_many`\)"):
        store.ingest(paths[1], run="loop")
    seen: list[Path] = []
    done = store.ingest_many(paths, run="net", tag="last", each=lambda item: seen.append(item.path))
    assert [(item.version and item.version.step, item.is_new) for item in done] == [(1, True), (2, True), (10, True)]
    assert seen == [item.path for item in done]
    assert store["last"].step == 10
    assert not store["last"].hot
    by_order = store.ingest_many(paths, run="net", step_from="order")
    assert [item.version and item.version.step for item in by_order] == [11, 12, 13]
    assert [item.note for item in store.plan(paths, run="net")] == [f"version {number} exists" for number in (2, 3, 4)]


def test_an_input_that_fails_does_not_stop_the_others(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "step1.pt").touch()
    done = store.ingest_many([tmp_path / "step1.pt", save(tmp_path / "step2.pt", 2), "gone"])
    assert [(item.version is None, item.error is None) for item in done] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert all(str(item.path) in str(item.error) for item in done[::2])
    with pytest.raises(ckstore.UsageError, match="`step`, `metrics` and `gradients`"):
        store.ingest_many(["a", "b"], IngestOptions(step=3))
    assert store.ingest_many([]) == []


def test_sources_are_deleted_once_they_are_proven(store: ckstore.Store, tmp_path: Path) -> None:
    path = save(tmp_path / "step1.pt", 1)
    with pytest.raises(ckstore.UsageError, match=r"give `policy` exact"):
        store.ingest_many(path, IngestOptions(policy="coarse"), delete_source=True)
    assert path.exists()
    store.ingest_many(path, delete_source=True)
    assert not path.exists()
    assert store.verify().problems == []


def test_a_folder_is_planned_and_stored_by_run(store: ckstore.Store, tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in (1, 2):
            save(tmp_path / "old" / run / f"step{step}.pt", step)
    (tmp_path / "old" / "notes.txt").write_text("lr 3e-4")
    plan = store.plan(tmp_path / "old", recursive=True)
    assert [(item.run, item.step) for item in plan] == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("", None)]
    assert plan[-1].note.startswith("holds no tensors")
    done = store.ingest_many(plan)
    assert [item.is_new for item in done] == [True] * 4
    assert store["b@1"].parent == 1  # The nearest version of another run.
    assert [item.is_new for item in store.ingest_many(plan)] == [False] * 4
    again = store.ingest_many([Planned(tmp_path / "old" / "a" / "step1.pt", 7, run="c")])
    assert again[0].version is not None
    assert again[0].version.parent is not None


def test_a_folder_as_people_have_it(store: ckstore.Store, tmp_path: Path) -> None:
    """Endings, sizes and numbers of models are no steps; a name has metrics; a directory with a step is one version."""
    old = tmp_path / "old"
    names = {
        "best.h5": ("old/best", None), "conv2d.pt": ("old/conv2d", None), "float16.pt": ("old/float16", None),
        "gpt-2.pt": ("old/gpt-2", None), "x.pt2": ("old/x", None), "ckpt_100.pt": ("old/checkpoints", 100),
        "ckpt_200.pt": ("old/checkpoints", 200), "epoch=1-val_acc=0.51.ckpt": ("old/checkpoints-2", 1),
        "epoch=2-val_acc=0.61.ckpt": ("old/checkpoints-2", 2),
        "megatron/iter_0000100/mp_rank_00/model_optim_rng.pt": ("megatron", 100),
        "megatron/iter_0000200/mp_rank_00/model_optim_rng.pt": ("megatron", 200),
        "deepspeed/global_step30/mp_rank_00_model_states.pt": ("deepspeed", 30),
    }  # fmt: skip
    for number, name in enumerate(names):
        save(old / name, number)
    (old / "megatron" / "latest_checkpointed_iteration.txt").write_text("200")
    done = store.ingest_many(store.plan(old, recursive=True))
    found = {(item.version.run, item.version.step) for item in done if item.version is not None}
    assert found == set(names.values())
    assert store["old/checkpoints-2@1"].metrics == {"val_acc": 0.51}
    assert store["best:val_acc"].step == 2
    assert store[2].describe()["metrics_from"] == {}


def test_files_that_mark_a_step_are_tags(store: ckstore.Store, tmp_path: Path) -> None:
    """Links, copies and texts become tags, and a final model is a version of its run; the tags of two runs differ."""
    old = tmp_path / "old"
    for run in ("a", "b"):
        for step in (1, 2, 3):
            save(old / run / f"step{step}.pt", step, step=step)
        shutil.copy(old / run / "step2.pt", old / run / "best.pt")
        (old / run / "latest.pt").symlink_to("step3.pt")
        save(old / "c" / f"step{ord(run)}.pt", 1, step=ord(run))
    save(old / "a" / "model_final.pt", 9, step=4)
    save(old / "c" / "best_seen.pt", 8, step=ord("a"))  # Neither a copy nor at a step of its own.
    for step in (10, 20):
        save(old / "deepspeed" / f"global_step{step}" / "mp_rank_00_model_states.pt", step)
    (old / "deepspeed" / "latest").write_text("global_step20\n")
    (old / "deepspeed" / "zero_to_fp32.py").write_text("import torch\n")
    save(old / "megatron" / "iter_0000100" / "mp_rank_00" / "model.pt", 1)
    (old / "megatron" / "latest_checkpointed_iteration.txt").write_text("100")
    plan = store.plan(old, recursive=True)
    assert {item.path.name: item.note for item in plan if not item.run} == {
        "best.pt": "is a copy of step2.pt", "latest.pt": "is a link to step3.pt", "latest": "names global_step20",
        "latest_checkpointed_iteration.txt": "names iter_0000100",
        "zero_to_fp32.py": "holds no tensors",
    }  # fmt: skip
    store.ingest_many(plan)
    found = {tag: (version.run, version.step) for tag, version in store.tags().items()}
    assert found == {
        "a/best": ("a", 2), "a/last": ("a", 3), "b/best": ("b", 2), "b/last": ("b", 3), "final": ("a", 4),
        "deepspeed/last": ("deepspeed", 20), "megatron/last": ("megatron", 100),
    }  # fmt: skip
    assert [run.name for run in store.runs()] == ["a", "b", "c/checkpoints", "c/best-seen", "deepspeed", "megatron"]
    records = len(store._catalog.log_records())
    store.ingest_many(store.plan(old, recursive=True))
    assert len(store._catalog.log_records()) == records


def test_a_folder_of_one_run_has_plain_tags_unless_another_run_has_them(store: ckstore.Store, tmp_path: Path) -> None:
    save(tmp_path / "one" / "step1.pt", 1)
    (tmp_path / "one" / "best.pt").symlink_to("step1.pt")
    [item, _] = store.plan(tmp_path / "one", recursive=True)
    assert item.tags == ("best",)
    store.ingest({"w": np.zeros(3)}, run="other", step=1)
    store.tag("other", "best")
    [item, _] = store.plan(tmp_path / "one", recursive=True)
    assert item.tags == ("one/best",)


def test_adapters_of_mlx_are_a_run(store: ckstore.Store, tmp_path: Path) -> None:
    place = tmp_path / "adapters"
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    for step in (100, 200, 300):
        values = np.full(300, step, np.float32)
        write_safetensors(place / f"{step:07}_adapters.safetensors", {"w": ("float32", (300,), values)})
    shutil.copy(place / "0000300_adapters.safetensors", place / "adapters.safetensors")
    plan = store.plan(place, recursive=True)
    assert [(item.run, item.step) for item in plan if item.run] == [("adapters", step) for step in (100, 200, 300)]
    assert {item.path.name: item.note for item in plan if not item.run} == {
        "adapters.safetensors": "is a copy of 0000300_adapters.safetensors",
        "adapter_config.json": "holds no tensors",
    }
    with pytest.raises(InputError, match="holds 3 checkpoints, not one"):
        store.ingest(place)


def test_a_snapshot_in_the_cache_of_hugging_face(store: ckstore.Store, tmp_path: Path) -> None:
    """A snapshot is stored with the files to which it links, if it is named itself; other links out are refused."""
    model = tmp_path / "hub" / "models--a--b"
    blobs, snapshot = model / "blobs", model / "snapshots" / ("0a" * 20)
    (snapshot / "onnx").mkdir(parents=True)
    blobs.mkdir()
    write_safetensors(blobs / "e1", {"w": ("float32", (300,), np.ones(300, np.float32))})
    (blobs / "e2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/e1")
    (snapshot / "config.json").symlink_to("../../blobs/e2")
    (snapshot / "onnx" / "config.json").symlink_to("../../../blobs/e2")
    report = store.ingest(snapshot, run="b")
    store[report.version.number].checkout(tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")} == {
        "model.safetensors", "config.json", "onnx/config.json",
    }  # fmt: skip
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (blobs / "e1").read_bytes()
    (tmp_path / "secret").write_text("key")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="leads out of the directory"):
        store.ingest(snapshot, run="c")
    (snapshot / "notes.txt").unlink()
    (snapshot / "sub").symlink_to(blobs)
    with pytest.raises(InputError, match="leads out of the directory"):
        store.ingest(snapshot, run="c")


def test_a_directory_without_tensors_is_stored_on_demand_alone(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "saved_model" / "variables").mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds no checkpoint.*name another"):
        store.ingest(tmp_path / "saved_model", force=True)
    (tmp_path / "saved_model" / "variables" / "variables.index").write_bytes(b"\x00\x01" * 300)
    with pytest.raises(InputError, match=r"holds no checkpoint.*`force` stores their bytes"):
        store.ingest(tmp_path / "saved_model")
    number = store.ingest(tmp_path / "saved_model", force=True).version.number
    store[number].checkout(tmp_path / "again")
    assert (tmp_path / "again" / "variables" / "variables.index").read_bytes() == b"\x00\x01" * 300


def test_content_without_a_step_is_unchanged_in_a_plan_too(store: ckstore.Store, tmp_path: Path) -> None:
    save(tmp_path / "old" / "weights.pt", 1)
    plan = store.plan(tmp_path / "old", recursive=True)
    assert [item.is_new for _ in range(3) for item in store.ingest_many(plan)] == [True, False, False]


def test_a_directory_is_watched(store: ckstore.Store, tmp_path: Path) -> None:
    save(tmp_path / "runs" / "step1.pt", 1)
    (tmp_path / "runs" / "cut.pt").write_bytes((tmp_path / "runs" / "step1.pt").read_bytes()[:-9])
    once = list(store.watch(tmp_path / "runs", run="gpt", settle=0, poll=0.01, once=True))
    assert [item.path.name for item in once] == ["step1.pt", "cut.pt"]
    assert once[1].note.startswith("left: ")
    assert list(store.watch(tmp_path / "runs", run="gpt", settle=0, poll=0.01, once=True))[:-1] == []
    stop = threading.Event()
    save(tmp_path / "runs" / "step2.pt", 2)
    for item in store.watch(tmp_path / "runs", run="gpt", settle=0, poll=0.01, stop=stop):
        if item.version is not None and item.version.step == 2:
            stop.set()
    assert store.run("gpt").steps == [1, 2]


def test_one_convention_selects_versions(store: ckstore.Store, tmp_path: Path) -> None:
    for step in (0, 10, 20, 30):
        store.ingest({"w": torch.randn(300, 256)}, run="r", step=step, hot=0)
    store.ingest({"w": np.zeros(3)}, run="other")
    assert len(store.select()) == 5
    assert [version.step for version in store.select(run="r", keep_last=1, keep_every=20)] == [10]
    for method in (store.select, store.verify, store.map, store.rebase, store.encode, store.forget, store.thin):
        call = (lambda given, run=None: store.map(len, given, run=run)) if method == store.map else method
        call([])
        with pytest.raises(ckstore.UsageError, match="not both"):
            call([1], run="r")
        with pytest.raises(ckstore.NotFoundError):
            call(run="nobody", **({"given": None} if method == store.map else {}))
    assert len(store) == 5
    for method in (store.forget, store.thin):
        with pytest.raises(ckstore.UsageError, match="Name versions"):
            method()
    assert list(store.map(lambda version: version.step, "r@0..r@20")) == [0, 10, 20]
    # The ends of a range may have been forgotten.
    store.forget(["r@0", "r@20"])
    assert [item.version.step for item in store.thin("r@0..r@20").versions] == [10]
    assert [version.number for version in store.select("1..3")] == [2]


def test_parameters_are_named_where_no_command_line_is(store: ckstore.Store) -> None:
    for call in (
        lambda: ckstore.Retention(keep_every=3),
        lambda: store.forget(run="r", keep_last=0),
        lambda: store.ingest_many("x", IngestOptions(policy="coarse"), delete_source=True),
    ):
        with pytest.raises(ckstore.UsageError, match="`") as raised:
            call()
        assert "--" not in str(raised.value)


def test_read_only_and_closed_stores_have_kinds_of_errors(store: ckstore.Store) -> None:
    with ckstore.open(store.place, "r") as reader, pytest.raises(ckstore.ReadOnlyError) as refused:
        reader.ingest_many("x")
    assert refused.value.kind == "read-only"
    reader.close()
    with pytest.raises(ckstore.ClosedError) as closed:
        reader.versions()
    assert (closed.value.kind, closed.value.exit_code) == ("closed", 2)


def test_stores_and_versions_are_mappings(store: ckstore.Store) -> None:
    store.ingest({"w": np.arange(3.0)}, run="r", step=1, metrics={"loss": 2.0})
    store.tag(1, "best")
    assert "best" in store
    assert "worst" not in store
    assert list(store) == [1]
    assert store[1] == store["best"] == store["r@1"]
    version = store[1]
    assert list(dict(version)) == list(version.keys()) == ["w"]
    assert (version.run, version.step, dict(version.metrics)) == ("r", 1, {"loss": 2.0})
    assert store.tags() == {"best": version}
    assert store.run("r").metrics == {"loss": [2.0]}
    with pytest.raises(TypeError, match=r"slice it first"):
        _ = version["w"] + 1


@pytest.mark.parametrize("stores", ["ingest_many", "watch"])
@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (ckstore.Retention(keep_last=1), [1, 2]),
        (ckstore.Retention(exact_last=2), [1]),
        (ckstore.Retention(drop=("*",), whole_last=1), [1, 2]),
        (ckstore.Retention(keep_last=3), []),
    ],
)
def test_sources_stay_whose_versions_the_policy_does_not_keep_whole(
    store: ckstore.Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stores: str,
    retention: ckstore.Retention,
    left: list[int],
) -> None:
    store.set_policy(ckstore.Policy(retention=retention))
    folder = tmp_path / "in"
    paths = [save(folder / f"step{step}.pt", step, large=torch.randn(300, 300)) for step in (1, 2, 3)]
    if stores == "watch":
        done = [*store.watch(folder, delete_source=True, once=True, settle=0)]
    else:
        done = store.ingest_many(paths, delete_source=True)
    assert [item.error for item in done] == [None] * 3
    assert sorted(path.name for path in folder.iterdir()) == [f"step{step}.pt" for step in left]
    assert ["policy of run main" in message for message in caplog.messages if "stays:" in message] == [True] * len(left)
