"""The papers' own figures and those measured here: whose parts they measure, verdicts, and known differences."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.fidelity.archives import DEFAULT_QUALITY, Setting
from tools.fidelity.evaluation import confidence
from tools.fidelity.whole import SEARCHED

Row = dict[str, Any]
Rows = dict[str, list[Row]]

_SHORT = "0.8 million bytes of text instead of 30 billion tokens."
_COUNTED = "[I]; [I], counted"

#: Shown where the run could not have missed the figure.
NOT_JUDGED = "none"

#: Whose levels and coder a scheme has, by the beginning of its name.
_WHOSE = {
    "lattice": ("ckstore", "ckstore"), "lc": ("[LC]", "ckstore"), "dynaquant": ("[I]", "ckstore"),
    "QD": ("its paper", "counted"), "Check": ("its paper", "counted"), "GOBO": ("its paper", "counted"),
    "excp": ("its paper", "its paper"),
}  # fmt: skip

_DYNAQUANT = str(Setting("dynaquant", DEFAULT_QUALITY))

#: Kinds of tensors that LC-Checkpoint codes.
CODED = ("weights", "first moments")

#: In full, for the page.
WHOSE = """\
Columns *levels; coder* name the author of each, *counted* where a coder has no decoder and its bits are added up. A
star, there and at *all*: ratios count second moments, which are on ckstore's lattices.

Each line names levels; coder; everything else:

* ckstore's lattices: ckstore's; ckstore's; exact
* LC-Checkpoint: [LC]'s buckets for weights and first moments (ckstore splits those of first versions and of merged
  changes in four); ckstore's; second moments and tensors below 65,536 elements on ckstore's lattices
* DynaQuant: [I]'s partition and k-means for weights and first moments; ckstore's, of differences of levels, without
  [I]'s rearrangement and run lengths; the same
* QD-compressor: its paper's, their number searched as in [I]; Huffman codes, counted; exact
* Check-N-Run, GOBO: their papers', searched likewise; indices of a fixed width, counted; exact
* ExCP: its paper's; four bits and LZMA; first weights exact
* SCAR, TOPN: float32; none; old values"""


#: Systems that no part measures, and the counterparts in ckstore.
OTHERS = """\
* FM-Delta (Ning et al., NeurIPS 2024): integer differences of fine-tunes' floats, without loss. `tools/bench/size`
  measures it: its pairs take a little more than those of pcodec ([sizes](benchmarks.md#size)).
* IncrCP (Lin et al., PVLDB 18): rows that changed, in chunk files. ckstore's exact versions are patches of the changed
  elements ([sizes](decisions.md#sparse-changes-are-patches)).
* GEMINI (Wang et al., SOSP 2023): recovery from the memory of other machines. ckstore keeps no copy there. After a
  crash the latest version is hot and in the page cache: a state dict at 2.5 times `torch.load`'s speed
  (`tools/bench/speed --only restoring`). After the loss of a machine it comes from a bucket: 268 MB at 100 MB/s in
  2.98 s, coarse in 0.62 s, `torch.load` in 2.85 s (`--only bucket`)."""


def whose(scheme: str, part: str = "weights", run: str = "gpt") -> str:
    """Return whose levels and whose coder a row measures; the residual network has no second moments."""
    found = next((found for start, found in _WHOSE.items() if scheme.startswith(start)), None)
    if found is None:
        return ""
    levels, coder = found
    star = "*" * (part != "weights" and run != "cnn" and scheme.startswith(("lc", "dynaquant")))
    return f"{levels}{star}; {coder}"


def percent(part: float) -> str:
    """Return a part with its sign; zero after rounding has a plus."""
    return f"{round(part, 4) + 0.0:+.2%}"


class Figure(NamedTuple):
    """A figure of a paper, and its counterpart here.

    Attributes
    ----------
    subject
        Names it.
    whose
        Whose levels and whose coder the figure here measures.
    paper, here
        Ratios, or with `is_loss` parts of a loss or of an accuracy, where less is better. Text for a figure here that
        is no number.
    differs
        Known differences that explain the deviation.
    is_loss
        Whether less is better.
    half
        Half of the confidence interval of the figure here.
    could_miss
        Whether the run could have missed the paper's figure.
    """

    subject: str
    whose: str
    paper: float
    here: float | str
    differs: str
    is_loss: bool = False
    half: float = 0.0
    could_miss: bool = True

    def cells(self) -> list[str]:
        """Return the row of the document's table."""
        if isinstance(self.here, str):
            return [self.subject, self.whose, _ratio(self.paper), self.here, NOT_JUDGED, self.differs]
        if self.is_loss:
            missed = self.here - self.half > self.paper
            shown = [percent(self.paper), percent(self.here) + (f" ± {self.half:.2%}" if self.half else "")]
            verdict = f"{100 * (self.here - self.paper):.2f} points more"
            is_open = not missed and self.here + self.half > self.paper
        else:
            missed, is_open = self.here < self.paper, False
            shown = [_ratio(self.paper), _ratio(self.here)]
            verdict = f"{1 - self.here / self.paper:.0%} less"
        if not missed:
            verdict = "open" if is_open else "reached"
            verdict = verdict if self.could_miss else NOT_JUDGED
        return [self.subject, self.whose, *shown, verdict, self.differs]


def _ratio(value: float) -> str:
    return f"{value:,.2f}x" if value < 10 else f"{value:,.1f}x"


def figures(rows: Rows) -> Iterator[Figure]:
    """Yield the figures of the measured parts."""
    yield from _recovery(rows)
    yield from _sizes(rows)
    yield from _coding(rows)
    yield from _failures(rows)
    yield from _failures_of_gpt(rows)
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
        capped = max(scar["counts"]) == scar["most"]
        steps = f"{ours:.2f} steps against {theirs:.2f}{' or more' * capped}"
        differs = f"Counts end at {scar['most']}, so that the ratio is a lower bound." if capped else ""
        differs = differs if ours else "Without lost steps there is no ratio."
        yield Figure(
            "[LC] recovery compared with SCAR's, GPT", whose("lc", "all"), 5.77, theirs / ours if ours else steps,
            differs,
        )  # fmt: skip


def _sizes(rows: Rows) -> Iterator[Figure]:
    lc = _one(rows, "gpt", scheme="lc 1.5", part="whole")
    if lc and lc.get("kinds"):
        kinds = {kind: original / stored for kind, (original, stored) in lc["kinds"].items()}
        whole = ratios(lc)[0]
        coded = [sum(column) for column in zip(*(lc["kinds"][kind] for kind in CODED), strict=True)]
        yield Figure(
            "[LC] whole run, GPT, weights and first moments", whose("lc"), 28, coded[0] / coded[1],
            f"3 bits a change, merged to bound restores: weights {kinds['weights']:.1f}x, first moments "
            f"{kinds['first moments']:.1f}x. Second moments, {kinds['second moments']:.0f}x on ckstore's lattice, "
            f"make it {whole:.1f}x.",
        )  # fmt: skip
    for run, model, paper, differs in (
        ("cnn", "residual network for ResNet-152", 39.09, ""),
        ("gpt", "GPT for GPT-2 Medium", 29.81, _SHORT),
        ("finetune", "fine-tune for GPT-2 Medium", None, ""),
    ):
        alike = [row for row in rows.get(run, []) if row["part"] == "weights"]
        for found in (row for row in alike if row["scheme"] == str(SEARCHED)):
            names = whose("dynaquant")
            if paper:
                could_miss = run != "cnn" and min(ratios(row)[0] for row in alike) < paper
                yield Figure(f"[I] whole run, {model}", names, paper, ratios(found)[0], differs, could_miss=could_miss)
            could_miss = run != "cnn" and min(ratios(row)[1] for row in alike) < 100
            differs = "" if run == "cnn" else _best_of_others(rows, run)
            yield Figure(f"[I] best version, {model}", names, 100, ratios(found)[1], differs, could_miss=could_miss)


def ratios(row: Row) -> tuple[float, float]:
    """Return the ratio of a whole run, and that of its best version."""
    return row["original"] / row["total"], row["original"] / len(row["added"]) / min(row["added"])


def _best_of_others(rows: Rows, run: str) -> str:
    """Return the best versions of whole checkpoints, and of LC's 2 bits with their loss."""
    every, coarser = _one(rows, run, scheme=str(SEARCHED), part="whole"), _one(rows, run, scheme="lc 2.5")
    if not every or not coarser:
        return ""
    return (
        f"Weights alone; whole checkpoints {ratios(every)[1]:.0f}x. LC's 2 bits {ratios(coarser)[1]:.0f}x, but lose up "
        f"to {max(coarser['lost']):.1%}."
    )


def _coding(rows: Rows) -> Iterator[Figure]:
    for row in sorted(rows.get("ablation", []), key=lambda row: (row["run"], row["levels"])):
        gpt = row["run"] == "gpt"
        name = f"{'GPT' if gpt else 'residual network'}, {row['levels']} levels"
        huffman, runs, rearranged = (sum(column) for column in zip(*row["bits"], strict=True))
        yield Figure(
            f"[I] run lengths over Huffman alone, {name}", _COUNTED, 28 / 25, huffman / runs,
            "Halfway a quarter of the weights change their level between versions, so that runs are short."
            if gpt else "", could_miss=gpt,
        )  # fmt: skip
        yield Figure(
            f"[I] rearranged over run lengths, {name}", _COUNTED, 39 / 28, runs / rearranged,
            "Levels differ little in how many of their weights change." if gpt
            else "Almost no weight changes its level." if row["levels"] < 8
            else "Pruned weights change seldom, others often.",
        )  # fmt: skip


def _failures(rows: Rows) -> Iterator[Figure]:
    found = rows.get("interrupted", [])
    exact = {row["seed"]: row["accuracy"] for row in found if row["scheme"] == "exact"}
    for count, paper in ((10, 0.005), (20, 0.011)):
        lost: dict[str, list[float]] = {}
        for row in found:
            if row["count"] == count:
                lost.setdefault(row["scheme"], []).append(1 - row["accuracy"] / exact[row["seed"]])
        if ours := lost.get(str(SEARCHED)):
            could_miss = max(map(statistics.mean, lost.values())) > paper
            seeds = f"{len(ours)} seeds." if len(ours) > 1 else "One seed."
            yield Figure(
                f"[I] lost by {count} failures, residual network", whose("dynaquant", "all", "cnn"), paper,
                statistics.mean(ours), seeds, True,
                confidence(ours) if len(ours) > 1 else 0.0, could_miss,
            )  # fmt: skip


def ratios_after_failures(ends: list[Row]) -> tuple[float, float]:
    """Return the ratio of all versions of runs with failures, and of their best version."""
    stored = [nbytes for row in ends for nbytes in row["added"]]
    return len(stored) * ends[0]["file"] / sum(stored), ends[0]["file"] / min(stored)


def _failures_of_gpt(rows: Rows) -> Iterator[Figure]:
    ways: dict[str, list[Row]] = {}
    for row in rows.get("failures", []):
        if row["count"] == 10 and row["part"] == "all":
            ways.setdefault(row["scheme"], []).append(row)
    ours = ways.get(str(SEARCHED))
    if ours and _DYNAQUANT in ways:
        means = {scheme: statistics.mean(row["rise"] for row in ends) for scheme, ends in ways.items()}
        rises = [row["rise"] for row in ours]
        yield Figure(
            "[I] lost by 10 failures, short GPT for GPT-2 Medium", whose("dynaquant", "all"), 0.0061,
            means[str(SEARCHED)], f"Each version may lose 5 %. By default {percent(means[_DYNAQUANT])}.",
            True, confidence(rises) if len(rises) > 1 else 0.0, max(means.values()) > 0.0061,
        )  # fmt: skip
        best = {scheme: ratios_after_failures(ends)[1] for scheme, ends in ways.items()}
        yield Figure(
            "[I] best version after failures, short GPT", whose("dynaquant", "all"), 100, best[str(SEARCHED)],
            "Whole checkpoints.", could_miss=min(best.values()) < 100,
        )  # fmt: skip


def _transfer(rows: Rows) -> Iterator[Figure]:
    exact, found = (_one(rows, "transfer", scheme=scheme) for scheme in ("exact", str(SEARCHED)))
    if exact and found:
        others = [
            row["bytes"] / row["nbytes"] for row in rows["transfer"] if row["scheme"] != "exact" and "nbytes" in row
        ]
        yield Figure(
            "[I] one-shot, GPT for BERT Large", whose("dynaquant"), 11.3, found["bytes"] / found["nbytes"],
            f"Fine-tuned from it, the loss is {percent(found['losses'][-1] / exact['losses'][-1] - 1)}.",
            could_miss=min(others) < 11.3,
        )  # fmt: skip


def _costs(rows: Rows) -> Iterator[Figure]:
    quantiser, found = _one(rows, "costs", name="quantiser"), _one(rows, "costs", name="dynaquant")
    if quantiser:
        seconds = quantiser["seconds"]
        yield Figure(
            "[I] partition compared with quantiles", "[I]", 4, seconds["quantiles"] / seconds["partition"],
            "One core and NumPy instead of a GPU and CuPy.", could_miss=False,
        )  # fmt: skip
        scale = quantiser["elements"] / quantiser["sample"]
        yield Figure(
            "[I] clustering compared with plain k-means", "[I]", 65,
            scale * seconds["scikit-learn"] / seconds["clustering"],
            "One core and scikit-learn instead of a GPU and CuML.", could_miss=False,
        )  # fmt: skip
    if found:
        step = found["alone"][1] / found["steps"]
        version = (found["during"][1] - found["alone"][1]) / found["versions"]
        shares = {
            40: "A version every 40 steps of a batch of 16 windows; the paper's follow hours of training.",
            1000: "Computed from the same versions: the interval decides it.",
        }
        for every, differs in shares.items():
            yield Figure(
                f"[I] share of the training time, GPT, {every:,} steps", whose("dynaquant", "all"), 0.006,
                version / (every * step), differs, True, could_miss=every == 40,
            )  # fmt: skip
