"""The catalog's tables, one migration for each format version; released migrations are never edited."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable

from sqlite_utils import Database

from ckstore.storage import catalog_tables


def create_tables(database: Database) -> None:
    """Format 1."""
    triggers = catalog_tables.TRIGGERS["seals"] + catalog_tables.TRIGGERS["meta"]
    for statement in (*catalog_tables.FORMAT_1, *triggers):
        database.execute(statement)
    for name in catalog_tables.SETS:
        database.execute("INSERT INTO seals (name) VALUES (?)", [name])
    database.execute("INSERT INTO meta (key, value) VALUES ('store', ?)", [secrets.token_hex(16)])


#: The migration to each format version, from 1 on. Those of sqlite-utils are counted in a table of its own, which would
#: be a part of the format.
MIGRATIONS: list[Callable[[Database], None]] = [create_tables]


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
        migration(Database(database))
    database.execute(f"PRAGMA user_version = {version}")
