"""The findings of the last collection, and whether anything since can have left garbage."""

from __future__ import annotations

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.repository import Repository

#: Changes that leave no garbage: the raw packs of a `compact`, and the packs of no version, are looked at.
_HARMLESS = frozenset({"compact", "metrics", "policy", "supersede", "tag", "untag"})


def held_since(repository: Repository) -> int | None:
    """Return the held bytes that the last collection found, if a new one would find no garbage either; else None."""
    catalog = repository.catalog
    last = catalog.clean()
    if last is None or not catalog.is_only:
        return None
    held, apart, logged = last
    if catalog.packs_apart() != apart or not catalog.changed_only(logged, _HARMLESS):
        return None
    if any(not _is_of_hot(repository, name) for name in catalog.raw_packs()):
        return None
    names = [info.name for info in repository.packs.list_packs()]
    return held if len(catalog.known_packs(names)) == len(names) == catalog.totals().packs else None


def _is_of_hot(repository: Repository, raw: str) -> bool:
    """Return whether a raw pack is that of a hot version."""
    try:
        return repository.catalog.version(repository.resolver.number_of(raw)).hot
    except (IntegrityError, NotFoundError):
        return False
