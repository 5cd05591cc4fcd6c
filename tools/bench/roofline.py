"""What a machine allows at best, where the time of ingest and restore goes, and how near they are to the bounds."""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

import ckstore
from ckstore.runtime.checksum import crc32, crc32c
from tools.bench import kernels_speed
from tools.bench.row_bounds import add_row_bounds
from tools.bench.speed_bench import Bench, Place, deepest, load, sync
from tools.bench.speed_clock import Contender, kernel_speeds, processor_seconds, race, ready_memory
from tools.bench.speed_contenders import CHECKOUT, INGEST, LIVE, STATE_DICT, by_checkout, by_state_dict, store_in_turn
from tools.bench.speed_figures import Rate, Section, Spread, digits
from tools.bench.speed_stages import STAGES, repeated, stage_clock

#: Bytes that memory is measured with: more than a cache holds.
_LARGE = 256 << 20

#: Bytes that hashes are measured with: what is hashed at once.
_BLOCK = 4 << 20

#: Rounds of what writes whole checkpoints.
_ROUNDS = 5

#: What is bounded: the verbs on exact versions, and state dicts of coarse ones.
COARSE = "coarse state_dict"
VERBS = (INGEST, LIVE, CHECKOUT, STATE_DICT, COARSE)


@dataclass(frozen=True)
class Medium:
    """What writing to a file system costs: seconds, and processor seconds, for a GB with its `fsync`."""

    seconds: float
    processor: float


@dataclass(frozen=True)
class Run:
    """What the versions of the series are stored as.

    Attributes
    ----------
    packed
        Part of the bytes that is left of a version with a parent.
    read
        Bytes of packs that restoring the deepest version reads, for each of its bytes.
    decoded
        Processor seconds for a GB that decoding it takes at best.
    stored, live
        The same for what an ingest of a file and one of a state dict decode and encode, beside what only weighs how to
        store an object.
    coarse
        Of the deepest coarse version, by element of the checkpoint: integers that are decoded on the way to its
        values, and stored bits.
    """

    packed: float
    read: float
    decoded: float
    stored: dict[str, float]
    live: dict[str, float]
    coarse: tuple[float, float]


@dataclass(frozen=True)
class Bound:
    """Seconds for a GB that a verb cannot do without.

    Attributes
    ----------
    parts
        Processor seconds by part.
    serial
        Of these, what one thread has to do after the other.
    medium
        Seconds that the medium takes.
    """

    parts: dict[str, float]
    serial: float
    medium: float

    def seconds(self, cores: int) -> float:
        """The least: all cores always busy, and the medium beside them."""
        return max(sum(self.parts.values()) / cores, self.serial, self.medium)


def stages(bench: Bench) -> Section:
    """Where time goes, and bounds."""
    section = Section(
        "stages",
        "Roofline",
        "First: what this machine does at best, on one core, and writing to its file systems. Second: processor "
        "seconds for a GB of checkpoint by stage, on the disk; a stage's time is its own, without stages inside of it "
        "(but an estimate's is all that it does). Third: what each verb cannot do without on the disk, at the speeds "
        "of the first table; decoding and encoding are those of the very chunks, each repeated at once and so found "
        "in the cache, while all cores are at work. Last: the bound that follows (all cores always busy, the medium "
        "beside them, SHA-256 in one thread) in seconds for a GB, and what was measured.",
        notes=bench.notes,
    )
    bench.report("limits of the machine")
    limits = machine_limits(bench)
    section.tables.append([["at best, one core", "speed"], *([name, f"{speed}"] for name, speed in limits.items())])
    media = {place.name: _medium(bench, place) for place in bench.places}
    written = [["written and synced", "GB/s", "CPU s/GB"]]
    written += [[name, digits(1 / medium.seconds), digits(medium.processor)] for name, medium in media.items()]
    section.tables.append(written)
    bench.report("stages")
    section.tables.append(_stage_table(bench))
    speeds = {name: speed.median for name, speed in limits.items()}
    cores = len(os.sched_getaffinity(0))
    floors: dict[str, dict[str, Bound]] = {}
    table = [["bound", "where", "processors", "one thread", "medium", "bound GB/s", "measured GB/s", "reached"]]
    coded = _coding_seconds(bench)
    for place in bench.places:
        bench.report(f"bounds on {place.name}")
        measured, run = _measured(bench, place, coded)
        decoded, bits = run.coarse
        coarse_speed = kernels_speed.lattice_speed(bits / decoded, bench.settings.repeat)
        section.notes.append(
            f"The coarse version on {place.name} decodes {digits(decoded)} integers an element, of "
            f"{digits(bits / decoded)} bits: at best {coarse_speed} G/s, one core."
        )
        floors[place.name] = bounds(speeds | {LEVELS: coarse_speed.median}, media[place.name], run)
        for verb, bound in floors[place.name].items():
            best = 1 / bound.seconds(cores)
            cells = [sum(bound.parts.values()) / cores, bound.serial, bound.medium, best, measured[verb]]
            table.append([verb, place.name, *map(digits, cells), f"{measured[verb] / best:.0%}"])
    shown = floors[bench.places[0].name]
    parts = dict.fromkeys(part for bound in shown.values() for part in bound.parts)
    needed = [["needed, CPU s/GB", *VERBS]]
    needed += [[part, *(_cell(shown[verb].parts.get(part)) for verb in VERBS)] for part in parts]
    section.tables.extend([needed, table])
    add_row_bounds(bench, section)
    return section


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else digits(seconds)


#: What the limits are called that bounds are computed from, in GB/s.
LEVELS, VALUES = "levels of integers, decode (G/s)", "lattice values (GB/s)"
COPY, FAULTS = "memory copied (GB/s)", "fresh memory touched (GB/s)"
FAULTS_LARGE = "fresh memory touched, large pages (GB/s)"
PREAD, PREAD_FRESH = "file read into memory in use (GB/s)", "file read into fresh memory (GB/s)"
BLAKE3, SHA256, CRC32, CRC32C = "BLAKE3 (GB/s)", "SHA-256 (GB/s)", "CRC-32 (GB/s)", "CRC-32C (GB/s)"


def machine_limits(bench: Bench) -> dict[str, Spread]:
    """Speeds by name: of the machine, and of the kernels."""
    repeat = bench.settings.repeat
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, _LARGE, np.uint8)
    out = np.ones_like(data)
    block = data[:_BLOCK].tobytes()
    path = bench.work / "limits"
    data.tofile(path)
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        speeds = kernel_speeds({
            COPY: partial(np.copyto, out, data),
            FAULTS: _touch,
            FAULTS_LARGE: partial(_touch, large=True),
            PREAD: lambda: [os.preadv(file.fileno(), [buffer], at) for at in range(0, _LARGE, _BLOCK)],
            PREAD_FRESH: lambda: [os.pread(file.fileno(), _BLOCK, at) for at in range(0, _LARGE, _BLOCK)],
        }, _LARGE / 1e9, repeat)  # fmt: skip
    path.unlink()
    hashes: dict[str, Callable[[], Any]] = {
        BLAKE3: lambda: blake3(block).digest(),
        SHA256: lambda: hashlib.sha256(block).digest(),
        CRC32: lambda: crc32(block),
        CRC32C: lambda: crc32c(block),
    }
    speeds |= kernel_speeds(hashes, _BLOCK / 1e9, repeat)
    symbols, _ = kernels_speed.coder_speeds(kernels_speed.symbols(kernels_speed.CHUNK, generator), repeat)
    for way in ("encode", "decode"):
        speeds[f"Huffman, 8-bit symbols, {way} (G/s)"] = symbols[f"ckstore {way}"]
    for name, layer in kernels_speed.layers().items():
        payload = layer.encode()
        calls: dict[str, Callable[[], Any]] = {
            _layer(name, "encode"): layer.encode,
            _layer(name, "decode"): partial(layer.decode, payload),
        }
        speeds |= kernel_speeds(calls, layer.bits.nbytes / 1e9, repeat)
    own = kernels_speed.layers()["own"]
    assert isinstance(own, kernels_speed.ExactLayer)
    values = {VALUES: partial(own.lattice.values, own.integers, 0, np.empty_like(own.bits))}
    return speeds | kernel_speeds(values, own.bits.nbytes / 1e9, repeat)


def _layer(name: str, way: str) -> str:
    return f"{name} layer, {way} (GB/s)"


def _touch(*, large: bool = False) -> None:
    """Write to every page of memory that the system has just given; large pages where it has such."""
    with mmap.mmap(-1, _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        if large and hasattr(mmap, "MADV_HUGEPAGE"):
            fresh.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(fresh, np.uint8)
        pages[:: mmap.PAGESIZE] = 1
        del pages


def _medium(bench: Bench, place: Place) -> Medium:
    original = bench.series()[0]
    data = original.read_bytes()
    target = place.directory / "written"

    def write(_: int) -> None:
        with target.open("wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view[:_BLOCK]) :]
        sync(target)

    contender = Contender("write", write, lambda _: target.unlink(missing_ok=True))
    rate = Rate.of(race([contender], range(min(_ROUNDS, bench.settings.repeat)))["write"], len(data))
    target.unlink()
    return Medium(1 / rate.speed.median, rate.processor)


def bounds(speeds: dict[str, float], medium: Medium, run: Run) -> dict[str, Bound]:
    """What each verb cannot do without.

    Parameters
    ----------
    speeds
        Of `machine_limits`, in GB/s.
    medium, run
        Where it is written to, and how much.
    """
    hashed = 1 / speeds[SHA256]
    read = run.read / speeds[PREAD]
    ingest = {
        "read": 1 / speeds[PREAD],
        "SHA-256": hashed,
        "BLAKE3 of contents": 1 / speeds[BLAKE3],
        "CRC-32": (1 + run.packed) / speeds[CRC32],
        **run.stored,
        "BLAKE3 of packs": run.packed / speeds[BLAKE3],
        "write": run.packed * medium.processor,
    }
    # A state dict is stored as the file that it would make; the parent's chunks are still at hand.
    live = {part: seconds for part, seconds in (ingest | run.live).items() if part != "read"}
    checkout = {"read": read, "decode": run.decoded, "SHA-256": hashed, "write": medium.processor}
    fresh = 1 / max(speeds[FAULTS], speeds[FAULTS_LARGE])
    state_dict = {"read": read, "decode": run.decoded, "fresh memory": fresh}
    integers, bits = run.coarse
    coarse = {
        "read": bits / 32 / speeds[PREAD],
        "decode": integers / 4 / speeds[LEVELS],
        "lattice values": 1 / speeds[VALUES],
        "fresh memory": fresh,
    }
    return {
        INGEST: Bound(ingest, hashed, run.packed * medium.seconds),
        LIVE: Bound(live, hashed, run.packed * medium.seconds),
        CHECKOUT: Bound(checkout, hashed, medium.seconds),
        STATE_DICT: Bound(state_dict, 0.0, 0.0),
        COARSE: Bound(coarse, 0.0, 0.0),
    }


def _coding_seconds(bench: Bench) -> dict[str, dict[str, float]]:
    """Processor seconds for a GB that decoding and encoding take at best, of both ingests and a state dict, by verb."""
    bench.report("decoding and encoding at best")
    paths = bench.series()
    gigabytes = paths[0].stat().st_size / 1e9
    root = bench.work / "repeated"
    with ckstore.init(root) as store:
        store.ingest(paths[0], run="run")
    with repeated() as ingest:
        for path in paths[1:]:
            with ckstore.open(root) as store:
                store.ingest(path, run="run")
    with repeated() as restored, ckstore.open(root, "r") as store:
        store[deepest(root)].state_dict()
    shutil.rmtree(root)
    with ckstore.init(root) as store:
        store.ingest(load(paths[0]), run="run")
        with repeated() as live:
            for path in paths[1:]:
                store.ingest(load(path), run="run")
    shutil.rmtree(root)
    found = {INGEST: (ingest, len(paths) - 1), LIVE: (live, len(paths) - 1), STATE_DICT: (restored, 1)}
    return {
        verb: {name: each / (gigabytes * versions) for name, each in seconds.items()}
        for verb, (seconds, versions) in found.items()
    }


def _measured(bench: Bench, place: Place, coded: dict[str, dict[str, float]]) -> tuple[dict[str, float], Run]:
    """GB/s of each verb, and what it was measured on."""
    paths = bench.series()
    size = paths[0].stat().st_size
    stored = store_in_turn(paths, place.directory)
    root = bench.store(place)
    number = deepest(root)
    read = _bytes_read(root, number) / size
    out = place.directory / "out.pt"
    timings = race([by_checkout(root, number, out), by_state_dict(root, number)], range(bench.settings.repeat))
    out.unlink()
    timings[INGEST] = stored.timings[INGEST][1:]
    timings[LIVE] = store_in_turn(paths, place.directory, live=True).timings[LIVE][1:]
    root = bench.store(place, "coarse")
    number = deepest(root)
    timings[COARSE] = race([by_state_dict(root, number)], range(bench.settings.repeat))[STATE_DICT]
    speeds = {verb: Rate.of(timings[verb], size).speed.median for verb in VERBS}
    decoded = coded[STATE_DICT]["decode"]
    coarse = _coarse_run(root, number)
    return speeds, Run(1 / stored.shrinks, read, decoded, coded[INGEST], coded[LIVE], coarse)


def _bytes_read(root: Path, number: int) -> int:
    """Bytes of payloads that restoring a version reads."""
    with ckstore.open(root, "r") as store:
        works = [store.reader.work(lattice, content) for lattice, content in store[number].document.objects]
    return sum(work.plain_bytes + work.grouped_bytes for work in works)


def _coarse_run(root: Path, number: int) -> tuple[float, float]:
    """Of a coarse version, by element: integers that are decoded on the way to its values, and stored bits."""
    with ckstore.open(root, "r") as store:
        version = store[number]
        works = [store.reader.work(lattice, None) for lattice, _ in version.document.objects]
        elements = sum(unit.count for unit in version.layout.units)
    integers = sum(work.plain_elements + work.grouped_elements for work in works)
    return integers / elements, 8 * sum(work.plain_bytes + work.grouped_bytes for work in works) / elements


def _stage_table(bench: Bench) -> list[list[str]]:
    """Processor seconds for a GB of checkpoint, by stage and verb."""
    columns = dict(_stage_seconds(bench))
    names = [stage.name for stage in STAGES]
    shown = [name for name in names if any(name in column for column in columns.values())]
    rows = [
        [name, *(_cell(column.get(name)) for column in columns.values())]
        for name in (*shown, _REST, _ALL, _SYSTEM, _FAULTS)
    ]
    return [["stage, CPU s/GB", *columns], *rows]


#: Rows that stand below the stages.
_REST, _ALL, _SYSTEM, _FAULTS = "everything else", "all", "all, in the system", "page faults, thousands a GB"


def _stage_seconds(bench: Bench) -> Iterator[tuple[str, dict[str, float]]]:
    """Verb and processor seconds by stage for a GB."""
    place = bench.places[0]
    paths = bench.series()
    gigabytes = paths[0].stat().st_size / 1e9
    root = place.directory / "staged"
    with ckstore.init(root) as store:
        store.ingest(paths[0], run="run")

    def ingest(number: int) -> None:
        with ckstore.open(root) as store:
            store.ingest(paths[number], run="run")

    yield INGEST, _seconds(Contender(INGEST, ingest), range(1, len(paths)), gigabytes)
    with ckstore.init(place.directory / "live") as kept:
        loaded = [load(paths[0])]
        kept.ingest(loaded[0], run="run")

        def take(number: int) -> None:
            loaded[0] = load(paths[number])

        contender = Contender(LIVE, lambda _: kept.ingest(loaded[0], run="run"), take)
        yield LIVE, _seconds(contender, range(1, len(paths)), gigabytes)
    shutil.rmtree(kept.path)
    number = deepest(root)
    out = place.directory / "out.pt"
    for contender in (by_checkout(root, number, out), by_state_dict(root, number)):
        yield contender.name, _seconds(contender, range(bench.settings.repeat), gigabytes)
    out.unlink()
    shutil.rmtree(root)


def _seconds(contender: Contender, rounds: Sequence[int], gigabytes: float) -> dict[str, float]:
    """Processor seconds by stage for a GB, of rounds of so many GB each in this process."""
    found = dict.fromkeys((_REST, _ALL, _SYSTEM, _FAULTS), 0.0)
    with stage_clock() as clock:
        for number in rounds:
            contender.before(number)
            ready_memory()
            before = resource.getrusage(resource.RUSAGE_SELF)
            begin = processor_seconds()
            contender.work(number)
            found[_ALL] += processor_seconds() - begin
            after = resource.getrusage(resource.RUSAGE_SELF)
            found[_SYSTEM] += after.ru_stime - before.ru_stime
            found[_FAULTS] += (after.ru_minflt - before.ru_minflt) / 1e3
    found |= clock.seconds
    found[_REST] = found[_ALL] - sum(clock.seconds.values())
    return {name: amount / (gigabytes * len(rounds)) for name, amount in found.items()}
