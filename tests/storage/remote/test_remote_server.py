"""A remote store behind a real server, through the command line."""

from __future__ import annotations

import hashlib
import http.client
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError, ConflictError
from ckstore.storage.remote.bucket import ObstoreBucket
from tests.asked_of_versions import weight_sum
from tests.checkpoints import draw, scratch
from tests.object_store import ObjectStore, object_store


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.fixture
def directory(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with scratch() as path:
        for variable, value in server.credentials.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("CKSTORE_CACHE", str(path / "cache"))
        yield path


def command(*arguments: str, code: int = 0) -> str:
    """Return the output of a command, or its error."""
    ended = subprocess.run([sys.executable, "-m", "ckstore", *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    return ended.stderr if code else ended.stdout


@pytest.mark.long
def test_a_team_uses_a_bucket(server: ObjectStore, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    weight = draw(200, 300)
    for step in range(3):
        paths.append(directory / f"step{step}.pt")
        weight = weight + draw(200, 300, seed=step + 1, scale=1e-3)
        torch.save({"model": {"weight": weight}}, paths[-1])
    url = f"{server.url}/team-a"
    options = [f"--option={name}={value}" for name, value in server.options.items()]
    said = command("init", url, *options)
    assert said == f"Made a store at {url}.\n"
    command("--store", url, "ingest", *map(str, paths), "--run", "gpt")
    command("--store", url, "tag", "gpt@1", "best")
    log = command("--store", url, "log")
    monkeypatch.setenv("CKSTORE_CACHE", str(directory / "another machine"))
    for variable, value in server.anywhere.items():
        monkeypatch.setenv(variable, value)
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
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert not [path for path in written if server.secret.encode() in path.read_bytes()]


def test_the_process_of_a_saver_stores_in_a_bucket(server: ObjectStore, directory: Path) -> None:
    url = f"{server.url}/saved"
    with ckstore.init(url, options=server.options) as store:
        states = [{"weight": draw(200, 300, seed=step)} for step in range(3)]
        with store.saver("gpt") as saver:
            for step, state in enumerate(states):
                saver.save(state, step=step)
    with ckstore.open(url, cache=directory / "other", options=server.options) as store:
        assert [row.step for row in store._catalog.versions("gpt")] == [0, 1, 2]
        for step, state in enumerate(states):
            assert torch.equal(torch.as_tensor(store[f"gpt@{step}"].state_dict()["weight"]), state["weight"])
        assert store.verify().problems == []


def test_a_bucket_that_is_not_there(server: ObjectStore, directory: Path) -> None:
    with pytest.raises(CkstoreError, match=r"Bucket nobody does not exist, or .*; create it first") as caught:
        ckstore.init(f"{server.url[:5]}nobody/store", options=server.options)
    assert server.secret not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any((directory / "cache").glob("*/catalog.sqlite"))


def test_stores_do_not_lie_inside_one_another(server: ObjectStore, directory: Path) -> None:
    url = f"{server.url}/nested/team-a"
    ckstore.init(url, options=server.options).close()
    for below in (f"{url}/x", f"{url}/x/y"):
        with pytest.raises(ConflictError, match=f"{below} lies inside the store {url}; choose another prefix"):
            ckstore.init(below, options=server.options)
    with pytest.raises(ConflictError, match=f"The store {url} lies inside {server.url}/nested; choose another"):
        ckstore.init(f"{server.url}/nested", options=server.options)
    ckstore.init(f"{url}-too", options=server.options).close()
    with pytest.raises(ConflictError, match="is already a store"):
        ckstore.init(url, options=server.options)
    # Objects of others may lie next to a store, and below it.
    bucket = ObstoreBucket(f"{server.url}/shared", server.options)
    bucket.put("a/readme.txt", b"ours")
    ckstore.init(f"{server.url}/shared/a/b", options=server.options).close()
    bucket.put("c/readme.txt", b"ours")
    ckstore.init(f"{server.url}/shared/c", options=server.options).close()


def test_a_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store("rclone") as server, scratch() as directory:
        for variable, value in {**server.anywhere, "CKSTORE_CACHE": str(directory)}.items():
            monkeypatch.setenv(variable, value)
        init = [sys.executable, "-m", "ckstore", "init", f"{server.url}/store"]
        ended = subprocess.run(init, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        assert f"{server.url}/store cannot hold a store: the server overwrites an existing object" in ended.stderr
        assert not list(ObstoreBucket(f"{server.url}/store", {}).list(""))
        assert not list(directory.iterdir())


@pytest.mark.long
def test_processes_read_a_bucket_and_follow_it(server: ObjectStore, directory: Path) -> None:
    """A worker that has the store open follows it: versions stored since are found."""
    with (
        ckstore.init(f"{server.url}/bulk", options=server.options) as store,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor,
    ):
        for step in range(3):
            store.ingest({"weight": draw(200, 300, seed=step)}, run="gpt", step=step)
            assert list(store.map(weight_sum, executor=executor)) == list(store.map(weight_sum))
        store.forget(["gpt@0"])
        store.gc(grace=0)
        assert list(store.map(weight_sum, executor=executor)) == list(store.map(weight_sum))
        for seed, run in enumerate(("a", "b")):
            (directory / "old" / run).mkdir(parents=True)
            torch.save({"weight": draw(200, 300, seed=10 + seed)}, directory / "old" / run / "step1.pt")
        arguments = ["ingest", str(directory / "old"), "--recursive", "--executor", "processes=2"]
        assert "2 versions" in command("--store", f"{server.url}/bulk", *arguments)
        assert len(list(store.map(weight_sum, [3], executor=executor))) == 1
        assert store.verify().problems == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["../x", "/x", "zz/../x", "d/", "999999999999.json", "a%01b"])
def test_a_log_with_other_names_is_read(server: ObjectStore, directory: Path, name: str) -> None:
    if server.url.startswith("az:"):
        pytest.skip("names are put without a signature")
    url = f"{server.url}/{secrets.token_hex(8)}"
    with ckstore.init(url, options=server.options) as store:
        store.ingest({"weight": draw(20, 30)}, run="r", step=1)
        log = f"{url.removeprefix('s3:/')}/log/{store.path.name.partition('-')[0]}"
    connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))
    connection.request("PUT", f"{log}/{name}", body=b"{}")
    assert connection.getresponse().status == 200
    connection.close()
    with ckstore.open(url, options=server.options, cache=directory / "new") as store:
        store.ingest({"weight": draw(20, 30) + 1}, run="r", step=2)
        assert [row.step for row in store._catalog.versions()] == [1, 2]
        [problem] = store.verify().problems
        assert "delete" in problem
