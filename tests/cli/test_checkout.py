"""`ckstore checkout`: the same bytes, other formats, and refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file

import ckstore as library
from tests.checkpoints import change_pack, draw, flip, packs_of

from .conftest import checkpoint


@pytest.mark.parametrize("step", [0, 10, 20])
def test_the_same_bytes(ckstore, filled: Path, step: int) -> None:
    original = filled / "in" / f"step{step}.pt"
    digest = blake3(original.read_bytes()).hexdigest()
    assert digest in ckstore("checkout", f"gpt@{step}", "-o", "out.pt").out
    assert (filled / "out.pt").read_bytes() == original.read_bytes()
    assert (filled / "out.pt").stat().st_mtime_ns == original.stat().st_mtime_ns


def test_the_default_name(ckstore, filled: Path) -> None:
    ckstore("checkout", "best")
    assert (filled / "step20.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    (filled / "into").mkdir()
    assert "-> into/step20.pt  " in ckstore("checkout", "best", "-o", "into").out
    assert (filled / "into" / "step20.pt").is_file()


def test_several_versions_go_into_a_directory(ckstore, filled: Path) -> None:
    """Each under its own name; files that are there and equal are left alone, others are a conflict."""
    said = ckstore("checkout", "gpt@10..gpt@20", "-o", "out").out
    assert sorted(path.name for path in (filled / "out").iterdir()) == ["step10.pt", "step20.pt"]
    assert "2 versions written, " in said
    before = (filled / "out" / "step10.pt").stat().st_ino
    said = ckstore("checkout", "--run", "gpt", "-o", "out").out
    assert "1 version written, 2 there already, " in said
    assert (filled / "out" / "step10.pt").stat().st_ino == before
    for step in (0, 10, 20):
        assert (filled / "out" / f"step{step}.pt").read_bytes() == (filled / "in" / f"step{step}.pt").read_bytes()
    (filled / "out" / "step10.pt").write_text("mine")
    (filled / "out" / "step0.pt").unlink()
    result = ckstore("checkout", "-o", "out", code=3)
    assert "out/step10.pt exists, and is not version 2; name another directory, or add --force." in result.err
    assert (filled / "out" / "step0.pt").is_file()
    assert (filled / "out" / "step10.pt").read_text() == "mine"
    ckstore("checkout", "-o", "out", "--force")
    assert (filled / "out" / "step10.pt").read_bytes() == (filled / "in" / "step10.pt").read_bytes()


def test_runs_get_directories_and_repeated_names_steps(ckstore, filled: Path) -> None:
    with library.open(".ckstore") as store:
        for step in (1, 2):
            store.ingest({"w": np.full(3, step)}, run="loop", step=step)
        ckstore("checkout", "-o", "out")
        assert sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*.pt")) == [
            "gpt/step0.pt", "gpt/step10.pt", "gpt/step20.pt", "loop/state_dict-1.pt", "loop/state_dict-2.pt",
        ]  # fmt: skip
        paths = store.run("loop").checkout("out/loop")
        assert [path.name for path in paths] == ["state_dict-1.pt", "state_dict-2.pt"]
        paths[0].write_text("mine")
        with pytest.raises(library.ConflictError, match="is not version 4"):
            store.run("loop").checkout("out/loop")


def test_a_name_may_be_that_of_the_directory_of_a_run(ckstore, place: Path) -> None:
    with library.open(".ckstore") as store:
        for run, name in (("a", "b"), ("a/b", "x"), ("a", "x"), ("a/x/y", "b"), ("a/b-1", "z")):
            shutil.copy("in/step0.pt", name)
            store.ingest(name, run=run, step=int(name == "b"))
        (place / "d" / "b").mkdir(parents=True)
        shutil.copy("in/step0.pt", "d/b/m.pt")
        store.ingest(place / "d" / "b", run="a", step=2)
    for said in ("6 versions written", "6 there already"):
        assert said in ckstore("checkout", "-o", "out").out
    assert sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*") if path.is_file()) == [
        "a/b-1-v1", "a/b-1/z", "a/b-2/m.pt", "a/b/x", "a/x-0", "a/x/y/b",
    ]  # fmt: skip


def test_several_versions_do_not_go_into_a_file(ckstore, filled: Path) -> None:
    (filled / "back").write_bytes(b"mine")
    said = ckstore("checkout", "--run", "gpt", "-o", "back", code=12).sentence
    assert "back is a file, and several versions need" in said
    assert (filled / "back").read_bytes() == b"mine"


def test_a_directory_is_compared_whole(ckstore, place: Path) -> None:
    tree = place / "checkpoint-5"
    (tree / "sub").mkdir(parents=True)
    shutil.copy(place / "in" / "step0.pt", tree / "sub" / "model.pt")
    (tree / "link").symlink_to("sub/model.pt")
    ckstore("ingest", "checkpoint-5")
    ckstore("checkout", "-o", "out")
    assert ckstore("checkout", "-o", "out").out == "0 versions written, 1 there already\n"
    (place / "out" / "checkpoint-5" / "more").write_text("mine")
    ckstore("checkout", "-o", "out", code=12)


def test_the_name_of_a_run_says_that_it_is_one_version(ckstore, filled: Path) -> None:
    assert "gpt is its last version, gpt@20; --run gpt writes all 3." in ckstore("checkout", "gpt", "-o", "x.pt").err


@pytest.mark.parametrize("arguments", [[], ["--run", "gpt"], ["1", "2"], ["-o", "-"], ["-o", "out", "--strip"]])
def test_several_versions_need_a_directory_and_no_other_form(ckstore, filled: Path, arguments: list[str]) -> None:
    ckstore("checkout", *arguments, code=2)


def test_nothing_is_overwritten_unless_forced(ckstore, filled: Path) -> None:
    (filled / "step20.pt").write_text("mine")
    assert "--force" in ckstore("checkout", "best", code=12).sentence
    assert (filled / "step20.pt").read_text() == "mine"
    ckstore("checkout", "best", "--force")
    assert (filled / "step20.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()


def test_a_link_is_not_written_through(ckstore, filled: Path) -> None:
    (filled / "mine").write_text("mine")
    (filled / "step20.pt").symlink_to("mine")
    ckstore("checkout", "best", code=12)
    ckstore("checkout", "best", "--force")
    assert (filled / "mine").read_text() == "mine"
    assert not (filled / "step20.pt").is_symlink()


def test_a_directory(ckstore, place: Path) -> None:
    tree = place / "checkpoint-5"
    (tree / "sub").mkdir(parents=True)
    shutil.copy(place / "in" / "step0.pt", tree / "sub" / "model.pt")
    (tree / "config.json").write_text("{}")
    (tree / "link").symlink_to("config.json")
    ckstore("ingest", "checkpoint-5")
    shutil.move(tree, place / "original")
    assert "2 files" in ckstore("checkout", "main@0").out
    assert (tree / "sub" / "model.pt").read_bytes() == (place / "in" / "step0.pt").read_bytes()
    assert os.readlink(tree / "link") == "config.json"
    ckstore("checkout", "main@0", code=12)
    assert "directory" in ckstore("checkout", "main@0", "-o", "-", code=2).sentence


def test_stdout(filled: Path) -> None:
    command = [sys.executable, "-m", "ckstore", "checkout", "best", "-o", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == (filled / "in" / "step20.pt").read_bytes()
    assert done.stderr.decode() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a file of a full disk, is Linux's")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", [["log"], ["checkout", "best", "-o", "-"]])
def test_a_full_disk_behind_stdout(filled: Path, verb: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckstore", *verb], stdout=full, stderr=subprocess.PIPE, env=environment, check=False
        )
    assert (done.returncode, done.stderr.decode()) == (
        16,
        "ckstore: No space for the output; free some and try again.\n",
    )


def test_the_ending_of_the_target_is_what_is_written(ckstore, filled: Path) -> None:
    with library.open() as store:
        expected = {path: store["best"][path][...] for path in store["best"]}
    ckstore("checkout", "best", "-o", "all.safetensors")
    assert load_file("all.safetensors").keys() == expected.keys()
    ckstore("checkout", "best", "-o", "all.NPZ")
    with np.load("all.NPZ") as arrays:
        assert arrays.keys() == expected.keys()
        assert all(np.array_equal(arrays[path], values) for path, values in expected.items())
    for name in ("again.pth", "again", "again.x"):
        ckstore("checkout", "best", "-o", name)
        assert Path(name).read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    ckstore("ingest", "all.safetensors", "--run", "flat")
    ckstore("checkout", "flat", "-o", "flat.safetensors")
    assert Path("flat.safetensors").read_bytes() == Path("all.safetensors").read_bytes()
    ckstore("checkout", "flat", "-o", "flat.pt")
    assert torch.load("flat.pt", weights_only=True).keys() == expected.keys()
    assert ".safetensors" in ckstore("checkout", "flat", "-o", "flat.gguf", code=2).sentence
    assert not Path("flat.gguf").exists()
    ckstore("checkout", "flat", "-o", "flat.gguf", "--format", "original")
    assert Path("flat.gguf").read_bytes() == Path("all.safetensors").read_bytes()
    Path("hf").mkdir()
    shutil.copy("all.safetensors", "hf/model.safetensors")
    Path("hf/config.json").write_text("{}")
    ckstore("ingest", "hf", "--run", "hf")
    ckstore("checkout", "hf", "-o", "model.safetensors")
    assert len(load_file("model.safetensors")) == len(expected)


def test_the_ending_selects_the_format_and_stderr_names_omitted_tensors(ckstore, filled: Path) -> None:
    result = ckstore("checkout", "best", "-o", "model.safetensors", "--include", "model/*", "--strip")
    assert result.sentence == "Left out 1 of 6 tensors: order/[0]"
    from safetensors.torch import load_file

    found, expected = load_file(filled / "model.safetensors"), checkpoint(20)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    result = ckstore("checkout", "best", "-o", "order.pth", "--include", "order", "--strip")
    assert result.sentence == "Left out 5 of 6 tensors: model/weight, model/frozen, model/bias, …"
    assert torch.equal(torch.load(filled / "order.pth", weights_only=True)[0], torch.arange(5))
    assert ckstore("checkout", "best", "-o", "all.npz", "--format", "npz").err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "w.pt", "--strip"], 2, "2 subtrees (model, order), and --strip takes one"),
        (["-o", "w.tar", "--include", "model/*"], 2, "or let the target's name end with one of these"),
        (["-o", "w", "--strip"], 2, "--strip changes the names of tensors"),
        (["-o", "w.pt", "--strip", "--format", "original"], 2, "--strip changes the names of tensors"),
        (["-o", "w.pt", "--format", "original", "--include", "model/*"], 2, "choose tensors of a file"),
        (["-o", "w.pt", "--include", "nothing"], 13, "No tensor of version 3 is chosen"),
        (["-o", "-", "--strip"], 2, "name one with -o"),
        (["-o", "-", "--include", "model/*"], 2, "--include and --exclude choose tensors, which need a file"),
        (["-o", "-", "--exclude", "nothing"], 2, "--include and --exclude choose tensors, which need a file"),
    ],
)
def test_refusals_to_strip_are_one_sentence(ckstore, filled: Path, arguments: list[str], code: int, words) -> None:
    before = sorted(filled.iterdir())
    assert words in ckstore("checkout", "best", *arguments, code=code).sentence
    assert sorted(filled.iterdir()) == before


@pytest.fixture
def folder(ckstore, place: Path) -> Path:
    """A stored directory of five files and two links, as it was."""
    tree = place / "checkpoint-5"
    (tree / "sub" / "empty").mkdir(parents=True)
    shutil.copy(place / "in" / "step0.pt", tree / "sub" / "model.pt")
    shutil.copy(place / "in" / "step10.pt", tree / "ema [1].pt")
    for name in ("config.json", "a.txt", "sub/b.txt"):
        (tree / name).write_text(name)
    (tree / "latest.pt").symlink_to("sub/model.pt")
    (tree / "aside").symlink_to("a.txt")
    (tree / "sub").chmod(0o750)
    ckstore("ingest", "checkpoint-5", "--run", "hf", "--step", 5)
    return tree


def files_of(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        (["--include", "*.pt"], {"sub/model.pt", "ema [1].pt", "latest.pt"}),
        (["--include", "ema [1].pt"], {"ema [1].pt"}),
        (["--include", "sub"], {"sub/model.pt", "sub/b.txt"}),
        (["--include", "*.txt", "--exclude", "sub/*"], {"a.txt"}),
        (["--include", "latest.pt"], {"latest.pt", "sub/model.pt"}),
        (["--exclude", "*.pt", "--exclude", "a*"], {"config.json", "sub/b.txt"}),
    ],
    ids=lambda words: " ".join(sorted(words)),
)
def test_some_files_of_a_directory(ckstore, folder: Path, globs: list[str], names: set[str]) -> None:
    result = ckstore("checkout", "hf", "-o", "some", *globs)
    some = folder.parent / "some"
    found, whole = files_of(some), files_of(folder)
    assert found == {name: whole[name] for name in names}
    for name in names:
        assert (some / name).lstat().st_mtime_ns == (folder / name).lstat().st_mtime_ns or (folder / name).is_symlink()
        assert (some / name).is_symlink() == (folder / name).is_symlink()
    assert (some / "sub").exists() == any(name.startswith("sub/") for name in names)
    if (some / "sub").exists():
        assert (some / "sub").stat().st_mode == (folder / "sub").stat().st_mode
    missing = sorted(set(whole) - names)
    assert result.sentence.startswith(f"Left out {len(missing)} of 7 files: ")
    assert missing[0] in result.sentence or len(missing) > 3


def test_files_that_are_not_there(ckstore, folder: Path) -> None:
    sentence = ckstore("checkout", "hf", "-o", "some", "--include", "*.bin", code=13).sentence
    assert sentence.startswith("No file of version 1 is chosen; it holds a.txt, ")
    assert not (folder.parent / "some").exists()
    assert "it matches 2" in ckstore("checkout", "hf@5", "-o", "-", "--include", "*.txt", code=2).sentence
    assert "Left out" not in ckstore("checkout", "hf", "-o", "whole").err
    assert files_of(folder.parent / "whole") == files_of(folder)


def test_one_file_of_a_directory_goes_to_stdout(folder: Path) -> None:
    command = [sys.executable, "-m", "ckstore", "checkout", "hf@5", "-o", "-", "--include", "ema*"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=folder.parent)
    assert done.stdout == (folder / "ema [1].pt").read_bytes()


def test_tensors_of_a_directory(ckstore, folder: Path) -> None:
    result = ckstore("checkout", "hf@5", "-o", "w.safetensors", "--include", "ema*/model/*", "--strip")
    assert "Left out 6 of 10 tensors" in result.sentence
    from safetensors.torch import load_file

    assert load_file(folder.parent / "w.safetensors").keys() == checkpoint(10)["model"].keys()
    ckstore("checkout", "hf@5", "-o", "model.safetensors", "--include", "sub/model.pt/*")
    ckstore("checkout", "hf@5", "-o", "all.safetensors", "--exclude", "*.json")
    found = {name: set(load_file(folder.parent / f"{name}.safetensors")) for name in ("model", "all")}
    assert found["model"] == {name for name in found["all"] if name.startswith("sub/model.pt/")}
    assert len(found["all"]) == 10


@pytest.mark.parametrize(
    "arguments",
    [
        ["--include", "model/*"],
        ["--exclude", "x"],
        ["--format", "tar"],
        ["--format", "npz", "-o", "-"],
        ["-o", "no/dir"],
    ],
)
def test_calls_that_cannot_be_meant(ckstore, filled: Path, arguments: list[str]) -> None:
    before = sorted(filled.iterdir())
    assert ckstore("checkout", "best", *arguments, code=2).sentence
    assert sorted(filled.iterdir()) == before


@pytest.mark.parametrize(("name", "near"), [("bset", "best"), ("gpt@11", "gpt@10"), ("gtp", "gpt"), ("99", "log")])
def test_near_matches(ckstore, filled: Path, name: str, near: str) -> None:
    assert near in ckstore("checkout", name, code=13).sentence


def test_require_exact(ckstore, filled: Path) -> None:
    ckstore("checkout", "best", "--require-exact", "-o", "exact.pt")
    with library.open(filled / ".ckstore") as store:
        store.ingest({"weight": draw(300, 300)}, run="coarse", policy="coarse", hot=0)
    assert "no exact values" in ckstore("checkout", "coarse", "--require-exact", "-o", "coarse.pt", code=4).sentence
    assert not (filled / "coarse.pt").exists()


def test_a_damaged_pack(ckstore, filled: Path) -> None:
    for pack in packs_of(filled / ".ckstore"):
        data = bytearray(change_pack(filled / ".ckstore", pack, None))
        data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
        change_pack(filled / ".ckstore", pack, bytes(data))
    ckstore("checkout", "best", "-o", "out.pt", code=4)
    assert not (filled / "out.pt").exists()
    assert [path for path in filled.iterdir() if path.name.startswith(".tmp")] == []


@pytest.mark.parametrize("target", ["/proc/out.pt", "x" * 300, "/dev/null/out.pt", "in/step0.pt/out.pt"])
@pytest.mark.parametrize("options", [[], ["--format", "npz"]], ids=["original", "npz"])
def test_an_impossible_place_is_one_sentence(ckstore, filled: Path, target: str, options: list[str]) -> None:
    sentence = ckstore("checkout", "best", "-o", target, *options, code=2).sentence
    assert "choose another path" in sentence or "create it first" in sentence


def test_salvage(ckstore, filled: Path) -> None:
    """Intact parts are written, damaged ones are named, and the exit code reports the loss."""
    ckstore("checkout", "best", "-o", "whole.pt", "--salvage")
    assert (filled / "whole.pt").read_bytes() == (filled / "in" / "step20.pt").read_bytes()
    with library.open(filled / ".ckstore", "r") as store:
        version = store["best"]._stored
        objects = {name: version.document.objects[unit] for unit in range(len(version.layout.units))
                   for name in version.contents.names(unit)}  # fmt: skip
        lost = [store._repository.resolver.record(objects[f"model/{name}"]) for name in ("weight", "frozen")]
    for record in lost:
        flip(filled / ".ckstore", record.pack, lambda _, record=record: record.offset + record.nbytes // 2)
    result = ckstore("checkout", "best", "-o", "out.pt", "--salvage", code=4)
    assert "0 whole files, " in result.out
    said = [line for line in result.err.splitlines() if " is lost: " in line]
    assert any(line.startswith("ckstore: step20.pt is lost: ") for line in said)
    assert any(line.startswith("ckstore: model/weight is lost: ") for line in said)
    assert result.err.splitlines()[-1].startswith("ckstore: Of version 3 1 file and 2 tensors are not whole; ")
    assert not (filled / "out.pt").exists()
    found = torch.load(filled / "out.pt.salvaged.pt", weights_only=True)
    assert torch.equal(found["model"]["bias"], checkpoint(20)["model"]["bias"])
    assert "weight" not in found["model"]


@pytest.mark.parametrize("option", [("--include", "model/*"), ("--format", "npz"), ("--strip",), ("-o", "-")])
def test_salvage_takes_no_choice(ckstore, filled: Path, option: tuple[str, ...]) -> None:
    assert "--salvage writes all intact parts" in ckstore("checkout", "best", "--salvage", *option, code=2).sentence


def test_a_damaged_version_names_the_newest_sound_one(ckstore, filled: Path) -> None:
    """Its own pack is damaged; then that of the version before it, too."""
    ckstore("ingest", "in/step20.pt", "--run", "other", "--step", "5")
    for damaged, sound in [(3, "gpt@10"), (2, "gpt@0")]:
        with library.open(".ckstore", "r") as store:
            pack = store[damaged]._stored.row.pack
        flip(filled / ".ckstore", pack, lambda size: size // 2)
        said = ckstore("checkout", "gpt", "-o", "out.pt", code=4).sentence
        assert said.endswith(f" The newest sound version before it is {sound}; --fallback writes it."), said
        assert not (filled / "out.pt").exists()
        done = ckstore("checkout", "gpt", "-o", "out.pt", "--fallback")
        assert done.out.startswith(f"{sound} (version ")
        assert done.sentence.endswith(f" The newest sound version before it is {sound}.")
        assert (filled / "out.pt").read_bytes() == (filled / "in" / f"step{sound[4:]}.pt").read_bytes()
        (filled / "out.pt").unlink()
    with library.open(".ckstore", "r") as store:
        flip(filled / ".ckstore", store[1]._stored.row.pack, lambda size: size // 2)
    for options in ([], ["--fallback"]):
        assert "sound" not in ckstore("checkout", "gpt", "-o", "out.pt", *options, code=4).sentence
    assert "stdout may have taken" in ckstore("checkout", "gpt", "-o", "-", "--fallback", code=2).sentence
    ckstore("checkout", "gpt", "--salvage", "--fallback", code=2)
