"""Ways to keep the checkpoints of a run, measured alike: sizes, by cause, and the times of ingest and restore."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import ckstore
from ckstore.policy import QUALITY, Policy
from tools.bench.ours import size_of
from tools.fidelity.states import State, as_state, load

#: The run's name in every store.
_RUN = "run"

#: The default quality of a coarse ingest.
DEFAULT_QUALITY = QUALITY


@dataclass(frozen=True)
class Setting:
    """How versions are kept.

    Attributes
    ----------
    scheme
        `exact`, a scheme of `Store.ingest`, or the name of a baseline.
    quality
        Of a scheme that has one.
    """

    scheme: str
    quality: float | None = None

    def __str__(self) -> str:
        return self.scheme if self.quality is None else f"{self.scheme} {self.quality:g}"


EXACT = Setting("exact")
DEFAULT = Setting("lattice", DEFAULT_QUALITY)


class Archive(Protocol):
    """Keeps versions one after the other and restores each."""

    setting: Setting

    def add(self, path: Path) -> bool:
        """Keep a checkpoint as the next version; return whether it is stored in full, without an earlier one."""
        ...

    def restore(self, index: int) -> State:
        """Return the version of that index."""
        ...

    def nbytes(self) -> int:
        """Return the bytes of the archive."""
        ...

    def ledger(self) -> dict[str, int]:
        """Return these bytes by cause."""
        ...

    def remove(self) -> None:
        """Delete temporary files."""
        ...


class StoreArchive:
    """A store, through its public interface.

    Parameters
    ----------
    directory
        Of the store; must not exist.
    setting
        Scheme and quality of every version.
    """

    def __init__(self, directory: Path, setting: Setting) -> None:
        self.setting = setting
        self.directory = directory
        self.store = ckstore.init(directory)
        self.options = ingest_options(setting)

    def add(self, path: Path) -> bool:
        """Ingest a file."""
        return self.store.ingest(path, run=_RUN, **self.options).version.base

    def restore(self, index: int) -> State:
        """Return the state dict of a version, through a newly opened store: no decoded data is reused."""
        with ckstore.open(self.directory, "r") as store:
            return as_state(store[store.versions()[index].number].state_dict())

    def nbytes(self) -> int:
        """Return the bytes of all files, catalog and log included."""
        return size_of(self.directory)

    def ledger(self) -> dict[str, int]:
        """Return the ledger of `ckstore stats --ledger`, without empty causes."""
        return {cause: nbytes for cause, nbytes in self.store.stats()["ledger"].items() if nbytes}

    def remove(self) -> None:
        """Close and delete the store."""
        self.store.close()
        shutil.rmtree(self.directory)


def ingest_options(setting: Setting) -> dict[str, Any]:
    """Return the options of `Store.ingest`."""
    if setting.scheme == EXACT.scheme:
        return {}
    quality = QUALITY if setting.quality is None else setting.quality
    return {"policy": Policy("coarse", setting.scheme, quality)}


@dataclass
class Clock:
    """Seconds of wall time and of processors, of each version."""

    wall: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block as one version's."""
        wall, processors = time.perf_counter(), time.process_time()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.processors.append(time.process_time() - processors)

    def over(self, other: Clock) -> tuple[float, float]:
        """Return wall time and processor time per version over those of another clock: medians over the versions."""
        return (
            statistics.median(mine / theirs for mine, theirs in zip(self.wall, other.wall, strict=True)),
            statistics.median(mine / theirs for mine, theirs in zip(self.processors, other.processors, strict=True)),
        )


@dataclass
class Stored:
    """The sizes and times of the versions of a run.

    Attributes
    ----------
    setting
        How they are kept.
    original
        Bytes of the original files.
    added
        Growth of the archive with each version, in bytes.
    bases
        Whether each is stored in full.
    total
        Bytes of the whole archive at the end.
    ledger
        The same by cause.
    ingest, restore
        Times of ingesting and restoring all versions, one at a time.
    """

    setting: Setting
    original: int = 0
    added: list[int] = field(default_factory=list)
    bases: list[bool] = field(default_factory=list)
    total: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    ingest: Clock = field(default_factory=Clock)
    restore: Clock = field(default_factory=Clock)

    @property
    def ratio(self) -> float:
        """The ratio of the whole run, everything counted."""
        return self.original / max(1, self.total)

    @property
    def delta_ratio(self) -> float:
        """The ratio of the median version that is not stored in full; of all versions if every one is in full."""
        deltas = [nbytes for nbytes, base in zip(self.added, self.bases, strict=True) if not base] or self.added
        return self.original / len(self.added) / max(1, statistics.median(deltas))

    @property
    def late_ratio(self) -> float:
        """The ratio of the versions of the last third of the run, with bases."""
        late = self.added[-(len(self.added) // 3 or 1) :]
        return self.original / len(self.added) / max(1, statistics.mean(late))


class RoundedArchive:
    """The files themselves, with weights moved by about one unit in the last place: shows the rise due to chance."""

    setting = Setting("rounded")

    def __init__(self) -> None:
        self.files: list[Path] = []

    def add(self, path: Path) -> bool:
        """Remember a file."""
        self.files.append(path)
        return True

    def restore(self, index: int) -> State:
        """Return the checkpoint with every weight multiplied by 1 + 2^-23 · a normal number, reproducibly."""
        state = load(self.files[index])
        random = torch.Generator().manual_seed(index)
        for weight in state["model"].values():
            weight.mul_(1 + 2**-23 * torch.randn(weight.shape, generator=random))
        return state

    def nbytes(self) -> int:
        """Return the bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def ledger(self) -> dict[str, int]:
        """Return all of them as one cause."""
        return {"files": self.nbytes()}

    def remove(self) -> None:
        """Do nothing: there are no temporary files."""


#: Called with an archive's number, a version's index and the version restored.
Seen = Callable[[int, int, State], None]


def measure(archives: list[Archive], paths: list[Path], seen: Seen) -> list[Stored]:
    """Keep all versions in every archive, restore them all, and pass each to `seen`, outside of the measured times.

    The archives take turns at every version, so that disturbances slow all of them alike.
    """
    measured = [Stored(archive.setting) for archive in archives]
    for path in paths:
        for archive, stored in zip(archives, measured, strict=True):
            before = archive.nbytes()
            with stored.ingest.running():
                stored.bases.append(archive.add(path))
            stored.added.append(archive.nbytes() - before)
            stored.original += path.stat().st_size
    for archive, stored in zip(archives, measured, strict=True):
        stored.total, stored.ledger = archive.nbytes(), archive.ledger()
    for index in range(len(paths)):
        for number, (archive, stored) in enumerate(zip(archives, measured, strict=True)):
            with stored.restore.running():
                state = archive.restore(index)
            seen(number, index, state)
    return measured
