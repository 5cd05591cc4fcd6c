"""Finds and writes the parts of a version that another store lacks.

missing = find_missing(version, target)      # compares ids, level by level
missing.write(writer)                        # copies payloads, or re-encodes in full if that is smaller
document, blobs = missing.described(...)     # the same version under a new number
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from ckstore.codecs.lattice import Bits
from ckstore.encoding.estimate import Encoded
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.encoding.reencode import in_full, without_lost
from ckstore.errors import IntegrityError
from ckstore.objects.documents import BlobRef, VersionDocument
from ckstore.objects.identity import MemberHasher
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Patches, Raw, Record
from ckstore.objects.restore_cost import relative_cost
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow

Progress = Callable[[int], None]

#: An object is re-encoded in full if that takes at most this fraction of its chain's missing bytes.
_WORTH_ENCODING = 0.9


@dataclass(slots=True)
class Missing:
    """The parts of one version that the target lacks.

    Attributes
    ----------
    version
        The version in its own store.
    records
        Missing records by id: the version's own, and their chains'.
    bases
        Ids of the missing records that are not the version's own objects.
    shortcuts
        Patches of objects of the target that lead to missing ones, by id.
    full
        Number and unit of the objects to encode again, by id: in full, or against an object that is in `near`.
    near
        Ids of objects that are or will be in the target, whose values are compared with their ids.
    raw
        Number and unit of the raw objects to copy for a hot version, by content id.
    needs
        Ids of objects in the target that the version needs.
    """

    version: StoredVersion
    records: dict[str, Record] = field(default_factory=dict)
    bases: set[str] = field(default_factory=set)
    shortcuts: dict[str, Patches] = field(default_factory=dict)
    full: dict[str, tuple[int, Unit]] = field(default_factory=dict)
    near: set[str] = field(default_factory=set)
    raw: dict[str, tuple[int, Unit]] = field(default_factory=dict)
    needs: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of all missing objects; an estimate for objects to encode in full."""
        resolver = self.version.repository.resolver
        full = sum(resolver.record(identity).alone for identity in self.full)
        return _size(self.records.values()) + full + sum(unit.nbytes for _, unit in self.raw.values())

    def write(self, writer: ObjectWriter, trusted: set[str], progress: Progress | None) -> None:
        """Write the missing parts.

        `trusted` are the names of packs whose digests were checked; packs that are read are added. Raises
        `IntegrityError` if a pack does not match its name, or a raw object its id.
        """
        repository = self.version.repository
        reader, packs = repository.reader, repository.packs
        for name in sorted({record.pack for record in self.records.values()} - trusted):
            if not packs.is_intact(name):
                raise IntegrityError(
                    f"Pack {name} in {repository.place} does not match its name; restore it from a copy, or see"
                    f" `ckstore --store {repository.place} verify`."
                )
            trusted.add(name)
        report = progress or (lambda count: None)
        for record in self.records.values():
            encoded, shortcut = _stored(reader, record), self.shortcuts.get(record.id)
            if shortcut is not None:
                with suppress(IntegrityError):  # Only followers need it.
                    encoded.shortcut = _stored(reader, shortcut)
            writer.put(encoded)
            report(record.nbytes)
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            for encoded in in_order(pool, self._encoded, self.full, worker_count() + 1):
                writer.put(encoded)
                report(encoded.nbytes)
        for identity, (_, unit) in self.raw.items():
            writer.put_raw(identity, unit.dtype, unit.chunk, np.concatenate(self._values(identity, unit)))
            report(unit.nbytes)
        writer.begin_sync()

    def _encoded(self, identity: str) -> Encoded:
        """Check an exact object's values, and encode an object again."""
        reader = self.version.repository.reader
        record = reader.resolver.record(identity)
        if not record.is_exact:
            return in_full(reader, record)
        self._values(identity, self.full[identity][1])
        return without_lost(reader, record, self.near)

    def _values(self, content: str, unit: Unit) -> list[Bits]:
        """Return the chunks of a unit; raise `IntegrityError` if they do not match the content id."""
        hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
        reader = self.version.repository.reader
        chunks = [reader.bits(content, chunk) for chunk in range(-(-unit.count // unit.chunk))]
        for chunk in chunks:
            hasher.update(chunk.data.cast("B"))
        if hasher.identity() != content:
            raise IntegrityError(f"Object {content} does not match its id; run `ckstore verify`.")
        return chunks

    def described(
        self, target: Repository, number: int, parent: VersionRow | None
    ) -> tuple[VersionDocument, dict[str, bytes]]:
        """Return the version's document in the target, and its own blobs by name.

        The target's resolver must know its records: the document has the restore cost there.
        """
        version = self.version
        near = target.catalog.latest(version.row.run) if parent is None else parent
        blobs = _Blobs(version, target, near)
        before = version.document
        cost, depth = relative_cost(target.reader, set(before.objects), version.layout.files)
        summary = {name: value for name, value in before.summary.items() if name != "stored_bytes"}
        document = replace(
            before,
            number=number,
            parent=None if parent is None else parent.number,
            replaces=None,
            layout=blobs.carried(before.layout),
            crcs=blobs.carried(before.crcs),
            files=tuple(replace(file, skeleton=blobs.carried(file.skeleton)) for file in before.files),
            metrics=dict(version.row.metrics),
            summary=summary | {"depth": depth, "cost": cost, "base": depth == 0},
            hot=before.hot if self.raw else None,
        )
        document.encode()
        return document, blobs.packed


def find_missing(
    version: StoredVersion, target: Repository, planned: set[str] | None = None, *, verify: bool = False
) -> Missing:
    """Find the parts of a version that the target lacks.

    `planned` are ids of objects that earlier versions will have sent; the missing ones are added. With `verify`, bases
    that are not the version's own are not sent, and the objects on them are encoded again: values of exact bases cannot
    be compared with their ids, which depend on the layout of their own version. Sums are an exception, since their ids
    depend on their bases': an exact one is encoded again.
    """
    document, units = version.document, version.layout.units
    known = target.resolver.known(document.objects)
    missing = Missing(version)
    chains = _Chains(version, target, planned or set())
    own = set(document.objects)
    wanted: dict[str, tuple[int, Unit]] = {}
    for number, identity in enumerate(document.objects):
        if identity in known:
            missing.needs.add(identity)
        elif document.hot is None:
            wanted.setdefault(identity, (number, units[number]))
        elif planned is None or identity not in planned:
            # A hot version has no deltas, and stays hot.
            missing.raw.setdefault(identity, (number, units[number]))
    chains.find(wanted)
    for identity, place in wanted.items():
        records, needs = chains.below(identity)
        if verify and len(records) > 1 and chains.is_sum(identity) and records[1].is_exact:
            # By the layout of the sum's own unit, the values of its base can be compared with their id.
            missing.full[records[1].id] = place
            missing.near |= needs
            del records[1:]
        bases = {record.id for record in records} - own
        if verify and bases and not chains.is_sum(identity):
            missing.full[identity] = place
            missing.near |= needs | own
            missing.needs |= needs
            continue
        if not chains.is_sum(identity) and chains.is_cheaper_in_full(identity, records):
            missing.full[identity] = place
            continue
        missing.bases |= bases
        missing.needs.update(needs)
        missing.records |= {record.id: record for record in records}
    for identity in missing.full:
        missing.records.pop(identity, None)
    shortcuts = [found for record in missing.records.values() if (found := chains.shortcut(record)) is not None]
    near = target.resolver.known(shortcut.base for shortcut in shortcuts)
    missing.shortcuts = {shortcut.id: shortcut for shortcut in shortcuts if shortcut.base in near}
    if planned is not None:
        planned |= {*missing.records, *missing.raw, *missing.full}
    return missing


class _Chains:
    """The chains of a version's objects, as far as the target lacks them."""

    def __init__(self, version: StoredVersion, target: Repository, planned: set[str]) -> None:
        self._version = version
        self._source = version.repository.resolver
        self._target = target.resolver
        self._planned = planned
        self._records: dict[str, Record] = {}

    def find(self, identities: Iterable[str]) -> None:
        """Find the missing records of objects and of their chains, level by level."""
        wanted = set(identities)
        seen: set[str] = set()
        while wanted:
            seen |= wanted
            wanted -= self._target.known(wanted) | self._planned
            found = [self._source.record(identity) for identity in sorted(wanted)]
            if any(isinstance(record, Raw) for record in found):
                number = self._version.row.number
                raise IntegrityError(f"Version {number} needs an object that is lost; run `ckstore verify {number}`.")
            self._records |= {record.id: record for record in found}
            wanted = {record.base for record in found if record.base is not None} - seen

    def below(self, identity: str | None) -> tuple[list[Record], set[str]]:
        """Return the missing records of one object's chain, and the ids that these need from the target."""
        found: dict[str, Record] = {}
        while identity is not None and identity not in found:
            if identity not in self._records:
                return list(found.values()), {identity}
            found[identity] = self._records[identity]
            identity = found[identity].base
        return list(found.values()), set()

    def shortcut(self, record: Record) -> Patches | None:
        """Return patches that lead to the object of a record from another one, if there are any."""
        return self._source.shortcut(record)

    def is_sum(self, identity: str) -> bool:
        """Return whether an object is a sum, which cannot be stored in full."""
        return self._source.record(identity).is_sum

    def is_cheaper_in_full(self, identity: str, records: Sequence[Record]) -> bool:
        """Return whether an object takes fewer bytes in full than with its missing bases."""
        return 0 < self._source.record(identity).alone < _WORTH_ENCODING * _size(records)


def _size(records: Iterable[Record]) -> int:
    return sum(record.nbytes for record in records)


def _stored(reader: ObjectReader, record: Record) -> Encoded:
    """Read the stored payloads of a record in one piece."""
    data = memoryview(reader.blocks.pread(record.pack, *record.at))
    payloads: list[memoryview | bytes | None] = [
        None if place is None else data[place[0] : place[0] + place[1]] for place in reader.stored.index(record)
    ]
    return Encoded(replace(record, pack=""), payloads)


class _Blobs:
    """The blobs of a version in the target: new ones in `packed`; equal ones of a nearby version are shared."""

    def __init__(self, version: StoredVersion, target: Repository, near: VersionRow | None) -> None:
        self.packed: dict[str, bytes] = {}
        self._version = version
        # Place of each packed blob, by its bytes and its bases'.
        self._known: dict[tuple[bytes, ...], BlobRef] = {}
        self._own: dict[tuple[bytes, ...], BlobRef] = {}
        for ref in [] if near is None else target.resolver.document(near).blobs():
            assert near is not None
            place = ref.within(near.pack)
            self._known[_packed(target, place)] = place

    def carried(self, ref: BlobRef) -> BlobRef:
        """Return the place of a blob in the target; add it if it is new."""
        place = ref.within(self._version.row.pack)
        packed = _packed(self._version.repository, place)
        found = self._known.get(packed) or self._own.get(packed)
        if found is None:
            against = None if place.against is None else self.carried(place.against)
            name = ref.name
            while name in self.packed:
                name = f"{ref.name}.{len(self.packed)}"
            self.packed[name] = packed[0]
            found = self._own[packed] = BlobRef(name, None, against)
        return found


def _packed(repository: Repository, place: BlobRef) -> tuple[bytes, ...]:
    """Return the stored bytes of a blob, and of the blobs that it is a delta against."""
    assert place.pack is not None
    packed = repository.resolver.manifest(place.pack).blobs.get(place.name)
    if packed is None:
        raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.")
    return packed, *(() if place.against is None else _packed(repository, place.against))
