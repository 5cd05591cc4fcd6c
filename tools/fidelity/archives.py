"""Ways to keep the checkpoints of a run, measured alike."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ckstore
from ckstore.policy import QUALITY, Policy
from tools.bench.ours import size_of
from tools.fidelity.states import State, as_state

#: The run's name in every store.
_RUN = "run"

#: The kinds of tensors by a part of their paths; the first that matches counts.
_KINDS = {
    "exp_avg_sq": "second moments",
    "exp_avg": "first moments",
    "momentum_buffer": "first moments",
    "model/": "weights",
}

#: The default quality of a coarse ingest.
DEFAULT_QUALITY = QUALITY


@dataclass(frozen=True)
class Setting:
    """How versions are kept.

    Attributes
    ----------
    scheme
        A scheme of `Store.ingest`, or the name of a baseline.
    quality
        Of a scheme that has one.
    """

    scheme: str
    quality: float | None = None

    def __str__(self) -> str:
        return self.scheme if self.quality is None else f"{self.scheme} {self.quality:g}"


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
        quality = QUALITY if setting.quality is None else setting.quality
        self.policy = Policy("coarse", setting.scheme, quality)

    def add(self, path: Path) -> bool:
        """Ingest a file."""
        return self.store.ingest(path, run=_RUN, hot=0, policy=self.policy).version.base

    def restore(self, index: int) -> State:
        """Return the state dict of a version, through a newly opened store: no decoded data is reused."""
        with ckstore.open(self.directory, "r") as store:
            return as_state(store[store.versions()[index].number].state_dict())

    def nbytes(self) -> int:
        """Return the bytes of all files, catalog and log included."""
        return size_of(self.directory)

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return original and stored bytes of all tensors by kind: `weights`, `first moments`, `second moments`."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.store.versions():
            version = self.store[row.number]
            for path, tensor in version.items():
                bits = version.storage(path)["bits"]
                kind = next((kind for name, kind in _KINDS.items() if name in path), "others")
                original, stored = found.get(kind, (0, 0))
                found[kind] = original + tensor.nbytes, stored + round(bits * tensor.size / 8)
        return found

    def remove(self) -> None:
        """Close and delete the store."""
        self.store.close()
        shutil.rmtree(self.directory)


@dataclass
class Stored:
    """The sizes of the versions of a run.

    Attributes
    ----------
    original
        Bytes of the original files.
    added
        Growth of the archive with each version, in bytes.
    bases
        Whether each is stored in full.
    total
        Bytes of the whole archive at the end.
    """

    original: int = 0
    added: list[int] = field(default_factory=list)
    bases: list[bool] = field(default_factory=list)
    total: int = 0

    @property
    def ratio(self) -> float:
        """The ratio of the whole run, everything counted."""
        return self.original / max(1, self.total)

    @property
    def delta_ratio(self) -> float:
        """The ratio of the median version that is not stored in full; of all versions if every one is in full."""
        deltas = [nbytes for nbytes, base in zip(self.added, self.bases, strict=True) if not base] or self.added
        return self.original / len(self.added) / max(1, statistics.median(deltas))


def measure(archive: Archive, paths: list[Path], seen: Callable[[int, State], None]) -> Stored:
    """Keep all versions in an archive, restore them all, and pass the index and the state of each to `seen`."""
    stored = Stored()
    for path in paths:
        before = archive.nbytes()
        stored.bases.append(archive.add(path))
        stored.added.append(archive.nbytes() - before)
        stored.original += path.stat().st_size
    stored.total = archive.nbytes()
    for index in range(len(paths)):
        seen(index, archive.restore(index))
    return stored
