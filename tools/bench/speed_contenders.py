"""What is timed against each other: ways to store a checkpoint, and ways to get one back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ckstore
from ckstore.policy import FIDELITIES, Fidelity
from ckstore.reading.checkout import checkout
from tools.bench.restores import save_durably
from tools.bench.speed_bench import load, sync
from tools.bench.speed_clock import Contender, race
from tools.bench.speed_figures import Timing

#: What contenders are called in tables.
INGEST, LIVE = "ingest", "live ingest"
CHECKOUT, STATE_DICT = "checkout", "state_dict"
SAVE, LOAD, COPY = "torch.save, fsync", "torch.load", "cp, fsync"

#: Names of the processes that ckstore and torch.load run in.
_OURS, _THEIRS = "ckstore", "torch"


@dataclass
class Source:
    """The version that a round stores: as a file in the page cache, and as the state dict in it."""

    path: Path
    state: Any = None

    def take(self, path: Path) -> None:
        """Make the checkpoint at `path` the version."""
        self.state = None
        shutil.copyfile(path, self.path)
        self.state = load(self.path)


@dataclass(frozen=True)
class Stored:
    """Timings of storing the versions of a run by contender, and the run's original over its stored bytes.

    The first version, which nothing is stored against, counts for `shrinks` only where it is alone.
    """

    timings: dict[str, list[Timing]]
    shrinks: float


def store_in_turn(
    paths: Sequence[Path],
    directory: Path,
    *,
    fidelity: Fidelity = "exact",
    live: bool = False,
    others: Callable[[Source], Sequence[Contender]] = lambda source: (),
) -> Stored:
    """Ingest versions one after the other into a store of their own, in turn with `torch.save` and others.

    Parameters
    ----------
    paths
        The versions.
    directory
        Where everything is read from and written to.
    fidelity
        Of the ingests.
    live
        The state dicts by one store that stays open, instead of the files by stores that are opened for them.
    others
        Further contenders, given what they store.
    """
    root, out = directory / "ingested", directory / "saved.pt"
    source = Source(directory / "source.pt")

    def prepare(number: int) -> None:
        out.unlink(missing_ok=True)
        source.take(paths[number])

    try:
        ingest_file = partial(_ingest, root, source.path, fidelity)
        with ckstore.init(root) as kept:

            def ingest_live(number: int) -> None:
                kept.ingest(source.state, run="run", step=number, fidelity=fidelity)

            contenders = [
                Contender(LIVE, ingest_live, prepare) if live else Contender(INGEST, ingest_file, prepare, _OURS),
                Contender(SAVE, lambda _: save_durably(source.state, out)),
                *others(source),
            ]
            # No round comes twice: a version that the store holds already is ingested in no time.
            timings = race(contenders, range(len(paths)), warm=False)
            rows = kept.versions()
        rows = rows[1:] or rows
        stored = sum(row.stored_bytes for row in rows)
        return Stored(timings, sum(row.original_bytes for row in rows) / stored)
    finally:
        shutil.rmtree(root)
        for path in (out, source.path):
            path.unlink(missing_ok=True)


def by_checkout(root: Path, number: int, target: Path) -> Contender:
    """A version of the store at `root` as a file, synced, from opening the store on."""
    return Contender(CHECKOUT, partial(_check_out, root, number, target), partial(_remove, target), _OURS)


def by_state_dict(root: Path, number: int, fidelity: Fidelity | None = None) -> Contender:
    """A version of the store at `root` as a state dict, from opening the store on; of a lower fidelity if given."""
    return Contender(STATE_DICT, partial(_state_dict, root, number, fidelity), apart=_OURS)


def by_load(original: Path) -> Contender:
    """The original as its user loads it."""
    return Contender(LOAD, partial(_load, original), apart=_THEIRS)


def by_copy(original: Path, target: Path) -> Contender:
    """A synced copy of the original."""
    return Contender(COPY, lambda _: copy_durably(original, target), partial(_remove, target))


def warm_up(paths: Sequence[Path], directory: Path) -> None:
    """Store and restore something small, here and where contenders run, so that nothing is loaded while they do."""
    _warm(paths, directory, 0)
    race([Contender("", partial(_warm, paths, directory), apart=_OURS)], [0], warm=False)
    race([by_load(paths[0])], [0], warm=False)


def copy_durably(source: Path, target: Path) -> None:
    """`cp`, and `fsync`."""
    subprocess.run(["cp", str(source), str(target)], check=True)
    sync(target)


def _check_out(root: Path, number: int, target: Path, _: int) -> None:
    with ckstore.open(root, "r") as store:
        checkout(store[number], target)


def _state_dict(root: Path, number: int, fidelity: Fidelity | None, _: int) -> Any:
    with ckstore.open(root, "r") as store:
        version = store[number]
        return (version if fidelity is None else version.at_fidelity(fidelity)).state_dict()


def _ingest(root: Path, source: Path, fidelity: Fidelity, number: int) -> None:
    with ckstore.open(root) as store:
        store.ingest(source, run="run", step=number, fidelity=fidelity)


def _load(path: Path, _: int) -> Any:
    return load(path)


def _remove(path: Path, _: int) -> None:
    path.unlink(missing_ok=True)


def _warm(paths: Sequence[Path], directory: Path, _: int) -> None:
    root, out = directory / "warm", directory / "warm.pt"
    for fidelity in FIDELITIES:
        ckstore.init(root).close()
        for step, path in enumerate(paths):
            _ingest(root, path, fidelity, step)
        _state_dict(root, len(paths), None, 0)
        _check_out(root, len(paths), out, 0)
        save_durably(load(out), out)
        out.unlink()
        shutil.rmtree(root)
