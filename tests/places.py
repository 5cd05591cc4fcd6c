"""Runs tests of behaviour on remote stores: each local path that is to be a store is one in a bucket instead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ckstore.repository import Repository
from ckstore.storage import root
from ckstore.storage.remote.bucket import ObstoreBucket
from ckstore.storage.remote.mirror import ROOT
from ckstore.storage.remote.mirror import VARIABLE as CACHE

if TYPE_CHECKING:
    from tests.object_store import ObjectStore

#: The tests run so where this environment variable is `bucket`.
VARIABLE = "CKSTORE_TEST_PLACE"
#: The URL of the bucket, for processes that tests start: `tests/inherited/sitecustomize.py` is run as they begin.
BUCKET = "CKSTORE_TEST_BUCKET"
_HERE = Path(__file__).resolve().parent


def _bucket(path: Any) -> ObstoreBucket:
    return ObstoreBucket(f"{os.environ[BUCKET]}{os.path.realpath(path)}", {})


def let_paths_be_urls() -> ExitStack:
    """Make paths mean URLs, for all that makes, finds and opens a store in this process, until the stack is closed."""
    place, find_store, open_repository = root.place, root.find_store, Repository.__init__

    def moved(given: Any) -> str:
        found = place(given)
        return found if isinstance(found, str) else _bucket(found).url

    def opened(self: Repository, place: Any, *arguments: Any, **named: Any) -> None:
        open_repository(self, moved(place), *arguments, **named)

    def is_store(path: Path) -> bool:
        place(path)
        return any(item.name == ROOT for item in _bucket(path).list(""))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(root, "place", moved))
    stack.enter_context(mock.patch.object(root, "find_store", lambda *given: moved(find_store(*given))))
    stack.enter_context(mock.patch.object(root, "is_store", is_store))
    stack.enter_context(mock.patch.object(Repository, "__init__", opened))
    return stack


@contextmanager
def in_bucket(server: ObjectStore, cache: Path) -> Iterator[None]:
    """Make paths mean URLs in this process and its children, also where a store is copied or removed.

    Parameters
    ----------
    server
        Where the stores are.
    cache
        Directory for mirrors.
    """
    copytree, rmtree = shutil.copytree, shutil.rmtree
    path = os.pathsep.join([str(_HERE / "inherited"), str(_HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**server.anywhere, CACHE: str(cache), BUCKET: server.url, "PYTHONPATH": path}

    def copied(source: Any, target: Any, *arguments: Any, **named: Any) -> Any:
        for item in _bucket(source).list(""):
            _bucket(target).put(item.name, _bucket(source).read(item.name))
        Path(target).parent.mkdir(parents=True, exist_ok=True)  # Tests write next to their copies.
        return copytree(source, target, *arguments, **named) if os.path.exists(source) else target

    def removed(path: Any, *arguments: Any, **named: Any) -> None:
        there = [item.name for item in _bucket(path).list("")]
        _bucket(path).delete(there)
        if os.path.exists(path) or not there:
            rmtree(path, *arguments, **named)

    with (
        mock.patch.dict(os.environ, environment),
        let_paths_be_urls(),
        mock.patch.object(shutil, "copytree", copied),
        mock.patch.object(shutil, "rmtree", removed),
    ):
        yield
