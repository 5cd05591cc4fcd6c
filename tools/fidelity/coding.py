"""The excess of coded integers over their order-0 entropy: samples of layers' contents, and a sweep over rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.codecs.integers import encode_integers

Integers = NDArray[np.signedinteger]

#: Elements of a chunk.
CHUNK = 1 << 18

#: Rates of the sweep, in bits per element.
RATES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)

#: The minimal number of elements per distinct value: with fewer, a sample does not show its source's entropy.
_DISTINCT = 8


@dataclass(frozen=True)
class Coded:
    """A sample: bits per element as coded, with tables, and by order-0 entropy (of each class)."""

    name: str
    bits: float
    entropy: float

    @property
    def excess(self) -> float:
        """The excess of the code, as a part of the entropy."""
        return self.bits / self.entropy - 1


def measure() -> list[Coded]:
    """Return the samples from 0.02 to 16 bits per element."""
    found = list(sweep())
    for name, values, classes in _samples(CHUNK):
        entropy = _order_0_bits(values, classes) / CHUNK
        if RATES[0] <= entropy <= RATES[-1] and len(np.unique(values)) * _DISTINCT <= CHUNK:
            found.append(Coded(name, _bits(values, classes), entropy))
    return found


def sweep() -> Iterator[Coded]:
    """Yield differences of two geometric numbers at each of `RATES`, against the ideal code of their source.

    With more values than elements a sample's own entropy is far below the size of any code with a table; the ideal code
    of the source is not.
    """
    random = np.random.default_rng(0)
    for rate in RATES:
        decay = _decay(rate)
        values = (random.geometric(1 - decay, CHUNK) - random.geometric(1 - decay, CHUNK)).astype(np.int32)
        mean = float(np.abs(values).mean(dtype=np.float64))
        ideal = -math.log2((1 - decay) / (1 + decay)) - mean * math.log2(decay)
        yield Coded(f"two-sided geometric, {rate:g} bits", _bits(values, None), ideal)


def _bits(values: Integers, classes: NDArray[np.uint8] | None) -> float:
    return len(encode_integers(values, classes)) * 8 / CHUNK


def _decay(rate: float) -> float:
    """Return the q of p(n) = (1 − q) / (1 + q) · q^|n| with an entropy of `rate` bits, by bisection."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(100):
        q = (low + high) / 2
        bits = -math.log2((1 - q) / (1 + q)) - 2 * q / (1 - q * q) * math.log2(q)
        low, high = (q, high) if bits < rate else (low, q)
    return low


def _samples(count: int) -> Iterator[tuple[str, Integers, NDArray[np.uint8] | None]]:
    """Yield name, values and classes of typical layers' contents."""
    rng = np.random.default_rng(0)

    def laplacian(scale: float) -> Integers:
        stop = 1 - np.exp(-1 / scale)
        return (rng.geometric(stop, count) - rng.geometric(stop, count)).astype(np.int32)

    for chance in (0.002, 0.02, 0.1):
        signs = np.where(rng.random(count) < chance, rng.choice([-1, 1], count), 0)
        yield f"signs, {chance:.1%} non-zero", signs.astype(np.int32), None
    for scale in (0.35, 0.8, 1.5, 3):
        yield f"differences, scale {scale}", laplacian(scale), None
    yield "8-bit symbols, scale 12", laplacian(12).astype(np.int8), None
    yield "16-bit, scale 1000", laplacian(1000).clip(-32768, 32767).astype(np.int16), None
    ordinals = (rng.standard_normal(count) * 0.02).astype(np.float32).view(np.int32)
    ordinals = np.where(ordinals < 0, ordinals ^ 0x7FFFFFFF, ordinals)
    yield "float32 ordinals", ordinals, None
    yield "bfloat16 ordinals", (ordinals >> 16).astype(np.int16), None
    classes = rng.binomial(15, 0.5, count).astype(np.uint8)
    residuals = np.rint(rng.standard_normal(count) * 2.0 ** (12 + classes)).astype(np.int32)
    yield "exact layer, one group", residuals, None
    yield "exact layer, 16 classes", residuals, classes
    yield "exact layer, 86 % zero", np.where(rng.random(count) < 0.86, 0, residuals).astype(np.int32), None
    yield "64-bit noise", rng.integers(-(2**63), 2**63 - 1, count), None


def _order_0_bits(values: Integers, classes: NDArray[np.uint8] | None) -> float:
    """Return the order-0 entropy of all values, separately for each class."""
    groups = [values] if classes is None else [values[classes == k] for k in np.unique(classes)]
    bits = 0.0
    for group in groups:
        counts = np.unique(group, return_counts=True)[1]
        bits += float((counts * np.log2(group.size / counts)).sum())
    return bits
