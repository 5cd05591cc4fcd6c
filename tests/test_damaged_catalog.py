"""Destructive verbs on a damaged catalog: nothing is lost that `recover` cannot bring back, and nothing is wrong.

A row of the catalog is changed, lost or repeated, or a bit is flipped; then every verb that deletes or supersedes runs,
then `recover`. `CKSTORE_FLIPS=1` tries every edit, and every flip that changes the rows that SQLite reads.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from tests.catalog_edits import edit
from tests.checkpoints import scratch

pytestmark = pytest.mark.local

ALL = bool(os.environ.get("CKSTORE_FLIPS"))
TABLES = (
    "seals",
    "meta",
    "policies",
    "runs",
    "packs",
    "versions",
    "origins",
    "metrics",
    "version_packs",
    "pack_bases",
    "tags",
    "recent_objects",
)

Facts = dict[str, Any]


def state(seed: int) -> dict[str, Any]:
    """Return a state whose frozen layer is that of all others."""
    rng = np.random.default_rng(seed)
    return {"model": {"frozen": np.arange(300, dtype=np.float32), "w": rng.standard_normal(200).astype(np.float32)}}


def make(path: Path) -> None:
    """Make a store with hot, encoded, coarse, thinned, forgotten, replaced, tagged and shared versions."""
    with ckstore.init(path) as store:
        for step in range(4):
            metrics = {"loss": 1.0 / (1 + step)}
            store.ingest(state(step), run="a", step=step, metrics=metrics, config={"width": 200}, hot=0)
        store.ingest(state(9), run="a", step=2, replace=True, hot=0)
        store.thin(["a@1"])
        store.tag("a@0", "first")
        store.forget(["a@3"])
        store.ingest(state(5), run="b", step=0, policy="coarse", hot=0)
        for step in range(3):
            store.ingest(state(20 + step), run="c", step=step, hot=9)
            store.ingest(state(20 + step), run="d", step=step, config={"width": 200 + step // 2}, hot=9)
        store.forget(["c@0"])
        store.set_policy(Policy(retention=Retention(keep_last=9)), "b")


VERBS: dict[str, Callable[[ckstore.Store], Any]] = {
    "gc": lambda store: store.gc(grace=0.0),
    "encode": lambda store: store.encode(run="c"),
    "thin": lambda store: store.thin(["a@2"]),
    "rebase": lambda store: store.rebase(),
    "forget": lambda store: store.forget(["d@0"]),
    "retain": lambda store: store.retain(),
    "ingest": lambda store: store.ingest(state(31), run="c", step=9, hot=0),
    "gc again": lambda store: store.gc(grace=0.0),
}
#: Versions that the verbs forget and thin by themselves.
FORGOTTEN, THINNED = "d@0", "a@2"


def facts(path: Path) -> Facts:
    """Return the facts and values of each version, and the tags."""
    with ckstore.open(path, "r") as store:
        found: Facts = {"tags": store._catalog.tags()}
        for row in store._catalog.versions():
            values = b"".join(np.asarray(leaf).tobytes() for leaf in store[row.number].state_dict()["model"].values())
            found[f"{row.run}@{row.step}"] = row.number, row.uid, dict(row.metrics), row.fidelity, values
        return found


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Path, Facts]]:
    with scratch() as directory:
        make(directory / "store")
        yield directory / "store", facts(directory / "store")


def wrongs(path: Path, before: Facts, damage: Callable[[Path], Any], verbs: list[str]) -> list[str]:
    """Damage a copy of a store, run verbs, recover; return a sentence for each fact that is lost or wrong then."""
    with scratch() as directory:
        copy = directory / "store"
        shutil.copytree(path, copy)
        damage(copy / "catalog.sqlite")
        for verb in verbs:
            try:
                with ckstore.open(copy) as store:
                    VERBS[verb](store)
            except CkstoreError:
                pass
        recover(copy)
        try:
            with ckstore.open(copy) as store:
                store.gc(grace=0.0)
                problems = store.verify().problems
        except CkstoreError as error:
            problems = [str(error)]
        try:
            after = facts(copy)
        except CkstoreError as error:
            return [*problems, str(error)]
        for name, fact in before.items():
            if name == FORGOTTEN and "forget" in verbs and name not in after:
                continue
            if name == THINNED and "thin" in verbs and after.get(name, (0,) * 5)[3] == "coarse":
                continue
            if after.get(name) != fact:
                problems.append(f"{name}: {_short(fact)} is {_short(after.get(name))}")
        return problems


def _short(fact: Any) -> str:
    return str(fact)[:150]


def edits(path: Path) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield statements that delete, repeat or edit each row of each table."""
    with closing(sqlite3.connect(path / "catalog.sqlite")) as database:
        for table in TABLES:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            keys = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[5]]
            for row in database.execute(f"SELECT * FROM {table}").fetchall():
                named = dict(zip(columns, row, strict=True))
                where = " AND ".join(f"{key} = ?" for key in keys)
                chosen = tuple(named[key] for key in keys)
                yield f"DELETE FROM {table} WHERE {where}", chosen
                for column in columns:
                    others = [other for (other,) in database.execute(
                        f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT ?", [named[column]]
                    )]  # fmt: skip
                    value = named[column]
                    tried = others[:2]
                    if isinstance(value, int):
                        tried += [value + 1, value ^ 1, 0]
                    elif isinstance(value, str):
                        tried.append(value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x")
                    for new in dict.fromkeys(tried):
                        if new != value:
                            yield f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (new, *chosen)
                if column == keys[0] and isinstance(value, int):  # The row twice, under another key.
                    copied = {name: name for name in columns if name not in (*keys, "step")}
                    copied |= {"uid": "randomblob(20)"} if "uid" in copied else {}
                    copied |= {"name": "'x' || name"} if "name" in copied else {}
                    yield (
                        f"INSERT OR IGNORE INTO {table} ({keys[0]}, {', '.join(copied)})"
                        f" SELECT 99, {', '.join(copied.values())} FROM {table} WHERE {where}",
                        chosen,
                    )


def apply(statement: str, parameters: tuple[Any, ...]) -> Callable[[Path], Any]:
    return lambda catalog: edit(catalog, statement, parameters)


@pytest.mark.long
def test_edited_rows(made: tuple[Path, Facts]) -> None:
    path, before = made
    assert wrongs(path, before, lambda catalog: None, list(VERBS)) == []
    found = list(edits(path))
    chosen = found if ALL else random.Random(3).sample(found, 40)
    wrong = [(statement, parameters, problems) for statement, parameters in chosen
             if (problems := wrongs(path, before, apply(statement, parameters), list(VERBS)))]  # fmt: skip
    assert not wrong, f"{len(wrong)} of {len(chosen)}: {wrong[:5]}"


@pytest.mark.long
@pytest.mark.parametrize("verb", VERBS)
def test_a_version_whose_row_is_lost(made: tuple[Path, Facts], verb: str) -> None:
    """In the middle of a run; and a hot one that no longer says so."""
    path, before = made
    for statement in ("DELETE FROM versions WHERE number = 2", "UPDATE versions SET hot = 0 WHERE hot"):
        assert wrongs(path, before, apply(statement, ()), [verb]) == []


def rows_of(data: bytes) -> Any:
    """Return all rows as SQLite reads them; None if it finds the file damaged while it reads."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(data)
            return {table: database.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}
    except (sqlite3.Error, UnicodeDecodeError):
        return None


@pytest.mark.long
def test_flipped_bits(made: tuple[Path, Facts]) -> None:
    path, before = made
    data = (path / "catalog.sqlite").read_bytes()
    said = rows_of(data)
    counted: Counter[str] = Counter()
    wrong = []
    bits = list(range(100 * 8, 8 * len(data)))
    if not ALL:
        bits = random.Random(5).sample(bits, 600)
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        found = rows_of(bytes(changed))
        if found == said or found is None:
            counted["the same rows" if found == said else "found by SQLite"] += 1
            continue
        counted["other rows"] += 1
        if problems := wrongs(path, before, partial(Path.write_bytes, data=bytes(changed)), list(VERBS)):
            wrong.append((bit, problems))
    print(dict(counted))
    assert counted["other rows"] > 10
    assert not wrong, f"{len(wrong)} of {counted['other rows']}: {wrong[:5]}"
