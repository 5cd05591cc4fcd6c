"""Places of objects, rebuilt from the manifests of packs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckstore.objects.documents import ManifestDocument
from ckstore.storage.catalog import Placement, key
from ckstore.storage.slots import to_text


class FoundObjects:
    """Places of the objects in all packs: the last rebase's copy, or else the first.

    An object whose chain is broken gets no place: otherwise an ingest of the same content would not store it again.
    """

    def __init__(self) -> None:
        #: By key, after `resolve`.
        self.places: dict[int, Placement] = {}
        # For each key its places, each with the key of the base.
        self._encoded: dict[int, list[tuple[Placement, int | None]]] = {}
        self._raw: dict[int, list[Placement]] = {}

    def add(self, name: str, kind: str, document: ManifestDocument) -> None:
        """Add the records of a pack's manifest; add packs in the order in which they were written."""
        for slot, record in enumerate(document.records):
            number = key(record.id)
            place = number, name, slot
            if kind == "raw":
                self._raw.setdefault(number, []).append(place)
                continue
            places = self._encoded.setdefault(number, [])
            base = None if record.base is None else key(record.base)
            places.insert(0 if document.rebase else len(places), (place, base))

    def resolve(self, present: Iterable[Placement] = ()) -> None:
        """Choose a place for each object that can be decoded.

        The present places stay if their object can be decoded. Objects in packs that were not added count as decodable.
        """
        present = set(present)
        seen = {place[1] for places in self._encoded.values() for place, _ in places}
        seen |= {place[1] for places in self._raw.values() for place in places}
        self.places = {place[0]: place for place in present if place[1] not in seen}
        raw = {number: next((place for place in places if place in present), places[0])
               for number, places in self._raw.items()}  # fmt: skip
        self.places |= {number: place for number, place in raw.items() if place in present}
        if present:
            self._resolve(present.__contains__)
        self._resolve(lambda _: True)
        # An encoded copy takes precedence over a raw one.
        self.places = raw | self.places

    def _resolve(self, is_usable: Callable[[Placement], bool]) -> None:
        before = -1
        while before < len(self.places):
            before = len(self.places)
            for number, places in self._encoded.items():
                for place, base in places if number not in self.places else ():
                    if is_usable(place) and (base is None or base in self.places):
                        self.places[number] = place
                        break

    def bases(self) -> dict[str, set[str]]:
        """Return the packs that hold the bases of each pack's objects."""
        found: dict[str, set[str]] = {}
        for number, places in self._encoded.items():
            for place, base in places:
                if place == self.places.get(number) and base in self.places:
                    found.setdefault(place[1], set()).add(self.places[base][1])
        return found

    def uses(self, identities: Iterable[str]) -> dict[str, str]:
        """Return the packs that hold some objects, with the text of their slots."""
        found: dict[str, list[int]] = {}
        for _, pack, slot in filter(None, map(self.places.get, map(key, identities))):
            found.setdefault(pack, []).append(slot)
        return {pack: to_text(slots) for pack, slots in found.items()}

    def restores(self, identity: str) -> bool:
        """Return whether an object of a version can be decoded."""
        return key(identity) in self.places
