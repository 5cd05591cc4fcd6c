"""Builds the catalog again from packs and log."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckstore.documents import VersionDocument
from ckstore.errors import CkstoreError, NotFoundError
from ckstore.ingest import version_row
from ckstore.storage import log
from ckstore.storage.catalog import Catalog, Placement, key, replace_catalog
from ckstore.storage.pack import PackInfo
from ckstore.storage.recover import DamagedPack, ScannedPack, scan_packs


@dataclass(slots=True)
class RecoverReport:
    """What a recovery found.

    Attributes
    ----------
    versions, packs
        How many came back.
    problems
        A sentence for each pack that is damaged and each version that is incomplete without it. Nothing was deleted.
    """

    versions: int = 0
    packs: int = 0
    problems: list[str] = field(default_factory=list)


def recover(path: Path) -> RecoverReport:
    """Replace the catalog of the store at `path` by one that is built from its packs and log.

    Versions that were forgotten stay forgotten, tags point where they pointed. A pack that was complete when its
    ingest was interrupted brings its version back.
    """
    report = RecoverReport()
    rebased = False

    def build(catalog: Catalog) -> None:
        nonlocal rebased
        builder = _Builder(catalog, report, _last_number(path))
        builder.build(path)
        rebased = builder.rebased

    replace_catalog(path, build)
    if rebased:
        _take_costs_again(path)
    return report


def _last_number(path: Path) -> int:
    """The highest number that the present catalog knows: an ingest that is under way has one that no pack tells."""
    try:
        with Catalog.open(path, "r") as present:
            numbers = [row.number for row in present.versions()] + [claim.number for claim in present.reservations()]
    except CkstoreError:
        return 0
    return max(numbers, default=0)


def _take_costs_again(path: Path) -> None:
    """Depths and costs of all versions: manifests say what they were before objects were stored in full."""
    from ckstore.rebase import update_costs
    from ckstore.store import Store

    with Store(path) as store:
        update_costs(store)


class _Builder:
    def __init__(self, catalog: Catalog, report: RecoverReport, last_number: int) -> None:
        self.catalog = catalog
        self.report = report
        self.versions: dict[int, tuple[ScannedPack, VersionDocument]] = {}
        self.dropped: dict[int, int | None] = {}
        self.exact: dict[tuple[int, str], PackInfo] = {}
        self.objects = _Objects()
        self.last_number = last_number
        self.rebased = False

    def build(self, path: Path) -> None:
        for pack in scan_packs(path):
            if isinstance(pack, DamagedPack):
                self.report.problems.append(f"Pack {pack.info.name} is damaged ({pack.reason}); it was left alone.")
                continue
            self.report.packs += 1
            self.catalog.add_packs([pack.info])
            self.objects.add(pack)
            self.last_number = max(self.last_number, pack.document["number"])
            if pack.document.get("rebase"):
                self.rebased = True
            elif "version" in pack.document:
                self._note(pack)
            else:
                self.exact[pack.document["number"], pack.document["created"]] = pack.info
        self.objects.resolve()
        self.catalog.move_lattices(self.objects.lattices.values())
        self.catalog.move_contents(self.objects.contents.values())
        records = log.read_all(path)
        for record in records:
            if record.get("change") == "forget":
                for number in record["versions"]:
                    self.last_number = max(self.last_number, number)
                    self._drop(number)
        for number in sorted(self.versions):
            self._insert(number)
        # A number that was given once, be it to a version that is gone or was never committed, stays its own.
        self.catalog.skip_numbers(self.last_number)
        self._tag(records)

    def _note(self, pack: ScannedPack) -> None:
        document = VersionDocument.from_json(pack.document["version"])
        if document.replaces is not None:
            self._drop(document.replaces)
        for number, (_, other) in list(self.versions.items()):
            if other.step is not None and (other.run, other.step) == (document.run, document.step):
                self._drop(number)
        self.versions[document.number] = (replace(pack, blobs={}), document)

    def _drop(self, number: int) -> None:
        if number in self.versions:
            self.dropped[number] = self.versions.pop(number)[1].parent

    def _insert(self, number: int) -> None:
        pack, document = self.versions[number]
        exact = self.exact.get((number, document.created))
        row = version_row(document, [pack.info] if exact is None else [exact, pack.info], pack.entry)
        missing = sum(not self.objects.restores(lattice, content) for lattice, content in document.objects)
        if missing:
            self.report.problems.append(
                f"Version {number} ({row.run}@{row.step}) lacks layers of {missing} objects; what is left is kept."
            )
        parent = row.parent
        while parent is not None and parent not in self.versions:
            parent = self.dropped.get(parent)
        self.catalog.commit_version(replace(row, parent=parent), [], [], [])
        self.report.versions += 1

    def _tag(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            try:
                if record.get("change") == "tag":
                    self.catalog.set_tag(record["tag"], record["version"])
                elif record.get("change") == "untag":
                    self.catalog.delete_tag(record["tag"])
            except NotFoundError:
                continue


class _Objects:
    """Where the objects in all packs stand: of several places of one the last rebase's, else the first.

    An object that cannot be decoded, because what it is stored against is gone, has no place: as long as it had one, an
    ingest of the same content would be told that the store has it.

    Attributes
    ----------
    lattices, contents
        Placements by key, once `resolve` was called.
    """

    def __init__(self) -> None:
        self.lattices: dict[int, Placement] = {}
        self.contents: dict[int, Placement] = {}
        # For each key its places, and the keys of what must be there: the base, or the lattice and the parent.
        self._lattices: dict[int, list[tuple[Placement, int | None]]] = {}
        self._contents: dict[int, list[tuple[Placement, int, int | None]]] = {}

    def add(self, pack: ScannedPack) -> None:
        """Take in the records of a pack; packs come in the order in which they were written."""
        for slot, record in enumerate(pack.document["records"]):
            number = key(record["id"])
            place = number, pack.info.name, slot
            if pack.info.kind == "coarse":
                lattices = self._lattices.setdefault(number, [])
                at = 0 if pack.document.get("rebase") else len(lattices)
                lattices.insert(at, (place, _key(record["base"])))
            else:
                contents = self._contents.setdefault(number, [])
                at = 0 if pack.document.get("rebase") else len(contents)
                contents.insert(at, (place, key(record["lattice"]), _key(record.get("parent"))))

    def resolve(self) -> None:
        """Find a place for everything that can be decoded."""
        before = -1
        while before < len(self.lattices):
            before = len(self.lattices)
            for number, lattices in self._lattices.items():
                for place, base in lattices if number not in self.lattices else ():
                    if base is None or base in self.lattices:
                        self.lattices[number] = place
                        break
        before = -1
        while before < len(self.contents):
            before = len(self.contents)
            for number, contents in self._contents.items():
                for place, lattice, parent in contents if number not in self.contents else ():
                    if lattice in self.lattices and (parent is None or parent in self.contents):
                        self.contents[number] = place
                        break

    def restores(self, lattice: str, content: str | None) -> bool:
        """Whether an object of a version can be decoded."""
        return key(lattice) in self.lattices and (
            content is None or content == lattice or key(content) in self.contents
        )


def _key(identity: str | None) -> int | None:
    return None if identity is None else key(identity)
