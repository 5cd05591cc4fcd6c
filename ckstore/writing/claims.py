"""Objects that versions claim, and the effects of giving some up."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ckstore.errors import NotFoundError
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow


class Claims:
    """Ids of exact objects `claimed` by the versions that stay, of those `lost` so far, and their dependencies."""

    def __init__(self, repository: Repository, thinned: set[int]) -> None:
        self._repository = repository
        # By id of an unclaimed object: the claimed objects that need it.
        self._dependents: dict[str, set[str]] = {}
        # Objects that were stored again, or would be after a dry run.
        self._settled: set[str] = set()
        self.claimed: set[str] = set()
        self.lost: set[str] = set()
        # The numbers of the versions whose costs depend on an object that may be stored again.
        self._users: dict[str, set[int]] = {}
        objects: set[str] = set()
        of_versions: dict[int, set[str]] = {}
        for row in repository.catalog.versions():
            of_versions[row.number] = _exact_objects(repository, row)
            if row.number not in thinned:
                objects |= of_versions[row.number]
        self.add(objects)
        # Objects of these versions that stay, or that stay for another version.
        self._users = {identity: set() for number in thinned for identity in of_versions.get(number, ())}
        self._users |= {identity: set() for found in self._dependents.values() for identity in found}
        for number, found in of_versions.items():
            for identity in self._chain(found):
                if identity in self._users:
                    self._users[identity].add(number)

    def add(self, objects: Iterable[str]) -> None:
        """Add claimed objects."""
        fresh = set(objects) - self.claimed
        self.claimed |= fresh
        for identity in fresh:
            for below in self._below(identity):
                self._dependents.setdefault(below, set()).add(identity)

    def give_up(self, objects: set[str], remaining: set[str]) -> tuple[set[str], set[str]]:
        """Give up objects of a version; return the lost objects, and the affected ones that need them.

        An object is affected if a lost object is between it and its nearest ancestor that stays.
        """
        self.add(remaining)
        lost = objects - self.claimed - self.lost
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

    def _chain(self, objects: Iterable[str]) -> list[str]:
        """Return the ids of objects and of all their bases."""
        return [record.id for record in self._repository.reader.chains.records(*objects)]

    def _below(self, identity: str) -> list[str]:
        """Return the ids of an object's bases, down to the first claimed one."""
        chain = [record.id for record in self._repository.reader.chains.records(identity)]
        return list(takewhile(lambda other: other not in self.claimed, chain[1:]))


def _exact_objects(repository: Repository, row: VersionRow) -> set[str]:
    """Return the exact objects of a version; none if another process has forgotten it."""
    try:
        document = StoredVersion(repository, row).document
    except NotFoundError:
        return set()
    return {identity for unit, identity in enumerate(document.objects) if unit not in document.coarse_units}
