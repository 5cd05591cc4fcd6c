"""Processes that use one store at random and are killed at random, and the invariants that hold all the time.

    tools/stress [SECONDS] [SEED]

Four write, two read, one stores in a thread and forks children that read and tag, the others thin, rebase, tag, forget,
collect garbage, and recover. The content of a version follows from its run and step, so that every reader can check it.
Each operation is journalled before (`trying`) and after (`done`), so that after a kill it is known which versions must
exist, which may, and which must not.

Faults are: a wrong value; a version that was done and is gone, or was forgotten and is back; an error that is not
true; and a wait above ten seconds that nobody causes: for a process that is gone, or of a verb that has no one to wait
for. Collections wait for writers, and writers for a recovery; waiting for a processor is none of these.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

import ckstore
from ckstore.errors import ConflictError, LockedError, NotFoundError
from ckstore.recovery.recover import recover
from tests.checkpoints import scratch
from tests.children import exit_code, fork

SHAPE = (280, 256)
#: Seconds that a wait without a cause may take.
LONGEST = 10.0
#: Versions that a run keeps.
KEPT = 8
#: Children that are forked while a version is stored.
FORKS = 3
#: Mean seconds between two kills.
BETWEEN_KILLS = 1.5

Array = npt.NDArray[Any]
Name = tuple[str, int]


def expected(run: str, step: int) -> dict[str, Array]:
    """Return the tensors of a run's version at a step: weights and a moment that move, and one that never moves."""
    generator = np.random.default_rng(sum(run.encode()))
    weights, direction = generator.standard_normal((2, *SHAPE))
    noise = np.random.default_rng([step, *run.encode()]).standard_normal(SHAPE)
    frozen = np.random.default_rng(0).standard_normal(SHAPE)
    return {
        "w": (weights + 1e-3 * step * direction + 1e-4 * noise).astype(np.float32),
        "exp_avg": (1e-3 * noise).astype(np.float32),
        "frozen": frozen.astype(np.float32),
        "step": np.array(step),
    }


class Journal:
    """Lines of all processes in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, event: str, *said: Any) -> None:
        """Write a line."""
        os.write(self._descriptor, (json.dumps([event, *said]) + "\n").encode())

    def read(self) -> list[list[Any]]:
        """Return all lines so far."""
        text = self._path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # The last one may be coming.

    def names(self, event: str) -> set[Name]:
        """Return the versions that lines of a kind name."""
        return {(line[1], line[2]) for line in self.read() if line[0] == event}


@dataclass
class Outcome:
    """Counts and faults of a stress run."""

    seconds: float = 0.0
    kills: int = 0
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.seconds:.0f} s, {self.kills} processes killed"]
        lines += [f"{name}: {count} done" for name, count in sorted(self.done.items())]
        lines += [f"refused, rightly: {name}: {count}" for name, count in sorted(self.refused.items())]
        lines += [f"longest wait of {name}: {wait:.1f} s" for name, wait in sorted(self.longest.items())]
        lines += [f"{len(self.faults)} faults", *self.faults]
        return "\n".join(lines)


class Worker:
    """One process: does its work again and again until it is killed."""

    def __init__(self, store: Path, journal: Journal, name: str, seed: int) -> None:
        self.store = store
        self.journal = journal
        self.name = name
        self.random = random.Random(seed)

    def work(self) -> None:
        """Repeat the worker's verb until killed."""
        role = self.name.rstrip("0123456789")
        while True:
            verb, call = getattr(self, role)()
            start = time.monotonic()
            with self._watched(verb):
                call()
            # Collections of garbage need moments without writers, however slow the machine is.
            time.sleep(self.random.expovariate(1 / (0.3 + 2 * (time.monotonic() - start))))

    @contextmanager
    def _watched(self, verb: str) -> Iterator[None]:
        """Journal the outcome of a call: done, refused for a true reason, or a fault."""
        start, busy = time.monotonic(), _busy()
        self.journal.tell("begins", verb, start)
        try:
            yield
            self.journal.tell("did", verb)
        except LockedError as error:
            self._check_claims(str(error))
            self.journal.tell("refused", f"{verb}: {type(error).__name__}")
        except (ConflictError, NotFoundError) as error:
            if not self._is_true(error):
                self.journal.tell("fault", f"{verb}: {type(error).__name__}: {error}")
            self.journal.tell("refused", f"{verb}: {type(error).__name__}")
        except BaseException as error:
            self.journal.tell("fault", f"{verb}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        end = time.monotonic()
        self.journal.tell("ends", verb, end)
        waited = max(0.0, end - start - (_busy() - busy) - self._recoveries(start, end))
        self.journal.tell("waited", verb, round(waited, 2))
        if waited > LONGEST:
            self._check_claims(f"{verb} waited {waited:.1f} s")
            if verb not in ("gc", "recover"):
                self.journal.tell("fault", f"{verb} waited {waited:.1f} s")

    def _recoveries(self, start: float, end: float) -> float:
        """Return the seconds of a period during which a recovery kept all writers out."""
        times = [
            (line[0], line[2])
            for line in self.journal.read()
            if line[:2] in (["begins", "recover"], ["ends", "recover"])
        ]
        stretches = [
            (moment, following[1] if following else end)
            for (event, moment), following in itertools.zip_longest(times, times[1:])
            if event == "begins"
        ]
        return sum(max(0.0, min(end, last) - max(start, first)) for first, last in stretches)

    def _check_claims(self, subject: str) -> None:
        """Report claims of dead processes, which would block others."""
        with ckstore.open(self.store, "r") as store:
            for claim in store._catalog.leases():
                if not _lives(claim.pid):
                    self.journal.tell("fault", f"{subject}; process {claim.pid} ({claim.purpose}) is gone")

    def _is_true(self, error: Exception) -> bool:
        """Return whether an error tells the truth: a version is tagged, or another process is about to forget it."""
        text = str(error)
        gone = self.journal.names("forgetting")
        return (
            "tag" in text
            or any(f"{run}@{step}" in text for run, step in gone)
            or any(f"ersion {number}" in text for number in self._numbers(gone))
        )

    def _numbers(self, names: set[Name]) -> set[int]:
        return {line[3] for line in self.journal.read() if line[0] == "done" and (line[1], line[2]) in names}

    def writer(self) -> tuple[str, Callable[[], None]]:
        """Store the next version of a run, of memory or of a file."""
        run = f"run-{self.name}"
        step = max((number for other, number in self.journal.names("trying") if other == run), default=-1) + 1
        from_file = self.random.random() < 0.5

        def call() -> None:
            state = expected(run, step)
            self.journal.tell("trying", run, step)
            path = self.store.parent / f"{self.name}.npz"
            if from_file:
                np.savez(path, **state)
            with ckstore.open(self.store) as store:
                row = store.ingest(path if from_file else state, run=run, step=step).version
            self.journal.tell("done", run, step, row.number)

        return f"ingest of {'a file' if from_file else 'memory'}", call

    def reader(self) -> tuple[str, Callable[[], None]]:
        """Read a version that must be there."""

        def call() -> None:
            done = self.journal.names("done")
            wanted = sorted(done - self.journal.names("forgetting"))
            if wanted:
                self.check(*self.random.choice(wanted))

        return "read", call

    def check(self, run: str, step: int) -> None:
        """Compare a version that must exist with its expected tensors."""
        thinning = False
        for _ in range(3):
            thinning = (run, step) in self.journal.names("thinning")
            try:
                with ckstore.open(self.store, "r") as store:
                    version = store[f"{run}@{step}"]
                    bounds = {path: bound.max_abs for path, bound in version.deviations().items()}
                    found = {path: version[path].numpy() for path in version}
                break
            except NotFoundError:
                if (run, step) in self.journal.names("forgetting"):
                    return
                raise
            except ckstore.CkstoreError:
                # It gave up its exact values while it was read.
                if thinning or (run, step) not in self.journal.names("thinning"):
                    raise
        if bounds and (run, step) not in self.journal.names("thinning"):
            self.journal.tell("fault", f"{run}@{step} is coarse")
        for path, value in expected(run, step).items():
            off = np.abs(found[path].astype(np.float64) - value).max()
            if off > bounds.get(path, 0.0):
                self.journal.tell("fault", f"{path} of {run}@{step} is off by {off}, thinning: {thinning}")

    def forker(self) -> tuple[str, Callable[[], None]]:
        """Store the next version of a run in a thread, and fork children that use the store at the same time."""
        run = f"run-{self.name}"
        step = max((number for other, number in self.journal.names("trying") if other == run), default=-1) + 1

        def call() -> None:
            self.journal.tell("trying", run, step)
            with ckstore.open(self.store) as store, ThreadPoolExecutor(1) as pool:
                stored = pool.submit(store.ingest, expected(run, step), run=run, step=step)
                children = []
                for _ in range(FORKS):
                    time.sleep(self.random.expovariate(20))
                    children.append(fork(self._use))
                self.journal.tell("done", run, step, stored.result().version.number)
                for code in [exit_code(child) for child in children]:
                    if code != 0:
                        self.journal.tell("fault", f"a child ended with {code}")

        return "forks", call

    def _use(self) -> None:
        """Read and set a tag in a forked child."""
        self.random.seed(os.getpid())
        with self._watched("read in a child"):
            self.reader()[1]()
        there = sorted(self.journal.names("done") - self.journal.names("forgetting"))
        if there:
            run, step = self.random.choice(there)
            with self._watched("tag in a child"), ckstore.open(self.store) as store:
                store.tag(f"{run}@{step}", f"tag-{run}")
                self.journal.tell("tagged", run, step)

    def keeper(self) -> tuple[str, Callable[[], None]]:
        """Thin, rebase, tag or forget."""
        there = sorted(self.journal.names("done") - self.journal.names("forgetting"))
        verb = self.random.choice(["thin", "rebase", "tag", "forget"]) if there else "nothing"
        run, step = self.random.choice(there) if there else ("", 0)
        name = f"{run}@{step}"

        def call() -> None:
            with ckstore.open(self.store) as store:
                if verb == "thin":
                    self.journal.tell("thinning", run, step)
                    store.thin([name])
                elif verb == "rebase":
                    store.rebase([name])
                elif verb == "tag":
                    store.tag(name, f"tag-{run}")
                    self.journal.tell("tagged", run, step)
                elif verb == "forget":
                    self._forget(store, run, there)

        return verb, call

    def _forget(self, store: ckstore.Store, run: str, there: list[Name]) -> None:
        steps = [step for other, step in there if other == run]
        tagged = {store[number].step for tag, number in store._catalog.tags().items() if tag == f"tag-{run}"}
        going = [step for step in steps[:-KEPT] if step not in tagged]
        for step in going:
            self.journal.tell("forgetting", run, step)
        if going:
            store.forget([f"{run}@{step}" for step in going])
        for step in going:
            self.journal.tell("forgot", run, step)

    def collector(self) -> tuple[str, Callable[[], None]]:
        """Free unneeded bytes."""

        def call() -> None:
            with ckstore.open(self.store) as store:
                store.gc(grace=0.0 if self.random.random() < 0.5 else 60.0)

        return "gc", call

    def rebuilder(self) -> tuple[str, Callable[[], None]]:
        """Build the catalog again."""

        def call() -> None:
            for problem in recover(self.store).problems:
                self.journal.tell("fault", f"recover: {problem}")

        return "recover", call


#: Names of the processes: a verb and a number.
WORKERS = ("writer1", "writer2", "writer3", "writer4", "reader1", "reader2", "forker1", "keeper1", "keeper2",
           "collector1", "rebuilder1")  # fmt: skip


def stress(seconds: float, seed: int, workers: tuple[str, ...] = WORKERS) -> Outcome:
    """Run processes on one store and kill them, for some seconds; then check all of it."""
    chosen = random.Random(seed)
    with scratch() as directory:
        path = directory / "store"
        with ckstore.init(path) as store:  # Whatever is compiled or imported is so before processes are forked off.
            store.ingest(expected("first", 0), run="first", step=0)
            store.rebase()
            store.thin(["first@0"])
            store["first@0"]["w"].numpy()
            store.verify()
        journal = Journal(directory / "journal")
        outcome = Outcome()
        start = time.monotonic()
        children: dict[int, str] = {}
        try:
            for name in workers:
                children[_child(path, journal, name, chosen.random())] = name
            while time.monotonic() - start < seconds or not outcome.kills:
                time.sleep(min(chosen.expovariate(1 / BETWEEN_KILLS), seconds))
                pid = chosen.choice(sorted(children))
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                outcome.kills += 1
                name = children.pop(pid)
                children[_child(path, journal, name, chosen.random())] = name
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        _conclude(path, journal, outcome)
        outcome.seconds = time.monotonic() - start
    return outcome


def _child(path: Path, journal: Journal, name: str, seed: float) -> int:
    pid = os.fork()
    if not pid:
        try:
            _watch_threads()
            Worker(path, journal, name, hash(seed)).work()
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid


def _conclude(path: Path, journal: Journal, outcome: Outcome) -> None:
    """Check everything after all work: before and after a recovery and a collection of garbage."""
    worker = Worker(path, journal, "reader0", 0)
    last: Any = None
    for verb in (lambda: None, lambda: recover(path), lambda: worker.collector()[1]()):
        with worker._watched("conclusion"):
            verb()
            with ckstore.open(path, "r") as store:
                there = {(row.run, row.step) for row in store._catalog.versions()}
                for problem in store.verify().problems:
                    journal.tell("fault", f"verify: {problem}")
            done, going = journal.names("done"), journal.names("forgetting")
            for run, step in sorted(done - going):
                with worker._watched("last read"):
                    worker.check(run, step)
            for name in sorted(journal.names("forgot") & there):
                journal.tell("fault", f"{name} is back")
            # A forget that was killed between its record and its commit takes effect with the recovery.
            if last is not None and not last - going <= there:
                journal.tell("fault", f"{last - going - there} went")
            last = there
    for event, *said in journal.read():
        if event == "did":
            outcome.done[said[0]] += 1
        elif event == "refused":
            outcome.refused[said[0]] += 1
        elif event == "waited":
            outcome.longest[said[0]] = max(outcome.longest.get(said[0], 0.0), said[1])
        elif event == "fault":
            outcome.faults.append(said[0])


#: Nanoseconds that threads ran or wanted to which have ended.
_ended = [0]


def _busy() -> float:
    """Return the seconds that threads of this process ran or wanted to."""
    return (_ended[0] + sum(_scheduled(task) for task in Path("/proc/self/task").glob("*/schedstat"))) / 1e9


def _scheduled(task: Path) -> int:
    try:
        ran, waited, _ = task.read_text().split()
    except OSError:
        return 0
    return int(ran) + int(waited)


def _watch_threads() -> None:
    """Keep the CPU times of this process's threads when they end."""
    run = Thread.run

    def counted(thread: Thread) -> None:
        try:
            run(thread)
        finally:
            _ended[0] += _scheduled(Path("/proc/thread-self/schedstat"))

    Thread.run = counted  # type: ignore[method-assign]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


if __name__ == "__main__":
    result = stress(float(sys.argv[1]), int(sys.argv[2]))
    print(result)
    sys.exit(bool(result.faults))
