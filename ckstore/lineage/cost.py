"""What restoring costs: a linear model of chunks, elements and stored bytes, in nanoseconds of one core.

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
    plain_chunks, plain_elements, plain_bytes
        Decoding of layers whose elements form one group: chunks, elements, stored bytes.
    grouped_chunks, grouped_elements, grouped_bytes
        The same for layers in context order and for exact layers.
    records
        Layers whose records are looked up, before anything is decoded.
    restored
        Bytes of the files, which get memory.
    extents, files
        Extents that are put together, and files whose structure is read.
    """

    plain_chunks: int = 0
    plain_elements: int = 0
    plain_bytes: int = 0
    grouped_chunks: int = 0
    grouped_elements: int = 0
    grouped_bytes: int = 0
    records: int = 0
    restored: int = 0
    extents: int = 0
    files: int = 0

    def plus(self, other: Work) -> Work:
        """The sum of both."""
        return Work._make(map(add, self, other))


#: Nanoseconds for each unit of each field of `Work`.
WEIGHTS = (140_000.0, 0.05, 0.6, 400_000.0, 0.9, 0.0, 70_000.0, 0.95, 60_000.0, 1_550_000.0)


def layer(chunks: int, count: int, stored: int, *, grouped: bool) -> Work:
    """Work of decoding one layer: `count` elements in `chunks` chunks from `stored` bytes."""
    if grouped:
        return Work(grouped_chunks=chunks, grouped_elements=count, grouped_bytes=stored, records=1)
    return Work(plain_chunks=chunks, plain_elements=count, plain_bytes=stored, records=1)


def cost(work: Work) -> float:
    """Nanoseconds that `work` takes."""
    nanoseconds: float = sum(map(mul, WEIGHTS, work))
    return nanoseconds
