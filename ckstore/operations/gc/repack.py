"""Writes a pack again without what nothing needs: live layers and blobs are copied byte for byte."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckstore.errors import IntegrityError
from ckstore.objects.layer_parts import layer_parts
from ckstore.storage import durable, manifest
from ckstore.storage.pack import PackEntry, PackInfo, PackWriter, parse_pack_name

if TYPE_CHECKING:
    from ckstore.operations.gc.reachability import PackContents
    from ckstore.repository import Repository


@dataclass(frozen=True, slots=True)
class Copy:
    """What a pack was written again as.

    Attributes
    ----------
    pack
        The finished pack.
    manifest
        Where its manifest lies.
    slots
        Slots in it by those in the pack that it was copied from.
    """

    pack: PackInfo
    manifest: PackEntry
    slots: dict[int, int]


def repack(repository: Repository, contents: PackContents) -> Copy:
    """Write a pack again with what is needed of it, and finish it; the catalog is left as it is.

    The manifest says whose place the pack takes (`stands_for`), since blobs are named by the names of packs: of the
    names that the original stood for, those that still mean it. Otherwise it is what it was, but for the records, blobs
    and the version that are not needed.

    Raises
    ------
    IntegrityError
        The pack is not what its name says: a copy would make damage look whole.
    """
    parsed = parse_pack_name(contents.name)
    if parsed is None or repository.packs.digest(contents.name) != parsed[0]:
        raise IntegrityError(
            f"Pack {contents.name} is not what its name says; restore it from a copy, or see `ckstore verify`."
        )
    before = repository.resolver.manifest(contents.name)
    records: list[dict[str, Any]] = before.document["records"]
    slots = sorted(contents.slots)
    with PackWriter(repository.path, parsed[1]) as writer:
        arrays = [part.array for slot in slots for part in layer_parts(records[slot])]
        metadata = repository.packs.array_metadata(contents.name, arrays)
        copied = [_copy(repository, writer, contents.name, records[slot], metadata) for slot in slots]
        document = {**before.document, "records": copied}
        former = document.get("stands_for", ())
        # Where a `gc` was killed, a pack may lie there beside its copy, each with something that the other one lacks.
        moved = repository.catalog.moved_packs(former)
        document["stands_for"] = [*(name for name in former if moved.get(name) == contents.name), contents.name]
        if repository.catalog.follows_log:
            # A copy that went once may never be referred to again, and another one may have to be made of the same.
            document["nonce"] = secrets.token_hex(8)
        if not contents.is_present:
            document.pop("version", None)
        blobs = {name: data for name, data in before.blobs.items() if name in contents.wanted}
        entry = writer.add_bytes(manifest.NAME, manifest.encode_manifest(document, blobs))
        pack = writer.finish()
    durable.checkpoint("pack-copied")
    return Copy(pack, entry, {slot: number for number, slot in enumerate(slots)})


def _copy(
    repository: Repository, writer: PackWriter, pack: str, record: dict[str, Any], metadata: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Copy the layer of one record; returns the record of the copy."""
    copy = dict(record)
    for part in layer_parts(record):
        data = repository.packs.pread(pack, part.offset, part.length)
        place = writer.add_copy(part.array, metadata[part.array], data).offset
        # Where there is a list, the lengths follow the place.
        copy[part.field] = [place, *record[part.field][1:]] if isinstance(record[part.field], list) else place
    return copy
