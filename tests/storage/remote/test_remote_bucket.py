"""The client of a real server: its messages where nothing else would help."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import ckstore
from ckstore.errors import CkstoreError, UnreachableError, UsageError
from ckstore.storage.remote.bucket import NoServerError, ObstoreBucket
from ckstore.storage.remote.retries import PATIENCE, patiently

pytest.importorskip("obstore")


@pytest.fixture
def bucket() -> ObstoreBucket:
    return ObstoreBucket("s3://models/team-a", {"region": "us-east-1"})


class Answers(ThreadingHTTPServer):
    """A server that answers every request alike."""

    status, body = 200, ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def bucket(self, name: str = "models") -> ObstoreBucket:
        return ObstoreBucket(f"s3://{name}/team-a", {"endpoint": self.url, "region": "us-east-1"})


class _Answer(BaseHTTPRequestHandler):
    server: Answers

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    do_GET = do_PUT = do_POST = _answer  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-this-down")
    with Answers() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def said_at_once(request: Callable[[], object]) -> str:
    """Return the error of a request that is not repeated."""
    before = time.monotonic()
    with pytest.raises(CkstoreError) as raised:
        patiently(request)
    assert not isinstance(raised.value, UnreachableError)
    assert time.monotonic() - before < 5
    assert "do-not-write" not in str(raised.value)
    return str(raised.value)


def code(name: str) -> str:
    return f'<?xml version="1.0"?>\n<Error><Code>{name}</Code><Message>See the\nmanual.</Message></Error>'


REQUESTS: dict[str, Callable[[ObstoreBucket], object]] = {
    "list": lambda bucket: list(bucket.list("log/")),
    "read": lambda bucket: bucket.read("log/1"),
    "put": lambda bucket: bucket.put_absent("log/1", b"ours"),
    "delete": lambda bucket: bucket.delete(["log/1"]),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize(
    ("status", "name", "remedy"),
    [
        (403, "InvalidAccessKeyId", "refused log.*InvalidAccessKeyId.*; check the credentials in the environment"),
        (401, "Unauthorized", "refused log.*; check the credentials in the environment"),
        (400, "ExpiredToken", "refused log.*ExpiredToken.*; check the credentials in the environment"),
        (301, "PermanentRedirect", "another region .*; set AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "another region .*; set AWS_REGION"),
    ],
)
def test_every_kind_of_refusal_is_final(server: Answers, kind: str, status: int, name: str, remedy: str) -> None:
    server.status, server.body = status, code(name)
    assert re.search(remedy, said_at_once(lambda: REQUESTS[kind](server.bucket())))


@pytest.mark.parametrize("kind", ["list", "put", "delete"])
def test_a_bucket_that_is_not_there_is_named(server: Answers, kind: str) -> None:
    server.status, server.body = 404, code("NoSuchBucket")
    said = said_at_once(lambda: REQUESTS[kind](server.bucket()))
    assert said == "Bucket models does not exist, or these credentials may not see it; create it first."


def test_a_deletion_that_is_refused_is_final(server: Answers) -> None:
    """The request succeeds, and its body says that it did not."""
    refused = "<Error><Key>team-a/log/1</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    server.body = f'<?xml version="1.0"?><DeleteResult>{refused}</DeleteResult>'
    assert "refused log/1" in said_at_once(lambda: server.bucket().delete(["log/1"]))


def test_a_refusal_of_too_many_requests_is_waited_for(server: Answers) -> None:
    server.status, server.body = 403, code("SlowDown")
    for request in REQUESTS.values():
        with pytest.raises(UnreachableError):
            request(server.bucket())


def test_no_credentials_are_named(server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    expected = "No credentials found for s3://models/team-a; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    assert said_at_once(server.bucket) == expected
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    server.status = 404
    for request in REQUESTS.values():
        assert said_at_once(lambda request=request: request(server.bucket())) == expected
    with pytest.raises(CkstoreError, match="set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"):
        ObstoreBucket("az://models/team-a", {})


def test_a_role_that_is_away_for_a_moment_is_waited_for(bucket: ObstoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def away(*arguments: object) -> None:
        raise GenericError("Error performing PUT http://169.254.169.254/latest/api/token in 10s - HTTP error")

    monkeypatch.setattr(obstore, "put", lambda *arguments: None)
    bucket.put("packs/a.zip", b"")
    monkeypatch.setattr(obstore, "get", away)
    with pytest.raises(UnreachableError):
        bucket.read("ckstore.json")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_address_of_http_in_the_environment_is_used(
    server: Answers, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, server.url)
    assert ObstoreBucket("s3://models/team-a", {}).read("log/1") == b""
    with pytest.raises(CkstoreError, match=r"cannot be reached \(not https\)"):
        ObstoreBucket("s3://models/team-a", {"allow_http": "false"}).read("log/1")


def test_http_is_allowed_by_an_option(server: Answers) -> None:
    ObstoreBucket("s3://models/team-a", {"endpoint": server.url, "allow_http": "true"}).read("log/1")
    with pytest.raises(UsageError, match="allow_http must be true or false, not perhaps"):
        ObstoreBucket("s3://models/team-a", {"allow_http": "perhaps"})


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_address_without_a_server_is_named_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-this-down")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    bucket = ObstoreBucket("s3://models/team-a", {})
    before = time.monotonic()
    with pytest.raises(ckstore.UnreachableError) as raised:
        patiently(lambda: REQUESTS[kind](bucket))
    assert time.monotonic() - before < PATIENCE / 2
    assert str(raised.value) == (
        "http://127.0.0.1:1 cannot be reached (connection refused); start the server, or correct its address: the"
        " option endpoint, or AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL or AWS_ENDPOINT in the environment."
    )
    assert raised.value.kind == "unreachable"


def test_a_server_that_went_away_is_waited_for(server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = server.bucket()
    bucket.read("log/1")
    server.shutdown()
    server.server_close()
    with pytest.raises(UnreachableError) as raised:
        bucket.read("log/1")
    assert not isinstance(raised.value, NoServerError)


@pytest.mark.parametrize("address", ["", "127.0.0.1:9000", "ftp://127.0.0.1", "http://a b", "http://a@b", "http://a:b"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(UsageError, match=r"is an address, without .*; correct \$AWS_ENDPOINT_URL \("):
        ObstoreBucket("s3://models/team-a", {})
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    with pytest.raises(UsageError, match=r"is an address, without .*; correct the option endpoint"):
        ObstoreBucket("s3://models/team-a", {"endpoint": address})


def test_deleting_a_missing_object_succeeds_on_every_service(
    bucket: ObstoreBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google Cloud Storage and Azure end at a name that is not there."""
    import obstore

    there = {"a", "b", "d"}

    def delete(store: object, names: list[str]) -> None:
        for name in names:
            if name not in there:
                raise FileNotFoundError(f"Object at location {name} not found")
            there.remove(name)

    monkeypatch.setattr(obstore, "delete", delete)
    bucket.delete(["a", "gone", "b", "c"])
    assert there == {"d"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://models//x", r"The prefix of s3://models//x has an empty part \(//\); leave it out"),
        ("gs://models/a//x", "has an empty part"),
        ("az://models/../x", r"has the part \.\.; leave it out"),
        ("s3://mod els/x", "with the plain name of a bucket"),
        ("s3://models:9000/x", "with the plain name of a bucket"),
    ],
)
def test_a_url_is_made_of_names(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ObstoreBucket(url, {"region": "us-east-1", "account_name": "someone"})


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
    """A read beyond a truncated pack: servers say 416."""
    import obstore
    from obstore.exceptions import GenericError

    def refused(*arguments: object, **named: object) -> None:
        raise GenericError("Requested range not satisfiable")

    monkeypatch.setattr(obstore, "get_range", refused)
    monkeypatch.setattr(obstore, "head", lambda store, name: {"size": 100})
    before = time.monotonic()
    with pytest.raises(EOFError, match=r"packs/a\.zip is shorter than the requested range"):
        patiently(lambda: bucket.read_range("packs/a.zip", 200, 10))
    assert time.monotonic() - before < 5
    with pytest.raises(UnreachableError, match="not satisfiable"):
        bucket.read_range("packs/a.zip", 0, 10)


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
def test_a_forked_process_is_refused(bucket: ObstoreBucket) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            patiently(lambda: bucket.read("ckstore.json"))
        except CkstoreError as error:
            os._exit(0 if "start processes with the method spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
