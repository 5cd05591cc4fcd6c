"""Tells others of followed versions: a command, an engine's HTTP interface, and figures for Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckstore.errors import UsageError
from ckstore.following.follow import NotAppliedError
from ckstore.runtime.provenance import own_metrics

if TYPE_CHECKING:
    from ckstore.following.follow import Followed

#: Seconds for an engine to load a model.
_PATIENCE = 600.0

#: Most bytes of an answer that are read.
_ANSWER = 1 << 16


def described(item: Followed) -> dict[str, Any]:
    """Return a version as hooks get it: JSON on stdin and in requests."""
    row = item.version
    return {
        "model_path": os.path.abspath(item.path), "id": row.uid, "version": row.number, "run": row.run,
        "step": row.step, "metrics": own_metrics(row.metrics),
    }  # fmt: skip


def run_command(command: str, item: Followed) -> None:
    """Run a command of the shell with a version as JSON on stdin, and its parts in the environment.

    Raise `NotAppliedError` unless it ends with 0.
    """
    facts = described(item)
    names = ("model_path", "id", "version", "run", "step")
    variables = {f"CKSTORE_{name.upper()}": "" if facts[name] is None else str(facts[name]) for name in names}
    done = subprocess.run(
        command, shell=True, check=False, input=json.dumps(facts).encode(), env={**os.environ, **variables}
    )
    if done.returncode:
        raise NotAppliedError(f"{command} failed with exit code {done.returncode}; {item.name} is not applied.")


def check_url(url: str) -> None:
    """Raise `UsageError` unless a URL is one of HTTP."""
    try:
        is_http = urlsplit(url).scheme in ("http", "https")
    except ValueError:  # Such as for half a bracket.
        is_http = False
    if not is_http:
        raise UsageError(f"{url} is no URL of HTTP; give one such as http://localhost:30000/update_weights_from_disk.")


def post(url: str, item: Followed) -> None:
    """Tell an engine of a version with a POST of JSON; raise `NotAppliedError` unless it succeeds.

    The path of the URL chooses the body: that of SGLang for `update_weights_from_disk`, that of vLLM for
    `collective_rpc`, else the JSON that commands get.
    """
    request = urllib.request.Request(
        url, json.dumps(_body(url, item)).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as response:
            why = _refusal(response.read(_ANSWER))
    except (OSError, HTTPException) as error:
        why = " ".join(str(error).split()) or type(error).__name__
    if why:
        raise NotAppliedError(f"{url} failed ({why}); {item.name} is not applied.")


def _body(url: str, item: Followed) -> dict[str, Any]:
    facts = described(item)
    path = url.partition("?")[0].rstrip("/")
    if path.endswith("/update_weights_from_disk"):
        version = facts["version"] if facts["step"] is None else facts["step"]
        return {"model_path": facts["model_path"], "weight_version": str(version)}
    if path.endswith("/collective_rpc"):
        return {"method": "reload_weights", "kwargs": {"weights_path": facts["model_path"]}}
    return facts


def _refusal(answer: bytes) -> str:
    """Return the message of an answer that says `"success": false`, as SGLang's may with status 200."""
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        return ""
    if isinstance(said, dict) and said.get("success") is False:
        return str(said.get("message") or "it says that it did not succeed")[:300]
    return ""


class Figures:
    """Figures of a follower: counters, and the last version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(
            ("updates_total", "failures_total", "read_bytes_total", "written_bytes_total", "seconds_total"), 0
        )
        self._last: dict[str, float] = {}

    def note(self, item: Followed) -> None:
        """Count an update."""
        with self._lock:
            self._values["updates_total"] += 1
            self._values["read_bytes_total"] += item.bytes_read
            self._values["written_bytes_total"] += item.bytes_written
            self._values["seconds_total"] += item.seconds
            self._last = {"lag_seconds": item.lag, "version": item.version.number}
            if item.version.step is not None:
                self._last["step"] = item.version.step

    def note_failure(self) -> None:
        """Count a hook that failed."""
        with self._lock:
            self._values["failures_total"] += 1

    def text(self) -> str:
        """Return them in the text format of Prometheus."""
        with self._lock:
            lines = []
            for kind, values in (("counter", self._values), ("gauge", self._last)):
                for name, value in values.items():
                    lines += [f"# TYPE ckstore_follow_{name} {kind}", f"ckstore_follow_{name} {value!r}"]
        return "\n".join(lines) + "\n"


@contextmanager
def served(figures: Figures, port: int) -> Iterator[int]:
    """Serve figures at `/metrics` on 127.0.0.1 during the block; yield the port, a free one for 0."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = figures.text().encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(data if self.path == "/metrics" else b"")

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(f"Port {port} cannot be served ({error.strerror}); give another one.") from error
    thread = threading.Thread(target=server.serve_forever, name="ckstore-metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
