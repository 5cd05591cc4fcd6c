"""URLs of no object store, or where no store is meant, are refused, and make no directory named `s3:`."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckstore
from ckstore.cli.program import run
from ckstore.errors import UsageError
from ckstore.runtime.local_path import local_path

URLS = ["hdfs://bucket/store", "file:///tmp/s", "https://example.org/x.pt", "az:/one-slash", "S3://bucket/x"]
#: Where a store is meant, URLs of object stores are not refused.
STORE = [["init", "{}"], ["--store", "{}", "init"], ["--store", "{}", "log"], ["--store", "{}", "recover"]]
FILE = [["--store", "store", "ingest", "{}"], ["--store", "store", "checkout", "1", "-o", "{}"]]


@pytest.mark.local
@pytest.mark.parametrize(
    ("verb", "url"),
    [(verb, url) for verb in STORE + FILE for url in URLS]
    + [(verb, url) for verb in FILE for url in ("s3://bucket/x.pt", "gs://b/x.pt")],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_url_is_refused(
    verb: list[str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with ckstore.init("store") as store:
        store.ingest({"step": 1}, allow_empty=True)
    assert run([word.format(url) for word in verb]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert ("a store is a path, or a URL that begins with s3://" in said) == (verb in STORE)
    assert ("give the path of a mounted file system" in said) == (verb in FILE)
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("url", URLS)
def test_from_python(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for function in (ckstore.init, ckstore.open, lambda path: ckstore.open(path, create=True)):
        with pytest.raises(UsageError, match=r"is a URL .* a store is a path, or a URL that begins with"):
            function(url)
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_no_path() -> None:
    with pytest.raises(UsageError, match=r"begins with s3://, gs://, az:// or hf://; a URL is given as a string"):
        ckstore.open(Path("s3://models/team-a"))


@pytest.mark.parametrize("path", ["a:b", "C", "runs/s3:/x", "/s3:/x", "s3", "1x:/y"])
def test_paths(path: str) -> None:
    assert local_path(path) == Path(path)
