"""The catalog's tables, one migration for each format version; released migrations are never edited."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable

from ckstore.storage import catalog_tables


def create_tables(database: sqlite3.Connection) -> None:
    """Format 1."""
    triggers = catalog_tables.TRIGGERS["seals"] + catalog_tables.TRIGGERS["meta"]
    for statement in (*catalog_tables.FORMAT_1, *triggers):
        database.execute(statement)
    for name in catalog_tables.SETS:
        database.execute("INSERT INTO seals (name) VALUES (?)", [name])
    database.execute("INSERT INTO meta (key, value) VALUES ('store', ?)", [secrets.token_hex(16)])


#: The migration to each format version, from 1 on.
MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [create_tables]


def migrate(database: sqlite3.Connection, version: int) -> None:
    """Bring a catalog to this version's tables.

    Parameters
    ----------
    database : sqlite3.Connection
        Inside a `BEGIN IMMEDIATE` transaction, so that two processes cannot migrate at once.
    version : int
        Format version after the migration.
    """
    [found] = database.execute("PRAGMA user_version").fetchone()
    for migration in MIGRATIONS[found:version]:
        migration(database)
    database.execute(f"PRAGMA user_version = {version}")
