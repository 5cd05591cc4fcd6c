"""Ids of objects: digests of their bytes, or of the integers that they are stored as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.codecs.codebook import CodebookLattice
from ckstore.codecs.factors import FactorLattice
from ckstore.codecs.lattice import LinearLattice
from ckstore.codecs.rounded import RoundedLattice

Lattice = LinearLattice | RoundedLattice | CodebookLattice | FactorLattice

#: Characters of an id that name an array: enough for one pack, which has each name four times.
_NAME = 16


def digest(*parts: bytes | memoryview | npt.NDArray[np.uint8]) -> str:
    """Return the id of bytes: 20 bytes of BLAKE3 as 40 hexadecimal characters."""
    hasher = blake3()
    for part in parts:
        hasher.update(part if isinstance(part, bytes | memoryview) else part.data)
    return hasher.hexdigest(20)


def array_name(identity: str) -> str:
    """Return the name of an object's array in a pack."""
    return identity[:_NAME]


def content_id(dtype: str, chunk: int, digests: Iterable[bytes]) -> str:
    """Return the content id of an object: BLAKE3 of dtype, cut into chunks and the BLAKE3 of each member's bytes.

    The cut is part of the id because versions address chunks by the cut of their own layout: the same bytes in
    another shape may be cut differently, and are then another object. Below 2^18 elements all shapes are cut alike.
    """
    return digest(f"{dtype}|{chunk}|".encode(), *digests)


def lattice_id(lattice: Lattice, count: int, chunk: int, digests: list[bytes], base: str = "") -> str:
    """Return the lattice id: BLAKE3 of kind, dtype, step, exponents, cut and the digests of the integers' chunks.

    `base` is the id of the object to which values of a codebook or changes of factors are added.
    """
    if isinstance(lattice, FactorLattice):
        fields = (lattice.dtype, lattice.step, lattice.width, lattice.rank, count, chunk, base)
        return digest(f"factors|{'|'.join(map(str, fields))}|".encode(), *digests)
    if isinstance(lattice, CodebookLattice):
        head = f"codebook|{lattice.dtype}|{int(lattice.protected)}|{count}|{chunk}|{base}|".encode()
        return digest(head, lattice.centroids.astype("<f4").tobytes(), *digests)
    if isinstance(lattice, RoundedLattice):
        head = f"rounded|{lattice.dtype}|{lattice.shift}|{lattice.level}|{lattice.width}|{count}|{chunk}|".encode()
    else:
        head = f"linear|{lattice.dtype}|{lattice.step}|{lattice.width}|{count}|{chunk}|".encode()
    return digest(head, lattice.rows.astype("<i2").tobytes(), b"|", lattice.cols.astype("<i2").tobytes(), *digests)


class MemberHasher:
    """Computes the content id of an object from its bytes in order; `sizes` are the bytes of its members."""

    def __init__(self, dtype: str, chunk: int, sizes: Sequence[int]) -> None:
        self._dtype = dtype
        self._chunk = chunk
        self._digests: list[bytes] = []
        self._left = list(reversed(sizes))
        self._inner = blake3()

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        while data:
            take = min(self._left[-1], len(data))
            self._inner.update(data[:take])
            data = data[take:]
            self._left[-1] -= take
            if not self._left[-1]:
                self._digests.append(self._inner.digest())
                self._inner = blake3()
                self._left.pop()

    def identity(self) -> str:
        """Return the id, after all bytes were added."""
        return content_id(self._dtype, self._chunk, self._digests)
