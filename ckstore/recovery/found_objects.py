"""Places of objects, rebuilt from the manifests of packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckstore.storage.catalog import Placement, key


class FoundObjects:
    """Places of the objects in all packs: the last rebase's copy, or else the first.

    An object whose chain is broken gets no place: otherwise an ingest of the same content would not store it again.

    Attributes
    ----------
    lattices, contents
        Placements by key, after `resolve`.
    """

    def __init__(self) -> None:
        self.lattices: dict[int, Placement] = {}
        self.contents: dict[int, Placement] = {}
        # For each key its places, each with the keys that it needs: the base, or the lattice and the parent.
        self._lattices: dict[int, list[tuple[Placement, int | None]]] = {}
        self._contents: dict[int, list[tuple[Placement, int, int | None]]] = {}
        self._raw: dict[int, list[Placement]] = {}

    def add(self, name: str, kind: str, document: Mapping[str, Any]) -> None:
        """Add the records of a pack's manifest; add packs in the order in which they were written."""
        for slot, record in enumerate(document["records"]):
            number = key(record["id"])
            place = number, name, slot
            if kind == "raw":
                self._raw.setdefault(number, []).append(place)
            elif kind == "coarse":
                lattices = self._lattices.setdefault(number, [])
                at = 0 if document.get("rebase") else len(lattices)
                lattices.insert(at, (place, _key(record["base"])))
            else:
                contents = self._contents.setdefault(number, [])
                at = 0 if document.get("rebase") else len(contents)
                contents.insert(at, (place, key(record["lattice"]), _key(record.get("parent"))))

    def resolve(self, lattices: Iterable[Placement] = (), contents: Iterable[Placement] = ()) -> None:
        """Choose a place for each object that can be decoded.

        Parameters
        ----------
        lattices, contents
            Current places. They stay if their object can be decoded. Objects in packs that were not added count as
            decodable.
        """
        present, layers = set(lattices), set(contents)
        seen = {place[1] for places in self._lattices.values() for place, _ in places}
        seen |= {place[1] for places in self._contents.values() for place, *_ in places}
        seen |= {place[1] for places in self._raw.values() for place in places}
        self.lattices = {place[0]: place for place in present if place[1] not in seen}
        self.contents = {place[0]: place for place in layers if place[1] not in seen}
        raw = {number: next((place for place in places if place in present), places[0])
               for number, places in self._raw.items()}  # fmt: skip
        self.lattices |= {number: place for number, place in raw.items() if place in present}
        if present or layers:
            self._resolve(present.__contains__, layers.__contains__)
        self._resolve(lambda _: True, lambda _: True)
        # An encoded copy takes precedence over a raw one.
        self.lattices = {number: place for number, place in raw.items() if number not in self.contents} | self.lattices

    def _resolve(self, is_lattice: Callable[[Placement], bool], is_content: Callable[[Placement], bool]) -> None:
        before = -1
        while before < len(self.lattices):
            before = len(self.lattices)
            for number, lattices in self._lattices.items():
                for place, base in lattices if number not in self.lattices else ():
                    if is_lattice(place) and (base is None or base in self.lattices):
                        self.lattices[number] = place
                        break
        before = -1
        while before < len(self.contents):
            before = len(self.contents)
            for number, contents in self._contents.items():
                for place, lattice, parent in contents if number not in self.contents else ():
                    if is_content(place) and lattice in self.lattices and (parent is None or parent in self.contents):
                        self.contents[number] = place
                        break

    def restores(self, lattice: str, content: str | None) -> bool:
        """Return whether an object of a version can be decoded."""
        if content in (None, lattice):
            return key(lattice) in self.lattices or key(lattice) in self.contents
        return key(lattice) in self.lattices and key(content) in self.contents


def _key(identity: str | None) -> int | None:
    return None if identity is None else key(identity)
