"""Measures a store in an object store: restores and commits over a simulated link."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import ckstore
from ckstore.policy import Policy
from ckstore.storage.remote import mirror
from tests.equality import assert_same
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer
from tools.bench.speed_figures import Section
from tools.bench.speed_frame import Bench

#: Seconds per request, and bytes per second.
LATENCY, BANDWIDTH = 0.03, 100e6

#: Numbers of writers, and seconds for which each number commits.
_WRITERS, _SECONDS = (1, 8), 10.0

URL = "s3://models/measured"


@dataclass(frozen=True)
class Cost:
    """The requests, the bytes read and put, and the seconds of an operation, also of CPU."""

    requests: int
    read: int
    put: int
    seconds: float
    cpu: float


class Link:
    """A store on a simulated server of its own, and the link to it.

    Parameters
    ----------
    directory
        For the mirrors; created, and removed by `close`.
    is_delayed
        Whether requests and bytes take time.
    """

    def __init__(self, directory: Path, *, is_delayed: bool = True) -> None:
        self.directory = directory
        self._is_delayed = is_delayed
        self.server = server = SimulatedServer()
        self._patch = mock.patch.object(mirror, "ObstoreBucket", side_effect=lambda *_: SimulatedBucket(server))
        self._patch.start()
        self.costs: list[Cost] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a block over the link."""
        server = self.server
        server.requests.clear()
        server.bytes.clear()
        if self._is_delayed:
            server.latency, server.bandwidth = LATENCY, BANDWIDTH
        start, used = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            seconds, cpu = time.perf_counter() - start, time.process_time() - used
            server.latency = server.bandwidth = 0.0
            nbytes = server.bytes
            self.costs.append(Cost(server.requests.total(), nbytes["read"], nbytes["put"], seconds, cpu))

    def cache(self, name: str) -> Path:
        """Return a directory of mirrors."""
        return self.directory / name

    def close(self) -> None:
        """Delete the mirrors, and reach other object stores again."""
        self._patch.stop()
        shutil.rmtree(self.directory)


def restores(bench: Bench) -> Section:
    """Measure restores of the deepest version as a state dict, exact and coarse, against a download of the file."""
    bench.report("restores from a bucket")
    paths = bench.series()
    nbytes = paths[-1].stat().st_size
    torch.load(paths[-1], weights_only=False)
    start = time.perf_counter()
    torch.load(paths[-1], weights_only=False)
    whole = LATENCY + nbytes / BANDWIDTH + time.perf_counter() - start
    head = [
        "restore", "depth", "requests", "bytes read", "of the file's", "seconds", "faster", "of them opening",
        "faster once open",
    ]  # fmt: skip
    table = [head, ["torch.load", "", "1", f"{nbytes:,}", "1.000", f"{whole:.2f}", "", "", ""]]
    sizes = [["exact versions", "bytes", "of the files'", "most bytes read, of its file's"]]
    with ckstore.open(bench.store(), "r") as store:
        sizes.append(["in a directory", *_sizes(store)])
    for fidelity in ("exact", "coarse"):
        link = Link(bench.work / "bucket")
        with ckstore.init(URL, cache=link.cache("writer")) as store:
            store.set_policy(Policy(fidelity), run="run")
            for step, path in enumerate(paths):
                store.ingest(path, run="run", step=step, hot=0)
            deep = max(store.versions(), key=lambda row: (row.depth, row.number))
            if fidelity == "exact":
                sizes.append(["in a bucket", *_sizes(store)])
        _restored(link, deep.number)  # Compiles kernels.
        for note, before in (("", []), (", parent cached", [deep.number - 1])):
            turns = []
            for _ in range(bench.repeat):
                found, spent, opening = _restored(link, deep.number, before)
                if fidelity == "exact":
                    assert_same(found, torch.load(paths[deep.number - 1], weights_only=False))
                turns.append((spent, opening))
            spent, opening = sorted(turns, key=lambda turn: turn[0].seconds)[len(turns) // 2]
            cells = [str(deep.depth), str(spent.requests), f"{spent.read:,}", f"{spent.read / nbytes:.3f}"]
            cells += [f"{spent.seconds:.2f}", f"{whole / spent.seconds:.2f}x", f"{opening:.2f}"]
            table.append([fidelity + note, *cells, f"{whole / (spent.seconds - opening):.2f}x"])
        link.close()
    about = (
        f"Checkpoints of {nbytes / 1e6:.0f} MB. Simulated link: 30 ms a request (a ranged read is one), 100 MB/s in "
        "all. Seconds include local computation. `torch.load` fetches the file at the link's speed first. *Parent "
        "cached*: the machine has restored the version before. Seconds are medians."
    )
    return Section("In a bucket: restores", about, [table, sizes])


def _restored(link: Link, number: int, before: Sequence[int] = ()) -> tuple[Any, Cost, float]:
    """Restore a version after `before`, through one cache; also return the seconds of opening the store."""
    cache = link.cache("reader")
    for other in before:
        with ckstore.open(URL, cache=cache) as store:
            store[other].state_dict()
    with link.measured():
        start = time.perf_counter()
        with ckstore.open(URL, cache=cache) as store:
            opening = time.perf_counter() - start
            found = store[number].state_dict()
    shutil.rmtree(cache)
    return found, link.costs[-1], opening


def writers(bench: Bench) -> Section:
    """Measure the commits of one writer and of several."""
    bench.report("writers to a bucket")
    about = "Each writer commits tiny versions to its own run, without a pause, from its own mirror over that link."
    head = ["writers", "commits a second", "requests a commit"]
    return Section("In a bucket: writers", about, [[head, *(_commits(bench, count) for count in _WRITERS)]])


def _commits(bench: Bench, writers: int) -> list[str]:
    link = Link(bench.work / "bucket")
    ckstore.init(URL, cache=link.cache("first")).close()
    stores = [ckstore.open(URL, cache=link.cache(str(number))) for number in range(writers)]
    for number, store in enumerate(stores):
        store.ingest({"w": np.full(8, number, np.float32)}, run=f"r{number}", step=-1, hot=0)
    with link.measured(), ThreadPoolExecutor(writers) as pool:
        deadline = time.perf_counter() + _SECONDS

        def write(number: int) -> int:
            step = 0
            while time.perf_counter() < deadline:
                state = {"w": np.full(8, 1000 * number + step, np.float32)}
                stores[number].ingest(state, run=f"r{number}", step=step, hot=0)
                step += 1
            return step

        count = sum(pool.map(write, range(writers)))
    for store in stores:
        store.close()
    link.close()
    spent = link.costs[-1]
    return [str(writers), f"{count / spent.seconds:.1f}", f"{spent.requests / max(count, 1):.1f}"]


def _sizes(store: ckstore.Store) -> list[str]:
    """Return the bytes of all versions; these, and the largest sum of one version's layers, as parts of the files."""
    rows, reader = store.versions(), store._repository.reader
    shares = []
    for row in rows:
        records = {
            record
            for identity in store[row.number]._stored.document.objects
            for record in reader.chains.records(identity)
        }
        nbytes = sum(length for record in records for _, length in reader.stored.ranges(record, None))
        shares.append(nbytes / row.original_bytes)
    stored, original = sum(row.stored_bytes for row in rows), sum(row.original_bytes for row in rows)
    return [f"{stored:,}", f"{stored / original:.4f}", f"{max(shares):.2f}"]
