"""Edits of a catalog past its triggers: as damage, which leaves the checksums, or signed again, as by an attacker."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ckstore.storage import catalog_tables
from ckstore.storage.connection import add_seal

#: Superseded versions are the latest or the highest one only if there are no others.
_LATEST = "coalesce((SELECT number FROM versions WHERE {} ORDER BY superseded, number DESC LIMIT 1), 0)"
_HIGHEST = (
    "coalesce((SELECT number FROM versions WHERE run = runs.id ORDER BY superseded, step DESC, number DESC LIMIT 1), 0)"
)


@contextmanager
def without_triggers(catalog: Path) -> Iterator[sqlite3.Connection]:
    """Open a catalog as other programs do, without the triggers that keep its checksums."""
    with closing(sqlite3.connect(catalog)) as database, database:
        add_seal(database)
        database.execute("PRAGMA synchronous = OFF")
        yield database


def edit(catalog: Path, statement: str, parameters: tuple[Any, ...] = ()) -> int:
    """Edit rows and leave their checksums as they are; return the number of edited rows."""
    with without_triggers(catalog) as database:
        return database.execute(statement, parameters).rowcount


def sign(database: sqlite3.Connection) -> None:
    """Compute all checksums and sums again."""
    sums = {
        **{table: f"SELECT COUNT(*), coalesce(SUM(seal), 0), 0, 0 FROM {table}" for table in catalog_tables.SETS},
        "packs": "SELECT COUNT(*), coalesce(SUM(seal), 0), 0, coalesce(SUM(bytes), 0) FROM packs",
        "versions": f"SELECT COUNT(*), coalesce(SUM(seal), 0), {_LATEST.format('1')}, coalesce(SUM(stored_bytes), 0)"
        " FROM versions",
        "hot": "SELECT COUNT(*), coalesce(SUM(seal), 0), 0, 0 FROM versions WHERE hot",
    }
    sealed = dict(catalog_tables.SEALED)
    with suppress(sqlite3.Error):
        _seal(database, "packs", sealed["packs"])
        _seal(database, "versions", sealed["versions"])
        database.execute(
            "UPDATE runs SET versions = (SELECT COUNT(*) FROM versions WHERE run = runs.id),"
            " total = coalesce((SELECT SUM(seal) FROM versions WHERE run = runs.id), 0),"
            f" last = {_LATEST.format('run = runs.id')}, highest = {_HIGHEST},"
            " (original_bytes, stored_bytes) = (SELECT coalesce(SUM(original_bytes), 0), coalesce(SUM(stored_bytes), 0)"
            " FROM versions WHERE run = runs.id)"
        )
        database.execute(
            "UPDATE packs SET uses ="
            f" coalesce((SELECT SUM(seal) FROM ({catalog_tables.USED}) u WHERE u.id = packs.id), 0)"
            f" & {catalog_tables.USES_BITS}"
        )
        for table in ("runs", "meta", "policies", "tags"):
            _seal(database, table, sealed[table])
        for name, query in sums.items():
            database.execute(
                f"UPDATE seals SET (rows, total, last, bytes) = (SELECT * FROM ({query})) WHERE name = ?", [name]
            )
        _seal(database, "seals", sealed["seals"])


def _seal(database: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> None:
    database.execute(f"UPDATE {table} SET seal = seal({', '.join(columns).format('')})")
