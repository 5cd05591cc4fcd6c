"""Writes `docs/schemes.md`: the figures of every part, with those of the papers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.bench import speed_figures
from tools.fidelity import papers
from tools.fidelity.papers import percent
from tools.fidelity.whole import SEARCHED, TOLERANCE

Row = dict[str, Any]

INTRODUCTION = """\
# The published schemes, measured

LC-Checkpoint and Inshrinkerator (DynaQuant) in ckstore, compared with ckstore's own lattices, other baselines and the
papers, on small runs of `tools/train`. `tools/bench/schemes --write` writes this page.

* *residual network*: 2.8 million parameters on scikit-learn's digits, SGD with momentum, 60 epochs to a plateau of
  96.5 % accuracy, a checkpoint an epoch; gradients by `ckstore.GradientAccumulator`. *Lost*: part of the accuracy on
  397 other digits.
* *GPT*: 4.9 million parameters on Python's sources, AdamW, 800 steps, a checkpoint every 40. *Lost*: the relative
  rise of the loss on 128 other windows.
* *fine-tune*: the GPT on English prose, 200 steps, a checkpoint every 10. *Lost*: the same on prose.

*Rework* is the mean loss in steps of training: those in which the run's own loss falls as far, where it was.

Ratios compare 32-bit files with everything that is stored. *Searched*: each version has the smallest setting whose
evaluation is at most 5 % worse, as in Inshrinkerator's paper. QD-compressor, Check-N-Run and GOBO quantise weights
alone.

The verdict is *none* where the run could not have missed the figure: every scheme reaches it, or training had reached a
plateau.

Papers: [LC] Chen et al., *On Efficient Constructions of Checkpoints*, ICML 2020. [I] Agrawal et al.,
*Inshrinkerator*, SoCC 2024, arXiv 2306.11800v3."""

#: Notes below the tables of each part.
NOTES = {
    "cnn": """\
[I], ResNet-152, 10 failures: QD-compressor 11.82x, -0.09 % lost; Check-N-Run 5.71x, 0.36 %.

ExCP's threshold falls with second moments, and SGD has none: nearly all late changes are below it.""",
    "gpt": """\
[I], GPT-2 Medium, 10 failures: QD-compressor 22.15x, 1.10 % lost; Check-N-Run 6.35x, 0.25 %.""",
    "coarse": """\
The GPT of `--tier full` has 10.9 million parameters and 25 checkpoints of 131 MB, its fine-tune 21. *Later versions*:
the median version that is not stored in full. *Rise*: evaluation loss 20 steps after resuming, over an exact resume
with the same batches; mean of three versions and three seeds, in brackets the worst version. Of the fine-tune, the lost
part of its gain in loss. *Rework*: the steps of training, where the run was, that the mean rise is worth.""",
    "finetune": """\
Versions are 10 steps apart; in the papers thousands. LC-Checkpoint's second version is its worst: 10 steps move less
than the error of the first version.""",
}

_PARTS = {"all": "weights and both moments", "weights": "weights alone", "dropped": "weights, moments dropped"}

_RUNS = {"cnn": "residual network", "gpt": "GPT", "finetune": "fine-tune"}

#: Prefixes of schemes' names, in the order of tables.
_ORDER = ("lattice", "lc", "dynaquant 1", "dynaquant, s", "QD", "Check", "GOBO", "excp")


def whole(rows: list[Row]) -> str:
    """Return the table of a run kept by every scheme."""
    lines = []
    for row in sorted(_ordered(rows), key=lambda row: row["part"] != "weights"):
        each = row["original"] / len(row["added"])
        late = row["added"][-(len(row["added"]) // 3) :]
        lines.append([
            _name(row["scheme"]) + (", all" + "*" * ("*" in papers.whose(row["scheme"], "all", row["run"])))
            * (row["part"] != "weights"),
            f"{row['original'] / row['total']:.1f}x", f"{each / statistics.mean(late):.1f}x",
            f"{each / min(row['added']):.0f}x", percent(statistics.mean(row["lost"])), percent(max(row["lost"])),
            _rework(row),
        ])  # fmt: skip
    head = [
        "scheme; weights, or all",
        "whole run",
        "last third",
        "best version",
        "lost, mean",
        "worst version",
        "rework",
    ]
    return f"{speed_figures.table(head, lines)}\n\n{NOTES[rows[0]['run']]}"


def coarse(rows: list[Row]) -> str:
    """Return the table of ckstore's own lattices, for the page of benchmarks."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["run"] != "gpt", row["part"], row["quality"])):
        part = _PARTS[row["part"]]
        rise = f"{percent(statistics.mean(row['rises']))} ({percent(max(row['rises']))})"
        lines.append([
            f"{_RUNS[row['run']]}, {part}", f"{row['quality']:g}", f"{row['ratio']:.1f}x", f"{row['later']:.1f}x", rise,
            _rework(row),
        ])  # fmt: skip
    table = speed_figures.table(["series", "`--quality`", "ratio", "later versions", "rise", "rework"], lines)
    return f"{table}\n\n{NOTES['coarse']}"


def _rework(row: Row) -> str:
    """Return the mean worth of the rises in steps of training; nothing where the loss does not fall."""
    return "" if row["rework"] is None else f"{row['rework']:+.1f}"


def shown(rows: dict[str, list[Row]]) -> str:
    """Return the table of targets for the weights of whole runs: their losses at once do not depend on moments."""
    lines = []

    def judged(run: str, scheme: str, most: float, least: float = 0, best: float = 0) -> None:
        alike = [row for row in rows.get(run, []) if row["part"] == "weights"]
        missed = [row for row in alike if not _meets(row, most, least, best)]
        for row in alike:
            if row["scheme"].startswith(scheme):
                verdict = "reached" if _meets(row, most, least, best) else "not reached"
                if verdict == "reached" and (run == "cnn" or not missed):
                    verdict = papers.NOT_JUDGED
                target = f"{most:.1%}"
                target += f", {least:g}x" * bool(least) + f", best version {best:g}x" * bool(best)
                name = f"{_name(row['scheme'])}, {_RUNS[run]}"
                ratio, peak = papers.ratios(row)
                figure = f"{percent(max(row['lost']))}, {ratio:.1f}x, best version {peak:.0f}x"
                lines.append([name, papers.whose(row["scheme"], "weights", run), target, figure, verdict])

    judged("gpt", "lc", 0.005)
    judged("gpt", str(SEARCHED), TOLERANCE, 20)
    judged("cnn", str(SEARCHED), TOLERANCE, 35, 100)
    return speed_figures.table(
        ["weights of", "levels; coder", "target, every version within", "figure", "verdict"], lines, text=5
    )


def _meets(row: Row, most: float, least: float, best: float) -> bool:
    ratio, peak = papers.ratios(row)
    return max(row["lost"]) <= most and ratio >= least and peak >= best


def compared(rows: dict[str, list[Row]]) -> str:
    """Return the table of the papers' figures and those found here."""
    head = ["figure", "levels; coder", "paper", "here", "verdict", "difference"]
    return speed_figures.table(head, (figure.cells() for figure in papers.figures(rows)), text=6)


#: Headings of the sections without measured rows, and of those over several parts.
WHOSE, SHOWN, COMPARED = "Whose levels and coder", "Targets", "Compared with the papers"
OTHERS = "Other systems"

#: Heading and text of each part, in the document's order.
SECTIONS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "cnn": ("Whole runs: residual network", whole),
    "gpt": ("Whole runs: GPT", whole),
    "finetune": ("Whole runs: fine-tune", whole),
    "coarse": ("Coarse versions", coarse),
}

#: Begins the last line of a section.
_MEASURED = "\n\nMeasured on "

#: The part that another page shows.
_ELSEWHERE = "coarse"


def section(part: str, rows: list[Row], tier: str) -> str:
    """Return the text of a part that was measured."""
    last = max(rows, key=lambda row: str(row["day"]))
    command = f"`tools/bench/schemes --tier {tier} --only {part}`"
    return f"{SECTIONS[part][1](rows)}{_MEASURED}{last['day']} with {command} on {last['machine']}."


def write(rows: dict[str, list[Row]], tier: str, target: Path) -> None:
    """Write the sections of parts that have rows; the others, and their rows without new ones, stay unchanged.

    Parameters
    ----------
    rows
        By part.
    tier
        Of the trained runs.
    target
        The document; replaced.
    """
    known = speed_figures.sections_of(target)
    shown_here = {part: heading for part, (heading, _) in SECTIONS.items() if part != _ELSEWHERE}
    found = {SHOWN: shown(rows), COMPARED: compared(rows)}
    found |= {heading: section(part, rows[part], tier) for part, heading in shown_here.items() if rows.get(part)}
    known |= {
        heading: _merged(known.get(heading, ""), text) for heading, text in found.items() if text.count("\n|") > 1
    }
    known |= {WHOSE: papers.WHOSE, OTHERS: papers.OTHERS}
    headings = [WHOSE, SHOWN, COMPARED, OTHERS, *shown_here.values()]
    ordered = {heading: known[heading] for heading in headings if heading in known}
    target.write_text(speed_figures.page_of(INTRODUCTION, ordered))


def _merged(old: str, new: str) -> str:
    """Return a section with the rows of the old one that the new one lacks, and the days of both."""
    before, rows = _rows(old), _rows(new)
    if before.keys() <= rows.keys():
        return new
    columns = max(line.count("|") for line in rows.values())
    padded = {name: line + "  |" * (columns - line.count("|")) for name, line in before.items()}
    text = new.replace("\n".join(rows.values()), "\n".join((padded | rows).values()))
    _, mark, day = old.partition(_MEASURED)
    names = "; ".join(name for name in before if name not in rows)
    day = re.sub(" with `.*`", "", day, count=1)
    return f"{text}\n\nOlder rows ({names}): {day}" if mark else text


def _rows(section: str) -> dict[str, str]:
    """Return the lines of a section's table by their first cells."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return {line.strip("| ").partition(" | ")[0]: line for line in lines}


def _name(scheme: str) -> str:
    """Return the name of a scheme in tables."""
    names = {
        "lattice 1.5": "ckstore's lattices", "lc 1.5": "LC-Checkpoint", "lc 2.5": "LC-Checkpoint, 2 bits",
        "dynaquant 1.5": "DynaQuant, default", "dynaquant, searched": "DynaQuant, searched", "excp": "ExCP",
    }  # fmt: skip
    return names.get(scheme, scheme)


def _ordered(rows: Iterable[Row]) -> list[Row]:
    def place(row: Row) -> tuple[int, str]:
        found = [number for number, start in enumerate(_ORDER) if str(row.get("scheme", row["name"])).startswith(start)]
        return (found or [len(_ORDER)])[0], row["name"]

    return sorted(rows, key=place)
