"""Mark phase of `gc`: finds the parts of each pack that the current versions need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.gc.kept import present_form
from ckstore.lineage.release import Layer, to_store_in_full
from ckstore.objects.documents import ManifestDocument, VersionDocument
from ckstore.objects.records import Record
from ckstore.storage.catalog import VersionRow, key
from ckstore.storage.pack import PackInfo
from ckstore.storage.scan_packs import ScannedPack

if TYPE_CHECKING:
    from ckstore.repository import Repository

#: Price of a written byte: an object is stored in full if that frees a tenth more than it writes.
_PRICE = 1.1
NONE: Mapping[int, Sequence[VersionRow]] = MappingProxyType({})

#: (Id by the manifest, number and parent there, time) of a version.
Origin = tuple[str, int, int | None, str]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a store that a plan is made for.

    Attributes
    ----------
    packs
        Names of the packs that it decides on; the state also has packs with objects stored against theirs.
    needed
        Keys of the objects in these other packs, which are all wanted.
    beyond
        Pack of each object outside that versions, bases and origins of the part name, by key.
    spared
        Blobs, by pack, that count as needed, since not all versions were read that may need them.
    """

    packs: Set[str]
    needed: Set[int]
    beyond: Mapping[int, str]
    spared: Mapping[str, Set[str]]


@dataclass(frozen=True, slots=True)
class State:
    """A consistent snapshot of a store that a plan is made from.

    It has the catalog's identity, which `recover` changes since a rebuilt catalog may place objects in other packs, the
    keys of the objects in each slot of each pack, and as `files` the unreferenced packs that are not recorded as gone.
    Versions, packs and objects are those of a `part`, if there is one.
    """

    catalog: str
    versions: list[VersionRow]
    packs: list[PackInfo]
    objects: dict[str, dict[int, int]]
    files: list[PackInfo]
    part: Part | None = None

    @classmethod
    def of(cls, repository: Repository) -> State:
        """Take a snapshot of the current state."""
        catalog = repository.catalog
        while True:
            identity, packs, described = catalog.identity(), catalog.packs(), catalog.described()
            versions, objects = catalog.versions(), catalog.placed_objects()
            # Objects move only if packs were added. A retry, unlike a lock, does not block writers for this long.
            if (catalog.identity(), catalog.packs(), catalog.described()) == (identity, packs, described):
                break
        # Packs that are recorded as gone are deleted in due time anyway.
        known = {pack.name for pack in packs} | catalog.gone().keys()
        files = [info for info in repository.packs.list_packs() if info.name not in known]
        return cls(identity, versions, packs, objects, files)


@dataclass(slots=True)
class PackContents:
    """One pack of the catalog, and its needed parts.

    Attributes
    ----------
    name, kind, bytes
        File name; `encoded` or `raw`; size.
    commit
        Number and time of the pack's commit, from its manifest.
    sizes, alone
        Bytes of the layer of each record, by slot; and in full, if it can be.
    blobs
        Bytes of each blob, by name.
    version
        The version in its manifest.
    is_present
        Whether the catalog has that version and finds it here.
    slots, wanted
        Slots of the records and names of the blobs that are needed.
    """

    name: str
    kind: str
    bytes: int
    commit: tuple[int, str]
    sizes: list[int]
    alone: list[int | None]
    blobs: dict[str, int]
    version: Origin | None
    is_present: bool = False
    slots: set[int] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)

    @property
    def is_needed(self) -> bool:
        """Whether a part of the pack is needed."""
        return self.is_present or bool(self.slots) or bool(self.wanted)

    @property
    def garbage(self) -> int:
        """Bytes of objects and blobs that nothing needs."""
        objects = sum(size for slot, size in enumerate(self.sizes) if slot not in self.slots)
        return objects + sum(size for name, size in self.blobs.items() if name not in self.wanted)


@dataclass(slots=True)
class Survey:
    """All packs of the catalog in order, and the objects that are not needed any more.

    Attributes
    ----------
    packs
        By name.
    dead
        Keys of placed objects that nothing needs.
    present
        Ids and numbers, from their manifests, of the current versions.
    in_full
        Slots, by pack, of objects to store in full: this takes fewer bytes than the objects of forgotten versions that
        they are stored against.
    added
        The expected bytes of these.
    held
        Bytes of objects of forgotten versions that present ones are stored against.
    kept
        Bytes that only forgotten versions have, which are kept for a time.
    lost
        Numbers of the records of forgotten versions that cannot be kept, since they are damaged.
    settled
        Packs that only a change can make garbage of, no passing time, with the bytes of their objects that only others'
        chains need.
    below
        Packs outside of the part with bases of objects that it does not need, or needs only as bases.
    """

    packs: dict[str, PackContents]
    dead: list[int]
    present: set[tuple[str, int]]
    in_full: dict[str, list[int]]
    added: int
    held: int
    kept: int
    lost: list[int]
    settled: dict[str, int] = field(default_factory=dict)
    below: set[str] = field(default_factory=set)


def survey(
    repository: Repository,
    state: State,
    uncommitted: Sequence[ScannedPack] = (),
    *,
    ahead: bool = False,
    forgotten: Mapping[int, Sequence[VersionRow]] = NONE,
) -> Survey:
    """Find the parts of packs that the current versions need; read every manifest, decode nothing.

    A version needs its manifest, blobs, objects and their chains. Of the latest version of each run, the first objects
    of the chains are kept as well: the next version's step is derived from them.

    The references of `uncommitted` packs are needed, since `recover` could restore their versions, and so are the
    versions that were `forgotten` by records of some numbers. The survey looks
    `ahead` if it takes the objects `in_full` as stored. It raises `IntegrityError` for an unreadable manifest or an
    incomplete version, whose repair may need parts that would be removed.
    """
    graph = _Graph(part=state.part)
    contents = _read_packs(repository, state, graph)
    needs = _Needs(graph)
    _need_others(state.part, contents, needs)
    rows = state.versions
    present = {_need_version(repository, row, contents, needs) for row in rows}
    lasting = _Lasting(graph, needs, contents)
    for pack in uncommitted:
        _need_uncommitted(repository, pack, contents, needs)
    _need_last(repository, state, graph, needs)
    unneeded = _unneeded(graph, needs, contents) if forgotten else 0
    lost = []
    for number, group in forgotten.items():
        try:
            present |= {_need_version(repository, present_form(repository, row), contents, needs) for row in group}
        except (IntegrityError, NotFoundError):
            lost.append(number)
    kept = unneeded - _unneeded(graph, needs, contents) if forgotten else 0
    original = sum(row.original_bytes for row in (*rows, *chain.from_iterable(forgotten.values())))
    again = _to_store_in_full(graph, needs, contents, inf if state.part else original)
    in_full: dict[str, list[int]] = {}
    added = 0
    for name, slots in graph.placed.items():
        if found := [slot for slot, number in slots.items() if number in again]:
            in_full[name] = found
            added += sum(contents[name].alone[slot] or 0 for slot in found)
    settled, below = lasting.settled(), graph.below(needs)
    if ahead:
        needs = needs.after(again)
    for name, slots in graph.placed.items():
        contents[name].slots = {
            slot for slot, number in slots.items() if number in needs.objects and not (ahead and number in again)
        }
    dead = [number for number in graph.bases if number not in needs.objects]
    held = sum(
        contents[name].sizes[slot]
        for name, slots in graph.placed.items()
        for slot in contents[name].slots
        if slots[slot] not in needs.wanted
    )
    decided = contents if state.part is None else {name: contents[name] for name in state.part.packs}
    return Survey(decided, dead, present, in_full, added, held, kept, lost, settled, below)


class _Lasting:
    """The needs that no passing time ends: objects of versions, and the chains below them."""

    def __init__(self, graph: _Graph, needs: _Needs, packs: Mapping[str, PackContents]) -> None:
        self._graph, self._needs, self._packs = graph, needs, packs
        self._objects, self._wanted = set(needs.objects), set(needs.wanted)
        self._others = {name: (pack.is_present, set(pack.wanted)) for name, pack in packs.items()}

    def settled(self) -> dict[str, int]:
        """Return the packs whose needs are all lasting, with the bytes that only others' chains need."""
        passing = (self._needs.objects - self._objects) | (self._needs.wanted - self._wanted)
        return {
            name: sum(
                pack.sizes[slot]
                for slot, number in self._graph.placed[name].items()
                if number in self._objects and number not in self._wanted
            )
            for name, pack in self._packs.items()
            if (pack.is_present, pack.wanted) == self._others[name]
            and passing.isdisjoint(self._graph.placed[name].values())
        }


def _unneeded(graph: _Graph, needs: _Needs, packs: Mapping[str, PackContents]) -> int:
    """Return the bytes of packs that no version so far has itself; some may be bases of those of others."""
    total = 0
    for name, pack in packs.items():
        pack.slots = {slot for slot, number in graph.placed[name].items() if number in needs.wanted}
        total += pack.garbage if pack.is_needed else pack.bytes
    return total


def _to_store_in_full(graph: _Graph, needs: _Needs, packs: Mapping[str, PackContents], original: float) -> set[int]:
    """Return the objects to store in full; at any price if the store is larger than the `original` files."""
    if needs.objects == needs.wanted:
        return set()
    layers = {
        number: Layer(graph.base(number), packs[name].sizes[slot], packs[name].alone[slot])
        for name, slots in graph.placed.items()
        for slot, number in slots.items()
        if number in needs.objects
    }
    chosen = to_store_in_full(layers, needs.wanted, _PRICE)
    left = ((layers[number], number in chosen) for number in needs.after(chosen).objects)
    if sum(layer.alone or 0 if is_full else layer.stored for layer, is_full in left) > original:
        chosen = to_store_in_full(layers, needs.wanted, 1.0)
    return chosen


@dataclass(slots=True)
class _Graph:
    """The base of each placed object, by key."""

    bases: dict[int, int | None] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    #: By name of the pack: the key in each placed slot.
    placed: dict[str, dict[int, int]] = field(default_factory=dict)
    part: Part | None = None
    #: By name of the pack: the base of each record, placed or not.
    _records: dict[str, list[int | None]] = field(default_factory=dict)

    def is_beyond(self, number: int) -> bool:
        """Return whether an object is outside of the part."""
        return self.part is not None and number in self.part.beyond

    def base(self, number: int) -> int | None:
        """Return the base of an object, if it is in the part."""
        base = self.bases[number]
        return base if base in self.bases else None

    def below(self, needs: _Needs) -> set[str]:
        """Return the packs outside of the part with bases of records there that nothing wants for themselves."""
        if self.part is None:
            return set()
        found = set()
        for name in self.part.packs:
            placed = self.placed[name]
            for slot, base in enumerate(self._records[name]):
                if base is not None and placed.get(slot) not in needs.wanted and base in self.part.beyond:
                    found.add(self.part.beyond[base])
        return found - self.part.packs

    def add(self, pack: str, slots: Mapping[int, int], records: Sequence[Record]) -> None:
        for slot, number in slots.items():
            record = records[slot] if slot < len(records) else None
            if record is None or key(record.id) != number:
                raise IntegrityError(f"Pack {pack} has no record {slot}; run `ckstore recover`.")
            self.bases[number] = _key(record.base)
            if record.origin is not None:
                self.origins[number] = key(record.origin)
        self.placed[pack] = dict(slots)
        if self.part is not None:
            self._records[pack] = [_key(record.base) for record in records]


class _LostError(Exception):
    """An object has no place in the store."""


class _Needs:
    """The keys of needed objects, the `wanted` ones, and of the chains below them."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self.wanted: set[int] = set()
        self.objects: set[int] = set()

    @property
    def of_part(self) -> bool:
        """Whether the graph has only a part of the store."""
        return self._graph.part is not None

    def after(self, in_full: Collection[int]) -> _Needs:
        """Return the needs once some objects are stored in full."""
        needs = _Needs(replace(self._graph, bases={**self._graph.bases, **dict.fromkeys(in_full)}))
        for number in self.wanted:
            needs.add(number)
        return needs

    def add(self, number: int | None) -> None:
        if number is not None and number in self._graph.bases:
            self.wanted.add(number)
        while number is not None and number not in self.objects:
            if number not in self._graph.bases:
                if self._graph.is_beyond(number):
                    return
                raise _LostError
            self.objects.add(number)
            number = self._graph.bases[number]


def _read_packs(repository: Repository, state: State, graph: _Graph) -> dict[str, PackContents]:
    found = {}
    repository.resolver.prefetch_manifests(pack.name for pack in state.packs)
    for pack in state.packs:
        manifest = repository.resolver.manifest(pack.name)
        document = manifest.document
        size = repository.packs.size(pack.name)
        found[pack.name] = _contents(pack.name, pack.kind, size, document, manifest.blobs)
        graph.add(pack.name, state.objects.get(pack.name, {}), document.records)
    return found


def _contents(name: str, kind: str, size: int, document: ManifestDocument, blobs: Mapping[str, bytes]) -> PackContents:
    sizes = [record.nbytes for record in document.records]
    alone = [None if record.is_sum else record.alone for record in document.records]
    blob_sizes = {blob: len(data) for blob, data in blobs.items()}
    described = described_version(document)
    origin = None if described is None else version_origin(described)
    return PackContents(name, kind, size, (document.number, document.created), sizes, alone, blob_sizes, origin)


def described_version(document: ManifestDocument) -> VersionDocument | None:
    """Return the version in a manifest; None if there is none or it is invalid."""
    try:
        return document.described()
    except IntegrityError:
        return None


def version_origin(document: VersionDocument) -> Origin:
    """Return the origin of a version from its manifest; later renumbering does not count."""
    return document.uid, document.number, document.parent, document.created


def _need_version(
    repository: Repository, row: VersionRow, packs: Mapping[str, PackContents], needs: _Needs
) -> tuple[str, int]:
    """Mark all parts of one version; return its id and number in the manifest."""
    document = repository.resolver.document(row)
    holder = packs.get(row.pack)
    try:
        if holder is None and not _is_outside(repository, row.pack, needs):
            raise _LostError
        if holder is not None and holder.version is None:
            raise _LostError
        for identity in document.objects:
            needs.add(key(identity))
        _need_blobs(repository, document, row.pack, packs, needs)
    except _LostError:
        raise IntegrityError(
            f"Version {row.number} has lost objects, and their repair may need bytes that this would free;"
            f" see `ckstore verify {row.number}`, or forget the version."
        ) from None
    if holder is None or holder.version is None:
        return document.uid, repository.resolver.number_of(row.pack)
    holder.is_present = True
    return holder.version[:2]


def _is_outside(repository: Repository, pack: str, needs: _Needs) -> bool:
    """Return whether a pack is in the catalog, and outside of the part."""
    return needs.of_part and bool(repository.catalog.known_packs([pack]))


def _need_blobs(
    repository: Repository, document: VersionDocument, pack: str, packs: Mapping[str, PackContents], needs: _Needs
) -> None:
    for ref in document.blobs():
        place = packs.get(ref.pack or pack)
        if place is None and _is_outside(repository, ref.pack or pack, needs):
            continue
        if place is None or ref.name not in place.blobs:
            raise _LostError
        place.wanted.add(ref.name)


def _need_others(part: Part | None, packs: Mapping[str, PackContents], needs: _Needs) -> None:
    """Mark the objects and blobs that a part counts as needed."""
    if part is not None:
        try:
            for number in part.needed:
                needs.add(number)
        except _LostError:
            raise IntegrityError("An object has lost its base; see `ckstore verify`.") from None
        for name, blobs in part.spared.items():
            packs[name].wanted |= blobs


def _need_last(repository: Repository, state: State, graph: _Graph, needs: _Needs) -> None:
    """Mark the first objects of the chains of each run's latest version, in case others do not need them."""
    if state.part is None:
        ordered = sorted(state.versions, key=lambda row: not row.superseded)  # Superseded ones are not the latest.
        for row in {row.run: row for row in ordered}.values():
            _need_origins(repository, row, graph, needs)
    elif not needs.objects.issuperset(graph.bases):
        catalog, resolver = repository.catalog, repository.resolver
        for row in filter(None, [catalog.latest(run.name) for run in catalog.runs()]):
            identities = resolver.document(row).objects
            resolver.prefetch(identities)
            for record in filter(None, map(resolver.find, identities)):
                if record.origin is not None and key(record.origin) in graph.bases:
                    with suppress(_LostError):
                        needs.add(key(record.origin))


def _need_uncommitted(
    repository: Repository, pack: ScannedPack, packs: Mapping[str, PackContents], needs: _Needs
) -> None:
    """Mark the references of an uncommitted pack, as far as they exist."""
    document = described_version(pack.document)
    for identity in [record.base for record in pack.document.records] + list(document.objects if document else ()):
        # A missing object is in the pack itself, or in another uncommitted pack.
        with suppress(_LostError):
            needs.add(_key(identity))
    if document is None:
        return
    moved = repository.catalog.moved_packs(document.blob_packs())
    for ref in document.with_packs(moved).blobs():
        if ref.pack is not None and ref.pack in packs:
            packs[ref.pack].wanted.add(ref.name)


def _need_origins(repository: Repository, row: VersionRow, graph: _Graph, needs: _Needs) -> None:
    for identity in repository.resolver.document(row).objects:
        with suppress(_LostError):  # The encoder can do without it.
            needs.add(graph.origins.get(key(identity)))


def _key(identity: str | None) -> int | None:
    return None if identity is None else key(identity)


def gone_versions(packs: Iterable[PackContents], present: set[tuple[str, int]]) -> list[Origin]:
    """Return the versions in manifests that are not present, each once."""
    found = {pack.version[:2]: pack.version for pack in packs if pack.version is not None}
    return [version for name, version in sorted(found.items(), key=lambda item: item[1][1]) if name not in present]
