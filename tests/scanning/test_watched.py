"""Directories that are watched: complete inputs are told from unfinished ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckstore.errors import InputError
from ckstore.scanning import watched as watched_module
from ckstore.scanning.watched import Watched
from tests.checkpoints import write_safetensors


def save(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(seed).standard_normal((300, 256), np.float32)
    write_safetensors(path, {"w": ("float32", array.shape, array)})
    return path


def look(watched: Watched, now: float) -> list[Path]:
    return [found.path for found in watched.look(now)]


def test_a_complete_directory_is_one_version(tmp_path: Path) -> None:
    watched = Watched([tmp_path], 1.0)
    hub = tmp_path / "checkpoint-5"
    save(hub / "model.safetensors", 1)
    assert look(watched, 0.0) == []
    assert look(watched, 2.0) == []
    (hub / "optimizer.safetensors.tmp").write_bytes(b"half")
    assert look(watched, 4.9) == []
    assert look(watched, 5.0) == []
    assert look(watched, 9.9) == []
    [(path, why)] = watched.abandoned(100.0)
    assert path == hub
    assert why.startswith(f"{hub} is not a complete checkpoint: optimizer.safetensors.tmp is unfinished; ")
    save(hub / "optimizer.safetensors", 2)
    (hub / "optimizer.safetensors.tmp").unlink()
    assert look(watched, 10.0) == []
    assert watched.settling == watched.growing == [hub]
    assert look(watched, 15.0) == [hub]
    assert look(watched, 30.0) == []
    watched.again(hub)
    assert look(watched, 31.0) == [hub]


def test_files_without_tensors_are_passed_over_silently(tmp_path: Path) -> None:
    watched = Watched([tmp_path], 0.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.out").write_bytes(b"\0" * 5000)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "empty").touch()
    look(watched, 0.0)
    assert look(watched, 1.0) == []
    assert [path.name for path, _ in watched.abandoned(100.0)] == ["empty"]


def test_a_directory_of_shards_has_its_metadata_last(tmp_path: Path) -> None:
    watched = Watched([tmp_path], 0.0)
    hub = tmp_path / "step_5"
    save(hub / "model.safetensors", 1)
    (hub / ".gitattributes").write_text("*.bin filter=lfs")
    (hub / "__0_0.distcp").write_bytes(b"shard")
    look(watched, 0.0)
    assert look(watched, 1.0) == []
    [(path, why)] = watched.abandoned(100.0)
    assert path == hub
    assert ".metadata is missing, which is written last" in why
    (hub / ".metadata").write_bytes(b"metadata")
    look(watched, 2.0)
    assert look(watched, 3.0) == [hub]


@pytest.mark.parametrize(
    "name",
    [
        ".hidden.pt", "a.tmp", "a.pt.tmp", "tmp-checkpoint-5", "tmp_5.pt", "a.tmp.pt", "5.orbax-checkpoint-tmp-17",
        "a.part", "a.partial", "a.incomplete", "a.crdownload", "a.pt~", "~a.pt", ".a.pt.swp", "temp-5.pt", "A.TMP",
    ],
)  # fmt: skip
def test_names_of_unfinished_files(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, 1)
    watched = Watched([tmp_path], 0.0)
    look(watched, 0.0)
    assert look(watched, 1.0) == []


@pytest.mark.parametrize("name", ["attempt-5.pt", "template.pt", "temperature_5.pt", "parts.pt", "step5.pt"])
def test_names_that_only_look_like_it(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, 1)
    watched = Watched([tmp_path], 0.0)
    look(watched, 0.0)
    assert look(watched, 1.0) == [path]


def test_a_file_that_is_cut_off_between_two_reads_is_looked_into_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(_: object) -> None:
        raise InputError("it was cut off")

    watched = Watched([tmp_path], settle=0)
    file = tmp_path / "a1.npy"
    np.save(file, np.ones(3))
    watched.look(0)
    with monkeypatch.context() as patched:
        patched.setattr(watched_module, "step_inside", cut)
        assert watched.look(1) == []
    np.save(file, np.ones(5))
    watched.look(2)
    assert [one.path for one in watched.look(3)] == [file]
    file.unlink()
    assert watched.look(4) == []
