"""`ckstore report`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest

from ckstore import Store
from tests.cli.conftest import Ckstore

pytestmark = pytest.mark.usefixtures("filled", "cache")


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep statistics out of the user's cache."""
    monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_markdown_is_printed(ckstore: Ckstore) -> None:
    assert ckstore("report").out.startswith("# ")


def test_json_is_printed_and_written(ckstore: Ckstore, tmp_path: Path) -> None:
    printed = ckstore("report", "--format", "json").json
    ckstore("report", "-o", tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert printed["runs"][0]["values"] == written["runs"][0]["values"]


def test_a_page_needs_a_file(ckstore: Ckstore, tmp_path: Path) -> None:
    assert "-o" in ckstore("report", "--format", "html", code=2).sentence
    result = ckstore("report", "-o", tmp_path / "r.html")
    assert "r.html: " in result.out
    assert (tmp_path / "r.html").read_text().lower().startswith("<!doctype html>")


def test_nothing_is_overwritten_without_force_nor_read_in_vain(ckstore: Ckstore, tmp_path: Path) -> None:
    (tmp_path / "r.md").write_text("mine")
    with mock.patch.object(Store, "report", side_effect=AssertionError("the work began")):
        refused = ckstore("report", "-o", tmp_path / "r.md", code=12).sentence
        assert refused == f"{tmp_path / 'r.md'} exists; choose another path, or overwrite it with --force."
        assert "create it first" in ckstore("report", "-o", tmp_path / "none/r.md", code=2).sentence
    assert (tmp_path / "r.md").read_text() == "mine"
    ckstore("report", "-o", tmp_path / "r.md", "--force")
    assert (tmp_path / "r.md").read_text().startswith("# ")


def test_an_unknown_format_is_refused_at_once(ckstore: Ckstore) -> None:
    assert "'txt' is no format of a report" in ckstore("report", "-o", "r.txt", code=2).sentence


def test_an_unknown_run_is_refused(ckstore: Ckstore) -> None:
    ckstore("report", "nobody", code=13)
