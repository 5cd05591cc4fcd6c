"""Figures of the speed benchmark: medians and their spread, as tables of a document."""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import floor, log10
from pathlib import Path
from typing import Self

#: Packages that affect the speed.
_PACKAGES = ("numpy", "torch")

#: The columns that `compared` fills.
COMPARED = ["measurement", "GB/s", "CPU s/GB", "stored", "ratio"]


@dataclass(frozen=True)
class Spread:
    """Median of some numbers, and their first and third quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Return the spread of at least one number."""
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*statistics.quantiles(numbers, n=4, method="inclusive"))

    def __str__(self) -> str:
        if self.low == self.high:
            return digits(self.median)
        return f"{digits(self.median)} ({digits(self.low)}\N{EN DASH}{digits(self.high)})"


@dataclass(frozen=True)
class Timing:
    """One run: wall-clock seconds, and processor seconds with child processes."""

    seconds: float
    processor: float


@dataclass
class Section:
    """The results of one row of the benchmark: the comparison, and tables with their heads."""

    title: str
    about: str
    tables: list[list[list[str]]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n\n".join([self.about, *map(_markdown, self.tables)])


def compared(
    name: str,
    mine: Sequence[Timing],
    theirs: Sequence[Timing],
    nbytes: int,
    shrinks: float | None = None,
) -> list[str]:
    """Return a row of a table: the speed over that of a contender, round by round.

    Parameters
    ----------
    name, mine
    The measured operation, and its timings.
    theirs
        Timings of the contender in the same rounds.
    nbytes
        Size of the checkpoint.
    shrinks
        Original bytes over stored bytes, if anything is stored.
    """
    ratios = [other.seconds / own.seconds for own, other in zip(mine, theirs, strict=True)]
    stored = "" if shrinks is None else f"1/{digits(shrinks)}"
    return [name, *_rate(mine, nbytes), stored, str(Spread.of(ratios))]


def _rate(timings: Sequence[Timing], nbytes: int) -> tuple[str, str]:
    """Return GB (10^9 bytes) per second of wall-clock time, and median processor seconds per GB."""
    gigabytes = nbytes / 1e9
    speed = Spread.of([gigabytes / timing.seconds for timing in timings])
    return str(speed), digits(statistics.median(timing.processor for timing in timings) / gigabytes)


def digits(number: float) -> str:
    """Return a number with three significant digits."""
    if number == 0:
        return "0"
    places = 2 - floor(log10(abs(number)))
    rounded = round(number, places)
    # A number rounded up to the next power of ten has one digit more before the point.
    return f"{rounded:,.{max(0, 2 - floor(log10(abs(rounded))))}f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without empty columns; all but the first are right-aligned."""
    shown = [number for number in range(len(rows[0])) if any(row[number] for row in rows[1:])]
    head, *cells = ([row[number] for number in shown] for row in rows)
    return table(head, cells)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Return a Markdown table, whose first columns are text."""
    marks = ["---"] * text + ["---:"] * (len(head) - text)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *rows))


def cores() -> int:
    """Return the number of cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(directory: Path) -> str:
    """Return the machine, and the file system of a directory; without a name or a path."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return (
        f"{_processor()}, {cores()} cores, {memory / 2**30:.0f} GiB; {platform.system()} "
        f"{platform.release().split('-')[0]}, {file_system(directory)}; Python {platform.python_version()}, {packages}"
    )


def sections_of(page: Path) -> dict[str, str]:
    """Return the sections of a page by heading, each with its machine in full."""
    text = page.read_text() if page.exists() else ""
    for number, machine in re.findall(r"^\* Machine (\d+): (.+)$", text, re.MULTILINE):
        text = text.replace(f" on machine {number}.\n", f" on {machine}.\n")
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def page_of(introduction: str, sections: dict[str, str]) -> str:
    """Return the text of a page, which describes each machine of several sections once."""
    text = "\n\n".join(f"## {heading}\n\n{section}" for heading, section in sections.items()) + "\n"
    counts = Counter(re.findall(r"^Measured on .* with `.*` on (.+)\.$", text, re.MULTILINE))
    machines = [machine for machine, count in counts.items() if count > 1]
    for number, machine in enumerate(machines, 1):
        text = text.replace(f" on {machine}.\n", f" on machine {number}.\n")
    described = "\n".join(f"* Machine {number}: {machine}" for number, machine in enumerate(machines, 1))
    return "\n\n".join(filter(None, [introduction, described, text]))


def file_system(path: Path) -> str:
    """Return the kind of the file system of a path, as the kernel names it; `unknown` if it does not."""
    found, length = "unknown", -1
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text().splitlines() if mounts.is_file() else ():
        _, mount, kind, *_ = line.split(" ")
        directory = Path(mount.encode().decode("unicode_escape"))
        if path.resolve().is_relative_to(directory) and len(directory.parts) > length:
            found, length = kind, len(directory.parts)
    return found


def _processor() -> str:
    """Return the processor's model; its architecture if the system does not name one."""
    facts = Path("/proc/cpuinfo")
    for line in facts.read_text().splitlines() if facts.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
