"""Records: how one object is stored. Each kind declares its fields once, its work and its description.

An exact object is `raw`, `full`, a `delta` or `patches`; a coarse one is `linear`, `rounded` or a `codebook`. The
records of a manifest are checked against the declarations of their kinds before any `Record` is made.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np

from ckstore.codecs.codebook import CODEBOOK_DTYPES, CodebookLattice
from ckstore.codecs.exponents import exponents_from_text, exponents_to_text
from ckstore.codecs.lattice import CHUNK, FLOATS, PARTS, STEP_RANGE, LinearLattice
from ckstore.codecs.rounded import ROUNDED, RoundedLattice
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work, layer, patches
from ckstore.objects.identity import Lattice
from ckstore.objects.units import Unit
from ckstore.storage.schema import (
    ID,
    LIMIT,
    Schema,
    both,
    by,
    either,
    fields,
    flag,
    items,
    one_of,
    row,
    text,
    whole,
)

#: Schemas of fields, by name.
Fields = Mapping[str, Schema]

#: The expected bytes of an exact object in full, as a part of its values'.
EXACT_SHARE = 0.85

_DEBT = whole(-LIMIT, LIMIT)
_EXPONENT = whole(-(1 << 15), (1 << 15) - 1)
_EXPONENTS = either(text(), items(_EXPONENT))
_AXES: Fields = {"rows": _EXPONENTS, "cols": _EXPONENTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One object of the store.

    Attributes
    ----------
    kind
        Name of the class in documents.
    is_exact
        Whether the values are the original ones.
    dtypes
        dtypes of the elements that the kind supports.
    required, optional
        Schemas of the fields of the kind in a document, besides those of all records. A field of the same name holds
        the value; the others belong to the lattice.
    id
        Content id of an exact object, lattice id of a coarse one.
    dtype
        Of the coded elements: for complex numbers, of their parts.
    count, chunk
        Number of elements, and of elements in a chunk.
    alone
        Bytes of the object, had it been stored in full (estimated if it was not).
    pack, offset, length
        Place of the data: name of the pack, bytes.
    """

    kind: ClassVar[str]
    is_exact: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str]] = frozenset(ITEM_SIZES.keys() - PARTS.keys())
    required: ClassVar[Fields] = {}
    optional: ClassVar[Fields] = {}

    id: str
    dtype: str
    count: int
    chunk: int
    alone: int = 0
    pack: str = ""
    offset: int = 0
    length: int = 0

    @property
    def base(self) -> str | None:
        """Id of the object that this one is stored against, or None."""
        return None

    @property
    def debt(self) -> int:
        """Bytes spent beyond the cheapest choice since the last base; a large debt makes a new base due."""
        return 0

    @property
    def end(self) -> int:
        """The first byte after the record's data in its pack."""
        return self.offset + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of the record's data."""
        return self.length

    @property
    def nbytes_of_values(self) -> int:
        """Bytes of the object's values."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.count // self.chunk)

    def size_of(self, chunk: int) -> int:
        """Return the number of elements of a chunk."""
        return min(self.chunk, self.count - chunk * self.chunk)

    @property
    def work(self) -> Work:
        """Work of decoding the record, without that of its base."""
        return layer(self.chunks, self.count, self.nbytes, grouped=False, delta=self.base is not None)

    @property
    def alone_work(self) -> Work:
        """Work of decoding the object, had it been stored in full."""
        return layer(self.chunks, self.count, self.alone, grouped=False)

    @property
    def full_work(self) -> Work:
        """Work of decoding the object, had it been stored exactly and in full: restore costs are relative to it."""
        return self.alone_work

    @property
    def description(self) -> str:
        """The form of the object, for users."""
        return self.kind

    @property
    def common(self) -> dict[str, Any]:
        """The fields of the object itself, for a record of another kind."""
        return {name: getattr(self, name) for name in ("id", "dtype", "count", "chunk", "alone")}

    def fits_on(self, base: Record) -> bool:
        """Return whether the object can be stored against another one of its dtype, count and cut."""
        return False

    def moved(self, place: Callable[[int], int]) -> Self:
        """Return the record with another offset."""
        return replace(self, offset=place(self.offset))

    def to_json(self) -> dict[str, Any]:
        """Return the record without the pack's name; empty fields of its kind are left out."""
        own = ((name, getattr(self, name)) for name in self._own_fields())
        return {
            "kind": self.kind, "id": self.id, "dtype": self.dtype, "count": self.count, "chunk": self.chunk,
            "at": [self.offset, self.length], "alone": self.alone, **self._lattice_to_json(),
            **{name: list(value) if type(value) is tuple else value for name, value in own if value},
        }  # fmt: skip

    @classmethod
    @cache
    def _own_fields(cls) -> list[str]:
        """Return the names of the kind's fields in a document that are also fields of its records."""
        return [name for name in (*cls.required, *cls.optional) if name in cls.__dataclass_fields__]

    def _lattice_to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _lattice_from_json(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return the lattice of a coarse object, as a keyword argument."""
        return {}

    def _is_possible(self) -> bool:
        """Return whether the fields agree with one another."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw(Record):
    """Values as they are; of a hot version.

    Attributes
    ----------
    crcs
        CRC-32 of each chunk.
    """

    kind = "raw"
    required: ClassVar[Fields] = {"crcs": items(whole(0, (1 << 32) - 1), 1)}

    crcs: tuple[int, ...]

    @property
    def work(self) -> Work:
        """Work of looking up the record: copying values costs next to nothing."""
        return Work(records=1)

    def _is_possible(self) -> bool:
        return len(self.crcs) == self.chunks and self.length == self.nbytes_of_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Record):
    """The ordinals of values."""

    kind = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Based(Record):
    """An object that may be stored against another one, its base."""

    base: str | None = None
    debt: int = 0

    def fits_on(self, base: Record) -> bool:
        """Return whether the object can be stored against another one of its dtype, count and cut."""
        return base.is_exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(_Based):
    """Differences of ordinals to those of the base.

    Attributes
    ----------
    context
        Chunks are coded in context order (classes from the base).
    """

    kind = "delta"
    required: ClassVar[Fields] = {"base": ID}
    optional: ClassVar[Fields] = {"debt": _DEBT, "context": flag}

    context: bool = False

    @property
    def work(self) -> Work:
        """Work of decoding the differences in their order."""
        return layer(self.chunks, self.count, self.nbytes, grouped=self.context, delta=True)

    def _is_possible(self) -> bool:
        return not self.context or self.dtype in FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches(_Based):
    """A patch of each chunk of the base.

    Attributes
    ----------
    sizes
        Bytes of each chunk's patch, 0 for an unchanged chunk.
    """

    kind = "patches"
    required: ClassVar[Fields] = {"base": ID, "sizes": items(whole(), 1)}
    optional: ClassVar[Fields] = {"debt": _DEBT}

    sizes: tuple[int, ...] = ()

    @property
    def work(self) -> Work:
        """Work of applying the patches."""
        return patches(sum(map(bool, self.sizes)), self.nbytes)

    def _is_possible(self) -> bool:
        return len(self.sizes) == self.chunks and self.length == sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coarse(_Based):
    """An object of quantised values.

    Attributes
    ----------
    lattice
        The meaning of the integers.
    """

    is_exact = False

    lattice: Lattice

    @property
    def full_work(self) -> Work:
        """Expected work of decoding the object, had it been stored exactly and in full."""
        return exact_work(self.count, self.chunk, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gridded(Coarse):
    """Integers on a lattice with exponents of rows and columns; its other settings are the required fields."""

    grid: ClassVar[type[LinearLattice | RoundedLattice]]

    lattice: LinearLattice | RoundedLattice

    def _lattice_to_json(self) -> dict[str, Any]:
        axes = {"rows": self.lattice.rows, "cols": self.lattice.cols}
        settings = {name: getattr(self.lattice, name) for name in self.required}
        return settings | {name: exponents_to_text(axis) for name, axis in axes.items() if axis.size}

    @classmethod
    def _lattice_from_json(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return the lattice, as a keyword argument."""
        settings: dict[str, Any] = {name: document[name] for name in cls.required}
        settings |= {name: exponents_from_text(document.get(name)) for name in _AXES}
        return {"lattice": cls.grid(document["dtype"], **settings)}

    def _is_possible(self) -> bool:
        lattice = self.lattice
        return lattice.rows.size in (0, -(-self.count // lattice.width)) and lattice.cols.size in (0, lattice.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(_Gridded):
    """Integers on a linear lattice, in full or less the projected integers of the base.

    Attributes
    ----------
    origin
        Id of the first object of this one's run; None if it is the first.
    """

    kind = "linear"
    grid = LinearLattice
    dtypes = frozenset(STEP_RANGE)
    required: ClassVar[Fields] = {"step": whole(-LIMIT, LIMIT), "width": whole(1)}
    optional: ClassVar[Fields] = {"base": ID, "debt": _DEBT, "origin": ID, **_AXES}

    lattice: LinearLattice
    origin: str | None = None

    @property
    def description(self) -> str:
        """The smallest and largest step of rows and columns."""
        low = high = self.lattice.step
        for axis in (self.lattice.rows, self.lattice.cols):
            if axis.size:
                low, high = low + int(axis.min()), high + int(axis.max())
        steps = f"linear 2^{low}" if low == high else f"linear 2^{low}..{high}"
        return steps if self.base is None else f"{steps} delta"

    def fits_on(self, base: Record) -> bool:
        """Return whether the integers of the other object can be projected."""
        return isinstance(base, Linear) and base.lattice.width == self.lattice.width

    def _is_possible(self) -> bool:
        lattice = self.lattice
        lowest, highest = STEP_RANGE[self.dtype]
        axes = [axis.astype(np.int64) for axis in (lattice.rows, lattice.cols) if axis.size]
        return (
            _Gridded._is_possible(self)
            and lattice.step + sum(int(axis.min()) for axis in axes) >= lowest
            and lattice.step + sum(int(axis.max()) for axis in axes) <= highest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded(_Gridded):
    """Integers on a rounded lattice, in full."""

    kind = "rounded"
    grid = RoundedLattice
    dtypes = frozenset(ROUNDED)
    required: ClassVar[Fields] = {"shift": whole(1, 31), "level": _EXPONENT, "width": whole(1)}
    optional: ClassVar[Fields] = _AXES

    lattice: RoundedLattice

    @property
    def description(self) -> str:
        """The binary logarithm of a step, in units in the last place."""
        return f"rounded 2^{self.lattice.shift}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Codebook(Coarse):
    """Indices of a codebook, in full or coded by those of the base.

    Attributes
    ----------
    additive
        Values, not indices, are added to those of the base.
    """

    kind = "codebook"
    dtypes = frozenset(CODEBOOK_DTYPES)
    required: ClassVar[Fields] = {"centroids": text()}
    optional: ClassVar[Fields] = {
        "base": ID,
        "debt": _DEBT,
        "protected": flag,
        "additive": flag,
    }

    lattice: CodebookLattice
    additive: bool = False

    @property
    def description(self) -> str:
        """The kind, and whether the indices are stored against others."""
        return self.kind if self.base is None else f"{self.kind} delta"

    def fits_on(self, base: Record) -> bool:
        """Return whether the other object has indices, or values to add to, as this one needs."""
        return isinstance(base, Codebook) and base.additive == self.additive

    def _lattice_to_json(self) -> dict[str, Any]:
        centroids = b64encode(self.lattice.centroids.astype("<f4").tobytes()).decode()
        return {"centroids": centroids, **({"protected": True} if self.lattice.protected else {})}

    @classmethod
    def _lattice_from_json(cls, document: dict[str, Any]) -> dict[str, Any]:
        """Return the lattice, as a keyword argument."""
        centroids = np.frombuffer(b64decode(document["centroids"]), "<f4")
        return {"lattice": CodebookLattice(document["dtype"], centroids, document.get("protected", False))}

    def _is_possible(self) -> bool:
        return not (self.lattice.protected and self.additive)


KINDS: Mapping[str, type[Record]] = {kind.kind: kind for kind in (Raw, Full, Delta, Patches, Linear, Rounded, Codebook)}

#: Schema of the records of a pack.
RECORDS = items(
    both(
        fields(
            {"id": ID, "dtype": one_of(*ITEM_SIZES), "count": whole(1), "chunk": whole(1, CHUNK),
             "at": row(whole(), whole()), "alone": whole()}
        ),
        by("kind", {name: fields(kind.required, kind.optional) for name, kind in KINDS.items()}),
    )
)  # fmt: skip


def declared(document: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record's document; None if it is absent, or if the kind has none: the schema ignores it."""
    kind = KINDS[document["kind"]]
    return document.get(name) if name in kind.required or name in kind.optional else None


def record_from_json(document: dict[str, Any], pack: str) -> Record:
    """Return the record in `document`, which fits the schema.

    Raises
    ------
    IntegrityError
        The record contradicts itself.
    """
    kind = KINDS[document["kind"]]
    offset, length = document["at"]
    common = {name: document[name] for name in ("id", "dtype", "count", "chunk", "alone")}
    own = ((name, document[name]) for name in kind._own_fields() if name in document)
    values: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in own}
    try:
        record = kind(**common, pack=pack, offset=offset, length=length, **values, **kind._lattice_from_json(document))
        is_possible = record.dtype in kind.dtypes and record._is_possible()
    except (ArithmeticError, ValueError, LookupError) as error:
        raise IntegrityError(f"Pack {pack} has a damaged record ({error}); run `ckstore recover`.") from error
    if not is_possible:  # Kernels do not check the fields.
        raise IntegrityError(
            f"The record of object {record.id} is out of bounds; restore its pack from a copy, or run"
            " `ckstore recover`."
        )
    return record


def exact_work(count: int, chunk: int, dtype: str) -> Work:
    """Return the expected work of decoding an object that is stored exactly and in full."""
    return layer(-(-count // chunk), count, int(EXACT_SHARE * count * ITEM_SIZES[dtype]), grouped=False)


def check_cut(record: Record, other: Record | Unit) -> None:
    """Raise `IntegrityError` unless a record and its owner have the same dtype, count and chunks."""
    if (record.dtype, record.count, record.chunk) != (other.dtype, other.count, other.chunk):
        raise IntegrityError(f"Object {record.id} is cut into other chunks than its owner; run `ckstore verify`.")
