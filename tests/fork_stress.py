"""Children that are forked while threads store, encode, save and watch, and the invariants of their store.

    python -m tests.fork_stress [FORKS] [SEED] [SECONDS]

One process has a thread that stores hot versions, the thread that encodes them, a saver, and a thread that moves two
tags in one transaction; a separate process watches a directory. It forks children at the same time, some of them
workers of a `DataLoader`. Each opens the store or uses the inherited one, reads the two tags, slices a version and sets
a tag.

Faults are: a child that does not come to an end, tags of two transactions, a wrong value, and any error.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import ckstore
from tests.checkpoints import scratch
from tests.children import exit_code, fork
from tests.stressing import Journal, Name, expected

try:
    from torch.utils.data import DataLoader
except ImportError:
    DataLoader = None  # type: ignore[assignment, misc]

#: Seconds after which a child counts as hanging.
PATIENCE = 120.0
#: Versions that the stored run keeps, and how often a child reads the two tags.
KEPT, READS = 12, 20
#: Children that run at once; how many forks come before one of the workers of a `DataLoader`, and how many these are.
AT_ONCE, EVERY, WORKERS = 6, 10, 2


@dataclass
class Outcome:
    """Counts and faults of a stress run."""

    seconds: float = 0.0
    forks: Counter[str] = field(default_factory=Counter)
    versions: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    warned: int = 0
    longest_fork: float = 0.0
    longest_child: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ("hang", "mixture", "LockedError")
        return "\n".join(
            [
                f"{sum(self.forks.values())} forks in {self.seconds:.0f} s: {dict(self.forks)}",
                f"versions stored in between: {dict(self.versions)}; tags read {self.reads} times;"
                f" {self.warned} warnings of the encoding",
                f"longest fork {self.longest_fork:.2f} s, longest child {self.longest_child:.1f} s",
                ", ".join(f"{self.kinds.get(kind, 0)} {kind}s" for kind in kinds),
                f"{len(self.faults)} faults",
                *self.faults,
            ]
        )


class _Warnings(logging.Handler):
    """Counts what the encoding could not do and does later: many write here, and its thread takes what they leave."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self.journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        if "remain unchanged" in record.getMessage():
            self.journal.tell("warned", record.getMessage())


class Child:
    """The work of a forked process."""

    def __init__(self, store: ckstore.Store, journal: Journal, done: list[Name], seed: int) -> None:
        self.store = store
        self.journal = journal
        self.done = done
        self.seed = seed

    def work(self) -> None:
        """Use the store; report failures."""
        try:
            if self.seed % 2:
                self.use(self.store)
            else:
                with ckstore.open(self.store.path) as store:
                    self.use(store)
        except Exception as error:
            self.journal.tell("fault", type(error).__name__, f"{error}\n{traceback.format_exc()}")

    def use(self, store: ckstore.Store) -> None:
        """Read tags, slice a version, set a tag."""
        chosen = random.Random(self.seed)
        for _ in range(READS):
            tags = store._catalog.tags()
            if tags.get("left") != tags.get("right"):
                self.journal.tell("fault", "mixture", f"{tags}")
        self.journal.tell("read")
        run, step = chosen.choice(self.done[-KEPT // 2 :])
        first = chosen.randrange(200)
        found = store[f"{run}@{step}"]["w"][first : first + 3]
        if not np.array_equal(np.asarray(found), expected(run, step)["w"][first : first + 3]):
            self.journal.tell("fault", "wrong value", f"{run}@{step}")
        store.tag(f"{run}@{step}", f"child-{self.seed % 7}")


class Dataset:
    """For a `DataLoader`: a worker uses the store at its first item."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.is_used = False

    def __len__(self) -> int:
        return 2 * WORKERS

    def __getitem__(self, number: int) -> int:
        if not self.is_used:
            self.is_used = True
            self.child.seed += number
            self.child.work()
        return number


def stress(forks: int, seed: int, seconds: float) -> Outcome:
    """Fork `forks` children while threads work, or as many as there is time for."""
    outcome, start = Outcome(), time.monotonic()
    warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
    with scratch() as directory, ckstore.init(directory / "store") as store:
        journal, done = Journal(directory / "journal"), list[Name]()
        logging.getLogger("ckstore").addHandler(_Warnings(journal))
        store.ingest(expected("hot", 0), run="hot", step=0)
        done.append(("hot", 0))
        with _at_work(store, journal, done):
            children: deque[tuple[int, float]] = deque()

            def reap(most: int) -> None:
                while len(children) > most:
                    pid, begun = children.popleft()
                    if (code := exit_code(pid, PATIENCE)) != 0:
                        journal.tell("fault", "hang" if code < 0 else "exit", f"{pid}: {code}")
                    outcome.longest_child = max(outcome.longest_child, time.monotonic() - begun)

            for number in itertools.count():
                if sum(outcome.forks.values()) >= forks or time.monotonic() - start > seconds:
                    break
                child = Child(store, journal, done, 1000 * seed + 2 * WORKERS * number + number % 2)
                if number % EVERY == EVERY - 1 and DataLoader is not None:
                    outcome.forks["workers of a DataLoader"] += _load(child, journal)
                    continue
                begun = time.monotonic()
                children.append((fork(child.work), begun))
                outcome.longest_fork = max(outcome.longest_fork, time.monotonic() - begun)
                outcome.forks["children"] += 1
                reap(AT_ONCE)
            reap(0)
        outcome.versions.update(row.run for row in store._catalog.versions())
        outcome.versions["hot"] = len([name for name in done if name[0] == "hot"])
        for problem in store.verify().problems:
            journal.tell("fault", "verify", str(problem))
        for event, *said in journal.read():
            if event == "fault":
                outcome.kinds[said[0]] += 1
                outcome.faults.append(": ".join(said))
            elif event == "read":
                outcome.reads += READS
            elif event == "warned":
                outcome.warned += 1
    outcome.seconds = time.monotonic() - start
    return outcome


def _load(child: Child, journal: Journal) -> int:
    """Read all batches of a `DataLoader` with forked workers; return the number of workers."""
    loader: Any = DataLoader(
        Dataset(child), num_workers=WORKERS, multiprocessing_context="fork", timeout=PATIENCE, collate_fn=list
    )  # type: ignore[arg-type]
    try:
        assert sorted(number for batch in loader for number in batch) == list(range(2 * WORKERS))
    except Exception as error:
        is_hang = "timed out" in str(error)
        journal.tell("fault", "hang" if is_hang else type(error).__name__, f"DataLoader: {error}")
    return WORKERS


@contextmanager
def _at_work(store: ckstore.Store, journal: Journal, done: list[Name]) -> Iterator[None]:
    """Threads and processes that store, encode, save, tag and watch while the block runs."""
    is_over = threading.Event()
    watched = store.path.parent / "watched"
    watched.mkdir()

    def again(act: Callable[[int], None], pause: float) -> None:
        number = 0
        while not is_over.wait(pause):
            number += 1
            try:
                act(number)
            except Exception as error:
                journal.tell(
                    "fault", type(error).__name__, f"parent, at {act.__name__}: {error}\n{traceback.format_exc()}"
                )
                return

    def ingest(step: int) -> None:
        store.ingest(expected("hot", step), run="hot", step=step, hot=1)
        done.append(("hot", step))
        if step % KEPT == 0:
            for row in store._catalog.versions("hot")[: -2 * KEPT]:
                with suppress(ckstore.ConflictError):  # A child has tagged it.
                    store.forget([row.number])

    def tag(number: int) -> None:
        meant = done[-1 - number % 2 * (len(done) > 1)]
        row = store[f"{meant[0]}@{meant[1]}"]._stored.row
        with store._catalog.transaction():
            for name in ("left", "right"):
                store._catalog.note({"change": "tag", "tag": name, "version": row.number})
                store._catalog.set_tag(name, row.number)
                time.sleep(0.002)

    def drop(number: int) -> None:
        np.savez(watched / f"step{number}.part", **expected("watched", number))
        os.replace(watched / f"step{number}.part.npz", watched / f"step{number}.npz")

    command = [sys.executable, "-m", "ckstore", "--store", str(store.path), "watch", str(watched), "--run", "watched"]
    with store.saver("saved") as saver:
        saves: list[Any] = []

        def save(step: int) -> None:
            saves.append(saver.save(expected("saved", step), step=step))

        acts = [(ingest, 0.05), (tag, 0.1), (save, 0.5), (drop, 2.0)]
        threads = [threading.Thread(target=partial(again, act, pause)) for act, pause in acts]
        watching = subprocess.Popen([*command, "--settle", "0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
            watching.terminate()
            _, said = watching.communicate()
            if watching.returncode not in (0, -15, 143):
                journal.tell("fault", "watch", f"{watching.returncode}: {said.decode()}")


if __name__ == "__main__":
    arguments = [int(text) for text in sys.argv[1:]] + [200, 0, 3600][len(sys.argv) - 1 :]
    result = stress(*arguments)
    print(result)
    sys.exit(bool(result.faults))
