"""`mount`: files of versions in a mounted directory, a clean end, and refusals."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckstore as library
from ckstore.storage.remote.mirror import VARIABLE as CACHE
from tests.checkpoints import sha256
from tests.cli.conftest import Ckstore
from tests.object_store import object_store

needs_fuse = pytest.mark.skipif(
    importlib.util.find_spec("mfusepy") is None
    or not os.access("/dev/fuse", os.R_OK | os.W_OK)
    or shutil.which("fusermount3") is None,
    reason="mounting needs mfusepy and FUSE",
)


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The path or URL of a store to be."""
    if request.param == "directory":
        yield str(tmp_path / "store")
        return
    with object_store() as server:
        for name, value in {**server.anywhere, CACHE: str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield f"{server.url}/store"


@needs_fuse
@pytest.mark.local
@pytest.mark.parametrize("by_interrupt", [True, False])
def test_mounted_files_are_the_originals(place: str, tmp_path: Path, by_interrupt: bool) -> None:
    original, point = tmp_path / "w.npy", tmp_path / "mounted"
    np.save(original, np.random.default_rng(0).random((700, 500)))
    point.mkdir()
    with library.init(place) as store:
        for run in ("gpt", "team/gpt"):
            store.ingest(original, run=run, step=1, hot=0)
    command = [sys.executable, "-m", "ckstore", "--store", place, "mount", str(point)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not os.path.ismount(point):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        files = [path.relative_to(point).as_posix() for path in sorted(point.rglob("*.npy"))]
        assert files == ["gpt@1/w.npy", "team/gpt@1/w.npy"]
        assert {sha256(point / name) for name in files} == {sha256(original)}
        assert not (point / "gpt@2").exists()
        assert (point / "gpt@1" / "w.npy").stat().st_mode & 0o777 == 0o444
        with pytest.raises(OSError, match="Read-only"):
            (point / "new").touch()
        if by_interrupt:
            child.send_signal(signal.SIGINT)
        else:
            subprocess.run(["fusermount3", "-u", point], check=True)
        assert child.wait(30) == 0
        assert not os.path.ismount(point)
    finally:
        child.kill()
        child.communicate()
        if os.path.ismount(point):
            subprocess.run(["fusermount3", "-u", "-z", point], check=True)


def test_the_extra_is_named_where_it_is_missing(
    directory: Path, ckstore: Ckstore, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.init(directory / "store").close()
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    failed = ckstore("--store", directory / "store", "mount", directory, code=2)
    assert failed.sentence == "`ckstore mount` needs fsspec and mfusepy: pip install 'ckstore[mount]'."
