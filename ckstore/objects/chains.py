"""The chains of objects: the records that restore an object, from its own to its base, and their work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol, TypeVar

from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work
from ckstore.objects.records import Cast, Patches, Record, check_base

T = TypeVar("T")

#: Parts in a chain that are decoded, more than writers make: chains of several stores may join.
_MOST_PARTS = 16


class Resolver(Protocol):
    """Finds records by id."""

    @property
    def generation(self) -> int:
        """A number that changes when records may have changed."""

    def settled(self, look: Callable[[], T]) -> T:
        """Return the result of `look`; repeat it if a concurrent change fails it."""

    def record(self, identity: str) -> Record:
        """Return the record of an id; raise `IntegrityError` if it is lost."""

    def find(self, identity: str) -> Record | None:
        """Return the record of an id, or None."""

    def shortcut(self, record: Record) -> Patches | None:
        """Return patches that also lead to an object, from another one; None without any."""


class _Link(NamedTuple):
    """A record, the link of its base, the number of deltas down to the chain's end, the work of all of them, and parts.

    `parts` is the number of records in the chain that are parts of their bases.
    """

    record: Record
    below: _Link | None
    depth: int
    work: Work
    parts: int


class Chains:
    """The chains of objects. Each record is checked once; chains that end alike share their links."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._links: tuple[int, dict[str, _Link]] = (resolver.generation, {})

    def levels(self, record: Record) -> list[Record]:
        """Return the records from `record` back to its base.

        Raises
        ------
        IntegrityError
            A record is lost, is its own ancestor, or has another kind or cut than the record above it.
        """
        found, link = [record], self._link(record).below
        while link is not None:
            found.append(link.record)
            link = link.below
        return found

    def records(self, *identities: str) -> list[Record]:
        """Return all records that restore some objects, each once; raise `IntegrityError` if one is lost."""

        def find() -> list[Record]:
            found: dict[str, Record] = {}
            for identity in identities:
                for level in self.levels(self._resolver.record(identity)):
                    if level.id in found:
                        break
                    found[level.id] = level
            return list(found.values())

        return self._resolver.settled(find)

    def between(self, held: str, wanted: str) -> tuple[list[Patches], list[Record]]:
        """Return the fewest bytes of records that lead from one object to another: patches to undo, levels to apply.

        The first level to apply is that of `wanted`, the last one has the base to which undoing leads. Without a way
        from `held`, which may be empty, it is the whole chain.
        """
        if held == wanted:
            return [], []
        chain = self.records(wanted)
        undone, most = self._undone(held), sum(one.nbytes for one in chain)
        numbers = count()
        ways: list[tuple[int, int, str, list[Record]]] = [(0, next(numbers), wanted, [])]
        seen: set[str] = set()
        while ways:
            nbytes, _, identity, applied = heappop(ways)
            if nbytes >= most:
                break
            if identity in seen:
                continue
            record = self._resolver.find(identity)
            if record is not None and applied:
                try:
                    check_base(record, applied[-1])
                except IntegrityError:  # Of a shortcut that is not sound.
                    continue
            if identity in undone:
                return undone[identity], applied
            seen.add(identity)
            if record is None:  # Of a shortcut, which needs no object.
                continue
            for level in (record, self._resolver.shortcut(record)):
                if level is not None and level.base is not None and not level.part:
                    cost = nbytes + level.nbytes + sum(one.nbytes for one in undone.get(level.base, ()))
                    heappush(ways, (cost, next(numbers), level.base, [*applied, level]))
        return [], chain

    def _undone(self, held: str) -> dict[str, list[Patches]]:
        """Return the patches to undo by the object to which that leads, from one that may be lost or empty."""
        undone: dict[str, list[Patches]] = {held: []} if held else {}
        with suppress(IntegrityError):  # Nothing needs the held object any more.
            passed: list[Patches] = []
            for level in self.records(held) if held else ():
                if not isinstance(level, Patches) or isinstance(level, Cast) or level.part:
                    break
                passed = [*passed, level]
                undone[level.base] = passed
        return undone

    def work(self, record: Record) -> Work:
        """Return the work of decoding all values of `record` along its chain."""
        return self._resolver.settled(partial(self._link, record)).work

    def depth(self, record: Record) -> int:
        """Return the number of deltas in the chain that restoring the object takes."""
        return self._resolver.settled(partial(self._link, record)).depth

    def deepest(self, identities: Iterable[str]) -> int:
        """Return the largest depth of some objects without lost ones; -1 if there are none."""
        longest = -1
        for identity in identities:
            with suppress(IntegrityError):
                longest = max(longest, self.depth(self._resolver.record(identity)))
        return longest

    def parts(self, record: Record) -> int:
        """Return the number of objects in the chain that are parts of their bases."""
        return self._resolver.settled(partial(self._link, record)).parts

    def _link(self, record: Record) -> _Link:
        generation = self._resolver.generation
        if generation != self._links[0]:
            self._links = (generation, {})
        links = self._links[1]
        above: dict[str, Record] = {}
        level: Record | None = record
        link: _Link | None = None
        while level is not None:
            link = links.get(level.id)
            if link is not None and link.record is level:
                break
            if level.id in above:
                raise IntegrityError(f"The chain of object {record.id} is a cycle; run `ckstore recover`.")
            above[level.id] = level
            level, link = self._base(level), None
        for level in reversed(above.values()):
            work = level.work if link is None else level.work.plus(link.work)
            depth, parts = (0, 0) if link is None else (link.depth + 1, link.parts + level.part)
            if parts > _MOST_PARTS:  # Each is decoded within the one above.
                raise IntegrityError(f"The chain of object {record.id} has too many parts; run `ckstore recover`.")
            links[level.id] = link = _Link(level, link, depth, work, parts)
        assert link is not None
        return link

    def _base(self, record: Record) -> Record | None:
        if record.base is None:
            return None
        base = self._resolver.record(record.base)
        check_base(base, record)
        return base
