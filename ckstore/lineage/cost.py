"""What restoring costs: a linear model of chunks, elements and stored bytes, in nanoseconds.

Only ratios matter to the planner. `tools/bench/cost` fits the constants to measured checkouts and prints how far the
model is off; those here are from two cores.
"""

from __future__ import annotations

from operator import add, mul
from typing import NamedTuple


class Work(NamedTuple):
    """What is decoded, hashed and written; works add up.

    Attributes
    ----------
    plain_chunks, plain_elements, plain_bytes
        Decoding of layers whose elements form one group: chunks, elements, stored bytes.
    grouped_chunks, grouped_elements, grouped_bytes
        The same for layers in context order and for exact layers.
    records
        Layers whose records are looked up, before anything is decoded.
    written
        Restored bytes that are hashed and written.
    extents, files
        Extents that are put together, and files that are made.
    """

    plain_chunks: int = 0
    plain_elements: int = 0
    plain_bytes: int = 0
    grouped_chunks: int = 0
    grouped_elements: int = 0
    grouped_bytes: int = 0
    records: int = 0
    written: int = 0
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
