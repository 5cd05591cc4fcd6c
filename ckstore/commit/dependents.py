"""Finds the objects and versions that depend on objects, by the catalog's index of packs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from ckstore.errors import NotFoundError
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow, key


def dependents(repository: Repository, identities: Iterable[str]) -> set[str]:
    """Return the ids of the objects with one of these in their chains, these included.

    Raise `IntegrityError` if a pack that may have such objects is damaged.
    """
    catalog, resolver = repository.catalog, repository.resolver
    found: set[str] = set()
    fresh = set(identities)
    while fresh:
        found |= fresh
        packs = _packs(repository, fresh)
        above = {
            record.id
            for pack in packs | catalog.packs_on(packs)
            for record in resolver.manifest(pack).document.records
            if record.base in fresh
        }
        # A pack may have former records of objects that were stored again since.
        records = filter(None, map(resolver.find, above - found))
        fresh = {record.id for record in records if record.base in found}
    return found


def users(repository: Repository, identities: Collection[str]) -> Iterator[int]:
    """Yield the numbers of the versions that may have some of these objects, and maybe others, each once."""
    slots: dict[str, set[int]] = {}
    for pack, slot in repository.catalog.find_objects(map(key, identities)).values():
        slots.setdefault(pack, set()).add(slot)
    seen: set[int] = set()
    for pack, wanted in slots.items():
        for number in repository.catalog.users(pack, wanted):
            if number not in seen:
                seen.add(number)
                yield number


def dependent_versions(repository: Repository, identities: Iterable[str]) -> list[VersionRow]:
    """Return the versions that may need some of these objects, by number."""
    rows = []
    for number in sorted(users(repository, dependents(repository, identities))):
        with suppress(NotFoundError):  # It was forgotten since.
            rows.append(repository.catalog.version(number))
    return rows


def _packs(repository: Repository, identities: Iterable[str]) -> set[str]:
    return {pack for pack, _ in repository.catalog.find_objects(map(key, identities)).values()}
