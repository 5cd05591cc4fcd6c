"""Recover: rebuilds the catalog from packs and log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckstore.commit.costs import update_costs
from ckstore.encoding.object_writer import version_row
from ckstore.errors import CkstoreError, IntegrityError
from ckstore.objects.documents import ManifestDocument
from ckstore.recovery.found_objects import FoundObjects
from ckstore.recovery.found_versions import FoundVersion, FoundVersions, Settings, found_version
from ckstore.recovery.lost_packs import lost_packs
from ckstore.repository import Repository
from ckstore.runtime.arguments import PATH, checked
from ckstore.runtime.collector import collection_seldom
from ckstore.storage import change_log, log_files, reserve, root
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.catalog_replacement import replace_catalog
from ckstore.storage.connection import WRITES, remove_claims
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.opening import rebuild_from_log
from ckstore.storage.pack import PackInfo
from ckstore.storage.scan_packs import DamagedPack, ScannedPack, scan_packs
from ckstore.storage.schema import FORMAT, refuse_later
from ckstore.storage.segments import Place


@dataclass(slots=True)
class RecoverReport:
    """Result of a recovery.

    Attributes
    ----------
    versions, packs
        Numbers of recovered versions and packs.
    problems
        One sentence for each damaged or missing pack, log record, version or tag, and each pair of versions with the
        same number or step. Recovery deletes nothing.

    Examples
    --------
    >>> store.close()
    >>> report = ckstore.recover("store")
    >>> report.versions, report.problems
    (3, [])
    """

    versions: int = 0
    packs: int = 0
    problems: list[str] = field(default_factory=list)


@checked(path=PATH)
def recover(path: str | os.PathLike[str]) -> RecoverReport:
    """Rebuild the catalog of the store at `path` from its packs and log.

    Forgotten versions stay forgotten, and tags keep their versions. The version of an interrupted ingest comes back if
    its pack was complete. Other processes may read, but not write.

    For a remote store, named by its URL, the mirror's catalog is rebuilt from the log; other processes may go on. Then
    every pack is read. A damaged or missing pack is uploaded again if its bytes are cached here; otherwise the log
    records its loss, and the next ingest of its content stores it again.

    Raises
    ------
    NoStoreError
        The path holds no store.
    LockedError
        Another process is writing.
    FormatVersionError
        A later version of ckstore wrote to the store.

    Examples
    --------
    >>> store.close()
    >>> ckstore.recover("store").versions
    3
    """
    place = root.place(path)
    if not rebuild_from_log(place):
        return _recover_directory(Path(place))
    with Repository(place) as repository:
        problems = lost_packs(repository)
        return RecoverReport(len(repository.catalog.versions()), len(repository.catalog.packs()), problems)


@collection_seldom()
def _recover_directory(path: Path) -> RecoverReport:
    """Rebuild the catalog of a store in a directory."""
    report = RecoverReport()
    rebased = False

    def build(temporary: Path, present: Catalog | None) -> None:
        nonlocal rebased
        with Catalog(temporary, "a") as catalog, catalog.transaction():
            builder = _Builder(path, catalog, present, report)
            builder.build()
            rebased = builder.rebased

    with reserve.spent(path):
        replace_catalog(path, build)
        if rebased:  # The manifests' depths and costs are older.
            with Repository(path) as repository:
                update_costs(repository)
    return report


def _present_rows(present: Catalog, records: Sequence[Mapping[str, Any]]) -> dict[str, VersionRow] | None:
    """Return the versions of the current catalog by id; None if it is damaged, or older than the log.

    The log's last change may have been interrupted.
    """
    try:
        if present.check() or (records and present.logged() < records[-1]["follows"]):
            return None
        present.prove()
        return {row.uid: row for row in present.versions()}
    except CkstoreError:
        return None


def _claimed(present: Catalog) -> int | None:
    """Return the highest reserved number, which may be in no pack yet; None if the claims are damaged."""
    try:
        present.leases()
        return max(present.reserved_numbers(), default=0)
    except CkstoreError:
        return None


def _last_number(present: Catalog) -> int:
    """Return the highest number in the current catalog and its claims."""
    try:
        return max(present.last_number(), _claimed(present) or 0)
    except CkstoreError:
        return _claimed(present) or 0


def _fields(change: str, name: Any, value: Any) -> dict[str, Any]:
    """Return the fields of a log record of a setting."""
    names = {"tag": ("tag", "version"), "metrics": ("version", "metrics"), "policy": ("run", "policy")}[change]
    return dict(zip(names, (name, value), strict=True))


class _Builder:
    def __init__(self, path: Path, catalog: Catalog, present: Catalog | None, report: RecoverReport) -> None:
        self.path = path
        self.storage = DirectoryStorage(path)
        self.catalog = catalog
        self.present = present
        self.report = report
        self.found: list[FoundVersion] = []
        self.raw_packs: dict[tuple[int, str], list[PackInfo]] = {}
        self.packs: dict[str, PackInfo] = {}
        self.places: dict[str, Place] = {}
        # Packs that claim to replace a pack, by the replaced pack's name; and the chosen replacement.
        self.claims: dict[str, list[str]] = {}
        self.moved: dict[str, str] = {}
        self.damaged: list[PackInfo] = []
        self.objects = FoundObjects()
        self.last_number = 0
        self.rebased = False
        # Rows of the current catalog, if the log lost records, and the records that these rows lack.
        self.kept: Mapping[str, VersionRow] | None = None
        self.later: Sequence[Mapping[str, Any]] = ()
        # The log's last record, and the records that this recovery adds.
        self.last = ""
        self.logged: list[str] = []

    def build(self) -> None:
        """Take in the packs, decide which of their versions there are, and make the log's changes to those."""
        self._scan()
        records, problems = change_log.read_all(self.storage)
        refuse_later(self.path, max((record.get("writers", 0) for record in records), default=0), FORMAT, WRITES)
        if not (self.path / root.LOG).is_dir():
            problems.append(f"The log is missing; {change_log.LOSS}.")
        self.last = log_files.name_of(records[-1]) if records else ""
        self.moved = self._moved(records)
        self.catalog.note_moved(self.moved)
        self.report.problems += problems
        versions = self._versions(records, problems)
        # Parents have lower numbers.
        for version in sorted(versions.versions.values(), key=lambda version: version.written_as):
            self._insert(version, versions.parent(version))
        # Numbers are never reused, not even those of removed or uncommitted versions.
        self.catalog.skip_numbers(versions.last_number)
        if self.present is not None and _claimed(self.present) is None:
            remove_claims(self.path)  # Nothing syncs them: a loss of power damages them.
        self._repeat(records, versions)
        self.catalog.note_logged(self.logged[-1] if self.logged else self.last)

    def _scan(self) -> None:
        for pack in scan_packs(self.path, ManifestDocument):
            if isinstance(pack, DamagedPack):
                self.report.problems.append(f"Pack {pack.info.name} is damaged ({pack.reason}); it was left in place.")
                self.damaged.append(pack.info)
            else:
                self._take_in(pack)
        self.catalog.add_packs(list(self.packs.values()))
        self.catalog.place_packs(self.places)
        self.objects.resolve()
        self.catalog.move_objects(self.objects.places.values())
        for name, bases in self.objects.bases().items():
            self.catalog.add_packs([self.packs[name]], bases)

    def _versions(self, records: Sequence[dict[str, Any]], problems: list[str]) -> FoundVersions:
        """Return the versions that there are, by the packs, the log and the current catalog; log the corrections."""
        rows = None if self.present is None else _present_rows(self.present, records)
        if rows and self._are_of_another_store(rows, records):
            self.report.problems.append(
                "The current catalog belongs to another store: none of its versions is here; it was ignored."
            )
            self.present = rows = None
        if rows is not None and self.present is not None and (self.path / root.LOG).is_dir():
            lost = list(change_log.lost_last(records, problems, self.present.logged()))
            problems += lost
            self.report.problems += lost
        if self.present is not None:
            self.last_number = max(self.last_number, _last_number(self.present))
        before, later = self._since(records, rows, is_whole=not problems)
        self.kept, self.later = None if before is not rows else before, later
        marks = change_log.superseded(later, [uid for uid, row in before.items() if row.superseded])
        runs = {uid: row.run for uid, row in before.items()} | change_log.renamed(later)
        versions = FoundVersions(self.found, records, rows, self.last_number, marks, runs, self._is_whole)
        self.report.problems += versions.problems
        if rows is None and any(pack.kind == "encoded" for pack in self.damaged):
            self.report.problems += [
                f"No pack holds version {numbers}: its pack is damaged, or it was never committed."
                for numbers in versions.unexplained()
            ]
        for version in versions.renumbered:
            change = {"change": "renumber", "uid": version.uid, "from": version.written_as, "version": version.number}
            self._log(change)
        renames: dict[str, list[str]] = {}
        logged = change_log.renamed(records)
        for version in versions.versions.values():
            if version.run != logged.get(version.uid, version.document.run):
                renames.setdefault(version.run, []).append(version.uid)
        for run, uids in renames.items():  # Their record is lost.
            self._log({"change": "rename", "run": run, "uids": uids})
        for uid, (superseded, present) in versions.marked.items():
            self._log({"change": "supersede", "by": uid, "superseded": superseded, "present": present})
        if versions.dropped:
            # Without ids: nobody forgot them, and a transfer may send them.
            self._log({"change": "forget", "versions": sorted(versions.dropped), "uids": []})
        return versions

    def _repeat(self, records: Sequence[dict[str, Any]], versions: FoundVersions) -> None:
        """Repeat the last changes of tags, metrics and policies, and note the last collection."""
        settings = versions.settings(records)
        if self.kept is not None:
            settings = self._kept_settings(self.kept, settings, versions)
        else:
            self._log_moved_tags(records, settings, versions)
        for (change, name), value in settings.items():
            if change == "policy":
                self.catalog.set_policy(name, value)
            elif change == "metrics" and name in versions.versions:
                self.catalog.update_version(name, metrics=value)
            elif change == "tag" and value in versions.versions:
                self.catalog.set_tag(name, value)
            elif change == "tag":
                self.report.problems.append(f"Tag {name} points at version {value}, which is gone; set the tag again.")
        collected = [record["created"] for record in records if record.get("change") == "gc"]
        if collected:
            self.catalog.note_collected(collected[-1])

    def _log_moved_tags(self, records: Sequence[dict[str, Any]], settings: Settings, versions: FoundVersions) -> None:
        """Log tags whose versions have other numbers in the log."""
        last = {record["tag"]: record["version"] for record in records if record.get("change") == "tag"}
        for tag, number in last.items():
            present = settings.get(("tag", tag))
            if present in versions.versions and present != number:
                self._log({"change": "tag", "tag": tag, "version": present})

    def _kept_settings(self, kept: Mapping[str, VersionRow], logged: Settings, versions: FoundVersions) -> Settings:
        """Return the settings of the current catalog and of later records; log the log's differences from them."""
        assert self.present is not None
        remaining = {version.uid: version for version in versions.versions.values()}
        moved = {version.number for version in versions.renumbered}
        numbers = {row.number: remaining[uid].number for uid, row in kept.items() if uid in remaining}
        found: Settings = {("policy", run): text for run, text in self.present.policies().items()}
        for tag, number in self.present.tags().items():
            found["tag", tag] = numbers.get(number, number)
        for uid, version in remaining.items():
            key = "metrics", version.number
            if uid in kept and (key in logged or kept[uid].metrics != version.document.metrics):
                found[key] = kept[uid].metrics
            elif uid not in kept and key in logged and version.number not in moved and not version.renumbered:
                found[key] = logged[key]  # It returns: the record that it was forgotten is lost.
        found = versions.settings(self.later, found)
        for (change, name), value in found.items():
            if logged.get((change, name)) != value:
                self._log({"change": change} | _fields(change, name, value))
        for change, name in logged.keys() - found.keys():
            if change == "tag":
                self._log({"change": "untag", "tag": name})
            elif change == "policy":
                self._log({"change": "policy", "run": name, "policy": None})
        return found

    def _since(
        self, records: Sequence[Mapping[str, Any]], rows: Mapping[str, VersionRow] | None, *, is_whole: bool
    ) -> tuple[Mapping[str, VersionRow], Sequence[Mapping[str, Any]]]:
        """Return the source of marks and names of runs: the log, or the current catalog's rows and later records."""
        if rows is None or self.present is None:
            return {}, records
        last, names = self.present.logged(), [log_files.name_of(record) for record in records]
        if is_whole and (not last or last in names):
            return {}, records
        return rows, [record for record, name in zip(records, names, strict=True) if name > last]

    def _log(self, record: Mapping[str, Any]) -> None:
        """Add a record to the log; all of them belong to one change."""
        self.logged.append(change_log.append(self.storage, record, self.last, len(self.logged)))

    def _is_whole(self, version: FoundVersion) -> bool:
        """Return whether the packs have all objects and blobs of a version."""
        document = version.document
        blobs = {self.moved.get(name, name) for name in document.blob_packs()}
        return all(map(self.objects.restores, document.objects)) and blobs <= self.packs.keys()

    def _moved(self, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the replacements of missing packs; of several copies, the one committed last.

        Later versions may need blobs that the copy of a killed `gc` lacks.
        """
        written = [name for record in records if record.get("change") == "gc" for name in record["written"]]
        committed = {name: number for number, name in enumerate(written)}
        return {
            former: max(names, key=lambda name: committed.get(name, -1))
            for former, names in self.claims.items()
            if former not in self.packs
        }

    def _take_in(self, pack: ScannedPack) -> None:
        if pack.document.trial:
            # A trial of a killed search; `gc` removes the file.
            self.last_number = max(self.last_number, pack.document.number)
            return
        self.report.packs += 1
        self.packs[pack.info.name] = pack.info
        if pack.place is not None:
            self.places[pack.info.name] = pack.place
        for former in pack.document.stands_for:
            self.claims.setdefault(former, []).append(pack.info.name)
        self.objects.add(pack.info.name, pack.info.kind, pack.document)
        self.last_number = max(self.last_number, pack.document.number)
        if pack.document.rebase:
            self.rebased = True
        try:
            found = found_version(pack)
        except IntegrityError as error:
            self.report.problems.append(f"{error} The version was left out.")
            return
        if found is not None:
            self.found.append(found)
        elif pack.info.kind == "raw":
            self.raw_packs.setdefault((pack.document.number, pack.document.created), []).append(pack.info)

    def _are_of_another_store(self, rows: Mapping[str, VersionRow], records: Sequence[dict[str, Any]]) -> bool:
        """Return whether packs and log exist, but none names a version of the catalog by its id."""
        packs = {*self.packs, *self.claims, *(pack.name for pack in self.damaged)}
        logged = {origin[0] for record in records if record.get("change") == "gc" for origin in record["versions"]}
        ours = logged | {version.uid for version in self.found}
        return bool(self.packs) and not any(uid in ours or row.pack in packs for uid, row in rows.items())

    def _insert(self, version: FoundVersion, parent: int | None) -> None:
        pack, document = version.pack, version.document
        raw = self.raw_packs.get((pack.document.number, pack.document.created), [])
        row = version_row(document, [*raw, pack.info], pack.entry)
        missing = sum(not self.objects.restores(identity) for identity in document.objects)
        lacks = [f"{missing} objects; its other objects are kept."] if missing else []
        references = {self.moved.get(name, name) for name in document.blob_packs()}
        lacks += [
            f"data shared with pack {name}, which is damaged or missing: the layout of its files, or the bytes between"
            " their tensors."
            for name in sorted(references - self.packs.keys())
        ]
        if lacks:
            self.report.problems += [f"Version {row.number} ({version.name}) lacks {part}" for part in lacks]
            self.catalog.note_incomplete()
        self.catalog.commit_version(
            replace(row, run=version.run, step=version.step, parent=parent, superseded=version.superseded),
            [],
            [],
            references=references & self.packs.keys(),
            uses=self.objects.uses(document.objects),
            bands=document.bands,
        )
        self.report.versions += 1
