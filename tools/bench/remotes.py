"""What a store in an object store costs: requests, bytes, and seconds over a link that is simulated.

The checkpoints are those that are given, oldest first, or noise that drifts. All clients share the link; a range is a
request. Seconds hold what this machine computes meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import ckstore
from ckstore.policy import Policy
from ckstore.storage.remote import mirror
from tests.checkpoints import scratch
from tests.equality import assert_same
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

#: Seconds a request, and bytes a second.
LATENCY, BANDWIDTH = 0.03, 100e6

_URL = "s3://models/measured"


@dataclass(frozen=True)
class Row:
    """What one thing took."""

    what: str
    requests: dict[str, int]
    read: int
    written: int
    seconds: float

    def cells(self) -> list[str]:
        """For the table."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.requests.items()))
        return [
            self.what, str(sum(self.requests.values())), kinds, f"{self.read:,}", f"{self.written:,}",
            f"{self.seconds:.2f}",
        ]  # fmt: skip


class Bench:
    """A server with a link, whose rows are collected.

    Parameters
    ----------
    directory
        For mirrors and files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows: list[Row] = []
        self.server = SimulatedServer()

    @contextmanager
    def measured(self, what: str) -> Iterator[None]:
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
            self.rows.append(Row(what, dict(server.requests), server.bytes["read"], server.bytes["put"], seconds))

    def fresh(self) -> None:
        """Another store: the next one lies on a server of its own."""
        server = self.server = SimulatedServer()
        mirror.ObstoreBucket = lambda url, options: SimulatedBucket(server)  # type: ignore[assignment,misc,return-value]

    def cache(self, name: str) -> Path:
        """A directory of mirrors."""
        return self.directory / f"{id(self.server)}-{name}"

    def opens(self, versions: int) -> None:
        """A cold and a warm open of a store of many versions, which are small."""
        self.fresh()
        with ckstore.init(_URL, cache=self.cache("writer")) as store:
            for step in range(versions):
                store.ingest({"w": np.full(8, step, np.float32)}, run="r", step=step, hot=0)
        for what in ("cold", "warm"):
            with self.measured(f"{what} open of {versions:,} versions"):
                ckstore.open(_URL, cache=self.cache("reader")).close()

    def files(self, paths: list[Path]) -> None:
        """An ingest, a restore of the deepest version and of the slice of a tensor of it."""
        self.fresh()
        with ckstore.init(_URL, cache=self.cache("writer")) as store:
            for step, path in enumerate(paths[:-1]):
                store.ingest(path, run="r", step=step, hot=0)
            nbytes = paths[-1].stat().st_size
            with self.measured(f"ingest of {nbytes / 1e6:.0f} MB"):
                store.ingest(paths[-1], run="r", step=len(paths), hot=0)
            deep = max(store.versions(), key=lambda row: (row.depth, row.number))
        with ckstore.open(_URL, cache=self.cache("restore")) as store:
            with self.measured(f"restore of {deep.original_bytes / 1e6:.0f} MB, depth {deep.depth}"):
                store[deep.number].checkout(self.directory / "restored")
            exact = (self.directory / "restored").read_bytes() == paths[deep.number - 1].read_bytes()
            assert exact, f"version {deep.number} is not what was stored"
        with ckstore.open(_URL, cache=self.cache("slice")) as store:
            version = store[deep.number]
            largest = max(version, key=lambda path: version[path].nbytes)
            with self.measured(f"10 rows of {largest}, depth {deep.depth}"):
                _ = version[largest][:10]

    def restores(self, paths: list[Path]) -> list[str]:
        """Cold restores of the deepest version as a state dict, exact and coarse, beside the file over the same link.

        The file is fetched at the link's speed, and then loaded with `torch.load`, from the page cache.
        """
        nbytes = paths[-1].stat().st_size
        start = time.perf_counter()
        torch.load(paths[-1], weights_only=False)
        whole = LATENCY + nbytes / BANDWIDTH + time.perf_counter() - start
        lines = [f"| {nbytes / 1e6:.0f} MB, torch.load | | 1 | {nbytes:,} | 1.00 | {whole:.2f} | |"]
        for fidelity in ("exact", "coarse"):
            self.fresh()
            with ckstore.init(_URL, cache=self.cache("writer")) as store:
                store.set_policy(Policy(fidelity), run="r")
                for step, path in enumerate(paths):
                    store.ingest(path, run="r", step=step, hot=0)
                deep = max(store.versions(), key=lambda row: (row.depth, row.number))
            for name in ("compiles", "cold"):
                with self.measured(name), ckstore.open(_URL, cache=self.cache(name)) as store:
                    found = store[deep.number].state_dict()
                row = self.rows.pop()
            if fidelity == "exact":
                assert_same(found, torch.load(paths[deep.number - 1], weights_only=False))
            lines.append(
                f"| {nbytes / 1e6:.0f} MB, {fidelity} | {deep.depth} | {sum(row.requests.values())} | {row.read:,} |"
                f" {row.read / nbytes:.3f} | {row.seconds:.2f} | {whole / row.seconds:.1f}x |"
            )
        return lines

    def commits(self, writers: int, seconds: float) -> str:
        """How many versions a second so many writers commit, each to a run of its own and with a mirror of its own."""
        self.fresh()
        ckstore.init(_URL, cache=self.cache("0")).close()
        stores = [ckstore.open(_URL, cache=self.cache(str(number))) for number in range(writers)]
        for number, store in enumerate(stores):
            store.ingest({"w": np.full(8, number, np.float32)}, run=f"r{number}", step=-1, hot=0)
        with self.measured(""), ThreadPoolExecutor(writers) as pool:
            deadline = time.perf_counter() + seconds

            def write(number: int) -> int:
                step = 0
                while time.perf_counter() < deadline:
                    state = {"w": np.full(8, 1000 * number + step, np.float32)}
                    stores[number].ingest(state, run=f"r{number}", step=step, hot=0)
                    step += 1
                return step

            count = sum(pool.map(write, range(writers)))
        row = self.rows.pop()
        for store in stores:
            store.close()
        asked = sum(row.requests.values())
        return f"| {writers} | {count / row.seconds:.1f} | {asked / max(count, 1):.1f} |"


def drifting(directory: Path, count: int) -> list[Path]:
    """Checkpoints of 36 MB: weights that drift, and two moments, in 24 tensors each."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer{number}.weight": torch.randn(256, 488, generator=generator) for number in range(24)}
    paths = []
    for step in range(count):
        moved = {name: weight + 1e-3 * step for name, weight in weights.items()}
        state = {name: weight + 1e-4 * torch.randn(weight.shape, generator=generator) for name, weight in moved.items()}
        moments = {
            kind: {name: 1e-3 * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        paths.append(directory / f"step{step}.pt")
        torch.save({"model": state, **moments}, paths[-1])
    return paths


def trained(directory: Path, megabytes: float, count: int) -> list[Path]:
    """Checkpoints of random weights that AdamW moves by random gradients, ten steps from one to the next."""
    generator = torch.Generator().manual_seed(0)
    rows = round(megabytes * 1e6 / 12 / 8 / 1024)
    model = torch.nn.ParameterDict(
        {f"layer{number}": torch.randn(rows, 1024, generator=generator) / 32 for number in range(8)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    paths = []
    for step in range(10 * count):
        for parameter in model.values():
            parameter.grad = 1e-2 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        if step % 10 == 9:
            paths.append(directory / f"trained{len(paths)}.pt")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, paths[-1])
    return paths


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=270, help="of checkpoints that are made to be restored")
    parser.add_argument("--versions", type=int, default=3000, help="of the store that is opened")
    parser.add_argument("--seconds", type=float, default=10, help="for which writers commit")
    parser.add_argument("--writers", type=int, action="append", help="at once  [default: 1 and 8]")
    given = parser.parse_args()
    with scratch() as directory:
        bench = Bench(directory)
        bench.files(given.checkpoints or drifting(directory, 8))
        bench.opens(given.versions)
        print("| what | requests | of which | bytes read | bytes written | seconds |\n|---|---|---|---|---|---|")
        for row in bench.rows:
            print(f"| {' | '.join(row.cells())} |")
        print("\n| restore | depth | requests | bytes read | of the file's | seconds | faster |\n" + "|---" * 7 + "|")
        for paths in ([given.checkpoints] if given.checkpoints else []) + [trained(directory, given.megabytes, 4)]:
            print("\n".join(bench.restores(paths)))
        print("\n| writers | commits a second | requests a commit |\n|---|---|---|")
        for writers in given.writers or [1, 8]:
            print(bench.commits(writers, given.seconds))


if __name__ == "__main__":
    main()
