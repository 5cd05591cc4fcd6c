"""A process may have few files open: 256 on macOS, 1,024 on many clusters."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckstore
from ckstore.formats import sources
from ckstore.storage import pack_reader

pytestmark = pytest.mark.local

#: Descriptors of a process, its own ones and those of imported modules included.
_LIMIT = 40

_PROGRAM = f"""
import resource, sys
from pathlib import Path

import ckstore

resource.setrlimit(resource.RLIMIT_NOFILE, ({_LIMIT}, {_LIMIT}))
place = Path(sys.argv[1])
with ckstore.open(place / "store") as store, ckstore.open(place / "other") as other:
    store.ingest(place / "shards", run="sharded")
    store["sharded"].checkout(place / "restored")
    assert store.run("run").arrays["w"][:, 5].shape == (40,)
    store.report("run").save(place / "report.html")
    assert len(store.push(other).versions) == 41
    assert not store.verify().problems
    store.forget("sharded")
    store.gc()
"""


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    """Whatever the number of shards, packs and versions."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, generator=generator)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(40):
            weight = weight + 1e-3 * torch.randn(300, generator=generator)
            store.ingest({"w": weight}, run="run", step=step, hot=0)
    ckstore.init(tmp_path / "other").close()
    (tmp_path / "shards").mkdir()
    for number in range(45):
        shard = {f"t{number}": torch.randn(5, generator=generator)}
        save_file(shard, tmp_path / "shards" / f"model-{number + 1:05}-of-00045.safetensors")
    ended = subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for path in (tmp_path / "shards").iterdir():
        assert (tmp_path / "restored" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("module", "kind"), [(pack_reader, "OpenFile"), (sources, "FileSource")])
def test_open_files_that_outlive_the_names_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, kind: str
) -> None:
    """A program that ends with an open store prints nothing."""
    (tmp_path / "file").write_bytes(b"bytes")
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    opened = getattr(module, kind)(tmp_path / "file")
    # Python clears the globals of modules at its end.
    with monkeypatch.context() as ending:
        ending.setattr(module, "os", None)
        del opened
        gc.collect()
    assert raised == []
