"""What a manifest says of a version: its files, how they are cut, and which objects they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckstore.errors import IntegrityError
from ckstore.formats.directory import is_relative
from ckstore.formats.layout import MARKS, Checked, Extent, FileLayout, Tensor
from ckstore.formats.paths import path_to_text, text_to_path
from ckstore.formats.sources import PERMISSIONS
from ckstore.objects.identity import digest
from ckstore.objects.units import Unit

#: An object of a version: lattice id, and content id or None.
Object = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Where a byte string is: its name in a pack (None: the manifest's own), and what it is packed against."""

    name: str
    pack: str | None = None
    against: BlobRef | None = None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        document: dict[str, Any] = {"name": self.name}
        if self.pack is not None:
            document["pack"] = self.pack
        if self.against is not None:
            document["against"] = self.against.to_json()
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BlobRef:
        """The inverse of `to_json`."""
        against = document.get("against")
        return cls(document["name"], document.get("pack"), None if against is None else cls.from_json(against))

    def within(self, pack: str) -> BlobRef:
        """The same place, named from outside of the manifest's pack."""
        return BlobRef(self.name, self.pack or pack, None if self.against is None else self.against.within(pack))

    def with_packs(self, names: Mapping[str, str]) -> BlobRef:
        """The same place under other names of packs."""
        pack = None if self.pack is None else names.get(self.pack, self.pack)
        return BlobRef(self.name, pack, None if self.against is None else self.against.with_packs(names))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version; `path` is its name where the version is a single file."""

    path: str
    size: int
    sha256: str
    mode: int | None
    mtime_ns: int | None
    skeleton: BlobRef


class Deviation(NamedTuple):
    """What a stretch of values lost: bounds, never less than what was measured.

    Attributes
    ----------
    max_abs
        Largest magnitude of the differences to the original values.
    rms
        Root mean square of the differences.
    size
        Root mean square of the original values.
    """

    max_abs: float
    rms: float
    size: float

    @property
    def relative(self) -> float:
        """`rms` as a part of `size`."""
        return self.rms / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class CoarseUnit:
    """What a version records of an object that it does not hold exactly.

    Attributes
    ----------
    decoded
        What the content id of the decoded values would be: BLAKE3 that tells whether they come back the same.
    deviations
        Of each member of the unit.
    spread
        Mean square of the differences in units of each element's own step, where there are such; the next version
        subtracts it from its distance to this one.
    """

    decoded: str
    deviations: tuple[Deviation, ...]
    spread: float = 0.0

    def to_json(self) -> list[Any]:
        """As a list."""
        return [self.decoded, [list(deviation) for deviation in self.deviations], self.spread]

    @classmethod
    def from_json(cls, document: Any) -> CoarseUnit:
        """The inverse of `to_json`."""
        decoded, deviations, spread = document
        return cls(decoded, tuple(Deviation(*deviation) for deviation in deviations), spread)


@dataclass(frozen=True, slots=True)
class CoarseFacts:
    """What a version says of the objects that it does not hold exactly.

    Attributes
    ----------
    scheme, parameters
        How they were quantised, see `ckstore.policy.Policy`.
    units
        By number of the unit, what its values decode to and how far they are off.
    """

    scheme: str
    parameters: dict[str, Any]
    units: dict[int, CoarseUnit]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        units = [[number, *unit.to_json()] for number, unit in sorted(self.units.items())]
        return {"scheme": self.scheme, "parameters": self.parameters, "units": units}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CoarseFacts:
        """The inverse of `to_json`."""
        units = {number: CoarseUnit.from_json(rest) for number, *rest in document["units"]}
        return cls(document["scheme"], document["parameters"], units)


@dataclass(frozen=True, slots=True)
class VersionDocument:
    """Everything that the store keeps of a version besides its objects.

    Attributes
    ----------
    number, run, step, parent, created
        `parent` is the number of the version that this one was stored after, or None; `created` ISO 8601 in UTC.
    fidelity
        `exact` or `coarse`.
    is_directory, files, links, directories
        As in `ScannedVersion`.
    layout
        Where the layout document is.
    crcs
        Where the CRC-32 values of all files' checked stretches are (little-endian, in order).
    objects
        (lattice id, content id or None) of each unit of the layout document.
    coarse
        Facts of the units without a content id; None where there is none such.
    metrics, source, facts
        What the user or the files say.
    summary
        The counts and costs of the catalog's row, so that it can be made again: `elements`, `tensors`, `depth`,
        `cost`, `base`, `original_bytes`.
    replaces
        Number of the version at the same run and step whose place this one took, or None.
    """

    number: int
    run: str
    step: int | None
    parent: int | None
    created: str
    fidelity: str
    is_directory: bool
    files: tuple[FileEntry, ...]
    links: tuple[tuple[str, str], ...]
    directories: tuple[tuple[str, int], ...]
    layout: BlobRef
    crcs: BlobRef
    objects: tuple[Object, ...]
    metrics: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    replaces: int | None = None
    coarse: CoarseFacts | None = None

    @property
    def uid(self) -> str:
        """The version's id: BLAKE3 of run, step, creation time and files, 40 hexadecimal characters.

        Thinning a version does not change it.
        """
        said = [self.number, self.run, self.step, self.created, [[f.path, f.sha256] for f in self.files]]
        return digest(json.dumps(said, separators=(",", ":")).encode())

    def blobs(self) -> list[BlobRef]:
        """Where its blobs are, and those that they are packed against."""
        refs: list[BlobRef | None] = [self.layout, self.crcs, *(file.skeleton for file in self.files)]
        found = []
        while refs:
            ref = refs.pop()
            if ref is not None:
                refs.append(ref.against)
                found.append(ref)
        return found

    def blob_packs(self) -> set[str]:
        """Names of the packs of other versions in which blobs of this one are."""
        return {ref.pack for ref in self.blobs() if ref.pack is not None}

    def with_packs(self, names: Mapping[str, str]) -> VersionDocument:
        """The document with other names of packs: what `names` has instead of those that the manifest says."""
        return replace(
            self,
            layout=self.layout.with_packs(names),
            crcs=self.crcs.with_packs(names),
            files=tuple(replace(file, skeleton=file.skeleton.with_packs(names)) for file in self.files),
        )

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "number": self.number, "run": self.run, "step": self.step, "parent": self.parent, "created": self.created,
            "fidelity": self.fidelity, "directory": self.is_directory,
            "files": [
                [file.path, file.size, file.sha256, file.mode, file.mtime_ns, file.skeleton.to_json()]
                for file in self.files
            ],
            "links": self.links, "directories": self.directories, "layout": self.layout.to_json(),
            "crcs": self.crcs.to_json(), "objects": self.objects, "metrics": self.metrics, "source": self.source,
            "facts": self.facts, "summary": self.summary, "replaces": self.replaces,
            **({} if self.coarse is None else {"coarse": self.coarse.to_json()}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> VersionDocument:
        """The inverse of `to_json`; all that becomes a place on disk is checked, since anyone may have written it.

        Raises
        ------
        IntegrityError
            A path leads out of the version, or is none.
        """
        _check_places(document)
        return cls(
            number=document["number"], run=document["run"], step=document["step"], parent=document["parent"],
            created=document["created"], fidelity=document["fidelity"], is_directory=document["directory"],
            files=tuple(
                FileEntry(path, size, sha256, _permissions(mode), mtime_ns, BlobRef.from_json(skeleton))
                for path, size, sha256, mode, mtime_ns, skeleton in document["files"]
            ),
            links=tuple((path, target) for path, target in document["links"]),
            directories=tuple((path, mode & PERMISSIONS) for path, mode in document["directories"]),
            layout=BlobRef.from_json(document["layout"]), crcs=BlobRef.from_json(document["crcs"]),
            objects=tuple((lattice, content) for lattice, content in document["objects"]),
            metrics=document["metrics"], source=document["source"], facts=document["facts"],
            summary=document["summary"], replaces=document["replaces"],
            coarse=CoarseFacts.from_json(document["coarse"]) if "coarse" in document else None,
        )  # fmt: skip


@dataclass(slots=True)
class LayoutDocument:
    """How all files of a version are cut; versions of one run mostly share it, so it holds nothing that changes."""

    files: list[FileLayout]
    units: list[Unit]

    def encode(self) -> bytes:
        """As JSON."""
        files = [
            {
                "kind": layout.kind,
                "size": layout.size,
                "extents": [
                    [extent.start, extent.dtype, extent.shape, path_to_text(extent.path)] for extent in layout.extents
                ],
                "tensors": [
                    [path_to_text(t.path), t.dtype, t.shape, t.strides, t.extent, t.offset, *t.marks]
                    for t in layout.tensors
                ],
                "checked": [[item.name, item.start, item.stop, item.positions] for item in layout.checked],
            }
            for layout in self.files
        ]
        units = [unit.to_json() for unit in self.units]
        return json.dumps({"files": files, "units": units}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> LayoutDocument:
        """The inverse of `encode`; trees and facts are not in it."""
        document = json.loads(data)
        files = [
            FileLayout(
                kind=item["kind"],
                size=item["size"],
                extents=[
                    Extent(start, dtype, tuple(shape), text_to_path(path))
                    for start, dtype, shape, path in item["extents"]
                ],
                tensors=[
                    Tensor(text_to_path(path), dtype, tuple(shape), tuple(strides), extent, offset, _marks(marks))
                    for path, dtype, shape, strides, extent, offset, *marks in item["tensors"]
                ],
                checked=[Checked(name, start, stop, tuple(places)) for name, start, stop, places in item["checked"]],
            )
            for item in document["files"]
        ]
        return cls(files, [Unit.from_json(unit) for unit in document["units"]])


def _check_places(document: dict[str, Any]) -> None:
    """Raise `IntegrityError` where a path of a version document is not one that an ingest could have written."""
    files = [entry[0] for entry in document["files"]]
    paths = [*files, *(path for path, _ in document["links"]), *(path for path, _ in document["directories"])]
    targets = [target for _, target in document["links"]]
    wrong = [path for path in paths if not is_relative(path)]
    wrong += [target for target in targets if not isinstance(target, str) or not target or "\0" in target]
    if not document["directory"] and not wrong and (len(files) != 1 or paths != files or "/" in files[0]):
        wrong = [paths]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {document['number']} names {wrong[0]!r:.200}, which is not a place in it; "
            "restore its pack from a copy that you trust."
        )


def _permissions(mode: int | None) -> int | None:
    return None if mode is None else mode & PERMISSIONS


def _marks(marks: list[Any]) -> tuple[str, ...]:
    """Marks of a tensor; an unknown one may change its values."""
    for mark in marks:
        if mark not in MARKS:
            raise IntegrityError(f"A manifest gives a tensor the unknown mark {mark!r}; run `ckstore verify`.")
    return tuple(marks)
