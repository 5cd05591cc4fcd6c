"""Builds the document of a version after its objects are written, and the blobs of the document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import structs

from ckstore.errors import IntegrityError
from ckstore.formats.shards import gather_shards
from ckstore.objects.blobs import compress_against, compress_quickly
from ckstore.objects.documents import (
    DEEPEST_BLOB,
    BlobRef,
    CoarseFacts,
    FileEntry,
    HotFacts,
    VersionDocument,
)
from ckstore.objects.layouts import encode_layout
from ckstore.objects.likeness import text_of
from ckstore.objects.restore_cost import relative_cost
from ckstore.policy import Policy
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.scanning.scanned import ScannedVersion
from ckstore.storage import durable
from ckstore.storage.catalog import VersionRow
from ckstore.writing.request import Request, existing_of
from ckstore.writing.storing import Stored

#: A blob's delta of less than this part of it is kept without trying one against the parent's own delta.
_SHORT_DELTA = 1 / 256
#: A blob's delta below this size is kept without trying to pack the blob alone.
_SMALL_BLOB = 1024

#: A blob is packed against the parent's only if that takes at most this fraction of packing it alone.
_WORTH_A_DELTA = 0.6


def describe(
    repository: Repository,
    number: int,
    scanned: ScannedVersion,
    request: Request,
    stored: Sequence[Stored],
    found: Mapping[str, float] = MappingProxyType({}),
    *,
    hot: bool = False,
) -> tuple[VersionDocument, dict[str, bytes]]:
    """Return the document of a version, and its blobs by name.

    `stored` are the version's objects, in the order of its units; `found` are the results of a search for the setting.
    With `hot`, the objects are stored raw, and nothing is stored against another version.
    """
    blobs = Blobs(repository, None if hot else request.parent, compress_quickly if hot else _compressed)
    layout = encode_layout([file.layout for file in scanned.files], scanned.units)
    crcs = np.array([crc for file in scanned.files for crc in file.crcs], "<u4").tobytes()
    facts: dict[str, Any] = {}
    for file in scanned.files:
        facts |= {name: value for name, value in file.layout.facts.items() if name in ("step", "epoch")}
    if request.read:
        facts["metrics"] = {name: list(found) for name, found in request.read.items()}
    objects = tuple(item.id for item in stored)
    coarse = _coarse_facts(request.policy, stored, found)
    existing = existing_of(repository.catalog, request) if request.replace else None
    document = VersionDocument(
        number=number,
        run=request.run,
        step=request.step,
        parent=None if request.parent is None else request.parent.number,
        created=durable.timestamp(),
        fidelity="exact" if coarse is None else "coarse",
        is_directory=scanned.is_directory,
        files=tuple(
            FileEntry(
                file.path, file.layout.size, file.blake3, file.mode, file.mtime_ns,
                blobs.skeleton(index, file.path, file.skeleton, single=not scanned.is_directory),
            )
            for index, file in enumerate(scanned.files)
        ),
        links=tuple(scanned.links),
        directories=tuple(scanned.directories),
        layout=blobs.layout(layout),
        crcs=blobs.alone("crcs", crcs),
        objects=objects,
        coarse=coarse,
        metrics=dict(request.metrics),
        source=request.source,
        facts=facts,
        summary=_summary(repository, scanned, objects),
        replaces=None if existing is None else existing.number,
        hot=HotFacts(replace(request.policy, hot=None).to_text(), request.budget) if hot else None,
        goes_back=request.goes_back,
        likeness=text_of(request.bands),
    )  # fmt: skip
    return document, blobs.packed


def describe_encoded(
    version: StoredVersion, request: Request, stored: Sequence[Stored]
) -> tuple[VersionDocument, dict[str, bytes]]:
    """Return the document of a hot version whose objects are encoded now, and its blobs by name."""
    repository, before = version.repository, version.document
    blobs = Blobs(repository, request.parent)
    objects = tuple(item.id for item in stored)
    coarse = _coarse_facts(request.policy, stored)
    single = not before.is_directory
    cost, depth = relative_cost(repository.reader, set(objects), version.layout.files)
    document = structs.replace(
        before,
        metrics=dict(version.row.metrics),
        fidelity="exact" if coarse is None else "coarse",
        files=tuple(
            structs.replace(
                file, skeleton=blobs.skeleton(index, file.path, version.blank_skeleton(index), single=single)
            )
            for index, file in enumerate(before.files)
        ),
        layout=blobs.layout(version.layout.data),
        crcs=blobs.alone("crcs", version.all_crcs),
        objects=objects,
        coarse=coarse,
        summary={**before.summary, "depth": depth, "cost": cost, "base": depth == 0},
        hot=None,
    )
    return document, blobs.packed


def _coarse_facts(
    policy: Policy, stored: Sequence[Stored], found: Mapping[str, float] = MappingProxyType({})
) -> CoarseFacts | None:
    """Return the coarse objects of a version, with the results of a search; None if all objects are exact."""
    off = {index: item.facts for index, item in enumerate(stored) if item.facts is not None}
    return CoarseFacts(policy.scheme, {**policy.parameters(), **found}, off) if off else None


def _summary(repository: Repository, scanned: ScannedVersion, objects: Sequence[str]) -> dict[str, Any]:
    """Return counts, depth, relative restore cost, and whether the version needs no other."""
    cost, depth = relative_cost(repository.reader, set(objects), scanned.layouts)
    return {
        "original_bytes": scanned.size,
        "elements": sum(unit.count for unit in scanned.units),
        "tensors": _count_tensors(scanned),
        "depth": depth,
        "cost": cost,
        "base": depth == 0,
    }


def _count_tensors(scanned: ScannedVersion) -> int:
    """Return the number of tensors; a sharded tensor counts once."""
    tensors = [tensor for file in scanned.files for tensor in file.layout.tensors]
    shards = gather_shards([(file.path, file.layout) for file in scanned.files])
    return len(tensors) - sum(len(parts) - 1 for parts in shards.values())


def _compressed(data: bytes) -> bytes:
    return compress_against(data, None)


class Blobs:
    """The blobs of a version, packed against the parent's if that pays; `packed` are the new ones, by name."""

    def __init__(
        self, repository: Repository, parent: VersionRow | None, compress: Callable[[bytes], bytes] = _compressed
    ) -> None:
        self._compress = compress
        self.packed: dict[str, bytes] = {}
        self._repository = repository
        self._pack = "" if parent is None else parent.pack
        self._document = None if parent is None else repository.resolver.document(parent)
        packs = set() if self._document is None else {self._pack, *self._document.blob_packs()}
        self._known = repository.catalog.known_packs(packs)

    def layout(self, data: bytes) -> BlobRef:
        """Add the layout document; return its place."""
        return self._keep("layout", data, None if self._document is None else self._document.layout)

    def skeleton(self, index: int, path: str, data: bytes, *, single: bool) -> BlobRef:
        """Add a file's skeleton; return its place. Versions of a `single` file match whatever the file's name."""
        before = None
        if self._document is not None and not (single and self._document.is_directory):
            files = self._document.files
            before = files[0] if single else next((file for file in files if file.path == path), None)
        return self._keep(f"skeleton.{index}", data, None if before is None else before.skeleton)

    def alone(self, name: str, data: bytes) -> BlobRef:
        """Add a blob that is packed alone; return its place."""
        return self._keep(name, data, None)

    def _keep(self, name: str, data: bytes, parent: BlobRef | None) -> BlobRef:
        before = None if parent is None else self._before(parent)
        if before is not None:
            ref, value, reference, against = before
            if value == data:
                return ref
            packed = compress_against(data, against)
            if len(packed) > _SHORT_DELTA * len(data) and 1 < len(ref.chain) <= DEEPEST_BLOB:
                # A change that lasts, such as a longer name in every header, is stored once.
                nearer = compress_against(data, value)
                if 2 * len(nearer) <= len(packed):
                    packed, reference = nearer, ref
            if len(packed) <= _SMALL_BLOB or len(packed) <= _WORTH_A_DELTA * len(compress_against(data, None)):
                self.packed[name] = packed
                return BlobRef(name, None, reference)
        self.packed[name] = self._compress(data)
        return BlobRef(name)

    def _before(self, blob: BlobRef) -> tuple[BlobRef, bytes, BlobRef, bytes] | None:
        """Return a parent's blob and its base, or itself if it has none, as (place, bytes); None if one is lost."""
        repository, pack = self._repository, self._pack
        ref = blob.within(pack)
        reference = ref if ref.against is None else ref.against
        # Parts of a damaged pack may be readable, but must not become bases.
        if not self._known.issuperset([one.pack for one in ref.chain]):
            return None
        try:
            return ref, repository.resolver.blob(ref, pack), reference, repository.resolver.blob(reference, pack)
        except IntegrityError:
            return None
