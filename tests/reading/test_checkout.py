"""Checkout writes only below its target, and restores the target's previous content where it fails."""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import save_file

import ckstore
from ckstore.errors import IntegrityError
from ckstore.reading import checkout
from ckstore.version import Version


@pytest.fixture
def version(tmp_path: Path) -> Iterator[Version]:
    """A directory of one file and one link to it."""
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, source / "m.pt")
    (source / "sub" / "link").symlink_to("../m.pt")
    with ckstore.init(tmp_path / "store") as store:
        yield store[store.ingest(source).version.number]


def pretend(version: Version, **changes: Any) -> None:
    """Make a manifest contradict the stored bytes."""
    version._stored.__dict__["document"] = replace(version._stored.document, **changes)


def test_no_link_is_made_through_a_link(version: Version, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    pretend(version, links=(("a", os.fspath(outside)), ("a/b", "anything")))
    with pytest.raises(IntegrityError):
        version.checkout(tmp_path / "target")
    assert not os.listdir(outside)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "links",
    [
        [("a", "/etc/passwd")],
        [("a", "..")],
        [("sub/a", "../../x")],
        [("sub/up", ".."), ("a", "sub/up/../x")],
        [("m", "m.pt"), ("m/x", "y")],
        [("sub", "m.pt")],
    ],
    ids=["absolute", "parent", "beyond the root", "through another link", "below a link to a file", "for a directory"],
)
def test_links_that_leave_the_version_are_refused(
    version: Version, tmp_path: Path, links: list[tuple[str, str]]
) -> None:
    pretend(version, links=tuple(links))
    with pytest.raises(IntegrityError):
        version.checkout(tmp_path / "target")
    assert {*os.listdir(tmp_path)} - {"store"} == {"source"}


def test_links_within_the_version_are_made(version: Version, tmp_path: Path) -> None:
    version.checkout(tmp_path / "target")
    assert os.readlink(tmp_path / "target" / "sub" / "link") == "../m.pt"


def test_a_directory_is_replaced_whole(version: Version, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("x")
    version.checkout(target, force=True)
    assert sorted(os.listdir(target)) == ["m.pt", "sub"]
    assert {*os.listdir(tmp_path)} - {"store"} == {"source", "target"}


def test_a_failed_replacement_restores_the_previous_target(
    version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("x")
    rename = Path.rename

    def refusing(self: Path, other: Path) -> Path:
        if other == target and (self / "m.pt").exists():
            raise OSError("no")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="no"):
        version.checkout(target, force=True)
    assert (target / "mine").read_text() == "x"
    assert {*os.listdir(tmp_path)} - {"store"} == {"source", "target"}


def test_a_link_comes_with_its_intermediate_links(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "step").mkdir(parents=True)
    torch.save({"w": torch.arange(3.0)}, source / "step" / "m.pt")
    (source / "other.txt").write_text("left out")
    (source / "last").symlink_to("step")
    (source / "best.pt").symlink_to("last/m.pt")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(source, run="a")
        left_out = store["a"].checkout(tmp_path / "out", include=["best.pt"])
    assert (tmp_path / "out" / "best.pt").read_bytes() == (source / "step" / "m.pt").read_bytes()
    assert left_out == ["other.txt"]


@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_is_not_replaced(tmp_path: Path, force: bool) -> None:
    pipe, link, report = tmp_path / "pipe", tmp_path / "link", tmp_path / "report.md"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    report.symlink_to(pipe)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            save_file({"w": np.full(9, step, np.float32)}, tmp_path / "m.safetensors")
            store.ingest(tmp_path / "m.safetensors", step=step)
        calls: list[Callable[[Path], object]] = [
            lambda target: store["main@1"].checkout(target, force=force),
            lambda target: store["main@1"].checkout(target, format="npz", force=force),
            lambda target: store["main@1"].salvage(target, force=force),
            lambda target: store.average(["main@0", "main@1"], target, force=force),
            lambda target: store["main@1"].write_patch("main@0", target, force=force),
            lambda target: store.report("main").save(report, force=force),
        ]
        for call in calls:
            for target in (pipe, link):
                with pytest.raises(ckstore.UsageError, match=r"is a device or a pipe, not a file; .*-o -"):
                    call(target)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()
    assert report.is_symlink()


def test_a_stream_needs_no_more_than_write_and_flush(tmp_path: Path) -> None:
    class Stream:
        data = b""

        def write(self, block: bytes) -> None:
            self.data += block

        def flush(self) -> None:
            """Nothing is kept back."""

    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    stream: Any = Stream()
    with ckstore.init(tmp_path / "store") as store:
        store[store.ingest(tmp_path / "m.pt").version.number].write(stream)
    assert stream.data == (tmp_path / "m.pt").read_bytes()


def test_a_raw_stream_may_take_parts_of_blocks(tmp_path: Path) -> None:
    class Stream(io.RawIOBase):
        data = b""
        most: int | None = 1000

        def writable(self) -> bool:
            return True

        def write(self, block: Any) -> int | None:
            self.data += bytes(block[: self.most])
            return self.most and min(len(block), self.most)

    torch.save({"w": torch.ones(3000)}, tmp_path / "m.pt")
    stream: Any = Stream()
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest(tmp_path / "m.pt").version.number]
        version.write(stream)
        assert stream.data == (tmp_path / "m.pt").read_bytes()
        stream.most = None
        with pytest.raises(BlockingIOError, match="give one that blocks"):
            version.write(stream)


def test_a_failed_checkout_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(300_000)}, tmp_path / "m.pt")
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest(tmp_path / "m.pt").version.number]
        before = threading.enumerate()

        def failing(*_: Any) -> int:
            raise OSError(errno.EIO, "injected")

        monkeypatch.setattr(checkout, "write_all", failing)
        with pytest.raises((OSError, ckstore.CkstoreError)) as raised:
            version.checkout(tmp_path / "out.pt")
        hashing = [thread for thread in threading.enumerate() if thread.name.startswith("ckstore-hash")]
        assert set(hashing) <= set(before)
        assert raised.tb  # The exception is held: its frames live on.


def test_a_full_temporary_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "injected")

    torch.save({"w": torch.ones(300)}, tmp_path / "m.pt")
    with ckstore.init(tmp_path / "store") as store:
        version = store[store.ingest(tmp_path / "m.pt").version.number]
        monkeypatch.setattr(checkout, "write_all", failing)
        with pytest.raises(ckstore.DiskFullError, match=f"No space for {tempfile.gettempdir()}: "):
            checkout.write_file(version._stored, io.BytesIO(), compare_first=True)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/fd/1"])
def test_links_of_the_system_to_open_files_are_no_targets(name: str) -> None:
    """Where stdout is a file, they are links to a file."""
    if not Path(name).is_symlink():
        pytest.skip(f"{name} is no link here")
    with pytest.raises(ckstore.UsageError, match="device or a pipe"):
        checkout.check_place(Path(name), force=True)
