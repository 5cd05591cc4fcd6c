"""Documents of versions: the schema of manifests, the files of a version, their layouts and their objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from ckstore.errors import InputError, IntegrityError
from ckstore.objects.identity import digest
from ckstore.objects.likeness import BANDS, DIGITS, bands_in
from ckstore.objects.records import AnyRecord, Patches
from ckstore.policy import Fidelity, Policy
from ckstore.runtime.local_path import is_relative
from ckstore.storage.names import Name
from ckstore.storage.pack import PackKind, PackName
from ckstore.storage.schema import (
    HIGHEST,
    LARGEST,
    LOWEST,
    Id,
    Integer,
    Plain,
    Positive,
    Size,
    Text,
    Time,
    Whole,
    Word,
    decode,
    encode,
    fields,
    rule,
)

#: Most blobs that one is a delta against, one after the other.
DEEPEST_BLOB = 4


class BlobRef(Struct, frozen=True, omit_defaults=True):
    """Reference to a blob: its name, its pack (None: the manifest's own) and the blob that it is a delta against."""

    name: Annotated[str, Meta(pattern=r"\A[^\0]{1,255}\Z")]
    pack: PackName | None = None
    against: BlobRef | None = None

    @property
    def chain(self) -> list[BlobRef]:
        """The reference itself, and those of the blobs that it is a delta against, one after the other."""
        found = [self]
        while (against := found[-1].against) is not None:
            found.append(against)
        return found

    def renamed(self, rename: Callable[[str | None], str | None]) -> BlobRef:
        """Return the reference with other names of packs."""
        return BlobRef(self.name, rename(self.pack), None if self.against is None else self.against.renamed(rename))

    def within(self, pack: str) -> BlobRef:
        """Return the reference as other packs name it."""
        return self.renamed(lambda name: name or pack)


def _check_nanoseconds(value: Any) -> None:
    """Accept any time that a file system may store, which may take more than 64 bits."""
    if type(value) is not int or not LOWEST * 10**9 <= value < (HIGHEST + 1) * 10**9:
        raise ValueError("Expected a time in nanoseconds")


if TYPE_CHECKING:
    Nanoseconds = int
else:
    Nanoseconds = rule(_check_nanoseconds)

Mode = Annotated[int, Meta(ge=0, lt=1 << 32)]


class FileEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One file of a version. For a version of a single file, `path` is the file's name."""

    path: str
    size: Whole
    blake3: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    mode: Mode | None
    mtime_ns: Nanoseconds | None
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

    max_abs: Size
    rms: Size
    size: Size

    @property
    def relative(self) -> float:
        """`rms` as a fraction of `size`."""
        return self.rms / self.size if self.size else 0.0


class CoarseUnit(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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

    decoded: Id
    deviations: tuple[Deviation, ...]
    spread: Size


class CoarseFacts(Struct, frozen=True):
    """The coarse objects of a version, by number of their units, and how they were quantised (see `Policy`)."""

    scheme: Word
    parameters: Plain
    units: dict[Whole, CoarseUnit]


class HotFacts(Struct, frozen=True):
    """How to encode a hot version: the policy (`Policy.to_text`), and the budget of the encoded version."""

    policy: Text
    budget: Annotated[float, Meta(ge=1, le=LARGEST)]

    @property
    def asked(self) -> Policy:
        """The policy of the encoded version."""
        return Policy.from_text(self.policy)


if TYPE_CHECKING:
    Summary = dict[str, Any]
else:
    #: The counts and costs of a version's row in the catalog.
    Summary = fields(
        {"original_bytes": Whole, "elements": Whole, "tensors": Whole, "depth": Whole, "cost": Size, "base": bool},
        {"stored_bytes": Whole},
    )


class VersionDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
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
        How to encode the version; None once its objects are encoded.
    dropped
        Globs over the paths of dropped tensors. No unit of the layout holds these tensors.
    goes_back
        Whether the parent was not the tip of the run, so that this version superseded others; the log has their ids.
    likeness
        Bands of the values (`objects/likeness.py`), by which versions of other runs find this one.
    """

    number: Positive
    run: Name
    step: Integer | None
    parent: Positive | None
    created: Time
    fidelity: Fidelity
    is_directory: bool = field(name="directory")
    files: tuple[FileEntry, ...]
    links: tuple[tuple[str, str], ...]
    directories: tuple[tuple[str, Mode], ...]
    layout: BlobRef
    crcs: BlobRef
    objects: tuple[Id, ...]
    metrics: Plain
    source: Text
    facts: Plain
    summary: Summary
    replaces: Positive | None
    coarse: CoarseFacts | None = None
    hot: HotFacts | None = None
    dropped: tuple[Word, ...] = ()
    goes_back: bool = False
    likeness: Annotated[str, Meta(pattern=rf"\A([0-9a-f]{{{DIGITS}}}){{0,{BANDS}}}\Z")] = ""

    @property
    def bands(self) -> list[int]:
        """The bands of the values."""
        return bands_in(self.likeness)

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

    @property
    def prefixes(self) -> list[str]:
        """The prefix of the typed paths of each file's tensors in the units."""
        return [f"{file.path}/" if self.is_directory else "" for file in self.files]

    @property
    def _refs(self) -> list[BlobRef]:
        return [self.layout, self.crcs, *(file.skeleton for file in self.files)]

    def blobs(self) -> list[BlobRef]:
        """Return references to the version's blobs, and to the blobs that these are deltas against."""
        return [blob for ref in self._refs for blob in ref.chain]

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

    def encode(self) -> Raw:
        """Return the document as JSON; raise `InputError` if it could not be read back."""
        return Raw(_encoded(self, VersionDocument))

    @classmethod
    def decode(cls, data: bytes | Raw) -> VersionDocument:
        """Decode a result of `encode`; raise `IntegrityError` for another document, since it may come from anyone."""
        try:
            document: VersionDocument = decode(data, cls)
            if any(len(ref.chain) > 1 + DEEPEST_BLOB for ref in document._refs):
                raise ValueError(f"a blob is against more than {DEEPEST_BLOB} others, one after the other")
        except ValueError as error:
            raise IntegrityError(
                f"A manifest describes no version ({error}); install a later ckstore, or restore its pack from a copy."
            ) from error
        _check_places(document)
        _check_sums(document)
        return document


class ManifestDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON document of a manifest; `docs/format.md` describes the fields.

    The version is decoded separately: the rest may be intact if it is not.
    """

    number: Whole
    created: Time
    kind: PackKind
    records: list[AnyRecord]
    shortcuts: list[Patches] = []
    rebase: bool = False
    trial: bool = False
    stands_for: tuple[PackName, ...] = ()
    nonce: Annotated[str, Meta(pattern=r"\A([0-9a-f]{16})?\Z")] = ""
    version: Raw | UnsetType = UNSET

    def described(self) -> VersionDocument | None:
        """Return the version; None if there is none. Raise `IntegrityError` for an invalid one."""
        return None if self.version is UNSET else VersionDocument.decode(self.version)


def _encoded(value: Any, kind: type[Struct]) -> bytes:
    """Return a document as JSON; raise `InputError` if it could not be read back."""
    try:
        data = encode(value)
        decode(data, kind)
    except ValueError as error:
        raise InputError(
            f"The checkpoint cannot be stored as it is ({error}); put it into a tar archive, and ingest that."
        ) from error
    return data


def _check_places(document: VersionDocument) -> None:
    """Raise `IntegrityError` if a path of a version document could not come from an ingest."""
    files = [entry.path for entry in document.files]
    paths = [*files, *(path for path, _ in document.links), *(path for path, _ in document.directories)]
    wrong: list[Any] = [path for path in paths if not is_relative(path)]
    wrong += [target for _, target in document.links if not is_target(target)]
    if not document.is_directory and not wrong and (len(files) != 1 or paths != files or "/" in files[0]):
        wrong = [paths]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {document.number} names {wrong[0]!r:.200}, which is not a path inside it; "
            "restore its pack from a copy that you trust."
        )


def is_target(target: object) -> bool:
    """Return whether a link's target is valid text; where it leads is not checked."""
    return isinstance(target, str) and bool(target) and "\0" not in target


def _check_sums(document: VersionDocument) -> None:
    """Raise `IntegrityError` if the numbers of a version document contradict each other."""
    number, parent, units = document.number, document.parent, list(document.coarse_units)
    wrong = [
        name
        for name, is_wrong in (
            ("parent", parent is not None and parent >= number),
            # The replaced version may have the higher number: it may have been begun later and committed earlier.
            ("replaces", document.replaces == number),
            ("original_bytes", sum(file.size for file in document.files) != document.summary["original_bytes"]),
            ("coarse", not _are_places(units, document) or (document.fidelity == "coarse") != bool(units)),
        )
        if is_wrong
    ]
    if wrong:
        raise IntegrityError(
            f"The manifest of version {number} contradicts itself in {wrong[0]}; restore its pack from a copy."
        )


def _are_places(units: Sequence[int], document: VersionDocument) -> bool:
    """Return whether these are numbers of the document's units, in order."""
    return units == sorted(units) and (not units or units[-1] < len(document.objects))
