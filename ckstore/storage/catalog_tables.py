"""The catalog's tables, as SQL; released tables are changed only by migrations."""

from __future__ import annotations

import re
from collections.abc import Iterable

# `slot` is the position of the object in its pack's manifest. `key` is the first 63 bits of an id (`catalog.key`).
# Keys are spread evenly, so that every new row of a large table touches a page of its own. They are inserted into a
# small table, and moved on by the tens of thousands; a row of the small table takes precedence over one in the large
# table.
# `version_packs` holds the packs that a version's manifest and blobs are in.
# `reservations` assigns the numbers of versions, which are never reused (AUTOINCREMENT remembers the largest).
FORMAT_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE packs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY,
    uid BLOB NOT NULL UNIQUE,
    run INTEGER NOT NULL REFERENCES runs,
    step INTEGER,
    parent INTEGER REFERENCES versions,
    created TEXT NOT NULL,
    pack INTEGER NOT NULL REFERENCES packs,
    manifest_offset INTEGER NOT NULL,
    manifest_length INTEGER NOT NULL,
    original_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    elements INTEGER NOT NULL,
    tensors INTEGER NOT NULL,
    files INTEGER NOT NULL,
    depth INTEGER NOT NULL,
    cost REAL NOT NULL,
    base INTEGER NOT NULL,
    fidelity TEXT NOT NULL,
    hot INTEGER NOT NULL,
    dropped TEXT NOT NULL,
    metrics TEXT NOT NULL,
    source TEXT
);
CREATE UNIQUE INDEX versions_run_step ON versions (run, step);
CREATE INDEX versions_parent ON versions (parent);
CREATE INDEX versions_pack ON versions (pack);
CREATE TABLE version_packs (
    version INTEGER NOT NULL REFERENCES versions ON DELETE CASCADE,
    pack INTEGER NOT NULL REFERENCES packs,
    PRIMARY KEY (version, pack)
) WITHOUT ROWID;
CREATE INDEX version_packs_pack ON version_packs (pack);
CREATE TABLE tags (name TEXT PRIMARY KEY, version INTEGER NOT NULL REFERENCES versions) WITHOUT ROWID;
CREATE TABLE settled_objects (key INTEGER PRIMARY KEY, pack INTEGER NOT NULL, slot INTEGER NOT NULL);
CREATE TABLE recent_objects (key INTEGER PRIMARY KEY, pack INTEGER NOT NULL, slot INTEGER NOT NULL);
CREATE VIEW objects AS
    SELECT key, pack, slot FROM recent_objects UNION ALL
    SELECT key, pack, slot FROM settled_objects WHERE key NOT IN (SELECT key FROM recent_objects);
CREATE TABLE reservations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    created TEXT NOT NULL
);
CREATE TABLE leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    purpose TEXT NOT NULL,
    pid INTEGER NOT NULL,
    host TEXT NOT NULL,
    created TEXT NOT NULL,
    expires TEXT NOT NULL
)
"""

#: Statements of the catalog by the name of their object, without the tables of `sqlite_utils` and SQLite.
STATEMENTS = {match[1]: match[0] for match in re.finditer(r"CREATE (?:UNIQUE )?[A-Z]+ (\w+)[^;]*(?<!\s)", FORMAT_1)}
_OTHERS = re.compile(r"sqlite_\w+|(?:idx_)?_sqlite_migrations\w*")


def odd_one(found: Iterable[tuple[object, object, object]]) -> object:
    """Return the name of an unexpected object in a catalog, given type, name and SQL of all its objects.

    A trigger, or a view in place of a table, could make SQLite run the statements of an attacker.
    """
    left = dict(STATEMENTS)
    for kind, name, statement in found:
        if not isinstance(name, str):
            return name
        other = _OTHERS.fullmatch(name) and kind in ("table", "index")
        if left.pop(name, None) != statement and not other:
            return name
    return next(iter(left), None)
