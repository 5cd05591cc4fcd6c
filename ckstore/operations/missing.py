"""What a store lacks of a version that another one holds, and how it is written there.

missing = find_missing(version, target)      # ids that the target does not know, down to those that it does
missing.write(writer)                        # payloads as they are; or, of what takes fewer bytes by itself, in full
document, blobs = missing.described(...)     # the same version under a number of the target's
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
from ckstore.operations.rebase import encoded_in_full
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import parse_pack_name

Progress = Callable[[int], None]

#: An object is encoded again where it takes at most this part of what it takes as it is, with all below it.
_WORTH_ENCODING = 0.9


@dataclass(slots=True)
class Missing:
    """What is missing of one version.

    Attributes
    ----------
    version
        The version in its own store.
    objects
        What it is made of in the target: known content is what it is there, on whatever lattice.
    lattices, contents
        Records that the target lacks, by id: the version's own, and what these are stored against.
    full
        Objects that take fewer bytes by themselves than with all that they are stored against: number and unit.
    raw
        Of a hot version the same for what the target has nothing of, by content id: it is stored as it is.
    needs
        Ids of lattices and of exact layers that the target has, and that the version needs.
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
        """Bytes of all layers that are missing; of those that are to be encoded again about."""
        resolver = self.version.repository.resolver
        full = sum(_alone(resolver.lattice(item[0]), item, self.needs[0]) for item in self.full)
        layers = _size(self.lattices.values(), self.contents.values())
        return layers + full + sum(unit.nbytes for _, unit in self.raw.values())

    def write(self, writer: ObjectWriter, trusted: set[str], progress: Progress | None) -> None:
        """Write what is missing.

        Parameters
        ----------
        trusted
            Names of packs that are known to be what they are called; those that are read are added.
        progress
            Called with numbers of bytes that were written.

        Raises
        ------
        IntegrityError
            A pack is not what its name says, or a raw object not what its id says.
        """
        repository = self.version.repository
        reader, packs = repository.reader, repository.packs
        records: list[Record] = [*self.lattices.values(), *self.contents.values()]
        for name in sorted({record.pack for record in records} - trusted):
            parsed = parse_pack_name(name)
            if parsed is None or packs.digest(name) != parsed[0]:
                raise IntegrityError(
                    f"Pack {name} in {repository.place} is not what its name says; restore it from a copy, or see"
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
        """One object in full, once its values are what its id says; without integers that the target has."""
        lattice, content = item
        if content is not None:
            self._values(content, *self.full[item])
        record, layers = encoded_in_full(self.version.repository.reader, item)
        return record, replace(layers, coarse=[], aside=[]) if lattice in self.needs[0] else layers

    def _values(self, content: str, number: int, unit: Unit) -> list[Bits]:
        """The chunks of a unit; raises `IntegrityError` where they are not what the content id says."""
        hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
        chunks = [self.version.chunk(number, chunk) for chunk in range(-(-unit.count // unit.chunk))]
        for chunk in chunks:
            hasher.update(chunk.data.cast("B"))
        if hasher.identity() != content:
            raise IntegrityError(f"Object {content} is not what its id says; run `ckstore verify`.")
        return chunks

    def described(
        self, target: Repository, number: int, parent: VersionRow | None
    ) -> tuple[VersionDocument, dict[str, bytes]]:
        """The version's document in the target, and the blobs of its own pack, by name.

        Its records must be known to the target's resolver: what restoring takes there is part of it.
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
    """What the target lacks of a version of another store.

    Parameters
    ----------
    planned
        Ids of what will have been sent before; those that are missing are added.
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
            # Of a hot version nothing is stored against anything else, and it stays so.
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
    """What objects of a version are stored against, as far as the target lacks it."""

    def __init__(self, version: StoredVersion, target: Repository, planned: set[str]) -> None:
        self._version = version
        self._source = version.repository.resolver
        self._target = target.resolver
        self._planned = planned
        self._lattices: dict[str, LatticeRecord] = {}
        self._contents: dict[str, ContentRecord] = {}

    def find(self, items: Iterable[Object]) -> None:
        """Find the records of objects that the target lacks, and of all below them, level by level."""
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
        """Ids of lattices, and of exact layers, that objects are."""
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
        """The missing records that one object takes, and the ids that the target has of what these need."""
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
        """Whether an object takes fewer bytes by itself than with what it is stored against, which nobody wants."""
        record = self._source.lattice(item[0])
        alone = _alone(record, item, known)
        return not record.additive and 0 < alone < _WORTH_ENCODING * _size(lattices, contents)


def _alone(record: LatticeRecord, item: Object, known: set[str]) -> int:
    """Bytes of an object in full, as its encoder has estimated them, but for integers that are known."""
    coarse, exact = record.alone
    return coarse * (item[0] not in known) + exact * (item[1] is not None and not record.is_exact)


def _size(lattices: Iterable[LatticeRecord], contents: Iterable[ContentRecord]) -> int:
    return sum(record.nbytes for record in lattices) + sum(sum(record.lengths) for record in contents)


def _integers(reader: ObjectReader, record: LatticeRecord) -> Encoded:
    """The payloads of a record as they are stored, read in one piece."""
    data = memoryview(reader.blocks.pread(record.pack, record.offset, record.length))
    places = reader.index(record)
    coarse: list[memoryview | bytes | None] = [
        None if place is None else data[place[0] : place[0] + place[1]] for place in places
    ]
    aside = _cut(reader, record.pack, record.aside[0], record.aside[1:]) if record.aside else []
    return Encoded(record.id, coarse, [], aside=list(map(bytes, aside)), patched=bool(record.patches))


def _exact_layer(reader: ObjectReader, record: ContentRecord) -> Encoded:
    """The frames of an exact layer as they are stored, read in one piece."""
    frames: list[memoryview | bytes] = [*_cut(reader, record.pack, record.offset, record.lengths)]
    return Encoded(record.lattice, [], frames, patched=record.mode == "patched")


def _cut(reader: ObjectReader, pack: str, offset: int, lengths: Sequence[int]) -> list[memoryview]:
    data = memoryview(reader.blocks.pread(pack, offset, sum(lengths)))
    stops = [*accumulate(lengths)]
    return [data[stop - length : stop] for stop, length in zip(stops, lengths, strict=True)]


class _Blobs:
    """The blobs of a version as the target has them: those of a version near it where they are the same.

    Attributes
    ----------
    packed
        The others, by name.
    """

    def __init__(self, version: StoredVersion, target: Repository, near: VersionRow | None) -> None:
        self.packed: dict[str, bytes] = {}
        self._version = version
        # Where each string of bytes is, with what it is packed against.
        self._known: dict[tuple[bytes, bytes | None], BlobRef] = {}
        self._own: dict[tuple[bytes, bytes | None], BlobRef] = {}
        for ref in [] if near is None else target.resolver.document(near).blobs():
            assert near is not None
            place = ref.within(near.pack)
            self._known[_packed(target, place)] = place

    def carried(self, ref: BlobRef) -> BlobRef:
        """Where a blob of the version is in the target."""
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
    """The bytes of a blob as they are stored, and of what it is packed against."""
    assert place.pack is not None
    packed = repository.resolver.manifest(place.pack).blobs.get(place.name)
    if packed is None:
        raise IntegrityError(f"Pack {place.pack} has no {place.name}; run `ckstore recover`.")
    return packed, None if place.against is None else _packed(repository, place.against)[0]
