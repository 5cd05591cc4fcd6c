"""What bounds the rows that are no throughput of a checkpoint: sparse payloads, and what a tensor adds to a verb."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

import ckstore
from ckstore.checkout import checkout
from ckstore.codecs import integers
from ckstore.codecs.checksum import crc32c
from ckstore.codecs.integers import decode_integers, encode_integers, payload_bits
from ckstore.kernels import entropy_coder
from tools.bench import kernels_speed
from tools.bench.growth import write_small
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import calls_noted, kernel_speeds
from tools.bench.speed_figures import Section, digits

#: Decisions that are timed at a time.
_MANY = 100_000

#: Elements of a tensor that is an object of its own, and numbers of such tensors.
_OBJECT, _COUNTS = 1 << 16, (8, 40)

#: Bits an element of the sparse payloads that are bounded here.
_FEW, _SOME = kernels_speed.SPARSE[0], kernels_speed.SPARSE[-1]

#: Elements of a payload that takes little more than its tables and calls.
_FEWEST = 64

#: What estimates, encodes and decodes a payload.
_CODING = ("payload_bits", "encode_integers", "_decode")


def add_row_bounds(bench: Bench, section: Section) -> None:
    """Add two tables: what sparse payloads are bounded by, and what a tensor is."""
    bench.report("bounds of rows")
    section.notes.append(
        "Sparse payloads: the coder of few pairs takes one decision after the other, since each depends on the one "
        "before; integers that are wider than what they are stored as are written once more. Tensors: payloads that "
        "are estimated, encoded and decoded for each, counted, at what a payload takes that holds next to nothing: "
        "mostly Python and short kernels, on one core at a time."
    )
    section.tables.append(_sparse_bounds(bench))
    section.tables.append(_tensor_bounds(bench))


def _sparse_bounds(bench: Bench) -> list[list[str]]:
    repeat = bench.settings.repeat
    generator = np.random.default_rng(1)
    count = kernels_speed.CHUNK
    few = kernels_speed.sparse(count, _FEW, generator)
    some = kernels_speed.sparse(count, _SOME, generator)
    speeds = {name: speed.median for name, speed in _limits(repeat).items()}
    narrow = 1e9 * kernels_speed.coder_speeds(some, repeat)[0]["ckstore decode"].median
    decisions = _decisions(few)
    zeros, checked = count / speeds["zeros"], few.nbytes / speeds["checksum"]
    wide = count / speeds["widened"]
    rows = [["decode", "what it cannot do without", "microseconds a chunk", "bound G/s"]]
    coded = decisions / speeds["decisions"]
    for dtype, more in (("int8", 0.0), ("int32", wide)):
        parts = f"{decisions:,} decisions, zeros, CRC-32C" + (", widening" if more else "")
        seconds = coded + zeros + checked + more
        rows.append([f"sparse {dtype} of {_FEW} bits", parts, digits(1e6 * seconds), digits(count / seconds / 1e9)])
    seconds = count / narrow + wide
    parts = "decoding of int8, widening"
    rows.append([f"sparse int32 of {_SOME} bits", parts, digits(1e6 * seconds), digits(count / seconds / 1e9)])
    return rows


def _limits(repeat: int) -> dict[str, Any]:
    """Decisions, zeros, bytes and integers a second."""
    count = kernels_speed.CHUNK
    buffer = np.random.default_rng(1).integers(0, 256, _MANY, np.uint8)
    coder, odds = np.empty(5, np.int64), np.empty((8, 2), np.int32)
    _decide(coder, buffer, odds, 1)
    narrow, wide = np.zeros(count, np.int8), np.zeros(count, np.int32)
    calls: dict[str, tuple[Callable[[], Any], int]] = {
        "decisions": (partial(_decide, coder, buffer, odds, _MANY), _MANY),
        "zeros": (partial(narrow.fill, 0), count),
        "checksum": (partial(crc32c, narrow), count),
        "widened": (partial(np.copyto, wide, narrow), count),
    }
    return {name: kernel_speeds({name: call}, amount, 5 * repeat)[name] for name, (call, amount) in calls.items()}


@njit(error_model="numpy")
def _decide(coder: Any, buffer: Any, odds: Any, count: int) -> int:
    """Decode so many decisions as those of pairs are: under few odds that hardly change any more."""
    for context in range(odds.shape[0]):
        odds[context, 0] = 32768
        odds[context, 1] = 0
    state = (np.int64(0), np.int64(0xFFFFFFFF), np.int64(0x12345678), np.int64(4))
    total = 0
    for number in range(count):
        state, bit = entropy_coder.step(state, np.int64(0), buffer, odds, np.int64(number & 7), np.int64(0))
        total += bit
    return total


def _decisions(values: npt.NDArray[np.int8]) -> int:
    """Decisions that the pairs of a sparse payload of ±1 take.

    Of each run its octave in unary, two bits of the rest and the others at once; of each value its size and its sign.
    """
    runs = np.diff(np.flatnonzero(values), prepend=-1) - 1
    octaves = np.array([int(run).bit_length() for run in runs])
    rest = np.maximum(octaves - 1, 0)
    return int((octaves + 1 + np.minimum(rest, 2) + (rest > 2) + 2).sum())


def _tensor_bounds(bench: Bench) -> list[list[str]]:
    values = np.rint(np.random.default_rng(1).standard_normal(_FEWEST) * 3).astype(np.int32)
    payload, out = encode_integers(values), np.empty_like(values)
    calls: dict[str, Callable[[], Any]] = {
        "payload_bits": partial(payload_bits, values),
        "encode_integers": partial(encode_integers, values),
        "_decode": partial(decode_integers, payload, out),
    }
    speeds = kernel_speeds(calls, 1, bench.settings.repeat)
    each = [1 / speeds[name].median for name in _CODING]
    rows = [["a tensor of 2^16 elements", "estimates", "encoded", "decoded", "bound ms"]]
    for verb, counts in _counted(bench.places[-1].directory / "calls").items():
        seconds = sum(count * one for count, one in zip(counts, each, strict=True))
        rows.append([verb, *map(digits, counts), digits(1e3 * seconds)])
    rows.append([f"microseconds for {_FEWEST} elements", *(digits(1e6 * one) for one in each), ""])
    return rows


def _counted(directory: Path) -> dict[str, list[float]]:
    """Payloads that are estimated, encoded and decoded for each tensor, by verb."""
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
    return {verb: [(many[name] - few[name]) / more for name in _CODING] for verb, (few, many) in found.items()}


@contextmanager
def _counting() -> Iterator[Counter[str]]:
    """Calls of the functions that code payloads meanwhile, of this thread and of all that are begun."""
    total: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == integers.__file__:
            total[frame.f_code.co_name] += 1

    with calls_noted(note):
        yield total
