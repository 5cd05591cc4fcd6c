"""Power that is lost while SQLite writes: sectors of the catalog and its journal, in every order that syncs allow.

SQLite writes the former pages into a journal, syncs it, writes their number into its head, syncs that, writes pages,
syncs them, and removes the journal. Sectors between two syncs may or may not be on the disk.
"""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.recovery.recover import recover
from tests.checkpoints import scratch
from tests.test_points_of_death import SEED, opened, state, weights, without_uids

pytestmark = pytest.mark.local

SECTOR = 512
STAGES = ("journal", "number", "pages", "removal")
#: States of each stage.
TRIES = 6


def journal(before: bytes, after: bytes, nonce: int) -> bytes:
    """Return SQLite's rollback journal of a transaction that turns one catalog into the other."""
    [page] = struct.unpack_from(">H", before, 16)
    places = range(0, len(before), page)
    changed = [place for place in places if before[place : place + page] != after[place : place + page]]
    numbers = len(changed), nonce, len(before) // page, SECTOR, page
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", *numbers)
    records = [head.ljust(SECTOR, b"\0")]
    for place in changed:
        data = before[place : place + page]
        checksum = (nonce + sum(data[at] for at in range(page - 200, 0, -200))) % (1 << 32)
        records.append(struct.pack(">I", place // page + 1) + data + struct.pack(">I", checksum))
    return b"".join(records)


def torn(chosen: random.Random, first: bytes, second: bytes) -> bytes:
    """Return a mix of the sectors of two files."""
    length = max(len(first), len(second))
    both = [data.ljust(length, b"\0") for data in (first, second)]
    return b"".join(chosen.choice(both)[at : at + SECTOR] for at in range(0, length, SECTOR))


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Path, bytes, bytes, Any]]:
    """A store with the packs of an ingest, its catalog before and after it, and its previous content."""
    with scratch() as directory:
        path = directory / "store"
        with ckstore.init(path) as store:
            for step in range(3):
                store.ingest(weights(step), run="a", step=step, hot=0)
        held = without_uids(state(path))
        before = (path / "catalog.sqlite").read_bytes()
        opened(lambda store: store.ingest(weights(3), run="a", step=3, hot=1))(path)
        yield path, before, (path / "catalog.sqlite").read_bytes(), held


@pytest.mark.long
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_commit_that_is_torn(made: tuple[Path, bytes, bytes, Any], tmp_path: Path, stage: str, mode: Any) -> None:
    pristine, before, after, held = made
    path = Path(shutil.copytree(pristine, tmp_path / "store"))
    committed = without_uids(state(path))
    assert committed != held
    chosen = random.Random(f"{SEED} {stage}")
    for _ in range(TRIES):
        whole = journal(before, after, chosen.getrandbits(32))
        unnumbered = whole[:8] + bytes(4) + whole[12:]
        found, rollback = {
            "journal": (before, torn(chosen, unnumbered, chosen.randbytes(len(whole)))[: chosen.randrange(len(whole))]),
            "number": (before, chosen.choice([whole, unnumbered])),
            "pages": (torn(chosen, before, after), whole),
            "removal": (after, None),
        }[stage]
        (path / "catalog.sqlite").write_bytes(found)
        if rollback is not None:
            (path / "catalog.sqlite-journal").write_bytes(rollback)
        with ckstore.open(path, mode) as store:
            assert len(store._catalog.versions()) == len((committed if stage == "removal" else held)[0])
        assert without_uids(state(path)) == (committed if stage == "removal" else held)
        assert recover(path).problems == []
        assert without_uids(state(path)) == committed, "its packs are there"
