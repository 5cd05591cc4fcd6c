"""Builds the catalog again from packs and log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckstore.encoding.writer import version_row
from ckstore.errors import CkstoreError, IntegrityError, NoStoreError
from ckstore.objects.documents import MANIFEST
from ckstore.operations.costs import update_costs
from ckstore.operations.found_objects import FoundObjects
from ckstore.operations.found_versions import FoundVersion, FoundVersions, found_version, last_targets
from ckstore.operations.lost_packs import lost_packs
from ckstore.repository import Repository
from ckstore.storage import log, reserve, root
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.catalog_replacement import replace_catalog, replace_file
from ckstore.storage.pack import PackInfo
from ckstore.storage.scan_packs import DamagedPack, ScannedPack, scan_packs


@dataclass(slots=True)
class RecoverReport:
    """What a recovery found.

    Attributes
    ----------
    versions, packs
        How many came back.
    problems
        A sentence for everything that is damaged or missing (packs, log records, versions, tags), and for each two
        versions that claim the same number or step. Nothing was deleted.
    """

    versions: int = 0
    packs: int = 0
    problems: list[str] = field(default_factory=list)


def recover(path: str | os.PathLike[str]) -> RecoverReport:
    """Replace the catalog of the store at `path` by one that is built from its packs and log.

    Versions that were forgotten stay forgotten, tags point where they pointed. A pack that was complete when its
    ingest was interrupted brings its version back. Nobody else writes meanwhile; who reads goes on.

    Of a remote store, named by its URL, the catalog of the mirror is made again from the log alone, while others go on.
    Then every pack is read: one that is damaged or missing is put again where its bytes are still here. Else the log
    says what was lost with it, so that an ingest of the same content stores that again.

    Raises
    ------
    NoStoreError
        There is no store.
    LockedError
        Another process is writing.
    FormatVersionError
        A later ckstore wrote something here.
    """
    place = root.place(path)
    if isinstance(place, str):
        return _recover_mirror(place)
    if not root.is_store(place):
        raise NoStoreError(f"{place} is not a store: it has no packs and log; name another one with --store.")
    root.check_no_mirror(place)
    return _recover_directory(place)


def _recover_mirror(url: str) -> RecoverReport:
    """Make the catalog of a remote store's mirror again, from the first record of its log on.

    Options and cached bytes stay; other processes of this mirror go on.
    """
    from ckstore.storage.remote.catalog import RemoteCatalog
    from ckstore.storage.remote.mirror import find

    mirror = find(url, from_log=True)

    def fill(beside: Path, present: Catalog | None) -> None:
        with RemoteCatalog(replace(mirror, path=beside)) as catalog:
            catalog.refresh()
            if present is not None:
                with suppress(IntegrityError):
                    catalog.take_over_claims(present)

    replace_file(mirror.path, fill)
    with Repository(url) as repository:
        problems = lost_packs(repository)
        return RecoverReport(len(repository.catalog.versions()), len(repository.catalog.packs()), problems)


def _recover_directory(path: Path) -> RecoverReport:
    """As `recover`, of a directory."""
    report = RecoverReport()
    rebased = False

    def build(catalog: Catalog, present: Catalog | None) -> None:
        nonlocal rebased
        builder = _Builder(path, catalog, present, report)
        builder.build()
        rebased = builder.rebased

    with reserve.spent(path):
        replace_catalog(path, build)
        if rebased:
            _take_costs_again(path)
    return report


def _present_rows(present: Catalog) -> dict[str, VersionRow] | None:
    """The versions of the present catalog by id; None where it is damaged, so that nothing in it counts."""
    try:
        return None if present.check() else {row.uid: row for row in present.versions()}
    except CkstoreError:
        return None


def _last_number(present: Catalog) -> int:
    """The highest number that the present catalog knows: an ingest that is under way has one that no pack tells."""
    try:
        return present.last_number()
    except (CkstoreError, TypeError, ValueError):
        return 0


def _take_costs_again(path: Path) -> None:
    """Depths and costs of all versions: manifests say what they were before objects were stored in full."""
    with Repository(path) as repository:
        update_costs(repository)


class _Builder:
    def __init__(self, path: Path, catalog: Catalog, present: Catalog | None, report: RecoverReport) -> None:
        self.path = path
        self.catalog = catalog
        self.present = present
        self.report = report
        self.found: list[FoundVersion] = []
        self.beside: dict[tuple[int, str], PackInfo] = {}
        self.packs: set[str] = set()
        # What says that it took a pack's place, by that pack's name, and what did.
        self.claims: dict[str, list[str]] = {}
        self.moved: dict[str, str] = {}
        self.damaged: list[PackInfo] = []
        self.objects = FoundObjects()
        self.last_number = 0
        self.rebased = False

    def build(self) -> None:
        for pack in scan_packs(self.path, MANIFEST):
            if isinstance(pack, DamagedPack):
                self.report.problems.append(f"Pack {pack.info.name} is damaged ({pack.reason}); it was left alone.")
                self.damaged.append(pack.info)
            else:
                self._take_in(pack)
        self.objects.resolve()
        self.catalog.move_lattices(self.objects.lattices.values())
        self.catalog.move_contents(self.objects.contents.values())
        records, problems = log.read_whole(self.path)
        self.moved = self._moved(records)
        self.catalog.note_moved(self.moved)
        self.report.problems += problems
        rows = None if self.present is None else _present_rows(self.present)
        if rows and self._are_of_another_store(rows, records):
            self.report.problems.append(
                "The present catalog is of another store: nothing of what it lists is here; nothing in it counted."
            )
            self.present = rows = None
        if self.present is not None:
            self.last_number = max(self.last_number, _last_number(self.present))
        versions = FoundVersions(self.found, records, rows, self.last_number)
        self.report.problems += versions.problems
        if rows is None and any(pack.kind == "coarse" for pack in self.damaged):
            self.report.problems += [
                f"No pack tells of what was numbered {numbers}: it is gone with a damaged one, or was never committed."
                for numbers in versions.unexplained()
            ]
        for version in versions.renumbered:
            change = {"change": "renumber", "uid": version.uid, "from": version.written_as, "version": version.number}
            log.append(self.path, change)
        # A parent was written under a lower number.
        for version in sorted(versions.versions.values(), key=lambda version: version.written_as):
            self._insert(version, versions.parent(version))
        # A number that was given once, be it to a version that is gone or was never committed, stays its own.
        self.catalog.skip_numbers(versions.last_number)
        if rows is not None and self.present is not None:
            try:
                self.catalog.take_over_claims(self.present)
            except IntegrityError:
                self.report.problems.append("Whoever ingests or reads at present is not known: leases are damaged.")
        self._tag(records, versions)
        for record in records:
            if record.get("change") == "metrics":
                number = versions.meant(record["version"], record["created"])
                if number in versions.versions:
                    self.catalog.update_version(number, metrics=record["metrics"])
        for record in records:
            if record.get("change") == "policy":
                self.catalog.set_policy(record["run"], record["policy"])
        collected = [record["created"] for record in records if record.get("change") == "gc"]
        if collected:
            self.catalog.note_collected(collected[-1])

    def _moved(self, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """What took the place of packs that are not there any more, of several copies the one that was committed last.

        A copy that a killed `gc` left need not have what versions since then refer to.
        """
        written = [name for record in records if record.get("change") == "gc" for name in record["written"]]
        committed = {name: number for number, name in enumerate(written)}
        return {
            former: max(names, key=lambda name: committed.get(name, -1))
            for former, names in self.claims.items()
            if former not in self.packs
        }

    def _take_in(self, pack: ScannedPack) -> None:
        if pack.document.get("trial"):
            # Of a search that was killed: nobody wants that version. `gc` removes the file.
            self.last_number = max(self.last_number, pack.document["number"])
            return
        self.report.packs += 1
        self.packs.add(pack.info.name)
        self.catalog.add_packs([pack.info])
        for former in pack.document.get("stands_for", ()):
            self.claims.setdefault(former, []).append(pack.info.name)
        self.objects.add(pack.info.name, pack.info.kind, pack.document)
        self.last_number = max(self.last_number, pack.document["number"])
        if pack.document.get("rebase"):
            self.rebased = True
        if "version" in pack.document:
            try:
                self.found.append(found_version(pack))
            except IntegrityError as error:
                self.report.problems.append(f"{error} The version was left out.")
        elif pack.info.kind != "coarse":
            self.beside[pack.document["number"], pack.document["created"]] = pack.info

    def _are_of_another_store(self, rows: Mapping[str, VersionRow], records: Sequence[dict[str, Any]]) -> bool:
        """Whether there are packs and log, and none of them tells of any of these versions by their ids."""
        packs = {*self.packs, *self.claims, *(pack.name for pack in self.damaged)}
        logged = {origin[0] for record in records if record.get("change") == "gc" for origin in record["versions"]}
        ours = logged | {version.uid for version in self.found}
        return bool(self.packs) and not any(uid in ours or row.pack in packs for uid, row in rows.items())

    def _insert(self, version: FoundVersion, parent: int | None) -> None:
        pack, document = version.pack, version.document
        beside = self.beside.get((pack.document["number"], pack.document["created"]))
        row = version_row(document, [pack.info] if beside is None else [beside, pack.info], pack.entry)
        missing = sum(not self.objects.restores(lattice, content) for lattice, content in document.objects)
        if missing:
            self.report.problems.append(
                f"Version {row.number} ({version.name}) lacks layers of {missing} objects; what is left is kept."
            )
        references = {self.moved.get(name, name) for name in document.blob_packs()}
        for name in sorted(references - self.packs):
            self.report.problems.append(
                f"Version {row.number} ({version.name}) lacks what it shares with pack {name}, which is damaged or"
                " missing: how its files are cut, or the bytes between their tensors."
            )
        self.catalog.commit_version(
            replace(row, step=version.step, parent=parent), [], [], [], references=references & self.packs
        )
        self.report.versions += 1

    def _tag(self, records: Sequence[dict[str, Any]], versions: FoundVersions) -> None:
        for tag, (number, when) in sorted(last_targets(records).items()):
            meant = versions.meant(number, when)
            if meant not in versions.versions:
                self.report.problems.append(
                    f"Tag {tag} means version {number}, which is gone; there is no such tag until it is set again."
                )
                continue
            if meant != number:
                log.append(self.path, {"change": "tag", "tag": tag, "version": meant})
            self.catalog.set_tag(tag, meant)
