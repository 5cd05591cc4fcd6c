"""How far coded integers are above their order-0 entropy: samples of `tools/bench/entropy`, and a sweep over rates."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from ckstore.codecs.integers import encode_integers

#: Elements of a chunk.
CHUNK = 1 << 18

#: Rates of the sweep, in bits an element.
RATES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0)

#: Where more than every so manyth element is a value of its own, the sample says little of its source's entropy.
_DISTINCT = 8


@dataclass(frozen=True)
class Coded:
    """A sample: bits an element as coded, tables included, and by order-0 entropy (of each class)."""

    name: str
    bits: float
    entropy: float

    @property
    def excess(self) -> float:
        """What is coded too much, as a part of the entropy."""
        return self.bits / self.entropy - 1


def measure() -> list[Coded]:
    """The samples from 0.02 to 16 bits an element."""
    script = _entropy()
    found = list(sweep())
    for name, values, classes in script.samples(CHUNK):
        entropy = script.order_0_bits(values, classes) / CHUNK
        if RATES[0] <= entropy <= RATES[-1] and len(np.unique(values)) * _DISTINCT <= CHUNK:
            found.append(Coded(name, _bits(values, classes), entropy))
    return found


def sweep() -> Iterator[Coded]:
    """Differences of two geometric numbers at each of `RATES`, against the ideal code of the source they come from.

    With more values than elements a sample's own entropy is far below what any code that needs a table can reach; the
    ideal code for the source is not.
    """
    random = np.random.default_rng(0)
    for rate in RATES:
        decay = _decay(rate)
        values = (random.geometric(1 - decay, CHUNK) - random.geometric(1 - decay, CHUNK)).astype(np.int32)
        mean = float(np.abs(values).mean(dtype=np.float64))
        ideal = -math.log2((1 - decay) / (1 + decay)) - mean * math.log2(decay)
        yield Coded(f"two-sided geometric, {rate:g} bits", _bits(values, None), ideal)


def _bits(values: NDArray[np.signedinteger], classes: NDArray[np.uint8] | None) -> float:
    return len(encode_integers(values, classes)) * 8 / CHUNK


def _decay(rate: float) -> float:
    """The q of p(n) = (1 − q) / (1 + q) · q^|n| with an entropy of `rate` bits, by bisection."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(100):
        q = (low + high) / 2
        bits = -math.log2((1 - q) / (1 + q)) - 2 * q / (1 - q * q) * math.log2(q)
        low, high = (q, high) if bits < rate else (low, q)
    return low


def _entropy() -> ModuleType:
    """The script, which has no suffix, as a module."""
    path = Path(__file__).resolve().parents[1] / "bench" / "entropy"
    spec = importlib.util.spec_from_loader("entropy", SourceFileLoader("entropy", str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
