"""The catalog's tables, as SQL; released tables are changed only by migrations.

Every row that states a fact has a checksum of its columns (`seal`), and the number of rows and the sum of their
checksums are in `seals`, those of a run's versions in `runs`: a changed, lost or repeated row is found when it is
read. Triggers of each connection that writes keep them; they refuse to change a damaged row. A version's checksum
includes the names of its run and pack, and the text of its origin. Places of objects are checked against the packs'
manifests; claims state nothing about versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckstore.runtime.checksum import crc32
from ckstore.storage.names import LONGEST

#: Bytes of an origin at most; a larger one stays in the row of its version.
LARGEST_ORIGIN = 1 << 17


def bounded(column: str, longest: int = LONGEST) -> str:
    """Return the SQL of a text, in which SQLite refuses a longer one as too big: a query may repeat it in each row.

    `longest` counts bytes; `length` alone would count the characters up to a NUL. SQLite before 3.32 computes functions
    of constants first, also those of a branch that no row takes, so the size depends on the column.
    """
    length = f"length(CAST({column} AS BLOB))"
    return f"CASE WHEN {length} > {longest} THEN zeroblob({length} << 31) ELSE {column} END"


#: The name of a pack in a row of a query.
PACK_NAME = bounded("p.name")

#: Columns of a version, with the names of its run and pack and the text of its origin, for a row named by `{0}`.
_VERSION = (
    "{0}number", "lower(hex({0}uid))", "(SELECT name FROM runs WHERE id = {0}run)", "{0}step", "{0}parent",
    "{0}created", "(SELECT name FROM packs WHERE id = {0}pack)", "{0}manifest_offset", "{0}manifest_length",
    "{0}original_bytes", "{0}stored_bytes", "{0}elements", "{0}tensors", "{0}files", "{0}depth", "{0}cost", "{0}base",
    "{0}fidelity", "{0}hot", "{0}superseded", "{0}dropped", "{0}metrics",
    "(SELECT text FROM origins WHERE id = {0}origin)", "{0}source",
)  # fmt: skip

_RUN = "id", "name", "versions", "total", "last", "highest", "original_bytes", "stored_bytes"

#: The columns under each table's checksum, in the order of the tables; the first one is the key.
SEALED: Mapping[str, tuple[str, ...]] = {
    "seals": ("{0}name", "{0}rows", "{0}total", "{0}last", "{0}bytes"),
    "meta": ("{0}key", "{0}value"),
    "policies": ("{0}run", "{0}policy"),
    "runs": tuple(f"{{0}}{name}" for name in _RUN),
    "packs": ("{0}id", "{0}name", "{0}bytes"),
    "versions": _VERSION,
    "tags": ("{0}name", "{0}version"),
}

# `last` is the largest number of a version, `highest` the version of a run with the highest step. Superseded versions
# count only if there are no others; those others have different steps. `slot` is the position of the object in its
# pack's manifest. `key` is the first 63 bits of an id (`catalog.key`). Keys are spread evenly, so that every new row of
# a large table touches a page of its own. They are inserted into a small table, and moved on by the tens of thousands;
# a row of the small table takes precedence over one in the large table.
# `segment` is the digest of the segment that a pack is in, and `place` the offset of its bytes there.
# `version_packs` holds the packs that a version's blobs are in, besides its own (`blobs`), and those of its objects,
# with the text of at least their slots (`ckstore.storage.slots`). `pack_bases` holds at least the packs with the bases
# of a pack's objects. `packs.uses` is the sum of the checksums (`use`) of all rows that name the pack. `packs.held` are
# the bytes of its objects that only others' chains need, as of the last `gc`; NULL if the pack was added or lost an
# object or a row that names it since.
# `origins` has those of the metrics that versions share: how they were made, and their configuration; of forgotten
# versions until a `gc` after many of them (`Catalog.note_collected`). Their checksums tell of a lost row: a foreign key
# without an index would make SQLite read all versions for each row that `gc` frees.
# `metrics` holds the numbers among the metrics of versions that are not superseded: those with the extreme values are
# found without the others.
# `likeness` holds bands of values, from which versions with similar values are guessed; of forgotten versions as
# `origins`.
# `reservations` assigns the numbers of versions, which are never reused (AUTOINCREMENT remembers the largest).
_TABLES = """
CREATE TABLE seals (
    name TEXT PRIMARY KEY,
    rows INT NOT NULL DEFAULT 0,
    total INT NOT NULL DEFAULT 0,
    last INT NOT NULL DEFAULT 0,
    bytes INT NOT NULL DEFAULT 0,
    seal INT NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INT NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX meta_pack ON meta (value) WHERE value LIKE '%.zip';
CREATE TABLE policies (run TEXT PRIMARY KEY, policy TEXT NOT NULL, seal INT NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    versions INT NOT NULL DEFAULT 0,
    total INT NOT NULL DEFAULT 0,
    last INT NOT NULL DEFAULT 0,
    highest INT NOT NULL DEFAULT 0,
    original_bytes INT NOT NULL DEFAULT 0,
    stored_bytes INT NOT NULL DEFAULT 0,
    seal INT NOT NULL DEFAULT 0
);
CREATE TABLE packs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    bytes INT NOT NULL,
    uses INT NOT NULL DEFAULT 0,
    held INT,
    segment BLOB,
    place INT,
    seal INT NOT NULL DEFAULT 0
);
CREATE INDEX packs_small ON packs (id) WHERE segment IS NULL AND bytes < 262144 AND name NOT LIKE '%.raw.zip';
CREATE INDEX packs_raw ON packs (uses) WHERE name LIKE '%.raw.zip';
CREATE TABLE origins (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY,
    uid BLOB NOT NULL UNIQUE,
    run INT NOT NULL REFERENCES runs,
    step INT,
    parent INT REFERENCES versions,
    created TEXT NOT NULL,
    pack INT NOT NULL REFERENCES packs,
    manifest_offset INT NOT NULL,
    manifest_length INT NOT NULL,
    original_bytes INT NOT NULL,
    stored_bytes INT NOT NULL,
    elements INT NOT NULL,
    tensors INT NOT NULL,
    files INT NOT NULL,
    depth INT NOT NULL,
    cost REAL NOT NULL,
    base INT NOT NULL,
    fidelity TEXT NOT NULL,
    hot INT NOT NULL,
    superseded INT NOT NULL,
    dropped TEXT NOT NULL,
    metrics TEXT NOT NULL,
    origin INT,
    source TEXT,
    seal INT NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX versions_run_step ON versions (run, step) WHERE superseded = 0;
CREATE INDEX versions_run ON versions (run, superseded, number);
CREATE INDEX versions_parent ON versions (parent);
CREATE INDEX versions_pack ON versions (pack);
CREATE INDEX versions_hot ON versions (number) WHERE hot;
CREATE TABLE version_packs (
    version INT NOT NULL REFERENCES versions ON DELETE CASCADE,
    pack INT NOT NULL REFERENCES packs,
    blobs INT NOT NULL,
    objects TEXT NOT NULL,
    PRIMARY KEY (version, pack)
) WITHOUT ROWID;
CREATE INDEX version_packs_pack ON version_packs (pack);
CREATE TABLE pack_bases (base INT NOT NULL, pack INT NOT NULL, PRIMARY KEY (base, pack)) WITHOUT ROWID;
CREATE TABLE tags (
    name TEXT PRIMARY KEY, version INT NOT NULL REFERENCES versions, seal INT NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX tags_version ON tags (version);
CREATE TABLE likeness (band INT, version INT, PRIMARY KEY (band, version)) WITHOUT ROWID;
CREATE TABLE settled_objects (key INTEGER PRIMARY KEY, pack INT NOT NULL, slot INT NOT NULL);
CREATE TABLE recent_objects (key INTEGER PRIMARY KEY, pack INT NOT NULL, slot INT NOT NULL);
CREATE TABLE metrics (
    run INT, name TEXT, value REAL, version INT, PRIMARY KEY (run, name, value, version)
) WITHOUT ROWID;
CREATE VIEW objects AS
    SELECT key, pack, slot FROM recent_objects UNION ALL
    SELECT key, pack, slot FROM settled_objects WHERE key NOT IN (SELECT key FROM recent_objects)
"""

#: The tables of the claims, in a file of their own.
CLAIMS = (
    "CREATE TABLE IF NOT EXISTS claims.reservations (number INTEGER PRIMARY KEY, pid INT NOT NULL,"
    " host TEXT NOT NULL, created TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS claims.leases (id INTEGER PRIMARY KEY, purpose TEXT NOT NULL, pid INT NOT NULL,"
    " host TEXT NOT NULL, created TEXT NOT NULL, expires TEXT NOT NULL)",
)

_LAST = (
    "coalesce((SELECT number FROM versions WHERE NOT superseded ORDER BY number DESC LIMIT 1),"
    " (SELECT MAX(number) FROM versions), 0)"
)


def _of_run(which: str) -> str:
    """Return the first version of a row's run in an order; superseded versions come after all others."""
    found = f"(SELECT number FROM versions WHERE run = {{0}}run AND superseded = {{1}} ORDER BY {which} LIMIT 1)"
    return f"coalesce({found.replace('{1}', '0')}, {found.replace('{1}', '1')}, 0)"


def _bytes_of_run(sign: str, row: str) -> str:
    return ", ".join(f"{column} = {column} {sign} {row}.{column}" for column in ("original_bytes", "stored_bytes"))


_LAST_OF_RUN = _of_run("number DESC")
_HIGHEST_OF_RUN = _of_run("step DESC, number DESC")
_ENDS_OF_RUN = f"last = {_LAST_OF_RUN}, highest = {_HIGHEST_OF_RUN}"
_HOT = "UPDATE seals SET rows = rows {0} 1, total = total {0} {1} WHERE name = 'hot' AND {2}hot"

#: Effects of an added, a removed and a resealed row on the sums, by table. Those of the hot versions are apart, since
#: their set changes with a column.
_COUNTED = {
    table: (
        f"UPDATE seals SET rows = rows + 1 WHERE name = '{table}'",
        f"UPDATE seals SET rows = rows - 1, total = total - OLD.seal WHERE name = '{table}'",
        f"UPDATE seals SET total = total + NEW.seal - OLD.seal WHERE name = '{table}'",
    )
    for table in ("meta", "policies", "runs", "tags")
}
_COUNTED["packs"] = (
    "UPDATE seals SET rows = rows + 1, bytes = bytes + NEW.bytes WHERE name = 'packs'",
    "UPDATE seals SET rows = rows - 1, total = total - OLD.seal, bytes = bytes - OLD.bytes WHERE name = 'packs'",
    "UPDATE seals SET total = total + NEW.seal - OLD.seal WHERE name = 'packs'",
)
_COUNTED["versions"] = (
    f"UPDATE runs SET versions = versions + 1, {_bytes_of_run('+', 'NEW')}, {_ENDS_OF_RUN.format('NEW.')}"
    " WHERE id = NEW.run;"
    f" UPDATE seals SET rows = rows + 1, last = {_LAST}, bytes = bytes + NEW.stored_bytes WHERE name = 'versions'; "
    + _HOT.format("+", "(SELECT seal FROM versions WHERE number = NEW.number)", "NEW."),
    f"UPDATE runs SET versions = versions - 1, total = total - OLD.seal, {_bytes_of_run('-', 'OLD')},"
    f" {_ENDS_OF_RUN.format('OLD.')} WHERE id = OLD.run;"
    f" UPDATE seals SET rows = rows - 1, total = total - OLD.seal, last = {_LAST}, bytes = bytes - OLD.stored_bytes"
    " WHERE name = 'versions'; " + _HOT.format("-", "OLD.seal", "OLD."),
    "UPDATE runs SET total = total + NEW.seal - OLD.seal WHERE id = NEW.run;"
    " UPDATE seals SET total = total + NEW.seal - OLD.seal WHERE name = 'versions'",
)


def _triggers(table: str, columns: tuple[str, ...]) -> Iterable[str]:
    """Yield the triggers that keep the checksums of a table, and the sums of all its rows.

    An update that leaves the checksum as it is changes other columns.
    """
    key = columns[0].format("")
    updated = f"UPDATE OF {', '.join(columns).format('')}" if table == "packs" else "UPDATE"  # Others have no checksum.
    reseal = f"UPDATE {table} SET seal = seal({', '.join(columns).format('')}) WHERE {key} = NEW.{key}"
    counted = _COUNTED.get(table)
    added, changed = [reseal], [reseal]
    if counted:
        added.append(counted[0])
    if table == "versions":
        changed.insert(0, _HOT.format("-", "OLD.seal", "OLD."))
        changed += [
            _HOT.format("+", "(SELECT seal FROM versions WHERE number = NEW.number)", "NEW."),
            f"UPDATE runs SET stored_bytes = stored_bytes + NEW.stored_bytes - OLD.stored_bytes,"
            f" {_ENDS_OF_RUN.format('NEW.')} WHERE id = NEW.run",
            f"UPDATE seals SET last = {_LAST} WHERE name = 'versions' AND NEW.superseded <> OLD.superseded",
            "UPDATE seals SET bytes = bytes + NEW.stored_bytes - OLD.stored_bytes WHERE name = 'versions'"
            " AND NEW.stored_bytes <> OLD.stored_bytes",
        ]
    if table == "packs":
        changed.append("UPDATE seals SET bytes = bytes + NEW.bytes - OLD.bytes WHERE name = 'packs'")
    yield (
        f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_guard BEFORE {updated} ON {table} WHEN NEW.seal = OLD.seal"
        f" AND OLD.seal <> seal({', '.join(columns).format('OLD.')})"
        f" BEGIN SELECT RAISE(ABORT, 'a row of {table} does not match its checksum'); END"
    )
    yield f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_added AFTER INSERT ON {table} BEGIN {'; '.join(added)}; END"
    yield (
        f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_changed AFTER {updated} ON {table} WHEN NEW.seal = OLD.seal"
        f" BEGIN {'; '.join(changed)}; END"
    )
    if counted:
        yield f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_removed AFTER DELETE ON {table} BEGIN {counted[1]}; END"
        yield (
            f"CREATE TEMP TRIGGER IF NOT EXISTS {table}_resealed AFTER UPDATE OF seal ON {table}"
            f" BEGIN {counted[2]}; END"
        )


#: The columns under the checksum of a row that names a pack, and the column with the pack's id, by table.
USES: Mapping[str, tuple[str, str]] = {
    "versions": ("{0}number", "pack"),
    "version_packs": ("{0}version, {0}blobs, {0}objects", "pack"),
    "pack_bases": ("-{0}pack", "base"),
}


#: Bits of a sum of such checksums; these take four bytes in a row.
USES_BITS = (1 << 31) - 1
#: The id of the pack that each such row names, and the row's checksum.
USED = " UNION ALL ".join(
    f"SELECT {pack} AS id, seal({columns.format('')}) AS seal FROM {table}" for table, (columns, pack) in USES.items()
)


def _use_triggers(table: str, columns: str, pack: str) -> Iterable[str]:
    """Yield the triggers that keep the sums of the rows that name a pack, and note the packs that may have garbage."""
    more, less = f"uses + seal({columns.format('NEW.')})", f"uses - seal({columns.format('OLD.')})"
    added = f"UPDATE packs SET uses = ({more}) & {USES_BITS} WHERE id = NEW.{pack}"
    removed = f"UPDATE packs SET uses = ({less}) & {USES_BITS}, held = NULL WHERE id = OLD.{pack}"
    create = "CREATE TEMP TRIGGER IF NOT EXISTS"
    yield f"{create} {table}_use AFTER INSERT ON {table} BEGIN {added}; END"
    yield f"{create} {table}_unused AFTER DELETE ON {table} BEGIN {removed}; END"
    if table == "versions":
        yield f"{create} {table}_moved AFTER UPDATE OF pack ON {table} BEGIN {removed}; {added}; END"
    if table == "version_packs":
        widened = f"UPDATE packs SET uses = ({more.replace('uses', less)}) & {USES_BITS} WHERE id = NEW.pack"
        lost = "UPDATE packs SET held = NULL WHERE id = OLD.pack AND NEW.blobs < OLD.blobs"
        yield f"{create} {table}_widened AFTER UPDATE ON {table} BEGIN {widened}; {lost}; END"


#: The statements that create the tables of format 1, in order. SQLite keeps their text, without the blanks here.
FORMAT_1 = tuple(" ".join(statement.split()) for statement in _TABLES.split(";"))
#: The triggers of a connection that writes, by table; the file does not hold them.
TRIGGERS = {
    table: (
        *(_triggers(table, SEALED[table]) if table in SEALED else ()),
        *(_use_triggers(table, *USES[table]) if table in USES else ()),
    )
    for table in dict.fromkeys((*SEALED, *USES))
}
#: The sets of rows that have a sum in `seals`.
SETS = (*_COUNTED, "hot")

#: Statements of the catalog by the name of their object, without SQLite's own.
STATEMENTS = {
    match[1]: statement
    for statement in FORMAT_1
    if (match := re.match(r"CREATE (?:UNIQUE )?[A-Z]+ (\w+)", statement)) is not None
}
_OTHERS = re.compile(r"sqlite_\w+")
#: A table or an index without expressions, or constraints of other tables.
_PLAIN = re.compile(
    r"CREATE (TABLE|INDEX) \w+ (ON \w+ )?\((?!.*\bREFERENCES\b)[\w ,]+\)( WITHOUT ROWID)?", re.IGNORECASE
)


def seal(*values: object) -> int:
    """Return the checksum of a row: the CRC-32 of its values as a tuple in Python's ASCII notation."""
    return crc32(ascii(values).encode())


def are_claims(found: Iterable[tuple[object, object, object]]) -> bool:
    """Return whether a file has the tables of the claims and nothing else, given type, name and SQL of its objects."""
    stored = {statement.replace("IF NOT EXISTS claims.", "") for statement in CLAIMS}
    return {statement for _, _, statement in found} == stored


def odd_one(found: Iterable[tuple[object, object, object]], *, takes_plain: bool = False) -> object:
    """Return the name of an unexpected object in a catalog, given type, name and SQL of all its objects.

    A trigger, or a view in place of a table, could make SQLite run the statements of an attacker. With `takes_plain`,
    it may have other tables and indexes without expressions: those of a later format, which only writers use.
    """
    left = dict(STATEMENTS)
    for kind, name, statement in found:
        if not isinstance(name, str):
            return name
        other = bool(_OTHERS.fullmatch(name)) and kind in ("table", "index")
        other = other or (takes_plain and name not in STATEMENTS and bool(_PLAIN.fullmatch(str(statement))))
        if left.pop(name, None) != statement and not other:
            return name
    return next(iter(left), None)
