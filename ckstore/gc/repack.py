"""Rewrites a pack without its garbage: live objects and blobs are copied byte for byte."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from ckstore.errors import IntegrityError
from ckstore.objects.identity import array_name
from ckstore.storage import durable
from ckstore.storage.pack import PackEntry, PackInfo, PackWriter, parse_pack_name

if TYPE_CHECKING:
    from ckstore.gc.reachability import PackContents
    from ckstore.objects.records import AnyRecord
    from ckstore.repository import Repository


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of a rewritten pack, the place of its manifest, and its slots by those of the original."""

    pack: PackInfo
    manifest: PackEntry
    slots: dict[int, int]


def repack(repository: Repository, contents: PackContents) -> Copy:
    """Write and finish a copy of a pack with only the needed parts; the catalog is not changed.

    The copy's manifest names the packs that it replaces (`stands_for`), because blobs are named by their packs: the
    original, and the names that still resolve to the original. Unneeded records, blobs and versions are
    left out of the manifest; the rest is unchanged.

    Raises
    ------
    IntegrityError
        The pack does not match the digest in its name: a copy would hide the damage.
    """
    parsed = parse_pack_name(contents.name)
    if parsed is None or not repository.packs.is_intact(contents.name):
        raise IntegrityError(
            f"Pack {contents.name} does not match its name; restore it from a copy, or see `ckstore verify`."
        )
    before = repository.resolver.manifest(contents.name)
    records = before.document.records
    slots = sorted(contents.slots)
    with PackWriter(repository.path, parsed[1]) as writer:
        metadata = repository.packs.array_metadata(contents.name)
        copied = [_copy(repository, writer, contents.name, records[slot], metadata) for slot in slots]
        place = writer.gather()
        former = before.document.stands_for
        # After a killed `gc`, a pack and its copy may both exist, each with parts that the other lacks.
        moved = repository.catalog.moved_packs(former)
        document = replace(
            before.document,
            records=[replace(record, at=(place(record.at[0]), record.at[1])) for record in copied],
            shortcuts=[],
            stands_for=(*(name for name in former if moved.get(name) == contents.name), contents.name),
            # A removed copy's name is never used again, and the same contents may have to be copied again.
            nonce="" if repository.catalog.is_only else secrets.token_hex(8),
            version=before.document.version if contents.is_present else UNSET,
        )
        blobs = {name: data for name, data in before.blobs.items() if name in contents.wanted}
        entry = writer.add_manifest(document, blobs)
        pack = writer.finish()
    durable.checkpoint("pack-copied")
    return Copy(pack, entry, {slot: number for number, slot in enumerate(slots)})


def _copy(
    repository: Repository, writer: PackWriter, pack: str, record: AnyRecord, metadata: dict[str, dict[str, Any]]
) -> AnyRecord:
    """Copy the layer of one record; return the record of the copy."""
    name = array_name(record.id)
    place = writer.add_copy(name, metadata.get(name), repository.packs.pread(pack, *record.at))
    return replace(record, at=(place.offset, place.length))
