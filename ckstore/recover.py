"""Builds the catalog again from packs and log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckstore.documents import VersionDocument
from ckstore.errors import NotFoundError
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
        builder = _Builder(catalog, report)
        builder.build(path)
        rebased = builder.rebased

    replace_catalog(path, build)
    if rebased:
        _take_costs_again(path)
    return report


def _take_costs_again(path: Path) -> None:
    """Depths and costs of all versions: manifests say what they were before objects were stored in full."""
    from ckstore.rebase import update_costs
    from ckstore.store import Store

    with Store(path) as store:
        update_costs(store)


class _Builder:
    def __init__(self, catalog: Catalog, report: RecoverReport) -> None:
        self.catalog = catalog
        self.report = report
        self.versions: dict[int, tuple[ScannedPack, VersionDocument]] = {}
        self.dropped: dict[int, int | None] = {}
        self.exact: dict[int, PackInfo] = {}
        self.there: set[str] = set()
        self.rebased = False

    def build(self, path: Path) -> None:
        for pack in scan_packs(path):
            if isinstance(pack, DamagedPack):
                self.report.problems.append(f"Pack {pack.info.name} is damaged ({pack.reason}); it was left alone.")
                continue
            self.report.packs += 1
            self._place(pack)
            if "version" in pack.document:
                self._note(pack)
            elif pack.info.kind == "exact" and not pack.document.get("rebase"):
                self.exact[pack.document["number"]] = pack.info
        records = log.read_all(path)
        for record in records:
            if record.get("change") == "forget":
                for number in record["versions"]:
                    self._drop(number)
        for number in sorted(self.versions):
            self._insert(number)
        self._tag(records)

    def _place(self, pack: ScannedPack) -> None:
        self.catalog.add_packs([pack.info])
        records = pack.document["records"]
        places: list[Placement] = [(key(record["id"]), pack.info.name, slot) for slot, record in enumerate(records)]
        identities = [record["id"] for record in records]
        if pack.document.get("rebase"):
            self.rebased = True
        else:
            fresh = [index for index, identity in enumerate(identities) if _name(pack, identity) not in self.there]
            places = [places[index] for index in fresh]
        self.there.update(_name(pack, identity) for identity in identities)
        if pack.info.kind == "coarse":
            self.catalog.move_lattices(places)
        else:
            self.catalog.move_contents(places)

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
        packs = [self.exact[number]] if number in self.exact else []
        row = version_row(document, [*packs, pack.info], pack.entry)
        missing = [
            identity
            for lattice, content in document.objects
            for identity in _needed(lattice, content)
            if not self._is_there(identity)
        ]
        if missing:
            self.report.problems.append(
                f"Version {number} ({row.run}@{row.step}) lacks {len(missing)} of its layers; what is left is kept."
            )
        parent = row.parent
        while parent is not None and parent not in self.versions:
            parent = self.dropped.get(parent)
        self.catalog.commit_version(replace(row, parent=parent), [], [], [])
        self.report.versions += 1

    def _is_there(self, name: str) -> bool:
        return name in self.there

    def _tag(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            try:
                if record.get("change") == "tag":
                    self.catalog.set_tag(record["tag"], record["version"])
                elif record.get("change") == "untag":
                    self.catalog.delete_tag(record["tag"])
            except NotFoundError:
                continue


def _name(pack: ScannedPack, identity: str) -> str:
    return f"{pack.info.kind}:{identity}"


def _needed(lattice: str, content: str | None) -> Iterator[str]:
    yield f"coarse:{lattice}"
    if content is not None and content != lattice:
        yield f"exact:{content}"
