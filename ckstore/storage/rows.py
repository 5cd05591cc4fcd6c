"""The rows of the catalog as plain values, and the keys of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Literal

from msgspec import Meta

from ckstore.errors import CkstoreError, FormatVersionError
from ckstore.runtime.provenance import RESERVED
from ckstore.storage.names import LONGEST, Label, Name, Title
from ckstore.storage.pack import PackName
from ckstore.storage.schema import (
    Bit,
    Id,
    Integer,
    Natural,
    Plain,
    Positive,
    Size,
    Text,
    Time,
    Whole,
    Word,
    check,
    rows,
)

#: (key, pack name, slot): the place of an object.
Placement = tuple[int, str, int]

TAG_ROWS = rows(Name, Positive)
POLICY_ROWS = rows(Title, Text)
META_ROWS = rows(Label, Label)


def key(identifier: str) -> int:
    """Return the first 63 bits of an id as a non-negative integer.

    Two ids may share a key: a reader must compare the full id in the record, and a writer calls `checked_keys`.
    """
    return int(identifier[:16], 16) >> 1


def keys(identifiers: Iterable[str]) -> dict[str, int]:
    """Return the keys of many ids, by id, as `key` does, without a call for each."""
    return {identifier: int(identifier[:16], 16) >> 1 for identifier in identifiers}


def checked_keys(identifiers: Iterable[str]) -> dict[str, int]:
    """Return the keys of ids; raise `CkstoreError` if two share a key: one of the objects would have no place."""
    found = keys(identifiers)
    if len(set(found.values())) < len(found):
        first, other = next(pair for pair in pairwise(sorted(found)) if found[pair[0]] == found[pair[1]])
        raise CkstoreError(
            f"Objects {first} and {other} share the first 63 bits of their ids, so that one store cannot hold both; use"
            " another store for this version."
        )
    return found


@dataclass(frozen=True, slots=True, repr=False)
class VersionRow:
    """One version, as the catalog describes it.

    Attributes
    ----------
    number : int
        Number, unique in the store and never reused.
    uid : str
        Id, 40 hexadecimal characters.
    run : str
        Name of the run.
    step : int or None
        Step in the run.
    parent : int or None
        Number of the parent.
    created : str
        Time of the ingest: UTC, ISO 8601.
    pack : str
        File name of the pack with the manifest.
    manifest_offset, manifest_length : int
        Place of the manifest in that pack, in bytes.
    original_bytes, stored_bytes : int
        Size of the original files, and of the bytes that this version added to the store.
    elements, tensors, files : int
        Counts.
    depth : int
        Number of deltas back to a base.
    cost : float
        Restore cost as a multiple of restoring an exact, full version; of a hot version, as it was stored.
    base : bool
        Whether it is stored without a delta.
    fidelity : str
        `exact` or `coarse`.
    hot : bool
        Whether its objects are stored unencoded, until the version is encoded.
    superseded : bool
        Whether the run went back to an earlier version since, and went on from there.
    dropped : tuple of str
        Globs over the paths of its dropped tensors.
    metrics : mapping
        JSON-able values by name.
    source : str or None
        Path that it was ingested from.

    Examples
    --------
    >>> row = store.ingest({"weight": np.ones(8)}, run="toy", step=1).version
    >>> row, row.original_bytes > row.elements * 8
    (<ckstore.VersionRow 4 toy@1>, True)
    """

    number: int
    uid: str
    run: str
    step: int | None
    parent: int | None
    created: str
    pack: str
    manifest_offset: int
    manifest_length: int
    original_bytes: int
    stored_bytes: int
    elements: int
    tensors: int
    files: int
    depth: int
    cost: float
    base: bool
    fidelity: str
    hot: bool = False
    superseded: bool = False
    dropped: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None

    def __repr__(self) -> str:
        return f"<ckstore.VersionRow {self.number} {self.name}>"

    @property
    def name(self) -> str:
        """`run@step`, or the run's name where the version has no step."""
        return self.run if self.step is None else f"{self.run}@{self.step}"

    @property
    def described(self) -> tuple[str, str, int]:
        """The id, and pack and offset of the manifest that describes the version."""
        return self.uid, self.pack, self.manifest_offset


#: Names of the columns of a `VersionRow`, in order.
VERSION_COLUMNS = [column.name for column in fields(VersionRow)]


def version_types(truth: Any, globs: Any, metrics: Any) -> tuple[Any, ...]:
    """Return the types of the columns of a `VersionRow`, in order; SQL and JSON differ in three kinds of values."""
    return (
        Positive, Id, Name, Integer | None, Positive | None, Time, PackName, Whole, Whole, Whole, Whole, Whole, Whole,
        Whole, Whole, Size, truth, Literal["exact", "coarse"], truth, truth, globs, metrics, Text | None,
    )  # fmt: skip


_TYPES = version_types(Bit, Text, Text)
#: A row of the catalog: metrics and origin apart.
VERSION_ROWS = rows(*_TYPES[:-1], Text | None, _TYPES[-1])
_PLAIN: Any = tuple[version_types(bool, list[Text], Plain)]  # type: ignore[misc]
#: The values of the last columns of a row as JSON that ends before them.
_DEFAULTS: tuple[Any, ...] = (False, False, (), {}, None)


def plain_row(row: VersionRow) -> list[Any]:
    """Return a row as JSON: the values of its columns in order."""
    values = (getattr(row, name) for name in VERSION_COLUMNS)
    return [dict(value) if isinstance(value, Mapping) else value for value in values]


def row_of(values: Sequence[Any]) -> VersionRow:
    """Undo `plain_row`."""
    row = VersionRow(*values)
    return replace(row, dropped=tuple(row.dropped))


def check_row(values: Sequence[Any]) -> None:
    """Raise `ValueError` unless values are a row as JSON, `FormatVersionError` if they have further columns."""
    if len(values) > len(VERSION_COLUMNS):
        raise FormatVersionError("The log has a version with unknown columns; install a later ckstore.")
    lacking = len(VERSION_COLUMNS) - len(values)
    check([*values, *_DEFAULTS[-lacking:][:lacking]], _PLAIN)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: its name, its number of versions, and the number and step of its latest version."""

    name: str
    versions: int
    latest: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: its number of versions and the bytes of all, those at its ends, and those with extreme metrics.

    Attributes
    ----------
    first
        Version with the lowest number.
    lowest, highest
        Versions with the lowest and the highest step; without steps None, and the latest.
    extremes
        Versions with the lowest (`min`) and the highest value (`max`) of each metric, by its name.
    tags
        Tags of its versions, sorted.
    """

    name: str
    versions: int
    original_bytes: int
    stored_bytes: int
    first: VersionRow
    highest: VersionRow
    lowest: VersionRow | None
    extremes: Mapping[str, Mapping[str, VersionRow]]
    tags: Sequence[str]


def metric_value(value: Any) -> float | None:
    """Return a metric as a number; None unless it is a finite one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) else None


def indexed_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among metrics that the catalog finds by an index: not those of long names."""
    return {
        name: number
        for name, value in metrics.items()
        if (number := metric_value(value)) is not None and len(name.encode()) <= LONGEST and name not in RESERVED
    }


#: Columns of a run and its sums in `runs`: id, name, number of versions, sum of their checksums, last, highest, bytes.
RUN_ROWS = rows(Whole, Name, Whole, Natural, Whole, Whole, Whole, Whole)
#: Columns of a set and its sums in `seals`.
SEAL_ROWS = rows(Word, Whole, Natural, Whole, Whole)


#: Columns of a pack: id, name and size.
PACK_ROWS = rows(Whole, PackName, Whole)


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of versions, runs, tags and packs, the bytes of all packs, and the bytes that versions have added."""

    versions: int
    runs: int
    tags: int
    packs: int
    bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A reservation of a version number, or a lease: its holder, its start and (a lease) its end."""

    number: int
    pid: int
    host: str
    created: str
    purpose: str = ""
    expires: str = ""


_Pid = Annotated[int, Meta(ge=0, lt=1 << 31)]
RESERVATION_ROWS = rows(Positive, _Pid, Label, Time)
LEASE_ROWS = rows(Natural, _Pid, Label, Time, Label, Time)
