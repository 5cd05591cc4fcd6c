"""A proxy between ckstore and an object store that applies network and server faults to requests, by a seed.

The request is forwarded as received, with the signed `Host`. The important fault is `lost`: the server has carried out
the request, and the response is lost.

`GET /-/counts` answers with the requests and the faults so far, `PUT /-/rates` takes other rates.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import urlsplit

#: How likely each fault is, of a request that it can befall.
RATES = {"lost": 0.03, "cut": 0.02, "500": 0.01, "503": 0.02, "429": 0.01, "409": 0.05, "delay": 0.05}
#: Seconds of a delay, at most.
LONGEST_DELAY = 0.3

_CODES = {"500": "InternalError", "503": "SlowDown", "429": "TooManyRequests", "409": "ConditionalRequestConflict"}
_OWN = "/-/"


class FaultProxy(ThreadingHTTPServer):
    """A server on a free port of 127.0.0.1 that hands requests on to another one.

    Parameters
    ----------
    target
        URL of the other server.
    rates
        How likely each fault is; one of `RATES` that is not named does not happen.
    seed
        Of the choices.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str, rates: Mapping[str, float], seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.rates = dict(rates)
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = Lock()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, event: str) -> None:
        """Count a request or a event."""
        with self._lock:
            self.counts[event] += 1

    def fault(self, *, conditional: bool) -> str | None:
        """Choose at most one fault for a request; 409 answers conditional writes only."""
        with self._lock:
            chance = self._random.random()
        for name, rate in self.rates.items():
            if name == "409" and not conditional:
                continue
            if chance < rate:
                self.count(f"fault {name}")
                return name
            chance -= rate
        return None

    def delay(self) -> float:
        """Return the seconds of a delay."""
        with self._lock:
            return self._random.uniform(0, LONGEST_DELAY)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the errors of killed clients."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith(_OWN):
            if self.command == "PUT":
                self.server.rates = json.loads(body)
            self._answer(200, [], json.dumps(self.server.counts).encode())
            return
        kind = "LIST" if self.command == "GET" and "list-type" in self.path else self.command
        self.server.count(f"request {kind}")
        fault = self.server.fault(conditional="If-None-Match" in self.headers)
        if fault == "delay":
            time.sleep(self.server.delay())
        elif fault == "cut":
            self._cut()
            return
        elif fault in _CODES:
            said = f"<Error><Code>{_CODES[fault]}</Code><Message>By chance.</Message></Error>"
            self._answer(int(fault), [("Content-Type", "application/xml")], said.encode())
            return
        connection = http.client.HTTPConnection(self.server.target.hostname or "", self.server.target.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if fault == "lost":
            self._cut()
            return
        self._answer(answer.status, answer.getheaders(), data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        said = {name.lower(): value for name, value in headers}
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "keep-alive"):
                self.send_header(name, value)
        bodiless = self.command == "HEAD" or status in (204, 304)
        if status != 204:
            self.send_header("Content-Length", said.get("content-length", "0") if bodiless else str(len(data)))
        self.end_headers()
        if not bodiless:
            self.wfile.write(data)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *said: object) -> None:
        """Say nothing."""


def counts(url: str) -> Counter[str]:
    """Return the requests and faults that a proxy has counted."""
    with urllib.request.urlopen(f"{url}{_OWN}counts", timeout=10) as answer:
        return Counter(json.loads(answer.read()))


def set_rates(url: str, rates: Mapping[str, float]) -> None:
    """Change the fault rates of a proxy."""
    request = urllib.request.Request(f"{url}{_OWN}rates", json.dumps(dict(rates)).encode(), method="PUT")
    urllib.request.urlopen(request, timeout=10).read()


@contextmanager
def fault_proxy(target: str, rates: Mapping[str, float], seed: int = 0) -> Iterator[str]:
    """The URL of a proxy in a process of its own, which stops with the block."""
    server = FaultProxy(target, rates, seed)
    pid = os.fork()
    if not pid:
        try:
            server.serve_forever()
        finally:
            os._exit(1)
    server.server_close()
    try:
        yield server.url
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    proxy = FaultProxy(sys.argv[1], RATES, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(proxy.url, flush=True)
    proxy.serve_forever()
