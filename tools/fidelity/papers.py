"""The papers' own figures and those measured here: whose parts they measure, verdicts, and known differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tools.fidelity.whole import SEARCHED

Row = dict[str, Any]
Rows = dict[str, list[Row]]

_SHORT = "0.8 million bytes of text instead of 30 billion tokens."

#: Shown where the run could not have missed the figure.
NOT_JUDGED = "none"

#: Whose levels and coder a scheme has, by the beginning of its name.
_WHOSE = {
    "lattice": ("ckstore", "ckstore"), "lc": ("[LC]", "ckstore"), "dynaquant": ("[I]", "ckstore"),
    "QD": ("its paper", "counted"), "Check": ("its paper", "counted"), "GOBO": ("its paper", "counted"),
    "excp": ("its paper", "its paper"),
}  # fmt: skip

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
* ExCP: its paper's; four bits and LZMA; first weights exact"""


#: Systems that no part measures, and the counterparts in ckstore.
OTHERS = """\
* FM-Delta (Ning et al., NeurIPS 2024): integer differences of fine-tunes' floats, without loss. `tools/bench/size`
  measures it: its pairs take a little more than those of pcodec ([sizes](benchmarks.md#size)).
* IncrCP (Lin et al., PVLDB 18): rows that changed, in chunk files. ckstore's exact versions are patches of the changed
  elements ([sizes](decisions.md#sparse-changes-are-patches)).
* UltraDelta (Wang et al., NeurIPS 2025): one fine-tune against its base, 50x to 224x at task accuracy. ckstore's
  scheme `factors` is for that ([measured](decisions.md#one-fine-tune-against-its-base-has-few-directions)).
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
        Ratios: more is better.
    differs
        Known differences that explain the deviation.
    could_miss
        Whether the run could have missed the paper's figure.
    """

    subject: str
    whose: str
    paper: float
    here: float
    differs: str
    could_miss: bool = True

    def cells(self) -> list[str]:
        """Return the row of the document's table."""
        verdict = f"{1 - self.here / self.paper:.0%} less"
        if self.here >= self.paper:
            verdict = "reached" if self.could_miss else NOT_JUDGED
        return [self.subject, self.whose, _ratio(self.paper), _ratio(self.here), verdict, self.differs]


def _ratio(value: float) -> str:
    return f"{value:,.2f}x" if value < 10 else f"{value:,.1f}x"


def figures(rows: Rows) -> Iterator[Figure]:
    """Yield the figures of the measured parts."""
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


def _one(rows: Rows, section: str, **wanted: str) -> Row | None:
    """Return the row of a section whose values begin with the wanted ones."""
    found = [
        row for row in rows.get(section, []) if all(str(row.get(key, "")).startswith(w) for key, w in wanted.items())
    ]
    return found[0] if found else None
