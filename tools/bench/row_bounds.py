"""What bounds the rows that are no throughput of a checkpoint: sparse payloads, a chained layer, what a tensor adds."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ckstore
from ckstore.checkout import checkout
from ckstore.codecs import integers
from ckstore.codecs.checksum import crc32c
from ckstore.codecs.integer_header import read_header
from ckstore.codecs.integer_plan import make_plan, sort_elements
from ckstore.codecs.integers import decode_integers, encode_integers, payload_bits, write_streams
from ckstore.kernels import entropy_coder, entropy_directory
from ckstore.kernels.entropy_layout import ROW, SYMBOLS
from ckstore.kernels.entropy_plan import measure
from tools.bench import kernels_speed
from tools.bench.growth import write_small
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import calls_noted, kernel_speeds
from tools.bench.speed_figures import Section, digits

#: Calls of Python that are timed at a time.
_MANY = 10_000

#: Elements of a tensor that is an object of its own, and numbers of such tensors.
_OBJECT, _COUNTS = 1 << 16, (8, 40)

#: Bits an element of the sparse payloads that are bounded here.
_FEW, _SOME = kernels_speed.SPARSE[0], kernels_speed.SPARSE[-1]

#: What estimates, encodes and decodes a payload, and what is counted of it.
_CODED = {"payload_bits": "estimated", "encode_integers": "encoded", "_decode": "decoded"}
_CODING = [f"{kind} {done}" for kind in ("integers", "exact layers") for done in _CODED.values()]
_CALLS = "Python calls"


def add_row_bounds(bench: Bench, section: Section) -> None:
    """Add three tables: what sparse payloads, a chained layer and a tensor are bounded by."""
    bench.report("bounds of rows")
    section.notes.append(
        "Sparse payloads: few pairs stand in the directory, whose coder takes one decision after the other, since each "
        "depends on the one before; tables of their own would take up to 7 % more bytes. Integers that are wider than "
        "what they are stored as are written once more. Tensors: what a payload takes beside its elements (a payload "
        "of 2^16 less a quarter of one of 2^18: tables, the directory, calls), for those that are counted, on all "
        "cores; and calls of Python functions, counted, at what an empty one takes, one thread at a time."
    )
    section.tables.extend((_sparse_bounds(bench), _chained_bound(bench), _tensor_bounds(bench)))


def _sparse_bounds(bench: Bench) -> list[list[str]]:
    repeat = bench.settings.repeat
    generator = np.random.default_rng(1)
    count = kernels_speed.CHUNK
    few = kernels_speed.sparse(count, _FEW, generator)
    some = kernels_speed.sparse(count, _SOME, generator)
    narrow = 1e9 * kernels_speed.coder_speeds(some, repeat)[0]["ckstore decode"].median
    zeros, wide = np.zeros(count, np.int8), np.zeros(count, np.int32)
    seconds = _seconds(
        {
            "directory": _directory_reader(encode_integers(few)),
            "zeros": partial(zeros.fill, 0),
            "checksum": partial(crc32c, few),
            "widened": partial(np.copyto, wide, few),
        },
        5 * repeat,
    )
    pairs = int(np.count_nonzero(few))
    coded = seconds["directory"] + seconds["zeros"] + seconds["checksum"]
    rows = [["decode", "what it cannot do without", "microseconds a chunk", "bound G/s"]]
    for label, parts, least in (
        (f"sparse int8 of {_FEW} bits", f"directory of {pairs:,} pairs, zeros, CRC-32C", coded),
        (f"sparse int32 of {_FEW} bits", "the same, widening", coded + seconds["widened"]),
        (f"sparse int32 of {_SOME} bits", "decoding of int8, widening", count / narrow + seconds["widened"]),
    ):
        rows.append([label, parts, digits(1e6 * least), digits(count / least / 1e9)])
    return rows


def _seconds(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Seconds that some calls take, each by itself."""
    return {name: 1 / kernel_speeds({name: call}, 1, repeat)[name].median for name, call in calls.items()}


def _directory_reader(payload: bytes) -> Callable[[], Any]:
    """What reads the directory of a payload without classes."""
    header = read_header(memoryview(payload))
    directory = np.frombuffer(bytearray(payload), np.uint8)[header.directory : header.planes]
    coder, odds = np.empty(5, np.int64), np.empty((entropy_directory.CONTEXTS, 2), np.int32)
    groups = np.zeros((1, entropy_directory.COLUMNS), np.int64)
    rows, lengths = np.empty((1, 2, ROW), np.uint8), np.empty((1, SYMBOLS), np.uint8)
    runs, values = np.empty((2, entropy_directory.MOST_ADAPTIVE), np.uint64)

    def read() -> None:
        entropy_coder.start_coder(coder, directory, odds, 0)
        number = entropy_directory.code_directory(
            coder, directory, odds, False, header.planed, header.count, groups, rows, lengths, runs, values
        )
        if number != 1:
            raise AssertionError("the directory does not come back")

    return read


def _chained_bound(bench: Bench) -> list[list[str]]:
    """What encoding a chained layer cannot do without: nothing that looks for tables, and no Python."""
    layer = kernels_speed.layers()["chained"]
    count = layer.bits.size
    assert isinstance(layer, kernels_speed.ExactLayer)
    predict = partial(layer.lattice.residuals, layer.bits, layer.integers, 0, layer.parent)
    residuals, classes = (np.array(found) for found in predict())
    plan = make_plan(residuals, classes)
    room, *_ = measure(plan.room.groups, plan.number)
    narrow = np.empty(count, f"i{plan.narrow}")
    seconds = _seconds(
        {
            "streams": partial(write_streams, plan, room),
            "prediction, classes": predict,
            "order by class": partial(sort_elements, residuals, classes, plan.room),
            "CRC-32C": lambda: [crc32c(array) for array in (layer.bits, classes, narrow, plan.planes)],
        },
        5 * bench.settings.repeat,
    )
    rows = [["chained layer, encode", *seconds, "all", "bound GB/s"]]
    cells = [*seconds.values(), sum(seconds.values())]
    bound = layer.bits.nbytes / cells[-1] / 1e9
    rows.append(["nanoseconds an element", *(digits(1e9 * cell / count) for cell in cells), digits(bound)])
    return rows


def _tensor_bounds(bench: Bench) -> list[list[str]]:
    coarse, exact = _beside_elements(bench.settings.repeat)
    call = _seconds({"call": partial(_many_calls, _MANY)}, bench.settings.repeat)["call"] / _MANY
    cores = len(os.sched_getaffinity(0))
    rows = [["a tensor of 2^16 elements", *_CODING, "Python calls", "bound ms"]]
    for verb, counts in _counted(bench.places[-1].directory / "calls").items():
        coded = sum(count * one for count, one in zip(counts, (*coarse, *exact), strict=False))
        rows.append([verb, *map(digits, counts), digits(1e3 * (coded / cores + counts[-1] * call))])
    rows.append(["microseconds each", *(digits(1e6 * one) for one in (*coarse, *exact, call)), ""])
    return rows


def _beside_elements(repeat: int) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Seconds that an estimate, an encoding and a decoding take beside the elements: of integers, of exact layers."""
    taken = []
    for count in (_OBJECT, 4 * _OBJECT):
        levels = np.rint(np.random.default_rng(1).standard_normal(count) * 3).astype(np.int32)
        layer = kernels_speed.layers(count)["chained"]
        assert isinstance(layer, kernels_speed.ExactLayer)
        residuals, classes = layer.lattice.residuals(layer.bits, layer.integers, 0, layer.parent)
        residuals, classes = residuals.copy(), classes.copy()
        found = []
        for values, kinds in ((levels, None), (residuals, classes)):
            calls: dict[str, Callable[[], Any]] = {
                "estimate": partial(payload_bits, values, kinds),
                "encode": partial(encode_integers, values, kinds),
                "decode": partial(decode_integers, encode_integers(values, kinds), np.empty_like(values), kinds),
            }
            found += _seconds(calls, repeat).values()
        taken.append(found)
    beside = [max(small - large / 4, 0.0) for small, large in zip(*taken, strict=True)]
    return (beside[0], beside[1], beside[2]), (beside[3], beside[4], beside[5])


def _many_calls(count: int) -> None:
    for _ in range(count):
        _call(1, 2, 3)


def _call(one: int, two: int, three: int) -> int:
    return one


def _counted(directory: Path) -> dict[str, list[float]]:
    """Payloads that are estimated, encoded and decoded for each tensor, and Python functions called, by verb."""
    found: dict[str, list[Counter[str]]] = {}
    for tensors in _COUNTS:
        root = directory / f"{tensors}"
        path, out = root / "next.pt", root / "out.pt"
        root.mkdir(parents=True)
        ckstore.init(root / "store").close()
        for version in range(3):
            write_small(path, [_OBJECT] * tensors, version, moments=False)
            with ckstore.open(root / "store") as store, _counting() as ingested:
                store.ingest(path, step=version)
        with ckstore.open(root / "store", "r") as store, _counting() as checked_out:
            checkout(store["latest"], out)
        with ckstore.open(root / "store", "r") as store, _counting() as loaded:
            store["latest"].state_dict()
        for verb, total in (("ingest", ingested), ("checkout", checked_out), ("state_dict", loaded)):
            found.setdefault(verb, []).append(total)
    shutil.rmtree(directory)
    more = _COUNTS[1] - _COUNTS[0]
    return {
        verb: [(many[name] - few[name]) / more for name in (*_CODING, _CALLS)] for verb, (few, many) in found.items()
    }


@contextmanager
def _counting() -> Iterator[Counter[str]]:
    """Calls of Python functions meanwhile, of this thread and of all that are begun; those that code payloads apart."""
    total: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        total[_CALLS] += 1
        name = _CODED.get(frame.f_code.co_name)
        if name and frame.f_code.co_filename == integers.__file__:
            kind = "integers" if frame.f_locals["classes"] is None else "exact layers"
            total[f"{kind} {name}"] += 1

    with calls_noted(note):
        yield total
