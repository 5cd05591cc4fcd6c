"""An object store for tests: a server in a process of its own on 127.0.0.1, which stops with the block."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from tempfile import TemporaryDirectory

import pytest

#: The environment variable that names the server: `ministack` by default, `moto`, or `azurite`.
VARIABLE = "CKSTORE_TEST_SERVER"
#: The bucket that exists.
BUCKET = "models"
_SECRET = "do-not-write-this-down"
#: Azure's keys are base64.
_KEY = base64.b64encode(_SECRET.encode()).decode()


@dataclass(frozen=True)
class ObjectStore:
    """A server that runs.

    Attributes
    ----------
    endpoint
        Its address.
    url
        URL of the existing bucket.
    options
        Options of stores in it.
    credentials
        Variables of the environment.
    secret
        The one of them that must not be found anywhere.
    """

    endpoint: str
    url: str
    options: Mapping[str, str]
    credentials: Mapping[str, str]
    secret: str

    @property
    def anywhere(self) -> dict[str, str]:
        """An environment in which stores are found without options."""
        kind = "AZURE" if self.url.startswith("az:") else "AWS"
        where = {"AZURE": "AZURE_STORAGE_ENDPOINT", "AWS": "AWS_ENDPOINT_URL"}[kind]
        return {**self.credentials, where: self.options["endpoint"]}


@contextmanager
def object_store(name: str | None = None) -> Iterator[ObjectStore]:
    """A server of this name, or the one that the environment names; the test is skipped where it is not installed."""
    name = name or os.environ.get(VARIABLE, "ministack")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory(prefix="ckstore-") as directory:
        server = subprocess.Popen(
            _arguments(name, str(port), directory),
            env={
                **os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3",
                "AZURITE_ACCOUNTS": f"someone:{_KEY}",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            endpoint = f"http://127.0.0.1:{port}"
            made = _azure(endpoint) if name == "azurite" else s3_of(endpoint)
            make_bucket(server, made)
            yield made
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def _arguments(name: str, port: str, directory: str) -> Sequence[str]:
    """Return the command line of a server."""
    if name in ("ministack", "moto"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")
        more = ("moto.server", "-H", "127.0.0.1", "-p", port) if name == "moto" else (name,)
        return [sys.executable, "-m", *more]
    program = shutil.which({"azurite": "azurite-blob"}.get(name, name))
    if program is None:
        pytest.skip(f"the program {name} is not installed")
    if name == "azurite":
        return [program, "--blobHost", "127.0.0.1", "--blobPort", port, "--location", directory, "--silent"]
    return [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", directory]


def s3_of(endpoint: str) -> ObjectStore:
    credentials = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": _SECRET, "AWS_REGION": "us-east-1"}
    options = {"endpoint": endpoint, "region": "us-east-1"}
    return ObjectStore(endpoint, f"s3://{BUCKET}", options, credentials, _SECRET)


def _azure(endpoint: str) -> ObjectStore:
    options = {"endpoint": f"{endpoint}/someone", "account_name": "someone"}
    credentials = {"AZURE_STORAGE_ACCOUNT_NAME": "someone", "AZURE_STORAGE_ACCOUNT_KEY": _KEY}
    return ObjectStore(endpoint, f"az://{BUCKET}", options, credentials, _KEY)


def make_bucket(server: subprocess.Popen[bytes], made: ObjectStore) -> None:
    """Make the bucket, once the server answers."""
    request = urllib.request.Request(f"{made.endpoint}/{BUCKET}", method="PUT")
    if made.url.startswith("az:"):
        request = _request_of_azure(f"{made.endpoint}/someone/{BUCKET}?restype=container")
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).read()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _request_of_azure(url: str) -> urllib.request.Request:
    """Return a request that makes a container, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    said = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{12 * chr(10)}{said}/someone/someone/{BUCKET}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    return urllib.request.Request(
        url, method="PUT", headers={**headers, "Authorization": f"SharedKey someone:{signature}"}
    )
