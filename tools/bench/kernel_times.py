"""Times the kernels of two checkouts of ckstore, in turn, and compares their output; `tools/bench/kernels` runs it.

Each checkout runs in a process of its own, which times a case when it is asked to. Kernels are called as codecs call
them: times include the call from Python, and for payloads only the kernel that reads their streams.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Case = tuple[Callable[[], Any], Callable[[], bytes]]

#: Nanoseconds of a turn: its shortest call counts.
_SPAN = 1_000_000


def main() -> None:
    """Print nanoseconds an element of both checkouts, and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path, help="the other checkout, whose kernels are in place")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--sizes", default="4096,16384,65536,262144")
    parser.add_argument("--repeat", type=int, default=40)
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[2]
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # Both on one core.
    workers = [_start(checkout) for checkout in (here, options.other.resolve())]
    print(f"{'case':24} {'elements':>8} {'here':>8} {'other':>8}  ns an element; ratio")
    for size in map(int, options.sizes.split(",")):
        for case in CASES:
            if options.case and not any(part in case for part in options.case):
                continue
            digests = [_ask(worker, case, size, 0) for worker in workers]
            if digests[0] != digests[1]:
                raise SystemExit(f"{case} of {size} elements: results differ")
            times = [float("inf")] * 2
            for turn in range(options.repeat):
                for index in (0, 1) if turn % 2 else (1, 0):
                    times[index] = min(times[index], float(_ask(workers[index], case, size, 1)))
            first, second = (time / size for time in times)
            print(f"{case:24} {size:8} {first:8.3f} {second:8.3f}  {first / second:5.2f}", flush=True)
    for worker in workers:
        worker.terminate()


def _start(checkout: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve"],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(worker: subprocess.Popen[str], case: str, size: int, is_timed: int) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(json.dumps([case, size, is_timed]), file=worker.stdin, flush=True)
    return worker.stdout.readline().strip()


def serve() -> None:
    """Answer each line of the input, a case and its size: with a digest of its output, or its nanoseconds."""
    prepared: dict[tuple[str, int], Case] = {}
    for line in sys.stdin:
        case, size, is_timed = json.loads(line)
        if (case, size) not in prepared:
            prepared.clear()
            prepared[case, size] = CASES[case](size)
        run, output = prepared[case, size]
        if not is_timed:
            print(sha256(output()).hexdigest(), flush=True)
            continue
        least = run()
        end = perf_counter_ns() + _SPAN
        while perf_counter_ns() < end:
            least = min(least, run())
        print(least, flush=True)


def _timed(call: Callable[[], Any]) -> Callable[[], int]:
    def run() -> int:
        begin = perf_counter_ns()
        call()
        return perf_counter_ns() - begin

    return run


def _floats(size: int) -> tuple[Array, Array]:
    """Return bits of weights before and after some training."""
    rng = np.random.default_rng(size)
    before = (0.02 * rng.standard_normal(size)).astype(np.float32)
    after = before + (2e-4 * rng.standard_normal(size)).astype(np.float32)
    return before.view(np.uint32), after.view(np.uint32)


def _bits(dtype: str, size: int) -> tuple[Array, Array]:
    before, after = _floats(size)
    if dtype == "bfloat16":
        return (before >> 16).astype(np.uint16), (after >> 16).astype(np.uint16)
    return before, after


def _reading(values: Array, classes: Array | None) -> Case:
    """The kernel that reads streams, of a payload."""
    from ckstore.codecs import integers
    from ckstore.codecs.integer_plan import workspace

    payload = integers.encode_integers(values, classes)
    out = np.empty_like(values)
    read: Any = workspace().kernels
    original = getattr(read, "untimed", read.read_streams)
    read.untimed = original
    taken = 0

    def timed(*arguments: Any) -> Any:
        nonlocal taken
        begin = perf_counter_ns()
        result = original(*arguments)
        taken += perf_counter_ns() - begin
        return result

    read.read_streams = timed

    def run() -> int:
        nonlocal taken
        taken = 0
        integers.decode_integers(payload, out, classes)
        return taken

    def output() -> bytes:  # Without the payload: formats may differ.
        run()
        return out.tobytes()

    return run, output


def _exact(dtype: str, *, grouped: bool) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        from ckstore.codecs.lattice import ordinal_classes, ordinal_difference

        before, after = _bits(dtype, size)
        difference = ordinal_difference(after, before, dtype)
        return _reading(difference, ordinal_classes(before, dtype) if grouped else None)

    return case


def _integers(dtype: str, scale: float, share: float) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        rng = np.random.default_rng(size)
        values = np.rint(scale * rng.laplace(size=size)).astype(dtype)
        values[rng.random(size) >= share] = 0
        return _reading(values, None)

    return case


def _decoding(dtype: str) -> Callable[[int], Case]:
    """A whole payload: header, directory, streams, order and checksum."""

    def case(size: int) -> Case:
        from ckstore.codecs.integers import decode_integers, encode_integers
        from ckstore.codecs.lattice import ordinal_classes, ordinal_correct, ordinal_difference

        before, after = _bits(dtype, size)
        classes = ordinal_classes(before, dtype)
        payload = encode_integers(ordinal_difference(after, before, dtype), classes)
        out = np.empty_like(after)

        def decode() -> None:
            decode_integers(payload, out, classes)
            ordinal_correct(before, out, dtype)

        def output() -> bytes:
            decode()
            return out.tobytes()

        return _timed(decode), output

    return case


def _encoding(dtype: str) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        from ckstore.codecs.integers import encode_integers
        from ckstore.codecs.lattice import ordinal_classes, ordinal_difference

        before, after = _bits(dtype, size)

        def encode() -> bytes:
            return encode_integers(ordinal_difference(after, before, dtype), ordinal_classes(before, dtype))

        return _timed(encode), encode

    return case


def _ordinals(dtype: str, *, inverse: bool, mirrored: bool) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        from ckstore.codecs.lattice import ordinal_correct, ordinal_difference

        before, after = _bits(dtype, size)
        out = after.copy()

        def call() -> Any:
            if inverse:
                return ordinal_correct(before, out, dtype, mirrored=mirrored)
            return ordinal_difference(after, before, dtype, mirrored=mirrored)

        def output() -> bytes:
            out[:] = after
            result = call()
            return bytes((out if result is None else result).tobytes())

        return _timed(call), output

    return case


def _adding(scale: float, *, inverse: bool = False) -> Callable[[int], Case]:
    """A level of a coarse chain: normal values that are rounded; or encoding it, if `inverse`."""

    def case(size: int) -> Case:
        from ckstore.codecs.integers import add_integers, encode_integers

        values = np.rint(scale * np.random.default_rng(size).standard_normal(size)).astype(np.int32)
        payload = encode_integers(values)
        sums = np.zeros(size, np.int32)

        def output() -> bytes:
            sums[:] = 7
            add_integers(payload, sums, 1)
            return sums.tobytes()

        return _timed((lambda: encode_integers(values)) if inverse else lambda: add_integers(payload, sums, 1)), output

    return case


def _lattice(dtype: str, kernel: str) -> Callable[[int], Case]:
    """A kernel of a lattice with exponents of rows, and for "columns" of columns."""

    def case(size: int) -> Case:
        from ckstore.codecs.lattice import LinearLattice, statistics_of
        from ckstore.codecs.rounded import RoundedLattice

        rng = np.random.default_rng(size)
        bits = _bits(dtype, size)[1] if dtype != "float64" else rng.standard_normal(size).view(np.uint64)
        width = 512
        rows = rng.integers(-2, 3, size // width).astype(np.int16)
        cols = rng.integers(-2, 3, width).astype(np.int16) if kernel.endswith("columns") else rows[:0]
        lattice: Any = LinearLattice(dtype, -14, width, rows, cols)
        other = LinearLattice(dtype, -12, width, np.roll(rows, 1), np.roll(cols, 1))
        if kernel.startswith("rounded"):
            lattice = RoundedLattice(dtype, 18 if dtype == "float32" else 2, 100, width, rows, cols)
        integers = lattice.quantise(bits, 0)
        verb = kernel.split()[0]
        calls: dict[str, Callable[[], Any]] = {
            "quantise": lambda: lattice.quantise(bits, 0),
            "values": lambda: lattice.values(integers, 0),
            "project": lambda: other.project(lattice, integers, 0),
            "rounded": lambda: lattice.quantise(bits, 0),
            "rounded_values": lambda: lattice.values(integers, 0),
            "dithered": lambda: lattice.dithered(bits, 0),
            "statistics": lambda: np.array(statistics_of(bits, dtype)),
            "concentration": lambda: np.array(lattice.concentration(bits, 0)),
        }
        call = calls[verb]
        return _timed(call), lambda: call().tobytes()

    return case


def _codebook(kernel: str) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        from ckstore.codecs import codebook

        before, after = (bits.view(np.float32) for bits in _floats(size))
        lattice = codebook.codebook(np.random.default_rng(1).standard_normal(100) * 0.02, "float32")
        indices = lattice.nearest(after)
        words = before.view(np.uint32)
        calls: dict[str, Callable[[], Any]] = {
            "nearest": lambda: lattice.nearest(after),
            "add": lambda: lattice.add(words, indices),
            "difference": lambda: codebook.differences(after.view(np.uint32), words, "float32"),
        }
        call = calls[kernel]
        return _timed(call), lambda: call().tobytes()

    return case


def _products(size: int) -> Case:
    """Factors of 48 directions, half of whose numbers are 0, of rows of 256 elements."""
    from ckstore.codecs.factors import factor_lattice

    rows, generator = size // 256, np.random.default_rng(2)
    left, right = (np.rint(generator.standard_normal(shape) * 0.7) for shape in ((rows, 48), (48, 256)))
    lattice, numbers = factor_lattice("float32", generator.uniform(1e-6, 1e-4, 48), left, right)
    base = _floats(256 * rows)[0].view(np.uint32)

    def call() -> Any:
        return lattice.add(base, numbers, 0)

    return _timed(call), lambda: call().tobytes()


def _patching(*, inverse: bool) -> Callable[[int], Case]:
    def case(size: int) -> Case:
        from ckstore.codecs.patches import apply_patch, find_changes

        rng = np.random.default_rng(size)
        before = _floats(size)[0]
        after = before.copy()
        after[rng.choice(size, size // 50, replace=False)] += 3
        before.flags.writeable = after.flags.writeable = False
        target = before.copy()

        def find() -> bytes:
            patch = find_changes(after, before, is_float=True).patch()
            assert patch is not None
            return bytes(patch)

        patch = find()

        def apply() -> None:
            apply_patch(memoryview(patch), target, is_float=True)

        def output() -> bytes:
            target[:] = before
            apply()
            return patch + target.tobytes()

        return _timed(apply if inverse else find), output

    return case


def _estimating(size: int) -> Case:
    from ckstore.codecs.integers import payload_bits
    from ckstore.codecs.lattice import ordinal_classes, ordinal_difference

    before, after = _floats(size)
    difference, classes = ordinal_difference(after, before, "float32"), ordinal_classes(before, "float32")

    def call() -> Any:
        return payload_bits(difference, classes)

    return _timed(call), lambda: np.rint(call()).tobytes()


def _tree(size: int) -> Case:
    from ckstore.objects.file_digest import stretch_of

    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)

    def call() -> Any:
        return stretch_of(data, 192)

    return _timed(call), lambda: repr(call()).encode()


def _copy(size: int) -> Case:
    from ckstore.kernels.native import copy_past_caches

    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    out = np.empty_like(data)

    def call() -> Any:
        copy_past_caches(data, out)
        return out

    return _timed(call), lambda: call().tobytes()


CASES: dict[str, Callable[[int], Case]] = {
    **{f"streams {dtype}": _exact(dtype, grouped=False) for dtype in ("float32", "bfloat16")},
    **{f"streams {dtype} classes": _exact(dtype, grouped=True) for dtype in ("float32", "bfloat16")},
    "streams int8 dense": _integers("int8", 3, 1.0),
    "streams int8 pairs": _integers("int8", 2, 0.15),
    "streams int8 few": _integers("int8", 1, 0.01),
    "streams int32 dense": _integers("int32", 3000, 1.0),
    "streams int64 wide": _integers("int64", 1e14, 1.0),
    **{
        f"{'correct' if inverse else 'difference'} {dtype}{' mirrored' if mirrored else ''}": _ordinals(
            dtype, inverse=inverse, mirrored=mirrored
        )
        for dtype in ("float32", "bfloat16")
        for inverse in (True, False)
        for mirrored in (False, True)
    },
    "decode float32": _decoding("float32"),
    "decode bfloat16": _decoding("bfloat16"),
    **{
        f"{'encode' if inverse else 'add'} level {scale:g}": _adding(scale, inverse=inverse)
        for inverse in (False, True)
        for scale in (0.25, 0.4, 1.0, 1.5, 3.0)
    },
    "encode float32": _encoding("float32"),
    "encode bfloat16": _encoding("bfloat16"),
    "estimate": _estimating,
    **{
        f"{kernel} {dtype}": _lattice(dtype, kernel)
        for dtype in ("float32", "float64", "bfloat16")
        for kernel in (
            *("quantise", "quantise columns", "values", "values columns", "project", "project columns"),
            *("dithered", "statistics", "concentration"),
        )
    },
    **{
        f"{kernel} {dtype}": _lattice(dtype, kernel)
        for dtype in ("float32", "bfloat16")
        for kernel in ("rounded", "rounded columns", "rounded_values", "rounded_values columns")
    },
    **{f"codebook {kernel}": _codebook(kernel) for kernel in ("nearest", "add", "difference")},
    "products": _products,
    "patch": _patching(inverse=False),
    "apply patch": _patching(inverse=True),
    "tree": _tree,
    "copy": _copy,
}


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main()
