"""Writers on one store in an object store, killed at random, behind a network with faults; nothing may be lost.

    tools/stress-bucket [SECONDS] [SEED] [WRITERS]

Each writer is a process with a cache directory of its own. It journals each commit; the journalled versions must all
exist at the end: once, with their content. One process frees space with no grace, one reads.

Faults are: a version that was reported and is missing or differs; two versions of one run and step, or one number;
an error that a user would see; a mirror that contradicts the log; unreferenced packs after a collection.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ckstore
from ckstore.errors import ConflictError, NotFoundError
from ckstore.writing import encode
from tests.checkpoints import scratch
from tests.fault_proxy import RATES, counts, fault_proxy, set_rates
from tests.object_store import object_store
from tests.stressing import Journal

URL = "s3://models/stressed"
#: Mean seconds between two kills, and between two collections.
BETWEEN_KILLS, BETWEEN_COLLECTIONS = 1.0, 0.5
#: How often the collector is spared: the more is left of killed writers, the longer it takes.
SPARED = 0.9

_SHAPE = (48, 64)


def expected(run: str, step: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a run's version at a step: weights that move, a moment, and one that all runs share."""
    weights = np.random.default_rng(list(run.encode())).standard_normal(_SHAPE)
    noise = np.random.default_rng([step, *run.encode()]).standard_normal(_SHAPE)
    return {
        "w": (weights + 1e-3 * noise).astype(np.float32),
        "exp_avg": (1e-3 * noise).astype(np.float32),
        "frozen": np.random.default_rng(0).standard_normal(_SHAPE).astype(np.float32),
    }


@dataclass
class Outcome:
    """Counts and faults of a stress run."""

    seconds: float = 0.0
    commits: int = 0
    kills: int = 0
    collections: int = 0
    reads: int = 0
    again: int = 0
    unreported: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        asked = {name.partition(" ")[2]: n for name, n in sorted(self.requests.items()) if name.startswith("request")}
        met = {name.partition(" ")[2]: n for name, n in sorted(self.requests.items()) if name.startswith("fault")}
        return "\n".join(
            [
                f"{self.commits} commits in {self.seconds:.0f} s, {self.commits / max(self.seconds, 1):.1f} a second;"
                f" {self.unreported} more by writers that were killed before they could say so",
                f"{self.kills} processes killed, {self.collections} collections, {self.reads} versions read in between",
                f"{self.again} changes were made again because a collection had removed their packs",
                f"requests: {asked}; {sum(asked.values()) / max(self.commits, 1):.1f} a commit, all processes together",
                f"faults of the network: {met}",
                f"{len(self.faults)} faults",
                *self.faults,
            ]
        )


class Worker:
    """One process: does its work again and again until it is killed."""

    def __init__(self, directory: Path, name: str, seed: int) -> None:
        self.cache = directory / name
        self.journal = Journal(directory / "journal")
        self.name = name
        self.random = random.Random(seed)

    def work(self) -> None:
        """Repeat the worker's task until killed; report an error as a fault."""
        role: Callable[[ckstore.Store], None] = getattr(self, self.name.rstrip("0123456789"))
        logging.getLogger("ckstore").addHandler(_Warnings(self))
        encode.GRACE = encode._PAUSE = 0.0  # Encodings free bytes at once, even under readers.
        while True:
            try:
                with ckstore.open(URL, cache=self.cache) as store:
                    for _ in range(self.random.randrange(1, 20)):
                        role(store)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                said = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
                self.journal.tell("fault", f"{self.name}: {said}")
                time.sleep(0.5)

    def writer(self, store: ckstore.Store) -> None:
        """Store the next version of a run, and say so."""
        run = f"run-{self.name}"
        step = max((number for other, number in self.journal.names("trying") if other == run), default=-1) + 1
        self.journal.tell("trying", run, step)
        while True:
            try:
                row = store.ingest(expected(run, step), run=run, step=step, hot=self.random.choice((0, 0, 1))).version
            except ConflictError as error:
                if "removed by `gc`" not in str(error):
                    raise
                self.journal.tell("again", run, step)
                continue
            break
        self.journal.tell("done", run, step, row.uid)

    def collector(self, store: ckstore.Store) -> None:
        """Free space at once."""
        time.sleep(self.random.expovariate(1 / BETWEEN_COLLECTIONS))
        store.gc(grace=0)
        self.journal.tell("collected")

    def reader(self, store: ckstore.Store) -> None:
        """Read a version that must be there."""
        time.sleep(self.random.expovariate(5))
        done = sorted(self.journal.names("done"))
        if done:
            run, step = self.random.choice(done)
            store._catalog.refresh()
            problem = difference(store, run, step)
            self.journal.tell("fault" if problem else "read", problem)


class _Warnings(logging.Handler):
    """Logged warnings of background threads: losing a race to another process is no fault."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.WARNING)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        rightly = any(words in said for words in ("removed by `gc`", "meanwhile", "nother process"))
        self._worker.journal.tell("again" if rightly else "fault", f"{self._worker.name}: {said}")


def difference(store: ckstore.Store, run: str, step: int) -> str:
    """Describe how a version that must exist differs; empty if it does not."""
    try:
        version = store[f"{run}@{step}"]
    except NotFoundError:
        return f"{run}@{step} was reported and is not there"
    wrong = [path for path, value in expected(run, step).items() if not np.array_equal(version[path].numpy(), value)]
    return f"{run}@{step} differs in {wrong}" if wrong else ""


def stress(seconds: float, seed: int, writers: int) -> Outcome:
    """Run writers, a collector and a reader for `seconds`, and kill them at random."""
    chosen = random.Random(seed)
    outcome = Outcome()
    names = [*(f"writer{number}" for number in range(writers)), "collector0", "reader0"]
    with scratch() as directory, object_store() as server, fault_proxy(server.endpoint, {}, seed) as proxy:
        os.environ |= {**server.anywhere, "AWS_ENDPOINT_URL": proxy, "CKSTORE_CACHE": str(directory / "cache")}
        # The client runs threads that a fork does not take along: this process makes no request before the last fork.
        subprocess.run([sys.executable, "-m", "ckstore", "init", URL], check=True, stdout=subprocess.DEVNULL)
        with ckstore.init(directory / "warm") as store:
            store.ingest(expected("warm", 0), run="warm", step=0)
            store.ingest(expected("warm", 1), run="warm", step=1)
            store["warm@1"]["w"].numpy()
        set_rates(proxy, RATES)
        before = counts(proxy)
        children: dict[int, str] = {}
        start = time.monotonic()
        try:
            for name in names:
                children[_child(directory, name, chosen.randrange(1 << 30))] = name
            while time.monotonic() - start < seconds:
                time.sleep(min(chosen.expovariate(1 / BETWEEN_KILLS), seconds))
                pid = chosen.choice(sorted(children))
                if children[pid] == "collector0" and chosen.random() < SPARED:
                    continue
                _end(pid)
                outcome.kills += 1
                name = children.pop(pid)
                children[_child(directory, name, chosen.randrange(1 << 30))] = name
        finally:
            for pid in children:
                _end(pid)
        outcome.seconds = time.monotonic() - start
        outcome.requests = counts(proxy) - before
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint  # The final checks bypass the fault proxy.
        _conclude(directory, names, outcome)
    return outcome


def _child(directory: Path, name: str, seed: int) -> int:
    pid = os.fork()
    if not pid:
        try:
            Worker(directory, name, seed).work()
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _conclude(directory: Path, names: list[str], outcome: Outcome) -> None:
    """Check everything after all work: from a place that has seen nothing, and from each mirror."""
    journal = Journal(directory / "journal")
    said = Counter(line[0] for line in journal.read())
    outcome.commits, outcome.collections = said["done"], said["collected"]
    outcome.reads, outcome.again = said["read"], said["again"]
    faults = outcome.faults
    faults += [line[1] for line in journal.read() if line[0] == "fault"]
    reported = {(line[1], line[2]): line[3] for line in journal.read() if line[0] == "done"}
    tried = journal.names("trying")
    for step in ("as it was left", "after gc"):
        with ckstore.open(URL, cache=directory / f"fresh {step}") as store:
            if step == "after gc":
                store.gc(grace=0)
                there = {info.name for info in store._repository.packs.list_packs()}
                if there != {info.name for info in store._catalog.packs()}:
                    faults.append(f"{step}: packs in the bucket are not those of the catalog")
            rows = store._catalog.versions()
            found = {(row.run, row.step): row.uid for row in rows}
            for count, key in ((len(found), "run and step"), (len({row.number for row in rows}), "number")):
                if count != len(rows):
                    faults.append(f"{step}: two versions have one {key}")
            faults += [
                f"{step}: {name} has another id" for name, uid in reported.items() if found.get(name, uid) != uid
            ]
            faults += [f"{step}: {name} was never tried" for name in found if name not in tried]
            for run, number in sorted({*reported, *found}):  # type: ignore[type-var]
                problem = difference(store, run, number or 0)
                if problem:
                    faults.append(f"{step}: {problem}")
            faults += [f"{step}: verify: {problem}" for problem in store.verify().problems]
            outcome.unreported = len(found.keys() - reported.keys())
    for name in names:
        with ckstore.open(URL, cache=directory / name) as store:
            faults += [f"{name}: {sentence}" for sentence in store._catalog.differences()]
            if store._catalog.versions() != rows:
                faults.append(f"{name}: the mirror has other versions")


if __name__ == "__main__":
    result = stress(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(result)
    sys.exit(bool(result.faults))
