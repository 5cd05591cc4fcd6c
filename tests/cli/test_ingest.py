"""`ckstore ingest`: order, options, partial failures, and input that is refused with the store left as it was."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from ckstore import init as init_store
from ckstore import open as open_store
from ckstore.cli.program import run
from ckstore.commit.naming import set_policy
from ckstore.intake.intake import Intake
from ckstore.policy import Policy
from ckstore.steps import natural
from tests.checkpoints import listing, moving, sha256

from .conftest import checkpoint


def save(path: Path, **changes: object) -> Path:
    torch.save({**checkpoint(0), **changes}, path)
    return path


def test_several_files_go_in_by_step(ckstore, place: Path) -> None:
    save(place / "in" / "aaa.pt", step=15)
    result = ckstore("ingest", *sorted((place / "in").iterdir(), reverse=True), "--run", "gpt", "--json")
    assert [item["step"] for item in result.json] == [0, 10, 15, 20]
    assert [item["version"] for item in result.json] == sorted(item["version"] for item in result.json)
    assert [item["parent"] for item in result.json[1:]] == [item["version"] for item in result.json[:-1]]
    assert result.err == ""


def test_files_without_a_step_go_in_by_name(ckstore, place: Path) -> None:
    for name in ("b", "a"):
        torch.save({"w": torch.full((3,), float(ord(name)))}, place / f"{name}.pt")
    result = ckstore("ingest", "b.pt", "a.pt", "in/step0.pt", "--json").json
    assert [item["source"] for item in result] == ["in/step0.pt", "a.pt", "b.pt"]
    assert [item["step"] for item in result] == [0, None, None]


def test_step_from_selects_the_source_of_steps(ckstore, place: Path) -> None:
    for number in (1, 2, 10):
        torch.save({"w": torch.full((3,), float(number)), "step": 0}, place / f"net_50sims_{number}.pth.tar")
    paths = sorted(place.glob("net_*"))
    table = ckstore("ingest", *paths, "--run", "net", "--dry-run").out.splitlines()
    assert table[0].split() == ["INPUT", "VERSION", "STEP", "FROM", "NOTE"]
    assert table[-1] == "3 versions of 1 run"
    assert [line.split()[1:] for line in table[1:-1]] == [["net@1", "name"], ["net@2", "name"], ["net@10", "name"]]
    assert ckstore("log", "--json").json == []
    assert [item["step"] for item in ckstore("ingest", *paths, "--run", "net", "--json").json] == [1, 2, 10]
    plan = ckstore("ingest", *paths, "--run", "net", "--step-from", "order", "--dry-run", "--json").json
    assert [(item["step"], item["step_from"]) for item in plan] == [(11, "order"), (12, "order"), (13, "order")]
    result = ckstore("ingest", *paths, "--run", "other", "--step-from", "content", code=3)
    assert "--step-from" in result.err
    assert "ingest_many" not in result.err
    assert "version 1 exists" in ckstore("ingest", *paths, "--run", "net", "--dry-run").out
    assert ckstore("ingest", paths[0], "--step", "3", "--step-from", "name", code=2).err.startswith("ckstore: --step ")


def test_a_folder_of_several_checkpoints_says_so(ckstore, place: Path) -> None:
    said = ckstore("ingest", "in", "--run", "folder", code=1).sentence
    assert said == (
        "in holds 3 checkpoints, not one (step0.pt, step10.pt, step20.pt): store each with --recursive, all as one "
        "version with --force, or name them, as in/step*."
    )
    # The preview says the same.
    planned = ckstore("ingest", "in", "--run", "folder", "--dry-run", code=1)
    assert planned.sentence == said
    assert planned.out.splitlines()[-1] == "0 versions of 0 runs"
    shutil.copy("in/step0.pt", "alone.pt")
    for more in ((), ("--dry-run",)):
        assert said in ckstore("ingest", "in", "alone.pt", *more, code=3).err
    assert ckstore("ingest", "in", "--run", "all", "--force", "--json").json[0]["files"] == 3
    assert ckstore("ingest", "in", "--recursive").out.splitlines()[-1].startswith("3 versions")


@pytest.mark.parametrize(
    ("names", "steps", "several"),
    [
        (["s1.pt", "s2.pt", "s10.pt"], [None] * 3, True),
        (["weights.01-1.20.pt", "weights.02-0.90.pt", "weights.03-0.80.pt"], [None] * 3, True),
        (["net_1.pt", "net_2.pt"], [100, 200], True),
        (["net_1.pt", "net_2.pt"], [100, 100], False),
        (["rank0.pt", "rank1.pt"], [None] * 2, False),
        (["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"], [None] * 2, False),
        (["consolidated.00.pth", "consolidated.01.pth"], [None] * 2, False),
        (["s1.pt", "s2.pt", "config.json"], [None] * 3, False),
        (["ema.pt", "raw.pt"], [None] * 2, False),
        (["G1.pth", "G2.pth"], [None] * 2, False),
        (["expert0.pt", "expert1.pt", "expert2.pt"], [None] * 3, False),
        (
            [
                "layer_00-model_00-model_states.pt",
                "layer_01-model_00-model_states.pt",
                "layer_02-model_00-model_states.pt",
            ],
            [None] * 3,
            False,
        ),
        (["base.pt", "d0.pt", "d1.pt", "d2.pt"], [None] * 4, False),
    ],
)
def test_files_of_a_run_are_told_from_parts_of_one_checkpoint(
    ckstore, place: Path, names: list[str], steps: list[int | None], several: bool
) -> None:
    folder = place / "folder"
    folder.mkdir()
    for name, step in zip(names, steps, strict=True):
        facts = {} if step is None else {"step": step}
        torch.save({"w": torch.randn(4), "b": torch.randn(2), **facts}, folder / name)
    for more in (["--dry-run"], []):
        result = ckstore("ingest", "folder", *more, code=int(several))
        if several:
            named = ", ".join(names)
            assert (
                f"folder holds {len(names)} checkpoints, not one ({named}): store each with --recur" in result.sentence
            )
    assert [row["files"] for row in ckstore("log", "--json").json] == ([] if several else [len(names)])
    if several:
        assert ckstore("ingest", "folder", "--recursive").out.splitlines()[-1].startswith(f"{len(names)} versions")


def test_metrics_of_checkpoints_are_read(ckstore, place: Path) -> None:
    save(place / "a.pt", val_loss=2.5, loss=torch.tensor(3.25), lr=0.1, step=1)
    ckstore("ingest", "a.pt", "--metric", "loss=9")
    assert "metric val_loss  2.5  (from a.pt)\n" in ckstore("show", "latest").out
    assert ckstore("metric", "latest", "--json").json == [{"val_loss": 2.5, "loss": 9}]
    # An edited value outlasts another ingest of the file.
    ckstore("metric", "latest", "val_loss=2.75")
    assert ckstore("ingest", "a.pt", "--json").json[0]["metrics"] == {"val_loss": 2.75, "loss": 9}


def test_natural_order() -> None:
    names = ["step10", "step9", "step9b", "9", "a", ""]
    assert sorted(names, key=natural) == ["", "9", "a", "step9", "step9b", "step10"]


def test_lines_and_summary(ckstore, place: Path) -> None:
    lines = ckstore("ingest", "in/step0.pt", "in/step10.pt").out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["main@0 -> version 1", "main@10 -> version 2", "2 versions"]
    assert all(line.endswith("B/s") and "x  " in line for line in lines)
    assert len(ckstore("ingest", "in/step20.pt").out.splitlines()) == 1


def test_a_second_ingest_changes_nothing(ckstore, filled: Path) -> None:
    before = listing(filled / ".ckstore")
    assert ckstore("ingest", "in/step10.pt", "--run", "gpt").out.split("  ")[-1] == "unchanged\n"
    [again] = ckstore("ingest", "in/step10.pt", "--run", "gpt", "--verify", "--json").json
    assert (again["new"], again["version"]) == (False, 2)
    assert listing(filled / ".ckstore") == before


@pytest.mark.parametrize("options", [["weights.pt", "--run", "w"], [".", "--recursive"]], ids=["file", "folder"])
def test_content_without_a_step_is_stored_once_in_a_run(
    ckstore, place: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "w").mkdir()
    monkeypatch.chdir(place / "w")
    torch.save({"w": torch.randn(30)}, "weights.pt")
    for text in ("->", "unchanged", "unchanged"):
        assert text in ckstore("ingest", *options).out
    assert len(ckstore("log", "--json").json) == 1


def test_json_of_a_version(ckstore, place: Path) -> None:
    [item] = ckstore(
        "ingest", "in/step0.pt", "--run", "gpt", "--step", 7, "--tag", "x",
        "--metric", "loss=2.5", "--metric", "n=3", "--metric", "note=good", "--metric", "bad=nan", "--json",
    ).json  # fmt: skip
    assert item.items() >= {
        "version": 1, "run": "gpt", "step": 7, "depth": 0, "base": True, "parent": None, "tags": ["x"], "new": True,
        "bytes": (place / "in" / "step0.pt").stat().st_size, "fidelity": "exact",
        "metrics": {"loss": 2.5, "n": 3, "note": "good", "bad": "NaN"}, "source": "in/step0.pt",
    }.items()  # fmt: skip
    assert item["ratio"] == item["bytes"] / item["stored"]
    assert item["seconds"] > 0


def test_conflict_and_replace(ckstore, filled: Path) -> None:
    save(filled / "other.pt", step=10)
    before = listing(filled / ".ckstore")
    assert "--replace" in ckstore("ingest", "other.pt", "--run", "gpt", code=12).sentence
    assert listing(filled / ".ckstore") == before
    ckstore("ingest", "other.pt", "--run", "gpt", "--replace")
    assert {row["step"]: row["version"] for row in ckstore("log", "--json").json}[10] > 3


def test_parent(ckstore, filled: Path) -> None:
    ckstore("ingest", "in/step20.pt", "in/step0.pt", "--run", "fork", "--parent", "gpt@10")
    rows = [row for row in ckstore("log", "--json").json if row["run"] == "fork"]
    assert [row["parent"] for row in rows] == [2, rows[0]["version"]]
    before = listing(filled / ".ckstore")
    assert "gpt@20" in ckstore("ingest", "in/step0.pt", "--run", "b", "--parent", "gpt@19", code=13).sentence
    assert listing(filled / ".ckstore") == before


def test_the_last_of_several_is_tagged(ckstore, place: Path) -> None:
    ckstore("ingest", "in/step20.pt", "in/step0.pt", "--tag", "end")
    assert ckstore("tag", "--json").json[0]["step"] == 20
    before = listing(place / ".ckstore")
    assert "cannot name a tag: it has @" in ckstore("ingest", "in/step10.pt", "--tag", "a@b", code=2).sentence
    assert listing(place / ".ckstore") == before


@pytest.mark.parametrize("run", ["", "x" * 100_000])
def test_names_that_no_run_has(ckstore, place: Path, run: str) -> None:
    before = listing(place / ".ckstore")
    assert len(ckstore("ingest", "in/step10.pt", "--run", run, code=2).sentence) < 200
    assert len(ckstore("policy", run, "--fidelity", "coarse", code=2).sentence) < 200
    assert listing(place / ".ckstore") == before


def test_some_of_several_fail(ckstore, place: Path) -> None:
    (place / "empty.pt").touch()
    result = ckstore("ingest", "in/step0.pt", "empty.pt", "gone.pt", "in/step10.pt", code=3)
    lines = result.err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("ckstore: ") for line in lines)
    assert "empty.pt" in lines[0]
    assert "gone.pt" in lines[1]
    assert "2 of 4" in lines[2]
    assert [row["step"] for row in ckstore("log", "--json").json] == [0, 10]
    result = ckstore("ingest", "empty.pt", "in/step20.pt", "--json", code=3).json
    assert [item.get("step") for item in result] == [20, None]
    assert result[1].keys() == {"source", "error", "kind", "exit_code"}
    assert (result[1]["kind"], result[1]["exit_code"]) == ("input", 1)


def test_all_of_several_fail(ckstore, filled: Path) -> None:
    (filled / "empty.pt").touch()
    assert len(ckstore("ingest", "empty.pt", "gone.pt", code=1).err.splitlines()) == 2
    save(filled / "step10.pt", step=10)
    save(filled / "step20.pt", step=20)
    ckstore("ingest", "step10.pt", "step20.pt", "--run", "gpt", code=12)


@pytest.mark.parametrize(
    "arguments",
    [
        ["in/step0.pt", "in/step10.pt", "--step", "3"],
        ["in/step0.pt", "--metric", "loss"],
        ["in/step0.pt", "--metric", "=3"],
        ["in/step0.pt", "in/step10.pt", "--metric", "loss=3"],
        [],
    ],
)
def test_calls_that_cannot_be_meant(ckstore, place: Path, arguments: list[str]) -> None:
    assert ckstore("ingest", *arguments, code=2).sentence
    assert ckstore("log", "--json").json == []


def test_sources_are_deleted_when_they_are_proven(ckstore, place: Path) -> None:
    original = (place / "in" / "step0.pt").read_bytes()
    ckstore("ingest", "in/step0.pt", "--verify", "--delete-source")
    assert sorted(os.listdir(place / "in")) == ["step10.pt", "step20.pt"]
    ckstore("checkout", "main@0", "-o", "back.pt")
    assert (place / "back.pt").read_bytes() == original
    ckstore("ingest", "back.pt", "--run", "main", "--verify", "--delete-source")
    assert not (place / "back.pt").exists()
    (place / "link.pt").symlink_to("in/step10.pt")
    assert "link" in ckstore("ingest", "link.pt", "--verify", "--delete-source", code=1).sentence
    assert (place / "in" / "step10.pt").is_file()


def test_a_deleted_directory_keeps_later_files(ckstore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = place / "tree"
    (tree / "sub").mkdir(parents=True)
    shutil.copy(place / "in" / "step0.pt", tree / "sub" / "model.pt")
    (tree / "config.json").write_text("{}")
    (tree / "link").symlink_to("config.json")
    from ckstore.intake import intake

    prove = intake.check_restores

    def late(*arguments: object) -> None:
        prove(*arguments)
        (tree / "late.txt").touch()

    monkeypatch.setattr(intake, "check_restores", late)
    ckstore("ingest", "tree", "--verify", "--delete-source")
    assert [path.name for path in tree.iterdir()] == ["late.txt"]


def test_a_source_that_does_not_come_back_stays(ckstore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(version: object, number: int) -> list[list[bytes]]:
        return [[b"wrong"]]

    monkeypatch.setattr("ckstore.reading.checkout.file_blocks", wrong)
    ckstore("ingest", "in/step0.pt", "--verify", "--delete-source", code=4)
    assert (place / "in" / "step0.pt").is_file()


def test_a_source_that_changes_during_an_ingest_stays(ckstore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckstore.intake import intake

    monkeypatch.setattr(intake, "check_restores", lambda *_: save(place / "in" / "step0.pt", step=1))
    ckstore("ingest", "in/step0.pt", "--verify", "--delete-source", code=1)
    assert (place / "in" / "step0.pt").is_file()


class Planter:
    """Pickles as a call that makes a file."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("planted",)


def lying_safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def damaged(kind: str, good: bytes) -> bytes:
    middle = len(good) // 2
    return {
        "empty.pt": b"",
        "pointer.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "truncated.pt": good[:middle],
        "flipped.pt": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "lying.safetensors": lying_safetensors(),
    }[kind]


@pytest.mark.parametrize("kind", ["empty.pt", "pointer.pt", "truncated.pt", "flipped.pt", "lying.safetensors"])
def test_damaged_input_is_refused(ckstore, filled: Path, kind: str) -> None:
    (filled / kind).write_bytes(damaged(kind, (filled / "in" / "step0.pt").read_bytes()))
    before = listing(filled / ".ckstore")
    assert kind in ckstore("ingest", kind, "--run", "new", code=1).sentence
    assert listing(filled / ".ckstore") == before
    assert [run for run in ckstore("log", "--json").json if run["run"] == "new"] == []


def test_damaged_input_is_stored_as_bytes_when_forced(ckstore, place: Path) -> None:
    data = damaged("flipped.pt", (place / "in" / "step0.pt").read_bytes())
    (place / "flipped.pt").write_bytes(data)
    ckstore("ingest", "flipped.pt", "--force")
    assert ckstore("show", "latest", "--json").json["contents"][0]["kind"] == "opaque"
    ckstore("checkout", "latest", "-o", "same.pt")
    assert (place / "same.pt").read_bytes() == data


def test_odd_files_of_others(ckstore, filled: Path, shared_data: Path) -> None:
    before = listing(filled / ".ckstore")
    files = sorted((shared_data / "odd").iterdir())
    assert files
    for path in files:
        assert path.name in ckstore("ingest", path, "--run", "odd", code=1).sentence
    assert "entry" in ckstore("ingest", shared_data / "odd" / "derived_bitflip_zip.pt", code=1).sentence
    assert listing(filled / ".ckstore") == before


def test_no_code_of_a_pickle_runs(ckstore, place: Path) -> None:
    torch.save({"w": torch.ones(3), "evil": Planter()}, place / "evil.pt")
    torch.save({"w": torch.ones(3), "evil": Planter()}, place / "old.pt", _use_new_zipfile_serialization=False)
    (place / "plain.pkl").write_bytes(pickle.dumps(Planter()))
    assert "not written by torch" in ckstore("ingest", "plain.pkl", code=1).sentence
    ckstore("ingest", "evil.pt", "old.pt", "plain.pkl", "--force")
    ckstore("checkout", "2", "-o", "again.pt")
    assert not (place / "planted").exists()


def test_directories_that_are_refused(ckstore, place: Path) -> None:
    before = listing(place / ".ckstore")
    (place / "nothing").mkdir()
    (place / "nothing" / "notes.txt").write_text("no checkpoint")
    assert "no checkpoint" in ckstore("ingest", "nothing", code=1).sentence
    leading = place / "leading"
    leading.mkdir()
    shutil.copy(place / "in" / "step0.pt", leading)
    (leading / "out").symlink_to("/etc/passwd")
    assert "leads out" in ckstore("ingest", "leading", code=1).sentence
    assert listing(place / ".ckstore") == before


def test_an_unreadable_file_is_one_sentence(ckstore, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "in/step0.pt")

    monkeypatch.setattr("ckstore.intake.intake.Intake.ingest", refused)
    said = ckstore("ingest", "in/step0.pt", code=1).sentence
    assert said.startswith(f"{place}/in/step0.pt cannot be read by ")
    assert said.endswith(" (Permission denied), though its mode allows it; look for access control lists, or a flag.")


def test_names_that_are_not_text(ckstore, place: Path) -> None:
    before = listing(place / ".ckstore")
    name = os.fsdecode(b"\xff.pt")
    shutil.copy(place / "in" / "step0.pt", place / name)
    assert "not UTF-8" in ckstore("ingest", name, code=1).sentence
    assert "not UTF-8" in ckstore("log", name, code=2).sentence
    assert listing(place / ".ckstore") == before


@pytest.mark.parametrize("of_run", [False, True])
def test_sources_are_not_removed_where_the_policy_is_coarse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], of_run: bool
) -> None:
    source = tmp_path / "step1.pt"
    torch.save(moving(1), source)
    place = ["--store", str(tmp_path / "store")]
    assert run(["init", str(tmp_path / "store")]) == 0
    assert run([*place, "policy", "--fidelity", "coarse", *(["gpt"] if of_run else [])]) == 0
    assert run([*place, "ingest", str(source), "--run", "gpt", "--verify", "--delete-source"]) == 2
    assert "--fidelity exact" in capfd.readouterr().err
    assert source.exists()
    with open_store(tmp_path / "store") as store:
        assert store._catalog.versions() == []
    assert (
        run([*place, "ingest", str(source), "--run", "gpt", "--fidelity", "exact", "--verify", "--delete-source"]) == 0
    )
    assert not source.exists()


def test_a_source_stays_where_a_concurrent_policy_is_coarse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "step1.pt"
    torch.save(moving(1), source)
    with init_store(tmp_path / "store"):
        pass
    ingest = Intake.ingest

    def later(self: Intake, *arguments: Any) -> object:
        set_policy(self.repository, Policy("coarse"), None)
        return ingest(self, *arguments)

    monkeypatch.setattr(Intake, "ingest", later)
    assert run(["--store", str(tmp_path / "store"), "ingest", str(source), "--verify", "--delete-source"]) == 2
    assert source.exists()


def test_a_source_of_a_hot_coarse_version_stays(tmp_path: Path) -> None:
    """A hot version that a coarse policy asked for is exact only until it is encoded."""
    source = tmp_path / "step1.pt"
    torch.save(moving(1), source)
    digest = sha256(source)
    place = ["--store", str(tmp_path / "store")]
    for arguments in (
        ["init", str(tmp_path / "store")],
        [*place, "policy", "--fidelity", "coarse"],
        [*place, "ingest", str(source), "--step", "1"],
        [*place, "ingest", str(source), "--step", "1", "--fidelity", "exact", "--verify", "--delete-source"],
        [*place, "encode"],
        [*place, "checkout", "main@1", "--output", str(tmp_path / "out")],
    ):
        assert run(arguments) == 0
    assert not source.exists()
    assert sha256(tmp_path / "out") == digest


def test_the_command_line_takes_the_same_steps_and_prints_the_sentence(ckstore, place: Path) -> None:
    torch.save({"w": torch.zeros(3), "step": 2.5}, place / "a.pt")
    for name in ("ckpt-900.pt", "ckpt-10k.pt", "ckpt-1e5.pt"):
        torch.save({"w": torch.full((3,), float(len(name)))}, place / name)
    assert "step 2.5 in the contents is not used" in ckstore("ingest", "a.pt", "--run", "a").err
    assert ckstore("ingest", "a.pt", "--run", "a", "--step", "10k").out.startswith("a@10000 ->")
    assert "is not a step" in ckstore("ingest", "a.pt", "--step", "2.5", code=2).err
    ckstore("watch", ".", "--run", "w", "--once", "--settle", "0")
    assert {row["step"] for row in ckstore("log", "--run", "w", "--json").json} == {900, 10_000, 100_000, None}
