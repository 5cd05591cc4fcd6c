"""Runs tests of behaviour on remote stores: each local path that is to be a store is one in a bucket instead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ckstore.repository import Repository
from ckstore.storage import root
from ckstore.storage.remote.bucket import ObstoreBucket
from ckstore.storage.remote.mirror import ROOT
from ckstore.storage.remote.mirror import VARIABLE as CACHE
from tests.object_store import ObjectStore

#: The tests run so where this environment variable is `bucket`.
VARIABLE = "CKSTORE_TEST_PLACE"


@contextmanager
def in_bucket(server: ObjectStore, cache: Path) -> Iterator[None]:
    """Let paths mean URLs, for all that makes, finds, opens, copies and removes a store in this process.

    Parameters
    ----------
    server
        Where the stores are.
    cache
        Directory for mirrors.
    """
    place, find_store, open_repository = root.place, root.find_store, Repository.__init__
    copytree, rmtree = shutil.copytree, shutil.rmtree

    def bucket(path: Any) -> ObstoreBucket:
        return ObstoreBucket(f"{server.url}{os.path.realpath(path)}", {})

    def moved(given: Any) -> str:
        found = place(given)
        return found if isinstance(found, str) else bucket(found).url

    def opened(self: Repository, place: Any, *arguments: Any, **named: Any) -> None:
        open_repository(self, moved(place), *arguments, **named)

    def is_store(path: Path) -> bool:
        place(path)
        return any(item.name == ROOT for item in bucket(path).list(""))

    def copied(source: Any, target: Any, *arguments: Any, **named: Any) -> Any:
        for item in bucket(source).list(""):
            bucket(target).put(item.name, bucket(source).read(item.name))
        return copytree(source, target, *arguments, **named) if os.path.exists(source) else target

    def removed(path: Any, *arguments: Any, **named: Any) -> None:
        there = [item.name for item in bucket(path).list("")]
        bucket(path).delete(there)
        if os.path.exists(path) or not there:
            rmtree(path, *arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**server.anywhere, CACHE: str(cache)}))
        for owner, name, replacement in (
            (root, "place", moved),
            (root, "find_store", lambda *arguments: moved(find_store(*arguments))),
            (root, "is_store", is_store),
            (Repository, "__init__", opened),
            (shutil, "copytree", copied),
            (shutil, "rmtree", removed),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
