"""What a manifest says of a version: its files, how they are cut, and which objects they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from operator import mul
from typing import Any, NamedTuple

from ckstore.codecs.lattice import PARTS
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, IntegrityError, UsageError
from ckstore.formats.directory import is_relative
from ckstore.formats.layout import KINDS, MARKS, MOST_AXES, Box, Checked, Extent, FileLayout, Tensor
from ckstore.formats.paths import path_to_text, text_to_path
from ckstore.formats.shards import fit_together, gather_shards
from ckstore.formats.sources import PERMISSIONS
from ckstore.objects.identity import digest
from ckstore.objects.records import CONTENT_RECORDS, LATTICE_RECORDS
from ckstore.objects.units import Unit
from ckstore.policy import FIDELITIES, SCHEMES, Policy
from ckstore.storage.pack import PACK_NAME
from ckstore.storage.schema import (
    HIGHEST,
    ID,
    LOWEST,
    TIME,
    Schema,
    anything,
    both,
    by,
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


class HotFacts(NamedTuple):
    """How the objects of a version that are stored raw are to be encoded.

    Attributes
    ----------
    policy
        As `Policy.to_text` has it.
    budget
        Restoring the version may then cost this many times what it would cost stored exactly and in full.
    """

    policy: str
    budget: float

    @property
    def asked(self) -> Policy:
        """How faithful the version is to be once it is encoded."""
        return Policy.from_text(self.policy)


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
    hot
        What becomes of the version when it is compacted; None where its objects are encoded.
    dropped
        Globs over the paths of tensors that the version has given up; no unit of its layout holds them any more.
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
    hot: HotFacts | None = None
    dropped: tuple[str, ...] = ()

    @property
    def uid(self) -> str:
        """The version's id: BLAKE3 of run, step, creation time and files, 40 hexadecimal characters.

        Thinning a version does not change it, nor does another number: it has the same id in every store.
        """
        said = [self.run, self.step, self.created, [[f.path, f.sha256] for f in self.files]]
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

    def elsewhere(self, pack: str) -> VersionDocument:
        """The document with its blobs named from outside of its pack."""
        return replace(
            self,
            layout=self.layout.within(pack),
            crcs=self.crcs.within(pack),
            files=tuple(replace(file, skeleton=file.skeleton.within(pack)) for file in self.files),
        )

    def check(self) -> None:
        """Raise `InputError` for what `from_json` would refuse."""
        _require(VERSION, self.to_json())

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
            **({} if self.hot is None else {"hot": self.hot._asdict()}),
            **({"dropped": self.dropped} if self.dropped else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> VersionDocument:
        """The inverse of `to_json`; all that becomes a place on disk is checked, since anyone may have written it.

        Raises
        ------
        IntegrityError
            Not of the schema `VERSION`, it contradicts itself, or a path leads out of the version or is none.
        """
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
            hot=HotFacts(**document["hot"]) if "hot" in document else None,
            dropped=tuple(document.get("dropped", ())),
        )  # fmt: skip


@dataclass(slots=True)
class LayoutDocument:
    """How all files of a version are cut; versions of one run mostly share it, so it holds nothing that changes."""

    files: list[FileLayout]
    units: list[Unit]

    def encode(self) -> bytes:
        """As JSON; raises `InputError` for what `decode` would refuse."""
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
        """The inverse of `encode`; trees and facts are not in it."""
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
    """The places of tensors that are shards, where a file has such."""
    boxes = ((number, tensor.box) for number, tensor in enumerate(layout.tensors))
    shards = [[number, box.first, box.whole] for number, box in boxes if box is not None]
    return {"shards": shards} if shards else {}


def _as_text(name: str) -> str:
    """A name in an archive, which may be any bytes, as text of the schema; it is there for messages alone."""
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _require(schema: Schema, document: Any) -> None:
    """Raise `InputError` unless a document that is to be stored could be read again."""
    try:
        schema([document])
    except ValueError as error:
        raise InputError(
            f"The checkpoint cannot be stored as it is ({error}); put it into a tar archive, and ingest that."
        ) from error


def _check_places(document: Mapping[str, Any]) -> None:
    """Raise `IntegrityError` where a path of a version document is not one that an ingest could have written."""
    files = [entry[0] for entry in document["files"]]
    paths = [*files, *(path for path, _ in document["links"]), *(path for path, _ in document["directories"])]
    targets = [target for _, target in document["links"]]
    wrong = [path for path in paths if not is_relative(path)]
    wrong += [target for target in targets if not is_target(target)]
    if not document["directory"] and not wrong and (len(files) != 1 or paths != files or "/" in files[0]):
        wrong = [paths]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {document['number']} names {wrong[0]!r:.200}, which is not a place in it; "
            "restore its pack from a copy that you trust."
        )


def _permissions(mode: int | None) -> int | None:
    return None if mode is None else mode & PERMISSIONS


def check_layout(layout: LayoutDocument, document: VersionDocument) -> None:
    """Raise `IntegrityError` unless a layout is one of a version's files and objects.

    Extents lie in the files, every element of them belongs to one member of one unit, but for those that the version
    has dropped, and tensors lie in their extents.
    """
    wrong = _wrong_part(layout, document)
    if wrong:
        raise IntegrityError(
            f"The layout of version {document.number} contradicts itself in {wrong}; restore its pack from a copy."
        )


def _wrong_part(layout: LayoutDocument, document: VersionDocument) -> str:
    # Plain loops: they see every tensor.
    if [file.size for file in layout.files] != [entry.size for entry in document.files]:
        return "files"
    sizes = [[prod(extent.shape) for extent in file.extents] for file in layout.files]
    for file, counts in zip(layout.files, sizes, strict=True):
        position = 0
        for extent, count in zip(file.extents, counts, strict=True):
            if extent.start < position:
                return "extents"
            position = extent.start + count * ITEM_SIZES[extent.dtype]
        if position > file.size:
            return "extents"
        for tensor in file.tensors:
            if len(tensor.shape) != len(tensor.strides):
                return "tensors"
            if 0 in tensor.shape:
                continue
            last = tensor.offset + sum(map(mul, tensor.shape, tensor.strides)) - sum(tensor.strides)
            if not 0 <= tensor.extent < len(counts) or last >= counts[tensor.extent]:
                return "tensors"
            if ITEM_SIZES[file.extents[tensor.extent].dtype] != ITEM_SIZES[tensor.dtype]:
                return "tensors"
        if not _are_nested_once([(checked.start, checked.stop) for checked in file.checked], file.size):
            return "checked"
    shards = gather_shards((entry.path, file) for entry, file in zip(document.files, layout.files, strict=True))
    if any(not fit_together([tensor for _, tensor in parts]) for parts in shards.values()):
        return "shards"
    wrong = len(layout.units) != len(document.objects) or _is_uncovered(layout, sizes, gaps=bool(document.dropped))
    return "units" if wrong else ""


def _are_nested_once(stretches: list[tuple[int, int]], size: int) -> bool:
    """Whether stretches of a file follow one another, but for those that come right behind all that lie in them."""
    outer: list[tuple[int, int, bool]] = []
    for start, stop in stretches:
        holds_others = False
        while outer and outer[-1][0] >= start:
            _, end, is_around = outer.pop()
            if is_around or end > stop:
                return False
            holds_others = True
        if not (outer[-1][1] if outer else 0) <= start <= stop <= size:
            return False
        outer.append((start, stop, holds_others))
    return True


def _is_uncovered(layout: LayoutDocument, sizes: list[list[int]], *, gaps: bool) -> bool:
    """Whether some element is in several members of units or, but for `gaps`, in none, or has another dtype."""
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
    """Whether something is what a link may say; where it leads is for others to see."""
    return isinstance(target, str) and bool(target) and "\0" not in target


def _check_sums(document: Mapping[str, Any]) -> None:
    """Raise `IntegrityError` where a version document contradicts itself in numbers."""
    number, parent, replaces = document["number"], document["parent"], document["replaces"]
    units = [unit[0] for unit in document["coarse"]["units"]] if "coarse" in document else []
    without = [unit for unit, (_, content) in enumerate(document["objects"]) if content is None]
    wrong = [
        what
        for what, is_wrong in (
            ("parent", parent is not None and parent >= number),
            # One that was begun later may have been committed, and replaced, before.
            ("replaces", replaces == number),
            ("original_bytes", sum(file[1] for file in document["files"]) != document["summary"]["original_bytes"]),
            ("coarse", units != without or (document["fidelity"] == "coarse") != bool(units)),
        )
        if is_wrong
    ]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {number} contradicts itself in {wrong[0]}; restore its pack from a copy."
        )


_PLAIN_BLOB = fields({"name": text(1, 255)}, {"pack": PACK_NAME})
_BLOB = both(_PLAIN_BLOB, fields({}, {"against": _PLAIN_BLOB}))
_MODE = whole(0, (1 << 32) - 1)
_INTEGER = whole(LOWEST, HIGHEST)
#: Nanoseconds of as many seconds as a file system may say.
_NANOSECONDS = whole(LOWEST * 10**9, HIGHEST * 10**9 + 10**9 - 1)
_ERROR = real(0)

#: What a version document says; paths are looked at apart.
VERSION = fields(
    {
        "number": whole(1), "run": text(1), "step": optional(_INTEGER), "parent": optional(whole(1)), "created": TIME,
        "fidelity": one_of(*FIDELITIES), "directory": flag,
        "files": rows(anything, whole(), hexadecimal(64), optional(_MODE), optional(_NANOSECONDS), _BLOB),
        "links": rows(anything, anything), "directories": rows(anything, _MODE), "layout": _BLOB, "crcs": _BLOB,
        "objects": rows(ID, optional(ID)), "metrics": plain_object, "source": text(), "facts": plain_object,
        "summary": fields(
            {"original_bytes": whole(), "elements": whole(), "tensors": whole(), "depth": whole(), "cost": number(0),
             "base": flag},
            {"stored_bytes": whole()},
        ),
        "replaces": optional(whole(1)),
    },
    {
        "coarse": fields(
            {"scheme": one_of(*SCHEMES), "parameters": plain_object,
             "units": rows(whole(), ID, rows(_ERROR, _ERROR, _ERROR), _ERROR)}
        ),
        "hot": fields({"policy": text(), "budget": number(1)}),
        "dropped": items(text(1), 1),
    },
)  # fmt: skip

_DTYPE = one_of(*ITEM_SIZES)
_SHAPE = items(whole(), last=MOST_AXES)
#: Of tensors without elements, and along axes of one, sizes and strides may be any.
_SIZES = items(whole(0, HIGHEST), last=MOST_AXES)

#: What a layout document says.
LAYOUT = fields(
    {
        "files": items(
            fields(
                {
                    "kind": one_of(*KINDS), "size": whole(),
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

#: What a manifest says besides its version, which is looked at apart: others may be whole where that is not.
MANIFEST = both(
    fields(
        {"number": whole(), "created": TIME},
        {"rebase": flag, "trial": flag, "stands_for": items(PACK_NAME), "nonce": hexadecimal(16)},
    ),
    by(
        "kind",
        {
            "coarse": fields({"records": LATTICE_RECORDS}),
            "exact": fields({"records": CONTENT_RECORDS}),
            "raw": fields({"records": LATTICE_RECORDS}),
        },
    ),
)
