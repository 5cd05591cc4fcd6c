"""Cuts the extents of a version into objects: parts of large extents, bundles of small ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckstore.codecs.lattice import CHUNK, PARTS, part_dtype
from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import FileLayout, Path, Tensor
from ckstore.formats.paths import path_to_text, texts_of
from ckstore.formats.shards import directory_of, gather_shards, join, slabs
from ckstore.objects.identity import digest
from ckstore.objects.roles import ADAM, State, may_be_states, state_of, tree_length, trees_of
from ckstore.runtime.cached import cached_property

#: dtypes of coded elements: complex numbers are coded by parts.
CODED = frozenset(ITEM_SIZES.keys() - PARTS.keys())

#: Extents below this many elements are bundled.
SMALL = 1 << 16

#: Extents above this many elements are cut into parts, so that memory does not grow with the size of a tensor.
PART = 1 << 22

#: A bundle is closed at this many elements.
BUNDLE = 1 << 21

#: Small extents with two or more axes and this many elements are weights; others are norms, biases and counters.
_SMALL_WEIGHT = 1 << 10

#: Last parts of the names of norms and biases. Others may be statistics or counters, which no step of training repairs.
_VECTORS = {"weight", "bias"}

#: Elements below which a role does not pay for a bundle of its own.
_ROLE_MINIMUM = 1 << 12


class Member(Struct, frozen=True, gc=False):
    """A stretch of one extent: its file, the extent's index in the file's layout, first element, number of elements."""

    file: int
    extent: int
    first: int
    count: int


class Unit(Struct, frozen=True, dict=True):
    """The elements that become one object.

    Attributes
    ----------
    key
        The typed path of the extent and the part's number, or a bundle's name.
    signature
        Matches units across versions: a digest of dtype, shape and members, or that of the parent's unit which this one
        continues under another name or next to new rows (`objects/continuation.py`).
    dtype
        dtype of the coded elements; complex numbers are coded by parts.
    shape
        In elements of `dtype`; the last axis is a row.
    role
        `weight`, `vector` (norms and biases), `first`, `second`, `state` (of an optimiser, by its place alone) or
        `other`, by the path: a hint for the planner. Correctness never depends on it.
    members
        The stretches of the files, in order; counts are in elements of the extent.
    """

    key: str
    signature: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    members: tuple[Member, ...]

    @cached_property
    def count(self) -> int:
        """Number of coded elements."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * ITEM_SIZES[self.dtype]

    @cached_property
    def chunk(self) -> int:
        """Elements of each chunk."""
        return chunk_of(self.shape)

    @property
    def member_counts(self) -> list[int]:
        """Number of coded elements of each member."""
        scale = self.count // max(sum([member.count for member in self.members]), 1)
        return [member.count * scale for member in self.members]

    @property
    def member_bytes(self) -> list[int]:
        """Number of bytes of each member."""
        return [count * ITEM_SIZES[self.dtype] for count in self.member_counts]

    @property
    def is_bundle(self) -> bool:
        """Whether the unit holds small extents."""
        return is_bundle(self.key)


def chunk_of(shape: tuple[int, ...]) -> int:
    """Return the elements of each chunk of a unit.

    They are about 2^18, whole slices of as many trailing axes as fit, so that rows stay whole.
    """
    inner = 1
    for size in reversed(shape):
        if inner * size > CHUNK:
            break
        inner *= size
    return inner * max(1, CHUNK // inner) if inner else 1


def is_bundle(key: str) -> bool:
    """Return whether the unit with a key holds small extents."""
    return key.startswith("bundle:")


class Piece(Struct, frozen=True, gc=False):
    """An extent, or the extents of the shards of one tensor, or a part of these: of `whole` elements."""

    prefix: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    count: int
    members: tuple[Member, ...]
    mark: str = ""
    tree: int = -1
    whole: int = 0

    @property
    def name(self) -> str:
        """The path as text, with the mark of a part."""
        return path_to_text(self.path) + self.mark

    @property
    def role(self) -> str:
        """The role of the tensor by its path and size."""
        return self.role_in(state_of(self.path, self.tree))

    def role_in(self, state: State | None) -> str:
        """Return the role of the tensor as an optimiser's state; of any other tensor for None."""
        count = self.whole or self.count
        if count >= SMALL:
            return "weight" if state is None else state.role
        if state is not None and state.role in ("first", "second"):
            return state.role if count > 1 or state.name in ADAM else "other"
        if len(self.shape) > 1 and count >= _SMALL_WEIGHT:
            return "weight" if state is None else state.role
        return "vector" if state is None and str(self.path[-1]).rpartition(".")[2] in _VECTORS else "other"

    def members_of(self, first: int, count: int) -> tuple[Member, ...]:
        """Return the stretches that hold `count` elements from `first` on."""
        found = []
        for member in self.members:
            low, high = max(first, 0), min(first + count, member.count)
            if low < high:
                found.append(Member(member.file, member.extent, member.first + low, high - low))
            first -= member.count
        return tuple(found)


def plan_units(
    files: Sequence[tuple[str, FileLayout]], cuts: Mapping[tuple[int, int], Sequence[int]] = MappingProxyType({})
) -> list[Unit]:
    """Return the units of a version's files, given as (prefix, layout); the prefix distinguishes a directory's files.

    Shards that are contiguous in their tensor are stored as the whole tensor, however it is sharded. Extents with
    `cuts`, by file and extent, are cut before these elements.
    """
    return cut_pieces(planned_pieces(files), cuts)


def planned_pieces(files: Sequence[tuple[str, FileLayout]]) -> list[Piece]:
    """Return the pieces of a version's files, with the trees of optimisers that they are in."""
    pieces = [*pieces_of(files)]
    trees = trees_of((piece.path, piece.count) for piece in pieces)
    return [replace(piece, tree=tree_length(piece.path, trees)) for piece in pieces] if trees else pieces


def cut_pieces(
    pieces: Sequence[Piece], cuts: Mapping[tuple[int, int], Sequence[int]] = MappingProxyType({})
) -> list[Unit]:
    """Return the units of pieces: parts of large ones, bundles of small ones."""
    units: list[Unit] = []
    small: defaultdict[tuple[str, str, str], list[_Small]] = defaultdict(list)
    texts = texts_of([piece.path for piece in pieces])
    are_states = may_be_states(texts) or any(piece.tree >= 0 for piece in pieces)
    has_numbers = {*map(type, chain.from_iterable([piece.path for piece in pieces]))} != {str}
    for piece, text in zip(pieces, texts, strict=True):
        firsts = cuts.get((piece.members[0].file, piece.members[0].extent))
        if firsts is not None:
            units.extend(_cut_parts(piece, f"{piece.prefix}{text}{piece.mark}", firsts))
            continue
        if piece.count >= SMALL:
            units.extend(parts_of_piece(piece, f"{piece.prefix}{text}{piece.mark}"))
            continue
        role = piece.role_in(state_of(piece.path, piece.tree) if are_states else None)
        tree = text[: text.find("/")] if len(piece.path) > 1 else ""
        group = (piece.prefix + tree, piece.dtype, "" if role == "other" else role)
        first, path = piece.members[0], _order(piece.path) if has_numbers else piece.path
        small[group].append(_Small(path, first.file, first.extent, piece, text + piece.mark))
    units.extend(_bundles(small))
    return units


def pieces_of(files: Sequence[tuple[str, FileLayout]]) -> Iterable[Piece]:
    """Yield the pieces of a version's files in order: an extent each, or the shards of one tensor."""
    layouts = [layout for _, layout in files]
    shards = gather_shards([(prefix.removesuffix("/"), layout) for prefix, layout in files])
    joined: dict[tuple[int, int], Piece | None] = {}
    marks: dict[tuple[int, int], str] = {}
    for (directory, path), found in shards.items():
        whole = join(found)
        ordered = slabs(found, layouts)
        places = [(file, shard.extent) for file, shard in found if shard.extent >= 0]
        if ordered is None:
            if len(found) > 1:
                marks |= {(file, shard.extent): _mark(shard) for file, shard in found if shard.extent >= 0}
            continue
        members = tuple(Member(file, shard.extent, 0, prod(shard.shape)) for file, shard in ordered)
        joined |= dict.fromkeys(places)
        joined[min(places)] = Piece(directory, path, whole.dtype, whole.shape, prod(whole.shape), members)
    for number, (prefix, layout) in enumerate(files):
        named = any(tensor.box is not None for tensor in layout.tensors)
        for index, extent in enumerate(layout.extents):
            place = number, index
            if place in joined:
                piece = joined[place]
                if piece is not None:
                    yield piece
            elif count := prod(extent.shape):
                start = directory_of(prefix.removesuffix("/")) if named else prefix
                members = (Member(number, index, 0, count),)
                yield Piece(start, extent.path, extent.dtype, extent.shape, count, members, marks.get(place, ""))


def _mark(shard: Tensor) -> str:
    """Return a suffix that distinguishes a shard from the others of its tensor.

    It is for shards that are not contiguous in the tensor: each becomes its own object.
    """
    first = () if shard.box is None else shard.box.first
    return f"[{','.join(f'{start}:{start + size}' for start, size in zip(first, shard.shape, strict=True))}]"


def parts_of_piece(piece: Piece, name: str) -> Iterable[Unit]:
    """Yield the units of a piece, by its name, that is in no bundle."""
    dtype, scale = PARTS.get(piece.dtype, piece.dtype), 2 if piece.dtype in PARTS else 1
    role = piece.role
    if piece.count <= PART:
        shape = (*piece.shape[:-1], piece.shape[-1] * scale)
        yield Unit(name, _signature(piece.dtype, [(name, piece.shape)]), dtype, shape, role, piece.members)
        return
    width = piece.shape[-1] if len(piece.shape) > 1 and piece.shape[-1] <= PART else 1
    step = PART // width * width
    for part, first in enumerate(range(0, piece.count, step)):
        count = min(step, piece.count - first)
        shape = (count // width, width * scale) if width > 1 else (count * scale,)
        signature = _signature(piece.dtype, [(name, piece.shape), (str(part), (count,))])
        yield Unit(f"{name}#{part}", signature, dtype, shape, role, piece.members_of(first, count))


def _cut_parts(piece: Piece, name: str, firsts: Sequence[int]) -> Iterable[Unit]:
    """Yield the parts of bytes that begin at given elements; a part may follow one of its length in another size."""
    for part, (first, stop) in enumerate(pairwise([*firsts, piece.count])):
        key, shape = f"{name}#{part}", (stop - first,)
        yield Unit(
            key,
            _signature(piece.dtype, [(key, shape)]),
            piece.dtype,
            shape,
            "other",
            piece.members_of(first, stop - first),
        )


class _Small(Struct, eq=False, gc=False):
    """A small piece with its name, and the fields that it is sorted by."""

    path: Any
    file: int
    extent: int
    piece: Piece
    name: str


def _bundles(small: Mapping[tuple[str, str, str], list[_Small]]) -> Iterable[Unit]:
    merged: dict[tuple[str, str, str], list[_Small]] = {}
    for (subtree, dtype, role), pieces in small.items():
        enough = sum([one.piece.count for one in pieces]) >= _ROLE_MINIMUM
        merged.setdefault((subtree, dtype, role if enough else ""), []).extend(pieces)
    for (subtree, dtype, role), pieces in sorted(merged.items(), key=lambda item: item[0]):
        pieces.sort(key=attrgetter("path", "file", "extent"))
        part = 0
        while pieces:
            total = taken = 0
            while taken < len(pieces) and (taken == 0 or total + pieces[taken].piece.count <= BUNDLE):
                total += pieces[taken].piece.count
                taken += 1
            chosen, pieces = pieces[:taken], pieces[taken:]
            signature = _signature(dtype, [(subtree, ()), *[(one.name, one.piece.shape) for one in chosen]])
            scale = 2 if dtype in PARTS else 1
            yield Unit(
                f"bundle:{subtree}|{dtype}|{role}#{part}", signature, part_dtype(dtype), (total * scale,),
                role or "other", tuple([member for one in chosen for member in one.piece.members]),
            )  # fmt: skip
            part += 1


def _order(path: Path) -> Any:
    return [(0, segment, "") if type(segment) is int else (1, 0, segment) for segment in path]


def _signature(dtype: str, members: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return digest(repr((dtype, list(members))).encode())[:16]
