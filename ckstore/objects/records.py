"""Records: how one object is stored. Each kind declares its fields once, its work and its description.

An exact object is `raw`, `full`, a `delta`, `patches` or a `cast`; a coarse one is `linear`, `rounded`, a `codebook` or
`factors`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import replace

from ckstore.codecs.codebook import CODEBOOK_DTYPES, CodebookLattice
from ckstore.codecs.exponents import exponents_from_text, exponents_to_text
from ckstore.codecs.factors import MOST_DIRECTIONS, FactorLattice
from ckstore.codecs.lattice import CHUNK, FLOATS, PARTS, STEP_RANGE, LinearLattice
from ckstore.codecs.rounded import ROUNDED, RoundedLattice
from ckstore.codecs.short_floats import SHORT
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work, factors, layer, patches
from ckstore.objects.identity import Lattice
from ckstore.objects.units import Unit
from ckstore.runtime.cached import cached_property
from ckstore.storage.schema import LIMIT, Id, Positive, Text, Whole

if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[tuple(ITEM_SIZES)]

Balance = Annotated[int, Meta(gt=-LIMIT, lt=LIMIT)]
Exponent = Annotated[int, Meta(ge=-(1 << 15), lt=1 << 15)]
# No pattern: msgspec (0.22) crashes when it frees a union of a list and a string with a pattern.
Exponents = str | list[Exponent]

#: The expected bytes of an exact object in full, as a part of its values'.
EXACT_SHARE = 0.85

#: The dtype of the base of a cast.
CAST_FROM = "float32"

#: Bytes of the checksum of a cast's chunk.
CAST_CHECKSUM = 4


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=str.lower):
    """One object of the store.

    Attributes
    ----------
    kind
        Its name in documents.
    is_exact
        Whether the values are the original ones.
    dtypes
        dtypes of the elements that the kind supports.
    id
        Content id of an exact object, lattice id of a coarse one.
    dtype
        Of the coded elements: for complex numbers, of their parts.
    count, chunk
        Number of elements, and of elements in a chunk.
    at
        Place of the data in the pack: offset and length.
    alone
        Bytes of the object, had it been stored in full (estimated if it was not).
    pack
        Name of the pack; empty in documents.
    """

    kind: ClassVar[str]
    is_exact: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str]] = frozenset(ITEM_SIZES.keys() - PARTS.keys())

    id: Id
    dtype: Dtype
    count: Positive
    chunk: Annotated[int, Meta(ge=1, le=CHUNK)]
    at: tuple[Whole, Whole]
    alone: Whole
    pack: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = cls.__name__.lower()

    @property
    def offset(self) -> int:
        """The first byte of the record's data in its pack."""
        return self.at[0]

    @property
    def base(self) -> str | None:
        """Id of the object that this one is stored against, or None."""
        return None

    @property
    def base_dtype(self) -> str:
        """The dtype that a base must have."""
        return self.dtype

    @property
    def is_sum(self) -> bool:
        """Whether it is added to its base's values, so that it cannot be stored in full and its id depends on these."""
        return False

    @property
    def part(self) -> bool:
        """Whether its elements are the first ones of its base, which has more."""
        return False

    @property
    def origin(self) -> str | None:
        """Id of the first object of this one's run, or None."""
        return None

    @property
    def debt(self) -> int:
        """Bytes spent beyond the cheapest choice since the last base; a large debt makes a new base due."""
        return 0

    @property
    def end(self) -> int:
        """The first byte after the record's data in its pack."""
        return sum(self.at)

    @property
    def nbytes(self) -> int:
        """Bytes of the record's data."""
        return self.at[1]

    @property
    def nbytes_of_values(self) -> int:
        """Bytes of the object's values."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.count // self.chunk)

    @property
    def payloads(self) -> int:
        """Number of payloads: one of each chunk, as a rule."""
        return self.chunks

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
        return {name: getattr(self, name) for name in ("id", "dtype", "count", "chunk", "at", "alone")}

    def fits_on(self, base: Record) -> bool:
        """Return whether the object can be stored against another one of its dtype, count and cut."""
        return False

    def placed(self, pack: str) -> Self:
        """Return a record of the manifest of a pack; raise `IntegrityError` if it contradicts itself."""
        record = replace(self, pack=pack)
        try:
            is_possible = record.dtype in record.dtypes and record._is_possible()
        except (ArithmeticError, ValueError, LookupError) as error:
            raise IntegrityError(f"Pack {pack} has a damaged record ({error}); run `ckstore recover`.") from error
        if not is_possible:  # Kernels do not check the fields.
            raise IntegrityError(
                f"The record of object {self.id} is out of bounds; restore its pack from a copy, or run"
                " `ckstore recover`."
            )
        return record

    def _is_possible(self) -> bool:
        """Return whether the fields agree with one another."""
        return True


class Raw(Record, frozen=True, kw_only=True):
    """Values as they are; of a hot version.

    Attributes
    ----------
    crcs
        CRC-32 of each chunk.
    """

    crcs: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(min_length=1)]

    @property
    def work(self) -> Work:
        """Work of looking up the record: copying values costs next to nothing."""
        return Work(records=1)

    def _is_possible(self) -> bool:
        return len(self.crcs) == self.chunks and self.nbytes == self.nbytes_of_values


class Full(Record, frozen=True, kw_only=True):
    """The ordinals of values."""


class _Based(Record, frozen=True, kw_only=True):
    """An object that is stored against another one, its base."""

    base: Id
    debt: Balance = 0

    def fits_on(self, base: Record) -> bool:
        """Return whether the object can be stored against another one of its dtype, count and cut."""
        return base.is_exact


class Delta(_Based, frozen=True, kw_only=True):
    """Differences of ordinals to those of the base.

    Attributes
    ----------
    context
        Chunks are coded in context order (classes from the base).
    part
        The base has more elements, and the first of them are the object's.
    """

    context: bool = False
    part: bool = False

    @property
    def work(self) -> Work:
        """Work of decoding the differences in their order: none of an object that equals its base."""
        if not self.nbytes:
            return patches(0, 0)
        return layer(self.chunks, self.count, self.nbytes, grouped=self.context, delta=True)

    def _is_possible(self) -> bool:
        return not self.context or self.dtype in FLOATS


class Patches(_Based, frozen=True, kw_only=True):
    """A patch of each chunk of the base.

    Attributes
    ----------
    sizes
        Bytes of each chunk's patch, 0 for an unchanged chunk.
    part
        The base has more elements, and the first of them are the object's.
    """

    sizes: Annotated[tuple[Whole, ...], Meta(min_length=1)]
    part: bool = False

    @property
    def work(self) -> Work:
        """Work of applying the patches."""
        return patches(sum(map(bool, self.sizes)), self.nbytes)

    def _is_possible(self) -> bool:
        return len(self.sizes) == self.chunks and self.nbytes == sum(self.sizes)


class Cast(Patches, frozen=True, kw_only=True):
    """The base's float32 values, rounded: of each chunk the CRC-32 of its bytes, then a patch unless it has none.

    The base is of the same version, such as a master weight. `sizes` are of both.
    """

    dtypes = frozenset(SHORT)

    @property
    def base_dtype(self) -> str:
        """The dtype that a base must have."""
        return CAST_FROM

    def _is_possible(self) -> bool:
        return Patches._is_possible(self) and min(self.sizes) >= CAST_CHECKSUM and not self.part


class Coarse(Record, frozen=True, kw_only=True):
    """An object of quantised values."""

    is_exact = False

    @property
    def lattice(self) -> Lattice:
        """The meaning of the integers."""
        raise NotImplementedError

    @property
    def full_work(self) -> Work:
        """Expected work of decoding the object, had it been stored exactly and in full."""
        return exact_work(self.count, self.chunk, self.dtype)


class _Gridded(Coarse, frozen=True, kw_only=True, dict=True):
    """Integers on a lattice with exponents of rows and columns."""

    width: Positive
    rows: Exponents = ""
    cols: Exponents = ""

    @property
    def lattice(self) -> LinearLattice | RoundedLattice:
        """The meaning of the integers."""
        raise NotImplementedError

    def _axes(self) -> dict[str, npt.NDArray[np.int16]]:
        return {"rows": exponents_from_text(self.rows), "cols": exponents_from_text(self.cols)}

    def _is_possible(self) -> bool:
        lattice = self.lattice
        return lattice.rows.size in (0, -(-self.count // lattice.width)) and lattice.cols.size in (0, lattice.width)


class Linear(_Gridded, frozen=True, kw_only=True):
    """Integers on a linear lattice, in full or less the projected integers of the base.

    Attributes
    ----------
    cast
        The base is float32, such as a master weight of the same version.
    origin
        Id of the first object of this one's run; None if it is the first.
    """

    dtypes = frozenset(STEP_RANGE)

    step: Balance
    base: Id | None = None
    debt: Balance = 0
    origin: Id | None = None
    cast: bool = False

    @property
    def base_dtype(self) -> str:
        """The dtype that a base must have."""
        return CAST_FROM if self.cast else self.dtype

    @classmethod
    def on(cls, lattice: LinearLattice, **fields: Any) -> Self:
        """Return the record of an object on a lattice."""
        return cls(step=lattice.step, width=lattice.width, **_axes_of(lattice), **fields)

    @cached_property
    def lattice(self) -> LinearLattice:
        """The meaning of the integers."""
        return LinearLattice(self.dtype, self.step, self.width, **self._axes())

    @property
    def description(self) -> str:
        """The smallest and largest step of rows and columns."""
        low = high = self.lattice.step
        for axis in (self.lattice.rows, self.lattice.cols):
            if axis.size:
                low, high = low + int(axis.min()), high + int(axis.max())
        steps = f"linear 2^{low}" if low == high else f"linear 2^{low}..{high}"
        return steps if self.base is None else f"{steps} {'cast' if self.cast else 'delta'}"

    def fits_on(self, base: Record) -> bool:
        """Return whether the integers of the other object can be projected."""
        return isinstance(base, Linear) and base.lattice.width == self.lattice.width

    def _is_possible(self) -> bool:
        is_cast = self.base is not None and self.dtype in SHORT
        return _Gridded._is_possible(self) and self.lattice.is_in_range and (is_cast or not self.cast)


class Rounded(_Gridded, frozen=True, kw_only=True):
    """Integers on a rounded lattice, in full."""

    dtypes = frozenset(ROUNDED)

    shift: Annotated[int, Meta(ge=1, le=31)]
    level: Exponent

    @classmethod
    def on(cls, lattice: RoundedLattice, **fields: Any) -> Self:
        """Return the record of an object on a lattice."""
        axes = _axes_of(lattice)
        return cls(shift=lattice.shift, level=lattice.level, width=lattice.width, **axes, **fields)

    @cached_property
    def lattice(self) -> RoundedLattice:
        """The meaning of the integers."""
        return RoundedLattice(self.dtype, self.shift, self.level, self.width, **self._axes())

    @property
    def description(self) -> str:
        """The binary logarithm of a step, in units in the last place."""
        return f"rounded 2^{self.lattice.shift}"


class Codebook(Coarse, frozen=True, kw_only=True, dict=True):
    """Indices of a codebook, in full or coded by those of the base.

    Attributes
    ----------
    centroids
        The lattice's, as base64 of little-endian float32.
    protected
        The lattice has a level whose elements keep 16 bits each.
    additive
        Values, not indices, are added to those of the base.
    """

    dtypes = frozenset(CODEBOOK_DTYPES)

    centroids: Text
    base: Id | None = None
    debt: Balance = 0
    protected: bool = False
    additive: bool = False

    @cached_property
    def lattice(self) -> CodebookLattice:
        """The meaning of the indices."""
        centroids = np.frombuffer(b64decode(self.centroids), "<f4")
        return CodebookLattice(self.dtype, centroids, self.protected)

    @property
    def is_sum(self) -> bool:
        """Whether its values are added to those of its base."""
        return self.additive

    @property
    def description(self) -> str:
        """The kind, and whether the indices are stored against others."""
        return "codebook" if self.base is None else "codebook delta"

    def fits_on(self, base: Record) -> bool:
        """Return whether the other object has indices, or values to add to, as this one needs."""
        return isinstance(base, Codebook) and base.additive == self.additive

    @classmethod
    def on(cls, lattice: CodebookLattice, **fields: Any) -> Self:
        """Return the record of an object on a lattice."""
        centroids = b64encode(lattice.centroids.astype("<f4").tobytes()).decode()
        return cls(centroids=centroids, protected=lattice.protected, **fields)

    def _is_possible(self) -> bool:
        return not (self.lattice.protected and self.additive)


class Factors(Coarse, frozen=True, kw_only=True):
    """The values of the base plus changes of rows: a product of two matrices of integers, in one payload.

    Attributes
    ----------
    step, width, rank
        Of the lattice.
    """

    dtypes = frozenset(CODEBOOK_DTYPES)

    base: Id
    step: Balance
    width: Positive
    rank: Annotated[int, Meta(ge=1, le=MOST_DIRECTIONS)]

    @classmethod
    def on(cls, lattice: FactorLattice, **fields: Any) -> Self:
        """Return the record of an object on a lattice."""
        return cls(step=lattice.step, width=lattice.width, rank=lattice.rank, **fields)

    @property
    def lattice(self) -> FactorLattice:
        """The meaning of the numbers."""
        return FactorLattice(self.dtype, self.step, self.width, self.rank)

    @property
    def is_sum(self) -> bool:
        """Whether its values are added to those of its base."""
        return True

    @property
    def payloads(self) -> int:
        """Number of payloads: chunks share the factors."""
        return 1

    @property
    def work(self) -> Work:
        """Work of decoding the numbers, and of multiplying and adding."""
        return factors(self.lattice.size_of(self.count), self.count, self.rank, self.nbytes)

    @property
    def description(self) -> str:
        """The kind and the number of directions."""
        return f"factors of rank {self.rank}"

    def fits_on(self, base: Record) -> bool:
        """Return whether changes can be added to the other object: errors of a coarse one have no few directions."""
        return base.is_exact

    def _is_possible(self) -> bool:
        return self.lattice.is_possible(self.count, self.chunk)


#: The names of the kinds.
KINDS = ("raw", "full", "delta", "patches", "cast", "linear", "rounded", "codebook", "factors")

if TYPE_CHECKING:
    AnyRecord = Record
else:
    #: A record of any kind, as in documents.
    AnyRecord = Raw | Full | Delta | Patches | Cast | Linear | Rounded | Codebook | Factors


def _axes_of(lattice: LinearLattice | RoundedLattice) -> dict[str, Any]:
    return {"rows": exponents_to_text(lattice.rows), "cols": exponents_to_text(lattice.cols)}


def common_fields(identity: str, unit: Unit, alone: int) -> dict[str, Any]:
    """Return the fields of the record of a unit, before it has a place."""
    return {"id": identity, "dtype": unit.dtype, "count": unit.count, "chunk": unit.chunk, "at": (0, 0), "alone": alone}


def exact_work(count: int, chunk: int, dtype: str) -> Work:
    """Return the expected work of decoding an object that is stored exactly and in full."""
    return layer(-(-count // chunk), count, int(EXACT_SHARE * count * ITEM_SIZES[dtype]), grouped=False)


def check_cut(record: Record, other: Record | Unit, dtype: str | None = None) -> None:
    """Raise `IntegrityError` unless a record has count and chunks of its owner, and its dtype or the given one."""
    if (record.dtype, record.count, record.chunk) != (dtype or other.dtype, other.count, other.chunk):
        raise IntegrityError(f"Object {record.id} is cut into other chunks than its owner; run `ckstore verify`.")


def begins(base: Record, other: Record | Unit) -> bool:
    """Return whether an object may have the first elements of a base with more: its chunks are the base's, or one."""
    fits = other.chunk == base.chunk or other.count <= other.chunk
    return fits and base.dtype == other.dtype and base.count > other.count


def check_base(base: Record, record: Record) -> None:
    """Raise `IntegrityError` unless a record can be stored against another one."""
    if not record.part:
        check_cut(base, record, record.base_dtype)
    elif not begins(base, record):
        raise IntegrityError(f"Object {record.id} is no part of {base.id}; run `ckstore verify`.")
    if not record.fits_on(base):
        raise IntegrityError(f"Object {record.id} cannot be a delta against {base.id}; run `ckstore recover`.")
