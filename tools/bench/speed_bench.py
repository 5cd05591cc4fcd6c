"""What all parts of the speed benchmark share: its settings, the file systems it runs on, checkpoints and stores."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import ckstore
from ckstore.policy import Fidelity
from tools.bench.restores import write_versions

#: Where a file system in memory is, where there is one.
SHARED_MEMORY = Path("/dev/shm")

#: Free bytes that memory must have for every byte of a version (two stores hold it), and for copies of one.
_NEEDED_A_VERSION = 2
_NEEDED_COPIES = 10


@dataclass(frozen=True)
class Settings:
    """How large and how often.

    Attributes
    ----------
    megabytes, versions
        Size of a checkpoint in MB (10^6 bytes), and how many follow each other in a run.
    repeat
        Rounds of what does not need a version of its own each.
    depth_megabytes, depth_versions
        Size of a checkpoint, and length of the run, of the plot over versions.
    sizes
        Sizes in MB of the plot over sizes.
    growth_versions
        Numbers of versions that a store is filled with.
    growth_tensors, growth_objects
        Numbers of tensors in a version: tiny ones, and ones that are objects of their own.
    """

    megabytes: int = 300
    versions: int = 9
    repeat: int = 9
    depth_megabytes: int = 64
    depth_versions: int = 24
    sizes: tuple[int, ...] = (64, 250, 500, 1000)
    growth_versions: tuple[int, ...] = (10, 30, 100, 300, 1000)
    growth_tensors: tuple[int, ...] = (10, 300, 1000, 3000, 5000)
    growth_objects: tuple[int, ...] = (10, 300, 1000)

    @property
    def options(self) -> str:
        """As the command line takes them."""
        return f"--megabytes {self.megabytes} --versions {self.versions} --repeat {self.repeat}"


TIERS = {
    "full": Settings(),
    "tiny": Settings(30, 3, 2, 30, 4, (30, 60), (2, 4), (4, 12), (2, 6)),
}


@dataclass(frozen=True)
class Place:
    """A directory to measure in, and what kind of file system it lies on."""

    name: str
    directory: Path
    kind: str


@dataclass
class Bench:
    """One run of the benchmark.

    Attributes
    ----------
    settings
        How large and how often.
    work
        Directory on the disk.
    report
        Called with a line on what happens.
    """

    settings: Settings
    work: Path
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    _series: dict[tuple[int, int], list[Path]] = field(default_factory=dict)
    _stores: dict[tuple[str, str], Path] = field(default_factory=dict)

    @cached_property
    def places(self) -> list[Place]:
        """The disk, and memory where it is a file system with enough room."""
        found = [Place("disk", self.work, file_system(self.work))]
        if self.without_memory is None:
            directory = Path(tempfile.mkdtemp(prefix="ckstore-speed-", dir=SHARED_MEMORY))
            found.append(Place("tmpfs", directory, "tmpfs"))
        return found

    @cached_property
    def without_memory(self) -> str | None:
        """Why nothing is measured in a file system in memory; None where something is."""
        if not SHARED_MEMORY.is_dir() or file_system(SHARED_MEMORY) != "tmpfs":
            return "Not measured on tmpfs: this machine has none that is shared by all processes."
        needed = self.settings.megabytes * 1_000_000 * (self.settings.versions * _NEEDED_A_VERSION + _NEEDED_COPIES)
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < needed:
            return f"Not measured on tmpfs: {needed / 1e9:.1f} GB are needed there, and {free / 1e9:.1f} GB are free."
        return None

    @property
    def notes(self) -> list[str]:
        """What tables over all places have to say of one that is not there."""
        return [] if self.without_memory is None else [self.without_memory]

    def close(self) -> None:
        """Remove what lies in memory; `work` is the caller's."""
        if "places" in self.__dict__:
            for place in self.places[1:]:
                shutil.rmtree(place.directory, ignore_errors=True)

    def series(self, megabytes: int = 0, versions: int = 0) -> list[Path]:
        """Checkpoints of one run on the disk, written when they are first asked for; by default as large as set."""
        key = megabytes or self.settings.megabytes, versions or self.settings.versions
        if key not in self._series:
            self.report(f"writing {key[1]} checkpoints of {key[0]} MB")
            directory = self.work / f"series-{key[0]}-{key[1]}"
            directory.mkdir()
            self._series[key] = write_versions(directory, *key)
        return self._series[key]

    def store(self, place: Place, fidelity: Fidelity = "exact") -> Path:
        """A store at `place` that holds the whole series as one run."""
        key = place.name, fidelity
        if key not in self._stores:
            self.report(f"filling a store on {place.name}, {fidelity}")
            root = place.directory / f"store-{fidelity}"
            with ckstore.init(root) as store:
                for path in self.series():
                    store.ingest(path, run="run", fidelity=fidelity)
            self._stores[key] = root
        return self._stores[key]

    @contextmanager
    def copied(self, path: Path, place: Place) -> Iterator[Path]:
        """A copy of a file at `place` for a while, in the page cache."""
        copy = place.directory / f"copy-{path.name}"
        try:
            shutil.copyfile(path, copy)
            yield copy
        finally:
            copy.unlink(missing_ok=True)


def deepest(root: Path) -> int:
    """Number of the version with the longest chain in a store, the latest one of several."""
    with ckstore.open(root, "r") as store:
        return max(store.versions(), key=lambda row: (row.depth, row.number)).number


def load(path: Path) -> Any:
    """`torch.load`, of plain containers and tensors only."""
    return torch.load(path, weights_only=True)


def file_system(path: Path) -> str:
    """The kind of file system that a path lies on, as the kernel calls it; `unknown` where it does not say."""
    found = "unknown"
    length = -1
    mounts = Path("/proc/self/mounts")
    if not mounts.is_file():
        return found
    real = path.resolve()
    for line in mounts.read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        directory = Path(mount.encode().decode("unicode_escape"))
        if real.is_relative_to(directory) and len(directory.parts) > length:
            found, length = kind, len(directory.parts)
    return found


def sync(path: Path) -> None:
    """Make a file's bytes durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
