"""A store for each test of an integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ckstore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    with ckstore.init(tmp_path / "store") as made:
        yield made
