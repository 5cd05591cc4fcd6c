"""How the cost of a verb grows with the number of versions in a store and of tensors in a version."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckstore
from ckstore.reading.checkout import checkout
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import Contender, race
from tools.bench.speed_figures import Goal, Line, Plot, Section, Spread, Timing

#: Cost with the most versions over that with the fewest, and ms a tensor.
VERSIONS = Goal("<", 1.3)
TENSORS = Goal("<", 0.1)

#: Elements of the tensors of versions of which there are many.
_SMALL = (1 << 16, 1 << 16, *[64] * 8)

#: Elements of a tiny tensor, of one that is an object of its own, and of few that hold the same as many of these.
_TINY, _OBJECT, _LARGE = 16, 1 << 16, 1 << 22

#: Elements of the last axis of what has as many.
_WIDTH = 256

#: Part of its size that a weight differs by from version to version.
_CHANGE = 0.05


def write_small(path: Path, elements: Sequence[int], step: int, *, moments: bool = True) -> None:
    """A checkpoint of weights of so many elements each, by `torch.save`; all versions are alike far from each other."""
    base, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + step)
    model, state = {}, {}
    for number, size in enumerate(elements):
        shape = (size // _WIDTH, _WIDTH) if size >= _WIDTH else (size,)
        weight = torch.randn(shape, generator=base)
        model[f"layer{number}.weight"] = weight + _CHANGE * torch.randn(shape, generator=noise)
        if moments:
            first = 1e-4 * torch.randn(shape, generator=noise)
            second = 1e-8 * (torch.randn(shape, generator=noise) ** 2 + 0.1)
            state[number] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}
    torch.save({"model": model, "optimizer": {"state": state}, "step": step}, path)


def growth(bench: Bench) -> Section:
    """Cost of verbs over the number of versions and tensors."""
    section = Section(
        "growth",
        "Growth",
        "Versions: one ingest, checkout and slice of a checkpoint of 1 MB in a store of many versions, over the same "
        "in a store of few, at versions that cost as much to restore. Tensors: what a tensor adds to the time of a "
        "verb, beyond its bytes; the slope over versions of few to many tensors. Those of 2^16 elements are compared "
        "with the same elements in few tensors.",
    )
    _over_versions(bench, section)
    for name, counts, size in (
        ("tensor of 16 elements", bench.settings.growth_tensors, _TINY),
        ("tensor of 2^16 elements", bench.settings.growth_objects, _OBJECT),
    ):
        _over_tensors(bench, section, name, counts, size)
    return section


def _over_versions(bench: Bench, section: Section) -> None:
    counts = bench.settings.growth_versions
    directory = bench.places[-1].directory / "growth"
    directory.mkdir()
    file, out = directory / "next.pt", directory / "out.pt"
    growing = directory / "growing"
    ckstore.init(growing).close()
    roots = {}
    for count in range(1, counts[-1] + 1):
        write_small(file, _SMALL, count)
        with ckstore.open(growing) as store:
            store.ingest(file, step=count)
        if count in counts:
            bench.report(f"growth: {count} versions")
            roots[count] = directory / f"store{count}"
            shutil.copytree(growing, roots[count])
    shutil.rmtree(growing)

    chosen = _alike(roots)

    def write(number: int) -> None:
        write_small(file, _SMALL, counts[-1] + number)

    def ingest(count: int, number: int) -> None:
        with ckstore.open(roots[count]) as store:
            store.ingest(file, step=counts[-1] + number, parent=chosen[count])

    def check_out(count: int, number: int) -> None:
        with ckstore.open(roots[count], "r") as store:
            checkout(store[chosen[count]], out)

    def cut(count: int, number: int) -> Any:
        with ckstore.open(roots[count], "r") as store:
            return store[chosen[count]]["model/layer0.weight"][number]

    verbs: dict[str, tuple[Callable[[int, int], Any], Callable[[int], Any]]] = {
        "checkout": (check_out, lambda number: out.unlink(missing_ok=True)),
        "slice": (cut, lambda number: None),
        "ingest": (ingest, write),
    }
    curves = {}
    for name, (verb, before) in verbs.items():
        bench.report(f"growth over versions: {name}")
        contenders = [
            Contender(str(count), lambda number, count=count, verb=verb: verb(count, number), before)
            for count in counts
        ]
        timings = race(contenders, range(1, bench.settings.repeat + 1), warm=name != "ingest")
        few, many = timings[str(counts[0])], timings[str(counts[-1])]
        ratios = [two.seconds / one.seconds for one, two in zip(few, many, strict=True)]
        what = f"{name}, {counts[-1]:,} versions over {counts[0]}"
        section.lines.append(Line(what, Spread.of(ratios), "x", VERSIONS, bench.places[-1].name))
        curves[name] = [(float(count), 1e3 * _median(timings[str(count)])) for count in counts]
    section.plots.append(
        Plot("growth", "One verb in a store of many versions", "versions", "ms", curves, logarithmic=True)
    )
    shutil.rmtree(directory)


def _alike(roots: dict[int, Path]) -> dict[int, int]:
    """Number of a late version of each store, by the store's number of versions; all cost as much to restore."""
    rows = {}
    for count, root in roots.items():
        with ckstore.open(root, "r") as store:
            rows[count] = store.versions()
    few = rows[min(rows)]
    wanted = max(few, key=lambda row: (row.depth, row.number)).cost
    return {
        count: min(reversed(found), key=lambda row: round(abs(row.cost - wanted), 2)).number
        for count, found in rows.items()
    }


def _median(timings: Sequence[Timing]) -> float:
    return Spread.of([timing.seconds for timing in timings]).median


def _over_tensors(bench: Bench, section: Section, name: str, counts: Sequence[int], size: int) -> None:
    """Lines of what a tensor of `size` elements adds to each verb."""
    directory = bench.places[-1].directory / "growth"
    directory.mkdir()
    out = directory / "out.pt"
    shapes = {f"{count}": [size] * count for count in counts}
    if size >= _OBJECT:
        shapes |= {f"{count} together": _together(size * count) for count in counts}
    for label in shapes:
        ckstore.init(directory / label).close()

    def write(label: str, number: int) -> None:
        write_small(directory / "next.pt", shapes[label], number, moments=False)

    def ingest(label: str, number: int) -> None:
        with ckstore.open(directory / label) as store:
            store.ingest(directory / "next.pt", step=number)

    def check_out(label: str, number: int) -> None:
        with ckstore.open(directory / label, "r") as store:
            checkout(store["latest"], out)

    def load(label: str, number: int) -> Any:
        with ckstore.open(directory / label, "r") as store:
            return store["latest"].state_dict()

    verbs: dict[str, tuple[Callable[[str, int], Any], Callable[[str, int], Any]]] = {
        "ingest": (ingest, write),
        "checkout": (check_out, lambda label, number: out.unlink(missing_ok=True)),
        "state_dict": (load, lambda label, number: None),
    }
    for verb, (work, before) in verbs.items():
        bench.report(f"growth: {verb}, {name}")
        contenders = [
            Contender(
                label,
                lambda number, label=label, work=work: work(label, number),
                lambda number, label=label, before=before: before(label, number),
            )
            for label in shapes
        ]
        timings = race(contenders, range(_rounds(bench, size)), warm=verb != "ingest")
        if verb == "ingest":  # The first version has no parent.
            timings = {label: found[1:] for label, found in timings.items()}
        slopes = [1e3 * _slope(timings, number, counts) for number in range(len(timings[f"{counts[0]}"]))]
        what = f"{verb}, a {name} ({counts[0]} to {counts[-1]:,})"
        section.lines.append(Line(what, Spread.of(slopes), "ms", TENSORS, bench.places[-1].name))
    shutil.rmtree(directory)


def _rounds(bench: Bench, size: int) -> int:
    """Fewer of what is large."""
    return 1 + (bench.settings.repeat if size < _OBJECT else min(3, bench.settings.repeat))


def _together(elements: int) -> list[int]:
    """The same elements in few tensors."""
    whole, rest = divmod(elements, _LARGE)
    return [_LARGE] * whole + [rest] * (rest > 0)


def _slope(timings: dict[str, list[Timing]], number: int, counts: Sequence[int]) -> float:
    """Seconds that a tensor adds in a round, by least squares; beyond those of its bytes where these are known."""
    seconds = []
    tensors = []
    for count in counts:
        together = timings.get(f"{count} together")
        less = 0.0 if together is None else together[number].seconds
        seconds.append(timings[f"{count}"][number].seconds - less)
        tensors.append(count)
    return float(np.polyfit(tensors, seconds, 1)[0])
