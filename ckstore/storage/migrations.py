"""The catalog's tables, one migration for each format version; released migrations are never edited."""

from __future__ import annotations

import secrets
import sqlite3

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from ckstore.storage import catalog_tables

migrations = Migrations("ckstore")


@migrations(name="0001_tables")
def create_tables(db: Database) -> None:
    """Format 1."""
    triggers = catalog_tables.TRIGGERS["seals"] + catalog_tables.TRIGGERS["meta"]
    for statement in (*catalog_tables.FORMAT_1, *triggers):
        db.execute(statement)
    for name in catalog_tables.SETS:
        db.execute("INSERT INTO seals (name) VALUES (?)", [name])
    db.execute("INSERT INTO meta (key, value) VALUES ('store', ?)", [secrets.token_hex(16)])


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a catalog to this version's tables.

    Parameters
    ----------
    connection : sqlite3.Connection
        Inside a `BEGIN IMMEDIATE` transaction, so that two processes cannot migrate at once.
    version : int
        Format version after the migration.
    """
    migrations.apply(Database(connection))
    connection.execute(f"PRAGMA user_version = {version}")
