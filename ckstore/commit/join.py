"""Joins small packs in segments, byte for byte: afterwards the catalog has their places there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError
from ckstore.storage import durable, root, segments
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.segments import COUNT, Place

if TYPE_CHECKING:
    from ckstore.repository import Repository


def join_due(repository: Repository) -> bool:
    """Join the oldest small packs if there are enough; return whether it was done. In a bucket packs stay apart."""
    if not repository.catalog.is_only:
        return False
    names = repository.catalog.small_packs(COUNT)
    return len(names) == COUNT and join(repository, names)


def join(repository: Repository, names: Iterable[str]) -> bool:
    """Write packs into one segment, and delete their own files; return whether it was done.

    Damaged packs are left out. Nothing is done if another process has moved or removed one of the packs since.
    """
    catalog, packs = repository.catalog, repository.packs
    before = {name: catalog.segment_of(name) for name in names}
    temporary = durable.temporary_path(repository.path / root.PACKS)
    try:
        segment, places = segments.write(temporary, _intact(packs, before))
        durable.checkpoint("segment-written")
        _read_back(packs, temporary, places)
        with catalog.transaction():
            if not places or any(before[name] != catalog.segment_of(name) for name in places):
                return False
            if len(catalog.known_packs(places)) < len(places):
                return False
            os.replace(temporary, temporary.with_name(segment))
            durable.sync_directory(temporary.parent)
            durable.checkpoint("segment-renamed")
            catalog.place_packs(places)
    finally:
        temporary.unlink(missing_ok=True)
    with catalog.transaction():
        for name, place in places.items():
            if catalog.segment_of(name) == place:  # A `recover` may have found another one since.
                packs.remove(name)
    return True


def garbage(repository: Repository) -> dict[str, int]:
    """Return the bytes of each segment that no pack of the catalog takes, by name."""
    sizes = repository.packs.segments()
    joined = repository.catalog.joined() if sizes else {}
    return {name: size - segments.size_of(*joined.get(name, (0, 0))) for name, size in sizes.items()}


def _intact(packs: PackReader, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield packs with their bytes, without damaged and missing ones."""
    for name in names:
        with suppress(IntegrityError):
            data = packs.pread(name, 0, packs.size(name))
            if segments.is_pack(name, data):
                yield name, data


def _read_back(packs: PackReader, path: Path, places: dict[str, Place]) -> None:
    """Raise `IntegrityError` unless a segment holds its packs."""
    for name, place in places.items():
        if not packs.is_intact_at(name, path, place):
            raise IntegrityError(f"Pack {name} was not written as it should be; check the disk and try again.")
