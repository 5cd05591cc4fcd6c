"""What other mirrors do to a version between the moment in which it is read and the commit of what was made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.errors import ConflictError
from ckstore.operations.drop import drop
from ckstore.storage.remote import mirror as mirror_module
from tests.checkpoints import draw, scratch
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

URL = "s3://models/team-a"


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimulatedServer:
    made = SimulatedServer()
    monkeypatch.setattr(mirror_module, "ObstoreBucket", lambda url, options: SimulatedBucket(made))
    monkeypatch.setattr("ckstore.storage.remote.bucket._PAUSE", 0.001)
    return made


def state(step: int) -> dict[str, Any]:
    weight = draw(300, 256)
    for number in range(1, step + 1):
        weight = weight + draw(300, 256, seed=number, scale=1e-3)
    return {"weight": weight, "frozen": draw(64, 64, seed=9), "moment": draw(300, 256, seed=500 + step)}


def same(found: dict[str, Any], step: int, names: Sequence[str] = ("weight", "frozen", "moment")) -> bool:
    return all(bool((found[name] == tensor).all()) for name, tensor in state(step).items() if name in names)


def once_published(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, task: Callable[[], None]) -> None:
    """Do something when the packs of the store's next change are put, and before it is committed."""
    publish = store.packs.publish
    tasks = iter([task])

    def published(names: Sequence[str]) -> None:
        publish(names)
        next(tasks, lambda: None)()

    monkeypatch.setattr(store.packs, "publish", published)


def test_what_a_version_is_compacted_against_is_freed_by_another_mirror(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="r", step=0, hot=0)
        store.ingest(state(1), run="r", step=1, hot=1)
        with ckstore.open(URL, cache=directory / "b") as other:

            def free() -> None:
                other.forget(["r@0"])
                other.gc(grace=0)

            once_published(store, monkeypatch, free)
            store.compact()
            assert not store["r@1"].row.hot
            store.gc(grace=0)
        assert store.verify().problems == []
    with ckstore.open(URL, cache=directory / "c") as store:
        assert same(store["r@1"].state_dict(), 1)
        assert store.verify().problems == []


def test_a_version_that_was_thinned_meanwhile_does_not_become_exact_again(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(2):
            store.ingest(state(step), run="r", step=step, hot=0)
        with ckstore.open(URL, cache=directory / "b") as other:

            def thin() -> None:
                other.thin(["r@0"])
                other.gc()

            once_published(store, monkeypatch, thin)
            with pytest.raises(ConflictError, match="Version 1 was changed by others meanwhile; try again"):
                drop(store.repository, [store["r@0"].row], ["moment"])
            assert store["r@0"].row.fidelity == "coarse"
            assert store["r@0"].row.dropped == ()
            drop(store.repository, [store["r@0"].row], ["moment"])
    with ckstore.open(URL, cache=directory / "c") as store:
        store.gc(grace=0)
        assert store.verify().problems == []
        assert set(store["r@0"].state_dict()) == {"weight", "frozen"}
        assert same(store["r@1"].state_dict(), 1)
