"""Making, finding and sweeping stores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckstore.errors import CkstoreError, ConflictError, NoStoreError
from ckstore.storage import durable, root
from ckstore.storage.catalog import Catalog

pytestmark = pytest.mark.local


def test_the_nearest_store_upwards_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv(root.VARIABLE, raising=False)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    Catalog.create(tmp_path / root.DEFAULT_NAME).close()
    assert root.find_store(deep) == tmp_path / root.DEFAULT_NAME
    Catalog.create(tmp_path / "a" / root.DEFAULT_NAME).close()
    monkeypatch.chdir(deep)
    assert root.find_store() == tmp_path / "a" / root.DEFAULT_NAME
    # A store is found from within, whatever its name.
    Catalog.create(tmp_path / "other").close()
    for place in (tmp_path / root.DEFAULT_NAME, tmp_path / "other"):
        monkeypatch.chdir(place / root.PACKS)
        assert root.find_store() == root.find_store(place) == place


def test_the_variable_has_priority(tmp_path, store, monkeypatch):
    monkeypatch.setenv(root.VARIABLE, str(store))
    assert root.find_store(tmp_path) == store
    monkeypatch.setenv(root.VARIABLE, str(tmp_path))
    with pytest.raises(NoStoreError, match="ckstore init"):
        root.find_store(tmp_path)


def test_no_store(tmp_path, monkeypatch):
    monkeypatch.delenv(root.VARIABLE, raising=False)
    with pytest.raises(NoStoreError, match="ckstore init"):
        root.find_store(tmp_path)


def test_a_store_that_lost_its_catalog_is_still_one(store):
    (store / root.CATALOG).unlink()
    assert root.is_store(store)
    assert not root.is_store(store.parent)


def test_stores_are_made_only_where_nothing_is(tmp_path, store):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for path in (tmp_path / "file", tmp_path / "full", store):
        with pytest.raises(ConflictError):
            Catalog.create(path)
    assert os.listdir(tmp_path / "full") == ["x"]
    Catalog.create(tmp_path / "several" / "levels").close()
    assert root.is_store(tmp_path / "several" / "levels")


@pytest.mark.parametrize("directory", [root.PACKS, root.LOG])
def test_no_store_is_made_over_one_that_lost_its_catalog(store, directory):
    (store / root.CATALOG).unlink()
    (store / directory / "something").write_text("x")
    with pytest.raises(ConflictError, match="ckstore recover"):
        Catalog.create(store)
    (store / directory / "something").unlink()
    Catalog.create(store).close()


def test_only_old_files_of_dead_processes_are_swept(store):
    dead = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    names = {"old": f".tmp-{dead}-00ff", "young": f".tmp-{dead}-11ff", "mine": f".tmp-{os.getpid()}-22ff", "other": "x"}
    for directory in (store, store / root.PACKS, store / root.LOG):
        for kind, name in names.items():
            (directory / name).write_bytes(b"")
            if kind != "young":
                os.utime(directory / name, (time.time() - 7200,) * 2)
    (store / f".tmp-{dead}-33ff").mkdir()
    (store / f".tmp-{dead}-33ff" / root.CATALOG).write_bytes(b"")
    os.utime(store / f".tmp-{dead}-33ff", (time.time() - 7200,) * 2)
    found = root.find_temporaries(store, grace=3600)
    assert sorted(path.name for path in found) == sorted([names["old"]] * 3 + [f".tmp-{dead}-33ff"])
    assert {path.name for path in durable.sweep_temporaries(store)} == {names["old"], f".tmp-{dead}-33ff"}
    assert {names["young"], names["mine"], names["other"]} <= set(os.listdir(store / root.PACKS))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    target = tmp_path / "file"
    durable.write_file(target, b"before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CkstoreError, match="at least 5 more bytes are needed"):
        durable.write_file(target, b"after")
    assert os.listdir(tmp_path) == ["file"]
    assert target.read_bytes() == b"before"


def test_a_shared_directory_on_a_file_system_with_permissions_of_its_own(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o2775)
    durable.write_file(tmp_path / "before", b"shared")
    assert (tmp_path / "before").stat().st_mode & 0o060 == 0o060
    monkeypatch.setattr(Path, "chmod", refuse)
    durable.write_file(tmp_path / "file", b"written")
    assert (tmp_path / "file").read_bytes() == b"written"


def test_times_sort_as_text():
    first = durable.timestamp()
    assert len(first) == len("2026-01-01T00:00:00.000000Z")
    assert first <= durable.timestamp()
