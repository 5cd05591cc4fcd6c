"""An empty store, and one that has three versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ckstore.storage.catalog import Catalog
from tests.storage.version_writer import write_version


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Directory of an empty store."""
    path = tmp_path / "store"
    Catalog.create(path).close()
    return path


@pytest.fixture
def catalog(store: Path) -> Iterator[Catalog]:
    """Catalog of the empty store, open for writing."""
    with Catalog.open(store, "a") as catalog:
        yield catalog


@pytest.fixture
def filled(catalog: Catalog, store: Path) -> Catalog:
    """The same with versions 1 (gpt@100), 2 (gpt@200, child of 1) and 3 (vision@5)."""
    write_version(catalog, store, "gpt", 100)
    write_version(catalog, store, "gpt", 200, parent=1)
    write_version(catalog, store, "vision", 5)
    return catalog


@pytest.fixture
def read_only() -> Callable[[Path], AbstractContextManager[None]]:
    """Make a directory read-only for a block: by its mode, or for root, whom modes do not stop, by a mount."""

    @contextmanager
    def freeze(path: Path) -> Iterator[None]:
        if os.geteuid() != 0:
            path.chmod(0o555)
            try:
                yield
            finally:
                path.chmod(0o755)
            return
        commands = [["mount", "--bind", path, path], ["mount", "-o", "remount,ro,bind", path]]
        if any(subprocess.run(command, capture_output=True).returncode for command in commands):
            subprocess.run(["umount", path], capture_output=True)
            pytest.skip("root, and no file system can be mounted here")
        try:
            yield
        finally:
            subprocess.run(["umount", path], check=True)

    return freeze
