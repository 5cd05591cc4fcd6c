"""A remote store behind a real server, through the command line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError
from ckstore.version import Version
from tests.checkpoints import draw, scratch
from tests.object_store import object_store

pytest.importorskip("ministack")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with scratch() as path:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-this-down")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("CKSTORE_CACHE", str(path / "cache"))
        yield path


def command(*arguments: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "ckstore", *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_team_uses_a_bucket(endpoint: str, directory: Path) -> None:
    paths = []
    weight = draw(200, 300)
    for step in range(3):
        paths.append(directory / f"step{step}.pt")
        weight = weight + draw(200, 300, seed=step + 1, scale=1e-3)
        torch.save({"model": {"weight": weight}}, paths[-1])
    url = "s3://models/team-a"
    said = command("init", url, "--option", f"endpoint={endpoint}", "--option", "region=us-east-1")
    assert said == f"Made a store at {url}.\n"
    command("--store", url, "ingest", *map(str, paths), "--run", "gpt")
    command("--store", url, "tag", "gpt@1", "best")
    log = command("--store", url, "log")
    os.environ["CKSTORE_CACHE"] = str(directory / "another machine")
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    os.environ["AWS_ALLOW_HTTP"] = "true"
    try:
        assert command("--store", url, "log") == log
        for step, path in enumerate(paths):
            command("--store", url, "checkout", f"gpt@{step}", "-o", str(directory / "out.pt"), "--force")
            restored = (directory / "out.pt").read_bytes()
            assert hashlib.sha256(restored).digest() == hashlib.sha256(path.read_bytes()).digest()
        command("--store", url, "forget", "gpt@0")
        command("--store", url, "gc", "--grace", "0")
        command("--store", url, "verify")
        command("--store", url, "recover")
        assert "best" in command("--store", url, "log")
        with ckstore.open(url) as store:
            assert store["best"]["model/weight"].shape == (200, 300)
    finally:
        del os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_ALLOW_HTTP"]
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert not [path for path in written if b"do-not-write-this-down" in path.read_bytes()]


def test_the_process_of_a_saver_stores_in_a_bucket(endpoint: str, directory: Path) -> None:
    url = "s3://models/saved"
    with ckstore.init(url, options={"endpoint": endpoint, "region": "us-east-1"}) as store:
        states = [{"weight": draw(200, 300, seed=step)} for step in range(3)]
        with store.saver("gpt") as saver:
            for step, state in enumerate(states):
                saver.save(state, step=step)
    with ckstore.open(url, cache=directory / "other", options={"endpoint": endpoint, "region": "us-east-1"}) as store:
        assert [row.step for row in store.versions("gpt")] == [0, 1, 2]
        for step, state in enumerate(states):
            assert torch.equal(torch.as_tensor(store[f"gpt@{step}"].state_dict()["weight"]), state["weight"])
        assert store.verify().problems == []


def test_a_bucket_that_is_not_there(endpoint: str, directory: Path) -> None:
    with pytest.raises(CkstoreError, match=r"could not be used .*check its address, the credentials") as caught:
        ckstore.init("s3://nobody/store", options={"endpoint": endpoint})
    assert "do-not-write" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any((directory / "cache").glob("*/catalog.sqlite"))


def weight_sum(version: Version) -> float:
    return float(np.asarray(version["weight"][:]).sum())


def test_processes_read_a_bucket_and_see_what_came(endpoint: str, directory: Path) -> None:
    """A worker that has the store open follows it: versions that were stored meanwhile are there, and verified."""
    options = {"endpoint": endpoint, "region": "us-east-1"}
    with (
        ckstore.init("s3://models/bulk", options=options) as store,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
    ):
        for step in range(3):
            store.ingest({"weight": draw(200, 300, seed=step)}, run="gpt", step=step)
            assert list(store.map(weight_sum, executor=executor)) == list(store.map(weight_sum))
            found = store.verify(executor=executor)
            assert (found.problems, found.versions) == ([], step + 1)
        store.forget(["gpt@0"])
        store.gc(grace=0)
        assert store.verify(executor=executor) == store.verify()
        paths = [directory / f"{run}.pt" for run in ("a", "b")]
        for seed, path in enumerate(paths):
            torch.save({"weight": draw(200, 300, seed=10 + seed)}, path)
        (directory / "plan.csv").write_text("".join(["path,run,step\n", *(f"{p},{p.stem},1\n" for p in paths)]))
        plan = ["ingest", "--plan", str(directory / "plan.csv"), "--executor", "processes=2"]
        assert "2 versions" in command("--store", "s3://models/bulk", *plan)
        assert len(list(store.map(weight_sum, [3], executor=executor))) == 1
        assert store.verify(executor=executor).problems == []
