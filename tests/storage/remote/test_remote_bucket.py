"""The client of a real server: what it says where nothing else would help."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ckstore.errors import CkstoreError
from ckstore.storage.remote.bucket import ObstoreBucket, UnreachableError, patiently

pytest.importorskip("obstore")


@pytest.fixture
def bucket() -> ObstoreBucket:
    return ObstoreBucket("s3://models/team-a", {"region": "us-east-1"})


def test_a_refusal_is_not_waited_for(bucket: ObstoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import PermissionDeniedError

    def refused(*arguments: object) -> None:
        raise PermissionDeniedError("Access denied - Server returned secret-in-a-header\nmore of it")

    monkeypatch.setattr(obstore, "get", refused)
    before = time.monotonic()
    with pytest.raises(CkstoreError, match=r"refused ckstore.json \(Access denied\); check the credentials") as raised:
        patiently(lambda: bucket.read("ckstore.json"))
    assert not isinstance(raised.value, UnreachableError)
    assert time.monotonic() - before < 5


def test_a_range_behind_the_end_is_not_asked_for_again(bucket: ObstoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pack that was cut short: servers say 416."""
    import obstore
    from obstore.exceptions import GenericError

    def refused(*arguments: object, **named: object) -> None:
        raise GenericError("Requested range not satisfiable")

    monkeypatch.setattr(obstore, "get_ranges", refused)
    monkeypatch.setattr(obstore, "head", lambda store, name: {"size": 100})
    before = time.monotonic()
    with pytest.raises(EOFError, match=r"packs/a\.zip has fewer bytes than were asked for"):
        patiently(lambda: bucket.read_ranges("packs/a.zip", [(0, 10), (200, 10)]))
    assert time.monotonic() - before < 5
    with pytest.raises(UnreachableError, match="not satisfiable"):
        bucket.read_ranges("packs/a.zip", [(0, 10)])


def test_a_token_in_an_address_is_not_repeated(bucket: ObstoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def failed(*arguments: object) -> None:
        raise GenericError("Error performing GET http://127.0.0.1:1/a?sv=2021&sig=secret in 10s - refused")

    monkeypatch.setattr(obstore, "get", failed)
    with pytest.raises(UnreachableError, match=r"GET http://127.0.0.1:1/a in 10s - refused") as raised:
        bucket.read("ckstore.json")
    assert "secret" not in str(raised.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_that_it_cannot_ask(bucket: ObstoreBucket) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            patiently(lambda: bucket.read("ckstore.json"))
        except CkstoreError as error:
            os._exit(0 if "start processes with the method spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
