"""The findings of the last collection, and whether anything since can have left garbage."""

from __future__ import annotations

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.repository import Repository
from ckstore.storage.catalog import key

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
    if not all(_is_needed(repository, name) for name in catalog.raw_packs()):
        return None
    names = [info.name for info in repository.packs.list_packs()]
    return held if len(catalog.known_packs(names)) == len(names) == catalog.totals().packs else None


def _is_needed(repository: Repository, raw: str) -> bool:
    """Return whether a raw pack is that of a hot version, and nobody has encoded one of its objects."""
    try:
        is_hot = repository.catalog.version(repository.resolver.number_of(raw)).hot
        objects = {key(record.id) for record in repository.resolver.manifest(raw).document.records}
    except (IntegrityError, NotFoundError):
        return False
    places = repository.catalog.find_objects(objects)
    return is_hot and len(places) == len(objects) and all(pack == raw for pack, _ in places.values())
