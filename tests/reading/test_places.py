"""Stores from others: nothing outside of the target is written, whatever their manifests name."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.cli.program import run
from ckstore.errors import IntegrityError
from ckstore.objects.documents import FileEntry
from ckstore.recovery.recover import recover
from tests.checkpoints import described, sha256
from tests.crafted import CraftedStore
from tests.formats.reading import saved

#: Paths that no ingest writes; HERE is the test's own directory, so that an absolute path harms nothing else.
NOWHERE: list[Any] = [
    "../victim", "HERE/victim", "sub/../../victim", "..", ".", "", "sub/", "./sub", "a//b", "a/./b", "nul\0", 3, None,
    "\udcff", "x" * 5000, "sub/" * 2000 + "x",
]  # fmt: skip

#: The sentences about a path, a value that is not text, and text that no JSON has.
PLACE = "The manifest of version 1 names .*, which is not a path inside it; "
NO_TEXT = r"A manifest describes no version \(Expected `str`.* at `\$\.(files|links|directories)"
NO_JSON = r"A manifest cannot be read, .* \(JSON is malformed: invalid utf-16 surrogate pair"

Craft = Callable[..., Path]


def placed(path: Any, here: Path) -> Any:
    return path.replace("HERE", str(here)) if isinstance(path, str) else path


@pytest.fixture
def craft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Craft]:
    """Makes a store whose only version has the given fields, its pack signed as by an ingest."""

    def make(directory: bool, file: dict[str, Any] | None = None, **changes: Any) -> Path:
        source = tmp_path / "source"
        source.mkdir()
        torch.save({"w": torch.ones(3)}, source / "m.pt")

        with ckstore.init(tmp_path / "store") as store:
            store.ingest(source if directory else source / "m.pt")

        def change(document: dict[str, Any]) -> None:
            for name, value in (file or {}).items():
                for entry in document["version"]["files"]:
                    entry[FileEntry.__struct_fields__.index(name)] = value
            document["version"] |= changes

        crafted = CraftedStore(tmp_path / "store")
        crafted.change(crafted.packs()[-1], change)
        shutil.rmtree(source)
        return tmp_path / "store"

    # The file that would be overwritten.
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "target").mkdir()
    yield make
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted({*os.listdir(tmp_path)} - {"store"}) == ["target", "victim"]
    assert os.listdir(tmp_path / "target") == []


def refused(store: Path, target: Path, path: Any = "") -> None:
    """Check that every reader says the same of a path, in one sentence; `verify` too."""
    sentence = NO_JSON if path == "\udcff" else PLACE if isinstance(path, str) else NO_TEXT
    with ckstore.open(store, "r") as opened:
        for force in (True, False):
            with pytest.raises(IntegrityError, match=f"^{sentence}"):
                opened[1].checkout(target, force=force)
        for read in (
            lambda: opened[1].checkout(target / "out.npz", format="npz"),
            lambda: opened[1].state_dict(),
            lambda: list(opened[1]),
        ):
            with pytest.raises(IntegrityError, match=f"^{sentence}"):
                read()
        assert any(re.search(sentence, problem) for problem in opened.verify().problems)


@pytest.mark.parametrize("path", [*NOWHERE, "sub/victim"])
def test_a_single_file_lies_in_the_directory_that_was_named(craft: Craft, tmp_path: Path, path: Any) -> None:
    refused(craft(False, {"path": placed(path, tmp_path)}), tmp_path / "target", path)


@pytest.mark.long
@pytest.mark.parametrize("path", NOWHERE)
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_members_lie_in_their_directory(craft: Craft, tmp_path: Path, kind: str, path: Any) -> None:
    path = placed(path, tmp_path)
    match kind:
        case "file":
            store = craft(True, {"path": path})
        case "link":
            store = craft(True, links=[(path, "m.pt")])
        case _:
            store = craft(True, directories=[(path, 0o755)])
    refused(store, tmp_path / "target", path)


@pytest.mark.parametrize("target", ["", "m\0pt", None, 7])
def test_links_point_to_something(craft: Craft, tmp_path: Path, target: Any) -> None:
    refused(craft(True, links=[("link", target)]), tmp_path / "target", target)


@pytest.mark.parametrize(
    "changes", [{"files": ()}, {"links": [("a", "m.pt")]}, {"directories": [("a", 0o755)]}], ids=["none", "link", "sub"]
)
def test_a_single_file_is_one_and_nothing_else(craft: Craft, tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(craft(False, **changes), tmp_path / "target")


@pytest.mark.parametrize("target", ["HERE/victim", "../victim", "sub/../../victim"])
def test_links_that_lead_out_are_not_left_behind(craft: Craft, tmp_path: Path, target: str) -> None:
    store = craft(True, links=[("link", placed(target, tmp_path))], directories=[("sub", 0o755)])
    with ckstore.open(store, "r") as opened, pytest.raises(IntegrityError, match="points outside the version"):
        opened[1].checkout(tmp_path / "target" / "out")


@pytest.mark.parametrize("directories", [[("m.pt", 0o755)], [("m.pt/sub/deep", 0o755)]])
def test_a_member_is_not_both_a_file_and_a_directory(craft: Craft, tmp_path: Path, directories: list[Any]) -> None:
    store = craft(True, directories=directories, links=[("m.pt/sub/deep/er", "x")])
    with ckstore.open(store, "r") as opened, pytest.raises(IntegrityError, match="two entries"):
        opened[1].checkout(tmp_path / "target" / "out")


def test_the_command_line_refuses_them_in_one_sentence(
    craft: Craft, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = craft(False, {"path": "../victim"})
    assert run(["--store", str(store), "checkout", "1", "-o", str(tmp_path / "target"), "--force"]) == 4
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "names '../victim', which is not a path inside it; restore its pack from a copy that you trust." in said


def test_a_file_with_a_false_digest_is_not_left_behind(craft: Craft, tmp_path: Path) -> None:
    store = craft(False, {"blake3": "0" * 64})
    with ckstore.open(store, "r") as opened, ckstore.init(tmp_path / "target" / "other") as other:
        for read in (
            lambda: opened[1].checkout(tmp_path / "target" / "out.pt"),
            lambda: opened[1].write(io.BytesIO()),
            lambda: opened[1].sha256(),
        ):
            with pytest.raises(IntegrityError, match=r"m\.pt of version 1 differs from the original"):
                read()
        assert len(other.pull(opened, verify=True).failed) == 1
    shutil.rmtree(tmp_path / "target" / "other")


@pytest.mark.parametrize("source", ["/home/..", ".."])
def test_no_name_is_taken_from_a_source_that_has_none(
    craft: Craft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    store = craft(True, source=source)
    CraftedStore(store).sql("UPDATE versions SET source = ?", parameters=(source,))
    monkeypatch.chdir(tmp_path / "target")
    assert run(["--store", str(store), "checkout", "1", "--force"]) == 0
    assert os.listdir() == ["version-1"]
    shutil.rmtree("version-1")


@pytest.mark.local
def test_recover_leaves_out_the_version_and_nothing_else(craft: Craft, tmp_path: Path) -> None:
    store = craft(False, {"path": "../victim"})
    torch.save({"w": torch.full((3,), 2.0)}, tmp_path / "target" / "good.pt")
    digest = sha256(tmp_path / "target" / "good.pt")
    with ckstore.open(store) as opened:
        opened.ingest(tmp_path / "target" / "good.pt", run="other")
    (tmp_path / "target" / "good.pt").unlink()
    (store / "catalog.sqlite").unlink()
    problems = recover(store).problems
    assert any("'../victim', which is not a path inside it" in problem for problem in problems)
    with ckstore.open(store, "r") as opened:
        assert [row.number for row in opened._catalog.versions()] == [2]
        opened[2].checkout(tmp_path / "target")
    assert sha256(tmp_path / "target" / "good.pt") == digest
    (tmp_path / "target" / "good.pt").unlink()


def test_names_that_only_look_strange_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = ["..x", "...", "a\\..\\b", " ", "~", "-o", ".tmp-1-ab", "é\n", "x" * 255]
    (source / "sub..").mkdir(parents=True)
    for name in names:
        (source / "sub.." / name).write_bytes(saved({"w": torch.ones(3)}))
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(ckstore.InputError, match=r"\.tmp-1-ab is unfinished"):
            store.ingest(source)
        store.ingest(source, force=True)
        store.ingest(source / "sub.." / "a\\..\\b", run="single")
    with ckstore.open(tmp_path / "store", "r") as store:
        store[1].checkout(tmp_path / "out")
        assert described(tmp_path / "out") == described(source)
        store[2].checkout(tmp_path / "out")
    assert (tmp_path / "out" / "a\\..\\b").exists()


def test_special_modes_do_not_come_out(craft: Craft, tmp_path: Path) -> None:
    store = craft(True, {"mode": 0o107755}, directories=[("sub", 0o7750)])
    with ckstore.open(store, "r") as opened:
        opened[1].checkout(tmp_path / "target" / "out")
    assert os.stat(tmp_path / "target" / "out" / "m.pt").st_mode & 0o7777 == 0o755
    assert os.stat(tmp_path / "target" / "out" / "sub").st_mode & 0o7777 == 0o750
    shutil.rmtree(tmp_path / "target" / "out")


def test_special_modes_do_not_go_in(tmp_path: Path) -> None:
    (tmp_path / "source" / "sub").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, tmp_path / "source" / "m.pt")
    (tmp_path / "source" / "m.pt").chmod(0o6755)
    (tmp_path / "source" / "sub").chmod(0o3755)
    with ckstore.init(tmp_path / "store") as store:
        assert store.ingest(tmp_path / "source", step=1).is_new
        document = store[1]._stored.document
        assert (document.files[0].mode, document.directories) == (0o755, (("sub", 0o755),))
        assert not store.ingest(tmp_path / "source", step=1).is_new
