"""Repairs damaged or missing packs of a remote store, or records their loss in the log.

damaged = packs that do not match their names and cannot be uploaded again from here
change  = undecodable objects lose their place; objects with another copy are found there
found   = packs that are intact again after an earlier loss: their objects get their places back
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.recovery.found_objects import FoundObjects
from ckstore.repository import Repository
from ckstore.storage import durable
from ckstore.storage.catalog import Catalog, Placement, VersionRow, key
from ckstore.storage.pack import PackInfo


def lost_packs(repository: Repository) -> list[str]:
    """Read and repair the packs of a remote store; return a sentence for each loss.

    Nothing is deleted. Other processes see the losses as a normal change. Concurrent recoveries log them once.
    """
    catalog, packs = repository.catalog, repository.packs
    lost = _said_to_be_lost(catalog.log_records())
    known = {pack.name: pack.bytes for pack in catalog.packs()}
    again = {info.name: info for info in packs.list_packs() if info.name in lost} if lost else {}
    sizes = {name: info.bytes for name, info in again.items()} | known
    damaged = packs.damaged(sizes)
    back = {name: info for name, info in again.items() if name not in damaged}
    if damaged or back:
        objects = _objects(repository, sizes.keys() - damaged)
        versions = _contents(repository) if back else {}
        catalog.commit(lambda: _change(catalog, objects, versions, damaged, back, lost))
        repository.resolver.forget()
    return _problems(repository, damaged & known.keys(), lost - back.keys())


def _said_to_be_lost(records: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the packs that the log records as lost and not as found again."""
    lost: set[str] = set()
    for record in records:
        if record["change"] == "lost":
            lost.update(record["packs"])
        elif record["change"] == "found":
            lost.difference_update(record["packs"])
    return lost


def _objects(repository: Repository, packs: Iterable[str]) -> FoundObjects:
    """Return the objects in intact packs, oldest first."""
    order = []
    for name in packs:
        document = repository.resolver.manifest(name).document
        if not document.trial:
            order.append((document.created, document.number, name, document))
    found = FoundObjects()
    for _, _, name, document in sorted(order, key=lambda item: item[:3]):
        found.add(name, document.kind, document)
    return found


def _contents(repository: Repository) -> dict[int, tuple[str, ...]]:
    """Return the ids of the objects of each version whose manifest can be read, by number."""
    found = {}
    for row in repository.catalog.versions():
        with suppress(IntegrityError, NotFoundError):
            found[row.number] = repository.resolver.document(row).objects
    return found


def _change(
    catalog: Catalog,
    objects: FoundObjects,
    versions: Mapping[int, Iterable[str]],
    damaged: Collection[str],
    back: Mapping[str, PackInfo],
    lost: Collection[str],
) -> None:
    """Point the catalog at decodable copies alone; this is called again after concurrent commits."""
    known = {pack.name: pack for pack in catalog.packs()}
    gone = catalog.gone()
    back = {name: info for name, info in back.items() if name not in gone}
    damaged = [name for name in damaged if name in known]
    present = _placements(catalog.placed_objects())
    objects.resolve(place for place in present.values() if place[1] not in damaged)
    usable = (known.keys() - damaged) | back.keys()
    # Removed objects have no place although they can be decoded; lost ones get theirs back with their pack.
    wanted = objects.places.keys() if back else present.keys() & objects.places.keys()
    moved = [objects.places[number] for number in wanted if objects.places[number][1] in usable]
    moved = [place for place in moved if present.get(place[0]) != place]
    dead = present.keys() - objects.places.keys()
    fresh = [name for name in damaged if name not in lost]
    if not (fresh or back or moved or dead):
        return
    if back:
        catalog.note({"change": "found", "packs": sorted(back)})
        catalog.add_packs([info for name, info in sorted(back.items()) if name not in known])
    if damaged:
        catalog.note({"change": "lost", "packs": sorted(damaged)})
    catalog.remove_objects(sorted(dead))
    catalog.move_objects(moved)
    if back:
        _depend_again(catalog, objects, versions, known | back, {place[1] for place in moved})
    # The log names them, so a copy may replace them. Packs that versions refer to stay in the catalog.
    free = {pack.name for pack in catalog.unreferenced_packs()}
    catalog.remove_packs([name for name in damaged if name in free])
    catalog.note_collected(durable.timestamp())


def _depend_again(
    catalog: Catalog,
    objects: FoundObjects,
    versions: Mapping[int, Iterable[str]],
    packs: Mapping[str, PackInfo],
    moved: Collection[str],
) -> None:
    """Note the versions and packs that depend on the packs that objects `moved` to."""
    for name, bases in sorted(objects.bases().items()):
        if name in packs and not bases.isdisjoint(moved):
            catalog.add_packs([packs[name]], bases)
    for number, identities in versions.items():
        if uses := {pack: slots for pack, slots in objects.uses(identities).items() if pack in moved}:
            catalog.use_packs(number, uses)


def _placements(placed: Mapping[str, Mapping[int, int]]) -> dict[int, Placement]:
    return {number: (number, pack, slot) for pack, slots in placed.items() for slot, number in slots.items()}


def _problems(repository: Repository, damaged: set[str], lost: set[str]) -> list[str]:
    """Return a sentence for each damaged pack and incomplete version, and for known losses that versions need."""
    if not damaged and not lost:
        return []
    rows = repository.catalog.versions()
    versions = [problem for row in rows for problem in _lacks(repository, row, damaged | lost)]
    named = damaged | lost if versions else damaged
    return [f"Pack {name} is damaged or missing; its file was left in place." for name in sorted(named)] + versions


def _lacks(repository: Repository, row: VersionRow, damaged: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each missing part of a version."""
    version = f"Version {row.number} ({row.run if row.step is None else f'{row.run}@{row.step}'})"
    try:
        document = repository.resolver.document(row)
    except IntegrityError:
        yield f"{version} cannot be read: its manifest is in a pack that is damaged or missing."
        return
    found = repository.catalog.find_objects(map(key, document.objects))
    missing = sum(key(identity) not in found for identity in document.objects)
    if missing:
        yield f"{version} lacks {missing} objects; its other objects are kept."
    for name in sorted(document.blob_packs().intersection(damaged) - {row.pack}):
        yield (
            f"{version} lacks data shared with pack {name}, which is damaged or missing: the layout of its files, or"
            " the bytes between their tensors."
        )
