"""Verify: checks packs against their names, chunks against checksums, objects against ids, and the catalog."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckstore.checking.catalog_check import CatalogCheck, store_problems
from ckstore.codecs.lattice import Bits
from ckstore.errors import AccessError, CkstoreError, FormatVersionError, IntegrityError
from ckstore.formats.paths import listed
from ckstore.objects.identity import MemberHasher, digest, lattice_id
from ckstore.objects.reader import ObjectReader
from ckstore.objects.records import Coarse, Codebook, Factors, Linear, Rounded
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.threads import in_order, worker_count

if TYPE_CHECKING:
    from ckstore.objects.documents import FileEntry
    from ckstore.repository import Repository
    from ckstore.storage.pack import PackInfo

#: Most repetitions of a failed check while other processes change the store.
_LOOKS = 8
#: Packs that are checked at once: half of the manifests in the cache, as chains lead to the slice before.
_SLICE = 64


@dataclass(slots=True)
class VerifyReport:
    """Result of a verification.

    Attributes
    ----------
    packs, versions, objects, chunks, bytes
        Numbers of checked packs, versions, objects and chunks, and of decoded bytes.
    problems
        One sentence for each problem; empty if the store is intact.
    damaged
        Paths of the damaged tensors and files, by number of the version.

    Examples
    --------
    >>> report = store.verify()
    >>> report.versions, report.problems, report.damaged
    (3, [], {})
    """

    packs: int = 0
    versions: int = 0
    objects: int = 0
    chunks: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: dict[int, list[str]] = field(default_factory=dict)


@collection_seldom()
def verify(
    repository: Repository,
    versions: Sequence[StoredVersion],
    *,
    sample: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read the packs and decode the objects of `versions`, without changing the store.

    Raise `AccessError` if a file may not be read, `FormatVersionError` if a later ckstore wrote one: its bytes are
    neither proven nor damaged.

    Parameters
    ----------
    sample
        Fraction of the packs and objects to check, drawn at random; all by default.
    progress
        Called with numbers of bytes that were read or decoded; `bytes_to_check` returns their sum.
    """
    report = VerifyReport()
    draw = random.Random()
    step = progress or (lambda nbytes: None)

    def chosen() -> bool:
        return sample is None or draw.random() < sample

    repository.resolver.forget()  # Another process may have encoded versions since.
    report.problems += repository.catalog.check()
    if report.problems:
        return report  # A damaged catalog would only cause misleading problems below.
    report.problems += _lasting(repository, lambda: list(store_problems(repository)))
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        check = _Check(repository, report, chosen, step, pool)
        for packs, part in _slices(repository, versions):
            check.expect(part)
            for pack in packs:
                check.pack(pack)
                check.catalog([pack.name], [version for version in part if version.row.pack == pack.name])
            while part:
                part = check.versions(part)
        check.end()
    for segment in repository.packs.segments():
        if chosen() and (reason := repository.packs.damage_of(segment)):
            report.problems.append(f"File {segment} of packs is damaged ({reason}); restore it from a copy.")
    report.damaged = {number: sorted(set(found)) for number, found in sorted(report.damaged.items())}
    return report


def _slices(
    repository: Repository, versions: Sequence[StoredVersion]
) -> Iterator[tuple[list[PackInfo], list[StoredVersion]]]:
    """Yield the packs of a store, some after others, each with the versions in it; then versions in no pack.

    Nothing keeps the documents of versions of former slices.
    """
    left: dict[str, list[StoredVersion]] = {}
    for version in versions:
        left.setdefault(version.row.pack, []).append(version)
    packs = iter(repository.catalog.packs())
    while part := list(islice(packs, _SLICE)):
        inside = [version for pack in part for version in left.pop(pack.name, ())]
        yield part, [StoredVersion(repository, version.row) for version in inside]
    if left:
        yield [], [version for inside in left.values() for version in inside]


class _Check:
    """Checks packs and versions slice by slice; a manifest is decoded once while its slice is checked."""

    def __init__(
        self,
        repository: Repository,
        report: VerifyReport,
        chosen: Callable[[], bool],
        progress: Callable[[int], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._repository = repository
        self._report = report
        self._chosen = chosen
        self._progress = progress
        self._pool = pool
        self._catalog = CatalogCheck(repository)
        # The store's own reader may still cache chunks from an ingest.
        self._reader = ObjectReader(repository.resolver, repository.packs)
        # The problem of each object of former slices, or an empty string.
        self._checked: dict[_Ids, str] = {}
        # A damaged object affects all versions that hold it or an object stored against it.
        self._affected: dict[tuple[str, tuple[str, ...]], set[int]] = {}

    def expect(self, versions: Sequence[StoredVersion]) -> None:
        """Look up the packs of a slice at once."""
        self._catalog.expect(versions)

    def pack(self, pack: PackInfo) -> None:
        """Compare a pack with its name."""
        if self._chosen():
            self._report.packs += 1
            if problem := _check_pack(self._repository, pack.name):
                self._report.problems.append(problem)
            self._progress(pack.bytes)

    def catalog(self, packs: Sequence[str], versions: Sequence[StoredVersion]) -> None:
        """Compare the catalog with manifests."""
        if list(self._catalog.problems(packs, versions)):
            self._report.problems += _lasting(
                self._repository, lambda: list(CatalogCheck(self._repository).problems(packs, versions))
            )

    def versions(self, versions: Sequence[StoredVersion]) -> list[StoredVersion]:
        """Check versions; return the current rows of damaged versions that changed during the check.

        Their problems are not reported, nor problems of versions that were forgotten.
        """
        report, fresh = self._report, {}
        self._repository.resolver.prefetch(identity for version in versions for identity in _names(version))
        objects, problems = _objects(versions, report)
        for ids, places in objects.items():
            if ids not in self._checked:
                self._checked[ids] = ""
                if self._chosen():
                    fresh[ids] = places
        # Objects of one key are checked in a row: the parent's chunks are still cached when a delta needs them.
        wanted = sorted(fresh.items(), key=lambda item: (item[1][0].unit.key, item[1][0].version.row.number))
        groups = [list(group) for _, group in groupby(wanted, lambda item: item[1][0].unit.key)]
        tasks: list[_Task] = [[(ids, places[0].unit) for ids, places in group] for group in groups]
        check = partial(_check_group, self._reader)
        for group, found in zip(groups, in_order(self._pool, check, tasks, 4), strict=True):
            for (ids, _), (chunks, nbytes, problem) in zip(group, found, strict=True):
                report.objects += 1
                report.chunks += chunks
                report.bytes += nbytes
                self._checked[ids] = problem
                self._progress(nbytes)
        affected: dict[tuple[str, tuple[str, ...]], set[int]] = {}
        for ids, places in objects.items():
            if problem := self._checked[ids]:
                for version, number in places:
                    names = version.contents.names(number)
                    affected.setdefault((problem, tuple(names)), set()).add(version.row.number)
                    report.damaged.setdefault(version.row.number, []).extend(names)
        damaged = [version for version in versions if version.row.number in report.damaged]
        changed, again = _changed(self._repository, damaged)
        for number in changed:
            del report.damaged[number]
        report.versions -= len(again)
        report.problems += [problem for problem, number in problems if number not in changed]
        for said, numbers in affected.items():
            if left := numbers - changed:
                self._affected.setdefault(said, set()).update(left)
        for ids, places in objects.items() if again else ():
            if any(place.version.row.number in changed for place in places):
                del self._checked[ids]
        return again

    def end(self) -> None:
        """Report the damaged objects, each with all versions that it affects."""
        for (problem, paths), numbers in self._affected.items():
            noun = "version" if len(numbers) == 1 else "versions"
            self._report.problems.append(f"{listed(paths)} of {noun} {', '.join(map(str, sorted(numbers)))}: {problem}")


def _objects(
    versions: Sequence[StoredVersion], report: VerifyReport
) -> tuple[dict[_Ids, list[_Place]], list[tuple[str, int]]]:
    """Return the objects of versions, and the problems of their documents, each with the version's number."""
    objects: dict[_Ids, list[_Place]] = {}
    problems: list[tuple[str, int]] = []
    for version in versions:
        report.versions += 1
        try:
            for number, entry in enumerate(version.document.files):
                try:
                    version.skeleton(number)
                except IntegrityError as error:
                    problems.append((f"{entry.path} of version {version.row.number}: {error}", version.row.number))
                    report.damaged.setdefault(version.row.number, []).append(entry.path)
            for number in range(len(version.layout.units)):
                objects.setdefault(_ids(version, number), []).append(_Place(version, number))
        except (AccessError, FormatVersionError):
            raise
        except CkstoreError as error:
            problems.append((f"Version {version.row.number}: {error}", version.row.number))
            report.damaged[version.row.number] = [entry.path for entry in _files(version)]
    return objects, problems


def _changed(repository: Repository, versions: Sequence[StoredVersion]) -> tuple[set[int], list[StoredVersion]]:
    """Return the numbers of versions that others have forgotten or changed, and the current changed ones."""
    repository.catalog.refresh()
    present = {row.uid: row for row in repository.catalog.versions()} if versions else {}
    changed, again = set(), []
    for version in versions:
        row = present.get(version.row.uid)
        if row is None or row.described != version.row.described:
            changed.add(version.row.number)
            again += [] if row is None else [StoredVersion(repository, row)]
    return changed, again


def _lasting(repository: Repository, look: Callable[[], list[str]]) -> list[str]:
    """Repeat a check until the store does not change during it; return the problems that every repetition found."""
    problems = look()
    for _ in range(_LOOKS):
        if not problems:
            break
        repository.catalog.refresh()
        state = repository.catalog.state()
        found = look()
        problems = [problem for problem in problems if problem in found]
        repository.catalog.refresh()
        if repository.catalog.state() == state:
            break
    return problems


def _names(version: StoredVersion) -> Sequence[str]:
    """Return the ids of a version's objects; none if its manifest is unreadable."""
    with suppress(CkstoreError):
        return version.document.objects
    return ()


def _files(version: StoredVersion) -> Sequence[FileEntry]:
    """Return the files of a damaged version; none if its manifest is unreadable."""
    with suppress(CkstoreError):
        return version.document.files
    return ()


def check_restores(version: StoredVersion, progress: Callable[[int], None] | None = None) -> None:
    """Decode every file of a version; compare exact files with their BLAKE3, and coarse objects with their ids.

    `progress` is called with numbers of decoded bytes. Raise `IntegrityError` if a file or object differs.
    """
    from ckstore.reading.checkout import checked_blocks

    report = progress or (lambda nbytes: None)
    changed = {file for file in range(len(version.document.files)) if version.contents.is_changed(file)}
    for file in range(len(version.document.files)):
        if file in changed:
            version.skeleton(file)
            continue
        for blocks in checked_blocks(version, file):
            report(sum(map(len, blocks)))
    for number, unit in enumerate(version.layout.units):
        if not changed.isdisjoint(member.file for member in unit.members):
            report(_require_whole(version, number))


def check_arrival(version: StoredVersion, bases: Iterable[str]) -> None:
    """Decode all objects of a version, its files, and coarse bases; raise `IntegrityError` if one is forged."""
    reader = version.repository.reader
    for identity in bases:
        record = reader.resolver.record(identity)
        if not isinstance(record, Coarse) or _lattice_id(reader, record) != identity:
            raise IntegrityError(f"Base {identity} does not match its id; run `ckstore verify`.")
    for number in range(len(version.layout.units)):
        _require_whole(version, number)
    check_restores(version)


def _require_whole(version: StoredVersion, number: int) -> int:
    """Return the bytes of an object of a version; raise `IntegrityError` if it does not match its ids."""
    unit = version.layout.units[number]
    _, nbytes, problem = _check_object(version.repository.reader, _ids(version, number), unit)
    if problem:
        named = f"{listed(version.contents.names(number))} of version {version.row.number}"
        raise IntegrityError(f"{named}: {problem.rstrip('.')}; run `ckstore verify`.")
    return nbytes


def bytes_to_check(repository: Repository, versions: Sequence[StoredVersion], sample: float | None = None) -> int:
    """Return the bytes that `verify` reads and decodes, each object once; an estimate for a sample."""
    total = sum(pack.bytes for pack in repository.catalog.packs())
    objects: dict[_Ids, int] = {}
    for version in versions:
        with suppress(CkstoreError):  # `verify` reports its damage.
            objects |= {_ids(version, number): unit.nbytes for number, unit in enumerate(version.layout.units)}
    return round((total + sum(objects.values())) * (1.0 if sample is None else sample))


def _check_pack(repository: Repository, name: str) -> str:
    """Return a problem of a pack, or an empty string; a pack that others have removed has none."""

    def look() -> list[str]:
        try:
            if repository.packs.is_intact(name):
                return []
            problem = f"Pack {name} does not match its name; restore it from a copy."
        except (AccessError, FormatVersionError):
            raise
        except CkstoreError as error:
            problem = str(error)
        return [] if repository.catalog.pack_bytes(name) is None else [problem]

    return "".join(_lasting(repository, look))


class _Ids(NamedTuple):
    """The ids of one object in a version: its own, and the content id of its values if it is coarse."""

    object: str
    decoded: str | None


def _ids(version: StoredVersion, number: int) -> _Ids:
    """Return the ids of a unit."""
    facts = version.document.coarse_units.get(number)
    return _Ids(version.document.objects[number], None if facts is None else facts.decoded)


class _Place(NamedTuple):
    """A version that holds an object, and the number of its unit."""

    version: StoredVersion
    number: int

    @property
    def unit(self) -> Unit:
        """The unit."""
        return self.version.layout.units[self.number]


#: Decoded chunks and bytes, and a problem or an empty string.
_Checked = tuple[int, int, str]

#: Objects of one key, which one thread checks.
_Task = list[tuple[_Ids, Unit]]


def _check_group(reader: ObjectReader, task: _Task) -> list[_Checked]:
    return [_check_object(reader, ids, unit) for ids, unit in task]


def _check_object(reader: ObjectReader, ids: _Ids, unit: Unit) -> _Checked:
    try:
        return reader.resolver.settled(lambda: _decode_object(reader, ids, unit))
    except (AccessError, FormatVersionError):
        raise
    except CkstoreError as error:
        return 0, 0, str(error)


def _decode_object(reader: ObjectReader, ids: _Ids, unit: Unit) -> _Checked:
    chunks = -(-unit.count // unit.chunk)
    record = reader.resolver.record(ids.object)
    if (record.count, record.chunk, record.dtype) != (unit.count, unit.chunk, unit.dtype):
        return 0, 0, f"Object {ids.object} is cut into other chunks than the layout says."
    if record.is_exact != (ids.decoded is None):
        return 0, 0, f"Object {ids.object} has another fidelity than the manifest says."
    if isinstance(record, Coarse) and _lattice_id(reader, record) != record.id:
        return chunks, 0, "The integers differ from the stored ones."
    found = _values_id(unit, (reader.bits(ids.object, chunk) for chunk in range(chunks)))
    if found != (ids.decoded or ids.object):
        differ = (
            "values differ from the stored ones" if record.is_exact else "coarse values differ from the first decode"
        )
        return chunks, 0, f"The {differ}."
    return chunks, unit.nbytes, ""


def _lattice_id(reader: ObjectReader, record: Coarse) -> str:
    """Return the lattice id of a record's decoded integers."""
    chunks = range(record.chunks)
    base = ""
    if isinstance(record, Codebook):
        digests = [digest(reader.numbers(record, chunk).view(np.uint8)) for chunk in chunks]
        base = (record.base or "") if record.additive else ""
    elif isinstance(record, Factors):
        digests, base = [digest(reader.factors(record).view(np.uint8))], record.base
    else:
        assert isinstance(record, Linear | Rounded)
        digests = [digest(reader.integers(record, chunk).view(np.uint8)) for chunk in chunks]
    return lattice_id(record.lattice, record.count, record.chunk, list(map(bytes.fromhex, digests)), base)


def _values_id(unit: Unit, chunks: Iterable[Bits]) -> str:
    """Return the content id of a unit with these values."""
    hasher = MemberHasher(unit.dtype, unit.chunk, unit.member_bytes)
    for bits in chunks:
        hasher.update(bits.data.cast("B"))
    return hasher.identity()
