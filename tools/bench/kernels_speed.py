"""Speed of the kernels on one core: integers to payloads and back, and the exact layer of a chunk of float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ckstore.codecs.integers import add_integers, decode_integers, encode_integers
from ckstore.codecs.lattice import (
    CHUNK,
    Bits,
    LinearLattice,
    ordinal_classes,
    ordinal_correct,
    ordinal_difference,
    step_exponent,
)
from ckstore.encoding.exact import exact_frame
from ckstore.runtime.checksum import crc32
from tools.bench.speed_bench import Bench
from tools.bench.speed_clock import kernel_speeds
from tools.bench.speed_figures import Goal, Line, Section, Spread, digits

Array = npt.NDArray[Any]

#: G symbols, G elements and GB of float32 a second that are to be reached.
SYMBOLS = Goal(">=", 1.6)
RUNS = Goal(">=", 4.0)
EXACT = Goal(">=", 2.0)

#: Width of the distribution of 8-bit symbols: 5.6 bits of entropy.
_SCALE = 12.0

#: Levels of zstd, and all that is timed on the same elements.
_LEVELS = (1, 3)
_WAYS = [
    f"{coder} {way}" for coder in ("ckstore", *(f"zstd-{level}" for level in _LEVELS)) for way in ("encode", "decode")
]

#: Bits an element at which runs are measured.
SPARSE = (0.05, 0.2, 0.5, 0.9)

#: Rows of a chunk of weights.
_WIDTH = 512

#: A weight, how far it moves between two versions, and the step that training asks for then.
_WEIGHT, _CHANGE, _STEP = 0.02, 0.0016, 0.0032


def huffman(bench: Bench) -> Section:
    """The entropy coder on one core."""
    section = Section(
        "huffman",
        "Entropy coder",
        "`encode_integers` and `decode_integers` on one core, checksums included, chunks of "
        f"2^{CHUNK.bit_length() - 1} elements; in the second table zstd on the same bytes. Sparse data are zeros "
        "and ±1.",
    )
    rows = [["G elements/s (bits an element)", *_WAYS]]
    for name, values, goal in samples():
        bench.report(f"huffman: {name}")
        speeds, bits = coder_speeds(values, 5 * bench.settings.repeat)
        label = f"{name} of {bits['ckstore']:.2g} bits"
        judged = ("encode", "decode") if goal is SYMBOLS else ("decode",)
        section.lines.extend(Line(f"{label}, {way}", speeds[f"ckstore {way}"], "G/s", goal) for way in judged)
        cells = [f"{digits(speeds[way].median)} ({digits(bits[way.split()[0]])})" for way in _WAYS]
        rows.append([label, *cells])
    section.tables.append(rows)
    return section


def samples() -> list[tuple[str, Array, Goal]]:
    """Name, values and goal of what the entropy coder is measured on."""
    generator = np.random.default_rng(1)
    found: list[tuple[str, Array, Goal]] = [("8-bit symbols", symbols(CHUNK, generator), SYMBOLS)]
    for bits in SPARSE:
        values = sparse(CHUNK, bits, generator)
        found += [("sparse int8", values, RUNS), ("sparse int32", values.astype(np.int32), RUNS)]
    return found


def symbols(count: int, generator: np.random.Generator) -> npt.NDArray[np.int8]:
    """Rounded normal values of 5.6 bits of entropy each."""
    return np.rint(generator.standard_normal(count) * _SCALE).clip(-128, 127).astype(np.int8)


def sparse(count: int, bits: float, generator: np.random.Generator) -> npt.NDArray[np.int8]:
    """Zeros and a few ±1, of so many bits of entropy each."""
    low, high = 0.0, 0.5
    for _ in range(50):
        chance = (low + high) / 2
        entropy = chance - chance * np.log2(chance) - (1 - chance) * np.log2(1 - chance)
        low, high = (chance, high) if entropy < bits else (low, chance)
    signs = generator.choice(np.array([-1, 1], np.int8), count)
    return np.where(generator.random(count) < low, signs, np.int8(0))


def coder_speeds(values: Array, repeat: int) -> tuple[dict[str, Spread], dict[str, float]]:
    """G elements a second by coder and way, and bits an element by coder.

    Raises
    ------
    AssertionError
        Where values do not come back.
    """
    out = np.empty_like(values)
    payload = encode_integers(values)
    decode_integers(payload, out)
    if not np.array_equal(out, values):
        raise AssertionError("integers do not come back")
    data = values.tobytes()
    calls: dict[str, Callable[[], Any]] = {
        "ckstore encode": partial(encode_integers, values),
        "ckstore decode": partial(decode_integers, payload, out),
    }
    sizes = {"ckstore": len(payload)}
    for level in _LEVELS:
        compressor = zstandard.ZstdCompressor(level=level)
        packed = compressor.compress(data)
        sizes[f"zstd-{level}"] = len(packed)
        calls[f"zstd-{level} encode"] = partial(compressor.compress, data)
        calls[f"zstd-{level} decode"] = partial(zstandard.ZstdDecompressor().decompress, packed)
    bits = {coder: 8 * size / values.size for coder, size in sizes.items()}
    return kernel_speeds(calls, values.size / 1e9, repeat), bits


def lattice_speed(bits: float, repeat: int) -> Spread:
    """G integers a second of one core that adds a level of a coarse version, of so many bits each, to the one below."""
    generator = np.random.default_rng(1)
    normal = generator.standard_normal(CHUNK)
    low, high = 1e-3, 1e5
    for _ in range(40):
        scale = (low * high) ** 0.5
        counts = np.unique(np.rint(normal * scale), return_counts=True)[1]
        entropy = -(counts / CHUNK * np.log2(counts / CHUNK)).sum()
        low, high = (scale, high) if entropy < bits else (low, scale)
    payload = encode_integers(np.rint(normal * low).astype(np.int32))
    sums = np.zeros(CHUNK, np.int32)
    return kernel_speeds({"add": partial(add_integers, payload, sums)}, CHUNK / 1e9, 5 * repeat)["add"]


def exact(bench: Bench) -> Section:
    """The exact layer on one core."""
    section = Section(
        "exact",
        "Exact layer",
        "What is done with a chunk of float32 once its integers are known, on one core: prediction, classes, "
        "residuals, histograms, coding and checksum, and back. Own: against the lattice value. Chained: against the "
        "parent's value. Ordinal: moments, against the parent's.",
    )
    for name, layer in layers().items():
        bench.report(f"exact: {name}")
        payload = layer.encode()
        if not np.array_equal(layer.decode(payload), layer.bits):
            raise AssertionError(f"the {name} layer does not come back")
        calls: dict[str, Callable[[], Any]] = {"encode": layer.encode, "decode": partial(layer.decode, payload)}
        speeds = kernel_speeds(calls, layer.bits.nbytes / 1e9, 5 * bench.settings.repeat)
        bits = digits(8 * len(payload) / layer.bits.size)
        goal = None if isinstance(layer, OrdinalLayer) else EXACT
        section.lines.extend(Line(f"{name}, {bits} bits: {way}", speed, "GB/s", goal) for way, speed in speeds.items())
    return section


class ExactLayer:
    """One chunk of a weight, its integers, and its parent's values where the layer is chained."""

    def __init__(self, bits: Bits, parent: Bits | None) -> None:
        largest = float(np.abs(bits.view(np.float32)).max())
        self.bits = bits
        self.parent = parent
        self.lattice = LinearLattice("float32", step_exponent(_STEP, largest, "float32"), _WIDTH)
        self.integers = self.lattice.quantise(bits, 0)

    def encode(self) -> bytes:
        """The chunk's frame: what the encoder does after quantising."""
        return exact_frame(self.lattice, self.bits, self.integers, 0, self.parent)

    def decode(self, frame: bytes) -> Bits:
        """The chunk: what the reader does with integers and a frame."""
        predicted, classes = self._predict()
        residuals = np.empty(self.integers.size, np.int32)
        decode_integers(memoryview(frame)[4:], residuals, classes)
        bits = ordinal_correct(predicted, residuals, "float32")
        if crc32(bits) != int.from_bytes(frame[:4], "little"):
            raise AssertionError("the exact layer does not come back")
        return bits

    def _predict(self) -> tuple[Bits, npt.NDArray[np.uint8]]:
        if self.parent is None:
            return self.lattice.own(self.integers, 0)
        return self.lattice.chained(self.parent, self.integers, 0)


class OrdinalLayer:
    """One chunk of a moment, kept as a difference of ordinals to its parent's in context order."""

    def __init__(self, bits: Bits, parent: Bits) -> None:
        self.bits = bits
        self.parent = parent

    def encode(self) -> bytes:
        """The chunk's payload: what the encoder does with an ordinal chunk."""
        difference = ordinal_difference(self.bits, self.parent, "float32")
        return encode_integers(difference, ordinal_classes(self.parent, "float32"))

    def decode(self, payload: bytes) -> Bits:
        """The chunk."""
        stored = np.empty(self.bits.size, np.int32)
        decode_integers(payload, stored, ordinal_classes(self.parent, "float32"))
        return ordinal_correct(self.parent, stored, "float32")


def layers(count: int = CHUNK) -> dict[str, ExactLayer | OrdinalLayer]:
    """The layers that are measured, of one chunk each, of so many elements."""
    generator = np.random.default_rng(1)
    parent = (generator.standard_normal(count) * _WEIGHT).astype(np.float32)
    moved = parent + (generator.standard_normal(count) * _CHANGE).astype(np.float32)
    slow = parent + (generator.standard_normal(count) * _CHANGE / 1000).astype(np.float32)
    squares = (generator.standard_normal(count) ** 2 * 1e-8 + 1e-9).astype(np.float32)
    later = np.float32(0.8) * squares + np.float32(0.2e-8) * (generator.standard_normal(count) ** 2).astype(np.float32)
    return {
        "own": ExactLayer(moved.view(np.uint32), None),
        "chained": ExactLayer(slow.view(np.uint32), parent.view(np.uint32)),
        "ordinal": OrdinalLayer(later.view(np.uint32), squares.view(np.uint32)),
    }
