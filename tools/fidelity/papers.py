"""The papers' own figures and those measured here: reached ones, deviations, and known differences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.fidelity.evaluation import confidence
from tools.fidelity.whole import SEARCHED

Row = dict[str, Any]
Rows = dict[str, list[Row]]

_SHORT = "0.8 million bytes of text instead of 30 billion tokens."
_PLATEAU = "Digits are easy: after the plateau few levels change. ResNet-152 learns ImageNet, which is not."
_RESTORED = "The paper's peaks follow restores from compressed versions, and this run has none; " + (
    "its learning rate ends at a tenth, so that late weights still move."
)


def percent(part: float) -> str:
    """Return a part with its sign; zero after rounding has a plus."""
    return f"{round(part, 4) + 0.0:+.2%}"


class Figure(NamedTuple):
    """A figure of a paper, and its counterpart here.

    Attributes
    ----------
    subject
    Names it.
    paper, here
        Ratios, or with `is_loss` parts of a loss or of an accuracy, where less is better.
    differs
        Known differences that explain the deviation.
    half
        Half of the confidence interval of the figure here.
    """

    subject: str
    paper: float
    here: float
    differs: str
    is_loss: bool = False
    half: float = 0.0

    def cells(self) -> list[str]:
        """Return the row of the document's table."""
        if self.is_loss:
            reached = self.here <= self.paper
            shown = [percent(self.paper), percent(self.here)]
            short = f"{100 * (self.here - self.paper):.2f} points more"
        else:
            reached = self.here >= self.paper
            shown = [f"{value:,.2f}x" if value < 10 else f"{value:,.1f}x" for value in (self.paper, self.here)]
            short = f"{1 - self.here / self.paper:.0%} less"
        well = "reached" if not self.half or self.here + self.half <= self.paper else "reached in the mean"
        return [self.subject, *shown, well if reached else short, self.differs]


def figures(rows: Rows) -> Iterator[Figure]:
    """Yield the figures of the measured parts."""
    yield from _recovery(rows)
    yield from _sizes(rows)
    yield from _coding(rows)
    yield from _failures(rows)
    yield from _transfer(rows)
    yield from _costs(rows)


def _one(rows: Rows, section: str, **wanted: str) -> Row | None:
    """Return the row of a section whose values begin with the wanted ones."""
    found = [
        row for row in rows.get(section, []) if all(str(row.get(key, "")).startswith(w) for key, w in wanted.items())
    ]
    return found[0] if found else None


def _recovery(rows: Rows) -> Iterator[Figure]:
    lc, scar = _one(rows, "rework", name="lc"), _one(rows, "rework", name="SCAR, a tenth")
    if lc and scar:
        ours, theirs = (statistics.mean(row["counts"]) for row in (lc, scar))
        lost = f"LC-Checkpoint loses {ours:.2f} steps, SCAR {theirs:.2f}"
        if max(scar["counts"]) == scar["most"]:
            lost += f", where counts end at {scar['most']}"
        if not ours:
            # As if one recovery of them all had lost one step.
            ours, lost = (
                1 / len(lc["counts"]),
                f"{lost}; the ratio is that of one step in {len(lc['counts'])} recoveries",
            )
        yield Figure("[LC] recovery compared with SCAR's, GPT", 5.77, theirs / ours, f"{lost}.")


def _sizes(rows: Rows) -> Iterator[Figure]:
    lc = _one(rows, "gpt", scheme="lc 1.5", part="whole")
    coarser = _one(rows, "gpt", scheme="lc 2.5", part="weights")
    if lc and coarser:
        ratio, lost = coarser["original"] / coarser["total"], max(coarser["lost"])
        yield Figure(
            "[LC] whole run, GPT with moments", 28, lc["original"] / lc["total"],
            f"3 bits a change; 2 bits reach {ratio:.1f}x of weights alone, but lose up to {lost:.1%}.",
        )  # fmt: skip
    for run, model, paper, differs in (
        ("cnn", "residual network for ResNet-152", 39.09, _PLATEAU),
        ("gpt", "GPT for GPT-2 Medium", 29.81, _SHORT),
    ):
        found = _one(rows, run, scheme=str(SEARCHED), part="weights")
        if found:
            best = found["original"] / len(found["added"]) / min(found["added"])
            yield Figure(f"[I] whole run, {model}", paper, found["original"] / found["total"], differs)
            yield Figure(f"[I] best version, {model}", 100, best, _PLATEAU if run == "cnn" else _RESTORED)


def _coding(rows: Rows) -> Iterator[Figure]:
    for row in sorted(rows.get("ablation", []), key=lambda row: (row["run"], row["levels"])):
        gpt = row["run"] == "gpt"
        name = f"{'GPT' if gpt else 'residual network'}, {row['levels']} levels"
        huffman, runs, rearranged = (sum(column) for column in zip(*row["bits"], strict=True))
        yield Figure(
            f"[I] run lengths over Huffman alone, {name}", 28 / 25, huffman / runs,
            "Halfway a quarter of the weights change their level between versions, so that runs are short."
            if gpt else _PLATEAU,
        )  # fmt: skip
        yield Figure(
            f"[I] rearranged over run lengths, {name}", 39 / 28, runs / rearranged,
            "Levels differ little in how many of their weights change." if gpt
            else "Almost no weight changes its level." if row["levels"] < 8
            else "Pruned weights change seldom, others often.",
        )  # fmt: skip


def _failures(rows: Rows) -> Iterator[Figure]:
    exact = {row["seed"]: row["accuracy"] for row in rows.get("interrupted", []) if row["scheme"] == "exact"}
    for count, paper in ((10, 0.005), (20, 0.011)):
        lost = [
            1 - row["accuracy"] / exact[row["seed"]]
            for row in rows.get("interrupted", [])
            if row["scheme"] == str(SEARCHED) and row["count"] == count
        ]
        if lost:
            half = confidence(lost)
            yield Figure(
                f"[I] lost by {count} failures, residual network", paper, statistics.mean(lost),
                f"{len(lost)} seeds, ± {half:.2%}; one digit is 0.25 %." if len(lost) > 1 else "One seed.", True, half,
            )  # fmt: skip


def _transfer(rows: Rows) -> Iterator[Figure]:
    exact, found = (_one(rows, "transfer", scheme=scheme) for scheme in ("exact", str(SEARCHED)))
    if exact and found:
        yield Figure(
            "[I] one-shot, GPT for BERT Large", 11.3, found["bytes"] / found["nbytes"],
            f"Fine-tuned from it, the loss is {percent(found['losses'][-1] / exact['losses'][-1] - 1)}.",
        )  # fmt: skip


def _costs(rows: Rows) -> Iterator[Figure]:
    quantiser, found = _one(rows, "costs", name="quantiser"), _one(rows, "costs", name="dynaquant")
    if quantiser:
        seconds = quantiser["seconds"]
        yield Figure(
            "[I] partition compared with quantiles", 4, seconds["quantiles"] / seconds["partition"],
            "One core and NumPy instead of a GPU and CuPy.",
        )  # fmt: skip
        scale = quantiser["elements"] / quantiser["sample"]
        yield Figure(
            "[I] clustering compared with plain k-means", 65, scale * seconds["scikit-learn"] / seconds["clustering"],
            "One core and scikit-learn instead of a GPU and CuML.",
        )  # fmt: skip
    if found:
        step = found["alone"][1] / found["steps"]
        version = (found["beside"][1] - found["alone"][1]) / found["versions"]
        for every in (1000, 40):
            differs = f"A version every {every:,} steps of a batch of 16 windows; the paper's follow hours of training."
            yield Figure(
                f"[I] share of the training time, GPT, {every:,} steps", 0.006, version / (every * step), differs, True
            )
