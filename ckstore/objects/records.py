"""Records: how one object is stored."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, CodebookLattice
from ckstore.codecs.exponents import exponents_from_text, exponents_to_text
from ckstore.codecs.lattice import (
    CHUNK,
    PARTS,
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
    one_of,
    optional,
    row,
    text,
    whole,
)


@dataclass(frozen=True, slots=True)
class Record:
    """The integers of one object, stored in full or against another object's.

    Attributes
    ----------
    id
        Content id of an exact object, lattice id of a coarse one.
    lattice
        The meaning of the integers. Its dtype is that of the coded elements: for complex numbers, of their parts.
    count, chunk
        Number of elements, and of elements in a chunk.
    base
        Id of the object that this one is stored against, or None.
    pack, offset, length
        Place of the shard of chunks: name of the pack, bytes.
    context
        For an ordinal delta: chunks are coded in context order (classes from the base).
    additive
        For a codebook: values, not indices, are added to those of the base.
    aside
        For a codebook with protected elements: offset of their bits in the pack, then the bytes of each chunk.
    origin
        For a coarse object: id of the first one of its run; None if it is the first.
    alone
        Bytes of the object, had it been stored in full (estimated if it was not).
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
    additive: bool = False
    aside: tuple[int, ...] = ()
    origin: str | None = None
    alone: int = 0
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
    def nbytes_of_values(self) -> int:
        """Bytes of the object's values."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.count // self.chunk)

    @property
    def alone_work(self) -> Work:
        """Work of decoding the object, had it been stored in full."""
        return layer(self.chunks, self.count, self.alone, grouped=False)

    @property
    def full_work(self) -> Work:
        """Work of decoding the object, had it been stored exactly and in full: restore costs are relative to it."""
        return self.alone_work if self.is_exact else exact_work(self.count, self.chunk, self.dtype)

    @property
    def is_exact(self) -> bool:
        """Whether the values are the original ones."""
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
            "id": self.id, "kind": self.kind, "dtype": self.dtype, "count": self.count,
            "chunk": self.chunk, "base": self.base, "at": [self.offset, self.length], "alone": self.alone,
            **_lattice_to_json(self.lattice),
        }  # fmt: skip
        document |= {name: True for name in ("context", "additive") if getattr(self, name)}
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
    def from_json(cls, document: dict[str, Any], pack: str) -> Record:
        """Decode a result of `to_json`; raise `IntegrityError` for an impossible record."""
        offset, length = document["at"]
        record = cls(
            id=document["id"], lattice=_lattice_from_json(document), count=document["count"], chunk=document["chunk"],
            base=document["base"], offset=offset, length=length, pack=pack, context=document.get("context", False),
            additive=document.get("additive", False),
            aside=tuple(document.get("aside", ())), origin=document.get("origin"),
            alone=document["alone"], debt=document.get("debt", 0),
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
            self.is_exact
            and self.base is not None
            and not self.context
            and len(self.patches) == self.chunks
            and self.length == sum(self.patches)
        )

    @property
    def _fits_raw(self) -> bool:
        return len(self.crcs) == self.chunks and self.length == self.nbytes_of_values

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
#: Schema of the records of a pack.
RECORDS = items(
    both(
        fields(
            {"id": ID, "dtype": one_of(*ITEM_SIZES), "count": whole(1),
             "chunk": whole(1, CHUNK), "base": optional(ID), "at": row(whole(), whole()),
             "alone": whole()},
            {"context": flag, "additive": flag, "aside": items(whole(), 1), "origin": ID, "debt": whole(-LIMIT, LIMIT),
             "patches": items(whole(), 1), "crcs": items(whole(0, (1 << 32) - 1), 1)},
        ),
        by("kind", _KINDS),
    )
)  # fmt: skip
#: The expected bytes of an exact object in full, as a part of its values'.
EXACT_SHARE = 0.85


def exact_work(count: int, chunk: int, dtype: str) -> Work:
    """Return the expected work of decoding an object that is stored exactly and in full."""
    return layer(-(-count // chunk), count, int(EXACT_SHARE * count * ITEM_SIZES[dtype]), grouped=False)


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


def check_cut(record: Record, other: Cut) -> None:
    """Raise `IntegrityError` unless a record and its owner have the same dtype, count and chunks."""
    if (record.dtype, record.count, record.chunk) != (other.dtype, other.count, other.chunk):
        raise IntegrityError(f"Object {record.id} is cut into other chunks than its owner; run `ckstore verify`.")


def record_from_json(document: dict[str, Any], pack: str) -> Record:
    """Return the record in `document`, which fits the schema.

    Raises
    ------
    IntegrityError
        The record contradicts itself.
    """
    try:
        return Record.from_json(document, pack)
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
