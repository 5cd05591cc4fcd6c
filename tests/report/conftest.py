"""Fixtures of reports: a cache of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of statistics and mirrors of this test."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CKSTORE_CACHE", str(place))
    return place
