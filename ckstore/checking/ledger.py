"""Ledger: accounts for every byte of a store by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckstore.codecs.integer_header import overhead_bytes
from ckstore.commit.join import garbage
from ckstore.objects.records import Patches, Raw
from ckstore.storage import manifest
from ckstore.storage.root import CATALOG, CLAIMS, LOG
from ckstore.storage.rows import keys

if TYPE_CHECKING:
    from ckstore.repository import Repository

#: Bytes of a payload that hold its header.
_HEAD = 64

#: Bytes of a chunk's place in a shard index, and of the index's checksum.
_PLACE, _CHECKSUM = 16, 4

CAUSES = (
    "coarse", "exact", "raw", "tables", "indexes", "shortcuts", "records", "layouts", "skeletons",
    "zip and Zarr metadata", "held", "superseded", "unreferenced packs", "log", "catalog", "other files",
)  # fmt: skip


def ledger(repository: Repository) -> dict[str, int]:
    """Return bytes by cause; they add up to the size of all files of the store.

    `coarse` and `exact` are coded integers and patches of coarse and of exact objects, `raw` unencoded values, `tables`
    data for decoding (code lengths, checksums), `indexes` the places of chunks, `shortcuts` patches that only followers
    read, `records` the manifests' documents, `held` objects of forgotten versions that present versions are stored
    against, `superseded` objects that were stored again.
    """
    causes = dict.fromkeys(CAUSES, 0)
    known = {pack.name: pack.bytes for pack in repository.catalog.packs()}
    doubled, garbage_in = repository.packs.doubled(), garbage(repository)
    joined = repository.catalog.joined()
    for place, name, size in repository.packs.files():
        if place == "." and name in (CATALOG, CLAIMS):
            causes["catalog"] += size
        elif place == LOG:
            causes["log"] += size
        elif name in garbage_in:
            causes["unreferenced packs"] += garbage_in[name]
            causes["zip and Zarr metadata"] += size - garbage_in[name] - joined.get(name, (0, 0))[1]
        elif name not in known or name in doubled:
            causes["unreferenced packs" if place == "packs" else "other files"] += size
    documents = map(repository.resolver.document, repository.catalog.versions())
    own = {*keys(identity for document in documents for identity in document.objects).values()}
    placed = repository.catalog.placed_objects()
    for name, size in known.items():
        rest = size - _manifest(repository, name, causes)
        live = placed.get(name, {})
        owned = {slot for slot, found in live.items() if found in own}
        for slot in range(len(repository.resolver.manifest(name).document.records)):
            unneeded = "superseded" if slot not in live else None if slot in owned else "held"
            rest -= _record(repository, name, slot, unneeded, causes)
        shortcuts = sum(one.nbytes for one in repository.resolver.manifest(name).document.shortcuts)
        causes["shortcuts"] += shortcuts
        rest -= shortcuts
        causes["zip and Zarr metadata"] += rest
    return causes


def _manifest(repository: Repository, pack: str, causes: dict[str, int]) -> int:
    length = repository.packs.find_entry(pack, manifest.MEMBER).length
    rest = length
    for name, blob in repository.resolver.manifest(pack).blobs.items():
        cause = "skeletons" if name.startswith("skeleton") else "layouts" if name == "layout" else "records"
        causes[cause] += len(blob)
        rest -= len(blob)
    causes["records"] += rest
    return length


def _record(repository: Repository, pack: str, slot: int, unneeded: str | None, causes: dict[str, int]) -> int:
    record = repository.resolver.manifest(pack).record(slot)
    length = record.nbytes
    if unneeded is not None:
        causes[unneeded] += length
    elif isinstance(record, Raw):
        causes["raw"] += length
    else:
        is_coded = not isinstance(record, Patches)
        index = _PLACE * record.chunks + _CHECKSUM if record.payloads > 1 and is_coded else 0
        places = [place for place in repository.reader.stored.index(record) if place is not None] if is_coded else []
        tables = sum(
            overhead_bytes(repository.packs.pread(pack, record.offset + offset, min(_HEAD, size)), size)
            for offset, size in places
        )
        causes["indexes"] += index
        causes["tables"] += tables
        causes["exact" if record.is_exact else "coarse"] += length - index - tables
    return length


def stats(repository: Repository, *, with_ledger: bool = False) -> dict[str, Any]:
    """Return totals of the store, and its ledger under `ledger` if it is wanted, which reads every manifest."""
    catalog = repository.catalog
    totals, original = catalog.totals(), catalog.original_bytes()
    causes = ledger(repository) if with_ledger else {}
    stored = sum(causes.values()) or sum(size for _, _, size in repository.packs.files())
    return {
        "versions": totals.versions,
        "runs": totals.runs,
        "tags": totals.tags,
        "objects": catalog.objects(),
        "original_bytes": original,
        "stored_bytes": stored,
        "ratio": original / stored if stored else 0.0,
        **({"ledger": causes} if with_ledger else {}),
    }
