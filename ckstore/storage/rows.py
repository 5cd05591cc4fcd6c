"""The rows of the catalog as plain values, and the keys of ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckstore.storage.names import names, names_or_empty
from ckstore.storage.pack import PACK_NAME
from ckstore.storage.schema import HIGHEST, ID, LOWEST, TIME, Schema, number, one_of, optional, rows, text, whole

#: (key, pack name, slot): the place of an object.
Placement = tuple[int, str, int]

KEY = whole(0, HIGHEST)
TAG_ROWS = rows(names, whole(1))
POLICY_ROWS = rows(names_or_empty, text())
META_ROWS = rows(text(), text())


def key(identifier: str) -> int:
    """Return the first 63 bits of an id as a non-negative integer.

    Two ids may share a key: a reader must compare the full id in the record.
    """
    return int(identifier[:16], 16) >> 1


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
        Whether its objects are stored unencoded, until the version is compacted.
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
        return f"<ckstore.VersionRow {self.number} {self.run if self.step is None else f'{self.run}@{self.step}'}>"

    @property
    def described(self) -> tuple[str, str, int]:
        """The id, and pack and offset of the manifest that describes the version."""
        return self.uid, self.pack, self.manifest_offset


#: Names of the columns of a `VersionRow`, in order.
VERSION_COLUMNS = [column.name for column in fields(VersionRow)]


def version_schemas(flag: Schema, globs: Schema, metrics: Schema) -> list[Schema]:
    """Return the schemas of the columns of a `VersionRow`, in order; SQL and JSON differ in three kinds of values."""
    return [
        whole(1), ID, names, optional(whole(LOWEST, HIGHEST)), optional(whole(1)), TIME, PACK_NAME, whole(), whole(),
        whole(), whole(), whole(), whole(), whole(), whole(), number(0), flag, one_of("exact", "coarse"), flag, flag,
        globs, metrics, optional(text()),
    ]  # fmt: skip


VERSION_ROWS = rows(*version_schemas(whole(0, 1), text(), text()))


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run: its name, its number of versions, and the number and step of its latest version."""

    name: str
    versions: int
    latest: int | None
    step: int | None


#: Columns of a run and its sums in `runs`: id, name, number of versions, sum of their checksums, last and highest.
RUN_ROWS = rows(whole(), names, whole(), whole(0, HIGHEST), whole(), whole())
#: Columns of a set and its sums in `seals`.
SEAL_ROWS = rows(text(1), whole(), whole(0, HIGHEST), whole(), whole())


#: Columns of a `PackInfo`.
PACK_ROWS = rows(whole(), PACK_NAME, one_of("encoded", "raw"), whole())


@dataclass(frozen=True, slots=True)
class Totals:
    """Numbers of versions, runs, tags and packs, the bytes of all packs, and those that versions have added."""

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


_PID = whole(0, (1 << 31) - 1)
RESERVATION_ROWS = rows(whole(1), _PID, text(), TIME)
LEASE_ROWS = rows(whole(0, HIGHEST), _PID, text(), TIME, text(), TIME)
