"""Bits of the changes of bfloat16 policies: as patches, with classes of exponents as contexts, and as entropies.

A patch with classes lists the changed elements class by class, as places among the elements of the class. Its bits are
those of a patch of chunks in the order of classes, without the thresholds; its decoder is not part of ckstore.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

import ckstore
from ckstore.codecs.lattice import CHUNK
from ckstore.codecs.patches import find_changes
from tools import runs

Array = npt.NDArray[Any]

#: Most thresholds that are tried, the highest exponents.
_EXPONENTS = 12


def weights_of(path: Path) -> Array:
    """Return the bits of all weights of a file, one after the other."""
    return (
        torch.cat([value.view(torch.int16).flatten() for _, value in sorted(load_file(path).items())])
        .numpy()
        .view("u2")
    )


def exponents_of(weights: Array) -> Array:
    """Return the exponents of bfloat16 weights."""
    return (weights >> 7 & 255).astype(np.int64)


def place_bits(elements: Array, changed: Array) -> float:
    """Return the entropy of the places of `changed` of the `elements` of each class."""
    parts = np.clip(changed / np.maximum(elements, 1), 1e-12, 1 - 1e-12)
    return float(-(changed * np.log2(parts) + (elements - changed) * np.log2(1 - parts)).sum())


def counted(values: Array, chosen: Array) -> tuple[Array, Array]:
    """Return how many elements have each value, and how many of those are chosen."""
    return np.bincount(values, minlength=256), np.bincount(values[chosen], minlength=256)


def classes_of(before: Array, after: Array, count: int) -> Array:
    """Return the elements' classes, by the thresholds between exponents that save most."""
    exponents = exponents_of(before)
    elements, changed = (np.concatenate([[0], np.cumsum(one)]) for one in counted(exponents, before != after))
    candidates = np.flatnonzero(np.diff(elements))[-_EXPONENTS:].tolist()

    def bits(thresholds: tuple[int, ...]) -> float:
        borders = [0, *thresholds, 256]
        return place_bits(np.diff(elements[borders]), np.diff(changed[borders]))

    best = min(itertools.combinations(candidates, count - 1), key=bits)
    return np.searchsorted(np.array(best, np.int64), exponents, side="right")


def patch_bits(before: Array, after: Array) -> int:
    """Return the bits of a patch."""
    return 8 * len(find_changes(after, before, is_float=True).patch() or b"")


def in_order(classes: Array, before: Array, after: Array) -> int:
    """Return the bits of a patch of the chunk in the order of classes."""
    order = np.argsort(classes, kind="stable")
    return patch_bits(before[order], after[order])


def entropy(before: Array, after: Array, classes: Array) -> float:
    """Return the entropy of places and differences by class."""
    chosen = before != after
    differences = (after.astype(np.int64) - before)[chosen]
    bits = place_bits(*counted(classes, chosen))
    for own in np.unique(classes[chosen]):
        counts = np.unique(differences[classes[chosen] == own], return_counts=True)[1]
        bits += float((counts * np.log2(counts.sum() / counts)).sum())
    return bits


#: The bits of a chunk's changes by way.
WAYS: dict[str, Callable[[Array, Array], float]] = {
    "patch": patch_bits,
    "2 classes": lambda before, after: in_order(classes_of(before, after, 2), before, after),
    "3 classes": lambda before, after: in_order(classes_of(before, after, 3), before, after),
    "4 classes": lambda before, after: in_order(classes_of(before, after, 4), before, after),
    "all exponents": lambda before, after: in_order(exponents_of(before), before, after),
    "entropy": lambda before, after: entropy(before, after, np.zeros(before.size, np.int64)),
    "entropy with exponents": lambda before, after: entropy(before, after, exponents_of(before)),
}


def row(paths: tuple[Path, Path]) -> dict[str, float]:
    """Return the changed share of the second file, in percent, and its bits a change by way."""
    before, after = map(weights_of, paths)
    chunks = [slice(at, at + CHUNK) for at in range(0, after.size, CHUNK)]
    count = int((before != after).sum())
    found = {name: sum(way(before[at], after[at]) for at in chunks) / count for name, way in WAYS.items()}
    return {"changed %": 100 * count / after.size} | found


def ratio(paths: list[Path], work: Path, budget: float) -> float:
    """Return the ratio of the later versions of a run at a budget of restores."""
    with ckstore.open(work / f"store-{budget}", create=True) as store:
        reports = [
            store.ingest(path, run="policy", step=step, hot=0, max_restore_cost=budget)
            for step, path in enumerate(paths)
        ]
    later = zip(paths[1:], reports[1:], strict=True)
    sizes = [(path.stat().st_size, report.version.stored_bytes) for path, report in later]
    return sum(size for size, _ in sizes) / sum(stored for _, stored in sizes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tools/bench/contexts", description=__doc__)
    parser.add_argument("--tier", choices=runs.TIERS, default="small")
    parser.add_argument("--run", type=Path, help="a trained run, in place of a new one")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.work) as work:
        if given.run:
            paths = sorted(given.run.glob(runs.RUNS["policy"]))
        else:
            paths = runs.train("policy", Path(work), tier=given.tier)
        rows = [row(pair) for pair in itertools.pairwise(paths)]
        chosen = sorted({0, len(rows) // 8, len(rows) // 2, len(rows) - 1})
        print(f"| version | {' | '.join(rows[0])} |\n{'| --- ' * (len(rows[0]) + 1)}|")
        for index in chosen:
            print(f"| {index + 1} | " + " | ".join(f"{value:.2f}" for value in rows[index].values()) + " |")
        for budget in (2.0, 1000.0):
            print(f"later versions at --max-restore-cost {budget:g}: {ratio(paths, Path(work), budget):.1f}x")


if __name__ == "__main__":
    main()
