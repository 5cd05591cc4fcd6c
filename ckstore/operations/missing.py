"""What a store lacks of a version that another one holds, and how it is written there: as it is, nothing is encoded.

missing = find_missing(version, target)      # ids that the target does not know, down to those that it does
missing.write(writer)                        # payloads as the source has them, from packs that are what their names say
document, blobs = missing.described(...)     # the same version under a number of the target's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ckstore.encoding.estimate import Encoded
from ckstore.encoding.writer import ObjectWriter
from ckstore.errors import IntegrityError
from ckstore.objects.documents import BlobRef, Object, VersionDocument
from ckstore.objects.identity import MemberHasher
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import ContentRecord, LatticeRecord, Record
from ckstore.objects.restore_cost import relative_cost, restore_work
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion
from ckstore.repository import Repository
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import parse_pack_name

Progress = Callable[[int], None]


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
        Records that the target lacks: the version's own, and what these are stored against.
    raw
        The units of a hot version that the target has nothing of, by content id: they are stored as they are.
    needs
        Ids of lattices and of exact layers that the target has, and that the version needs.
    """

    version: StoredVersion
    objects: tuple[Object, ...] = ()
    lattices: list[LatticeRecord] = field(default_factory=list)
    contents: list[ContentRecord] = field(default_factory=list)
    raw: dict[str, tuple[int, Unit]] = field(default_factory=dict)
    needs: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers that are missing."""
        coarse = sum(record.nbytes for record in self.lattices)
        exact = sum(sum(record.lengths) for record in self.contents)
        return coarse + exact + sum(unit.nbytes for _, unit in self.raw.values())

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
        records: list[Record] = [*self.lattices, *self.contents]
        for name in sorted({record.pack for record in records} - trusted):
            parsed = parse_pack_name(name)
            if parsed is None or packs.digest(name) != parsed[0]:
                raise IntegrityError(
                    f"Pack {name} in {repository.path} is not what its name says; restore it from a copy, or see"
                    f" `ckstore --store {repository.path} verify`."
                )
            trusted.add(name)
        report = progress or (lambda count: None)
        for lattice in self.lattices:
            writer.put(None, replace(lattice, pack=""), None, _integers(reader, lattice))
            report(lattice.nbytes)
        for content in self.contents:
            corrected = replace(repository.resolver.lattice(content.lattice), debt=content.debt)
            writer.put(content.id, corrected, content.parent, _exact_layer(reader, content), factor=content.factor)
            report(sum(content.lengths))
        for identity, (number, unit) in self.raw.items():
            hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
            chunks = [self.version.chunk(number, chunk, keep=False) for chunk in range(-(-unit.count // unit.chunk))]
            for chunk in chunks:
                hasher.update(chunk.data.cast("B"))
            if hasher.identity() != identity:
                raise IntegrityError(f"Object {identity} is not what its id says; run `ckstore verify`.")
            writer.put_raw(identity, unit.dtype, unit.chunk, np.concatenate(chunks))
            report(unit.nbytes)
        writer.begin_sync()

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
        work, full = restore_work(target.reader, unique, version.layout.files)
        depth = max((target.reader.depth(*item) for item in unique), default=0)
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
            summary=summary | {"depth": depth, "cost": relative_cost(work, full), "base": depth == 0},
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
    resolver = target.resolver
    document, units = version.document, version.layout.units
    seen = set() if planned is None else planned
    missing = Missing(version)
    known = resolver.known(content for _, content in document.objects if content is not None)
    lattices: set[str] = set()
    contents: set[str] = set()
    objects: list[Object] = []
    for number, (lattice, content) in enumerate(document.objects):
        if content is None:
            lattices.add(lattice)
        elif content in known:
            lattice = known[content]
            missing.needs[0].add(lattice)
            if lattice != content:
                missing.needs[1].add(content)
        elif document.hot is not None:
            # Of a hot version nothing is stored against anything else, and it stays so.
            lattice = content
            if content not in seen:
                missing.raw.setdefault(content, (number, units[number]))
        else:
            layer = version.repository.reader.exact_layer(lattice, content)
            if layer is None:
                lattices.add(lattice)
            else:
                lattice = layer.lattice
                contents.add(content)
        objects.append((lattice, content))
    missing.objects = tuple(objects)
    _find_below(missing, target, lattices - seen, contents - seen, seen)
    seen |= missing.raw.keys()
    return missing


def _find_below(missing: Missing, target: Repository, lattices: set[str], contents: set[str], seen: set[str]) -> None:
    """Find the records of ids that the target lacks, and of what these are stored against, level by level."""
    source, resolver = missing.version.repository.resolver, target.resolver
    while lattices or contents:
        seen |= lattices | contents
        there = resolver.known_lattices(lattices)
        exact = {content for content, lattice in resolver.known(contents).items() if lattice != content}
        missing.needs[0].update(there)
        missing.needs[1].update(exact)
        found = [source.lattice(identity) for identity in sorted(lattices - there)]
        layers = [source.content(identity) for identity in sorted(contents - exact)]
        lost = [record for record in found if record.is_raw or record.id not in lattices]
        if lost or None in layers:
            raise IntegrityError(
                f"Version {missing.version.row.number} needs an object that is lost; run `ckstore verify`."
            )
        missing.lattices += found
        missing.contents += [layer for layer in layers if layer is not None]
        lattices = {record.base for record in found if record.base is not None}
        lattices |= {layer.lattice for layer in layers if layer is not None}
        contents = {layer.parent for layer in layers if layer is not None and layer.parent is not None}
        lattices -= seen
        contents -= seen


def _integers(reader: ObjectReader, record: LatticeRecord) -> Encoded:
    """The payloads of a record as they are stored."""
    places = reader.index(record)
    aside = _cut(reader, record.pack, record.aside[0], record.aside[1:]) if record.aside else []
    coarse: list[memoryview | bytes | None] = [
        None if place is None else reader.blocks.pread(record.pack, record.offset + place[0], place[1])
        for place in places
    ]
    return Encoded(record.id, coarse, [], aside=aside, patched=bool(record.patches))


def _exact_layer(reader: ObjectReader, record: ContentRecord) -> Encoded:
    """The frames of an exact layer as they are stored."""
    frames: list[memoryview | bytes] = [*_cut(reader, record.pack, record.offset, record.lengths)]
    return Encoded(record.lattice, [], frames, patched=record.mode == "patched")


def _cut(reader: ObjectReader, pack: str, offset: int, lengths: Sequence[int]) -> list[bytes]:
    data = memoryview(reader.blocks.pread(pack, offset, sum(lengths)))
    found = []
    for length in lengths:
        found.append(bytes(data[:length]))
        data = data[length:]
    return found


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
