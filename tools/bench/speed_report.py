"""The document of the speed benchmark: tables and plots of all sections that were ever measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from tools.bench.speed_figures import Line, Plot, Section, digits

#: Packages that speed depends on.
_PACKAGES = ("numba", "numpy", "torch")

_WORDS = {True: "yes", False: "**no**", None: ""}


def document(sections: Sequence[Section], machine: list[str], command: str, stem: str) -> str:
    """The whole document.

    Parameters
    ----------
    sections
        In their order.
    machine
        What it was measured on: a fact a line.
    command
        What wrote it.
    stem
        What the names of the plots' files begin with.
    """
    parts = [
        "# Benchmarks",
        "How fast ckstore is beside what it takes the place of, on the same machine and in the same minutes. "
        f"Written by `{command}`; nothing here was written by hand.",
        "Contenders take turns (A B A B); a ratio is that of one round, above 1 where ckstore is faster. Figures are "
        "medians, with the first and third quartiles in brackets. Files are in the page cache; everything that is "
        "written is synced (`fsync`) on both sides. Memory that a round takes was in use just before: a virtual "
        "machine that gives what is free back to its host would have whoever keeps what it writes wait for new pages, "
        "and spare whoever overwrites it. Ingests of files and restores run in "
        "processes of their own, which stay. CPU is seconds of all cores for a GB (10^9 bytes) of the checkpoint. "
        "Checkpoints are of float32 weights with both moments of AdamW; weights move by 8 % of their size "
        "between two versions.",
        "\n".join(f"* {fact}" for fact in machine),
    ]
    if any("--tier tiny" in section.options for section in sections):
        parts.append("**Of the tiny tier, as some sections say: these figures only show that everything runs.**")
    goals = [(section, line) for section in sections for line in section.lines if line.goal is not None]
    if goals:
        parts += ["## Goals", table(["what", "where", "figure", "goal", "reached"], (_goal(*item) for item in goals))]
    for section in sections:
        parts += [f"## {section.title}", *body(section)]
        if section.machine != machine:
            parts.append("On another machine: " + "; ".join(section.machine) + ".")
        parts += [f"![{plot.title}]({stem}-{plot.name}.svg)" for plot in section.plots]
    return "\n\n".join(parts) + "\n"


def body(section: Section) -> list[str]:
    """What a section says, but its title and plots."""
    parts = [section.about]
    if section.lines:
        parts.append(_lines(section.lines))
    parts += [table(head, rows) for head, *rows in section.tables]
    parts += section.notes
    if section.measured:
        parts.append(f"Measured on {section.measured} with `{section.options}`.")
    return parts


def _goal(section: Section, line: Line) -> list[str]:
    return [
        f"{section.title}: {line.what}",
        line.place,
        f"{line.figure} {line.unit}",
        f"{line.goal} {line.unit}",
        _WORDS[line.reached],
    ]


def _lines(lines: Sequence[Line]) -> str:
    """A table with the columns that any of the lines fills."""
    columns: list[tuple[str, list[str]]] = [
        ("what", [line.what for line in lines]),
        ("where", [line.place for line in lines]),
        ("GB/s", ["" if line.rate is None else str(line.rate.speed) for line in lines]),
        ("CPU s/GB", ["" if line.rate is None else digits(line.rate.processor) for line in lines]),
        ("against", [line.against for line in lines]),
        ("its GB/s", ["" if line.against_rate is None else str(line.against_rate.speed) for line in lines]),
        ("its CPU s/GB", ["" if line.against_rate is None else digits(line.against_rate.processor) for line in lines]),
        ("stored", ["" if line.shrinks is None else f"1/{digits(line.shrinks)}" for line in lines]),
        ("figure", [f"{line.figure} {line.unit}" for line in lines]),
        ("goal", ["" if line.goal is None else str(line.goal) for line in lines]),
        ("reached", [_WORDS[line.reached] for line in lines]),
    ]
    shown = [(name, cells) for name, cells in columns if any(cells)]
    rows = zip(*(cells for _, cells in shown), strict=True)
    return table([name for name, _ in shown], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first stand to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(shown: Plot, target: Path) -> None:
    """Write a plot as SVG: the same points give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    with rc_context({"svg.hashsalt": shown.name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for label, points in shown.curves.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=label)
        axes.set(title=shown.title, xlabel=shown.horizontal, ylabel=shown.vertical)
        axes.set_ylim(bottom=0)
        if shown.logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(ScalarFormatter())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(target, metadata={"Date": None})


def machine(places: Iterable[tuple[str, str]]) -> list[str]:
    """What the machine is, without a name or a path: a fact a line.

    Parameters
    ----------
    places
        Name and kind of the file systems.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    systems = ", ".join(name if name == kind else f"{name}: {kind}" for name, kind in places)
    return [
        f"processor: {_processor()}, {len(os.sched_getaffinity(0))} cores",
        f"memory: {memory / 2**30:.0f} GiB",
        f"system: {platform.system()} {platform.release().split('-')[0]}; {systems}",
        f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in _PACKAGES)}",
    ]


def _processor() -> str:
    """The processor's model; its architecture where the system does not say."""
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
