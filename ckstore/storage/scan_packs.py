"""Reading a store without its catalog: every pack with its manifest, in order of commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckstore.errors import AccessError, FormatVersionError, IntegrityError
from ckstore.storage import manifest, root
from ckstore.storage.pack import PackEntry, PackInfo
from ckstore.storage.pack_reader import MissingPackError, PackReader
from ckstore.storage.segments import Place


@dataclass(frozen=True, slots=True)
class ScannedPack:
    """A pack that matches its name, with its manifest; `entry` is the manifest's place.

    `place` is that of the pack in a segment, None if it is a file of its own.
    """

    info: PackInfo
    entry: PackEntry
    document: Any
    blobs: dict[str, bytes]
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class DamagedPack:
    """An unusable pack, and the reason. It is never removed: a copy or parts of it may be intact."""

    info: PackInfo
    reason: str


def scan_packs(store: Path, kind: Any) -> Iterator[ScannedPack | DamagedPack]:
    """Yield every pack of a store: intact ones in the order of `created`, `number` and name, then damaged ones.

    Reads every byte of every pack, and holds one manifest at a time. A pack that vanishes during the scan is skipped:
    its writer has removed it. A pack whose manifest is not of the type `kind` is damaged. Damaged segments come last;
    the packs in them may be intact.

    Raises
    ------
    FormatVersionError
        A manifest was written by a later version of ckstore.
    """
    reader = PackReader.of(store)
    order: list[tuple[str, int, str, PackInfo]] = []
    damaged: list[DamagedPack] = []
    for info in reader.list_packs():
        found = scan_pack(reader, info, kind)
        if isinstance(found, DamagedPack):
            if _place_in(reader, store, info.name) is not None or (store / root.PACKS / info.name).exists():
                damaged.append(found)
        else:
            order.append((*_rank(found), info))
    for *_, info in sorted(order, key=lambda item: item[:3]):
        try:
            scanned = _scan(reader, info, kind)
        except MissingPackError:
            continue
        yield replace(scanned, place=_place_in(reader, store, info.name))
    yield from damaged
    for segment, size in reader.segments().items():
        reason = reader.damage_of(segment)
        if reason:
            yield DamagedPack(PackInfo(segment, size), reason)
    reader.close()


def _place_in(reader: PackReader, store: Path, pack: str) -> Place | None:
    """Return the place of a pack in a segment; None if it has a file of its own."""
    return None if (store / root.PACKS / pack).exists() else reader.place_of(pack)


def scan_pack(reader: PackReader, info: PackInfo, kind: Any) -> ScannedPack | DamagedPack:
    """Read every byte of one pack.

    Raise `FormatVersionError` if a later version of ckstore wrote its manifest, `AccessError` if it may not be read.
    """
    try:
        if not reader.is_intact(info.name):
            raise IntegrityError("its bytes do not match the digest in its name")
        found = _scan(reader, info, kind)
    except (FormatVersionError, AccessError):
        raise
    except (IntegrityError, OSError) as error:
        return DamagedPack(info, str(error))
    return found


def _rank(pack: ScannedPack) -> tuple[str, int, str]:
    """Return the sort key of a pack."""
    return pack.document.created, pack.document.number, pack.info.name


def _scan(reader: PackReader, info: PackInfo, kind: Any) -> ScannedPack:
    entry = reader.find_entry(info.name, manifest.MEMBER)
    document, blobs = manifest.decode_manifest(reader.pread(info.name, entry.offset, entry.length), kind)
    return ScannedPack(info, entry, document, blobs)
