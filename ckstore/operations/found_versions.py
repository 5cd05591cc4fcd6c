"""Decides which of the versions that a recovery finds in packs there are, under which numbers and steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckstore.objects.documents import VersionDocument
from ckstore.storage.catalog import VersionRow
from ckstore.storage.log import gaps
from ckstore.storage.scan_packs import ScannedPack


@dataclass(slots=True)
class FoundVersion:
    """A version whose manifest was found.

    Attributes
    ----------
    pack
        The pack that holds the manifest, without its blobs.
    document
        What the manifest says, under the number that the version has now.
    written_as
        The number in the manifest.
    uid
        The id that the manifest gives it.
    step
        The step that it has now.
    renumbered
        When another number was given to it, by the log; empty where that was not, or is not in the log yet.
    """

    pack: ScannedPack
    document: VersionDocument
    written_as: int
    uid: str
    step: int | None
    renumbered: str = ""

    @property
    def number(self) -> int:
        """The number that it has now."""
        return self.document.number

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.document.run}@{self.document.step}"


@dataclass(slots=True)
class FoundVersions:
    """The versions of a store by number, and what is to be said of them.

    A version goes only where another says that it replaces it, where the log says that it was forgotten, or where the
    present catalog has another one at its step: then its ingest was refused, or killed and repeated. Otherwise two that
    claim one number, or one step of a run, both stay, and the earlier one keeps it. Of two with one id, copies of a
    version that came from another store, one stays.

    Parameters
    ----------
    found
        All that was found in packs, in the order in which it was written.
    records
        The log.
    present
        The rows of the present catalog, by id; None where it cannot be read.
    last_number
        The highest number that is known to have been given.

    Attributes
    ----------
    versions
        By number.
    gone
        Numbers of versions that were replaced or forgotten, each with its parent's where that is known.
    renumbered
        Those that were given another number now.
    problems
        A sentence for each thing that is not as it was.
    """

    found: Sequence[FoundVersion]
    records: Sequence[Mapping[str, Any]]
    present: Mapping[str, VersionRow] | None
    last_number: int
    versions: dict[int, FoundVersion] = field(default_factory=dict)
    gone: dict[int, int | None] = field(default_factory=dict)
    renumbered: list[FoundVersion] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _named: set[int] = field(default_factory=set)
    #: The number of the copy that stays, by that of one that does not.
    _copies: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._number()
        self._collect()
        self._replace()
        self._forget()
        self._merge()
        self._give_steps()
        self._name_lost()

    def meant(self, number: int, when: str) -> int:
        """The present number of the version that a number meant at a time."""
        best: FoundVersion | None = None
        for version in self.found:
            before = not version.renumbered or when < version.renumbered
            under = version.written_as if before else version.number
            if under == number and version.document.created <= when:
                best = version
        present = number if best is None else best.number
        return self._copies.get(present, present)

    def parent(self, version: FoundVersion) -> int | None:
        """The nearest ancestor that is still there."""
        parent = version.document.parent
        if parent is not None:
            parent = self.meant(parent, version.document.created)
        passed: set[int] = set()
        while parent is not None and parent not in self.versions and parent not in passed:
            passed.add(parent)
            parent = self.gone.get(parent)
        return None if parent in passed else parent

    def _number(self) -> None:
        """Give every version a number of its own."""
        logged = {
            (record["uid"], record["from"]): record for record in self.records if record.get("change") == "renumber"
        }
        for version in self.found:
            record = logged.get((version.uid, version.written_as))
            if record is not None:
                version.renumbered = record["created"]
                version.document = replace(version.document, number=record["version"])
            self.last_number = max(self.last_number, version.number, version.written_as)
        known = self.present or {}
        # Whoever has the number in the present catalog is first, then whoever was written first.
        for version in sorted(self.found, key=lambda version: version.document.uid not in known):
            holder = self.versions.setdefault(version.number, version)
            if holder is version:
                continue
            if holder.document.uid == version.document.uid:
                self.versions[version.number] = version  # What was written later is what counts.
                continue
            self.last_number += 1
            self.problems.append(
                f"Versions {holder.name} and {version.name} both claim number {version.number};"
                f" {version.name} of {version.document.created} has number {self.last_number} from now on."
            )
            version.document = replace(version.document, number=self.last_number)
            self.versions[version.number] = version
            self.renumbered.append(version)

    def _collect(self) -> None:
        """Drop the versions that `gc` found to be gone; of many of them no pack tells any more."""
        found = {(version.uid, number): version for version in self.found
                 for number in (version.written_as, version.number)}  # fmt: skip
        for record in self.records:
            if record.get("change") != "gc":
                continue
            for uid, number, parent, created in record["versions"]:
                self.last_number = max(self.last_number, number)
                if (uid, number) in found:
                    self._drop(found[uid, number].number)
                else:
                    self.gone[number] = None if parent is None else self.meant(parent, created)

    def _replace(self) -> None:
        for version in self.found:
            replaced = version.document.replaces
            if replaced is None:
                continue
            number = self.meant(replaced, version.document.created)
            target = self.versions.get(number)
            if target is None:
                self.gone.setdefault(number, None)
            elif target is not version and (target.document.run, target.document.step) == (
                version.document.run,
                version.document.step,
            ):
                self._drop(number)

    def _forget(self) -> None:
        for record in self.records:
            if record.get("change") == "forget":
                for number in record["versions"]:
                    self.last_number = max(self.last_number, number)
                    self._drop(self.meant(number, record["created"]))

    def _merge(self) -> None:
        """Let one of several copies of a version stay: a transfer that was killed may have left one."""
        kept: dict[str, FoundVersion] = {}
        known = self.present or {}
        for version in sorted(
            self.versions.values(),
            key=lambda version: (version.uid in known and known[version.uid].number == version.number, version.number),
            reverse=True,
        ):
            first = kept.setdefault(version.uid, version)
            if first is not version:
                self._drop(version.number)
                self._copies[version.number] = first.number

    def _drop(self, number: int) -> None:
        version = self.versions.pop(number, None)
        if version is None:
            self.gone.setdefault(number, None)
            return
        parent = version.document.parent
        self.gone[number] = None if parent is None else self.meant(parent, version.document.created)

    def _give_steps(self) -> None:
        """Let one version have each step of a run."""
        known = self.present or {}
        taken = {
            (row.run, row.step): uid
            for uid, row in known.items()
            if row.step is not None and row.number not in self.gone
        }
        holders: dict[tuple[str, int], FoundVersion] = {}
        for version in sorted(self.found, key=lambda version: version.document.uid not in taken.values()):
            if version.step is None or self.versions.get(version.number) is not version:
                continue
            place = version.document.run, version.step
            row = known.get(version.document.uid)
            if place in taken and row is None:
                self._drop(version.number)
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
        """Say which versions there were and are not."""
        uids = {version.document.uid for version in self.found}
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
        """Numbers of which nothing tells what became of them: of a lost version, or of an ingest that failed."""
        known = {number for version in self.found for number in (version.number, version.written_as)}
        return gaps(known | self.gone.keys() | self._named | {self.last_number + 1})


def found_version(pack: ScannedPack) -> FoundVersion:
    """The version of a pack's manifest."""
    document = VersionDocument.from_json(pack.document["version"])
    return FoundVersion(replace(pack, blobs={}), document, document.number, document.uid, document.step)


def last_targets(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, str]]:
    """What each tag that was not removed was set to last: a number, and when."""
    tags: dict[str, tuple[int, str]] = {}
    for record in records:
        if record.get("change") == "tag":
            tags[record["tag"]] = record["version"], record["created"]
        elif record.get("change") == "untag":
            tags.pop(record["tag"], None)
    return tags
