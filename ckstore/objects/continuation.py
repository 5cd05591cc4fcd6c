"""Cuts a version like its parent where names or shapes moved, so that each old part is stored against itself.

A unit of the parent whose elements the version has under other names, before new rows or within a fused tensor, is cut
out again and keeps its signature; the rest becomes units of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from msgspec import structs

from ckstore.formats.layout import FileLayout
from ckstore.formats.renames import LONGEST, Named, matches
from ckstore.objects.identity import digest
from ckstore.objects.units import SMALL, Member, Piece, Unit, cut_pieces, parts_of_piece, planned_pieces


@dataclass(frozen=True, slots=True)
class Cut:
    """The files of a version, as (prefix, layout), and its units."""

    files: Sequence[tuple[str, FileLayout]]
    units: Sequence[Unit]


class _Place(NamedTuple):
    """A stretch of a piece, by number."""

    piece: int
    first: int
    size: int


def continued(version: Cut, parent: Cut, apart: Container[tuple[int, int]] = ()) -> list[Unit]:
    """Return the units of a version, some as continuations of its parent's.

    `version` is cut by names and shapes alone; extents `apart`, by file and number, stay as they are.
    """
    known = {unit.signature for unit in parent.units}
    fresh = [unit for unit in version.units if unit.signature not in known and not _lies_in(unit, apart)]
    if not fresh:
        return list(version.units)
    after = _Pieces(version.files, fresh)
    # A tensor is cut again as a whole, although the parent has some of its parts.
    same = [unit for unit in version.units if not after.has(unit)]
    own = {unit.signature for unit in same}
    left = [unit for unit in parent.units if unit.signature not in own]
    if not left:
        return list(version.units)
    before = _Pieces(parent.files, left)
    targets = _targets(before.pieces, after.pieces)
    # A tensor that grows again has its last rows cut again while they are few.
    growing = {
        number
        for number, (at, first) in targets.items()
        if first + before.pieces[number].count < after.pieces[at].count
    }
    kept: list[tuple[Unit, list[_Place]]] = []
    for unit in left:
        places = [before.place(member) for member in unit.members]
        is_tail = unit.count < SMALL and all(place.first and place.piece in growing for place in places)
        moved = [_moved(place, targets, after.pieces) for place in places]
        if not is_tail and all(moved):
            kept.append((unit, [place for place in moved if place is not None]))
    if not kept:
        return list(version.units)
    keys = {unit.key for unit in same}
    found = [_renewed(unit, places, after.pieces, keys) for unit, places in kept]
    rest = [*_rest(after.pieces, [place for _, places in kept for place in places], keys)]
    return [*same, *found, *_signed(rest, {unit.signature for unit in [*same, *found]})]


def _signed(units: Iterable[Unit], signatures: set[str]) -> Iterator[Unit]:
    """Yield units with signatures of their own: a part of a tensor that grew may look like a former one."""
    for unit in units:
        if unit.signature in signatures:
            unit = structs.replace(unit, signature=digest(f"{unit.signature} {unit.key}".encode())[:16])
        signatures.add(unit.signature)
        yield unit


def _lies_in(unit: Unit, apart: Container[tuple[int, int]]) -> bool:
    return (unit.members[0].file, unit.members[0].extent) in apart


class _Pieces:
    """The pieces of a version that some of its units hold."""

    def __init__(self, files: Sequence[tuple[str, FileLayout]], units: Iterable[Unit]) -> None:
        wanted = {(member.file, member.extent) for unit in units for member in unit.members}
        self.pieces = [
            piece
            for piece in planned_pieces(files)
            if any((member.file, member.extent) in wanted for member in piece.members)
        ]
        self._starts: dict[tuple[int, int], tuple[int, int]] = {}
        for number, piece in enumerate(self.pieces):
            start = 0
            for member in piece.members:
                self._starts[member.file, member.extent] = number, start
                start += member.count

    def has(self, unit: Unit) -> bool:
        """Return whether the elements of a unit are in the pieces."""
        return (unit.members[0].file, unit.members[0].extent) in self._starts

    def place(self, member: Member) -> _Place:
        """Return the place of a unit's member."""
        number, start = self._starts[member.file, member.extent]
        return _Place(number, start + member.first, member.count)


def _targets(before: Sequence[Piece], after: Sequence[Piece]) -> dict[int, tuple[int, int]]:
    """Return the later piece that has the elements of an earlier one, and the first of them there, by number."""
    named = _named(before), _named(after)
    found = {
        number: (other, 0)
        for number, other in matches(*named).items()
        if before[number].dtype == after[other].dtype and before[number].shape[1:] == after[other].shape[1:]
    }
    joint: dict[tuple[object, ...], list[int]] = {}
    for number, piece in enumerate(before):
        if number not in found:
            words = named[0][number].words
            if len(words) > 1:
                joint.setdefault((words[:-2], words[-1:], piece.dtype, piece.shape[1:]), []).append(number)
            for at, word in enumerate(words[:LONGEST]):
                if word.isdigit():
                    stack = "stacked", words[:at] + words[at + 1 :], piece.dtype, piece.shape
                    joint.setdefault(stack, []).append(number)
    # The elements of all parts together; a stranger's model may have thousands of one form.
    totals = {key: sum(before[number].count for number in parts) for key, parts in joint.items()}
    taken = {other for other, _ in found.values()}
    for other, piece in enumerate(after):
        if other in taken:
            continue
        words = named[1][other].words
        form = piece.dtype, piece.shape[1:]
        fused: tuple[object, ...] = (words[:-2], words[-1:], *form)
        stacked: tuple[object, ...] = ("stacked", words, *form)
        for key in (fused, stacked) if len(words) > 1 else (stacked,):
            if totals.get(key) != piece.count:
                continue
            parts = joint.pop(key)
            del totals[key]
            if found.keys().isdisjoint(parts):
                if key is fused:
                    parts.sort(key=lambda number: _rank(named[0][number].words[-2], words[-2]))
                found |= zip(parts, _firsts(before, parts, other), strict=True)
                break
    return found


def _named(pieces: Iterable[Piece]) -> list[Named]:
    return [
        Named(piece.prefix, (*piece.path, piece.mark) if piece.mark else piece.path, piece.dtype, piece.shape)
        for piece in pieces
    ]


def _rank(part: str, whole: str) -> int:
    """Return the place of a part's name, such as `q_proj`, in the name of the fused tensor, such as `qkv_proj`."""
    return whole.find(part.split("_")[0])


def _firsts(before: Sequence[Piece], parts: Sequence[int], other: int) -> Iterator[tuple[int, int]]:
    first = 0
    for number in parts:
        yield other, first
        first += before[number].count


def _moved(place: _Place, targets: Mapping[int, tuple[int, int]], after: Sequence[Piece]) -> _Place | None:
    """Return the place of an earlier piece's stretch in a later piece; None if that lacks some of it."""
    target, first = targets.get(place.piece, (-1, 0))
    first += place.first
    return _Place(target, first, place.size) if target >= 0 and first + place.size <= after[target].count else None


def _renewed(unit: Unit, places: Sequence[_Place], pieces: Sequence[Piece], keys: set[str]) -> Unit:
    """Return a unit of the parent with the elements of this version, under a new key that `keys` gets."""
    piece = pieces[places[0].piece]
    if unit.is_bundle:
        key = unit.key
    else:
        key = f"{piece.prefix}{piece.name}" + "#0" * (places[0].size < piece.count)
    roles = {pieces[place.piece].role for place in places}
    role = roles.pop() if len(roles) == 1 else "other"
    if role == "vector" and not unit.is_bundle:  # No ingest makes such a unit.
        role = "other"
    members = tuple(member for place in places for member in pieces[place.piece].members_of(*place[1:]))
    return structs.replace(unit, key=_free(key, keys), role=role, members=members)


def _rest(pieces: Sequence[Piece], taken: Iterable[_Place], keys: set[str]) -> Iterator[Unit]:
    """Yield units of the elements that are not taken."""
    stretches: dict[int, list[_Place]] = {}
    for place in taken:
        stretches.setdefault(place.piece, []).append(place)
    small: list[Piece] = []
    for number, piece in enumerate(pieces):
        position = 0
        for first, count in [*sorted(place[1:] for place in stretches.get(number, ())), (piece.count, 0)]:
            if first > position:
                part = piece if first - position == piece.count else _part(piece, position, first - position)
                if part is not piece and piece.count >= SMALL:
                    for unit in parts_of_piece(part):
                        yield structs.replace(unit, key=_free(f"{piece.prefix}{piece.name}#0", keys))
                else:
                    small.append(part)
            position = first + count
    for unit in cut_pieces(small):
        yield structs.replace(unit, key=_free(unit.key, keys))


def _part(piece: Piece, first: int, count: int) -> Piece:
    """Return some elements of a piece, whole rows if they are, under a name of their own."""
    width = prod(piece.shape[1:])
    shape = (count,) if first % width or count % width else (count // width, *piece.shape[1:])
    members = piece.members_of(first, count)
    return structs.replace(
        piece, shape=shape, count=count, members=members, mark=f"{piece.mark}+{first}", whole=piece.count
    )


def _free(key: str, keys: set[str]) -> str:
    """Return a key with the next number that `keys` lacks, and add it."""
    name, mark, number = key.rpartition("#")
    while key in keys:
        if not (mark and number.isdecimal() and len(number) < 10):
            name, mark, number = key, "#", "-1"
        number = str(int(number) + 1)
        key = f"{name}#{number}"
    keys.add(key)
    return key
