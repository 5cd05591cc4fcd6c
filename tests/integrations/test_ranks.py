"""Saves of several ranks that share nothing but the store: equal objects, few bytes on the wire, and deaths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckstore
from ckstore.objects import units
from ckstore.objects.likeness import BANDS
from ckstore.recovery.recover import recover
from ckstore.writing.encode import encode
from tests.object_store import ObjectStore, object_store
from tests.ranks import LIMIT, PART, run_jobs, run_ranks

pytestmark = pytest.mark.local

REAL = units.PART


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PART", PART)


@pytest.fixture
def real_parts(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors: a save takes a while, and a load reads little besides their chunks."""
    monkeypatch.setattr(units, "PART", REAL)
    monkeypatch.setenv("PART", str(REAL))


def all_succeed(found: list[Any]) -> list[Any]:
    assert [code for code, _, _ in found] == [0] * len(found), "\n".join(printed for _, printed, _ in found)[-6000:]
    return [written for _, _, written in found]


def packs_of(store: ckstore.Store) -> list[str]:
    return sorted(os.listdir(store.path / "packs"))


@pytest.mark.long
def test_objects_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """The coordinator reads no tensor back, and gathers little; each rank writes a pack."""
    objects, files, bands = {}, {}, {}
    for world in (1, 2, 3, 4):
        place = tmp_path / str(world)
        ckstore.init(place / "store").close()
        found = all_succeed(run_ranks(world, "save", place, store=str(place / "store")))
        with ckstore.open(place / "store") as store:
            version = store["a@1"]
            size = version.original_bytes
            assert len([name for name in packs_of(store) if ".raw" in name]) == world
            assert len(packs_of(store)) == world + 1
            objects[world] = sorted(version._stored.document.objects)
            files[world] = version.original_bytes
            bands[world] = version._stored.document.bands
            assert store.verify().problems == []
            version.checkout(place / "whole.pt")  # Compares the digest of the file.
            assert all(rank["read"] == 0 for rank in found)
            assert sum(rank["objects"] for rank in found) < 200_000 * world
            assert sum(rank["pieces"] for rank in found) <= (0 if world == 1 else size)
            row = version._stored.row
            assert version.stored_bytes < 1.01 * size
        recover(place / "store")
        with ckstore.open(place / "store") as store:
            assert store["a@1"]._stored.row == row
    assert all(one == objects[1] for one in objects.values())
    assert all(one == bands[1] for one in bands.values())
    assert len(bands[1]) == BANDS
    assert len(set(files.values())) == 1
    loaded = all_succeed(run_ranks(3, "load", tmp_path / "2", store=str(tmp_path / "2" / "store"), version="a@1"))
    assert [rank["equal"][0] for rank in loaded] == [True] * 3, loaded
    assert [rank["changed"] for rank in loaded] == [
        ["model/columns"], ["model/columns", "model/large"], ["model/columns"]
    ]  # fmt: skip


def test_packs_of_ranks_are_collected_and_sent(tmp_path: Path) -> None:
    """Ranks that write the same content leave garbage, as little as zeros."""
    with ckstore.init(tmp_path / "store") as store, ckstore.init(tmp_path / "other") as other:
        all_succeed(run_ranks(3, "save", tmp_path, store=str(store.place)))
        before = store["a@1"].stored_bytes
        store.gc(grace=0)
        assert 0.95 * before < store["a@1"].stored_bytes <= before
        assert (
            sum((store.path / "packs" / name).stat().st_size for name in packs_of(store)) == store["a@1"].stored_bytes
        )
        store.push(other, "a@1", verify=True)
        store.forget("a@1")
        store.gc(grace=0)
        assert packs_of(store) == []
        for one in (store, other):
            assert one.verify().problems == []
        other["a@1"].checkout(tmp_path / "whole.pt")


@pytest.mark.long
def test_the_next_version_of_other_ranks_is_a_delta(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step, world in enumerate((2, 3, 2)):
            all_succeed(
                run_ranks(world, "save", tmp_path, store=str(store.place), step=step, seed=1 if step < 2 else 2)
            )
        rows = [store[f"a@{step}"] for step in range(3)]
        assert rows[1].stored_bytes < 0.01 * rows[0].stored_bytes  # The same content on other ranks.
        encode(store._repository, store._catalog.hot())
        assert store["a@1"].depth <= 1
        assert store.verify().problems == []
        assert [name for name in packs_of(store) if ".raw" in name] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "words"),
    [("resolve", "no such value"), ("pack-written", "No space"), ("version", "install the same one")],
)
def test_a_rank_that_fails_is_named_and_the_training_goes_on(tmp_path: Path, point: str, words: str) -> None:
    ckstore.init(tmp_path / "store").close()
    rank = 1
    found = all_succeed(run_ranks(3, "fail", tmp_path, store=str(tmp_path / "store"), rank=rank, point=point))
    with ckstore.open(tmp_path / "store") as store:
        assert [row.step for row in store._catalog.versions("a")] == [2]
        assert store.verify().problems == []
        store.gc(grace=0)
        assert len(packs_of(store)) == 4
    assert all(words in one["error"] and "(RANK " in one["error"] for one in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "point", "how"),
    [
        (1, "resolve", "kill"), (1, "send", "kill"), (0, "receive", "kill"), (2, "pack-written", "kill"),
        (0, "pack-renamed", "kill"), (1, "pack-renamed", "kill"), (0, "finish", "kill"), (1, "send", "stop"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_fails_the_save_on_all(tmp_path: Path, rank: int, point: str, how: str) -> None:
    """Within the limit, and nothing is visible; a job afterwards saves the same step."""
    ckstore.init(tmp_path / "store").close()
    place = str(tmp_path / "store")
    found = run_ranks(3, "die", tmp_path, store=place, rank=rank, point=point, how=how)
    for number, (code, printed, written) in enumerate(found):
        if number == rank:
            assert code == -9
            continue
        assert code == 0, printed[-3000:]
        assert written["error"], number
        assert written["seconds"] < 2 * LIMIT + 10
        if point != "finish":
            assert any(f"Rank {rank} died" in word for word in written["words"]), written
    with ckstore.open(place) as store:
        assert store._catalog.versions() == []
        store.gc(grace=0)
        assert packs_of(store) == []
    all_succeed(run_ranks(2, "save", tmp_path, store=place))
    with ckstore.open(place) as store:
        assert store.verify().problems == []
        assert len(store) == 1


@pytest.mark.long
@pytest.mark.usefixtures("real_parts")
@pytest.mark.parametrize("seed", range(int(os.environ.get("CKSTORE_KILLS", "3"))))
def test_a_rank_that_dies_at_any_moment_hangs_and_loses_nothing(tmp_path: Path, seed: int) -> None:
    """A version is whole, or not there at all; then nobody was told that it is."""
    ckstore.init(tmp_path / "store").close()
    drawn = Random(seed)
    rank, point = drawn.randrange(3), f"after {drawn.uniform(0, 0.8)}"
    found = run_ranks(3, "die", tmp_path, store=str(tmp_path / "store"), rank=rank, point=point, how="kill")
    assert all(code in (0, -9) for code, _, _ in found), found
    assert all(written["seconds"] < 2 * LIMIT + 10 for _, _, written in found if written)
    with ckstore.open(tmp_path / "store") as store:
        assert store.verify().problems == []
        if len(store):
            store["a@1"].checkout(tmp_path / "whole.pt")
        else:
            assert all(written["error"] for _, _, written in found if written)
        store.gc(grace=0)
        assert bool(packs_of(store)) == bool(len(store))


@pytest.mark.parametrize("in_front", [True, False])
def test_ranks_without_a_common_store_are_refused(tmp_path: Path, in_front: bool) -> None:
    """As those of several machines with `local`: the coordinator lacks a pack."""
    ckstore.init(tmp_path / "shared").close()
    found = all_succeed(run_ranks(2, "save_apart", tmp_path, in_front=in_front))
    assert all("not all ranks reach" in one["error"] for one in found), found
    for place in ("shared", "node-0/store", "node-1/store"):
        with ckstore.open(tmp_path / place) as store:
            assert store._catalog.versions() == []
            assert len(packs_of(store)) == (place == "node-1/store")


@pytest.mark.long
@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_two_jobs_save_the_same_steps(tmp_path: Path, seeds: tuple[int, int]) -> None:
    """One wins each step, and the other one is told; of equal content, both succeed."""
    ckstore.init(tmp_path / "store").close()
    store = str(tmp_path / "store")
    jobs = {f"job{number}": (2, "compete", {"store": store, "seed": seed}) for number, seed in enumerate(seeds)}
    errors = [[one["error"] for one in all_succeed(ranks)] for ranks in run_jobs(tmp_path, jobs).values()]
    assert [all(one) for one in errors].count(True) == (seeds == (1, 2))
    assert all(len({bool(error) for error in job}) == 1 for job in errors)
    with ckstore.open(store) as opened:
        assert [row.step for row in opened._catalog.versions("a")] == [1, 2, 3]
        assert opened.verify().problems == []
        kept = {row.pack for row in opened._catalog.versions("a")}
        opened.gc(grace=0)
        assert kept <= {*packs_of(opened)}


def test_ranks_that_are_stopped_save_the_same_step(tmp_path: Path) -> None:
    """One of them has received SIGTERM; all end with its status once the version is durable."""
    ckstore.init(tmp_path / "store").close()
    found = run_ranks(3, "stop", tmp_path, store=str(tmp_path / "store"), rank=1, after=2)
    assert [code for code, _, _ in found] == [-15] * 3, found
    assert all(written["asked"] == [False] * 3 + [True] for _, _, written in found)
    assert all(50 < written["remaining"] <= 60 for _, _, written in found)
    with ckstore.open(tmp_path / "store") as store:
        assert {row.run: row.step for row in store._catalog.versions()} == {"own1": 2, "a": 3}


def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """With scheduler, and states of random numbers and of data of each rank, in one version."""
    ckstore.init(tmp_path / "store").close()
    found = all_succeed(run_ranks(2, "repeat", tmp_path, store=str(tmp_path / "store")))
    for rank, other in ((0, 1), (1, 0)):
        assert len(found[rank]["equal"]) > 20
        assert all(found[rank]["equal"])
        # Only the states of the other rank's random numbers are missing.
        assert "differing" not in found[rank]["compared"]
        assert f"rank{other}of2" in found[rank]["compared"]


def test_a_default_group_for_gpus_alone_is_enough(tmp_path: Path) -> None:
    ckstore.init(tmp_path / "store").close()
    found = all_succeed(run_ranks(2, "save_without_cpu", tmp_path, store=str(tmp_path / "store")))
    assert all(rank["made"] == [{"backend": "gloo"}] for rank in found)
    assert all("a backend for the CPU" in rank["error"] for rank in found)
    with ckstore.open(tmp_path / "store") as store:
        assert [row.step for row in store._catalog.versions("a")] == [1, 2]


@contextmanager
def bucket(tmp_path: Path) -> Iterator[tuple[ObjectStore, str]]:
    """Yield an object store, whose address this process and its ranks know, and the URL of a store in it."""
    with object_store() as server, pytest.MonkeyPatch.context() as patched:
        for name, value in server.anywhere.items():
            patched.setenv(name, value)
        patched.setenv("CKSTORE_CACHE", str(tmp_path / "mine"))
        url = f"{server.url}/ranks"
        ckstore.init(url).close()
        yield server, url


@pytest.mark.long
@pytest.mark.usefixtures("real_parts")
def test_ranks_save_into_a_bucket(tmp_path: Path) -> None:
    """Each rank has a mirror of its own.

    Other ranks on two hosts load the version: each host fetches the chunks of its ranks' shards once, and little else.
    """
    with bucket(tmp_path) as (server, url):
        found = all_succeed(run_ranks(3, "save", tmp_path, environment=server.anywhere, store=url))
        assert all(rank["read"] == 0 for rank in found)
        with ckstore.open(url) as store:
            assert store.verify().problems == []
            store["a@1"].checkout(tmp_path / "whole.pt")
        hosts = 2
        loaded = all_succeed(
            run_ranks(4, "load", tmp_path, environment=server.anywhere, hosts=hosts, store=url, version="a@1")
        )
        assert [rank["equal"][0] for rank in loaded] == [True] * 4, loaded
        assert sum(rank["messages"] for rank in loaded) < 100_000 * 4
        for host in range(hosts):
            fetched = [tuple(part) for rank in loaded[host::hosts] for part in rank["fetched"]]
            needed = {tuple(part) for rank in loaded[host::hosts] for part in rank["needed"]}
            assert len(set(fetched)) == len(fetched)
            assert sum(length for _, _, length in fetched) < 1.1 * sum(length for _, _, length in needed)
            assert len(fetched) < 40


@pytest.mark.long
def test_ranks_save_on_their_own_disks_first(tmp_path: Path) -> None:
    """The next job finishes the saves of a killed one; a version that only a lost machine had is refused."""
    with bucket(tmp_path) as (server, url):

        def stage(*steps: int, seed: int = 0, away: bool = False) -> list[Any]:
            told = {"store": url, "steps": steps, "seed": seed, "away": away}
            return run_ranks(2, "stage", tmp_path, environment=server.anywhere, **told)

        def saved() -> list[int | None]:
            with ckstore.open(url) as store:
                assert store.verify().problems == []
                return [row.step for row in store._catalog.versions()]

        unsent = [tmp_path / f"node-{rank}" for rank in range(2)]
        assert [code for code, _, _ in stage(1, 2, away=True)] == [-9, -9]
        assert saved() == []
        assert [len([*node.rglob("unsent/*.zip")]) for node in unsent] == [4, 2]
        found = all_succeed(stage(3))
        assert [rank["there"] for rank in found] == [[1, 2]] * 2
        assert all(rank["equal"].startswith("All ") for rank in found), found
        assert [rank["pushed"] for rank in found] == [[3], []]
        assert saved() == [1, 2, 3]
        stage(4, away=True)
        shutil.rmtree(unsent[1])
        found = all_succeed(stage(4, seed=10))
        assert [rank["there"] for rank in found] == [[1, 2, 3]] * 2
        assert any("lacks 1 of its 3 packs" in word for word in found[0]["words"]), found
        assert saved() == [1, 2, 3, 4]
        with ckstore.open(url) as store:
            parents = [row.parent for row in store._catalog.versions()]
            assert parents == [None, *(row.number for row in store._catalog.versions()[:-1])]
        assert not [path for node in unsent for path in node.rglob("unsent/*")]  # Nor locks of dead processes.
