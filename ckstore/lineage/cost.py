"""Restore cost: a linear model of chunks, elements, stored bytes and levels, in nanoseconds of one core.

It models the restore of a state dict: decoding, and assembling values and file structure. A checkout hashes and writes
as well, which takes the same time for a version in full, so its factor is smaller. Only ratios matter to the planner.
`tools/bench/cost` fits the constants to measured state dicts and prints the model's error.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, mul
from typing import NamedTuple


class Work(NamedTuple):
    """Units of decoding and assembly; works add up.

    Attributes
    ----------
    plain_chunks, plain_elements, plain_coded, plain_raw
        Decoding of layers whose elements form one group: chunks, elements, and stored bytes, coded and raw. The low one
        or two bytes of numbers in full are raw, and so are all bytes of differences above one byte per element. Only
        the others are decoded bit by bit.
    grouped_chunks, grouped_elements, grouped_bytes
        The same for layers in context order, with all of their bytes together.
    patches, patch_bytes
        Patches applied to chunks, and their bytes.
    products
        Multiplications of the factors of changes.
    records
        Layers whose records are looked up before decoding.
    levels
        Levels of the longest chain. Each has its own packs, which are opened and whose manifests are read.
    restored
        Bytes of the files, for which memory is allocated.
    extents, files
        Extents that are assembled, and files with tensors, whose structure is parsed.
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
    products: int = 0
    records: int = 0
    levels: int = 0
    restored: int = 0
    extents: int = 0
    files: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work._make(map(add, self, other))

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """Return the sum of all."""
        return cls._make(map(sum, zip(*works, strict=True)))

    @property
    def stored(self) -> int:
        """The bytes that are read."""
        return self.plain_coded + self.plain_raw + self.grouped_bytes + self.patch_bytes


#: Nanoseconds per unit of each field of `Work`.
WEIGHTS = (
    *(150_000.0, 0.24, 0.46, 0.11),  # plain
    *(250_000.0, 1.45, 0.1),  # grouped
    *(12_000.0, 1.05, 0.05),  # patches, products
    *(4_000.0, 250_000.0),  # records, levels
    *(0.12, 45_000.0, 2_000_000.0),  # restored, extents, files
)


def layer(chunks: int, count: int, stored: int, *, grouped: bool, delta: bool = False) -> Work:
    """Return the work of decoding one layer: `count` elements in `chunks` chunks from `stored` bytes."""
    if grouped:
        return Work(grouped_chunks=chunks, grouped_elements=count, grouped_bytes=stored, records=1)
    planes = 0 if delta else min(stored // max(count, 1), 2)
    coded = min(stored - planes * count, count)
    return Work(plain_chunks=chunks, plain_elements=count, plain_coded=coded, plain_raw=stored - coded, records=1)


def patches(chunks: int, stored: int) -> Work:
    """Return the work of applying patches of `stored` bytes to `chunks` chunks."""
    return Work(patches=chunks, patch_bytes=stored, records=1)


def factors(numbers: int, count: int, rank: int, stored: int) -> Work:
    """Return the work of adding a product of factors to `count` elements: `numbers` numbers from `stored` bytes."""
    own = layer(1, numbers, stored, grouped=True)
    return own._replace(plain_elements=count, products=rank * count)


def cost(work: Work) -> float:
    """Return the nanoseconds of `work`."""
    nanoseconds: float = sum(map(mul, WEIGHTS, work))
    return nanoseconds


def price(own: Work, below: Work, stored: float, full: Work, read_price: float) -> float:
    """Return the price, by which encodings of one object are compared, of one that adds `stored` bytes.

    Its `own` work follows that of the chain `below`. Bytes that both read beyond those of the object in full must be
    repaid by bytes saved: reading one more is worth `read_price` stored bytes, within a budget of 2; 0 for local files.
    """
    work = own.plus(below)
    more = work.stored - full.stored
    if not read_price or more <= 0:
        return cost(work)
    return max(cost(work), cost(full) * (1 + read_price * more / max(full.stored - stored, 1.0)))
