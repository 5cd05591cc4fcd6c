"""Cuts a version like its parent where names or shapes moved, so that each old part is stored against itself.

A unit of the parent whose elements the version has under other names, before new rows, within a fused tensor or in the
parts of one is cut out again and keeps its signature; the rest becomes units of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from operator import attrgetter
from typing import NamedTuple

from msgspec import structs

from ckstore.codecs.lattice import FLOATS
from ckstore.formats.layout import FileLayout, Path
from ckstore.formats.renames import LONGEST, Named, matches
from ckstore.objects.identity import digest
from ckstore.objects.roles import state_of
from ckstore.objects.units import SMALL, Member, Piece, Unit, cut_pieces, parts_of_piece, planned_pieces

#: Words from the end in which the names of the parts of a fused tensor differ: that of a moment ends in `.exp_avg`.
_FUSED = 3

#: The prefix of the keys of objects of several tensors that were one.
_APART = "apart:"

#: Dicts of weights that are tried for an optimiser's list.
_DICTS = 8

#: Last parts of the names of statistics of layers, which no optimiser has in its list.
_STATISTICS = ("running_mean", "running_var")

_Shape = tuple[int, ...]
#: The prefix of a file, and the path of a list or dict in it.
_List = tuple[str, Path]

#: Digits of the number of a part of a stacked tensor, at most.
_DIGITS = 9


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


class _Stretch(NamedTuple):
    """Elements of an earlier piece in a later one, by number: the first of them and their number; the first there."""

    first: int
    size: int
    piece: int
    at: int


class _One(NamedTuple):
    piece: Piece
    words: tuple[str, ...]


class _Key(NamedTuple):
    """The properties that the parts of one piece share: names without the word at a place, dtype, shape."""

    at: int
    words: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    is_stack: bool


def continued(version: Cut, parent: Cut, apart: Container[tuple[int, int]] = ()) -> list[Unit]:
    """Return the units of a version, some as continuations of its parent's.

    `version` is cut by names and shapes alone; extents `apart`, by file and number, stay as they are.
    """
    known = {unit.signature: unit for unit in parent.units}
    fresh = {
        place
        for unit in version.units
        if not _is_same(unit, known.get(unit.signature)) and not _lies_in(unit, apart)
        for place in _extents(unit)
    }
    if not fresh:
        return list(version.units)
    named = _named(version, parent)
    fresh |= _renumbered(*named)
    after = _Pieces(named[0], [unit for unit in version.units if not fresh.isdisjoint(_extents(unit))])
    # A tensor is cut again as a whole, although the parent has some of its parts.
    same = [unit for unit in version.units if not after.has(unit)]
    own = {unit.signature for unit in same}
    left = [unit for unit in parent.units if unit.signature not in own]
    if not left:
        return list(version.units)
    before = _Pieces(named[1], left)
    moves = _moves(before, after)
    # A tensor that grows again has its last rows cut again while they are few.
    growing = {number for number, (*_, last) in moves.items() if last.at + last.size < after.pieces[last.piece].count}
    kept: list[tuple[Unit, list[_Place]]] = []
    for unit in left:
        places = [before.place(member) for member in unit.members]
        is_tail = unit.count < SMALL and all(place.first and place.piece in growing for place in places)
        found = [_moved(place, moves) for place in places]
        if not is_tail and all(found):
            kept.append((unit, [place for part in found for place in part]))
    if not kept:
        return list(version.units)
    keys = _Keys(unit.key for unit in same)
    renewed = [_renewed(unit, places, after.pieces, keys) for unit, places in kept]
    rest = [*_rest(after.pieces, [place for _, places in kept for place in places], keys)]
    return [*same, *renewed, *_signed(rest, {unit.signature for unit in [*same, *renewed]})]


def beginnings(version: Cut, parent: Cut) -> dict[str, str]:
    """Return the parent's units whose first elements a version has as a unit of its own, by signature of that one."""
    known, own = ({unit.signature for unit in cut.units} for cut in (parent, version))
    fresh = [unit for unit in version.units if unit.signature not in known]
    left = [unit for unit in parent.units if unit.signature not in own]
    if not fresh or not left:
        return {}
    named = _named(version, parent)
    after, before = _Pieces(named[0], fresh), _Pieces(named[1], left)
    moves = _moves(before, after)
    found: dict[tuple[int, int], tuple[Unit, int]] = {}
    for unit in left:
        piece, first, size = before.beginning(unit)
        for start, taken, other, at in moves.get(piece, ()):
            if start <= first < start + taken:
                found[other, at + first - start] = unit, min(size, start + taken - first)
    longer = {}
    for unit in fresh:
        piece, first, size = after.beginning(unit)
        whole, most = found.get((piece, first), (unit, 0))
        if size == sum([member.count for member in unit.members]) <= most and whole.dtype == unit.dtype:
            longer[unit.signature] = whole.signature
    return longer


def _signed(units: Iterable[Unit], signatures: set[str]) -> Iterator[Unit]:
    """Yield units with signatures of their own: a part of a tensor that grew may look like a former one."""
    for unit in units:
        while unit.signature in signatures:  # Also a part of that name may have moved since.
            unit = structs.replace(unit, signature=digest(f"{unit.signature} {unit.key}".encode())[:16])
        signatures.add(unit.signature)
        yield unit


def _is_same(unit: Unit, former: Unit | None) -> bool:
    """Return whether a unit is the parent's of its signature, which may have moved."""
    return former is not None and (former.key == unit.key or unit.is_bundle)


def _extents(item: Unit | Piece) -> Iterator[tuple[int, int]]:
    """Yield the files and extents of an item's members."""
    return ((member.file, member.extent) for member in item.members)


def _lies_in(unit: Unit, apart: Container[tuple[int, int]]) -> bool:
    return (unit.members[0].file, unit.members[0].extent) in apart


class _Keys:
    """The keys of a version's units."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = set(keys)
        #: The last number tried after each name.
        self._numbers: dict[str, int] = {}

    def free(self, key: str) -> str:
        """Return a key, with the next number that no unit has if one has it, and add it."""
        name, mark, number = key.rpartition("#")
        if key in self._keys and not (mark and number.isdecimal() and len(number) < 10):
            name, number = key, "-1"
        while key in self._keys:
            self._numbers[name] = max(int(number), self._numbers.get(name, -1)) + 1
            number = str(self._numbers[name])
            key = f"{name}#{number}"
        self._keys.add(key)
        return key


class _Pieces:
    """The pieces of a version that some of its units hold, and their names."""

    def __init__(self, named: Iterable[tuple[Piece, Named]], units: Iterable[Unit]) -> None:
        wanted = {place for unit in units for place in _extents(unit)}
        chosen = [one for one in named if any((member.file, member.extent) in wanted for member in one[0].members)]
        self.pieces = [piece for piece, _ in chosen]
        self.names = [name for _, name in chosen]
        self._starts: dict[tuple[int, int], tuple[int, int]] = {}
        for number, piece in enumerate(self.pieces):
            start = 0
            for member in piece.members:
                self._starts[member.file, member.extent] = number, start
                start += member.count

    def without(self, known: Container[int]) -> dict[int, _One]:
        """Return the pieces that are not known, by number."""
        return {
            number: _One(piece, name.words)
            for number, (piece, name) in enumerate(zip(self.pieces, self.names, strict=True))
            if number not in known
        }

    def has(self, unit: Unit) -> bool:
        """Return whether the elements of a unit are in the pieces."""
        return (unit.members[0].file, unit.members[0].extent) in self._starts

    def place(self, member: Member) -> _Place:
        """Return the place of a unit's member."""
        number, start = self._starts[member.file, member.extent]
        return _Place(number, start + member.first, member.count)

    def beginning(self, unit: Unit) -> _Place:
        """Return the stretch of a piece with which a unit begins."""
        piece, first, size = self.place(unit.members[0])
        for member in unit.members[1:]:
            place = self.place(member)
            if place[:2] != (piece, first + size):
                break
            size += place.size
        return _Place(piece, first, size)


def _moves(before: _Pieces, after: _Pieces) -> dict[int, list[_Stretch]]:
    """Return the stretches of each earlier piece that later pieces have, in order, by number of the piece.

    Names tell, dtypes and shapes; values are not compared. A piece that became smaller keeps its first elements.
    """
    old, new = before.pieces, after.pieces
    same = {
        number: other
        for number, other in matches(before.names, after.names).items()
        if old[number].dtype == new[other].dtype and old[number].shape[1:] == new[other].shape[1:]
    }
    found = {
        number: [_Stretch(0, min(old[number].count, new[other].count), other, 0)] for number, other in same.items()
    }
    gone, added = before.without(same), after.without(set(same.values()))
    for whole, parts in _unions(gone, added):
        found |= {number: [_Stretch(0, size, whole, first)] for number, first, size in _laid_out(parts, gone)}
        for number in parts:
            del gone[number]
        del added[whole]
    for whole, parts in _unions(added, gone):
        found[whole] = [_Stretch(first, size, number, 0) for number, first, size in _laid_out(parts, added)]
    return found


def _named(version: Cut, parent: Cut) -> list[list[tuple[Piece, Named]]]:
    """Return the pieces of two versions; states by number have their parameters' names if numbers came or went."""
    planned = [planned_pieces(cut.files) for cut in (version, parent)]
    numbered = [
        {(piece.prefix, piece.path[:-1]) for piece in pieces if len(piece.path) > 1 and isinstance(piece.path[-2], int)}
        for pieces in planned
    ]
    lists: list[dict[_List, dict[int, Path]]] = [{}, {}]
    if numbered[0] != numbered[1]:
        cuts = zip((version, parent), planned, strict=True)
        lists = [_parameters(_in_order(pieces, cut.files)) for cut, pieces in cuts]
    for known, other in (lists, lists[::-1]):
        for place in known.keys() - other.keys():
            del known[place]
    for place in [*lists[0]]:
        if _has_new_groups(version.files, place, lists[0][place].keys() - lists[1][place].keys()):
            del lists[0][place], lists[1][place]
    return [[(piece, _name(piece, known)) for piece in pieces] for pieces, known in zip(planned, lists, strict=True)]


def _has_new_groups(files: Iterable[tuple[str, FileLayout]], place: _List, added: Collection[int]) -> bool:
    """Return whether numbers are those of an optimiser's last groups, added to it as by `add_param_group` of torch."""
    node = next((layout.tree for prefix, layout in files if prefix == place[0]), None)
    for segment in place[1][:-1]:
        node = node.get(segment) if isinstance(node, dict) else None
    groups = node.get("param_groups") if isinstance(node, dict) else None
    last: set[int] = set()
    for group in reversed(groups if isinstance(groups, list) else []):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or len(last) >= len(added):
            break
        last.update(number for number in numbers if isinstance(number, int))
    return bool(added) and last == added


def _name(piece: Piece, lists: Mapping[_List, Mapping[int, Path]]) -> Named:
    path = (*piece.path, piece.mark) if piece.mark else piece.path
    place, number = _place_in_list(piece) if lists else (("", ()), -1)
    parameter = lists.get(place, {}).get(number)
    if parameter is None:
        return Named(piece.prefix, path, piece.dtype, piece.shape)
    first = len(place[1])
    name = (*path[:first], *parameter, *path[first + 1 :])
    return Named(piece.prefix, name, piece.dtype, piece.shape, path)


def _place_in_list(piece: Piece) -> tuple[_List, int]:
    """Return the list in which an optimiser keeps a state such as `state/[3]/exp_avg`, and 3; -1 for other tensors."""
    number = piece.path[-2] if len(piece.path) > 1 else -1
    if not isinstance(number, int) or state_of(piece.path, piece.tree) is None:
        number = -1
    return (piece.prefix, piece.path[:-2]), number


def _in_order(pieces: Iterable[Piece], files: Iterable[tuple[str, FileLayout]]) -> list[Piece]:
    """Return pieces in the order of their tensors.

    Files of torch before 2.7 have values in the order of their numbers as text, older ones in any order.
    """
    firsts: dict[tuple[int, int], int] = {}
    for file, (_, layout) in enumerate(files):
        for number, tensor in enumerate(layout.tensors):
            firsts.setdefault((file, tensor.extent), number)

    def place(piece: Piece) -> tuple[int, int]:
        first = piece.members[0]
        return first.file, firsts.get((first.file, first.extent), 0)

    return sorted(pieces, key=place)


def _parameters(pieces: Iterable[Piece]) -> dict[_List, dict[int, Path]]:
    """Return the paths of the parameters whose states are in lists, by number.

    Optimisers keep the order of the parameters: a list's items are those of a dict that has as many of each shape, in
    the same file. Another file may have them in alphabetical order.
    """
    lists: dict[_List, dict[int, _Shape]] = {}
    weights: dict[str, dict[Path, dict[_Shape, list[Path]]]] = {}
    for piece in pieces:
        place, number = _place_in_list(piece)
        if number >= 0:
            shapes = lists.setdefault(place, {})
            shapes[number] = max(piece.shape, shapes.get(number, ()), key=_size)
        elif (
            piece.dtype in FLOATS
            and state_of(piece.path, piece.tree) is None
            and not str(*piece.path[-1:]).endswith(_STATISTICS)
        ):
            alike = weights.setdefault(piece.prefix, {}).setdefault(piece.path[:-1], {})
            alike.setdefault(piece.shape, []).append(piece.path)
    found = {}
    for place, shapes in lists.items():
        counts = Counter(shapes.values())
        for paths in islice(weights.get(place[0], {}).values(), _DICTS):
            if all(len(paths.get(shape, ())) == count for shape, count in counts.items()):
                following = {shape: iter(paths[shape]) for shape in counts}
                found[place] = {number: next(following[shape]) for number, shape in sorted(shapes.items())}
                break
    return found


def _size(shape: _Shape) -> tuple[int, int]:
    """Return a size by which a parameter of one element is larger than its counter, which has no axis."""
    return prod(shape), len(shape)


def _renumbered(after: Iterable[tuple[Piece, Named]], before: Iterable[tuple[Piece, Named]]) -> set[tuple[int, int]]:
    """Return the extents of states whose numbers were those of other parameters."""
    former = {(name.prefix, name.number): name for _, name in before if name.number}
    found: set[tuple[int, int]] = set()
    for piece, name in after if former else ():
        then = former.get((name.prefix, name.number), name)
        if then.path != name.path and then.words != name.words:
            found.update(_extents(piece))
    return found


def _unions(parts: Mapping[int, _One], wholes: Mapping[int, _One]) -> list[tuple[int, list[int]]]:
    """Return the pieces that together have the elements of others, each with the numbers of these in their order.

    The parts of a fused piece differ in one word of their names, in which its name has theirs in their order; those of
    a stacked one in a number, which its name lacks.
    """
    groups: dict[_Key, list[int]] = {}
    for number, (piece, words) in parts.items():
        for key in (*_fused(words, piece), *_stacked(words, piece)):
            groups.setdefault(key, []).append(number)
    # The elements of all parts together; a stranger's model may have thousands of one form.
    totals = {key: sum(parts[number].piece.count for number in numbers) for key, numbers in groups.items()}
    found: list[tuple[int, list[int]]] = []
    taken: set[int] = set()
    for whole, (piece, words) in wholes.items():
        form = piece.dtype, piece.shape[1:]
        stacks = (_Key(at, words, *form, is_stack=True) for at in range(min(len(words) + 1, LONGEST)))
        for key in (*_fused(words, piece), *stacks):
            if totals.get(key) == piece.count and taken.isdisjoint(groups[key]):
                taken.update(groups[key])
                found.append((whole, sorted(groups[key], key=partial(_rank, parts, words, key))))
                break
    return found


def _fused(words: tuple[str, ...], piece: Piece) -> Iterator[_Key]:
    """Yield the forms of pieces that may be parts of one: names without a word near the end, dtypes, shapes of rows."""
    for at in range(2, min(_FUSED, len(words)) + 1):
        yield _Key(-at, (*words[:-at], *words[1 - at :]), piece.dtype, piece.shape[1:], is_stack=False)


def _stacked(words: tuple[str, ...], piece: Piece) -> Iterator[_Key]:
    """Yield the forms of pieces that may be the rows of one: names without a number, dtypes, shapes."""
    for at, word in enumerate(words[:LONGEST]):
        if word.isdecimal() and len(word) <= _DIGITS:
            yield _Key(at, (*words[:at], *words[at + 1 :]), piece.dtype, piece.shape, is_stack=True)


def _rank(parts: Mapping[int, _One], whole: tuple[str, ...], key: _Key, number: int) -> int:
    """Return the place of a part: its number, or that of its name, such as `q_proj`, in a name such as `qkv_proj`."""
    word = parts[number].words[key.at]
    return int(word) if key.is_stack else whole[key.at].find(word.split("_")[0])


def _laid_out(parts: Iterable[int], of: Mapping[int, _One]) -> Iterator[tuple[int, int, int]]:
    """Yield each part with its first element in the whole and their number."""
    first = 0
    for number in parts:
        yield number, first, of[number].piece.count
        first += of[number].piece.count


def _moved(place: _Place, moves: Mapping[int, Sequence[_Stretch]]) -> list[_Place]:
    """Return the places of an earlier piece's stretch in later pieces; none if these lack some of it."""
    stretches = moves.get(place.piece, ())
    found: list[_Place] = []
    position, stop = place.first, place.first + place.size
    number = bisect_right(stretches, position, key=attrgetter("first")) - 1
    while 0 <= number < len(stretches) and position < stop:
        first, size, piece, at = stretches[number]
        taken = min(stop, first + size) - position
        if taken <= 0:
            break
        found.append(_Place(piece, at + position - first, taken))
        position, number = position + taken, number + 1
    return found if position == stop else []


def _renewed(unit: Unit, places: Sequence[_Place], pieces: Sequence[Piece], keys: _Keys) -> Unit:
    """Return a unit of the parent with the elements of this version, under a new key.

    A tensor that came apart is named in the key of its elements, with a prefix, as another one may have its name now.
    """
    piece = pieces[places[0].piece]
    if unit.is_bundle:
        key = unit.key
    elif any(place.piece != places[0].piece for place in places):
        key = _APART + unit.key.removeprefix(_APART)
    else:
        key = f"{piece.prefix}{piece.name}" + "#0" * (sum(place.size for place in places) < piece.count)
    roles = {pieces[place.piece].role for place in places}
    role = roles.pop() if len(roles) == 1 else "other"
    if role == "vector" and not unit.is_bundle:  # No ingest makes such a unit.
        role = "other"
    members = tuple(member for place in places for member in pieces[place.piece].members_of(*place[1:]))
    return structs.replace(unit, key=keys.free(key), role=role, members=members)


def _rest(pieces: Sequence[Piece], taken: Iterable[_Place], keys: _Keys) -> Iterator[Unit]:
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
                    for unit in parts_of_piece(part, f"{part.prefix}{part.name}"):
                        yield structs.replace(unit, key=keys.free(f"{piece.prefix}{piece.name}#0"))
                else:
                    small.append(part)
            position = first + count
    for unit in cut_pieces(small):
        yield structs.replace(unit, key=keys.free(unit.key))


def _part(piece: Piece, first: int, count: int) -> Piece:
    """Return some elements of a piece, whole rows if they are, under a name of their own."""
    width = prod(piece.shape[1:])
    shape = (count,) if first % width or count % width else (count // width, *piece.shape[1:])
    members = piece.members_of(first, count)
    return structs.replace(
        piece, shape=shape, count=count, members=members, mark=f"{piece.mark}+{first}", whole=piece.count
    )
