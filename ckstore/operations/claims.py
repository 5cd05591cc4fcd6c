"""Which objects versions claim, and what giving some of them up concerns."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ckstore.errors import NotFoundError
from ckstore.objects.documents import Object
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow


class Claims:
    """Which objects versions claim that do not give them up, and what these are stored against.

    Attributes
    ----------
    contents
        Content ids of the claimed objects.
    lost
        What was given up so far.
    """

    def __init__(self, repository: Repository, thinned: set[int]) -> None:
        self._repository = repository
        self._objects: set[Object] = set()
        # By content id of what nobody claims: the claimed objects that take it to restore.
        self._dependents: dict[str, set[Object]] = {}
        # What is stored anew, or in a dry run would be.
        self._settled: set[Object] = set()
        self.contents: set[str] = set()
        self.lost: set[Object] = set()
        objects = set()
        for row in repository.catalog.versions():
            if row.number not in thinned:
                objects |= _objects(repository, row)
        self.add(objects)

    def add(self, objects: Iterable[Object]) -> None:
        """Claim more objects."""
        fresh = {item for item in objects if item[1] is not None} - self._objects
        self._objects |= fresh
        self.contents |= {content for _, content in fresh if content is not None}
        for item in fresh:
            for identity in self._below(item):
                self._dependents.setdefault(identity, set()).add(item)

    def give_up(self, objects: set[Object], remaining: Iterable[Object]) -> tuple[set[Object], set[Object]]:
        """Give up objects of a version that keeps its remaining ones; returns what is lost, and what that concerns.

        An object is concerned where something lost stands between it and the nearest one that stays: what is stored
        against an object that stays stays as it is, whatever that one is stored against.
        """
        remaining = set(remaining)
        self.add(remaining)
        lost = {item for item in objects if item[1] is not None and item[1] not in self.contents} - self.lost
        self.lost |= lost
        gone = {content for _, content in self.lost}
        found = remaining & self._objects
        for _, content in lost:
            found |= self._dependents.pop(content or "", set())
        concerned = {item for item in found - self._settled if not gone.isdisjoint(self._below(item))}
        self._settled |= concerned
        return lost, concerned

    def _below(self, item: Object) -> list[str]:
        """Ids of what an object is stored against, down to the first that is claimed."""
        reader = self._repository.reader
        lattice, content = item
        layer = reader.exact_layer(lattice, content)
        if layer is None:
            chain = [record.id for record in reader.chain(reader.resolver.lattice(lattice))]
        else:
            chain = [record.id for record in reader.content_chain(layer)]
        return list(takewhile(lambda identity: identity not in self.contents, chain[1:]))


def _objects(repository: Repository, row: VersionRow) -> set[Object]:
    """The objects of a version, which another process may forget meanwhile."""
    try:
        return set(StoredVersion(repository, row).document.objects)
    except NotFoundError:
        return set()
