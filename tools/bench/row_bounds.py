"""What bounds the rows that are no throughput of a checkpoint: sparse payloads, a chained layer, what a tensor adds."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np

import ckstore
from ckstore.codecs import integers
from ckstore.codecs.integer_header import read_header
from ckstore.codecs.integer_plan import make_plan
from ckstore.codecs.integers import decode_integers, encode_integers, payload_bits, write_streams
from ckstore.kernels.entropy import directory as entropy_directory
from ckstore.kernels.entropy import read as entropy_read
from ckstore.kernels.entropy.bins import SYMBOLS
from ckstore.kernels.entropy.plan import measure
from ckstore.reading.checkout import checkout
from ckstore.runtime.checksum import crc32c
from tools.bench import kernels_speed
from tools.bench.growth import write_small
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import calls_noted, kernel_speeds
from tools.bench.speed_figures import Section, digits

#: Calls of Python that are timed at a time.
_MANY = 10_000

#: Elements of a tensor that is an object of its own, and numbers of such tensors.
_OBJECT, _COUNTS = 1 << 16, (8, 40)

#: Elements that such an object is estimated from.
_SAMPLE = 1 << 13

#: Bits an element of the sparse payloads that are bounded here.
_FEW, _SOME = kernels_speed.SPARSE[0], kernels_speed.SPARSE[-1]

#: What estimates, encodes and decodes a payload, and what is counted of it.
_CODED = {"payload_bits": "estimated", "_parts": "encoded", "_decode": "decoded"}
_CODING = [f"{kind} {done}" for kind in ("integers", "exact layers") for done in _CODED.values()]
_CALLS = "Python calls"


def add_row_bounds(bench: Bench, section: Section) -> None:
    """Add three tables: what sparse payloads, a chained layer and a tensor are bounded by."""
    bench.report("bounds of rows")
    section.notes.append(
        "Sparse payloads: few pairs stand in the directory, whose coder takes one decision after the other, since each "
        "depends on the one before; what it takes today counts. Tables of their own would make such payloads more than "
        "2 % larger than their entropy, which tests do not allow. Integers that are wider than what they are stored as "
        "are written once more. Chained layer: its kernels, repeated. Tensors: "
        "payloads that are estimated (a sample), encoded and decoded for each, at what they take beside their "
        "elements, by two sizes, and other calls of Python functions at what an empty one takes; all cores share the "
        "work, but only one at a time runs Python."
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
            "widened": partial(entropy_read.accumulate, few, wide, entropy_read.ALL_BITS),
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
    """Seconds that some calls take, which take turns."""
    return {name: 1 / speed.median for name, speed in kernel_speeds(calls, 1, repeat).items()}


def _directory_reader(payload: bytes) -> Callable[[], Any]:
    """What reads the directory of a payload without classes."""
    header = read_header(memoryview(payload))
    directory = np.frombuffer(bytearray(payload), np.uint8)[header.directory : header.planes]
    coder, odds = np.empty(5, np.int64), np.empty((entropy_directory.CONTEXTS, 2), np.int32)
    groups = np.zeros((1, entropy_directory.COLUMNS), np.int64)
    lowers, raws = np.empty((1, entropy_directory.TABLE), np.int64), np.empty((1, entropy_directory.TABLE), np.uint8)
    lengths = np.empty((1, SYMBOLS), np.uint8)
    runs, values = np.empty((2, entropy_directory.MOST_RARE), np.int64)

    def read() -> None:
        number, _ = entropy_directory.code_directory(
            coder, directory, odds, False, False, header.count, groups, lowers, raws, lengths, runs, values
        )
        if number != 1:
            raise AssertionError("the directory does not come back")

    return read


def _chained_bound(bench: Bench) -> list[list[str]]:
    """What encoding a chained layer cannot do without."""
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
            "order by class, tables": partial(make_plan, residuals, classes),
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
    each = [*_beside_elements(bench.settings.repeat), _call_seconds(bench.settings.repeat)]
    cores = len(os.sched_getaffinity(0))
    rows = [["a tensor of 2^16 elements", *_CODING, _CALLS, "bound ms"]]
    for verb, counts in _counted(bench.places[-1].directory / "calls").items():
        seconds = [count * one for count, one in zip(counts, each, strict=True)]
        rows.append([verb, *map(digits, counts), digits(1e3 * max(seconds[-1], sum(seconds) / cores))])
    rows.append(["microseconds each", *(digits(1e6 * one) for one in each), ""])
    return rows


def _beside_elements(repeat: int) -> list[float]:
    """Seconds that an estimate takes, and an encoding and a decoding beside elements: of integers, of exact layers."""
    calls: dict[str, Callable[[], Any]] = {}
    for count in (_OBJECT, 4 * _OBJECT):
        levels = np.rint(np.random.default_rng(1).standard_normal(count) * 3).astype(np.int32)
        layer = kernels_speed.layers(count)["chained"]
        assert isinstance(layer, kernels_speed.ExactLayer)
        residuals, classes = (
            found.copy() for found in layer.lattice.residuals(layer.bits, layer.integers, 0, layer.parent)
        )
        for name, values, kinds in (("integers", levels, None), ("exact", residuals, classes)):
            payload, out = encode_integers(values, kinds), np.empty_like(values)
            if count == _OBJECT:
                sample = values[:_SAMPLE], None if kinds is None else kinds[:_SAMPLE]
                calls[f"{name} estimate"] = partial(payload_bits, *sample)
            calls[f"{name} encode {count}"] = partial(encode_integers, values, kinds)
            calls[f"{name} decode {count}"] = partial(decode_integers, payload, out, kinds)
    found = _seconds(calls, 5 * repeat)
    beside = []
    for name in ("integers", "exact"):
        beside.append(found[f"{name} estimate"])
        for done in ("encode", "decode"):
            small, large = (found[f"{name} {done} {count}"] for count in (_OBJECT, 4 * _OBJECT))
            beside.append(max(4 * small - large, 0.0) / 3)
    return beside


def _call_seconds(repeat: int) -> float:
    """Seconds that a call of an empty Python function takes."""
    return _seconds({"calls": partial(_many_calls, _MANY)}, 5 * repeat)["calls"] / _MANY


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
    """Calls that code payloads meanwhile, of this thread and of all that are begun, and of functions beside them."""
    total: Counter[str] = Counter()
    depth: Counter[int] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        thread = get_ident()
        name = _CODED.get(frame.f_code.co_name) if frame.f_code.co_filename == integers.__file__ else None
        if event == "call" and not depth[thread]:
            if name:
                kind = "integers" if frame.f_locals["classes"] is None else "exact layers"
                total[f"{kind} {name}"] += 1
            else:
                total[_CALLS] += 1
        if name:
            depth[thread] += 1 if event == "call" else -1

    with calls_noted(note):
        yield total
