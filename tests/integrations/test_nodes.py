"""Ranks on hosts of their own: meshes of all kinds, one after the other, in a bucket and in a shared directory."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest

import ckstore
from ckstore.writing.encode import encode
from tests.network import Network, network
from tests.ranks import LIMIT, run_ranks

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif("CKSTORE_NODES" not in os.environ, reason="CKSTORE_NODES is not set; needs root"),
]

#: Seconds for which the server of the bucket hangs.
AWAY = 20

#: Meshes and numbers of ranks on which a training goes on: first always on one, then on others.
MESHES = {"one": [("fsdp", 4)] * 3, "others": [("fsdp", 4), ("tp", 8), ("hsdp", 4), ("fsdp", 2)]}


def all_succeed(found: list[Any]) -> list[Any]:
    assert [code for code, _, _ in found] == [0] * len(found), "\n".join(printed for _, printed, _ in found)[-6000:]
    return [written for _, _, written in found]


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("kind", ["bucket", "directory"])
def test_a_training_goes_on_on_any_mesh(tmp_path: Path, hosts: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are equal, few bytes more than those stored go to the bucket, and deltas do not depend on the mesh."""
    with network(hosts) as made:
        for name, value in made.bucket.anywhere.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "mine"))
        place = f"{made.bucket.url}/nodes" if kind == "bucket" else str(tmp_path / "store")
        ckstore.init(place).close()
        known: set[str] = set()
        for run, meshes in MESHES.items():
            step = 0
            for mesh, world in meshes:
                before = made.received()
                found = all_succeed(
                    run_ranks(world, "train", tmp_path, network=made, store=place, run=run, kind=mesh, steps=2, hot=16)
                )
                assert {rank["first"] for rank in found} == {step + 1}
                if step:
                    assert all(rank["equal"].startswith("All ") for rank in found), found
                step += 2
                assert {(rank["saved"], rank["error"]) for rank in found} == {(step, "")}
                with ckstore.open(place) as store:
                    packs = {info.name: info.bytes for info in store._repository.packs.list_packs()}
                    stored = sum(nbytes for name, nbytes in packs.items() if name not in known)
                    known |= packs.keys()
                sent = made.received() - before
                print(kind, hosts, run, mesh, world, "stored", stored, "sent", sent)
                assert stored < 1e6 or sent < 1.02 * stored  # With headers.
        with ckstore.open(place) as store:
            encode(store._repository, store._catalog.hot())
            assert store.verify().problems == []
            sizes = {run: [store[f"{run}@{step}"].stored_bytes for step in range(3, 7)] for run in MESHES}
        print(sizes, sum(sizes["others"]) / sum(sizes["one"]))
        assert sum(sizes["others"]) < 1.01 * sum(sizes["one"])


def disturb(place: Path, hosts: Network, world: int, event: str, drawn: Random, last: int) -> list[int]:
    """Wait for the middle of a save, and let something happen; return the ranks that are killed by it."""
    host, step = drawn.randrange(hosts.hosts), last + drawn.randrange(1, 5)
    deadline = time.monotonic() + 120
    while not (place / "node-0" / f"step-{step}").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(drawn.uniform(0, 1.0))
    killed = {"rank": [drawn.randrange(world)], "coordinator": [0], "host": [*range(host, world, hosts.hosts)]}
    for rank in killed.get(event, []):
        with suppress(ProcessLookupError):
            os.kill(int((place / f"node-{rank}" / "process").read_text()), signal.SIGKILL)
    if event == "away":
        hosts.stop_server(AWAY)
    if event == "partition":
        hosts.cut_off(host)
        time.sleep(3 * LIMIT)
        hosts.reconnect(host)
    return killed.get(event, [])


@pytest.mark.parametrize("kind", ["bucket", "directory"])
def test_no_death_and_no_partition_hangs_a_save(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is whole, or nobody was told that it exists; the next job goes on."""
    world, kills = 4, int(os.environ.get("CKSTORE_NODES", "1"))
    with network(2) as hosts, ThreadPoolExecutor(1) as pool:
        for name, value in hosts.bucket.anywhere.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "mine"))
        place = f"{hosts.bucket.url}/{kind}" if kind == "bucket" else str(tmp_path / "store")
        ckstore.init(place).close()
        last = 0
        for number in range(kills):
            drawn = Random(number)
            event = drawn.choice(["rank", "coordinator", "host", "partition", *(["away"] if kind == "bucket" else [])])
            own = tmp_path / f"kill-{number}"
            told = pool.submit(disturb, own, hosts, world, event, drawn, last)
            found = run_ranks(world, "train", own, network=hosts, store=place, run="a", kind="fsdp", steps=6)
            killed = told.result()
            lived = [written for rank, (_, _, written) in enumerate(found) if rank not in killed or written]
            assert all(written is not None for written in lived), found
            longest = max((second for written in lived for second in written["seconds"]), default=0.0)
            # A host that is cut off from the bucket waits for that, too.
            limit = 2 * LIMIT + 10 + {"away": AWAY, "partition": LIMIT * (kind == "bucket")}.get(event, 0)
            assert longest < limit, (event, number, found)
            with ckstore.open(place) as store:
                assert store.verify().problems == []
                steps = [row.step for row in store._catalog.versions()]
                assert steps == [*range(1, len(steps) + 1)]
                assert len(steps) >= max((written["saved"] for written in lived), default=0)
                print(
                    number, kind, event, killed, last, len(steps), round(longest, 1), {w["error"][:200] for w in lived}
                )
                last = len(steps)
        with ckstore.open(place) as store:
            store["a@latest"].checkout(tmp_path / "whole.pt")
        [*_, rank] = all_succeed(
            run_ranks(3, "train", tmp_path, network=hosts, store=place, run="a", kind="fsdp", steps=1)
        )
        assert last == 0 or rank["equal"].startswith("All ")


def test_a_save_takes_the_time_of_files(tmp_path: Path) -> None:
    """And little memory next to a rank's shard. The shards of these tensors are whole objects."""
    megabytes = 64
    ckstore.init(tmp_path / "store").close()
    place = str(tmp_path / "store")
    found = all_succeed(run_ranks(8, "race", tmp_path, store=place, megabytes=megabytes, rounds=5))
    files, store = (
        [max(times) for times in zip(*(rank[kind] for rank in found), strict=True)] for kind in ("files", "store")
    )
    memory = max(max(rank["memory"]) for rank in found)
    print("files", files, "store", store, "ratio", median(store) / median(files), "memory", memory)
    assert memory < (megabytes + 256) << 20
    assert median(store) < 1.2 * median(files)
