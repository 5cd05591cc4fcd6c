"""Objects that versions claim, and the effects of giving some up."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from ckstore.errors import NotFoundError
from ckstore.objects.documents import Object
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow


class Claims:
    """Objects claimed by the versions that stay as they are, and their dependencies.

    Attributes
    ----------
    contents
        Content ids of the claimed objects.
    lost
        Objects that were given up so far.
    """

    def __init__(self, repository: Repository, thinned: set[int]) -> None:
        self._repository = repository
        self._objects: set[Object] = set()
        # By content id of an unclaimed object: the claimed objects that need it.
        self._dependents: dict[str, set[Object]] = {}
        # Objects that were stored again, or would be after a dry run.
        self._settled: set[Object] = set()
        self.contents: set[str] = set()
        self.lost: set[Object] = set()
        objects = set()
        for row in repository.catalog.versions():
            if row.number not in thinned:
                objects |= _objects(repository, row)
        self.add(objects)

    def add(self, objects: Iterable[Object]) -> None:
        """Add claimed objects."""
        fresh = {item for item in objects if item[1] is not None} - self._objects
        self._objects |= fresh
        self.contents |= {content for _, content in fresh if content is not None}
        for item in fresh:
            for identity in self._below(item):
                self._dependents.setdefault(identity, set()).add(item)

    def give_up(self, objects: set[Object], remaining: Iterable[Object]) -> tuple[set[Object], set[Object]]:
        """Give up objects of a version; return the lost objects, and the affected ones that need them.

        An object is affected if a lost object is between it and its nearest ancestor that stays.
        """
        remaining = set(remaining)
        self.add(remaining)
        lost = {item for item in objects if item[1] is not None and item[1] not in self.contents} - self.lost
        self.lost |= lost
        gone = {content for _, content in self.lost}
        found = remaining & self._objects
        for _, content in lost:
            found |= self._dependents.pop(content or "", set())
        affected = {item for item in found - self._settled if not gone.isdisjoint(self._below(item))}
        self._settled |= affected
        return lost, affected

    def _below(self, item: Object) -> list[str]:
        """Return the ids of an object's bases, down to the first claimed one."""
        reader = self._repository.reader
        lattice, content = item
        layer = reader.exact_layer(lattice, content)
        if layer is None:
            chain = [record.id for record in reader.chain(reader.resolver.lattice(lattice))]
        else:
            chain = [record.id for record in reader.content_chain(layer)]
        return list(takewhile(lambda identity: identity not in self.contents, chain[1:]))


def _objects(repository: Repository, row: VersionRow) -> set[Object]:
    """Return the objects of a version; none if another process has forgotten it."""
    try:
        return set(StoredVersion(repository, row).document.objects)
    except NotFoundError:
        return set()
