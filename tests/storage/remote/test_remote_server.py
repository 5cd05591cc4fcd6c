"""A remote store behind a real server, through the command line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError
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


def test_a_bucket_that_is_not_there(endpoint: str, directory: Path) -> None:
    with pytest.raises(CkstoreError, match=r"could not be used .*check its address, the credentials") as caught:
        ckstore.init("s3://nobody/store", options={"endpoint": endpoint})
    assert "do-not-write" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any((directory / "cache").glob("*/catalog.sqlite"))
