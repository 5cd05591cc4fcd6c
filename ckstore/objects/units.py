"""How the extents of a version are cut into objects: parts of large ones, bundles of small ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckstore.codecs.lattice import PARTS, chunk_length, part_dtype
from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import Extent, FileLayout, Path
from ckstore.objects.identity import digest

#: Extents below this many elements are bundled.
SMALL = 1 << 16

#: Extents above this many elements are cut into parts, so that what is held in memory does not grow with a tensor.
PART = 1 << 22

#: A bundle is closed at this many elements.
BUNDLE = 1 << 21

#: Optimiser state that behaves alike; each gets bundles of its own where there is enough of it.
ROLES = {
    "exp_avg": "first",
    "exp_avg_sq": "second",
    "max_exp_avg_sq": "second",
    "momentum_buffer": "first",
    "square_avg": "second",
}

#: Small extents of at least two axes and this many elements are weights; others are norms, biases and counters.
_SMALL_WEIGHT = 1 << 10

#: Elements below which a role does not pay for a bundle of its own.
_ROLE_MINIMUM = 1 << 12


@dataclass(frozen=True, slots=True)
class Member:
    """A stretch of one extent: its file, its index in that file's layout, first element and number of elements."""

    file: int
    extent: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one object.

    Attributes
    ----------
    key
        What versions are matched by: the typed path of the extent and the part's number, or a bundle's name.
    signature
        Digest of dtype, shape and members: objects of one key are stored against each other only where it agrees.
    dtype
        dtype of the elements that are coded; complex numbers are coded by parts.
    shape
        In elements of `dtype`; the last axis is a row.
    members
        Where the elements are in the files, in order; counts are in elements of the extent.
    role
        `weight`, `first`, `second` or `other`: what the planner takes it for. Correctness never depends on it.
    """

    key: str
    signature: str
    dtype: str
    shape: tuple[int, ...]
    members: tuple[Member, ...]
    role: str

    @property
    def count(self) -> int:
        """Number of elements that are coded."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.count * ITEM_SIZES[self.dtype]

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return chunk_length(self.shape)

    @property
    def member_counts(self) -> list[int]:
        """Number of elements that are coded of each member."""
        scale = self.count // max(sum(member.count for member in self.members), 1)
        return [member.count * scale for member in self.members]

    @property
    def member_bytes(self) -> list[int]:
        """Number of bytes of each member."""
        return [count * ITEM_SIZES[self.dtype] for count in self.member_counts]

    @property
    def is_bundle(self) -> bool:
        """It holds small extents."""
        return self.key.startswith("bundle:")

    def to_json(self) -> list[Any]:
        """The unit as a list, for a layout document."""
        members = [[member.file, member.extent, member.first, member.count] for member in self.members]
        return [self.key, self.signature, self.dtype, list(self.shape), self.role, members]

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> Unit:
        """The inverse of `to_json`."""
        key, signature, dtype, shape, role, members = document
        return cls(key, signature, dtype, tuple(shape), tuple(Member(*member) for member in members), role)


def plan_units(files: Sequence[tuple[str, FileLayout]]) -> list[Unit]:
    """The objects of a version's files, given as (prefix, layout); the prefix tells a directory's files apart."""
    units: list[Unit] = []
    small: dict[tuple[str, str, str], list[tuple[Any, Member, Extent]]] = {}
    for number, (prefix, layout) in enumerate(files):
        for index, extent in enumerate(layout.extents):
            if extent.count == 0:
                continue
            if extent.count >= SMALL:
                units.extend(_parts(prefix, number, index, extent))
                continue
            role = role_of(extent.path)
            if not role and len(extent.shape) > 1 and extent.count >= _SMALL_WEIGHT:
                role = "weight"
            group = (f"{prefix}{_subtree(extent.path)}", extent.dtype, role)
            small.setdefault(group, []).append((_order(extent.path), Member(number, index, 0, extent.count), extent))
    units.extend(_bundles(small))
    return units


def _parts(prefix: str, number: int, index: int, extent: Extent) -> Iterable[Unit]:
    dtype = part_dtype(extent.dtype)
    scale = 2 if extent.dtype in PARTS else 1
    name = f"{prefix}{_text(extent.path)}"
    role = role_of(extent.path) or "weight"
    if extent.count <= PART:
        shape = (*extent.shape[:-1], extent.shape[-1] * scale)
        members = (Member(number, index, 0, extent.count),)
        yield Unit(name, _signature(extent.dtype, [(name, extent.shape)]), dtype, shape, members, role)
        return
    width = extent.shape[-1] if len(extent.shape) > 1 and extent.shape[-1] <= PART else 1
    step = PART // width * width
    for part, first in enumerate(range(0, extent.count, step)):
        count = min(step, extent.count - first)
        shape = (count // width, width * scale) if width > 1 else (count * scale,)
        members = (Member(number, index, first, count),)
        signature = _signature(extent.dtype, [(name, extent.shape), (str(part), (count,))])
        yield Unit(f"{name}#{part}", signature, dtype, shape, members, role)


def _bundles(small: dict[tuple[str, str, str], list[tuple[Any, Member, Extent]]]) -> Iterable[Unit]:
    merged: dict[tuple[str, str, str], list[tuple[Any, Member, Extent]]] = {}
    for (subtree, dtype, role), members in small.items():
        enough = sum(member.count for _, member, _ in members) >= _ROLE_MINIMUM
        merged.setdefault((subtree, dtype, role if enough else ""), []).extend(members)
    for (subtree, dtype, role), members in sorted(merged.items()):
        members.sort(key=lambda item: (item[0], item[1].file, item[1].extent))
        part = 0
        while members:
            total = taken = 0
            while taken < len(members) and (taken == 0 or total + members[taken][1].count <= BUNDLE):
                total += members[taken][1].count
                taken += 1
            chosen, members = members[:taken], members[taken:]
            signature = _signature(dtype, [(_text(extent.path), extent.shape) for _, _, extent in chosen])
            scale = 2 if dtype in PARTS else 1
            yield Unit(
                f"bundle:{subtree}|{dtype}|{role}#{part}", signature, part_dtype(dtype), (total * scale,),
                tuple(member for _, member, _ in chosen), role or "other",
            )  # fmt: skip
            part += 1


def _subtree(path: Path) -> str:
    return _text(path[:1]) if len(path) > 1 else ""


def role_of(path: Path) -> str:
    """The role in `ROLES` of what stands at a path; empty for what is no optimiser state."""
    for segment in reversed(path):
        if isinstance(segment, str):
            return ROLES.get(segment, "")
    return ""


def _order(path: Path) -> Any:
    return tuple((0, segment, "") if isinstance(segment, int) else (1, 0, segment) for segment in path)


def _text(path: Path) -> str:
    from ckstore.formats.paths import path_to_text

    return path_to_text(path)


def _signature(dtype: str, members: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return digest(repr((dtype, list(members))).encode())[:16]
