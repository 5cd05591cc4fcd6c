"""An old folder of many runs: the proposal, an edited plan, an interruption, and every file accounted for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckstore import Planned
from ckstore import open as open_store
from ckstore.cli.executors import executor_of
from ckstore.errors import LockedError, UsageError
from ckstore.intake.intake import Intake
from tests.checkpoints import write_safetensors
from tests.old_folder import OldFolder
from tests.old_folder import old_folder as make_old_folder

from .conftest import Ckstore


def model(names: list[str], seed: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(40, 30, generator=generator) + 0.001 * seed for name in names}


GPT, NET = [f"h.{layer}.w" for layer in range(4)], [f"conv{layer}.weight" for layer in range(3)]


def old_folder(root: Path) -> dict[str, tuple[str, int | None]]:
    """Make the folder; return the expected run and step of each checkpoint, by path."""
    expected: dict[str, tuple[str, int | None]] = {}

    def save(path: str, content: object, run: str, step: int | None) -> None:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, place)
        expected[path] = (run, step)

    for step in (100, 200, 1000):
        save(f"gpt/step{step}.pt", {"model": model(GPT, step), "step": step}, "gpt", step)
    for number in (1, 2, 10):
        content = {"state": model(NET, number), "epoch": 0}
        save(f"sims/checkpoint_50sims_{number}.pth.tar", content, "sims/sims", number)
        save(f"gan/netG_epoch_4_{number}.pth", model(NET, number), "gan/netG", number)
        save(f"gan/netD_epoch_4_{number}.pth", model(GPT, number), "gan/netD", number)
    # Two models whose names look alike, in one directory.
    save("mixed/model_1.pt", model(GPT, 1), "mixed/model", 1)
    save("mixed/model_2.pt", model(NET, 2), "mixed/model-2", 2)
    save("sims/best.pth.tar", {"state": model(NET, 10), "epoch": 9}, "sims/best", 9)
    for step in (500, 1500):
        place = root / f"hf/output/checkpoint-{step}"
        place.mkdir(parents=True)
        write_safetensors(place / "model.safetensors", {"w": ("float32", (300,), np.full(300, step, np.float32))})
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        torch.save({"a": torch.ones(3)}, place / "optimizer.pt")
        expected[f"hf/output/checkpoint-{step}"] = ("hf/output", step)
    # Other files, and damaged ones.
    (root / "notes.txt").write_text("learning rate 3e-4\n")
    (root / "gpt/log.csv").write_text("step,loss\n100,2.3\n")
    (root / "gpt/step300.pt").write_bytes((root / "gpt/step200.pt").read_bytes()[:2000])
    (root / "empty.pt").touch()
    shutil.copy(root / "gpt/step100.pt", root / "gpt/step0100.pt")
    return expected


LEFT = {"notes.txt", "gpt/log.csv", "gpt/step300.pt", "empty.pt", "gpt/step100.pt"}
REFUSED = {"gpt/step300.pt", "empty.pt"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, int | None]]:
    monkeypatch.chdir(tmp_path)
    expected = old_folder(tmp_path / "old")
    # Of two files of one step the first by name stays.
    expected["gpt/step0100.pt"] = expected.pop("gpt/step100.pt")
    return expected


def digests(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else [root]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_file_is_accounted_for(ckstore: Ckstore, folder: dict[str, tuple[str, int | None]]) -> None:
    ckstore("init")
    proposed = ckstore("ingest", "old", "--recursive", "--dry-run", "--json", code=3).json
    found = {item["path"].removeprefix("old/"): (item["run"], item["step"]) for item in proposed}
    assert {path: at for path, at in found.items() if at[0]} == folder
    assert {path for path, at in found.items() if not at[0]} == LEFT
    assert all(item["note"] for item in proposed if not item["run"])
    assert ckstore("log", "--json").json == []

    result = ckstore("ingest", "old", "--recursive", code=3)
    assert result.out.count("left out: ") == len(LEFT - REFUSED)
    assert all(f"old/{path}" in result.err for path in REFUSED)
    assert f"\n{len(folder)} versions" in result.out
    with open_store(".ckstore", "r") as store:
        stored = {f"{row.run}@{row.step}": store[row.number] for row in store._catalog.versions()}
        assert sorted(stored) == sorted(f"{run}@{step}" for run, step in folder.values())
        for path, (run, step) in folder.items():
            stored[f"{run}@{step}"].checkout(Path("out"))
            assert digests(Path("out")) == digests(Path("old") / path)
            shutil.rmtree("out") if Path("out").is_dir() else Path("out").unlink()
    assert "unchanged" in ckstore("ingest", "old", "--recursive", code=3).out.splitlines()[-1]


@pytest.mark.long
def test_processes_store_the_same_versions(ckstore: Ckstore, folder: dict[str, tuple[str, int | None]]) -> None:
    """Each run by one of them, in the order of its steps; then nothing is left to do."""
    ckstore("init")
    result = ckstore("ingest", "old", "--recursive", "--executor", "processes=2", code=3)
    assert result.out.count("left out: ") == len(LEFT - REFUSED)
    assert f"\n{len(folder)} versions" in result.out
    with open_store(".ckstore", "r") as store:
        stored = {f"{row.run}@{row.step}": store[row.number] for row in store._catalog.versions()}
        assert sorted(stored) == sorted(f"{run}@{step}" for run, step in folder.values())
        for path, (run, step) in folder.items():
            stored[f"{run}@{step}"].checkout(Path("out"))
            assert digests(Path("out")) == digests(Path("old") / path)
            shutil.rmtree("out") if Path("out").is_dir() else Path("out").unlink()
        for run in {run for run, _ in folder.values()}:
            steps = [row.step for row in store._catalog.versions(run) if row.step is not None]
            assert steps == sorted(steps)
        assert store.verify().problems == []
    again = ckstore("ingest", "old", "--recursive", "--executor", "processes=2", "--json", code=3).json
    assert {item["new"] for item in again if "error" not in item} == {False}
    assert len(again) == len(folder) + len(REFUSED)


def test_processes_report_the_failures_of_one(ckstore: Ckstore, tmp_path: Path) -> None:
    for run in ("a", "b"):
        torch.save({"w": torch.arange(900.0)}, tmp_path / f"{run}1.pt")
    (tmp_path / "a2.pt").write_bytes((tmp_path / "a1.pt").read_bytes()[:900])
    plan = [Planned(tmp_path / f"{run}{name}", int(name[0]), run=run) for run, name in
            (("a", "1.pt"), ("a", "2.pt"), ("b", "1.pt"), ("b", "2.absent"))]  # fmt: skip
    ckstore("init", tmp_path / "one")
    ckstore("init", tmp_path / "two")
    with open_store(tmp_path / "one") as store:
        plain = [(item.path, str(item.error)) for item in store.ingest_many(plan)]
    with open_store(tmp_path / "two") as store, executor_of("processes=2") as pool:
        assert [(item.path, str(item.error)) for item in store.ingest_many(plan, executor=pool)] == plain
    assert [why == "None" for _, why in plain] == [True, False, True, False]


def test_an_executor_is_for_several_runs(ckstore: Ckstore, place: Path) -> None:
    assert "give --recursive" in ckstore("ingest", "in/step0.pt", "--executor", "processes=2", code=2).sentence


def test_an_edited_plan_after_an_interruption(ckstore: Ckstore, folder: dict[str, tuple[str, int | None]]) -> None:
    ckstore("init")
    ckstore("ingest", "old/gan/netG_epoch_4_1.pth", "--run", "netG", "--step", 1)  # as far as it came
    with open_store(".ckstore") as store:
        plan = [replace(item, run="netG") for item in store.plan("old/gan", recursive=True) if item.run == "gan/netG"]
        assert [item.is_new for item in store.ingest_many(plan)] == [False, True, True]
    assert sorted(item["step"] for item in ckstore("log", "netG", "--json").json) == [1, 2, 10]


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--recursive"], ["old", "--recursive", "--run", "x"], ["old", "--recursive", "--step", "0"],
        ["--recursive", "--dry-run"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_contradictory_options_are_refused(
    ckstore: Ckstore, folder: dict[str, tuple[str, int | None]], arguments: list[str]
) -> None:
    ckstore("init")
    assert ckstore("ingest", *arguments, code=2).sentence


def save(path: str, step: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.arange(8.0) + step}, path)


def runs_of(proposed: list[dict[str, Any]]) -> dict[str, str]:
    return {item["path"]: item["run"] for item in proposed}


def test_unreadable_paths_are_left_out(ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    save("old/a/step1.pt", 1)
    Path("old/a/loop").symlink_to("loop")
    Path("old/closed").mkdir()
    scan = os.scandir

    def refusing(path: Any = ".") -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    proposed = ckstore("ingest", "old", "--recursive", "--dry-run", "--json", code=3).json
    assert {item["path"]: item["run"] or item["note"] for item in proposed} == {
        "old/a/step1.pt": "a",
        "old/a/loop": "is a link that cannot be followed (Too many levels of symbolic links)",
        "old/closed": "cannot be read (Permission denied); check its permissions",
    }


def test_links_and_pipes_are_accounted_for(ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that a link names elsewhere is not left out without a word, nor one on a disk that is missing."""
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    save("old/a/step1.pt", 1)
    save("elsewhere/checkpoint-5/model.pt", 5)
    Path("elsewhere/checkpoint-5/config.json").write_text("{}")
    Path("old/a/step2.pt").symlink_to("/missing/step2.pt")
    Path("old/a/notes").symlink_to("/missing/notes")
    os.mkfifo("old/a/step3.pt")
    Path("old/a/same").symlink_to("../a")
    Path("old/a/checkpoint-5").symlink_to(Path("elsewhere/checkpoint-5").absolute())
    there = Path("elsewhere/checkpoint-5").absolute()
    proposed = ckstore("ingest", "old", "--recursive", "--dry-run", "--json", code=3)
    assert {item["path"]: item["run"] or item["note"] for item in proposed.json} == {
        "old/a/step1.pt": "a",
        "old/a/step2.pt": "is a link to /missing/step2.pt, which does not exist",
        "old/a/notes": "is a link to /missing/notes, which does not exist",
        "old/a/step3.pt": "is no regular file",
        "old/a/same": "is a link to ../a",
        "old/a/checkpoint-5": f"is a link to {there}; name that directory to store it",
    }
    assert "2 of 3 inputs could not be planned" in proposed.err


def test_a_link_to_a_checkpoint_is_no_run_of_its_own(ckstore: Ckstore, place: Path) -> None:
    (place / "in" / "latest.pt").symlink_to("step20.pt")
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "step30.pt").symlink_to(place / "in" / "step20.pt")
    plan = ckstore("ingest", "in", "elsewhere", "--recursive", "--dry-run", "--json").json
    assert [(item["path"], item["note"]) for item in plan if not item["run"]] == [
        ("in/latest.pt", "is a link to step20.pt")
    ]
    said = ckstore("ingest", "in", "--recursive").out
    assert [row["run"] for row in ckstore("log", "--json").json] == ["in"] * 3
    assert "in/latest.pt left out: is a link to step20.pt\nin@20 is tagged last.\n" in said


def test_a_folder_that_is_one_checkpoint_keeps_its_other_files(ckstore: Ckstore, place: Path) -> None:
    folder = place / "gpt2"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {"w": ("float32", (3,), np.ones(3, "f4"))})
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text('{"model_type": "gpt2"}')
    ckstore("ingest", "gpt2", "--recursive")
    [row] = ckstore("log", "--json").json
    assert (row["run"], row["step"], row["files"]) == ("gpt2", None, 3)


def test_runs_of_several_folders_stay_apart(ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    save("one/gpt/step1.pt", 1)
    save("two/gpt/step2.pt", 2)
    proposed = ckstore("ingest", "one", "two", "two/gpt", "--recursive", "--dry-run", "--json").json
    assert runs_of(proposed) == {"one/gpt/step1.pt": "gpt", "two/gpt/step2.pt": "gpt-2"}
    assert len(proposed) == 2


def test_directories_whose_names_cannot_name_runs(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    long = "/".join(["learning-rate=0.001,batch-size=64,optimizer=adamw,dropout=0.1"] * 5)
    paths = {f"old/{long}/step1.pt", "old/a\nb/step1.pt", "old/z/step1.pt"}
    for number, path in enumerate(sorted(paths)):
        save(path, number)
    done = ckstore("ingest", "old", "--recursive", "--json").json
    found = {item["source"]: item["run"] for item in done}
    assert found.keys() == paths
    assert found["old/a\nb/step1.pt"] == "a-b"
    assert long.endswith(found[f"old/{long}/step1.pt"])


def test_numbers_that_are_no_steps(ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    for number in (1, 2):
        save(f"old/model-2026112212{number}0000000000.pt", number)
    done = ckstore("ingest", "old", "--recursive", "--json").json
    assert [item["step"] for item in done] == [None, None]


def test_invalid_plans_are_refused_before_anything_is_stored(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    save("a.pt", 1)
    plan = [Planned(Path("a.pt"), 1, run="b"), Planned(Path("a.pt"), 1, run="c@d")]
    with open_store(".ckstore") as store, pytest.raises(UsageError, match="cannot name a run"):
        store.ingest_many(plan)
    ckstore("policy", "--fidelity", "coarse")
    sentence = ckstore("ingest", "a.pt", "--run", "b", "--verify", "--delete-source", code=2).sentence
    assert sentence.endswith("The policy of run b is coarse; give --fidelity exact.")
    assert ckstore("log", "--json").json == []
    assert Path("a.pt").exists()


def test_stored_versions_are_reported_where_the_store_fails(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    save("old/step1.pt", 1)
    save("old/step2.pt", 2)
    ingest = Intake.ingest

    def failing(intake: Intake, path: Path, *options: Any) -> Any:
        if path.name == "step2.pt":
            raise LockedError("The store is locked; wait.")
        return ingest(intake, path, *options)

    monkeypatch.setattr(Intake, "ingest", failing)
    result = ckstore("ingest", "old", "--recursive", "--json", code=LockedError.exit_code)
    assert [item["step"] for item in result.json] == [1]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> OldFolder:
    """A folder of about 60 files, or of as many as `CKSTORE_OLD_FOLDER` says, with public ones where there are any."""
    size, data = os.environ.get("CKSTORE_OLD_FOLDER"), os.environ.get("CKSTORE_TEST_DATA")
    return make_old_folder(
        tmp_path_factory.mktemp("mixed") / "old", int(size or 28), Path(data) if size and data else None
    )


@pytest.mark.long
def test_the_proposal_follows_the_owners_intent(
    ckstore: Ckstore, mixed: OldFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs and steps follow the owner's intent, where anything shows it; an interrupted ingest continues."""
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    command = ["ingest", str(mixed.root), "--recursive"]
    found = ckstore(*command, "--dry-run", "--json", code=3).json
    proposed = {str(Path(item["path"]).relative_to(mixed.root)): item for item in found}
    assert proposed.keys() == mixed.runs.keys() | mixed.left
    assert {path for path, item in proposed.items() if not item["run"]} - mixed.meant_otherwise == (
        mixed.left - mixed.flipped
    )
    names: dict[str, set[str]] = {}
    for path in mixed.runs.keys() - mixed.meant_otherwise:
        run, step = mixed.runs[path]
        names.setdefault(run, set()).add(proposed[path]["run"])
        assert step is None or proposed[path]["step"] == step, path
    assert all(len(found) == 1 for found in names.values()), names
    assert len(set.union(*names.values())) == len(names)
    # The mistakes: docs/how-to/old-folder.md lists them.
    for path in mixed.meant_otherwise:
        item, (_, step) = proposed[path], mixed.runs[path]
        assert item["run"] == "" or item["step"] != step, path

    killed_after(command, 5)
    result = ckstore(*command, code=3)
    assert "unchanged)" in result.out
    for path in mixed.flipped:
        assert f"{mixed.root / path}: {Path(path).name} is damaged: entry" in result.err
    stored = {path: item for path, item in proposed.items() if item["run"] and path not in mixed.flipped}
    for path in proposed.keys() - stored.keys() - mixed.flipped:
        assert f"{mixed.root / path} left out: " in result.out or f"ckstore: {mixed.root / path}" in result.err
    with open_store(".ckstore", "r") as store:
        versions = {row.source: store[row.number] for row in store._catalog.versions()}
        assert versions.keys() == {str(mixed.root / path) for path in stored}
        for path, item in stored.items():
            version = versions[str(mixed.root / path)]
            assert version.run == item["run"]
            version.checkout(Path("out"))
            assert digests(Path("out")) == digests(mixed.root / path)
            shutil.rmtree("out") if Path("out").is_dir() else Path("out").unlink()
    with open_store(".ckstore") as store:
        assert store.verify().problems == []


def killed_after(command: list[str], versions: int) -> None:
    """Run the command line in another process, which is killed after some versions."""
    program = [sys.executable, "-m", "ckstore", *command]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for _ in range(versions):
            assert " -> version " in process.stdout.readline()
        process.kill()


def test_real_files_of_others(
    ckstore: Ckstore, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven runs by others in one folder, and files that are damaged."""
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    proposed = ckstore("ingest", shared_data, "--recursive", "--dry-run", "--json", code=3).json
    runs: dict[str, list[int | None]] = {}
    for item in proposed:
        if item["run"]:
            runs.setdefault(item["run"], []).append(item["step"])
    print(json.dumps(runs, indent=1))
    assert runs["espcn"] == sorted(set(runs["espcn"]), key=lambda step: step or 0)
    assert len(runs["espcn"]) == 29
    assert len(runs["opt_lora"]) == 6


def trainer_directory(place: Path, step: int) -> Path:
    """Make a directory as the Trainer does for an adapter."""
    place.mkdir(parents=True)
    array = np.full(300, step, np.float32)
    write_safetensors(place / "adapter_model.safetensors", {"w": ("float32", (300,), array)})
    (place / "adapter_config.json").write_text("{}")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    torch.save({"state": {0: {"exp_avg": torch.ones(300) / step}}}, place / "optimizer.pt")
    torch.save({"cpu": torch.arange(5056, dtype=torch.uint8)}, place / "rng_state.pth")
    return place


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def loose(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.tmp"))


@pytest.mark.parametrize("damage", [cut, empty, loose])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt"])
def test_a_directory_with_a_damaged_file_is_refused_as_a_whole(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    for step in (1, 2, 3):
        trainer_directory(Path(f"old/checkpoint-{step}"), step)
    damage(Path("old/checkpoint-2") / name)
    before = digests(Path("old/checkpoint-2"))
    planned = ckstore("ingest", "old", "--recursive", "--dry-run", code=3)
    assert f"{Path('old/checkpoint-2')}" in planned.out
    done = ckstore("ingest", "old", "--recursive", "--delete-source", code=3)
    assert [line.split()[0] for line in done.out.splitlines()] == ["old@1", "old@3", "2"]
    [why, sentence] = done.err.splitlines()
    assert name in why
    assert "checkpoint-2" in why
    assert sentence == "ckstore: 1 of 3 inputs could not be stored; the others were."
    assert digests(Path("old/checkpoint-2")) == before
    assert [path.name for path in Path("old").iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("name", ["step_5", "job"])
def test_a_job_that_died_while_saving_is_refused_as_a_whole(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    place = Path("old") / name
    place.mkdir(parents=True)
    for number in range(3):
        torch.save({f"w{number}": torch.arange(300.0)}, place / f"shard{number}.pt")
    empty(place / "shard1.pt")
    loose(place / "shard2.pt")
    before = digests(place)
    for command in (["old", "--recursive"], [place]):
        sentence = ckstore("ingest", *command, "--delete-source", code=1).sentence
        assert "shard2.pt.tmp is unfinished, shard1.pt is empty" in sentence
        assert "--force" in sentence
    assert digests(place) == before
    assert ckstore("log", "--json").json == []
    ckstore("ingest", place, "--force")
    ckstore("checkout", "latest", "-o", "back")
    assert digests(Path("back")) == before


def test_checkpoints_that_are_not_stored_come_last(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of each seed; where names do not tell runs apart, the second checkpoint of a step is refused."""
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    for number, seed in enumerate(("a", "b")):
        Path(f"old/zz{seed}").mkdir(parents=True)
        for step in (1000, 2000):
            torch.save({"w": torch.arange(90.0) + step + number}, f"old/zz{seed}/seed{number}_step{step}.pth")
            shutil.copy(f"old/zz{seed}/seed{number}_step{step}.pth", f"old/seed{number}_step{step}.pth")
    for number, name in enumerate(("epoch1-step7", "epoch2-step7", "epoch2-step8")):
        torch.save({"w": torch.arange(90.0) + number}, f"old/zza/{name}.pt")
    shutil.copy("old/zza/epoch2-step8.pt", "old/zza/epoch3-step8.pt")
    for name in ("a.txt", "zzz.txt", "__init__.py"):
        Path(f"old/{name}").write_text("" if name.endswith("py") else "notes")
    Path("old/step3.pt").touch()
    Path("old/step3.pt.gz").write_bytes(b"\x1f\x8b" + bytes(300))
    done = ckstore("ingest", "old", "--recursive", code=3)
    assert {f"{row['run']}@{row['step']}" for row in ckstore("log", "--json").json} == {
        "old/seed0@1000", "old/seed0@2000", "old/seed1@1000", "old/seed1@2000",
        "zza/seed@1000", "zza/seed@2000", "zza/checkpoints@7", "zza/checkpoints@8", "zzb@1000", "zzb@2000",
    }  # fmt: skip
    left = [line.split(" left out: ")[0] for line in done.out.splitlines() if " left out: " in line]
    assert sorted(left) == ["old/__init__.py", "old/a.txt", "old/zza/epoch3-step8.pt", "old/zzz.txt"]
    *refused, sentence = done.err.splitlines()
    assert len(refused) == 3
    assert (
        "epoch2-step7.pt: is at the step of epoch1-step7.pt; store it alone, with another --run or --step" in refused[0]
    )
    assert "old/step3.pt: step3.pt is empty" in refused[1]
    assert "old/step3.pt.gz: holds no tensors: compressed with gzip" in refused[2]
    assert sentence == "ckstore: 3 of 13 inputs could not be stored; the others were."
    errors = [item for item in ckstore("ingest", "old", "--recursive", "--json", code=3).json if "error" in item]
    assert [Path(item["source"]).name for item in errors] == ["epoch2-step7.pt", "step3.pt", "step3.pt.gz"]
    with open_store(".ckstore") as store:
        outcomes = store.ingest_many(store.plan("old", recursive=True))
        assert [item.path.name for item in outcomes if item.error] == ["epoch2-step7.pt", "step3.pt", "step3.pt.gz"]


def test_a_part_of_a_checkpoint_is_not_deleted_alone(
    ckstore: Ckstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that a caller names, nor the last model next to its checkpoints."""
    monkeypatch.chdir(tmp_path)
    ckstore("init")
    place = trainer_directory(Path("hub"), 4)
    for step in (1, 2):
        trainer_directory(place / f"checkpoint-{step}", step)
    before = digests(place)
    said = ckstore("ingest", "hub/optimizer.pt", "--run", "a", "--delete-source", code=1).sentence
    assert said == "hub/optimizer.pt is stored, and was not removed: it is a part of the checkpoint hub."
    ckstore("ingest", "hub", "--recursive", "--delete-source", code=3)
    assert digests(place) == {name: digest for name, digest in before.items() if not name.startswith("checkpoint-")}
    Path("runs").mkdir()
    Path("runs/config.json").write_text("{}")
    for step in (1, 2):
        save(f"runs/step{step}.pt", step)
    ckstore("ingest", "runs/step1.pt", "runs/step2.pt", "--run", "b", "--delete-source")
    assert os.listdir("runs") == ["config.json"]
