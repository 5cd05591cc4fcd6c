"""Speed over what may change it: the length of a run, the size of a checkpoint, the number of cores."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

import ckstore
from tools.bench.speed_bench import Bench, deepest
from tools.bench.speed_clock import end_processes, race
from tools.bench.speed_contenders import (
    CHECKOUT,
    COPY,
    INGEST,
    LOAD,
    SAVE,
    STATE_DICT,
    by_checkout,
    by_copy,
    by_load,
    by_state_dict,
    store_in_turn,
)
from tools.bench.speed_figures import Line, Plot, Rate, Section, Spread, Timing, digits

#: Versions of each size: a first one, and two that are stored against a parent.
_VERSIONS = 3

#: Rounds of what is shown for a trend.
_ROUNDS = 3


def depth(bench: Bench) -> Section:
    """Ingest and checkout of every version of a long run."""
    settings = bench.settings
    section = Section(
        "depth",
        "Over the length of a run",
        f"Every version of a run of {settings.depth_versions} versions of {settings.depth_megabytes} MB on the disk. "
        "Factor: what restoring it costs over a version stored in full, as the store foretold it.",
    )
    paths = bench.series(settings.depth_megabytes, settings.depth_versions)
    place = bench.places[0]
    bench.report("depth: ingest")
    size = paths[0].stat().st_size
    stored = store_in_turn(paths, place.directory)
    root, out, copy = place.directory / "deep", place.directory / "out.pt", place.directory / "cp.pt"
    with ckstore.init(root) as store:
        for path in paths:
            store.ingest(path, run="run")
        rows = store.versions()

    bench.report("depth: checkout")
    contenders = [replace(by_checkout(root, row.number, out), name=str(row.number)) for row in rows]
    timings = race([*contenders, by_copy(paths[-1], copy)], range(min(_ROUNDS, settings.repeat)))
    for path in (out, copy):
        path.unlink()
    shutil.rmtree(root)
    speeds = {row.number: Rate.of(timings[str(row.number)], size).speed.median for row in rows}
    copied = Rate.of(timings[COPY], size).speed.median
    curves = {
        name: [(float(at + 1), size / 1e9 / t.seconds) for at, t in enumerate(found)]
        for name, found in stored.timings.items()
    }
    curves[CHECKOUT] = [(float(number), speed) for number, speed in speeds.items()]
    curves[COPY] = [(float(row.number), copied) for row in rows]
    section.plots.append(Plot("depth", "Speed over the versions of a run", "version", "GB/s", curves))
    table = [["version", "depth", "factor", "ingest GB/s", "checkout GB/s"]]
    for row, (_, ingested) in zip(rows, curves[INGEST], strict=True):
        cells = [f"{row.number}", f"{row.depth}", digits(row.cost), digits(ingested), digits(speeds[row.number])]
        table.append(cells)
    section.tables.append(table)
    return section


def size(bench: Bench) -> Section:
    """Ingest and restore of checkpoints of several sizes."""
    section = Section(
        "size",
        "Over the size of a checkpoint",
        f"The version with the longest chain of runs of {_VERSIONS} versions, on the disk.",
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for megabytes in bench.settings.sizes:
        bench.report(f"size: {megabytes} MB")
        paths = bench.series(megabytes, _VERSIONS)
        timings = in_and_out(paths, bench.places[0].directory, min(_ROUNDS, bench.settings.repeat))
        nbytes = paths[0].stat().st_size
        for name, found in timings.items():
            speed = Rate.of(found, nbytes).speed.median
            curves.setdefault(name, []).append((nbytes / 1e6, speed))
    section.plots.append(Plot("size", "Speed over the size of a checkpoint", "MB", "GB/s", curves))
    section.tables.append(_table("MB", curves))
    return section


def threads(bench: Bench) -> Section:
    """Ingest and restore on one core and on more."""
    cores = len(os.sched_getaffinity(0))
    section = Section(
        "threads",
        "Over the number of cores",
        "The same in processes that may use only so many cores, on the disk.",
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    speeds: dict[str, dict[int, Spread]] = {}
    paths = bench.series()[:_VERSIONS]
    nbytes = paths[0].stat().st_size
    rounds = min(_ROUNDS, bench.settings.repeat)
    for count in sorted({1, cores // 2, cores} - {0}):
        bench.report(f"threads: {count}")
        allowed = sorted(os.sched_getaffinity(0))[:count]
        # A fresh process: pools of threads are made for the cores that there are when their library is imported.
        with ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=os.sched_setaffinity, initargs=(0, allowed)
        ) as pool:
            timings = pool.submit(_on_cores, paths, bench.places[0].directory, rounds, count).result()
        for name, found in timings.items():
            speed = Rate.of(found, nbytes).speed
            speeds.setdefault(name, {})[count] = speed
            curves.setdefault(name, []).append((float(count), speed.median))
    section.plots.append(Plot("threads", "Speed over the number of cores", "cores", "GB/s", curves))
    section.tables.append(_table("cores", curves))
    for name in (INGEST, CHECKOUT, STATE_DICT):
        if cores > 1:
            gain = speeds[name][cores].median / speeds[name][1].median
            section.lines.append(Line(f"{name}, {cores} cores over 1", Spread.of([gain]), "x"))
    return section


def _on_cores(paths: Sequence[Path], directory: Path, rounds: int, count: int) -> dict[str, list[Timing]]:
    torch.set_num_threads(count)
    try:
        in_and_out(paths[:2], directory, 1)  # loads what is compiled
        return in_and_out(paths, directory, rounds)
    finally:
        end_processes()


def in_and_out(paths: Sequence[Path], directory: Path, rounds: int) -> dict[str, list[Timing]]:
    """Timings of storing versions that have a parent, of restoring the deepest, and of what these stand beside."""
    stored = store_in_turn(paths, directory)
    root, out, copy = directory / "swept", directory / "out.pt", directory / "cp.pt"
    with ckstore.init(root) as store:
        for path in paths:
            store.ingest(path, run="run")
    number = deepest(root)
    original = paths[number - 1]
    contenders = [
        by_checkout(root, number, out),
        by_copy(original, copy),
        by_state_dict(root, number),
        by_load(original),
    ]
    timings = race(contenders, range(rounds))
    for path in (out, copy):
        path.unlink()
    shutil.rmtree(root)
    return {
        INGEST: stored.timings[INGEST][1:],
        SAVE: stored.timings[SAVE][1:],
        **{name: timings[name] for name in (CHECKOUT, COPY, STATE_DICT, LOAD)},
    }


def _table(what: str, curves: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """Speeds in GB/s by name over `what`."""
    first = next(iter(curves.values()))
    rows = [[f"{what}; GB/s", *curves]]
    rows += [[f"{x:.0f}", *(digits(points[at][1]) for points in curves.values())] for at, (x, _) in enumerate(first)]
    return rows
