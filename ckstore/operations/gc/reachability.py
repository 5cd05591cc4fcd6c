"""What stands in the packs of a store, and what of it the present versions need."""

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
    """What a plan was made from, as it was at one moment.

    A catalog that `recover` has built since may find objects in other packs than the one before it did.

    Attributes
    ----------
    catalog
        Its identity.
    versions, packs
        Its rows.
    lattices, contents
        Keys of the objects in each slot of each pack, by the pack's name.
    files
        Packs that the catalog does not have, and nothing says of that they are gone.
    """

    catalog: str
    versions: list[VersionRow]
    packs: list[PackRow]
    lattices: dict[str, dict[int, int]]
    contents: dict[str, dict[int, int]]
    files: list[PackInfo]

    @classmethod
    def of(cls, repository: Repository) -> State:
        """The present state."""
        catalog = repository.catalog
        while True:
            identity, packs, described = catalog.identity(), catalog.packs(), catalog.described()
            versions, lattices, contents = catalog.versions(), catalog.placed_lattices(), catalog.placed_contents()
            # Objects are elsewhere only where packs have come. Who else writes is not kept from it for so long.
            if (catalog.identity(), catalog.packs(), catalog.described()) == (identity, packs, described):
                break
        # What others have been told to be gone is deleted once its time has come, whatever else is planned.
        known = {pack.name for pack in packs} | catalog.gone().keys()
        files = [info for info in repository.packs.list_packs() if info.name not in known]
        return cls(identity, versions, packs, lattices, contents, files)


@dataclass(slots=True)
class PackContents:
    """One pack of the catalog, and what of it is needed.

    Attributes
    ----------
    name, kind, bytes
        File name; `coarse`, `exact` or `raw`; size.
    number, created, is_rebase
        Of the commit that it was written for, as its manifest says.
    sizes
        Bytes of the layer of each record, by slot.
    blobs
        Bytes of each blob, by name.
    version
        The version that its manifest describes.
    stored_bytes
        What the manifest says that the version added to the store; None where that is the size of its packs.
    is_present
        Whether that is a present version, and found here by the catalog.
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
        """Whether anything of it is."""
        return self.is_present or bool(self.slots) or bool(self.wanted)

    @property
    def garbage(self) -> int:
        """Bytes of layers and blobs that nothing needs."""
        layers = sum(size for slot, size in enumerate(self.sizes) if slot not in self.slots)
        return layers + sum(size for name, size in self.blobs.items() if name not in self.wanted)


@dataclass(slots=True)
class Survey:
    """All packs of the catalog in their order, and what is not needed any more.

    Attributes
    ----------
    packs
        By name.
    dead_lattices, dead_contents
        Keys that the catalog has a place for and nothing needs.
    present
        Ids and numbers, by their manifests, of the present versions.
    """

    packs: dict[str, PackContents]
    dead_lattices: list[int]
    dead_contents: list[int]
    present: set[tuple[str, int]]


def survey(repository: Repository, state: State, uncommitted: Sequence[ScannedPack] = ()) -> Survey:
    """Find what the present versions need; every manifest is read, nothing is decoded.

    They need their manifests and blobs, their objects, and all that those are stored against. Of the latest version of
    each run the objects that the run began with are kept too: the next version's step is taken from them.

    Parameters
    ----------
    state
        Of the catalog; whoever relies on the result looks at what came since.
    uncommitted
        Packs that the catalog does not have and that stay: `recover` could bring a version of theirs back, so what
        they refer to is needed.

    Raises
    ------
    IntegrityError
        A manifest cannot be read, or a version is not whole: what would repair it must not be removed.
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
    """What each object that has a place is stored against, by key."""

    bases: dict[int, int | None] = field(default_factory=dict)
    origins: dict[int, int] = field(default_factory=dict)
    layers: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    #: By the name of a pack: the key in each slot that is a place, and the pack's kind.
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
    """The keys of all that was asked for, and of all that it is stored against."""

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph
        self.lattices: set[int] = set()
        self.contents: set[int] = set()

    def lattice(self, number: int | None) -> None:
        while number is not None and number not in self.lattices:
            if number not in self._graph.bases:
                if number not in self._graph.layers:
                    raise _LostError
                self.content(number)  # It was stored raw once.
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
        # What has no exact layer is exact by itself, on an ordinal lattice of the same id.
        if content is not None and (content != lattice or key(content) in self._graph.layers):
            self.content(key(content))


def _read_packs(repository: Repository, state: State, graph: _Graph) -> dict[str, PackContents]:
    found = {}
    repository.packs.prefetch_manifests(pack.name for pack in state.packs)
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
            raise IntegrityError(f"The manifest of pack {pack.name} is not whole; run `ckstore recover`.") from error
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
    """The version that a manifest describes; None where it describes none that there could be."""
    try:
        return VersionDocument.from_json(document)
    except IntegrityError:
        return None


def version_origin(document: VersionDocument) -> Origin:
    """How a version is named by its manifest, whatever number it was given since."""
    return document.uid, document.number, document.parent, document.created


def _need_version(
    repository: Repository, row: VersionRow, packs: Mapping[str, PackContents], needs: _Needs
) -> tuple[str, int]:
    """Need all of one version; returns its id and number by the manifest."""
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
            f"Version {row.number} has lost what it is made of, and what would repair it must not be freed;"
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
    """Need what a pack refers to that nobody knows of, as far as it is there."""

    def need(ask: Callable[[int | None], None], identity: str | None) -> None:
        # What is lost stands in the pack itself, or in another one that was not committed.
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
            continue  # The encoder does without.


def _key(identity: str | None) -> int | None:
    return None if identity is None else key(identity)


def gone_versions(packs: Iterable[PackContents], present: set[tuple[str, int]]) -> list[Origin]:
    """The versions that manifests describe and that are not present, each once."""
    found = {pack.version[:2]: pack.version for pack in packs if pack.version is not None}
    return [version for name, version in sorted(found.items(), key=lambda item: item[1][1]) if name not in present]
