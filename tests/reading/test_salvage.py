"""Salvage of versions whose packs were damaged or lost, and the report on the rest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckstore
from ckstore.errors import ConflictError, IntegrityError
from ckstore.reading.salvage import SUFFIX
from tests.checkpoints import change_pack, flip, scratch

pytestmark = pytest.mark.encoded

#: Large tensors, an object each, and small ones, which share a bundle.
LARGE = ("a", "b", "c")


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    model = {name: torch.randn(300, 256, generator=generator) for name in LARGE}
    model |= {f"bias{number}": torch.randn(50, generator=generator) for number in range(3)}
    model["empty"] = torch.empty(0, 3)
    return {"model": {name: value + step * 1e-3 for name, value in model.items()}, "step": step}


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """Three versions of a file, then one of a directory with a link and a file that holds no tensors."""
    with scratch() as directory:
        with ckstore.init(directory / "store") as store:
            for step in range(3):
                torch.save(state(step), directory / "x.pt")
                store.ingest(directory / "x.pt", run="a", step=step)
            tree = directory / "tree"
            (tree / "sub").mkdir(parents=True)
            torch.save(state(7), tree / "sub" / "m.pt")
            save_file({"w": torch.randn(300, 256), "v": torch.randn(300, 256)}, tree / "n.safetensors")
            (tree / "notes").write_bytes(bytes(range(256)) * 400)
            (tree / "link").symlink_to("notes")
            store.ingest(tree, run="b", step=0)
        yield directory


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "store", tmp_path / "store"))


def places(path: Path, spec: str, tensor: str) -> list[tuple[str, int, int]]:
    """Return (pack, first byte, bytes) of the objects of a version's tensor or file, without their bases."""
    with ckstore.open(path, "r") as store:
        version = store[spec]._stored
        numbers = [unit for unit in range(len(version.layout.units)) if tensor in version.contents.names(unit)]
        records = [store._repository.resolver.record(version.document.objects[number]) for number in numbers]
        return [(record.pack, record.offset, record.nbytes) for record in records if record.nbytes]


def flip_in(path: Path, spec: str, tensor: str) -> None:
    """Flip a bit in the middle of a tensor's object."""
    [(pack, offset, length)] = places(path, spec, tensor)
    flip(path, pack, lambda _: offset + length // 2)


def test_salvage_writes_all_of_an_intact_version(path: Path, made: Path, tmp_path: Path) -> None:
    with ckstore.open(path, "r") as store:
        report = store["a@2"].salvage(tmp_path / "out.pt")
        assert (tmp_path / "out.pt").read_bytes() == (made / "x.pt").read_bytes()
        assert (report.files, report.tensors, report.lost_files, report.lost_tensors) == (["x.pt"], {}, {}, {})
        store["b@0"].salvage(tmp_path / "tree")
        assert (tmp_path / "tree" / "sub" / "m.pt").read_bytes() == (made / "tree" / "sub" / "m.pt").read_bytes()


def test_a_flipped_bit_takes_one_tensor(path: Path, tmp_path: Path) -> None:
    flip_in(path, "a@1", "model/b")
    with ckstore.open(path, "r") as store:
        report = store["a@1"].salvage(tmp_path / "out.pt")
        assert list(report.lost_files) == ["x.pt"]
        assert list(report.lost_tensors) == ["model/b"]
        assert not (tmp_path / "out.pt").exists(), "nobody takes a part for the whole"
        found = torch.load(tmp_path / f"out.pt{SUFFIX}", weights_only=True)
        expected = state(1)
        del expected["model"]["b"]
        assert found["step"] == 1
        assert list(found["model"]) == list(expected["model"])
        assert all(torch.equal(value, expected["model"][name]) for name, value in found["model"].items())
        assert report.tensors == {"x.pt": [f"model/{name}" for name in expected["model"]]}
        with pytest.raises(ConflictError):
            store["a@1"].salvage(tmp_path / "out.pt")
        store["a@1"].salvage(tmp_path / "out.pt", force=True)
        (tmp_path / "into").mkdir()
        store["a@1"].salvage(tmp_path / "into")
        assert (tmp_path / "into" / f"x.pt{SUFFIX}").exists()


def test_reads_name_damaged_tensors_and_read_all_others(path: Path) -> None:
    flip_in(path, "a@0", "model/b")
    with ckstore.open(path, "r") as store:
        for version in (store["a@0"], store["a@2"]):
            named = rf"Version {version.number}: model/b cannot be read: "
            for read in (version["model/b"].numpy, version.state_dict):
                with pytest.raises(IntegrityError, match=named):
                    read()
            step = version.step or 0
            assert torch.equal(version["model/c"].torch(), state(step)["model"]["c"])


def test_a_lost_pack_takes_only_its_objects(path: Path, tmp_path: Path) -> None:
    """Objects in other packs are read, though their places are looked up together with the lost ones."""
    torch.manual_seed(3)
    changed = state(2)
    changed["model"]["b"] = torch.randn(300, 256)
    with ckstore.open(path) as store:
        store.ingest({"b": changed["model"]["b"]}, run="other", step=3)
        store.ingest(changed, run="a", step=3)
        [(pack, *_)] = places(path, "a@3", "model/b")
        assert pack == store["other@3"]._stored.row.pack
    change_pack(path, pack, None)
    with ckstore.open(path, "r") as store:
        report = store["a@3"].salvage(tmp_path / "out.pt")
        assert list(report.lost_tensors) == ["model/b"]
        found = torch.load(tmp_path / f"out.pt{SUFFIX}", weights_only=True)
        assert torch.equal(found["model"]["a"], changed["model"]["a"])
        assert store["a@2"].salvage(tmp_path / "before.pt").lost_files == {}
    with ckstore.open(path) as store:
        again = store.ingest(state(4), run="a", step=4).version
        assert torch.equal(store[again.number]["model/b"].torch(), state(4)["model"]["b"]), "a run goes on"


def test_salvage_writes_intact_files_of_a_directory(path: Path, made: Path, tmp_path: Path) -> None:
    flip_in(path, "b@0", "n.safetensors/w")
    with ckstore.open(path, "r") as store:
        report = store["b@0"].salvage(tmp_path / "out")
    assert sorted(report.files) == ["notes", "sub/m.pt"]
    assert list(report.lost_files) == ["n.safetensors"]
    assert list(report.lost_tensors) == ["n.safetensors/w"]
    assert (tmp_path / "out" / "sub" / "m.pt").read_bytes() == (made / "tree" / "sub" / "m.pt").read_bytes()
    assert (tmp_path / "out" / "link").read_bytes() == (made / "tree" / "notes").read_bytes()
    names = sorted(str(place.relative_to(tmp_path / "out")) for place in (tmp_path / "out").rglob("*"))
    assert names == ["link", f"n.safetensors{SUFFIX}", "notes", "sub", "sub/m.pt"]


def test_a_lost_skeleton_leaves_tensors_by_path(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckstore.reading.stored_version import StoredVersion

    with ckstore.open(path, "r") as store:
        ref = store["b@0"]._stored.document.files
        numbers = {entry.path: number for number, entry in enumerate(ref)}
        whole = StoredVersion.skeleton

        def skeleton(version: StoredVersion, file: int) -> bytes:
            if file == numbers["sub/m.pt"]:
                raise IntegrityError("The blob is damaged.")
            return whole(version, file)

        monkeypatch.setattr(StoredVersion, "skeleton", skeleton)
        report = store["b@0"].salvage(tmp_path / "out")
        assert list(report.lost_files) == ["sub/m.pt"]
        assert report.lost_tensors == {}
        found = torch.load(tmp_path / "out" / "sub" / f"m.pt{SUFFIX}", weights_only=True)
        assert torch.equal(found["sub/m.pt/model/c"], state(7)["model"]["c"])
        problems = store.verify(["b@0"]).problems
        assert problems == ["sub/m.pt of version 4: The blob is damaged."]


def test_salvage_writes_nothing_without_intact_parts(path: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(300, 256)}, tmp_path / "one.pt")
    with ckstore.open(path) as store:
        store.ingest(tmp_path / "one.pt", run="one", step=0)
    flip_in(path, "one@0", "w")
    with ckstore.open(path, "r") as store, pytest.raises(IntegrityError, match="No part of version 5 is intact: "):
        store["one@0"].salvage(tmp_path / "out.pt")
    assert {place.name for place in tmp_path.iterdir()} - {"store"} == {"one.pt"}


def test_verify_names_versions_tensors_and_files(path: Path) -> None:
    flip_in(path, "a@0", "model/b")
    flip_in(path, "b@0", "notes")
    with ckstore.open(path, "r") as store:
        report = store.verify()
        concerned = [problem for problem in report.problems if problem.startswith("model/b of versions 1, 2, 3: ")]
        assert len(concerned) == 1, report.problems
        assert any(problem.startswith("notes of version 4: ") for problem in report.problems)
        assert report.damaged == {1: ["model/b"], 2: ["model/b"], 3: ["model/b"], 4: ["notes"]}
        assert store.verify(["a@2"]).damaged == {3: ["model/b"]}
