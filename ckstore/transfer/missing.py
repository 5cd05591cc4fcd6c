"""Finds and writes the parts of a version that another store lacks.

missing = find_missing(version, target)      # compares ids, level by level
missing.write(writer)                        # copies payloads, or re-encodes in full if that is smaller
document, blobs = missing.described(...)     # the same version under a new number
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.encoding.estimate import Encoded
from ckstore.encoding.writer import ObjectWriter
from ckstore.errors import IntegrityError
from ckstore.objects.documents import BlobRef, Object, VersionDocument
from ckstore.objects.identity import MemberHasher
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import ContentRecord, LatticeRecord, Record
from ckstore.objects.restore_cost import relative_cost
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.writing.rebase import encoded_in_full

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
    objects
        The version's objects in the target; known content keeps its lattice there.
    lattices, contents
        Missing records by id: the version's own, and their chains'.
    full
        Number and unit of the objects that take fewer bytes in full than with their missing chains.
    raw
        Number and unit of the raw objects to copy for a hot version, by content id.
    needs
        Ids of lattices and of exact layers in the target that the version needs.
    """

    version: StoredVersion
    objects: tuple[Object, ...] = ()
    lattices: dict[str, LatticeRecord] = field(default_factory=dict)
    contents: dict[str, ContentRecord] = field(default_factory=dict)
    full: dict[Object, tuple[int, Unit]] = field(default_factory=dict)
    raw: dict[str, tuple[int, Unit]] = field(default_factory=dict)
    needs: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    @property
    def nbytes(self) -> int:
        """Bytes of all missing layers; an estimate for objects to encode in full."""
        resolver = self.version.repository.resolver
        full = sum(_alone(resolver.lattice(item[0]), item, self.needs[0]) for item in self.full)
        layers = _size(self.lattices.values(), self.contents.values())
        return layers + full + sum(unit.nbytes for _, unit in self.raw.values())

    def write(self, writer: ObjectWriter, trusted: set[str], progress: Progress | None) -> None:
        """Write the missing parts.

        Parameters
        ----------
        trusted
            Names of packs whose digests were checked; packs that are read are added.
        progress
            Called with numbers of written bytes.

        Raises
        ------
        IntegrityError
            A pack does not match its name, or a raw object does not match its id.
        """
        repository = self.version.repository
        reader, packs = repository.reader, repository.packs
        records: list[Record] = [*self.lattices.values(), *self.contents.values()]
        for name in sorted({record.pack for record in records} - trusted):
            if not packs.is_intact(name):
                raise IntegrityError(
                    f"Pack {name} in {repository.place} does not match its name; restore it from a copy, or see"
                    f" `ckstore --store {repository.place} verify`."
                )
            trusted.add(name)
        report = progress or (lambda count: None)
        for lattice in self.lattices.values():
            writer.put(None, replace(lattice, pack=""), None, _integers(reader, lattice))
            report(lattice.nbytes)
        for content in self.contents.values():
            corrected = replace(repository.resolver.lattice(content.lattice), debt=content.debt)
            writer.put(content.id, corrected, content.parent, _exact_layer(reader, content), factor=content.factor)
            report(sum(content.lengths))
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            done = in_order(pool, self._encoded, self.full, worker_count() + 1)
            for (_, identity), (record, layers) in zip(self.full, done, strict=True):
                writer.put(identity, record, None, layers)
                report(sum(layers.nbytes))
        for identity, (number, unit) in self.raw.items():
            writer.put_raw(identity, unit.dtype, unit.chunk, np.concatenate(self._values(identity, number, unit)))
            report(unit.nbytes)
        writer.begin_sync()

    def _encoded(self, item: Object) -> tuple[LatticeRecord, Encoded]:
        """Check an object's values, and encode it in full, without integers that the target has."""
        lattice, content = item
        if content is not None:
            self._values(content, *self.full[item])
        record, layers = encoded_in_full(self.version.repository.reader, item)
        return record, replace(layers, coarse=[], aside=[]) if lattice in self.needs[0] else layers

    def _values(self, content: str, number: int, unit: Unit) -> list[Bits]:
        """Return the chunks of a unit; raise `IntegrityError` if they do not match the content id."""
        hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
        chunks = [self.version.chunk(number, chunk) for chunk in range(-(-unit.count // unit.chunk))]
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
        near = target.catalog.latest(version.document.run) if parent is None else parent
        blobs = _Blobs(version, target, near)
        before = version.document
        unique = set(self.objects)
        cost, depth = relative_cost(target.reader, unique, version.layout.files)
        summary = {name: value for name, value in before.summary.items() if name != "stored_bytes"}
        document = replace(
            before,
            number=number,
            parent=None if parent is None else parent.number,
            replaces=None,
            objects=self.objects,
            layout=blobs.carried(before.layout),
            crcs=blobs.carried(before.crcs),
            files=tuple(replace(file, skeleton=blobs.carried(file.skeleton)) for file in before.files),
            metrics=dict(version.row.metrics),
            summary=summary | {"depth": depth, "cost": cost, "base": depth == 0},
            hot=before.hot if self.raw else None,
        )
        document.check()
        return document, blobs.packed


def find_missing(version: StoredVersion, target: Repository, planned: set[str] | None = None) -> Missing:
    """Find the parts of a version that the target lacks.

    Parameters
    ----------
    planned
        Ids of objects that earlier versions will have sent; the missing ones are added.
    """
    document, units = version.document, version.layout.units
    known = target.resolver.known(content for _, content in document.objects if content is not None)
    missing = Missing(version)
    chains = _Chains(version, target, planned or set())
    objects: list[Object] = []
    wanted: dict[Object, tuple[int, Unit]] = {}
    for number, (lattice, content) in enumerate(document.objects):
        item: Object = lattice, content
        if content in known:
            assert content is not None
            item = known[content], content
            missing.needs[0].add(item[0])
            if item[0] != content:
                missing.needs[1].add(content)
        elif content is not None and document.hot is not None:
            # A hot version has no deltas, and stays hot.
            item = content, content
            if planned is None or content not in planned:
                missing.raw.setdefault(content, (number, units[number]))
        else:
            wanted.setdefault(item, (number, units[number]))
        objects.append(item)
    missing.objects = tuple(objects)
    chains.find(wanted)
    for item, place in wanted.items():
        lattices, contents, needs = chains.below(item)
        if chains.is_cheaper_in_full(item, lattices, contents, needs[0]):
            missing.full[item] = place
            missing.needs[0].update(needs[0] & {item[0]})
            continue
        missing.needs[0].update(needs[0])
        missing.needs[1].update(needs[1])
        missing.lattices |= {record.id: record for record in lattices}
        missing.contents |= {record.id: record for record in contents}
    for lattice, content in missing.full:
        missing.lattices.pop(lattice, None)
        missing.contents.pop(content or "", None)
    if planned is not None:
        planned |= {*missing.lattices, *missing.contents, *missing.raw}
        planned |= {identity for item in missing.full for identity in item if identity is not None}
    return missing


class _Chains:
    """The chains of a version's objects, as far as the target lacks them."""

    def __init__(self, version: StoredVersion, target: Repository, planned: set[str]) -> None:
        self._version = version
        self._source = version.repository.resolver
        self._target = target.resolver
        self._planned = planned
        self._lattices: dict[str, LatticeRecord] = {}
        self._contents: dict[str, ContentRecord] = {}

    def find(self, items: Iterable[Object]) -> None:
        """Find the missing records of objects and of their chains, level by level."""
        lattices, contents = self._first(items)
        seen: set[str] = set()
        while lattices or contents:
            seen |= lattices | contents
            lattices -= self._target.known_lattices(lattices) | self._planned
            known = self._target.known(contents)
            contents -= {content for content, lattice in known.items() if lattice != content} | self._planned
            found = [self._source.lattice(identity) for identity in sorted(lattices)]
            layers = [self._source.content(identity) for identity in sorted(contents)]
            if None in layers or any(record.is_raw or record.id not in lattices for record in found):
                number = self._version.row.number
                raise IntegrityError(f"Version {number} needs an object that is lost; run `ckstore verify {number}`.")
            self._lattices |= {record.id: record for record in found}
            self._contents |= {record.id: record for record in layers if record is not None}
            lattices = {record.base for record in found if record.base is not None}
            lattices |= {layer.lattice for layer in layers if layer is not None}
            contents = {layer.parent for layer in layers if layer is not None and layer.parent is not None}
            lattices -= seen
            contents -= seen

    def _first(self, items: Iterable[Object]) -> tuple[set[str], set[str]]:
        """Return the ids of the objects' lattices, or exact layers if they have them."""
        reader = self._version.repository.reader
        lattices, contents = set(), set()
        for lattice, content in items:
            if reader.exact_layer(lattice, content) is None:
                lattices.add(lattice)
            else:
                assert content is not None
                contents.add(content)
        return lattices, contents

    def below(self, item: Object) -> tuple[list[LatticeRecord], list[ContentRecord], tuple[set[str], set[str]]]:
        """Return the missing records of one object's chain, and the ids that these need from the target."""
        lattices, contents = self._first([item])
        found: dict[str, LatticeRecord] = {}
        layers: dict[str, ContentRecord] = {}
        needs: tuple[set[str], set[str]] = set(), set()
        while lattices or contents:
            if contents:
                identity = contents.pop()
                layer = self._contents.get(identity)
                if layer is None:
                    needs[1].add(identity)
                elif identity not in layers:
                    layers[identity] = layer
                    lattices.add(layer.lattice)
                    contents |= set() if layer.parent is None else {layer.parent}
            else:
                identity = lattices.pop()
                record = self._lattices.get(identity)
                if record is None:
                    needs[0].add(identity)
                elif identity not in found:
                    found[identity] = record
                    lattices |= set() if record.base is None else {record.base}
        return list(found.values()), list(layers.values()), needs

    def is_cheaper_in_full(
        self, item: Object, lattices: Sequence[LatticeRecord], contents: Sequence[ContentRecord], known: set[str]
    ) -> bool:
        """Return whether an object takes fewer bytes in full than with its missing bases."""
        record = self._source.lattice(item[0])
        alone = _alone(record, item, known)
        return not record.additive and 0 < alone < _WORTH_ENCODING * _size(lattices, contents)


def _alone(record: LatticeRecord, item: Object, known: set[str]) -> int:
    """Return the estimated bytes of an object in full, without integers that the target has."""
    coarse, exact = record.alone
    return coarse * (item[0] not in known) + exact * (item[1] is not None and not record.is_exact)


def _size(lattices: Iterable[LatticeRecord], contents: Iterable[ContentRecord]) -> int:
    return sum(record.nbytes for record in lattices) + sum(sum(record.lengths) for record in contents)


def _integers(reader: ObjectReader, record: LatticeRecord) -> Encoded:
    """Read the stored payloads of a record in one piece."""
    data = memoryview(reader.blocks.pread(record.pack, record.offset, record.length))
    places = reader.index(record)
    coarse: list[memoryview | bytes | None] = [
        None if place is None else data[place[0] : place[0] + place[1]] for place in places
    ]
    aside = _cut(reader, record.pack, record.aside[0], record.aside[1:]) if record.aside else []
    return Encoded(record.id, coarse, [], aside=list(map(bytes, aside)), patched=bool(record.patches))


def _exact_layer(reader: ObjectReader, record: ContentRecord) -> Encoded:
    """Read the stored frames of an exact layer in one piece."""
    frames: list[memoryview | bytes] = [*_cut(reader, record.pack, record.offset, record.lengths)]
    return Encoded(record.lattice, [], frames, patched=record.mode == "patched")


def _cut(reader: ObjectReader, pack: str, offset: int, lengths: Sequence[int]) -> list[memoryview]:
    data = memoryview(reader.blocks.pread(pack, offset, sum(lengths)))
    stops = [*accumulate(lengths)]
    return [data[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


class _Blobs:
    """The blobs of a version in the target; equal blobs of a nearby version are shared.

    Attributes
    ----------
    packed
        The new blobs, by name.
    """

    def __init__(self, version: StoredVersion, target: Repository, near: VersionRow | None) -> None:
        self.packed: dict[str, bytes] = {}
        self._version = version
        # Place of each packed blob, by its bytes and its base's.
        self._known: dict[tuple[bytes, bytes | None], BlobRef] = {}
        self._own: dict[tuple[bytes, bytes | None], BlobRef] = {}
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


def _packed(repository: Repository, place: BlobRef) -> tuple[bytes, bytes | None]:
    """Return the stored bytes of a blob, and of the blob that it is a delta against."""
    assert place.pack is not None
    packed = repository.resolver.manifest(place.pack).blobs.get(place.name)
    if packed is None:
        raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.")
    return packed, None if place.against is None else _packed(repository, place.against)[0]
