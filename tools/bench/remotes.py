"""Measures a store in an object store: requests, bytes, and seconds over a simulated link."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import ckstore
from ckstore.policy import Policy
from ckstore.storage.remote import mirror
from tests.checkpoints import scratch
from tests.equality import assert_same
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer
from tools.bench import series, speed_figures
from tools.bench.speed_figures import Section
from tools.bench.speeds import DOCUMENT, publish

#: Seconds per request, and bytes per second.
LATENCY, BANDWIDTH = 0.03, 100e6

#: The number of repetitions of a restore; the median counts.
_TURNS = 3

_URL = "s3://models/measured"

_LINK = (
    "Simulated link: 30 ms per request, 100 MB/s shared by all requests. A ranged read counts as a request. Seconds"
    " include local computation."
)


@dataclass(frozen=True)
class Row:
    """The cost of one operation."""

    name: str
    requests: dict[str, int]
    read: int
    written: int
    seconds: float

    def cells(self) -> list[str]:
        """Return the row of the table."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.requests.items()))
        return [
            self.name, str(sum(self.requests.values())), kinds, f"{self.read:,}", f"{self.written:,}",
            f"{self.seconds:.2f}",
        ]  # fmt: skip


class Bench:
    """A server with a link, which collects rows.

    Parameters
    ----------
    directory
        For mirrors and files.
    megabytes, versions
        Of synthetic checkpoints.
    found
        Checkpoints to use instead.
    opened
        Versions of the store in the test of opening.
    seconds
        Duration of the test of writers.
    """

    def __init__(
        self,
        directory: Path,
        megabytes: int = 36,
        versions: int = 8,
        found: series.Series | None = None,
        opened: int = 3000,
        seconds: float = 10.0,
    ) -> None:
        self.directory = directory
        self.megabytes = megabytes
        self.versions = versions
        self.series = found
        self.opened = opened
        self.seconds = seconds
        self.server = SimulatedServer()

    @cached_property
    def paths(self) -> list[Path]:
        """The checkpoints, oldest first."""
        if self.series is not None:
            return list(self.series.versions[: self.versions])
        return series.write_versions(self.directory, self.megabytes, self.versions)

    @contextmanager
    def measured(self, name: str, rows: list[Row]) -> Iterator[None]:
        """Measure a block over the link."""
        server = self.server
        server.requests.clear()
        server.bytes.clear()
        server.latency, server.bandwidth = LATENCY, BANDWIDTH
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            server.latency = server.bandwidth = 0.0
            rows.append(Row(name, dict(server.requests), server.bytes["read"], server.bytes["put"], seconds))

    def fresh(self) -> None:
        """Start another store: the next one is on its own server."""
        server = self.server = SimulatedServer()
        mirror.ObstoreBucket = lambda url, options: SimulatedBucket(server)  # type: ignore[assignment,misc,return-value]

    def cache(self, name: str) -> Path:
        """Return a directory of mirrors."""
        return self.directory / f"{id(self.server)}-{name}"

    def requests(self) -> Section:
        """Measure opening, storing, restoring, slicing and pushing."""
        rows: list[Row] = []
        self._open(rows)
        self._use(rows)
        self._push(rows)
        head = ["measurement", "requests", "kinds", "bytes read", "bytes written", "seconds"]
        about = f"{_LINK} A version of depth *n* has a chain of *n* + 1 packs; the cache is empty."
        return Section("In a bucket: requests", about, [[head, *(row.cells() for row in rows)]])

    def _open(self, rows: list[Row]) -> None:
        """Measure a cold and a warm open of a store of many small versions."""
        self.fresh()
        with ckstore.init(_URL, cache=self.cache("writer")) as store:
            for step in range(self.opened):
                store.ingest({"w": np.full(8, step, np.float32)}, run="r", step=step, hot=0)
        for order in ("first", "next"):
            with self.measured(f"the {order} open of a store of {self.opened:,} versions", rows):
                ckstore.open(_URL, cache=self.cache("reader")).close()

    def _use(self, rows: list[Row]) -> None:
        """Measure an ingest, restores of the deepest version, and rows of the largest tensor of each version."""
        self.fresh()
        *paths, last = self.paths
        with ckstore.init(_URL, cache=self.cache("writer")) as store:
            for step, path in enumerate(paths):
                store.ingest(path, run="r", step=step, hot=0)
            nbytes = last.stat().st_size
            with self.measured(f"ingest of {nbytes / 1e6:.0f} MB", rows):
                store.ingest(last, run="r", step=len(paths), hot=0)
            versions = store.versions()
        deep = max(versions, key=lambda row: (row.depth, row.number))
        with ckstore.open(_URL, cache=self.cache("restore")) as store:
            with self.measured(f"checkout of {deep.original_bytes / 1e6:.0f} MB, depth {deep.depth}", rows):
                store[deep.number].checkout(self.directory / "restored")
            exact = (self.directory / "restored").read_bytes() == self.paths[deep.number - 1].read_bytes()
            assert exact, f"version {deep.number} is not restored exactly"
        for row in versions:
            with ckstore.open(_URL, cache=self.cache(f"slice{row.number}")) as store:
                with self.measured(f"shapes of a version, depth {row.depth}", rows):
                    version = store[row.number]
                    largest = max(version, key=lambda path: version[path].nbytes)
                with self.measured(f"10 rows of its {largest}", rows):
                    _ = version[largest][:10]
        with (
            ckstore.open(_URL, cache=self.cache(f"slice{deep.number - 1}")) as store,
            self.measured(f"10 rows, depth {deep.depth}, parent cached", rows),
        ):
            _ = store[deep.number][largest][:10]

    def _push(self, rows: list[Row]) -> None:
        """Measure a push of all versions, and another one."""
        self.fresh()
        with (
            ckstore.init(self.directory / "local") as store,
            ckstore.init(_URL, cache=self.cache("writer")) as other,
        ):
            for step, path in enumerate(self.paths):
                store.ingest(path, run="r", step=step, hot=0)
            for name in (f"push of {len(self.paths)} versions", "push, nothing missing"):
                with self.measured(name, rows):
                    store.push(other)

    def restores(self) -> Section:
        """Measure restores of the deepest version as a state dict, exact and coarse, against a download of the file."""
        nbytes = self.paths[-1].stat().st_size
        torch.load(self.paths[-1], weights_only=False)
        start = time.perf_counter()
        torch.load(self.paths[-1], weights_only=False)
        whole = LATENCY + nbytes / BANDWIDTH + time.perf_counter() - start
        head = [
            "restore", "depth", "requests", "bytes read", "of the file's", "seconds", "faster", "of them opening",
            "faster once open",
        ]  # fmt: skip
        table = [head, ["torch.load", "", "1", f"{nbytes:,}", "1.000", f"{whole:.2f}", "", "", ""]]
        sizes = [["exact versions", "bytes", "of the files'", "most bytes read, of its file's"]]
        with ckstore.init(self.directory / "local") as store:
            for step, path in enumerate(self.paths):
                store.ingest(path, run="r", step=step, hot=0)
            sizes.append(["in a directory", *_sizes(store)])
        shutil.rmtree(self.directory / "local")
        for fidelity in ("exact", "coarse"):
            self.fresh()
            with ckstore.init(_URL, cache=self.cache("writer")) as store:
                store.set_policy(Policy(fidelity), run="r")
                for step, path in enumerate(self.paths):
                    store.ingest(path, run="r", step=step, hot=0)
                deep = max(store.versions(), key=lambda row: (row.depth, row.number))
                if fidelity == "exact":
                    sizes.append(["in a bucket", *_sizes(store)])
            self._restored(deep.number, fidelity)  # Compiles kernels.
            for note, before in (("", []), (", parent cached", [deep.number - 1])):
                turns = [self._restored(deep.number, fidelity, before) for _ in range(_TURNS)]
                row, opening = sorted(turns, key=lambda turn: turn[0].seconds)[_TURNS // 2]
                asked, share, seconds = sum(row.requests.values()), row.read / nbytes, row.seconds
                cells = [str(deep.depth), str(asked), f"{row.read:,}", f"{share:.3f}", f"{seconds:.2f}"]
                cells += [f"{whole / seconds:.2f}x", f"{opening:.2f}", f"{whole / (seconds - opening):.2f}x"]
                table.append([fidelity + note, *cells])
        about = (
            f"Checkpoints of {nbytes / 1e6:.0f} MB. {_LINK} `torch.load` fetches the file at the link's speed first."
            " *Parent cached*: the machine has restored the version before. Seconds are medians of three."
        )
        return Section("In a bucket: restores", about, [table, sizes])

    def _restored(self, number: int, fidelity: str, before: Sequence[int] = ()) -> tuple[Row, float]:
        """Restore a version after `before`, through one cache; also return the seconds of opening the store."""
        cache, rows = self.cache("reader"), list[Row]()
        for other in before:
            with ckstore.open(_URL, cache=cache) as store:
                store[other].state_dict()
        with self.measured("", rows):
            start = time.perf_counter()
            with ckstore.open(_URL, cache=cache) as store:
                opening = time.perf_counter() - start
                found = store[number].state_dict()
        shutil.rmtree(cache)
        if fidelity == "exact":
            assert_same(found, torch.load(self.paths[number - 1], weights_only=False))
        return rows[0], opening

    def writers(self) -> Section:
        """Measure the commits of one writer and of several."""
        about = f"Each writer commits tiny versions to its own run, without a pause, from its own mirror. {_LINK}"
        head = ["writers", "commits a second", "requests a commit"]
        return Section("In a bucket: writers", about, [[head, *(self._commits(writers) for writers in (1, 8))]])

    def _commits(self, writers: int) -> list[str]:
        self.fresh()
        ckstore.init(_URL, cache=self.cache("0")).close()
        stores = [ckstore.open(_URL, cache=self.cache(str(number))) for number in range(writers)]
        for number, store in enumerate(stores):
            store.ingest({"w": np.full(8, number, np.float32)}, run=f"r{number}", step=-1, hot=0)
        rows: list[Row] = []
        with self.measured("", rows), ThreadPoolExecutor(writers) as pool:
            deadline = time.perf_counter() + self.seconds

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
        asked = sum(rows[0].requests.values())
        return [str(writers), f"{count / rows[0].seconds:.1f}", f"{asked / max(count, 1):.1f}"]


def _sizes(store: ckstore.Store) -> list[str]:
    """Return the bytes of all versions; these, and the largest sum of one version's layers, as parts of the files."""
    rows, reader = store.versions(), store.repository.reader
    shares = []
    for row in rows:
        records = {record for identity in store[row.number].document.objects for record in reader.records(identity)}
        nbytes = sum(length for record in records for _, length in reader.ranges(record, None))
        shares.append(nbytes / row.original_bytes)
    stored, original = sum(row.stored_bytes for row in rows), sum(row.original_bytes for row in rows)
    return [f"{stored:,}", f"{stored / original:.4f}", f"{max(shares):.2f}"]


#: The measurements by name.
ROWS: dict[str, Callable[[Bench], Section]] = {
    "requests": Bench.requests,
    "restores": Bench.restores,
    "writers": Bench.writers,
}


def main(arguments: list[str] | None = None) -> None:
    """Measure the rows named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/remote", description=__doc__)
    parser.add_argument("--only", choices=ROWS, action="append", help="may be given again (default: all)")
    parser.add_argument("--series", type=Path, metavar="DIRECTORY", help="of checkpoints (default: synthetic ones)")
    parser.add_argument("--megabytes", type=int, default=36, help="of a synthetic checkpoint")
    parser.add_argument("--versions", type=int, default=8, help="of the series, from its first on")
    parser.add_argument("--opened", type=int, default=3000, help="versions of the store that is opened")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the test of writers")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    chosen = parser.parse_args(arguments)
    try:
        found = None if chosen.series is None else series.in_directory(chosen.series)
    except ValueError as error:
        parser.error(str(error))
    checkpoints = f"--megabytes {chosen.megabytes}" if found is None else f"--series {found.name}"
    options = {
        "requests": f"{checkpoints} --versions {chosen.versions} --opened {chosen.opened}",
        "restores": f"{checkpoints} --versions {chosen.versions}",
        "writers": f"--seconds {chosen.seconds:g}",
    }
    for name in chosen.only or ROWS:
        with scratch() as directory:
            bench = Bench(directory, chosen.megabytes, chosen.versions, found, chosen.opened, chosen.seconds)
            section = ROWS[name](bench)
            day, machine = datetime.now(UTC).date(), speed_figures.machine(directory)
        heading = section.title + ("" if found is None or name == "writers" else f": {found.name}")
        text = f"{section}\n\nMeasured on {day} with `tools/bench/remote --only {name} {options[name]}` on {machine}."
        print(f"## {heading}\n\n{text}\n", flush=True)
        if chosen.write:
            publish(heading, text, DOCUMENT)


if __name__ == "__main__":
    main()
