"""Directories: listing, refusals, and detection of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckstore.errors import InputError
from ckstore.formats.directory import has_checkpoint, require_checkpoint, scan
from tests.formats.reading import saved


def test_scan(tmp_path: Path) -> None:
    (tmp_path / "b" / "empty").mkdir(parents=True)
    (tmp_path / "b" / "w.pt").write_bytes(b"abc")
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "a.txt").chmod(0o640)
    (tmp_path / "b" / "up").symlink_to("../a.txt")
    (tmp_path / "dangling").symlink_to("b/none")
    (tmp_path / "folder").symlink_to("b")
    entries = scan(tmp_path)
    assert [(entry.path, entry.kind, entry.size, entry.target) for entry in entries] == [
        ("a.txt", "file", 0, ""),
        ("b", "directory", 0, ""),
        ("b/empty", "directory", 0, ""),
        ("b/up", "symlink", 0, "../a.txt"),
        ("b/w.pt", "file", 3, ""),
        ("dangling", "symlink", 0, "b/none"),
        ("folder", "symlink", 0, "b"),
    ]
    assert entries[0].mode == 0o640


@pytest.mark.parametrize("target", ["../outside", "..", "/etc/passwd", "sub/../../outside", "../base/w.pt"])
def test_links_out_of_the_tree_are_refused(tmp_path: Path, target: str) -> None:
    root = tmp_path / "base"
    (root / "sub").mkdir(parents=True)
    (root / "w.pt").write_bytes(b"abc")
    (root / "link").symlink_to(target)
    with pytest.raises(InputError, match=r"link that leads out.*cp -rL"):
        scan(root)


def test_link_through_a_link_out_of_the_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "deep").symlink_to("a/b")
    (root / "link").symlink_to("deep/../../../x")
    with pytest.raises(InputError, match="link that leads out"):
        scan(root)


def test_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match=r"fifo is a device, socket or FIFO"):
        scan(tmp_path)


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.pt", "wb"):
        pass
    with pytest.raises(InputError, match="not UTF-8"):
        scan(tmp_path)


def test_absent_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be listed"):
        scan(tmp_path / "none")


def test_checkpoints_are_detected_by_content(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.pt").write_bytes(b"no model")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "options.bin").write_bytes(saved({"lr": 1}))
    assert not has_checkpoint(tmp_path, scan(tmp_path))
    with pytest.raises(InputError, match="holds no checkpoint"):
        require_checkpoint(tmp_path, scan(tmp_path))
    (tmp_path / "pointer.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(InputError, match=r"pointer\.pt is a Git LFS pointer.*git lfs pull"):
        require_checkpoint(tmp_path, scan(tmp_path))
    for data in (
        saved({"a": torch.ones(2)}),
        saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False),
        saved({"a": torch.ones(2)})[:-1],
        b"\x02\0\0\0\0\0\0\0{}",
    ):
        (tmp_path / "sub" / "notes.txt").write_bytes(data)
        assert has_checkpoint(tmp_path, scan(tmp_path))
        require_checkpoint(tmp_path, scan(tmp_path))
