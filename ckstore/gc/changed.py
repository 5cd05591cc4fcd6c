"""The part of a store in which changes since the last `gc` may have made garbage, decided on without the rest.

changed   = packs that were added, or that lost an object or a row that names them: the catalog notes them (`unswept`)
part      = these, and those below objects that nothing wants for themselves
decision  = as for the whole store, with all that names these packs; a pack that goes was compared with each of them
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError, NotFoundError
from ckstore.gc.kept import present_form
from ckstore.gc.reachability import PackContents, Part, State, Survey, survey
from ckstore.storage.pack import PackInfo
from ckstore.storage.rows import VersionRow, key, keys
from ckstore.storage.slots import among

if TYPE_CHECKING:
    from ckstore.objects.documents import VersionDocument
    from ckstore.repository import Repository
    from ckstore.storage.catalog_reader import Uses
    from ckstore.storage.scan_packs import ScannedPack

#: Versions with blobs in a pack that are read at each end of their list, unless the pack may go.
_SOME = 8
#: A part of more than this share of all packs is not worth it: the whole store is read once instead.
_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Changes:
    """The packs in which there may be garbage, and the names of files of packs that the catalog lacks."""

    packs: list[str]
    files: set[str]


def changes(repository: Repository) -> Changes | None:
    """Return the changes since the last collection; None if there may be garbage in any pack."""
    catalog, packs = repository.catalog, repository.packs
    if catalog.is_incomplete():
        return None
    found = catalog.unswept()
    if len(found) > _SHARE * catalog.totals().packs:
        return None
    names, segments = set(packs.apart()), packs.segments()
    inside = sum(count for name, (count, _) in catalog.joined().items() if name in segments)
    known = catalog.known_packs(names)
    if (segments and packs.doubled()) or len(known) + inside != catalog.totals().packs:
        return None
    return Changes(found, _unknown(repository, names - known))


def _unknown(repository: Repository, names: set[str]) -> set[str]:
    """Return the packs that are not recorded as gone: those are deleted in due time anyway."""
    return names - repository.catalog.gone(names).keys() if names else names


def changed_state(repository: Repository) -> State:
    """Return the state of an empty part: the files that the catalog lacks."""
    catalog = repository.catalog
    names = set(repository.packs.apart())
    names = _unknown(repository, names - catalog.known_packs(names))
    files = [info for info in repository.packs.list_packs() if info.name in names] if names else []
    return State(catalog.identity(), [], [], {}, files, Part(frozenset(), frozenset(), {}, {}))


def changed_survey(
    repository: Repository,
    state: State,
    changed: Iterable[str],
    may_go: Callable[[PackContents, int], bool],
    uncommitted: Sequence[ScannedPack] = (),
    *,
    ahead: bool = False,
    forgotten: Mapping[int, Sequence[VersionRow]],
) -> tuple[State, Survey]:
    """Return the part of a state that has all that `changed` packs may have lost, and the survey of it.

    `may_go` tells whether a pack would be removed or rewritten if some more of its bytes were not needed.
    """
    decided, certain, known = set(changed), set[str](), _Versions()
    while True:
        reader = _Reader(repository, decided, certain, known)
        reader.name_those_of(forgotten)
        decided |= reader.packs
        state = reader.state(state)
        found = survey(repository, state, uncommitted, ahead=ahead, forgotten=forgotten)
        joining = found.below | (found.in_full.keys() - decided if ahead else set())
        going = {name for name, pack in found.packs.items() if may_go(pack, reader.doubtful(pack))} - certain
        if not joining and not going:
            return state, found
        decided |= joining
        certain |= going


#: Row and document of versions that were read, by number.
_Versions = dict[int, "tuple[VersionRow, VersionDocument]"]


class _Reader:
    """Reads the packs of a part, and the versions and packs that need them.

    Of the `certain` packs, all that may need them is read; of others enough to know which objects are needed.
    """

    def __init__(
        self,
        repository: Repository,
        packs: Collection[str],
        certain: Collection[str],
        known: _Versions,
    ) -> None:
        self._repository, self._certain, self._known = repository, certain, known
        self.packs: set[str] = set()
        self._rows: dict[int, VersionRow] = {}
        # By name of the pack: the key in each placed slot, and names of the blobs that nobody was found to need.
        self._objects: dict[str, dict[int, int]] = {}
        self._spared: dict[str, set[str]] = {}
        # All keys that were met, and those in the packs, but for copies of objects that are elsewhere.
        self._named: set[int] = set()
        self._inside: set[int] = set()
        above: set[str] = set()
        waiting = sorted(packs)
        repository.resolver.prefetch_manifests(waiting)
        while waiting:
            name = waiting.pop()
            if name not in self.packs:
                self.packs.add(name)
                for other, held in self._read(name).items():
                    if held == 0:
                        above.add(other)
                    else:  # It was changed, or has objects that are only bases: it is part of the decision.
                        waiting.append(other)
        repository.resolver.prefetch_manifests(above - self.packs)
        self._needed = {number for name in sorted(above - self.packs) for number in self._read_above(name)}

    def name_those_of(self, forgotten: Mapping[int, Sequence[VersionRow]]) -> None:
        """Look up the objects of forgotten versions, too."""
        for row in chain.from_iterable(forgotten.values()):
            with suppress(IntegrityError, NotFoundError):  # The survey leaves it out.
                document = self._repository.resolver.document(present_form(self._repository, row))
                self._named.update(keys(document.objects).values())

    def state(self, before: State) -> State:
        """Return a state with the packs and versions that were read."""
        catalog = self._repository.catalog
        inside = {number for slots in self._objects.values() for number in slots.values()}
        found = catalog.find_objects(self._named - inside)
        beyond = {number: pack for number, (pack, _) in found.items()}
        versions = [row for _, row in sorted(self._rows.items())]
        infos = [PackInfo(name, catalog.pack_bytes(name) or 0) for name in sorted(self._objects)]
        part = Part(frozenset(self.packs), frozenset(self._needed), beyond, self._spared)
        return replace(before, versions=versions, packs=infos, objects=self._objects, part=part)

    def doubtful(self, pack: PackContents) -> int:
        """Return the bytes of a pack's blobs that nobody was found to need."""
        return sum(pack.blobs[name] for name in self._spared.get(pack.name, ()))

    def _read(self, name: str) -> Mapping[str, int | None]:
        """Read the users of a pack's objects and blobs; return the packs above them, unless all objects are wanted."""
        catalog, manifest = self._repository.catalog, self._repository.resolver.manifest(name)
        records = manifest.document.records
        numbers = [key(record.id) for record in records]
        self._named.update(numbers, *(keys(filter(None, (record.base,))).values() for record in records))
        places = catalog.find_objects(numbers)
        placed, open_slots = {}, {}
        for slot, number in enumerate(numbers):
            if places.get(number) == (name, slot):
                placed[slot] = number
            elif number in places:
                self._check(number, *places[number])
                continue
            open_slots[slot] = number
        self._objects[name] = placed
        self._inside.update(open_slots.values())
        uses = catalog.uses_of(name)
        blobs = set(manifest.blobs)
        self._read_versions(name, uses, open_slots, blobs)
        if open_slots.keys() & placed.keys() or name in self._certain:
            return uses.above
        return {}

    def _read_versions(self, name: str, uses: Uses, slots: dict[int, int], blobs: set[str]) -> None:
        """Read the versions that may need a pack's slots and blobs; remove the needed ones."""
        for number in uses.own:
            self._read_version(number, name, slots, blobs)
        some = uses.blobs
        if name not in self._certain and len(some) > 2 * _SOME:
            some = some[:_SOME] + some[-_SOME:]
        for number in self._while(some, blobs):
            self._read_version(number, name, slots, blobs)
        if blobs and len(some) < len(uses.blobs):
            self._spared[name] = blobs
        used: dict[str, list[int]] = {}
        for number, text in uses.objects:
            used.setdefault(text, []).append(number)
        for text, numbers in used.items():
            for number in numbers:
                if not among(text, slots):
                    break
                self._read_version(number, name, slots, blobs)

    @staticmethod
    def _while(numbers: Sequence[int], wanted: Collection[str]) -> Iterator[int]:
        """Yield numbers as long as something is wanted."""
        for number in numbers:
            if not wanted:
                return
            yield number

    def _read_version(self, number: int, pack: str, slots: dict[int, int], blobs: set[str]) -> None:
        if number not in self._known:
            row = self._repository.catalog.version(number)
            self._known[number] = row, self._repository.resolver.document(row)
        row, document = self._known[number]
        self._rows[number] = row
        needed = set(keys(document.objects).values())
        self._named |= needed
        for slot in [slot for slot, wanted in slots.items() if wanted in needed]:
            del slots[slot]
        blobs.difference_update(ref.name for ref in document.blobs() if (ref.pack or row.pack) == pack)

    def _read_above(self, name: str) -> Iterator[int]:
        """Yield the keys of a pack's objects whose bases are inside."""
        records = self._repository.resolver.manifest(name).document.records
        bases = keys([record.base for record in records if record.base is not None])
        found = {
            slot: key(record.id)
            for slot, record in enumerate(records)
            if record.base is not None and bases[record.base] in self._inside
        }
        places = self._repository.catalog.find_objects(found.values())
        self._objects[name] = {slot: number for slot, number in found.items() if places.get(number) == (name, slot)}
        self._named.update(bases.values())
        yield from self._objects[name].values()

    def _check(self, number: int, pack: str, slot: int) -> None:
        """Raise `IntegrityError` unless an object is where the catalog says."""
        records = self._repository.resolver.manifest(pack).document.records
        if not (slot < len(records) and key(records[slot].id) == number):
            raise IntegrityError(f"Pack {pack} has no record {slot}; run `ckstore recover`.")
