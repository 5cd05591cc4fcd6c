"""Objects that versions claim, and the effects of giving some up."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile

from ckstore.commit.dependents import dependents, users
from ckstore.errors import NotFoundError
from ckstore.objects.records import Factors
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import key


class Claims:
    """The exact objects that versions claim, the objects that are `lost` so far, and their dependencies.

    Only versions that may share objects with the thinned ones, or depend on these, are read.
    """

    def __init__(self, repository: Repository, thinned: Collection[int]) -> None:
        self._repository = repository
        self._thinned = set(thinned)
        # By id of an unclaimed object: the claimed objects that need it.
        self._dependents: dict[str, set[str]] = {}
        # Objects that were stored again, or would be after a dry run.
        self._settled: set[str] = set()
        self._claimed: set[str] = set()
        self.lost: set[str] = set()
        # The exact objects of the versions that were read, by number.
        self._of_versions: dict[int, set[str]] = {}
        # The numbers of the versions whose costs depend on an object that may be stored again.
        self._users: dict[str, set[int]] = {}
        given_up = {identity for number in self._thinned for identity in self._objects(number)}
        self._find_claims(given_up)
        # The objects that may be lost, and all that need them.
        self._region = dependents(repository, given_up - self._claimed)
        for number in users(repository, self._region):
            if number not in self._thinned:
                self._claimed |= self._objects(number)
        self.add(self._claimed & self._region)
        # Objects of these versions that stay, or that stay for another version.
        self._users = {identity: set() for identity in given_up & self._region}
        self._users |= {identity: set() for found in self._dependents.values() for identity in found}
        for number, found in self._of_versions.items():
            for identity in self._chain(found & self._region):
                if identity in self._users:
                    self._users[identity].add(number)

    def __contains__(self, identity: object) -> bool:
        """Return whether an object, given by its id, is claimed."""
        assert isinstance(identity, str)
        self._find_claims({identity} - self._claimed)
        return identity in self._claimed

    def add(self, objects: Iterable[str]) -> None:
        """Add claimed objects."""
        self._claimed.update(objects)
        for identity in self._region.intersection(objects):
            for below in self._below(identity):
                self._dependents.setdefault(below, set()).add(identity)

    def give_up(self, objects: set[str], remaining: set[str]) -> tuple[set[str], set[str]]:
        """Give up objects of a version; return the lost objects, and the affected ones that need them.

        An object is affected if a lost object is between it and its nearest ancestor that stays.
        """
        self.add(remaining)
        lost = objects - self._claimed - self.lost
        self.lost |= lost
        found = set(remaining)
        for identity in lost:
            found |= self._dependents.pop(identity, set())
        affected = {identity for identity in found - self._settled if not self.lost.isdisjoint(self._below(identity))}
        self._settled |= affected
        return lost, affected

    def users(self, affected: Iterable[str]) -> set[int]:
        """Return the numbers of the versions whose costs change if these objects are stored again."""
        return {number for identity in affected for number in self._users.get(identity, ())}

    def stored_again(self, affected: Iterable[str]) -> None:
        """Note that objects have other bases now."""
        for identity in affected:
            for below in self._chain([identity]):
                if below in self._users:
                    self._users[below] |= self._users.get(identity, set())

    def _find_claims(self, objects: set[str]) -> None:
        """Read other versions until each of these objects is claimed, or no other version may have it."""
        places = self._repository.catalog.find_objects(map(key, objects))
        left: dict[str, dict[int, int]] = {}
        for number, (pack, slot) in places.items():
            left.setdefault(pack, {})[slot] = number
        for pack, slots in left.items():
            for number in self._repository.catalog.users(pack, slots.keys()):
                if number not in self._thinned:
                    found = self._objects(number)
                    self._claimed |= found
                    claimed = set(map(key, found))
                    for slot in [slot for slot, identity in slots.items() if identity in claimed]:
                        del slots[slot]

    def _objects(self, number: int) -> set[str]:
        """Return a version's exact objects, and bases of its factors; none if another process has forgotten it."""
        found = self._of_versions.get(number)
        if found is None:
            try:
                document = StoredVersion(self._repository, self._repository.catalog.version(number)).document
                coarse = {document.objects[unit] for unit in document.coarse_units}
                # Factors are added to exact values, which stay for them.
                records = map(self._repository.resolver.find, coarse)
                found = {*document.objects} - coarse
                found |= {record.base for record in records if isinstance(record, Factors)}
            except NotFoundError:
                found = set()
            self._of_versions[number] = found
        return found

    def _chain(self, objects: Iterable[str]) -> list[str]:
        """Return the ids of objects and of all their bases."""
        return [record.id for record in self._repository.reader.chains.records(*objects)]

    def _below(self, identity: str) -> list[str]:
        """Return the ids of an object's bases, down to the first claimed one."""
        chain = [record.id for record in self._repository.reader.chains.records(identity)]
        return list(takewhile(lambda other: other not in self._claimed, chain[1:]))
