"""The places of objects: the large table of the catalog, with a small table for recent rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckstore.errors import ConflictError, UsageError
from ckstore.storage.catalog_tables import PACK_NAME
from ckstore.storage.connection import Connection
from ckstore.storage.pack import PackName
from ckstore.storage.rows import Placement
from ckstore.storage.schema import Natural, Whole, rows

#: Number of rows of the small table after which they are moved to the large one (see `migrations`).
_LARGEST_RECENT = 1 << 15
#: Keys are digests: one in this many is small. Those rows are counted, to estimate the number of all.
_SAMPLED = 1 << 9
_PLACED = rows(Natural, Whole, Whole)
_FOUND = rows(Natural, PackName, Whole)
_NAMES = rows(Whole, PackName)
_SLOTS = rows(Natural, Whole)


class RemovedError(ConflictError):
    """An object that a new version refers to was removed."""


class Placements:
    """Pack and slot of every object, by key. Changes happen inside the caller's transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def find(self, keys: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return pack name and slot of each known key."""
        query = f"SELECT o.key, {PACK_NAME}, o.slot FROM objects o JOIN packs p ON p.id = o.pack WHERE o.key"
        found = self._connection.rows_of(query, keys, _FOUND)
        return {key: (pack, slot) for key, pack, slot in found}

    def require(self, keys: Collection[int]) -> None:
        """Raise `RemovedError` unless all keys exist."""
        if len(self.find(keys)) < len(set(keys)):
            raise RemovedError("An object that this version refers to was removed during the ingest; ingest it again.")

    def within(self, pack: str) -> list[tuple[int, int]]:
        """Return (key, slot) of every object in a pack, by slot. Reads the whole table."""
        return self._connection.rows(
            "SELECT key, slot FROM objects WHERE pack = (SELECT id FROM packs WHERE name = ?) ORDER BY slot",
            [pack],
            _SLOTS,
        )

    def by_pack(self) -> dict[str, dict[int, int]]:
        """Return the key of every object by slot, for each pack by name."""
        names = dict(self._connection.rows(f"SELECT id, {PACK_NAME} FROM packs p", schema=_NAMES))
        found: dict[str, dict[int, int]] = {}
        query = "SELECT key, pack, slot FROM objects"
        for key, pack, slot in self._connection.rows(query, schema=_PLACED):
            # Outside a transaction, a pack may be added between the two queries.
            if pack in names:
                found.setdefault(names[pack], {})[slot] = key
        return found

    def count(self) -> int:
        """Return the number of keys."""
        # The view would look up every row of the large table in the small one.
        [[count]] = self._connection.rows(
            "SELECT (SELECT COUNT(slot) FROM settled_objects) + (SELECT COUNT(slot) FROM recent_objects"
            " WHERE key NOT IN (SELECT key FROM settled_objects))"
        )
        return int(count)

    def place(self, placements: Iterable[Placement], *, displace: bool) -> None:
        """Set the places of objects; existing keys keep theirs unless `displace`."""
        identifiers: dict[str, int] = {}
        placed = []
        for key, pack, slot in placements:
            if pack not in identifiers:
                found = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack])
                if not found:
                    raise UsageError(f"Pack {pack} is not in the catalog; add it in the same transaction.")
                identifiers[pack] = found[0][0]
            placed.append((key, identifiers[pack], slot))
        if not placed:
            return
        # Key order walks the tree once; any other order would search it for every row.
        placed.sort()
        if displace:
            self._connection.execute_many("INSERT OR REPLACE INTO recent_objects VALUES (?, ?, ?)", placed)
        else:
            self._connection.execute_many(
                "INSERT OR IGNORE INTO recent_objects SELECT ?, ?, ?"
                " WHERE NOT EXISTS (SELECT 1 FROM settled_objects WHERE key = ?)",
                [(key, pack, slot, key) for key, pack, slot in placed],
            )
        self._settle()

    def remove(self, keys: Iterable[int]) -> int:
        """Remove the places of objects; return the number of removed keys."""
        places = self.find(keys)
        self._connection.execute_many(
            "UPDATE packs SET held = NULL WHERE name = ?", [(pack,) for pack in {pack for pack, _ in places.values()}]
        )
        known = [(key,) for key in sorted(places)]
        for part in ("recent", "settled"):
            self._connection.execute_many(f"DELETE FROM {part}_objects WHERE key = ?", known)
        return len(known)

    def _settle(self) -> None:
        query, last = "SELECT COUNT(slot) FROM recent_objects WHERE key <= ?", (1 << 63) // _SAMPLED - 1
        [[small]] = self._connection.rows(query, [last])
        if small * _SAMPLED > _LARGEST_RECENT:
            self._connection.execute(
                "INSERT OR REPLACE INTO settled_objects SELECT key, pack, slot FROM recent_objects ORDER BY key"
            )
            self._connection.execute("DELETE FROM recent_objects")
