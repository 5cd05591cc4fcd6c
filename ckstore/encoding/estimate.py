"""The facts about an object before storing it: the ways to store it, the estimate of each, and the encoded result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ckstore.codecs.integers import payload_bits
from ckstore.codecs.lattice import Bits, Integers
from ckstore.codecs.patches import Changes
from ckstore.lineage.planner import Candidates, Choice
from ckstore.lineage.predictions import Layer, Predictions
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.identity import Lattice
from ckstore.objects.records import ContentRecord, LatticeRecord
from ckstore.objects.units import Unit

#: Elements of an object that its sizes are estimated from: the maximum; of small objects a part, and at least ...
SAMPLE = 1 << 15
_SAMPLED = 8
_LEAST_SAMPLE = 1 << 13

#: Layers with estimates, besides those against ancestors further up the chain: integers in full and against the
#: parent's, and an exact layer by itself.
BASE: Layer = ("base", 0)
DELTA: Layer = ("delta", 0)
OWN: Layer = ("own", 0)

#: Patches of the parent's values, and of its integers.
PATCHED: Layer = ("patched", 0)
MOVED: Layer = ("moved", 0)

ReadUnit = Callable[[int, int], Bits]
Ancestor = TypeVar("Ancestor", LatticeRecord, ContentRecord)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store an object: the base of its integers, and the kind of its exact layer.

    `patched` stores patches, of the integers and of the exact values. `lattice` is set if ways differ in it. `additive`
    is the lattice of a codebook whose values are added to the base's. `merged` is the end of the chain above the base
    that the way replaces.
    """

    base: LatticeRecord | None
    parent: ContentRecord | None = None
    context: bool = False
    patched: bool = False
    factor: float = 1.0
    lattice: Lattice | None = None
    additive: bool = False
    merged: LatticeRecord | None = None


@dataclass(slots=True)
class Estimate:
    """The facts about one object for the planner's choice, and for the encoder that carries it out.

    `predictions` serve the object that will be stored against this one.
    """

    unit: Unit
    candidates: Candidates
    plans: dict[str, Way]
    full_cost: float
    alone: tuple[int, int]
    lattice: Lattice | None = None
    origin: str | None = None
    is_coarse: bool = False
    dithered: bool = False
    predictions: Predictions | None = None

    def layers(self, choice: Choice, encoded: Encoded) -> list[tuple[float, float]]:
        """Return the actual and the predicted bytes of each layer."""
        coarse, exact = encoded.nbytes
        if not encoded.exact:
            return [(coarse, choice.option.stored)]
        assert self.predictions is not None
        way = self.plans[choice.option.name]
        integers = self.predictions.sizes[MOVED if way.patched else BASE if choice.option.is_base else DELTA]
        return [(coarse, integers), (exact, choice.option.stored - integers)]


@dataclass(slots=True)
class Encoded:
    """An object's layers, ready to be written: payloads of chunks, None if all integers are zero.

    `facts` are recorded by a coarse version; such an object has no exact layer. `aside` holds, for each chunk, the
    values that a codebook does not code. Payloads of `patched` layers are patches; those of the exact layer are empty
    without changes.
    """

    identity: str
    coarse: list[memoryview | bytes | None]
    exact: list[memoryview | bytes]
    facts: CoarseUnit | None = None
    aside: list[bytes] = field(default_factory=list)
    patched: bool = False

    @property
    def nbytes(self) -> tuple[int, int]:
        """The bytes of all payloads of integers, and of the exact layer."""
        return sum(map(len, filter(None, self.coarse))), sum(map(len, self.exact))


@dataclass(frozen=True, slots=True)
class Sample:
    """Some elements of one chunk of an object, from which sizes of the whole are estimated.

    Attributes
    ----------
    chunk
        The chunk's number.
    first
        The sample's first element in the chunk.
    start
        The sample's first element in the object.
    bits
        The sampled values.
    scale
        Elements of the object per sampled one.
    chunks
        Chunks of the object.
    """

    chunk: int
    first: int
    start: int
    bits: Bits
    scale: float
    chunks: int

    @classmethod
    def of(cls, unit: Unit, read: ReadUnit) -> Sample:
        """Return the middle of the middle chunk of `unit`."""
        chunks = -(-unit.count // unit.chunk)
        chunk = chunks // 2
        start = chunk * unit.chunk
        length = min(unit.chunk, unit.count - start)
        taken = min(length, SAMPLE, max(unit.count // _SAMPLED, _LEAST_SAMPLE))
        first = (length - taken) // 2
        bits = read(start + first, start + first + taken)
        return cls(chunk, first, start + first, bits, unit.count / max(taken, 1), chunks)

    def cut(self, chunk: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sampled elements of the same chunk of another object."""
        return chunk[self.first : self.first + self.bits.size]

    def nbytes_of(self, changes: Changes) -> float:
        """Estimate the bytes of all the object's patches from the sample's changes."""
        return self.scale * len(changes.patch() or b"")

    def nbytes(self, values: Integers, classes: npt.NDArray[np.uint8] | None = None) -> float:
        """Estimate the bytes of all the object's payloads from the sample's integers."""
        return payload_bits(values, classes, times=self.scale, payloads=self.chunks) / 8


def nearby_ancestors(chain: list[Ancestor]) -> list[tuple[int, Ancestor]]:
    """Return the possible bases of a delta, by place: the chain's end, the parent's base, the parent.

    In this order each is decoded from the one before, which is still in memory.
    """
    places = sorted({0, min(1, len(chain) - 1), len(chain) - 1})
    return [(place, chain[place]) for place in reversed(places)]
