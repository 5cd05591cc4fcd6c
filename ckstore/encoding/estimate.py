"""What is known of an object before it is stored: the ways to store it, what each would take, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ckstore.codecs.integers import payload_bits
from ckstore.codecs.lattice import Bits, Integers
from ckstore.codecs.patches import Changes
from ckstore.lineage.foretold import Foretold, Layer
from ckstore.lineage.planner import Candidates, Choice
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.identity import Lattice
from ckstore.objects.records import ContentRecord, LatticeRecord
from ckstore.objects.units import Unit

#: Elements of an object that its sizes are estimated from: at most so many; of small objects a part, and at least ...
SAMPLE = 1 << 15
_SAMPLED = 8
_LEAST_SAMPLE = 1 << 13

#: Layers whose sizes are estimated, besides those against something up the chain: integers in full and against the
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
    """One way to store an object: which base its integers are stored against, and which exact layer it gets.

    `patched` stores patches, of the integers and of the exact values. `lattice` is its own where ways differ in it,
    `additive` that of a codebook whose values are added to the base's, and `merged` the end of the chain above the base
    that it takes the place of.
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
    """What the planner needs to know of one object, and what the encoder needs to carry its choice out.

    `foretold` is what the object that will be stored against this one may know of it.
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
    foretold: Foretold | None = None

    def layers(self, choice: Choice, encoded: Encoded) -> list[tuple[float, float]]:
        """Bytes of each layer and those foretold."""
        coarse, exact = encoded.nbytes
        if not encoded.exact:
            return [(coarse, choice.option.stored)]
        assert self.foretold is not None
        way = self.plans[choice.option.name]
        integers = self.foretold.sizes[MOVED if way.patched else BASE if choice.option.is_base else DELTA]
        return [(coarse, integers), (exact, choice.option.stored - integers)]


@dataclass(slots=True)
class Encoded:
    """An object's layers, ready to be written: payloads of chunks, None where all integers are zero.

    `facts` is what a coarse version records of it; such an object has no exact layer. `aside` is what a codebook
    does not code, for each chunk. Payloads of `patched` layers are patches; those of the exact one are empty where
    nothing differs.
    """

    identity: str
    coarse: list[memoryview | bytes | None]
    exact: list[memoryview | bytes]
    facts: CoarseUnit | None = None
    aside: list[bytes] = field(default_factory=list)
    patched: bool = False

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all payloads of integers, and of the exact layer."""
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
        Elements of the object for each sampled one.
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
        """The middle of the middle chunk of `unit`."""
        chunks = -(-unit.count // unit.chunk)
        chunk = chunks // 2
        start = chunk * unit.chunk
        length = min(unit.chunk, unit.count - start)
        taken = min(length, SAMPLE, max(unit.count // _SAMPLED, _LEAST_SAMPLE))
        first = (length - taken) // 2
        bits = read(start + first, start + first + taken)
        return cls(chunk, first, start + first, bits, unit.count / max(taken, 1), chunks)

    def cut(self, chunk: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sampled elements of the same chunk of another object."""
        return chunk[self.first : self.first + self.bits.size]

    def nbytes_of(self, changes: Changes) -> float:
        """Estimated bytes of all the object's patches when the sample's changes are these."""
        return self.scale * len(changes.patch() or b"")

    def nbytes(self, values: Integers, classes: npt.NDArray[np.uint8] | None = None) -> float:
        """Estimated bytes of all the object's payloads when the sample's integers are these."""
        return payload_bits(values, classes, times=self.scale, payloads=self.chunks) / 8


def nearby_ancestors(chain: list[Ancestor]) -> list[tuple[int, Ancestor]]:
    """What a delta may be stored against, by place: the chain's end, what the parent is stored against, the parent.

    In this order each is decoded from the one before, which is still at hand.
    """
    places = sorted({0, min(1, len(chain) - 1), len(chain) - 1})
    return [(place, chain[place]) for place in reversed(places)]
