"""What restoring costs: a linear model of chunks, elements, stored bytes and levels, in nanoseconds of one core.

It is what a state dict takes: decoding, and putting values and their files' structure together. A checkout hashes and
writes as well, which takes the same for a version in full, so that its factor is the smaller one. Only ratios matter to
the planner. `tools/bench/cost` fits the constants to measured state dicts and prints how far the model is off.
"""

from __future__ import annotations

from operator import add, mul
from typing import NamedTuple


class Work(NamedTuple):
    """What is decoded and put together; works add up.

    Attributes
    ----------
    plain_chunks, plain_elements, plain_coded, plain_raw
        Decoding of layers whose elements form one group: chunks, elements, and stored bytes, coded and raw. Of numbers
        in full the low byte or two lie as they are, of differences all above one byte an element; only the others are
        decoded bit by bit.
    grouped_chunks, grouped_elements, grouped_bytes
        The same for layers in context order and for exact layers, all of their bytes together.
    patches, patch_bytes
        Patches that are applied to chunks, and their bytes.
    records
        Layers whose records are looked up, before anything is decoded.
    levels
        Levels of the longest chain. Each lies in packs of its own, which are opened, and whose manifests are read.
    restored
        Bytes of the files, which get memory.
    extents, files
        Extents that are put together, and files with tensors, whose structure is read.
    """

    plain_chunks: int = 0
    plain_elements: int = 0
    plain_coded: int = 0
    plain_raw: int = 0
    grouped_chunks: int = 0
    grouped_elements: int = 0
    grouped_bytes: int = 0
    patches: int = 0
    patch_bytes: int = 0
    records: int = 0
    levels: int = 0
    restored: int = 0
    extents: int = 0
    files: int = 0

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work._make(map(add, self, other))

    @property
    def stored(self) -> int:
        """Bytes that are read."""
        return self.plain_coded + self.plain_raw + self.grouped_bytes + self.patch_bytes


#: Nanoseconds for each unit of each field of `Work`.
WEIGHTS = (
    *(170_000.0, 0.1, 1.15, 0.11),  # plain
    *(630_000.0, 0.12, 0.1),  # grouped
    *(12_000.0, 1.05),  # patches
    *(4_000.0, 250_000.0),  # records, levels
    *(0.12, 45_000.0, 2_000_000.0),  # restored, extents, files
)


#: Over a link so many more bytes may be read, within a budget of 2, for each one that the store takes less.
LINK = 3.0


def layer(chunks: int, count: int, stored: int, *, grouped: bool, delta: bool = False) -> Work:
    """Work of decoding one layer: `count` elements in `chunks` chunks from `stored` bytes."""
    if grouped:
        return Work(grouped_chunks=chunks, grouped_elements=count, grouped_bytes=stored, records=1)
    planes = 0 if delta else min(stored // max(count, 1), 2)
    coded = min(stored - planes * count, count)
    return Work(plain_chunks=chunks, plain_elements=count, plain_coded=coded, plain_raw=stored - coded, records=1)


def patches(chunks: int, stored: int) -> Work:
    """Work of applying patches of `stored` bytes to `chunks` chunks."""
    return Work(patches=chunks, patch_bytes=stored, records=1)


def cost(work: Work) -> float:
    """Nanoseconds that `work` takes."""
    nanoseconds: float = sum(map(mul, WEIGHTS, work))
    return nanoseconds


class Prices:
    """The costs by which encodings of one object are compared: over a link, what is read must be worth what it saves.

    Parameters
    ----------
    full
        Cost of the object stored exactly and in full, which is its price as well.
    stored
        Bytes that it takes then, and that are read.
    over_link
        Whether packs come over a link.
    """

    __slots__ = ("_over_link", "_stored", "full")

    def __init__(self, full: float, stored: int, *, over_link: bool) -> None:
        self.full = full
        self._stored = stored
        self._over_link = over_link

    def of(self, work: Work, stored: float) -> float:
        """The price of an encoding that takes so much work, whole chain included, and adds `stored` bytes."""
        computed = cost(work)
        more = work.stored - self._stored
        if not self._over_link or more <= 0:
            return computed
        return max(computed, self.full * (1 + more / (LINK * max(self._stored - stored, 1.0))))
