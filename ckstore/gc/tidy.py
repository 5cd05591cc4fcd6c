"""Frees the bytes of removed packs in segments, and removes the leftovers of killed joins."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ckstore.commit.join import garbage, join, join_due
from ckstore.errors import DiskFullError, IntegrityError
from ckstore.gc.plan import GARBAGE_BYTES, GARBAGE_SHARE
from ckstore.storage.segments import COUNT

if TYPE_CHECKING:
    from ckstore.repository import Repository


def overhead(repository: Repository) -> int:
    """Return the bytes of segments beyond those of the packs that the catalog has in them."""
    sizes = repository.packs.segments()
    places = repository.catalog.in_segments().values() if sizes else ()
    return sum(sizes.values()) - sum(place.size for place in places if place.segment in sizes)


def tidy(repository: Repository) -> None:
    """Join small packs, write segments with much garbage again, and delete segments and files that nothing needs."""
    catalog, packs = repository.catalog, repository.packs
    with suppress(DiskFullError):
        _join(repository)
    if not packs.segments():
        return
    with catalog.transaction():
        for name in packs.doubled():
            place = catalog.segment_of(name)
            if place is not None and packs.is_intact_at(name, packs.path_of(place.segment), place):
                packs.remove(name)
            elif packs.is_intact(name):  # Its own file comes first.
                catalog.place_packs({name: None})
        used = {place.segment for place in catalog.in_segments().values()}
        for segment in packs.segments().keys() - used:
            if _is_unneeded(repository, segment):
                packs.remove_segment(segment)


def _join(repository: Repository) -> None:
    """Join small packs, and the packs left in segments with much garbage."""
    while join_due(repository):
        pass
    unneeded, sizes = garbage(repository), repository.packs.segments()
    due = {name for name, size in sizes.items() if unneeded.get(name, 0) >= min(GARBAGE_BYTES, GARBAGE_SHARE * size)}
    places = repository.catalog.in_segments() if due else {}
    names = [name for name, place in places.items() if place.segment in due]
    for start in range(0, len(names), COUNT):
        join(repository, names[start : start + COUNT])


def _is_unneeded(repository: Repository, segment: str) -> bool:
    """Return whether each pack in a segment can be read from elsewhere, or was removed by a collection.

    Raise `IntegrityError` if the catalog, which may come from a copy, lacks others. Damage may hide some.
    """
    catalog, packs = repository.catalog, repository.packs
    if packs.damage_of(segment):
        return False
    names = set(packs.names_in(segment))
    known = catalog.known_packs(names)
    told = (record["removed"] for record in catalog.records() if record["change"] == "gc")
    if names - known.union(*told):
        raise IntegrityError(f"The catalog lacks packs in {segment}; run `ckstore recover`, then free space.")
    return all(map(packs.is_intact, known))
