"""The facts about an object before storing it: the ways to store it, the estimate of each, and the encoded result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.factors import Numbers
from ckstore.codecs.integers import payload_bits
from ckstore.codecs.lattice import Bits, Integers, ordinal_classes, ordinal_difference
from ckstore.codecs.patches import ChangedElements
from ckstore.lineage.cost import Work
from ckstore.lineage.planner import Candidates
from ckstore.objects.documents import CoarseUnit
from ckstore.objects.identity import Lattice
from ckstore.objects.records import Record
from ckstore.objects.units import Unit

#: Elements of an object that its sizes are estimated from: the maximum; of small objects a part, and at least ...
SAMPLE = 1 << 15
_SAMPLED = 8
_LEAST_SAMPLE = 1 << 13

#: Elements of a sample that are enough unless values change in few places only.
_ENOUGH = 1 << 14

#: Binary logarithm of the cells of an octave in histograms of differences: each class has a histogram.
_FINE = 4

ReadUnit = Callable[[int, int], Bits]

#: The assumed mean square of the error of a lattice value in steps, if none is recorded.
SPREAD = 1 / 12


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent version's object of the same signature.

    `spread` is the mean square of a coarse object's errors (`CoarseUnit`), `other` the id of the object in the nearest
    ancestor of the other fidelity. The object of another signature is `longer`: its first elements are the unit's.
    """

    id: str
    spread: float = SPREAD
    other: str | None = None
    longer: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """The float32 values in the same version that an object rounds: their content id, unit, and a reader.

    `work` is the expected work of decoding them.
    """

    content: str
    unit: Unit
    read: ReadUnit
    work: Work


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store an object: in full, against `base`, in `context` order (classes from the base), or as patches.

    Codebooks have more ways: each its own `lattice`; `additive`, whose values are added to the base's; and `merged`,
    the end of the chain above the base that the way replaces. A cast has a `source` in place of a base. Factors have
    their `numbers`.
    """

    base: Record | None
    context: bool = False
    patched: bool = False
    lattice: Lattice | None = None
    additive: bool = False
    merged: Record | None = None
    source: Source | None = None
    numbers: Numbers | None = None

    @property
    def base_id(self) -> str | None:
        """Id of the base."""
        return None if self.base is None else self.base.id


@dataclass(frozen=True, slots=True)
class Master:
    """The values in the same version that a coarse object rounds, and how they become coarse themselves."""

    source: Source
    estimate: Estimate


@dataclass(slots=True)
class Estimate:
    """The facts about one object for the planner's choice, and for the encoder that carries it out.

    A coarse cast has a `master`. `parent` is the parent's object if few elements differ from it; `patches` of it are
    those of the chunks that were compared.
    """

    unit: Unit
    candidates: Candidates
    ways: dict[str, Way]
    full_cost: float
    alone: int
    lattice: Lattice | None = None
    origin: str | None = None
    is_coarse: bool = False
    dithered: bool = False
    doubled: bool = False
    master: Master | None = None
    parent: Record | None = None
    patches: dict[int, bytes | None] = field(default_factory=dict)


@dataclass(slots=True)
class Encoded:
    """An object ready to be written: its record, without a place, and payloads of its chunks, None if nothing changes.

    A version with a coarse object records its `facts`. A `shortcut` leads to the object from the parent's, which is not
    its base.
    """

    record: Record
    payloads: list[memoryview | bytes | None]
    facts: CoarseUnit | None = None
    shortcut: Encoded | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all payloads."""
        return sum(map(len, filter(None, self.payloads)))


@dataclass(frozen=True, slots=True)
class Sample:
    """Some elements of one chunk of an object, from which sizes of the whole are estimated.

    The sample begins at element `first` of chunk number `chunk`, which is element `start` of the object. The object has
    `scale` times as many elements, and `chunks` chunks.
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
        count, of_chunk = unit.count, unit.chunk
        chunks = -(-count // of_chunk)
        chunk = chunks // 2
        start = chunk * of_chunk
        length = min(of_chunk, count - start)
        taken = min(length, SAMPLE, max(count // _SAMPLED, _LEAST_SAMPLE))
        first = (length - taken) // 2
        bits = read(start + first, start + first + taken)
        return cls(chunk, first, start + first, bits, count / max(taken, 1), chunks)

    def part(self) -> Sample:
        """Return the middle of the sample, which is enough for values that do not change in few places only."""
        taken = min(self.bits.size, _ENOUGH)
        skipped = (self.bits.size - taken) // 2
        return Sample(
            self.chunk, self.first + skipped, self.start + skipped, self.bits[skipped : skipped + taken],
            self.scale * self.bits.size / max(taken, 1), self.chunks,
        )  # fmt: skip

    def cut(self, chunk: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sampled elements of the same chunk of another object."""
        return chunk[self.first : self.first + self.bits.size]

    def nbytes_of(self, changes: ChangedElements) -> float:
        """Estimate the bytes of all the object's patches from the sample's changes."""
        return self.scale * len(changes.patch() or b"")

    def nbytes(self, values: Integers, classes: npt.NDArray[np.uint8] | None = None) -> float:
        """Estimate the bytes of all the object's payloads from the sample's integers."""
        return payload_bits(values, classes, times=self.scale, payloads=self.chunks)[classes is not None] / 8

    def nbytes_of_delta(self, before: Bits, dtype: str, *, mirrored: bool) -> tuple[float, float]:
        """Estimate the bytes of a delta against sampled values in natural order, and in context order."""
        difference = ordinal_difference(self.bits, before, dtype, mirrored=mirrored)
        classes = ordinal_classes(before, dtype)
        natural, context = payload_bits(difference, classes, times=self.scale, payloads=self.chunks, fine=_FINE)
        return natural / 8, context / 8


def nearby_ancestors(levels: Iterable[Record], dtype: str) -> list[tuple[int, Record]]:
    """Return the possible bases of a delta among a chain's levels, by place: its end, the parent's base, the parent.

    In this order each is decoded from the one before, which is still in memory.
    """
    chain = [level for level in levels if level.dtype == dtype]
    if not chain:
        return []
    places = sorted({0, min(1, len(chain) - 1), len(chain) - 1})
    return [(place, chain[place]) for place in reversed(places)]
