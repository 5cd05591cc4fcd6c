"""Records: how one object is stored. A lattice record has its integers, a content record its exact layer."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, CodebookLattice
from ckstore.codecs.exponents import exponents_from_text, exponents_to_text
from ckstore.codecs.lattice import (
    CHUNK,
    PARTS,
    SCALED,
    STEP_RANGE,
    Kind,
    LinearLattice,
    OrdinalLattice,
)
from ckstore.codecs.rounded import ROUNDED, RoundedLattice
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError, UsageError
from ckstore.lineage.cost import Work, layer
from ckstore.objects.identity import Lattice
from ckstore.storage.schema import (
    ID,
    LIMIT,
    anything,
    both,
    by,
    either,
    fields,
    flag,
    items,
    number,
    one_of,
    optional,
    row,
    text,
    whole,
)

Mode = Literal["own", "chained", "patched"]


@dataclass(frozen=True, slots=True)
class LatticeRecord:
    """The integers of one object, stored in full or against another object's.

    Attributes
    ----------
    id
        Lattice id. For an ordinal lattice, which is exact, it equals the content id.
    lattice
        The meaning of the integers. Its dtype is that of the coded elements: for complex numbers, of their parts.
    count, chunk
        Number of elements, and of elements in a chunk.
    base
        Lattice id of the object whose projected integers were subtracted, or None.
    pack, offset, length
        Place of the shard of chunks: name of the pack, bytes.
    context
        For an ordinal delta: chunks are coded in context order (classes from the base).
    factor
        For an ordinal delta: factor of the base's values before they are subtracted.
    additive
        For a codebook: values, not indices, are added to those of the base.
    aside
        For a codebook with protected elements: offset of their bits in the pack, then the bytes of each chunk.
    origin
        Lattice id of the first object of this one's run; None if it is the first.
    alone
        Bytes of integers and of the exact layer, had the object been stored in full (estimated if it was not). Restore
        costs are relative to it.
    debt
        Bytes spent beyond the cheapest choice since the last base; a large debt makes a new base due.
    patches
        For a delta that is stored as patches: bytes of each chunk's patch, 0 for an unchanged chunk.
    crcs
        For an object that is stored raw: CRC-32 of each chunk. Its lattice is ordinal.
    """

    id: str
    lattice: Lattice
    count: int
    chunk: int
    base: str | None
    offset: int = 0
    length: int = 0
    pack: str = ""
    context: bool = False
    factor: float = 1.0
    additive: bool = False
    aside: tuple[int, ...] = ()
    origin: str | None = None
    alone: tuple[int, int] = (0, 0)
    debt: int = 0
    patches: tuple[int, ...] = ()
    crcs: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """`linear`, `ordinal` (exact), `rounded` (ordinal, coarse) or `codebook`."""
        return self.lattice.kind

    @property
    def dtype(self) -> str:
        """Dtype of the coded elements."""
        return self.lattice.dtype

    @property
    def width(self) -> int:
        """Length of a row of the lattice; 1 without rows."""
        return self.lattice.width if isinstance(self.lattice, LinearLattice | RoundedLattice) else 1

    @property
    def is_raw(self) -> bool:
        """Whether the object's bits are stored as they are."""
        return bool(self.crcs)

    @property
    def protected(self) -> bool:
        """Whether protected elements are stored apart."""
        return isinstance(self.lattice, CodebookLattice) and self.lattice.protected

    @property
    def start(self) -> int:
        """The first byte of the record's data in its pack."""
        return min(self.offset, *self.aside[:1]) if self.aside else self.offset

    @property
    def end(self) -> int:
        """The first byte after the record's data in its pack."""
        return max(self.offset + self.length, sum(self.aside))

    @property
    def nbytes(self) -> int:
        """Bytes of the record's data."""
        return self.length + sum(self.aside[1:])

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.count // self.chunk)

    @property
    def full_work(self) -> Work:
        """Work of decoding the object, had it been stored exactly and in full."""
        coarse, exact = self.alone
        work = layer(self.chunks, self.count, coarse, grouped=False)
        if self.is_exact:
            return work
        return work.plus(layer(self.chunks, self.count, exact, grouped=True))

    @property
    def is_exact(self) -> bool:
        """Whether the lattice's values are the original ones, without an exact layer."""
        return isinstance(self.lattice, OrdinalLattice)

    @property
    def codebook(self) -> CodebookLattice:
        """The codebook of the record's indices; `IntegrityError` if it has none."""
        if not isinstance(self.lattice, CodebookLattice):
            raise IntegrityError(f"Object {self.id} has no codebook; run `ckstore verify`.")
        return self.lattice

    @property
    def linear(self) -> LinearLattice:
        """The linear lattice of the integers; `IntegrityError` if it is another kind."""
        if not isinstance(self.lattice, LinearLattice):
            raise IntegrityError(f"Object {self.id} has no linear lattice; run `ckstore verify`.")
        return self.lattice

    def to_json(self) -> dict[str, Any]:
        """Return the record without the pack's name; defaults are left out."""
        document: dict[str, Any] = {
            "layer": "coarse", "id": self.id, "kind": self.kind, "dtype": self.dtype, "count": self.count,
            "chunk": self.chunk, "base": self.base, "at": [self.offset, self.length], "alone": list(self.alone),
            **_lattice_to_json(self.lattice),
        }  # fmt: skip
        document |= {name: True for name in ("context", "additive") if getattr(self, name)}
        if self.factor != 1.0:
            document["factor"] = self.factor
        if self.aside:
            document["aside"] = list(self.aside)
        if self.origin is not None:
            document["origin"] = self.origin
        if self.debt:
            document["debt"] = self.debt
        if self.patches:
            document["patches"] = list(self.patches)
        if self.crcs:
            document["crcs"] = list(self.crcs)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any], pack: str) -> LatticeRecord:
        """Decode a result of `to_json`; raise `IntegrityError` for an impossible record."""
        offset, length = document["at"]
        record = cls(
            id=document["id"], lattice=_lattice_from_json(document), count=document["count"], chunk=document["chunk"],
            base=document["base"], offset=offset, length=length, pack=pack, context=document.get("context", False),
            factor=document.get("factor", 1.0), additive=document.get("additive", False),
            aside=tuple(document.get("aside", ())), origin=document.get("origin"),
            alone=(document["alone"][0], document["alone"][1]), debt=document.get("debt", 0),
            patches=tuple(document.get("patches", ())), crcs=tuple(document.get("crcs", ())),
        )  # fmt: skip
        record._check()
        return record

    def _check(self) -> None:
        """Raise `IntegrityError` for fields without a defined meaning; the kernels do not check them."""
        ordinal, codebook = self.is_exact, isinstance(self.lattice, CodebookLattice)
        _require(
            self.id,
            self.dtype in _DTYPES[self.kind],
            not (self.context and (not ordinal or self.base is None)),
            self.factor == 1.0 or (ordinal and self.dtype in SCALED),
            codebook or not self.additive,
            not self.patches or self._fits_patches,
            not self.crcs or (ordinal and self.base is None and self._fits_raw),
        )
        if isinstance(self.lattice, CodebookLattice):
            protected = self.lattice.protected
            _require(
                self.id,
                not (protected and self.additive),
                len(self.aside) == (1 + self.chunks if protected else 0),
            )
        elif not isinstance(self.lattice, OrdinalLattice):
            self._check_plane(self.lattice)

    @property
    def _fits_patches(self) -> bool:
        return (
            self.kind in ("ordinal", "linear")
            and self.base is not None
            and not self.context
            and self.factor == 1.0
            and len(self.patches) == self.chunks
            and self.length == sum(self.patches)
        )

    @property
    def _fits_raw(self) -> bool:
        return len(self.crcs) == self.chunks and self.length == self.count * ITEM_SIZES[self.dtype]

    def _check_plane(self, lattice: LinearLattice | RoundedLattice) -> None:
        _require(
            self.id,
            not self.aside,
            lattice.rows.size in (0, -(-self.count // lattice.width)) and lattice.cols.size in (0, lattice.width),
        )
        if isinstance(lattice, RoundedLattice):
            _require(self.id, self.base is None)
            return
        lowest, highest = STEP_RANGE[self.dtype]
        axes = [axis.astype(np.int64) for axis in (lattice.rows, lattice.cols) if axis.size]
        _require(
            self.id,
            lattice.step + sum(int(axis.min()) for axis in axes) >= lowest,
            lattice.step + sum(int(axis.max()) for axis in axes) <= highest,
        )


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
        `own`: predicted from the object's own lattice values; `chained`: from the exact values of `parent`; `patched`:
        patches of the parent's exact values, without integers.
    parent
        Content id of the object that a chained or patched layer needs, or None.
    pack, offset, lengths
        Place of the chunks, in order: name of the pack, first byte, bytes of each chunk. 0 bytes mark a patched chunk
        that equals the parent's.
    factor
        For a chained layer: factor of the parent's values before they predict.
    debt
        See `LatticeRecord`.
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

    @property
    def start(self) -> int:
        """The first byte of the record's chunks in its pack."""
        return self.offset

    @property
    def end(self) -> int:
        """The first byte after the record's chunks in its pack."""
        return self.offset + sum(self.lengths)

    def to_json(self) -> dict[str, Any]:
        """Return the record without the pack's name."""
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
        """Decode a result of `to_json`; raise `IntegrityError` for an impossible record."""
        record = cls(
            id=document["id"], lattice=document["lattice"], mode=document["mode"], parent=document.get("parent"),
            offset=document["at"], lengths=tuple(document["lengths"]), pack=pack,
            factor=document.get("factor", 1.0), debt=document.get("debt", 0),
        )  # fmt: skip
        _require(
            record.id,
            (record.mode != "own") == (record.parent is not None),
            record.mode != "patched" or record.factor == 1.0,
        )
        return record


Record = LatticeRecord | ContentRecord

#: Schemas of the records in coarse and in exact packs.
_EXPONENT_LIST = either(text(), items(whole(-(1 << 15), (1 << 15) - 1)))
_KINDS = {
    "linear": fields(
        {"step": whole(-LIMIT, LIMIT), "width": whole(1)}, {"rows": _EXPONENT_LIST, "cols": _EXPONENT_LIST}
    ),
    "ordinal": anything,
    "rounded": fields(
        {"shift": whole(1, 31), "level": whole(-(1 << 15), (1 << 15) - 1), "width": whole(1)},
        {"rows": _EXPONENT_LIST, "cols": _EXPONENT_LIST},
    ),
    "codebook": fields({"centroids": text()}, {"protected": flag}),
}
_DEBT = {"factor": number(), "debt": whole(-LIMIT, LIMIT)}
LATTICE_RECORDS = items(
    both(
        fields(
            {"layer": one_of("coarse"), "id": ID, "dtype": one_of(*ITEM_SIZES), "count": whole(1),
             "chunk": whole(1, CHUNK), "base": optional(ID), "at": row(whole(), whole()),
             "alone": row(whole(), whole())},
            {"context": flag, "additive": flag, "aside": items(whole(), 1), "origin": ID, **_DEBT,
             "patches": items(whole(), 1), "crcs": items(whole(0, (1 << 32) - 1), 1)},
        ),
        by("kind", _KINDS),
    )
)  # fmt: skip
CONTENT_RECORDS = items(
    fields(
        {"layer": one_of("exact"), "id": ID, "lattice": ID, "mode": one_of(*get_args(Mode)), "at": whole(),
         "lengths": items(whole())},
        {"parent": ID, **_DEBT},
    )
)  # fmt: skip


class Cut(Protocol):
    """The cut of elements into chunks, of a record or a unit."""

    @property
    def dtype(self) -> str:
        """Dtype of the coded elements."""

    @property
    def count(self) -> int:
        """Number of elements."""

    @property
    def chunk(self) -> int:
        """Elements of each chunk."""


def check_cut(record: LatticeRecord, other: Cut) -> None:
    """Raise `IntegrityError` unless a record and its owner have the same dtype, count and chunks."""
    if (record.dtype, record.count, record.chunk) != (other.dtype, other.count, other.chunk):
        raise IntegrityError(f"Object {record.id} is cut into other chunks than its owner; run `ckstore verify`.")


def record_from_json(document: dict[str, Any], pack: str) -> Record:
    """Return the record in `document`, which fits one of the schemas.

    Raises
    ------
    IntegrityError
        The record contradicts itself.
    """
    try:
        if document["layer"] == "coarse":
            return LatticeRecord.from_json(document, pack)
        return ContentRecord.from_json(document, pack)
    except IntegrityError:
        raise
    except (ArithmeticError, ValueError, LookupError) as error:
        raise IntegrityError(f"Pack {pack} has a damaged record ({error}); run `ckstore recover`.") from error


#: dtypes of the elements of each kind of lattice.
_DTYPES = {
    "linear": STEP_RANGE.keys(),
    "ordinal": ITEM_SIZES.keys() - PARTS.keys(),
    "rounded": set(ROUNDED),
    "codebook": set(CODEBOOK_DTYPES),
}


def _require(identity: object, *conditions: bool) -> None:
    if not all(conditions):
        raise IntegrityError(
            f"The record of object {identity} is out of bounds; restore its pack from a copy, or run `ckstore recover`."
        )


def _lattice_to_json(lattice: Lattice) -> dict[str, Any]:
    """Return the fields of a lattice in its record, without kind and dtype."""
    if isinstance(lattice, OrdinalLattice):
        return {}
    if isinstance(lattice, CodebookLattice):
        centroids = b64encode(lattice.centroids.astype("<f4").tobytes()).decode()
        return {"centroids": centroids} | ({"protected": True} if lattice.protected else {})
    own = (
        {"shift": lattice.shift, "level": lattice.level}
        if isinstance(lattice, RoundedLattice)
        else {"step": lattice.step}
    )
    axes = {"rows": lattice.rows, "cols": lattice.cols}
    exponents = {name: exponents_to_text(axis) for name, axis in axes.items() if axis.size}
    return {**own, "width": lattice.width, **exponents}


def _lattice_from_json(document: dict[str, Any]) -> Lattice:
    """Decode a lattice from its record; combinations of numbers are not checked yet."""
    kind, dtype = document["kind"], document["dtype"]
    if kind == "ordinal":
        return OrdinalLattice(dtype)
    if kind == "codebook":
        try:
            centroids = np.frombuffer(b64decode(document["centroids"]), "<f4")
            return CodebookLattice(dtype, centroids, document.get("protected", False))
        except UsageError as error:
            raise IntegrityError(f"The codebook of object {document['id']} is damaged: {error}") from error
    rows, cols = (exponents_from_text(document.get(name)) for name in ("rows", "cols"))
    if kind == "rounded":
        return RoundedLattice(dtype, document["shift"], document["level"], document["width"], rows, cols)
    return LinearLattice(dtype, document["step"], document["width"], rows, cols)
