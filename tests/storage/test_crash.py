"""A process that is killed at any step of a commit leaves the store readable, the change in full or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckstore.storage import log, root
from ckstore.storage.catalog import Catalog
from ckstore.storage.pack_reader import PackReader
from ckstore.storage.scan_packs import ScannedPack, scan_packs
from tests.storage.version_writer import write_version

pytestmark = pytest.mark.local

REPOSITORY = Path(__file__).resolve().parents[2]
KILLED = -9


def kill(action: str, store: Path, step: str) -> None:
    """Run `version_writer` until it kills itself at a step: that it got there is part of the test."""
    command = [sys.executable, "-m", "tests.storage.version_writer", action, str(store), step]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == KILLED, done.stderr


@pytest.mark.parametrize(
    ("step", "committed"),
    [
        ("pack-written", False),
        ("pack-synced", False),
        ("pack-renamed", False),
        ("before-commit", False),
        ("after-commit", True),
    ],
)
def test_an_ingest_that_is_killed(store, step, committed):
    with Catalog.open(store, "a") as catalog:
        kept = write_version(catalog, store, step=0)
    kill("version", store, step)
    with Catalog.open(store) as catalog:
        assert [version.step for version in catalog.versions()] == [0, 1][: 1 + committed]
        assert catalog.totals().objects == 3 * (1 + committed)
        known = {pack.name for pack in catalog.packs()}
        reader = PackReader(store)
        for version in catalog.versions():
            reader.pread(version.pack, version.manifest_offset, version.manifest_length)
    lying = {info.name for info in reader.list_packs()}
    assert known <= lying
    assert all(isinstance(pack, ScannedPack) for pack in scan_packs(store))
    # Life goes on: leftovers are swept, the step can be ingested, and no number is used twice.
    root.sweep_temporaries(store, grace=-1)
    assert not [name for name in os.listdir(store / root.PACKS) if name.startswith(".tmp-")]
    with Catalog.open(store, "a") as catalog:
        again = write_version(catalog, store, step=2)
        assert again.number > kept.number + committed
        assert [claim.number for claim in catalog.reservations()] == []


@pytest.mark.parametrize(
    ("step", "logged", "committed"),
    [
        ("file-written", False, False),
        ("log-written", True, False),
        ("before-commit", True, False),
        ("after-commit", True, True),
    ],
)
def test_a_logged_change_that_is_killed(store, step, logged, committed):
    """A change is never visible without its record."""
    with Catalog.open(store, "a") as catalog:
        write_version(catalog, store)
    kill("tag", store, step)
    assert [record["change"] for record in log.read_all(store)] == ["tag"] * logged
    with Catalog.open(store, "a") as catalog:
        assert catalog.tags() == ({"best": 1} if committed else {})
        catalog.set_tag("best", 1)
    root.sweep_temporaries(store, grace=-1)
    assert len(os.listdir(store / root.LOG)) == logged


def test_a_recovery_that_is_killed(store):
    with Catalog.open(store, "a") as catalog:
        write_version(catalog, store)
    kill("recover", store, "catalog-built")
    with Catalog.open(store) as catalog:
        assert len(catalog.versions()) == 1
    root.sweep_temporaries(store, grace=-1)
    assert sorted(os.listdir(store)) == [root.CATALOG, root.LOG, root.PACKS]
