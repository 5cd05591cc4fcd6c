"""Resolves the versions that a recovery finds in packs: which exist, with which numbers and steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from msgspec import structs

from ckstore.objects.documents import VersionDocument
from ckstore.storage.catalog import VersionRow
from ckstore.storage.change_log import gaps
from ckstore.storage.scan_packs import ScannedPack

#: The version's number of each tag, the metrics of each version and the policy of each run, by kind and name.
Settings = dict[tuple[str, Any], Any]


@dataclass(slots=True)
class FoundVersion:
    """A version with a readable manifest, and the pack that holds it, without its blobs.

    The document has the version's current number; `written_as` is the number in the manifest. `run` has its present
    name. `renumbered` is the time of its renumbering in the log, or empty. `superseded` tells whether its run went back
    to an earlier version.
    """

    pack: ScannedPack
    document: VersionDocument
    written_as: int
    uid: str
    step: int | None
    run: str
    renumbered: str = ""
    superseded: bool = False

    @property
    def number(self) -> int:
        """The current number."""
        return self.document.number

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{self.run}@{self.document.step}"


@dataclass(slots=True)
class FoundVersions:
    """The versions of a store by number, and the problems with them.

    A version is removed only if another one says that it replaces it, if the log says that it was forgotten, or if the
    current catalog has another version at its step: then its ingest was refused, or killed and repeated. Otherwise both
    stay if two versions claim one number or one step of a run; the earlier one keeps it. Of several copies with one id,
    transferred from another store, one stays.

    A record of a collection does not remove a version that was committed: it lists the versions that the catalog of the
    time lacked.

    `found` has all versions in packs, in the order in which they were written; `present` the rows of the current
    catalog by id, None if it is damaged or older than the log; `marks` the ids of the superseded versions; `runs` the
    names of renamed runs by the ids of versions; `is_whole` tells whether a version has all its objects. `gone` has the
    numbers of replaced or forgotten versions, each with its parent's if that is known; `renumbered` the
    versions that this recovery renumbered; `dropped` the numbers of versions that it leaves out without a reason in the
    log; `marked` the versions that it marks as superseded or present, by the id of the version that goes back: its
    commit was interrupted, or its record is lost.
    """

    found: Sequence[FoundVersion]
    records: Sequence[Mapping[str, Any]]
    present: Mapping[str, VersionRow] | None
    last_number: int
    marks: Collection[str]
    runs: Mapping[str, str]
    is_whole: Callable[[FoundVersion], bool]
    versions: dict[int, FoundVersion] = field(default_factory=dict)
    gone: dict[int, int | None] = field(default_factory=dict)
    renumbered: list[FoundVersion] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    marked: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _named: set[int] = field(default_factory=set)
    #: Number of the remaining copy, by number of each removed copy.
    _copies: dict[int, int] = field(default_factory=dict)
    #: The versions that have or had a number, in the order of `found`.
    _by_number: dict[int, list[FoundVersion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for version in self.found:
            version.run = self.runs.get(version.uid, version.run)
        self._number()
        for version in self.found:
            for number in {version.written_as, version.number}:
                self._by_number.setdefault(number, []).append(version)
        self._forget()
        self._collect()
        self._leave_out_partial()
        self._replace()
        self._merge()
        self._supersede()
        self._give_steps()
        self._name_lost()

    def meant(self, number: int, when: str) -> int:
        """Return the current number of the version that had a number at a time."""
        best: FoundVersion | None = None
        for version in self._by_number.get(number, ()):
            before = not version.renumbered or when < version.renumbered
            under = version.written_as if before else version.number
            if under == number and version.document.created <= when:
                best = version
        present = number if best is None else best.number
        return self._copies.get(present, present)

    def settings(self, records: Iterable[Mapping[str, Any]], before: Settings | None = None) -> Settings:
        """Return the settings after the changes of records, which follow those `before`."""
        found = {} if before is None else before.copy()
        for record in records:
            change = record.get("change")
            if change == "tag":
                found[change, record["tag"]] = self.meant(record["version"], record["created"])
            elif change == "untag":
                found.pop(("tag", record["tag"]), None)
            elif change == "metrics":
                found[change, self.meant(record["version"], record["created"])] = record["metrics"]
            elif change == "policy":
                found[change, record["run"]] = record["policy"]
            elif change == "rename" and "from" in record:
                found["policy", record["run"]] = found.pop(("policy", record["from"]), None)
        return {key: value for key, value in found.items() if value is not None}

    def parent(self, version: FoundVersion) -> int | None:
        """Return the nearest remaining ancestor."""
        parent = version.document.parent
        if parent is not None:
            parent = self.meant(parent, version.document.created)
        passed: set[int] = set()
        while parent is not None and parent not in self.versions and parent not in passed:
            passed.add(parent)
            parent = self.gone.get(parent)
        return None if parent in passed else parent

    def _number(self) -> None:
        """Give every version a unique number."""
        logged = {
            (record["uid"], record["from"]): record for record in self.records if record.get("change") == "renumber"
        }
        for version in self.found:
            record = logged.get((version.uid, version.written_as))
            if record is not None:
                version.renumbered = record["created"]
                version.document = structs.replace(version.document, number=record["version"])
            self.last_number = max(self.last_number, version.number, version.written_as)
        known = self.present or {}
        # The version with this number in the current catalog comes first, then the one written first.
        for version in sorted(self.found, key=lambda version: version.uid not in known):
            holder = self.versions.setdefault(version.number, version)
            if holder is version:
                continue
            if holder.uid == version.uid:
                self.versions[version.number] = version  # The later document is the valid one.
                continue
            self.last_number += 1
            self.problems.append(
                f"Versions {holder.name} and {version.name} both claim number {version.number};"
                f" {version.name} of {version.document.created} was renumbered {self.last_number}."
            )
            version.document = structs.replace(version.document, number=self.last_number)
            self.versions[version.number] = version
            self.renumbered.append(version)

    def _collect(self) -> None:
        """Drop the versions that a `gc` logged as gone, unless they were committed and can be restored.

        Packs may no longer name them.
        """
        found = {(version.uid, number): version for version in self.found
                 for number in (version.written_as, version.number)}  # fmt: skip
        for record in self.records:
            if record.get("change") != "gc":
                continue
            for uid, number, parent, created in record["versions"]:
                self.last_number = max(self.last_number, number)
                version = found.get((uid, number))
                if version is not None:
                    is_kept = uid in self.present if self.present is not None else self.is_whole(version)
                    if not is_kept:
                        self._leave_out(version.number)
                else:
                    self.gone[number] = None if parent is None else self.meant(parent, created)

    def _leave_out_partial(self) -> None:
        """Drop versions without all their objects that were never committed."""
        if self.present is None:
            return
        for version in self.found:
            if version.uid not in self.present and version.number not in self.gone and not self.is_whole(version):
                self._leave_out(version.number)
                self.problems.append(
                    f"Version {version.number} ({version.name}) was left out: its ingest was interrupted, and some of"
                    " its objects are gone; ingest it again."
                )

    def _leave_out(self, number: int) -> None:
        """Drop a version for a reason that is not in the log."""
        if number in self.versions:
            self.dropped.append(number)
        self._drop(number)

    def _replace(self) -> None:
        for version in self.found:
            replaced = version.document.replaces
            if replaced is None:
                continue
            number = self.meant(replaced, version.document.created)
            target = self.versions.get(number)
            if target is None:
                self.gone.setdefault(number, None)
            elif target is not version and (target.run, target.document.step) == (
                version.run,
                version.document.step,
            ):
                self._leave_out(number)

    def _forget(self) -> None:
        going: dict[int, None] = {}
        for record in self.records:
            if record.get("change") in ("forget", "undo"):
                self.last_number = max(self.last_number, *record["versions"])
                meant = [self.meant(number, record["created"]) for number in record["versions"]]
                if record["change"] == "forget":
                    going.update(dict.fromkeys(meant))
                else:
                    for number in meant:
                        going.pop(number, None)
        for number in going:
            self._drop(number)

    def _merge(self) -> None:
        """Keep one of several copies of a version; a killed transfer may have left another."""
        kept: dict[str, FoundVersion] = {}
        known = self.present or {}
        for version in sorted(
            self.versions.values(),
            key=lambda version: (version.uid in known and known[version.uid].number == version.number, version.number),
            reverse=True,
        ):
            first = kept.setdefault(version.uid, version)
            if first is not version:
                self._leave_out(version.number)
                self._copies[version.number] = first.number

    def _drop(self, number: int) -> None:
        version = self.versions.pop(number, None)
        if version is None:
            self.gone.setdefault(number, None)
            return
        parent = version.document.parent
        self.gone[number] = None if parent is None else self.meant(parent, version.document.created)

    def _supersede(self) -> None:
        """Mark the superseded versions: by the log, and by the parent of a version whose commit was interrupted."""
        known = self.present or {}
        void = [record for record in self._last_marks() if self._is_overtaken(record)]
        marks = set(self.marks)
        for record in void:
            marks.difference_update(record["superseded"])
            marks.update(record["present"])
        for version in self.versions.values():
            version.superseded = version.uid in marks
        recorded = {
            record["by"] for record in self.records if record.get("change") == "supersede" and record not in void
        }
        for number in sorted(self.versions):
            version = self.versions[number]
            if version.uid in recorded or version.uid in known or version.superseded:
                continue
            if version.document.goes_back:
                self._go_back(version)
            elif any(self.versions[parent].superseded for parent in islice(self._ancestors(number), 1)):
                version.superseded = True
                self.marked[version.uid] = [version.uid], []
        now = {version.uid for version in self.versions.values() if version.superseded}
        there = {version.uid for version in self.versions.values()}
        for record in void:  # This recovery adds a record that takes it back, and that counts later.
            own = [record["by"]] if record["by"] in now or record["by"] not in there else []
            superseded, present = self.marked.setdefault(record["by"], (own, []))
            for uid in dict.fromkeys([*record["superseded"], *record["present"]]):
                if uid not in (*superseded, *present):
                    (superseded if uid in now else present).append(uid)

    def _last_marks(self) -> list[Mapping[str, Any]]:
        """Return the `supersede` records of the log's last change, which may not have been committed."""
        last = self.records[-1]["follows"] if self.records else ""
        return [record for record in self.records if record.get("change") == "supersede" and record["follows"] == last]

    def _is_overtaken(self, record: Mapping[str, Any]) -> bool:
        """Return whether the change of a record was not committed, since its run went on from elsewhere.

        If it had been, it would have marked the later versions, or these would have records of their own.
        """
        if record["by"] in (self.present or ()) or record["by"] in record["superseded"]:
            return False
        version = next((version for version in self.versions.values() if version.uid == record["by"]), None)
        if version is None:
            return self.present is not None
        for number, other in self.versions.items():
            is_later = number > version.number and other.run == version.run
            if not is_later or other.uid in self.marks or (self.present is not None and other.uid not in self.present):
                continue
            line = set(self._ancestors(number))
            went_on = self.present is not None or any(self.versions[one].uid in record["superseded"] for one in line)
            if went_on and version.number not in line:
                return True
        return False

    def _go_back(self, version: FoundVersion) -> None:
        """Mark the versions as the commit of one that goes back would have done."""
        run = version.run
        line = set(self._ancestors(version.number))
        later = [other for number, other in sorted(self.versions.items())
                 if number > version.number and other.run == run and not other.superseded]  # fmt: skip
        own = [other for other in later if version.number in self._ancestors(other.number)]
        changed: tuple[list[FoundVersion], list[FoundVersion]] = [], []
        if own != later:  # The run went on from elsewhere.
            changed = [version, *own], []
        elif line:
            back = [self.versions[number] for number in line if self.versions[number].superseded]
            fork = max((number for number in line if not self.versions[number].superseded), default=0)
            changed = [
                other for number, other in sorted(self.versions.items())
                if fork < number and other not in (version, *own) and other.run == run and not other.superseded
            ], back  # fmt: skip
        for mark, others in zip((True, False), changed, strict=True):
            for other in others:
                other.superseded = mark
        self.marked[version.uid] = [other.uid for other in changed[0]], [other.uid for other in changed[1]]

    def _ancestors(self, number: int) -> Iterator[int]:
        """Yield the ancestors of a version in its run, the nearest first."""
        run, passed = self.versions[number].run, {number}
        while (parent := self.parent(self.versions[number])) is not None and parent not in passed:
            if self.versions[parent].run != run:
                return
            passed.add(parent)
            yield parent
            number = parent

    def _give_steps(self) -> None:
        """Give each step of a run to one version; superseded ones keep theirs."""
        known = self.present or {}
        marked = {version.uid for version in self.versions.values() if version.superseded}
        taken = {
            (row.run, row.step): uid
            for uid, row in known.items()
            if row.step is not None and row.number not in self.gone and uid not in marked
        }
        holders: dict[tuple[str, int], FoundVersion] = {}
        uids = set(taken.values())
        for version in sorted(self.found, key=lambda version: version.uid not in uids):
            if version.step is None or self.versions.get(version.number) is not version:
                continue
            place = version.run, version.step
            row = known.get(version.uid)
            if place in taken and row is None:
                self._leave_out(version.number)
                continue
            if version.superseded:
                continue
            holder = holders.setdefault(place, version)
            if holder is version:
                continue
            version.step = None
            if row is None or row.step is not None:
                self.problems.append(
                    f"Versions {holder.number} and {version.number} both claim {version.name};"
                    f" version {version.number} is kept without a step."
                )

    def _name_lost(self) -> None:
        """Report the lost versions."""
        uids = {version.uid for version in self.found}
        named = self._named
        for uid, row in (self.present or {}).items():
            if uid not in uids and row.number not in self.gone:
                named.add(row.number)
                self.problems.append(
                    f"Version {row.number} ({row.run}@{row.step}) is gone: its pack {row.pack} is damaged or missing."
                )
        for version in self.versions.values():
            parent = version.document.parent
            if parent is None:
                continue
            parent = self.meant(parent, version.document.created)
            if parent not in self.versions and parent not in self.gone and parent not in named:
                named.add(parent)
                self.problems.append(
                    f"Version {parent}, after which version {version.number} was stored, is gone:"
                    " its pack is damaged or missing."
                )

    def unexplained(self) -> Iterator[str]:
        """Yield unexplained gaps in the numbers: lost versions or failed ingests."""
        known = {number for version in self.found for number in (version.number, version.written_as)}
        return gaps(known | self.gone.keys() | self._named | {self.last_number + 1})


def found_version(pack: ScannedPack) -> FoundVersion | None:
    """Return the version in a pack's manifest; None if there is none. Raise `IntegrityError` for an invalid one."""
    document: VersionDocument | None = pack.document.described()
    if document is None:
        return None
    return FoundVersion(replace(pack, blobs={}), document, document.number, document.uid, document.step, document.run)
