"""Layout documents: the layouts of a version's files and its units, in columns over all files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import PARTS, part_dtype
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, IntegrityError, UsageError
from ckstore.formats.layout import (
    MARKS,
    MOST_AXES,
    Box,
    Checked,
    Extent,
    FileLayout,
    Lists,
    Path,
    Rows,
    Tensor,
    fault_of,
)
from ckstore.formats.paths import check_texts, paths_of, texts_of
from ckstore.formats.shards import fit_together, gather_shards
from ckstore.objects.documents import VersionDocument
from ckstore.objects.units import CODED, Member, Unit
from ckstore.runtime.cached import cached_property
from ckstore.storage.schema import LIMIT
from ckstore.varint import read_varints, varints

Integers = npt.NDArray[np.int64]
#: Two numbers, and the items.
Column = tuple[int | bytes, ...]

#: Types of stored numbers; the last two bits of the code of a column are the number of one.
_TYPES = ("u1", "<u2", "<u4", "<u8")
#: The largest number of each type but the last.
_BOUNDS = [(1 << bits) - 1 for bits in (8, 16, 32)]
#: Called for some thirty short columns of each version: the methods of arrays take twice as long.
_least, _largest, _sum, _any = np.minimum.reduce, np.maximum.reduce, np.add.reduce, np.logical_or.reduce
#: Set in the code of a column of differences, which are small and alike in a regular model.
_DIFFERENCES = 4


def pack_integers(values: Sequence[int] | Integers) -> Column:
    """Return a column of integers from 0 to 2^63 − 1; raise `ValueError` for others."""
    try:
        column = np.asarray(values, np.int64).reshape(-1)
    except OverflowError:
        raise ValueError("an integer takes more than 63 bits") from None
    code = largest = 0
    if column.size:
        if _least(column) < 0:
            raise ValueError("an integer is negative")
        steps = column.copy()
        steps[1:] -= column[:-1]
        if column.size > 1 and _least(steps) >= 0:
            column, code = steps, _DIFFERENCES
        largest = _largest(column)
    kind = bisect_left(_BOUNDS, largest)
    return column.size, code + kind, column.astype(_TYPES[kind]).tobytes()


def pack_texts(texts: Sequence[str]) -> Column:
    """Return a column of texts; raise `ValueError` for a NUL or a lone surrogate."""
    data = "\0".join(texts).encode()
    if data.count(0) != max(len(texts) - 1, 0):
        raise ValueError("a text has a NUL")
    return len(texts), len(data), data


class ColumnReader:
    """Reads columns one after the other; raises `ValueError` for damaged ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integers(self, count: int | None = None, limit: int = LIMIT) -> Integers:
        """Return a column of integers below a limit; with `count`, of this length."""
        data = self._data
        [size], at = read_varints(data, self._at)
        code = data[at] if at < len(data) else 8
        if code >= 2 * _DIFFERENCES:
            raise ValueError("the code of a column is cut off or unknown")
        kind = np.dtype(_TYPES[code % _DIFFERENCES])
        self._at = at + 1 + size * kind.itemsize
        if self._at > len(data) or (count is not None and size != count):
            raise ValueError("a column has another length")
        stored = np.frombuffer(data, kind, size, at + 1)
        if kind.itemsize == 8 and size and int(_largest(stored)) >= 1 << 63:
            raise ValueError("an integer takes more than 63 bits")
        column = stored.astype(np.int64)
        if code >= _DIFFERENCES:
            column.cumsum(out=column)
            # Fewer than 2^31 numbers of 32 bits do not wrap; a sum that wraps once is negative.
            wraps = kind.itemsize == 8 or size >> 31
            if wraps and size and (float(stored.sum(dtype=np.float64)) >= 1.5 * 2.0**63 or int(column.min()) < 0):
                raise ValueError("an integer takes more than 63 bits")
        if size and int(column[-1] if code >= _DIFFERENCES else _largest(column)) >= limit:
            raise ValueError("an integer is too large")
        return column

    def texts(self, count: int | None = None) -> list[str]:
        """Return a column of texts; with `count`, of this length."""
        (size, length), at = read_varints(self._data, self._at, 2)
        self._at = at + length
        if self._at > len(self._data):
            raise ValueError("a column is cut off")
        texts = str(self._data[at : self._at], "utf-8").split("\0") if size else []
        if len(texts) != size or (not size and length) or (count is not None and size != count):
            raise ValueError("a column has another length")
        return texts

    def end(self) -> None:
        """Raise `ValueError` unless everything was read."""
        if self._at != len(self._data):
            raise ValueError("bytes follow the last column")


#: Sets of marks by number: bit i has the mark i.
_MARKS = [tuple(mark for bit, mark in enumerate(MARKS) if number >> bit & 1) for number in range(1 << len(MARKS))]
_MARKED = {marks: number for number, marks in enumerate(_MARKS)}
_NATURAL = 1 << 63
_LONGEST_KIND = 64


class LayoutDocument:
    """The layouts and units of a version's files, in columns over all files, from which they are made on first use.

    Most versions of a run share one: it holds nothing that changes, and has neither trees nor facts.

    Attributes
    ----------
    data
        The encoded document.
    kinds, sizes, counts, bounds, bases
        Of each file its kind, its size, and how many extents, tensors and checked stretches it has; `bounds` are how
        many all files before it have, and last the numbers of all; `bases` are these of extents.
    names
        dtypes, which columns have by number.
    starts, extent_dtypes, scales, extent_shapes, named
        Of extents. `scales` are coded elements of an element. `named` is the number of the tensor with the path; that
        of an extent with another path is -1 less its place in `own`.
    texts, dtypes, shapes, strides, extents, offsets, marks, boxes
        Of tensors: `texts` are paths, `boxes` those of shards by number.
    checked, checked_names, positions
        Of checked stretches.
    keys, signatures, unit_dtypes, unit_shapes, roles, members
        Of units: `members` are their numbers of members.
    stretches
        File, extent, first element and number of elements of each member.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        read = ColumnReader(data)
        self.kinds = read.texts()
        if not all(0 < len(kind) <= _LONGEST_KIND for kind in self.kinds):
            raise ValueError("a kind of file has no name, or a long one")
        self.sizes = read.integers(len(self.kinds))
        self.counts = [read.integers(len(self.kinds)) for _ in range(3)]
        self.bounds: list[list[int]] = [[0, *column.cumsum().tolist()] for column in self.counts]
        self.bases = self.counts[0].cumsum() - self.counts[0]
        self.names = read.texts()
        if not ITEM_SIZES.keys() >= set(self.names):
            raise ValueError("a dtype is unknown")
        extents, tensors, checked = map(_total, self.counts)
        self.starts = read.integers(extents)
        self.extent_dtypes = read.integers(extents, len(self.names))
        # Complex numbers are two floats of a unit.
        self.scales = np.array([1 + (name in PARTS) for name in self.names], np.int64)[self.extent_dtypes]
        self.extent_shapes = _lists(read, extents)
        named = read.integers(extents)
        if _any(named > self.counts[1].repeat(self.counts[0])):
            raise ValueError("an extent is named after no tensor")
        before = (self.counts[1].cumsum() - self.counts[1]).repeat(self.counts[0])
        self.named = np.where(named, named + before - 1, -(named == 0).cumsum())
        self.own = read.texts(int(_sum(named == 0)))
        self.texts = read.texts(tensors)
        check_texts(self.own)
        check_texts(self.texts)
        self.dtypes = read.integers(tensors, len(self.names))
        self.shapes = _lists(read, tensors, _NATURAL)
        self.strides = Lists(self.shapes.counts, read.integers(self.shapes.items.size, _NATURAL))
        self.extents = read.integers(tensors) - 1
        self.offsets = read.integers(tensors)
        self.marks = read.integers(tensors, len(_MARKS))
        self.boxes = _boxes(read, self.shapes.counts)
        self._read_checked(read, checked)
        self._read_units(read)
        read.end()
        #: Its contradictions, found once for all versions that share it: of layouts with gaps, and without.
        self._wrong: dict[bool, str] = {}

    def _read_checked(self, read: ColumnReader, count: int) -> None:
        self.checked_names = read.texts(count)
        starts = read.integers(count)
        self.checked = starts, starts + read.integers(count)
        counts = read.integers(count)
        stored = read.integers(_total(counts))
        self.positions = Lists(counts, np.empty_like(stored))
        self.positions.items[_by_place(counts)] = stored

    def _read_units(self, read: ColumnReader) -> None:
        self.keys = read.texts()
        self.signatures = read.texts(len(self.keys))
        if any(len(one) != 16 for one in self.signatures) or set("".join(self.signatures)) - set("0123456789abcdef"):
            raise ValueError("a signature is none")
        self.unit_dtypes = read.integers(len(self.keys), len(self.names))
        if not CODED.issuperset(_by_number(self.names, self.unit_dtypes)):
            raise ValueError("a unit has a dtype that is coded by parts")
        self.unit_shapes = _lists(read, len(self.keys))
        self.roles = read.texts(len(self.keys))
        self.members = read.integers(len(self.keys))
        self.stretches = [read.integers(_total(self.members)) for _ in range(4)]
        if _any(self.unit_shapes.items < 1) or _any(self.stretches[3] < 1):
            raise ValueError("a unit is empty")

    @classmethod
    def decode(cls, data: bytes) -> LayoutDocument:
        """Decode a result of `encode_layout`."""
        try:
            return cls(data)
        except (UsageError, ValueError) as error:
            raise IntegrityError(f"A layout is damaged ({error}); restore its pack from a copy.") from error

    def wrong_part(self, *, gaps: bool) -> str:
        """Return the part in which it contradicts itself, or nothing. With `gaps`, elements may be in no unit."""
        if gaps not in self._wrong:
            widths = np.array([ITEM_SIZES[name] for name in self.names], np.int64)
            extents = self.starts, self.extent_shapes, widths[self.extent_dtypes]
            tensors = self.shapes, self.strides, self.extents, self.offsets, widths[self.dtypes]
            fault = fault_of((self.sizes, self.counts), extents, tensors, self.checked)
            self._wrong[gaps] = fault or ("units" if self.is_uncovered(gaps=gaps) else "")
        return self._wrong[gaps]

    @cached_property
    def files(self) -> list[FileLayout]:
        """The layouts of the files."""
        made = copy(self)  # Rows that refer to the document that has them would be cyclic garbage.
        makers: list[Callable[[int, int], list[Any]]] = [made._extents, made._tensors, made._checked]
        found, columns = [], [*zip(makers, self.bounds, strict=True)]
        for number, kind in enumerate(self.kinds):
            # As lists: nothing changes the layout of a stored file.
            rows: Any = [Rows(make, bounds[number], bounds[number + 1]) for make, bounds in columns]
            found.append(FileLayout(kind, int(self.sizes[number]), *rows))
        return found

    @cached_property
    def units(self) -> Sequence[Unit]:
        """The units."""
        return Rows(copy(self)._units, 0, len(self.keys))

    # Plain maps below, as a call of Python for every tensor would take longer than the rest.

    @cached_property
    def paths(self) -> Rows[Path]:
        """Typed paths of the tensors."""
        texts = self.texts
        return Rows(lambda first, last: paths_of(texts[first:last]), 0, len(texts))

    @cached_property
    def own_paths(self) -> Rows[Path]:
        """Typed paths of the extents that have no tensor's."""
        texts = self.own
        return Rows(lambda first, last: paths_of(texts[first:last]), 0, len(texts))

    def _extents(self, first: int, last: int) -> list[Extent]:
        paths, own = (rows if last - first == 1 else rows[:] for rows in (self.paths, self.own_paths))
        named = [paths[number] if number >= 0 else own[-1 - number] for number in self.named[first:last].tolist()]
        dtypes = _by_number(self.names, self.extent_dtypes[first:last])
        return list(map(Extent, self.starts[first:last].tolist(), dtypes, self.extent_shapes.cut(first, last), named))

    def _tensors(self, first: int, last: int) -> list[Tensor]:
        part = slice(first, last)
        rows = self.paths[part], _by_number(self.names, self.dtypes[part]), self.shapes.cut(first, last)
        places, offsets, marks = (column[part].tolist() for column in (self.extents, self.offsets, self.marks))
        marks, boxes = map(_MARKS.__getitem__, marks), map(self.boxes.get, range(first, last))
        return list(map(Tensor, *rows, self.strides.cut(first, last), places, offsets, marks, boxes))

    def _checked(self, first: int, last: int) -> list[Checked]:
        starts, stops = (column[first:last].tolist() for column in self.checked)
        return list(map(Checked, self.checked_names[first:last], starts, stops, self.positions.cut(first, last)))

    def _units(self, first: int, last: int) -> list[Unit]:
        begin, end = int(_sum(self.members[:first])), int(_sum(self.members[:last]))
        flat = map(Member, *(column[begin:end].tolist() for column in self.stretches))
        members = [tuple(islice(flat, count)) for count in self.members[first:last].tolist()]
        dtypes, shapes = _by_number(self.names, self.unit_dtypes[first:last]), self.unit_shapes.cut(first, last)
        part = slice(first, last)
        return list(map(Unit, self.keys[part], self.signatures[part], dtypes, shapes, self.roles[part], members))

    @cached_property
    def _placed(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """Of each member its extent over all files, its unit, its first and number of coded elements; and their order.

        The order is that of extents and elements.
        """
        file, extent, first, count = self.stretches
        place = self.bases[file] + extent
        scale = self.scales[place]
        unit = np.arange(self.members.size).repeat(self.members)
        return place, unit, first * scale, count * scale, np.lexsort((first, place))

    @cached_property
    def parts(self) -> tuple[list[int], ...]:
        """The parts of extents in units, of a document without contradictions, in the order of extents and elements.

        For each extent of all files the number of its first part, and the number of all parts; for each part its first
        coded element in the extent, its unit, and its first element there; for each extent the coded elements of an
        element.
        """
        place, unit, first, count, order = self._placed
        before = count.cumsum() - count
        positions = before - np.append(before, 0)[self.members.cumsum() - self.members][unit]
        starts = place[order].searchsorted(np.arange(self.starts.size + 1))
        columns = starts, first[order], unit[order], positions[order], self.scales
        return tuple(column.tolist() for column in columns)

    def is_uncovered(self, *, gaps: bool) -> bool:
        """Return whether an element has not its unit's dtype, or is in several members, or (without `gaps`) in none."""
        ids = {name: number for number, name in enumerate(ITEM_SIZES)}
        coded, own = (np.array([ids[name] for name in names]) for names in (map(part_dtype, self.names), self.names))
        sizes = self.extent_shapes.products
        file, extent, first, count = self.stretches
        if not count.size:
            return not gaps and bool(_any(sizes))
        if _largest(file) >= self.sizes.size or _any(extent >= self.counts[0][file]):
            return True
        place, unit, _, scaled, order = self._placed
        within, begins = place[order], first[order]
        ends = begins + count[order]
        follows = within[1:] == within[:-1]
        if _any(ends > sizes[within]) or _any((begins[1:] < ends[:-1])[follows]):
            return True
        if not gaps and _sum(count) != _sum(sizes):
            return True
        # As integers: members are disjoint, so that no sum exceeds the bytes of the files.
        totals = np.zeros(self.members.size, np.int64)
        np.add.at(totals, unit, scaled)
        is_other = coded[self.extent_dtypes[place]] != own[self.unit_dtypes[unit]]
        return bool(_any(is_other) or _any(totals != self.unit_shapes.products))


def encode_layout(files: Sequence[FileLayout], units: Sequence[Unit]) -> bytes:
    """Return a document as columns; raise `InputError` if it could not be read back."""
    try:
        return varints(*chain.from_iterable(_encoded(files, units)))
    except (ValueError, KeyError) as error:
        raise InputError(
            f"The checkpoint cannot be stored as it is ({error}); put it into a tar archive, and ingest that."
        ) from error


def _encoded(files: Sequence[FileLayout], units: Sequence[Unit]) -> Iterable[Column]:
    extents = [extent for file in files for extent in file.extents]
    tensors = [tensor for file in files for tensor in file.tensors]
    checked = [item for file in files for item in file.checked]
    dtypes = dict.fromkeys([one.dtype for one in extents] + [one.dtype for one in tensors])
    dtypes |= dict.fromkeys(unit.dtype for unit in units)
    dtype = {name: number for number, name in enumerate(dtypes)}
    if any(not 0 < len(file.kind) <= _LONGEST_KIND for file in files):
        raise ValueError("a kind of file has no name, or a long one")
    yield pack_texts([file.kind for file in files])
    yield _below([file.size for file in files])
    for part in ("extents", "tensors", "checked"):
        yield pack_integers([len(getattr(file, part)) for file in files])
    yield pack_texts(list(dtypes))

    named = list(chain.from_iterable(map(_named, files)))
    own = [one.path for one, number in zip(extents, named, strict=True) if not number]
    yield _below([one.start for one in extents])
    yield pack_integers([dtype[one.dtype] for one in extents])
    yield from _tuples([one.shape for one in extents], LIMIT)
    yield pack_integers(named)
    yield pack_texts(texts_of(own))

    yield pack_texts(texts_of([one.path for one in tensors]))
    yield pack_integers([dtype[one.dtype] for one in tensors])
    yield from _tuples([one.shape for one in tensors], _NATURAL)
    yield pack_integers(list(chain.from_iterable([one.strides for one in tensors])))
    yield pack_integers([one.extent + 1 for one in tensors])
    yield _below([one.offset for one in tensors])
    yield pack_integers([_MARKED[one.marks] for one in tensors])
    boxes = [(number, one.box) for number, one in enumerate(tensors) if one.box is not None]
    yield pack_integers([number for number, _ in boxes])
    yield pack_integers(list(chain.from_iterable(box.first for _, box in boxes)))
    yield pack_integers(list(chain.from_iterable(box.whole for _, box in boxes)))

    yield pack_texts(
        [one.name if one.name.isascii() and one.name.isprintable() else _as_text(one.name) for one in checked]
    )
    yield _below([one.start for one in checked])
    yield _below([one.stop - one.start for one in checked])
    counts = np.array([len(one.positions) for one in checked], np.int64)
    positions = np.array(list(chain.from_iterable([one.positions for one in checked])), np.int64)
    yield pack_integers(counts)
    yield _below(positions[_by_place(counts)])

    yield pack_texts([unit.key for unit in units])
    yield pack_texts([unit.signature for unit in units])
    yield pack_integers([dtype[unit.dtype] for unit in units])
    yield from _tuples([unit.shape for unit in units], LIMIT)
    yield pack_texts([unit.role for unit in units])
    members = list(chain.from_iterable([unit.members for unit in units]))
    yield pack_integers([len(unit.members) for unit in units])
    for part in ("file", "extent", "first", "count"):
        yield _below([getattr(member, part) for member in members])


def _below(values: Sequence[int] | Integers) -> Column:
    """Return a column of integers below the limit."""
    if len(values) and max(values) >= LIMIT:
        raise ValueError("an integer is too large")
    return pack_integers(values)


def _named(file: FileLayout) -> list[int]:
    """Return for each extent the number, from 1 on, of the first tensor in it if it has that one's path, or else 0."""
    found = [0] * len(file.extents)
    extents, tensors = file.extents, file.tensors
    for number in range(len(tensors) - 1, -1, -1):
        if tensors[number].extent >= 0:
            found[tensors[number].extent] = number + 1
    return [
        number if number and tensors[number - 1].path == extent.path else 0
        for number, extent in zip(found, extents, strict=True)
    ]


def _tuples(shapes: Sequence[tuple[int, ...]], limit: int) -> Iterable[Column]:
    """Yield a column of lengths, and one of the items of all."""
    ranks = list(map(len, shapes))
    if ranks and max(ranks) > MOST_AXES:
        raise ValueError("a shape has too many axes")
    items = list(chain.from_iterable(shapes))
    yield pack_integers(ranks)
    yield _below(items) if limit == LIMIT else pack_integers(items)


def _by_place(counts: Integers) -> Integers:
    """Return the order that puts the first items of all lists first, then the second ones, and so on."""
    within = np.arange(int(_sum(counts))) - (counts.cumsum() - counts).repeat(counts)
    return within.argsort(kind="stable")


def _by_number(names: Sequence[str], numbers: Integers) -> Iterator[str]:
    """Yield the names of dtypes by number."""
    return map(names.__getitem__, numbers.tolist())


def _total(counts: Integers) -> int:
    """Return the sum of some counts."""
    if float(_sum(counts, dtype=np.float64)) >= LIMIT:
        raise ValueError("there are too many items")
    return int(_sum(counts))


def _lists(read: ColumnReader, count: int, limit: int = LIMIT) -> Lists:
    """Return `count` lists: a column of lengths, and one of the items of all."""
    ranks = read.integers(count, MOST_AXES + 1)
    return Lists(ranks, read.integers(int(_sum(ranks)), limit))


def _boxes(read: ColumnReader, ranks: Integers) -> dict[int, Box]:
    numbers = read.integers(limit=max(ranks.size, 1))
    if ranks.size < numbers.size or _any(numbers[1:] <= numbers[:-1]):
        raise ValueError("shards are not in order")
    lengths = ranks[numbers]
    count = int(_sum(lengths))
    firsts, wholes = (Lists(lengths, read.integers(count, _NATURAL)).cut() for _ in range(2))
    return dict(zip(numbers.tolist(), map(Box, firsts, wholes), strict=True))


def _as_text(name: str) -> str:
    """Return a name in an archive as text of the document; only messages use it."""
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def check_layout(layout: LayoutDocument, document: VersionDocument) -> None:
    """Raise `IntegrityError` unless a layout fits the files and objects of a version.

    Extents must lie in the files and tensors in their extents. Every element must belong to one member of one unit,
    except for dropped elements.
    """
    if wrong := _wrong_part(layout, document):
        raise IntegrityError(
            f"The layout of version {document.number} contradicts itself in {wrong}; restore its pack from a copy."
        )


def _wrong_part(layout: LayoutDocument, document: VersionDocument) -> str:
    if [file.size for file in layout.files] != [entry.size for entry in document.files]:
        return "files"
    if len(layout.units) != len(document.objects):
        return "units"
    if wrong := layout.wrong_part(gaps=bool(document.dropped)):
        return wrong
    if not layout.boxes:
        return ""
    shards = gather_shards((entry.path, file) for entry, file in zip(document.files, layout.files, strict=True))
    is_whole = all(fit_together([tensor for _, tensor in parts]) for parts in shards.values())
    return "" if is_whole else "shards"
