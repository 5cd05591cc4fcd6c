"""Fetches the packs, records and chunks of a version with few requests, before they are read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from ckstore.errors import IntegrityError
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Record
from ckstore.repository import Repository

#: Bytes that take no longer than another request. Small packs are fetched along with manifests up to this sum;
#: smaller sets of records are fetched whole, without reading their indexes first.
_SMALL = 4 << 20

#: Bytes of its whole chain that are fetched at once for a full read.
_BEGUN = 8 << 20

#: Size from which the levels of a chain are fetched in pieces, each with those of the other levels.
_PIECE = 1 << 20


def prefetch_manifests(repository: Repository, number: int, *, whole: bool) -> None:
    """Prefetch the manifests of a version's chain; with `whole`, also the first part of its packs."""
    packs, names = repository.packs, repository.catalog.chain_packs(number)
    if not whole:
        repository.resolver.prefetch_manifests(names, _SMALL)
        return
    repository.resolver.prefetch_manifests(names)
    sizes = {}
    for name in names:
        with suppress(IntegrityError):
            sizes[name] = packs.size(name)
    share = min(_BEGUN / max(sum(sizes.values()), 1), 1.0)
    packs.prefetch(_in_turn([(name, 0, int(share * size)) for name, size in sizes.items()]))


def prefetch_chunks(repository: Repository, objects: Sequence[str], places: Iterable[tuple[int, int | None]]) -> None:
    """Prefetch chunks, given as (unit, chunk); all chunks of a unit for None. Later reads raise the errors."""
    packs, reader = repository.packs, repository.reader
    chosen: dict[int, set[int] | None] = {}
    for number, chunk in places:
        if chunk is None:
            chosen[number] = None
        elif (chunks := chosen.setdefault(number, set())) is not None:
            chunks.add(chunk)
    wanted: list[list[tuple[Record, set[int] | None]]] = []
    for number, chunks in chosen.items():
        with suppress(IntegrityError):
            wanted.append([(record, chunks) for record in reader.chains.records(objects[number])])
    indexed = [record for levels in wanted for record, chunks in levels if reader.stored.index_ranges(record, chunks)]
    if sum(record.nbytes for record in indexed) <= _SMALL:
        whole = set(map(id, indexed))
        wanted = [[(record, None if id(record) in whole else cut) for record, cut in levels] for levels in wanted]
    else:
        packs.prefetch(
            (record.pack, *part)
            for levels in wanted
            for record, chunks in levels
            for part in reader.stored.index_ranges(record, chunks)
        )
    with suppress(IntegrityError):
        packs.prefetch(part for levels in wanted for part in _parts(reader, levels))


def _parts(reader: ObjectReader, levels: Sequence[tuple[Record, set[int] | None]]) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of an object's records in the order of reads: indexes, then the first pieces, and so on."""
    parts = [(record.pack, *part) for record, chunks in levels for part in reader.stored.ranges(record, chunks)]
    for record, _ in levels:
        for part in reader.stored.index_ranges(record, ()):
            yield record.pack, *part
    yield from _in_turn(parts)


def _in_turn(parts: Sequence[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield parts of packs in the order of decoding: the first pieces of all, then the second, and so on."""
    pieces = max((-(-length // _PIECE) for _, _, length in parts), default=0)
    for piece in range(pieces):
        for pack, offset, length in parts:
            first, last = length * piece // pieces, length * (piece + 1) // pieces
            yield pack, offset + first, last - first
