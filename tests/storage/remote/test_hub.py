"""Stores in a repository of the Hugging Face Hub, with its own client, before a server of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, ConflictError, UsageError
from ckstore.integrations.transformers import resume_path
from ckstore.storage.remote.hub import HubRepository
from tests.hub_server import OF_CLIENT, REPOSITORY, Hub, on_hub

pytestmark = [pytest.mark.local, OF_CLIENT]

URL = f"hf://{REPOSITORY}"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ckstore.storage.remote.retries.PATIENCE", 0.1)
    with on_hub(monkeypatch) as made:
        yield made


def state(step: int) -> dict[str, object]:
    return {"weight": np.random.default_rng(1).standard_normal(100_000).astype(np.float32) + step, "step": step}


def test_versions_are_pushed_and_pulled(server: Hub, tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "own", create=True) as own:
        for step in (1, 2):
            own.ingest(state(step), run="gpt", step=step)
        with ckstore.open(URL, create=True, options={"endpoint": server.endpoint}) as remote:
            before = server.commits
            assert len(own.push(remote, "gpt@1").versions) == 1
            assert server.commits - before <= 3  # Its packs and its record.
            assert len(own.push(remote).versions) == 1
    with ckstore.open(URL, "r", cache=tmp_path / "elsewhere", options={"endpoint": server.endpoint}) as remote:
        assert np.array_equal(remote["gpt@latest"].state_dict()["weight"], state(2)["weight"])
        assert remote.verify().problems == []
        with ckstore.open(tmp_path / "copy", create=True) as copy:
            assert len(copy.pull(remote).versions) == 2
            assert copy["gpt@1"].state_dict()["step"] == 1


def test_a_training_resumes_from_a_repository(server: Hub, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    checkpoint.mkdir()
    np.save(checkpoint / "weight.npy", np.arange(1000.0))
    with ckstore.open(URL, create=True, options={"endpoint": server.endpoint}) as store:
        store.ingest(checkpoint, run="gpt", step=7)
    found = resume_path(URL, "latest", tmp_path / "output")
    assert found == str(tmp_path / "output" / "checkpoint-7")
    assert (Path(found) / "weight.npy").read_bytes() == (checkpoint / "weight.npy").read_bytes()


def test_a_training_saves_into_a_repository(server: Hub) -> None:
    with ckstore.open(URL, create=True, options={"endpoint": server.endpoint}) as store:
        for step in (1, 2):
            store.ingest(state(step), run="gpt", step=step)
        with pytest.raises(ConflictError):
            store.ingest(state(3), run="gpt", step=2)
        store.forget("gpt@1")
        store.gc(grace=0)
        assert store.verify().problems == []
        assert [version.step for version in store.versions()] == [2]


def test_one_of_several_writers_wins(server: Hub) -> None:
    """Another commit since the head was read does not hide a file, nor does it lose one."""
    place = HubRepository(URL, {"endpoint": server.endpoint})
    moved = iter([True, False])

    def move() -> None:
        if next(moved, False):
            server.head = "0" * 40

    server.before_commit = move  # type: ignore[method-assign]
    assert place.put_absent("log/1", b"first")
    assert not place.put_absent("log/1", b"other")

    def overtake() -> None:
        server.before_commit = Hub.before_commit.__get__(server)  # type: ignore[method-assign]
        HubRepository(URL, {"endpoint": server.endpoint}).put("log/2", b"theirs")

    server.before_commit = overtake  # type: ignore[method-assign]
    assert not place.put_absent("log/2", b"ours")
    assert (place.read("log/1"), place.read("log/2")) == (b"first", b"theirs")


def test_a_file_that_another_machine_deletes_does_not_stop_a_deletion(server: Hub) -> None:
    place = HubRepository(URL, {"endpoint": server.endpoint})
    for name in ("packs/1", "packs/2"):
        place.put(name, b"data")

    def overtake() -> None:
        del server.before_commit  # type: ignore[method-assign]
        del server.files["packs/1"]

    server.before_commit = overtake  # type: ignore[method-assign]
    place.delete(["packs/1", "packs/2"])
    assert not server.files


def test_a_file_that_the_repository_ignores_does_not_count_as_written(server: Hub) -> None:
    place = HubRepository(URL, {"endpoint": server.endpoint})
    server.ignored = ("log/",)
    for write in (place.put, place.put_absent):
        with pytest.raises(UsageError, match=r"ignores log/1, as its \.gitignore says"):
            write("log/1", b"record")


def test_a_server_may_ignore_ranges(server: Hub) -> None:
    place = HubRepository(URL, {"endpoint": server.endpoint})
    place.put("packs/1", bytes(range(10)))
    for sends_parts in (True, False):
        server.sends_parts = sends_parts
        assert place.read_range("packs/1", 3, 4) == bytes(range(3, 7))
        for offset, length in ((5, 10), (10, 10)):
            with pytest.raises(EOFError):
                place.read_range("packs/1", offset, length)


def test_errors_are_one_sentence(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="hf://owner/name"):
        ckstore.open("hf://team/run/part")
    for url in ("hf://buckets/team/run", "hf://buckets/run", "hf://datasets/run", "hf://team/..", "hf://team/a--b"):
        with pytest.raises(UsageError, match=r"hf://owner/name|cannot be a repository"):
            ckstore.open(url)
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
        with pytest.raises(CkstoreError, match="unset HF_HUB_OFFLINE"):
            HubRepository(URL, {"endpoint": server.endpoint}).read("ckstore.json")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "httpx2", None)
        with pytest.raises(UsageError, match=r"huggingface_hub 2\.4 or later"):
            HubRepository(URL, {})
    with pytest.raises(CkstoreError, match="create the repository first"):
        ckstore.init("hf://team/other", options={"endpoint": server.endpoint})
    with pytest.raises(UsageError, match="Unknown option region"):
        ckstore.init(URL, options={"region": "here"})
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(CkstoreError, match=r"refused .* HF_TOKEN"):
        ckstore.init(URL, options={"endpoint": server.endpoint})
    with pytest.raises(CkstoreError, match="cannot be reached"):
        HubRepository(URL, {"endpoint": "http://127.0.0.1:9"}).read("ckstore.json")
