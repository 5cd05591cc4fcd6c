"""Layout documents: the layouts of a version's files and its units, in columns over all files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import PARTS
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, IntegrityError, UsageError
from ckstore.formats.layout import MARKS, MOST_AXES, Box, Checked, Extent, FileLayout, Tensor
from ckstore.formats.paths import paths_of, texts_of
from ckstore.formats.shards import fit_together, gather_shards
from ckstore.objects.documents import VersionDocument
from ckstore.objects.units import CODED, Member, Unit
from ckstore.storage.schema import LIMIT
from ckstore.varint import read_varint, varint

Integers = npt.NDArray[np.int64]

#: Types of stored numbers; the last two bits of the code of a column are the number of one.
_TYPES = ("u1", "<u2", "<u4", "<u8")
#: Set in the code of a column of differences, which are small and alike in a regular model.
_DIFFERENCES = 4


def pack_integers(values: Sequence[int] | Integers) -> bytes:
    """Return a column of integers from 0 to 2^63 − 1; raise `ValueError` for others."""
    try:
        column = np.asarray(values, np.int64).reshape(-1)
    except OverflowError:
        raise ValueError("an integer takes more than 63 bits") from None
    if column.size and column.min() < 0:
        raise ValueError("an integer is negative")
    code = 0
    if column.size > 1:
        steps = np.diff(column, prepend=0)
        if steps.min() >= 0:
            column, code = steps, _DIFFERENCES
    largest = int(column.max()) if column.size else 0
    kind = next(number for number, name in enumerate(_TYPES) if largest <= np.iinfo(name).max)
    return varint(column.size) + bytes([code + kind]) + column.astype(_TYPES[kind]).tobytes()


def pack_texts(texts: Sequence[str]) -> bytes:
    """Return a column of texts; raise `ValueError` for a NUL or a lone surrogate."""
    data = "\0".join(texts).encode()
    if data.count(0) != max(len(texts) - 1, 0):
        raise ValueError("a text has a NUL")
    return varint(len(texts)) + varint(len(data)) + data


class ColumnReader:
    """Reads columns one after the other; raises `ValueError` for damaged ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integers(self, count: int | None = None, limit: int = LIMIT) -> Integers:
        """Return a column of integers below a limit; with `count`, of this length."""
        data = self._data
        size, at = read_varint(data, self._at)
        code = data[at] if at < len(data) else 8
        if code >= 2 * _DIFFERENCES:
            raise ValueError("the code of a column is cut off or unknown")
        kind = np.dtype(_TYPES[code % _DIFFERENCES])
        self._at = at + 1 + size * kind.itemsize
        if self._at > len(data) or (count is not None and size != count):
            raise ValueError("a column has another length")
        stored = np.frombuffer(data, kind, size, at + 1)
        if kind.itemsize == 8 and size and int(stored.max()) >= 1 << 63:
            raise ValueError("an integer takes more than 63 bits")
        column = stored.astype(np.int64)
        if code >= _DIFFERENCES:
            column.cumsum(out=column)
            # Fewer than 2^31 numbers of 32 bits do not wrap; a sum that wraps once is negative.
            wraps = kind.itemsize == 8 or size >> 31
            if wraps and size and (float(stored.sum(dtype=np.float64)) >= 1.5 * 2.0**63 or int(column.min()) < 0):
                raise ValueError("an integer takes more than 63 bits")
        if size and int(column[-1] if code >= _DIFFERENCES else column.max()) >= limit:
            raise ValueError("an integer is too large")
        return column

    def texts(self, count: int | None = None) -> list[str]:
        """Return a column of texts; with `count`, of this length."""
        size, at = read_varint(self._data, self._at)
        length, at = read_varint(self._data, at)
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


@dataclass(slots=True)
class LayoutDocument:
    """The layouts and units of a version's files. Most versions of a run share one: it holds nothing that changes."""

    files: list[FileLayout]
    units: list[Unit]
    #: Its contradictions, found once for all versions that share it: of layouts with gaps, and without.
    _wrong: dict[bool, str] = field(default_factory=dict, compare=False, repr=False)

    def wrong_part(self, *, gaps: bool) -> str:
        """Return the part in which it contradicts itself, or nothing. With `gaps`, elements may be in no unit."""
        if gaps not in self._wrong:
            faults = filter(None, (file.fault() for file in self.files))
            self._wrong[gaps] = next(faults, "") or ("units" if _is_uncovered(self, gaps=gaps) else "")
        return self._wrong[gaps]

    def encode(self) -> bytes:
        """Return the document as columns; raise `InputError` if `decode` would refuse it."""
        try:
            return b"".join(_columns(self))
        except (ValueError, KeyError) as error:
            raise InputError(
                f"The checkpoint cannot be stored as it is ({error}); put it into a tar archive, and ingest that."
            ) from error

    @classmethod
    def decode(cls, data: bytes) -> LayoutDocument:
        """Decode a result of `encode`; it has neither trees nor facts."""
        try:
            return _decoded(ColumnReader(data))
        except (UsageError, ValueError) as error:
            raise IntegrityError(f"A layout is damaged ({error}); restore its pack from a copy.") from error


def _columns(document: LayoutDocument) -> Iterable[bytes]:
    files, units = document.files, document.units
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


def _below(values: Sequence[int] | Integers) -> bytes:
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


def _tuples(shapes: Sequence[tuple[int, ...]], limit: int) -> Iterable[bytes]:
    """Yield a column of lengths, and one of the items of all."""
    ranks = list(map(len, shapes))
    if ranks and max(ranks) > MOST_AXES:
        raise ValueError("a shape has too many axes")
    items = list(chain.from_iterable(shapes))
    yield pack_integers(ranks)
    yield _below(items) if limit == LIMIT else pack_integers(items)


def _by_place(counts: Integers) -> Integers:
    """Return the order that puts the first items of all lists first, then the second ones, and so on."""
    starts = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.argsort(within, kind="stable")


def _decoded(read: ColumnReader) -> LayoutDocument:
    kinds = read.texts()
    if not all(0 < len(kind) <= _LONGEST_KIND for kind in kinds):
        raise ValueError("a kind of file has no name, or a long one")
    sizes = read.integers(len(kinds)).tolist()
    counts = [read.integers(len(kinds)) for _ in range(3)]
    names = read.texts()
    if not ITEM_SIZES.keys() >= set(names):
        raise ValueError("a dtype is unknown")

    def dtypes(count: int) -> list[str]:
        return list(map(names.__getitem__, read.integers(count, len(names)).tolist()))

    extents, tensors, checked = map(_total, counts)
    starts = read.integers(extents).tolist()
    extent_dtypes = dtypes(extents)
    shapes = _cut(*_lists(read, extents))
    named = read.integers(extents)
    if (named > np.repeat(counts[1], counts[0])).any():
        raise ValueError("an extent is named after no tensor")
    own = iter(paths_of(read.texts(int((named == 0).sum()))))

    texts = read.texts(tensors)
    paths = paths_of(texts)
    tensor_dtypes = dtypes(tensors)
    ranks, items = _lists(read, tensors, _NATURAL)
    tensor_shapes = _cut(ranks, items)
    strides = _cut(ranks, read.integers(items.size, _NATURAL))
    places = (read.integers(tensors) - 1).tolist()
    offsets = read.integers(tensors).tolist()
    marks = map(_MARKS.__getitem__, read.integers(tensors, len(_MARKS)).tolist())
    boxes = _boxes(read, ranks)
    # Plain maps, here and below, as a call of Python for every tensor would take longer than the rest.
    tensor_list = list(map(Tensor, paths, tensor_dtypes, tensor_shapes, strides, places, offsets, marks, boxes))

    bases = np.repeat(np.cumsum(counts[1]) - counts[1], counts[0])
    named_paths = [
        paths[number - 1] if number > base else next(own)
        for number, base in zip((named + bases).tolist(), bases.tolist(), strict=True)
    ]
    extent_list = list(map(Extent, starts, extent_dtypes, shapes, named_paths))
    checked_list = _checked(read, checked)
    units = _units(read, dtypes)
    read.end()
    rows: list[Iterator[Any]] = [iter(extent_list), iter(tensor_list), iter(checked_list), iter(texts)]
    files = []
    for kind, size, *own_counts in zip(kinds, sizes, *(column.tolist() for column in counts), strict=True):
        parts = [list(islice(items, count)) for items, count in zip(rows, (*own_counts, own_counts[1]), strict=True)]
        files.append(FileLayout(kind, size, parts[0], parts[1], parts[2], texts=parts[3]))
    return LayoutDocument(files, units)


def _total(counts: Integers) -> int:
    """Return the sum of some counts."""
    if float(counts.sum(dtype=np.float64)) >= LIMIT:
        raise ValueError("there are too many items")
    return int(counts.sum())


def _lists(read: ColumnReader, count: int, limit: int = LIMIT) -> tuple[Integers, Integers]:
    """Return the lengths of `count` lists, and their items."""
    ranks = read.integers(count, MOST_AXES + 1)
    return ranks, read.integers(int(ranks.sum()), limit)


def _cut(counts: Integers, items: Integers) -> list[tuple[int, ...]]:
    """Return items as tuples of given lengths."""
    flat = iter(items.tolist())
    if counts.size and (counts == counts[0]).all() and counts[0]:
        return list(zip(*[flat] * int(counts[0]), strict=True))
    return [tuple(islice(flat, count)) for count in counts.tolist()]


def _boxes(read: ColumnReader, ranks: Integers) -> list[Box | None]:
    found: list[Box | None] = [None] * ranks.size
    numbers = read.integers(limit=max(ranks.size, 1))
    if ranks.size < numbers.size or (np.diff(numbers) <= 0).any():
        raise ValueError("shards are not in order")
    lengths = ranks[numbers]
    count = int(lengths.sum())
    firsts, wholes = (_cut(lengths, read.integers(count, _NATURAL)) for _ in range(2))
    for number, first, whole in zip(numbers.tolist(), firsts, wholes, strict=True):
        found[number] = Box(first, whole)
    return found


def _checked(read: ColumnReader, count: int) -> list[Checked]:
    names = read.texts(count)
    starts = read.integers(count)
    stops = starts + read.integers(count)
    counts = read.integers(count)
    stored = read.integers(_total(counts))
    positions = np.empty_like(stored)
    positions[_by_place(counts)] = stored
    return list(map(Checked, names, starts.tolist(), stops.tolist(), _cut(counts, positions)))


def _units(read: ColumnReader, dtypes: Callable[[int], list[str]]) -> list[Unit]:
    keys = read.texts()
    signatures = read.texts(len(keys))
    if any(len(one) != 16 or not set(one) <= set("0123456789abcdef") for one in signatures):
        raise ValueError("a signature is none")
    named = dtypes(len(keys))
    if not CODED.issuperset(named):
        raise ValueError("a unit has a dtype that is coded by parts")
    ranks, items = _lists(read, len(keys))
    shapes = _cut(ranks, items)
    roles = read.texts(len(keys))
    counts = read.integers(len(keys))
    columns = [read.integers(_total(counts)) for _ in range(4)]
    if (items < 1).any() or (columns[3] < 1).any():
        raise ValueError("a unit is empty")
    flat = map(Member, *(column.tolist() for column in columns))
    members = [tuple(islice(flat, count)) for count in counts.tolist()]
    return list(map(Unit, keys, signatures, named, shapes, roles, members))


def _as_text(name: str) -> str:
    """Return a name in an archive as text of the document; only messages use it."""
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def check_layout(layout: LayoutDocument, document: VersionDocument) -> None:
    """Raise `IntegrityError` unless a layout fits the files and objects of a version.

    Extents must lie in the files and tensors in their extents. Every element must belong to one member of one unit,
    except for dropped elements.
    """
    wrong = _wrong_part(layout, document)
    if wrong:
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
    shards = gather_shards((entry.path, file) for entry, file in zip(document.files, layout.files, strict=True))
    is_whole = all(fit_together([tensor for _, tensor in parts]) for parts in shards.values())
    return "" if is_whole else "shards"


def _is_uncovered(layout: LayoutDocument, *, gaps: bool) -> bool:
    """Return whether an element has not its unit's dtype, or is in several members, or (without `gaps`) in none."""
    extents = [extent for file in layout.files for extent in file.extents]
    lengths = np.array([len(file.extents) for file in layout.files], np.int64)
    sizes = np.array([prod(extent.shape) for extent in extents], np.int64)
    members = [member for unit in layout.units for member in unit.members]
    if not members:
        return not gaps and bool(sizes.any())
    file, extent, first, count = (
        np.array([getattr(member, part) for member in members], np.int64)
        for part in ("file", "extent", "first", "count")
    )
    if file.max() >= lengths.size or (extent >= lengths[file]).any():
        return True
    place = (np.cumsum(lengths) - lengths)[file] + extent
    order = np.lexsort((first, place))
    within, begins = place[order], first[order]
    ends = begins + count[order]
    follows = within[1:] == within[:-1]
    if (ends > sizes[within]).any() or (begins[1:] < ends[:-1])[follows].any():
        return True
    if not gaps and int(count.sum()) != int(sizes.sum()):
        return True
    units = np.repeat(np.arange(len(layout.units)), [len(unit.members) for unit in layout.units])
    names = {name: number for number, name in enumerate(ITEM_SIZES)}
    coded = np.array([names[PARTS.get(one.dtype, one.dtype)] for one in extents])
    if (coded[place] != np.array([names[unit.dtype] for unit in layout.units])[units]).any():
        return True
    scale = np.array([2 if one.dtype in PARTS else 1 for one in extents])
    # As integers: members are disjoint, so that no sum exceeds the bytes of the files.
    totals = np.zeros(len(layout.units), np.int64)
    np.add.at(totals, units, count * scale[place])
    return bool(totals.tolist() != [prod(unit.shape) for unit in layout.units])
