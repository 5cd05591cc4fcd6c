"""How one object is stored: a lattice record for its integers, a content record for its exact layer."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.codecs.lattice import LinearLattice
from ckstore.lineage.cost import Work, layer

Kind = Literal["linear", "ordinal"]
Mode = Literal["own", "chained"]


def digest(*parts: bytes | memoryview | npt.NDArray[np.uint8]) -> str:
    """The id of some bytes: 20 bytes of BLAKE3 as 40 hexadecimal characters."""
    hasher = blake3()
    for part in parts:
        hasher.update(part if isinstance(part, bytes | memoryview) else part.data)
    return hasher.hexdigest(20)


def content_id(dtype: str, chunk: int, digests: Iterable[bytes]) -> str:
    """The content id of an object: BLAKE3 of its dtype, its cut into chunks and the BLAKE3 of each member's bytes.

    The cut is part of it because versions address an object's chunks by the cut of their own layout: where the same
    bytes are cut otherwise in another shape, they are another object. Below 2^18 elements all shapes are cut alike.
    """
    return digest(f"{dtype}|{chunk}|".encode(), *digests)


@dataclass(frozen=True, slots=True)
class LatticeRecord:
    """The integers of one object, stored in full or against another object's.

    Attributes
    ----------
    id
        Lattice id. Of an ordinal lattice, which is exact, it equals the content id.
    kind
        `linear` or `ordinal`.
    dtype
        dtype of the elements that are coded: of the parts for complex numbers.
    count, chunk
        Number of elements, and of elements in a chunk.
    base
        Lattice id of the object whose projected integers were subtracted, or None.
    pack, offset, length
        Where the shard of chunks stands: name of the pack, bytes.
    context
        Chunks are coded in context order (classes from the base).
    factor
        Of an ordinal delta: the base's values are multiplied by it before they are subtracted.
    step, width, rows, cols
        The linear lattice's, see `LinearLattice`.
    origin
        Lattice id of the object that this one's run began with, or None for that one itself.
    alone
        Bytes of integers and of the exact layer that the object would take if it were stored in full by itself
        (estimated where it is not): what restore costs are compared with.
    debt
        Bytes spent beyond the cheapest choice since the last base: what tells that a base is due.
    """

    id: str
    kind: Kind
    dtype: str
    count: int
    chunk: int
    base: str | None
    offset: int
    length: int
    context: bool
    pack: str = ""
    step: int = 0
    width: int = 1
    rows: npt.NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    cols: npt.NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    factor: float = 1.0
    origin: str | None = None
    alone: tuple[int, int] = (0, 0)
    debt: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.count // self.chunk)

    @property
    def full_work(self) -> Work:
        """Work of decoding the object if it were stored exactly and in full."""
        coarse, exact = self.alone
        work = layer(self.chunks, self.count, coarse, grouped=False)
        if self.kind == "ordinal":
            return work
        return work.plus(layer(self.chunks, self.count, exact, grouped=True))

    @property
    def lattice(self) -> LinearLattice:
        """The linear lattice that the integers stand on."""
        return LinearLattice(self.dtype, self.step, self.width, self.rows, self.cols)

    def to_json(self) -> dict[str, Any]:
        """The record without the pack's name; values that equal the defaults are left out."""
        document: dict[str, Any] = {
            "layer": "coarse", "id": self.id, "kind": self.kind, "dtype": self.dtype, "count": self.count,
            "chunk": self.chunk, "base": self.base, "at": [self.offset, self.length], "alone": list(self.alone),
        }  # fmt: skip
        if self.context:
            document["context"] = True
        if self.factor != 1.0:
            document["factor"] = self.factor
        if self.kind == "linear":
            document |= {"step": self.step, "width": self.width}
            for name in ("rows", "cols"):
                exponents = getattr(self, name)
                if exponents.size:
                    document[name] = b64encode(exponents.astype("<i2").tobytes()).decode()
        if self.origin is not None:
            document["origin"] = self.origin
        if self.debt:
            document["debt"] = self.debt
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any], pack: str) -> LatticeRecord:
        """The inverse of `to_json`."""
        offset, length = document["at"]
        return cls(
            id=document["id"], kind=document["kind"], dtype=document["dtype"], count=document["count"],
            chunk=document["chunk"], base=document["base"], offset=offset, length=length,
            context=document.get("context", False), pack=pack, step=document.get("step", 0),
            width=document.get("width", 1), rows=_exponents(document.get("rows")),
            cols=_exponents(document.get("cols")), factor=document.get("factor", 1.0), origin=document.get("origin"),
            alone=(document["alone"][0], document["alone"][1]), debt=document.get("debt", 0),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """The exact layer of one object on a linear lattice.

    Attributes
    ----------
    id
        Content id.
    lattice
        Lattice id of the integers that it corrects.
    mode
        `own`: against the object's own lattice values; `chained`: against the exact values of `parent`.
    parent
        Content id of the object that a chained layer needs, else None.
    pack, offset, lengths
        Where the chunks stand, one after the other: name of the pack, first byte, bytes of each.
    factor
        Of a chained layer: the parent's values are multiplied by it before they predict.
    debt
        As in `LatticeRecord`.
    """

    id: str
    lattice: str
    mode: Mode
    parent: str | None
    offset: int
    lengths: tuple[int, ...]
    pack: str = ""
    factor: float = 1.0
    debt: int = 0

    def to_json(self) -> dict[str, Any]:
        """The record without the pack's name."""
        document: dict[str, Any] = {
            "layer": "exact", "id": self.id, "lattice": self.lattice, "mode": self.mode, "at": self.offset,
            "lengths": list(self.lengths),
        }  # fmt: skip
        if self.parent is not None:
            document["parent"] = self.parent
        if self.factor != 1.0:
            document["factor"] = self.factor
        if self.debt:
            document["debt"] = self.debt
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any], pack: str) -> ContentRecord:
        """The inverse of `to_json`."""
        return cls(
            id=document["id"], lattice=document["lattice"], mode=document["mode"], parent=document.get("parent"),
            offset=document["at"], lengths=tuple(document["lengths"]), pack=pack,
            factor=document.get("factor", 1.0), debt=document.get("debt", 0),
        )  # fmt: skip


Record = LatticeRecord | ContentRecord


def record_from_json(document: dict[str, Any], pack: str) -> Record:
    """The record of either layer that `document` holds."""
    if document["layer"] == "coarse":
        return LatticeRecord.from_json(document, pack)
    return ContentRecord.from_json(document, pack)


def _exponents(text: str | None) -> npt.NDArray[np.int16]:
    return np.empty(0, np.int16) if text is None else np.frombuffer(b64decode(text), "<i2").astype(np.int16)
