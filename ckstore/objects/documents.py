"""Documents of versions: the schema of manifests, the files of a version, their layouts and their objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, get_args

from ckstore.codecs.lattice import PARTS
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, IntegrityError, UsageError
from ckstore.formats.layout import MARKS, MOST_AXES, Box, Checked, Extent, FileLayout, Tensor
from ckstore.formats.paths import path_to_text, text_to_path
from ckstore.formats.shards import fit_together, gather_shards
from ckstore.formats.sources import PERMISSIONS
from ckstore.objects.identity import digest
from ckstore.objects.records import RECORDS
from ckstore.objects.units import Unit
from ckstore.policy import FIDELITIES, Policy
from ckstore.runtime.local_path import is_relative
from ckstore.storage.pack import PACK_NAME, PackKind
from ckstore.storage.schema import (
    HIGHEST,
    ID,
    LOWEST,
    TIME,
    Schema,
    anything,
    fields,
    flag,
    hexadecimal,
    items,
    number,
    one_of,
    optional,
    plain_object,
    read_json,
    real,
    rows,
    text,
    whole,
)

#: Most blobs that one is a delta against, one after the other.
DEEPEST_BLOB = 4


@dataclass(frozen=True, slots=True)
class BlobRef:
    """Reference to a blob: its name, its pack (None: the manifest's own) and the blob that it is a delta against."""

    name: str
    pack: str | None = None
    against: BlobRef | None = None

    @property
    def chain(self) -> list[BlobRef]:
        """The reference itself, and those of the blobs that it is a delta against, one after the other."""
        return [self, *([] if self.against is None else self.against.chain)]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        document: dict[str, Any] = {"name": self.name}
        if self.pack is not None:
            document["pack"] = self.pack
        if self.against is not None:
            document["against"] = self.against.to_json()
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> BlobRef:
        """Decode a result of `to_json`."""
        against = document.get("against")
        return cls(document["name"], document.get("pack"), None if against is None else cls.from_json(against))

    def renamed(self, rename: Callable[[str | None], str | None]) -> BlobRef:
        """Return the reference with other names of packs."""
        return BlobRef(self.name, rename(self.pack), None if self.against is None else self.against.renamed(rename))

    def within(self, pack: str) -> BlobRef:
        """Return the reference as other packs name it."""
        return self.renamed(lambda name: name or pack)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version. For a version of a single file, `path` is the file's name."""

    path: str
    size: int
    blake3: str
    mode: int | None
    mtime_ns: int | None
    skeleton: BlobRef


class Deviation(NamedTuple):
    """Errors of a stretch of coarse values: upper bounds of the measured errors.

    Attributes
    ----------
    max_abs
        Largest magnitude of the differences to the original values.
    rms
        Root mean square of the differences.
    size
        Root mean square of the original values.

    Examples
    --------
    >>> Deviation(max_abs=0.0625, rms=0.03, size=1.5).relative
    0.02
    """

    max_abs: float
    rms: float
    size: float

    @property
    def relative(self) -> float:
        """`rms` as a fraction of `size`."""
        return self.rms / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class CoarseUnit:
    """Errors and checksum of one coarse object of a version.

    Attributes
    ----------
    decoded
        Content id of the decoded values: a later decode must give the same.
    deviations
        One for each member of the unit.
    spread
        Mean square of the errors, in units of each element's step; 0 without steps. The next version subtracts it from
        its distance to this one.
    """

    decoded: str
    deviations: tuple[Deviation, ...]
    spread: float = 0.0

    def to_json(self) -> list[Any]:
        """Return the JSON list."""
        return [self.decoded, [list(deviation) for deviation in self.deviations], self.spread]

    @classmethod
    def from_json(cls, document: Any) -> CoarseUnit:
        """Decode a result of `to_json`."""
        decoded, deviations, spread = document
        return cls(decoded, tuple(Deviation(*deviation) for deviation in deviations), spread)


@dataclass(frozen=True, slots=True)
class CoarseFacts:
    """The coarse objects of a version, by number of their units, and how they were quantised (see `Policy`)."""

    scheme: str
    parameters: dict[str, Any]
    units: dict[int, CoarseUnit]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        units = [[number, *unit.to_json()] for number, unit in sorted(self.units.items())]
        return {"scheme": self.scheme, "parameters": self.parameters, "units": units}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CoarseFacts:
        """Decode a result of `to_json`."""
        units = {number: CoarseUnit.from_json(rest) for number, *rest in document["units"]}
        return cls(document["scheme"], document["parameters"], units)


class HotFacts(NamedTuple):
    """How a compaction encodes a hot version: the policy (`Policy.to_text`), and the budget of the encoded version."""

    policy: str
    budget: float

    @property
    def asked(self) -> Policy:
        """The policy of the encoded version."""
        return Policy.from_text(self.policy)


@dataclass(frozen=True, slots=True)
class VersionDocument:
    """The metadata of a version.

    Attributes
    ----------
    number, run, step, parent, created
        `parent` is the number of the version before this one, or None. `created` is ISO 8601 in UTC.
    fidelity
        `exact` or `coarse`.
    is_directory, files, links, directories
        As in `ScannedVersion`.
    layout
        Blob of the layout document.
    crcs
        Blob of the CRC-32 values of all checked stretches, file by file (little-endian).
    objects
        Id of the object of each unit of the layout document: content id if it is exact, lattice id if it is coarse.
    coarse
        The coarse objects; None for an exact version.
    metrics, source, facts
        Metadata from the user and from the files.
    summary
        The counts and costs of the catalog's row, from which `recover` rebuilds it: `elements`, `tensors`, `depth`,
        `cost`, `base`, `original_bytes`.
    replaces
        Number of the version that this one replaced at its run and step, or None.
    hot
        How a compaction encodes the version; None once its objects are encoded.
    dropped
        Globs over the paths of dropped tensors. No unit of the layout holds these tensors.
    goes_back
        Whether the parent was not the tip of the run, so that this version superseded others; the log has their ids.
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
    objects: tuple[str, ...]
    metrics: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    replaces: int | None = None
    coarse: CoarseFacts | None = None
    hot: HotFacts | None = None
    dropped: tuple[str, ...] = ()
    goes_back: bool = False

    @property
    def uid(self) -> str:
        """The version's id: BLAKE3 of run, step, creation time and files, 40 hexadecimal characters.

        Neither thinning nor renumbering changes it: a version has the same id in every store.
        """
        identity = [self.run, self.step, self.created, [[f.path, f.blake3] for f in self.files]]
        return digest(json.dumps(identity, separators=(",", ":")).encode())

    @property
    def coarse_units(self) -> Mapping[int, CoarseUnit]:
        """The coarse objects, by number of their unit."""
        return {} if self.coarse is None else self.coarse.units

    def blobs(self) -> list[BlobRef]:
        """Return references to the version's blobs, and to the blobs that these are deltas against."""
        refs = [self.layout, self.crcs, *(file.skeleton for file in self.files)]
        return [blob for ref in refs for blob in ref.chain]

    def blob_packs(self) -> set[str]:
        """Return the names of other versions' packs that hold blobs of this one."""
        return {ref.pack for ref in self.blobs() if ref.pack is not None}

    def _renamed(self, rename: Callable[[str | None], str | None]) -> VersionDocument:
        return replace(
            self,
            layout=self.layout.renamed(rename),
            crcs=self.crcs.renamed(rename),
            files=tuple(replace(file, skeleton=file.skeleton.renamed(rename)) for file in self.files),
        )

    def with_packs(self, names: Mapping[str, str]) -> VersionDocument:
        """Return the document with its packs renamed."""
        return self._renamed(lambda name: None if name is None else names.get(name, name))

    def elsewhere(self, pack: str) -> VersionDocument:
        """Return the document as other packs refer to its blobs."""
        return self._renamed(lambda name: name or pack)

    def check(self) -> None:
        """Raise `InputError` if `from_json` would refuse the document."""
        _require(VERSION, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "number": self.number, "run": self.run, "step": self.step, "parent": self.parent, "created": self.created,
            "fidelity": self.fidelity, "directory": self.is_directory,
            "files": [
                [file.path, file.size, file.blake3, file.mode, file.mtime_ns, file.skeleton.to_json()]
                for file in self.files
            ],
            "links": self.links, "directories": self.directories, "layout": self.layout.to_json(),
            "crcs": self.crcs.to_json(), "objects": self.objects, "metrics": self.metrics, "source": self.source,
            "facts": self.facts, "summary": self.summary, "replaces": self.replaces,
            **({} if self.coarse is None else {"coarse": self.coarse.to_json()}),
            **({} if self.hot is None else {"hot": self.hot._asdict()}),
            **({"dropped": self.dropped} if self.dropped else {}),
            **({"goes_back": True} if self.goes_back else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> VersionDocument:
        """Decode a result of `to_json`; raise `IntegrityError` for another document, since it may come from anyone."""
        try:
            VERSION([document])
        except ValueError as error:
            raise IntegrityError(f"A manifest describes no version ({error}); restore its pack from a copy.") from error
        _check_places(document)
        _check_sums(document)
        return cls(
            number=document["number"], run=document["run"], step=document["step"], parent=document["parent"],
            created=document["created"], fidelity=document["fidelity"], is_directory=document["directory"],
            files=tuple(
                FileEntry(path, size, blake3, _permissions(mode), mtime_ns, BlobRef.from_json(skeleton))
                for path, size, blake3, mode, mtime_ns, skeleton in document["files"]
            ),
            links=tuple((path, target) for path, target in document["links"]),
            directories=tuple((path, mode & PERMISSIONS) for path, mode in document["directories"]),
            layout=BlobRef.from_json(document["layout"]), crcs=BlobRef.from_json(document["crcs"]),
            objects=tuple(document["objects"]),
            metrics=document["metrics"], source=document["source"], facts=document["facts"],
            summary=document["summary"], replaces=document["replaces"],
            coarse=CoarseFacts.from_json(document["coarse"]) if "coarse" in document else None,
            hot=HotFacts(**document["hot"]) if "hot" in document else None,
            dropped=tuple(document.get("dropped", ())),
            goes_back=document.get("goes_back", False),
        )  # fmt: skip


@dataclass(slots=True)
class LayoutDocument:
    """The layouts and units of a version's files. Most versions of a run share one: it holds nothing that changes."""

    files: list[FileLayout]
    units: list[Unit]

    def encode(self) -> bytes:
        """Return the document as JSON; raise `InputError` if `decode` would refuse it."""
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
                "checked": [[_as_text(item.name), item.start, item.stop, item.positions] for item in layout.checked],
                **_shards(layout),
            }
            for layout in self.files
        ]
        document = {"files": files, "units": [unit.to_json() for unit in self.units]}
        _require(LAYOUT, document)
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> LayoutDocument:
        """Decode a result of `encode`; it has neither trees nor facts."""
        try:
            document = read_json(data, LAYOUT)
            return cls._of(document)
        except (UsageError, ValueError) as error:
            raise IntegrityError(f"A layout is damaged ({error}); restore its pack from a copy.") from error

    @classmethod
    def _of(cls, document: dict[str, Any]) -> LayoutDocument:
        boxes = [
            {number: Box(tuple(f), tuple(w)) for number, f, w in item.get("shards", ())} for item in document["files"]
        ]
        files = [
            FileLayout(
                kind=item["kind"],
                size=item["size"],
                extents=[
                    Extent(start, dtype, tuple(shape), text_to_path(path))
                    for start, dtype, shape, path in item["extents"]
                ],
                tensors=[
                    Tensor(
                        text_to_path(path), dtype, tuple(shape), tuple(strides), extent, offset, tuple(marks),
                        boxes[file].get(number),
                    )
                    for number, (path, dtype, shape, strides, extent, offset, *marks) in enumerate(item["tensors"])
                ],
                checked=[Checked(name, start, stop, tuple(places)) for name, start, stop, places in item["checked"]],
            )
            for file, item in enumerate(document["files"])
        ]  # fmt: skip
        return cls(files, [Unit.from_json(unit) for unit in document["units"]])


def _shards(layout: FileLayout) -> dict[str, Any]:
    """Return the places of tensors that are shards, where a file has such."""
    boxes = ((number, tensor.box) for number, tensor in enumerate(layout.tensors))
    shards = [[number, box.first, box.whole] for number, box in boxes if box is not None]
    return {"shards": shards} if shards else {}


def _as_text(name: str) -> str:
    """Return a name in an archive as text of the schema; only messages use it."""
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _require(schema: Schema, document: Any) -> None:
    """Raise `InputError` unless the document could be read back."""
    try:
        schema([document])
    except ValueError as error:
        raise InputError(
            f"The checkpoint cannot be stored as it is ({error}); put it into a tar archive, and ingest that."
        ) from error


def _check_places(document: Mapping[str, Any]) -> None:
    """Raise `IntegrityError` if a path of a version document could not come from an ingest."""
    files = [entry[0] for entry in document["files"]]
    paths = [*files, *(path for path, _ in document["links"]), *(path for path, _ in document["directories"])]
    targets = [target for _, target in document["links"]]
    wrong = [path for path in paths if not is_relative(path)]
    wrong += [target for target in targets if not is_target(target)]
    if not document["directory"] and not wrong and (len(files) != 1 or paths != files or "/" in files[0]):
        wrong = [paths]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {document['number']} names {wrong[0]!r:.200}, which is not a path inside it; "
            "restore its pack from a copy that you trust."
        )


def _permissions(mode: int | None) -> int | None:
    return None if mode is None else mode & PERMISSIONS


def check_layout(layout: LayoutDocument, document: VersionDocument) -> None:
    """Raise `IntegrityError` unless a layout fits the files and objects of a version.

    Extents must lie in the files and tensors in their extents. Every element must belong to one member of one unit,
    except for dropped elements.
    """
    wrong = _wrong_part(layout, document)
    if wrong:
        raise IntegrityError(
            f"The layout of version {document.number} contradicts itself in {wrong}; restore its pack from a copy."
        )


def _wrong_part(layout: LayoutDocument, document: VersionDocument) -> str:
    if [file.size for file in layout.files] != [entry.size for entry in document.files]:
        return "files"
    for file in layout.files:
        if fault := file.fault():
            return fault
    shards = gather_shards((entry.path, file) for entry, file in zip(document.files, layout.files, strict=True))
    if any(not fit_together([tensor for _, tensor in parts]) for parts in shards.values()):
        return "shards"
    wrong = len(layout.units) != len(document.objects) or _is_uncovered(layout, gaps=bool(document.dropped))
    return "units" if wrong else ""


def _is_uncovered(layout: LayoutDocument, *, gaps: bool) -> bool:
    """Return whether an element has not its unit's dtype, or is in several members, or (without `gaps`) in none."""
    sizes = [[prod(extent.shape) for extent in file.extents] for file in layout.files]
    stretches: dict[tuple[int, int], list[tuple[int, int]]] = {
        (file, extent): [] for file, counts in enumerate(sizes) for extent in range(len(counts))
    }
    for unit in layout.units:
        total = 0
        for member in unit.members:
            place = member.file, member.extent
            if place not in stretches:
                return True
            dtype = layout.files[member.file].extents[member.extent].dtype
            if PARTS.get(dtype, dtype) != unit.dtype:
                return True
            total += member.count * (2 if dtype in PARTS else 1)
            stretches[place].append((member.first, member.count))
        if total != prod(unit.shape):
            return True
    for (file, extent), found in stretches.items():
        position = 0
        for first, count in sorted(found):
            if first < position or (first > position and not gaps):
                return True
            position = first + count
        if position > sizes[file][extent] or (position < sizes[file][extent] and not gaps):
            return True
    return False


def is_target(target: object) -> bool:
    """Return whether a link's target is valid text; where it leads is not checked."""
    return isinstance(target, str) and bool(target) and "\0" not in target


def _check_sums(document: Mapping[str, Any]) -> None:
    """Raise `IntegrityError` if the numbers of a version document contradict each other."""
    number, parent, replaces = document["number"], document["parent"], document["replaces"]
    units = [unit[0] for unit in document["coarse"]["units"]] if "coarse" in document else []
    wrong = [
        name
        for name, is_wrong in (
            ("parent", parent is not None and parent >= number),
            # The replaced version may have the higher number: it may have been begun later and committed earlier.
            ("replaces", replaces == number),
            ("original_bytes", sum(file[1] for file in document["files"]) != document["summary"]["original_bytes"]),
            ("coarse", not _are_places(units, document) or (document["fidelity"] == "coarse") != bool(units)),
        )
        if is_wrong
    ]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {number} contradicts itself in {wrong[0]}; restore its pack from a copy."
        )


def _are_places(units: Sequence[int], document: Mapping[str, Any]) -> bool:
    """Return whether these are numbers of the document's units, in order."""
    return units == sorted(set(units)) and (not units or units[-1] < len(document["objects"]))


_BLOB = one_of()  # The deepest blob is a delta against none.
for _ in range(1 + DEEPEST_BLOB):
    _BLOB = fields({"name": text(1, 255)}, {"pack": PACK_NAME, "against": _BLOB})
_MODE = whole(0, (1 << 32) - 1)
_INTEGER = whole(LOWEST, HIGHEST)
#: Nanoseconds of any time that a file system may store.
_NANOSECONDS = whole(LOWEST * 10**9, HIGHEST * 10**9 + 10**9 - 1)
_ERROR = real(0)

#: Schema of version documents; paths are checked separately.
VERSION = fields(
    {
        "number": whole(1), "run": text(1), "step": optional(_INTEGER), "parent": optional(whole(1)), "created": TIME,
        "fidelity": one_of(*FIDELITIES), "directory": flag,
        "files": rows(anything, whole(), hexadecimal(64), optional(_MODE), optional(_NANOSECONDS), _BLOB),
        "links": rows(anything, anything), "directories": rows(anything, _MODE), "layout": _BLOB, "crcs": _BLOB,
        "objects": items(ID), "metrics": plain_object, "source": text(), "facts": plain_object,
        "summary": fields(
            {"original_bytes": whole(), "elements": whole(), "tensors": whole(), "depth": whole(), "cost": number(0),
             "base": flag},
            {"stored_bytes": whole()},
        ),
        "replaces": optional(whole(1)),
    },
    {
        "coarse": fields(
            {"scheme": text(1), "parameters": plain_object,
             "units": rows(whole(), ID, rows(_ERROR, _ERROR, _ERROR), _ERROR)}
        ),
        "hot": fields({"policy": text(), "budget": number(1)}),
        "dropped": items(text(1), 1),
        "goes_back": flag,
    },
)  # fmt: skip

_DTYPE = one_of(*ITEM_SIZES)
_SHAPE = items(whole(), last=MOST_AXES)
#: Sizes and strides are arbitrary for tensors without elements and along axes of length one.
_SIZES = items(whole(0, HIGHEST), last=MOST_AXES)

#: Schema of layout documents.
LAYOUT = fields(
    {
        "files": items(
            fields(
                {
                    "kind": text(1, 64), "size": whole(),
                    "extents": rows(whole(), _DTYPE, _SHAPE, text()),
                    "tensors": rows(text(), _DTYPE, _SIZES, _SIZES, whole(-1), whole(), rest=one_of(*MARKS)),
                    "checked": rows(text(), whole(), whole(), items(whole())),
                },
                {"shards": rows(whole(), _SIZES, _SIZES)},
            )
        ),
        "units": rows(
            text(), hexadecimal(16), one_of(*(ITEM_SIZES.keys() - PARTS.keys())), items(whole(1), last=MOST_AXES),
            text(), rows(whole(), whole(), whole(), whole(1)),
        ),
    }
)  # fmt: skip

#: Schema of manifests without the version, which is checked separately: the rest may be intact if it is not.
MANIFEST = fields(
    {"number": whole(), "created": TIME, "kind": one_of(*get_args(PackKind)), "records": RECORDS},
    {"rebase": flag, "trial": flag, "stands_for": items(PACK_NAME), "nonce": hexadecimal(16)},
)
