"""Encodes hot versions against their parents, and frees the raw packs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckstore.commit.change import Change, RawPacks
from ckstore.commit.naming import policy_of
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.errors import CkstoreError, ConflictError, IntegrityError, NotFoundError
from ckstore.objects.documents import VersionDocument
from ckstore.reading.stored_version import StoredVersion
from ckstore.reading.values import StoredValues
from ckstore.runtime.collector import collection_seldom
from ckstore.storage.catalog import VersionRow, key
from ckstore.storage.pack import PackWriter
from ckstore.writing.describe import describe_encoded
from ckstore.writing.rebase import within_budget
from ckstore.writing.request import Request
from ckstore.writing.storing import store_objects

if TYPE_CHECKING:
    from ckstore.repository import Repository

Progress = Callable[[int], None]

#: Seconds before raw packs are deleted from a remote store: other machines may still read them.
GRACE = 3600.0
#: Seconds between two deletions of expired packs.
_PAUSE = 900.0

#: Attempts to encode a version while other processes encode its objects.
_TRIES = 8


@dataclass(slots=True)
class EncodeReport:
    """Result of encoding hot versions.

    Attributes
    ----------
    versions
        Numbers of the encoded versions, in order.
    before, after
        Bytes of these versions in the store, before and after.

    Examples
    --------
    >>> row = store.ingest({"weight": np.ones(8)}, run="toy").version
    >>> report = store.encode(run="toy")
    >>> report.versions == [row.number], report.after < report.before
    (True, True)
    """

    versions: list[int] = field(default_factory=list)
    before: int = 0
    after: int = 0


def due(repository: Repository, run: str | None = None, *, keep: int | None = None) -> list[VersionRow]:
    """Return the hot versions that are due for encoding, in order; by default those of all runs.

    `keep` is the number of a run's latest versions that stay hot; by default the policy's.
    """
    catalog = repository.catalog
    numbers: set[int] = set()
    rows = catalog.hot()  # First: a version that is committed in between is among the latest.
    for name in [run] if run is not None else [known.name for known in catalog.runs()]:
        numbers |= catalog.hot_sizes(name, policy_of(catalog, name).kept_hot if keep is None else keep).keys()
    return [row for row in rows if row.number in numbers]


@collection_seldom()
def encode(repository: Repository, rows: Sequence[VersionRow], *, progress: Progress | None = None) -> EncodeReport:
    """Encode hot versions, each in its own commit. Hot ancestors are encoded first.

    Values, content ids and version ids do not change. If the process is killed, each version is hot or encoded.
    `progress` is called with numbers of encoded bytes.
    """
    report = EncodeReport()
    for row in rows:
        for before in _lineage(repository, row.number):
            after = _encode_once(repository, before, progress)
            if after is None:
                continue
            report.versions.append(before.number)
            report.before += before.stored_bytes
            report.after += after.stored_bytes
    with suppress(CkstoreError, OSError):  # Without permission to delete, leave the packs to `gc`.
        repository.packs.sweep(GRACE, _PAUSE)
    return report


def encoded(repository: Repository, row: VersionRow) -> VersionRow:
    """Encode a version and its ancestors if they are hot, so that others can be stored against it; return its row."""
    if not row.hot:
        return row
    encode(repository, [row])
    return repository.catalog.version(row.number)


def _lineage(repository: Repository, number: int | None) -> list[VersionRow]:
    """Return a version and its hot ancestors, oldest first."""
    found: list[VersionRow] = []
    with suppress(NotFoundError):  # An ancestor was forgotten since.
        while number is not None and (row := repository.catalog.version(number)).hot:
            found.insert(0, row)
            number = row.parent
    return found


def _encode_once(repository: Repository, row: VersionRow, progress: Progress | None) -> VersionRow | None:
    """Encode a version; return its row, or None if another process encoded or forgot it first."""
    for left in reversed(range(_TRIES)):
        repository.resolver.forget()  # Another process may have encoded raw objects since.
        try:
            return _encode(repository, row, progress)
        except CkstoreError as error:
            present = [now for now in repository.catalog.hot() if now.uid == row.uid]
            if not present:
                return None  # Its raw packs may have been removed.
            [row] = present
            if not left or not isinstance(error, ConflictError):
                raise
    raise AssertionError


def _encode(repository: Repository, row: VersionRow, progress: Progress | None) -> VersionRow:
    catalog = repository.catalog
    with catalog.lease(f"encode {row.number}") as lease:
        stored = StoredVersion(repository, row)
        before = stored.document
        if before.hot is None:
            raise ConflictError(f"Version {row.number} was encoded by another process.")
        values = StoredValues(stored)
        parent = None if row.parent is None else catalog.version(row.parent)
        request = Request(
            row.run, parent=parent, policy=before.hot.asked, budget=before.hot.budget, bands=tuple(before.bands)
        )
        with PackWriter(repository.path, "encoded") as pack:
            writer = ObjectWriter(pack)
            objects = store_objects(repository, writer, repository.reader, values, request, progress)
            with Change(repository, writer) as change:
                change.check_unencoded()
                document, blobs = describe_encoded(stored, request, [objects[content] for content in values.contents])
                change.finish(document, blobs, again=True)
                change.read_back()  # Before the raw objects go, which may be the only copy.
                change.commit_encoded(row, lease, partial(_raw_packs, stored, document))
    return within_budget(repository, catalog.version(row.number), before.hot.budget)


def _raw_packs(version: StoredVersion, encoded: VersionDocument, former: Sequence[str]) -> RawPacks:
    """Return the raw packs to free after this version is encoded, and the raw objects that hot versions still need.

    These are packs of this version, and of others that were encoded or forgotten and shared objects with it. A
    `recover` may have added those of a version that is not committed yet; they stay. Content that is encoded exactly is
    not needed raw. The objects of a version that becomes coarse exist only raw.
    """
    repository, number = version.repository, version.row.number
    resolver = repository.resolver
    packs: dict[str, Collection[int]] = {version.row.pack: ()}
    inside: set[str] = set()
    for name in former:
        with suppress(IntegrityError):
            owner = resolver.number_of(name)
            if owner == number or _is_superseded(repository, owner):
                identities = [record.id for record in resolver.manifest(name).document.records]
                packs[name] = [*map(key, identities)]
                inside.update(identities)
    inside -= {identity for unit, identity in enumerate(encoded.objects) if unit not in encoded.coarse_units}
    try:
        users = {user for name in packs if inside for user, _ in repository.catalog.uses_of(name).objects}
        hot = [row for row in map(repository.catalog.version, users) if row.hot]  # Within the commit, this one is not.
        needed = inside & {identity for row in hot for identity in resolver.document(row).objects}
    except (IntegrityError, NotFoundError):
        return RawPacks({}, ())  # The needs of a damaged version are unknown; `gc` frees the packs later.
    return RawPacks(packs, {*map(key, needed)})


def _is_superseded(repository: Repository, number: int) -> bool:
    """Return whether a version is encoded, by its own manifest, or was forgotten, by the log."""
    try:
        row = repository.catalog.version(number)
    except NotFoundError:
        return any(
            record["change"] == "forget" and number in record["versions"] for record in repository.catalog.log_records()
        )
    return repository.resolver.document(row).hot is None
