"""Mark phase of `gc`: finds the parts of each pack that the current versions need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckstore.errors import IntegrityError
from ckstore.objects.documents import VersionDocument
from ckstore.objects.layer_parts import layer_parts
from ckstore.storage.catalog import VersionRow, key
from ckstore.storage.pack import PackInfo
from ckstore.storage.rows import PackRow
from ckstore.storage.scan_packs import ScannedPack

if TYPE_CHECKING:
    from ckstore.repository import Repository

#: (Id by the manifest, number and parent there, time) of a version.
Origin = tuple[str, int, int | None, str]


@dataclass(frozen=True, slots=True)
class State:
    """A consistent snapshot of a store that a plan is made from.

    `recover` changes the catalog's identity: a rebuilt catalog may place objects in other packs.

    Attributes
    ----------
    catalog
        Identity of the catalog.
    versions, packs
        Rows of the catalog.
    lattices, contents
        Keys of the objects in each slot of each pack, by the pack's name.
    files
        Unreferenced packs that are not recorded as gone.
    """

    catalog: str
    versions: list[VersionRow]
    packs: list[PackRow]
    lattices: dict[str, dict[int, int]]
    contents: dict[str, dict[int, int]]
    files: list[PackInfo]

    @classmethod
    def of(cls, repository: Repository) -> State:
        """Take a snapshot of the current state."""
        catalog = repository.catalog
        while True:
            identity, packs, described = catalog.identity(), catalog.packs(), catalog.described()
            versions, lattices, contents = catalog.versions(), catalog.placed_lattices(), catalog.placed_contents()
            # Objects move only if packs were added. A retry, unlike a lock, does not block writers for this long.
            if (catalog.identity(), catalog.packs(), catalog.described()) == (identity, packs, described):
                break
        # Packs that are recorded as gone are deleted in due time anyway.
        known = {pack.name for pack in packs} | catalog.gone().keys()
        files = [info for info in repository.packs.list_packs() if info.name not in known]
        return cls(identity, versions, packs, lattices, contents, files)


@dataclass(slots=True)
class PackContents:
    """One pack of the catalog, and its needed parts.

    Attributes
    ----------
    name, kind, bytes
        File name; `coarse`, `exact` or `raw`; size.
    number, created, is_rebase
        The pack's commit, from its manifest.
    sizes
        Bytes of the layer of each record, by slot.
    blobs
        Bytes of each blob, by name.
    version
        The version in its manifest.
    stored_bytes
        The version's size according to the manifest; None if it is the size of its packs.
    is_present
        Whether the catalog has that version and finds it here.
    slots, wanted
        Slots of the records and names of the blobs that are needed.
    """

    name: str
    kind: str
    bytes: int
    number: int
    created: str
    is_rebase: bool
    sizes: list[int]
    blobs: dict[str, int]
    version: Origin | None
    stored_bytes: int | None
    is_present: bool = False
    slots: set[int] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)

    @property
    def is_needed(self) -> bool:
        """Whether a part of the pack is needed."""
        return self.is_present or bool(self.slots) or bool(self.wanted)

    @property
    def garbage(self) -> int:
        """Bytes of layers and blobs that nothing needs."""
        layers = sum(size for slot, size in enumerate(self.sizes) if slot not in self.slots)
        return layers + sum(size for name, size in self.blobs.items() if name not in self.wanted)


@dataclass(slots=True)
class Survey:
    """All packs of the catalog in order, and the objects that are not needed any more.

    Attributes
    ----------
    packs
        By name.
    dead_lattices, dead_contents
        Keys of placed objects that nothing needs.
    present
        Ids and numbers, from their manifests, of the current versions.
    """

    packs: dict[str, PackContents]
    dead_lattices: list[int]
    dead_contents: list[int]
    present: set[tuple[str, int]]


def survey(repository: Repository, state: State, uncommitted: Sequence[ScannedPack] = ()) -> Survey:
    """Find the parts of packs that the current versions need; read every manifest, decode nothing.

    A version needs its manifest, blobs, objects and their chains. Of the latest version of each run, the first objects
    of the chains are kept as well: the next version's step is derived from them.

    Parameters
    ----------
    state
        Snapshot of the catalog; the caller checks later commits.
    uncommitted
        Unreferenced packs that stay: `recover` could restore their versions, so their references are needed.

    Raises
    ------
    IntegrityError
        A manifest is unreadable or a version incomplete: its repair may need parts that would be removed.
    """
    graph = _Graph()
    contents = _read_packs(repository, state, graph)
    needs = _Needs(graph)
    rows = state.versions
    present = {_need_version(repository, row, contents, needs) for row in rows}
    for pack in uncommitted:
        _need_uncommitted(repository, pack, contents, needs)
    for row in {row.run: row for row in rows}.values():
        _need_origins(repository, row, graph, needs)
    for name, (slots, kind) in graph.placed.items():
        needed = needs.contents if kind == "exact" else needs.lattices
        contents[name].slots = {slot for slot, number in slots.items() if number in needed}
    return Survey(
        contents,
        [number for number in graph.bases if number not in needs.lattices],
        [number for number in graph.layers if number not in needs.contents],
        present,
    )


@dataclass(slots=True)
class _Graph:
    """The base of each placed object, by key."""

    bases: dict[int, int | None] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    layers: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    #: By name of the pack: the key in each placed slot, and the pack's kind.
    placed: dict[str, tuple[dict[int, int], str]] = field(default_factory=dict)

    def add(self, pack: str, kind: str, slots: Mapping[int, int], records: Sequence[Mapping[str, Any]]) -> None:
        for slot, number in slots.items():
            record = records[slot] if slot < len(records) else {}
            if not record or key(record["id"]) != number:
                raise IntegrityError(f"Pack {pack} has no record {slot}; run `ckstore recover`.")
            if kind != "exact":
                self.bases[number] = _key(record["base"])
                if record.get("origin") is not None:
                    self.origins[number] = key(record["origin"])
            else:
                self.layers[number] = key(record["lattice"]), _key(record.get("parent"))
        self.placed[pack] = dict(slots), kind


class _LostError(Exception):
    """An object has no place in the store."""


class _Needs:
    """The keys of needed objects and of their chains."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self.lattices: set[int] = set()
        self.contents: set[int] = set()

    def lattice(self, number: int | None) -> None:
        while number is not None and number not in self.lattices:
            if number not in self._graph.bases:
                if number not in self._graph.layers:
                    raise _LostError
                self.content(number)  # It was stored raw before.
                return
            self.lattices.add(number)
            number = self._graph.bases[number]

    def content(self, number: int | None) -> None:
        while number is not None and number not in self.contents:
            if number not in self._graph.layers:
                raise _LostError
            self.contents.add(number)
            lattice, number = self._graph.layers[number]
            self.lattice(lattice)

    def object(self, lattice: str, content: str | None) -> None:
        self.lattice(key(lattice))
        # An object without exact layer is exact by itself, on an ordinal lattice of the same id.
        if content is not None and (content != lattice or key(content) in self._graph.layers):
            self.content(key(content))


def _read_packs(repository: Repository, state: State, graph: _Graph) -> dict[str, PackContents]:
    found = {}
    repository.resolver.prefetch_manifests(pack.name for pack in state.packs)
    for pack in state.packs:
        manifest = repository.resolver.manifest(pack.name)
        document = manifest.document
        try:
            size = repository.packs.size(pack.name)
            found[pack.name] = _contents(pack.name, pack.kind, size, document, manifest.blobs)
            placed = state.contents if pack.kind == "exact" else state.lattices
            graph.add(pack.name, pack.kind, placed.get(pack.name, {}), document["records"])
        except IntegrityError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"The manifest of pack {pack.name} is incomplete; run `ckstore recover`.") from error
    return found


def _contents(name: str, kind: str, size: int, document: Mapping[str, Any], blobs: Mapping[str, bytes]) -> PackContents:
    sizes = [sum(part.length for part in layer_parts(record)) for record in document["records"]]
    version = document.get("version")
    is_rebase = bool(document.get("rebase"))
    blob_sizes = {blob: len(data) for blob, data in blobs.items()}
    described = None if version is None else described_version(version)
    origin = None if described is None else version_origin(described)
    stored = None if described is None else described.summary.get("stored_bytes")
    return PackContents(
        name, kind, size, document["number"], document["created"], is_rebase, sizes, blob_sizes, origin, stored
    )


def described_version(document: Mapping[str, Any]) -> VersionDocument | None:
    """Return the version in a manifest; None if it is invalid."""
    try:
        return VersionDocument.from_json(document)
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
        if holder is None or holder.version is None:
            raise _LostError
        for lattice, content in document.objects:
            needs.object(lattice, content)
        _need_blobs(document, row.pack, packs)
    except _LostError:
        raise IntegrityError(
            f"Version {row.number} has lost objects, and their repair may need bytes that this would free;"
            f" see `ckstore verify {row.number}`, or forget the version."
        ) from None
    holder.is_present = True
    return holder.version[:2]


def _need_blobs(document: VersionDocument, pack: str, packs: Mapping[str, PackContents]) -> None:
    for ref in document.blobs():
        place = packs.get(ref.pack or pack)
        if place is None or ref.name not in place.blobs:
            raise _LostError
        place.wanted.add(ref.name)


def _need_uncommitted(
    repository: Repository, pack: ScannedPack, packs: Mapping[str, PackContents], needs: _Needs
) -> None:
    """Mark the references of an uncommitted pack, as far as they exist."""

    def need(ask: Callable[[int | None], None], identity: str | None) -> None:
        # A missing object is in the pack itself, or in another uncommitted pack.
        with suppress(_LostError):
            ask(_key(identity))

    for record in pack.document["records"]:
        for ask, name in ((needs.lattice, "base"), (needs.lattice, "lattice"), (needs.content, "parent")):
            need(ask, record.get(name))
    document = described_version(pack.document["version"]) if "version" in pack.document else None
    if document is None:
        return
    for lattice, content in document.objects:
        need(needs.lattice, lattice)
        need(needs.content, content)
    moved = repository.catalog.moved_packs(document.blob_packs())
    for ref in document.with_packs(moved).blobs():
        if ref.pack is not None and ref.pack in packs:
            packs[ref.pack].wanted.add(ref.name)


def _need_origins(repository: Repository, row: VersionRow, graph: _Graph, needs: _Needs) -> None:
    for lattice, _ in repository.resolver.document(row).objects:
        try:
            needs.lattice(graph.origins.get(key(lattice)))
        except _LostError:
            continue  # The encoder can do without it.


def _key(identity: str | None) -> int | None:
    return None if identity is None else key(identity)


def gone_versions(packs: Iterable[PackContents], present: set[tuple[str, int]]) -> list[Origin]:
    """Return the versions in manifests that are not present, each once."""
    found = {pack.version[:2]: pack.version for pack in packs if pack.version is not None}
    return [version for name, version in sorted(found.items(), key=lambda item: item[1][1]) if name not in present]
