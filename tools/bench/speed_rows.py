"""The rows of the speed benchmark that are compared with torch.save, torch.load and cp, and the read of one row."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ckstore
from ckstore.policy import Fidelity
from ckstore.reading.checkout import checkout as write_checkout
from tools.bench.speed_bench import Bench, Place, deepest
from tools.bench.speed_clock import kernel_speeds, race
from tools.bench.speed_contenders import (
    CHECKOUT,
    COPY,
    INGEST,
    LIVE,
    LOAD,
    SAVE,
    STATE_DICT,
    by_checkout,
    by_copy,
    by_load,
    by_state_dict,
    store_in_turn,
)
from tools.bench.speed_figures import Goal, Line, Section, Spread

#: Ratios of speeds that are to be reached.
INGEST_GOAL = Goal(">=", 1.0)
LIVE_GOAL = Goal(">=", 1.3)
STATE_DICT_GOAL = Goal(">=", 1.0)
CHECKOUT_GOAL = Goal(">=", 0.8)
COARSE_GOAL = Goal(">=", 2.0)

#: A row of a tensor: milliseconds, and per cent of the bytes that a checkout reads.
ROW_GOAL = Goal("<", 10.0)
ROW_BYTES_GOAL = Goal("<", 2.0)


def ingest(bench: Bench) -> Section:
    """Ingest of files, and coarse ingest for scale."""
    section = Section(
        "ingest",
        "Ingest of a file",
        "The store is opened, the file is read, hashed, coded against its parent, packed, synced to the medium and "
        "committed. Against `torch.save` of the same state dict, with `fsync`. Every round takes the next version of "
        "the run; the first version, which has no parent, is a line of its own.",
        notes=bench.notes,
    )
    for place in bench.places:
        section.lines.extend(_stored(bench, place, "exact", INGEST, INGEST_GOAL))
        section.lines.extend(_stored(bench, place, "coarse", INGEST, None))
    return section


def live(bench: Bench) -> Section:
    """Ingest of state dicts by a process that stays."""
    section = Section(
        "live",
        "Ingest of a state dict in memory",
        "`store.ingest(state_dict)` in a process that keeps the store open and has ingested the parent version. "
        "Against `torch.save` of the same state dict, with `fsync`.",
        notes=bench.notes,
    )
    for place in bench.places:
        section.lines.extend(_stored(bench, place, "exact", LIVE, LIVE_GOAL))
    return section


def _stored(bench: Bench, place: Place, fidelity: Fidelity, way: str, goal: Goal | None) -> Iterator[Line]:
    what = way if fidelity == "exact" else f"{fidelity} {way}"
    bench.report(f"{what} on {place.name}")
    paths = bench.series()
    stored = store_in_turn(paths, place.directory, fidelity=fidelity, live=way == LIVE)
    mine, theirs = stored.timings[way], stored.timings[SAVE]
    size = paths[0].stat().st_size
    yield Line.compared(what, mine[1:], SAVE, theirs[1:], size, goal=goal, place=place.name, shrinks=stored.shrinks)
    yield Line.compared(f"{what}, first version", mine[:1], SAVE, theirs[:1], size, place=place.name)


def state_dict(bench: Bench) -> Section:
    """Versions as state dicts."""
    section = Section(
        "state_dict",
        "A version as a state dict",
        "`version.state_dict()` of the version with the longest chain, from opening the store on; against `torch.load` "
        "of the original file.",
        notes=bench.notes,
    )
    section.lines.extend(_loaded(bench, place, "exact", goal=STATE_DICT_GOAL) for place in bench.places)
    return section


def coarse(bench: Bench) -> Section:
    """Coarse versions as state dicts, and exact ones read coarsely."""
    section = Section(
        "coarse",
        "Coarse values alone",
        "`state_dict()` of the version with the longest chain of a run that was ingested with fidelity coarse, and of "
        "an exact version `at_fidelity('coarse')`, whose moments come exactly. Against `torch.load` of the original.",
        notes=bench.notes,
    )
    for place in bench.places:
        section.lines.append(_loaded(bench, place, "coarse", goal=COARSE_GOAL))
        section.lines.append(_loaded(bench, place, "exact", lowered=True))
    return section


def _loaded(bench: Bench, place: Place, fidelity: Fidelity, *, lowered: bool = False, goal: Goal | None = None) -> Line:
    """State dicts of the deepest version of a store against `torch.load`; `lowered` reads an exact one coarsely."""
    what = "exact version, read coarsely" if lowered else f"{fidelity} version"
    bench.report(f"state_dict of {what} on {place.name}")
    root = bench.store(place, fidelity)
    number = deepest(root)
    with bench.copied(bench.series()[number - 1], place) as original:
        contenders = [by_state_dict(root, number, "coarse" if lowered else None), by_load(original)]
        timings = race(contenders, range(bench.settings.repeat))
        size = original.stat().st_size
    return Line.compared(what, timings[STATE_DICT], LOAD, timings[LOAD], size, goal=goal, place=place.name)


def checkout(bench: Bench) -> Section:
    """Versions as files."""
    section = Section(
        "checkout",
        "Checkout to a file",
        "The version with the longest chain as the file that it was, from opening the store to `fsync`; against `cp` "
        "of the original, with `fsync`.",
        notes=bench.notes,
    )
    for place in bench.places:
        bench.report(f"checkout on {place.name}")
        root = bench.store(place)
        number = deepest(root)
        out, copy = place.directory / "out.pt", place.directory / "cp.pt"
        with bench.copied(bench.series()[number - 1], place) as original:
            timings = race([by_checkout(root, number, out), by_copy(original, copy)], range(bench.settings.repeat))
            if not filecmp.cmp(out, original, shallow=False):
                raise AssertionError(f"version {number} does not come back byte for byte")
            size = original.stat().st_size
        out.unlink()
        copy.unlink()
        mine, theirs = timings[CHECKOUT], timings[COPY]
        section.lines.append(Line.compared("checkout", mine, COPY, theirs, size, goal=CHECKOUT_GOAL, place=place.name))
    return section


def row(bench: Bench) -> Section:
    """One row of the largest tensor."""
    section = Section(
        "row",
        "One row of a tensor",
        "One row of the largest tensor of the version with the longest chain: the version is open, and none of its "
        "chunks is decoded. Bytes read from packs, against those that a checkout of that version reads.",
    )
    place = bench.places[0]
    bench.report("row")
    root = bench.store(place)
    number = deepest(root)
    out = place.directory / "out.pt"
    with ckstore.open(root, "r") as store, _counted(store) as whole:
        write_checkout(store[number], out)
    out.unlink()
    with ckstore.open(root, "r") as store:
        version = store[number]
        tensor = version[max(version, key=lambda path: version[path].size)]
        position = 0

        def read() -> Any:
            nonlocal position
            store.reader.cache.clear()
            position = (position + 173) % len(tensor)
            return tensor[position]

        read()
        with _counted(store) as one:
            read()
        speed = kernel_speeds({"row": read}, 1.0, 5 * bench.settings.repeat)["row"]
    time = Spread(1e3 / speed.high, 1e3 / speed.median, 1e3 / speed.low)
    share = Spread.of([100 * sum(one) / sum(whole)])
    section.lines.append(Line("time", time, "ms", ROW_GOAL, place.name))
    section.lines.append(Line("bytes read, of a checkout's", share, "%", ROW_BYTES_GOAL, place.name))
    return section


@contextmanager
def _counted(store: ckstore.Store) -> Iterator[list[int]]:
    """Lengths of what is read from packs meanwhile."""
    lengths: list[int] = []
    pread, read_into = store.packs.pread, store.packs.read_into

    def counted(pack: str, offset: int, length: int) -> bytes:
        lengths.append(length)
        return pread(pack, offset, length)

    def counted_into(pack: str, offset: int, target: memoryview) -> None:
        lengths.append(len(target))
        read_into(pack, offset, target)

    store.packs.pread, store.packs.read_into = counted, counted_into
    try:
        yield lengths
    finally:
        del store.packs.pread, store.packs.read_into
