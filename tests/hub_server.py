"""A server with the API of the Hugging Face Hub on 127.0.0.1: a repository, its commits, and uploads by LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

#: The repository that exists, and the token that may write to it.
REPOSITORY, TOKEN = "team/run", "hf_do_not_write_this_down"
#: The mark of tests that upload: the client uses a parameter that its own library calls deprecated.
OF_CLIENT = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")
#: Bytes from which a file is uploaded by LFS.
_LARGE = 1000


class Hub:
    """The files of a repository at its head, with the times of their commits.

    `before_commit` is called before a commit is looked at; `commits` counts them. The repository's .gitignore has paths
    that begin with one of `ignored`. `sends_parts` tells whether ranges are honoured.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, str]] = {}
        self.uploaded: dict[str, bytes] = {}
        self.head = secrets.token_hex(20)
        self.commits = 0
        self.ignored: tuple[str, ...] = ()
        self.sends_parts = True
        self.lock = threading.RLock()
        self.endpoint = ""

    def before_commit(self) -> None:
        """Do nothing."""

    def commit(self, lines: list[dict[str, Any]]) -> bool:
        """Apply a commit; return False if its parent is not the head."""
        self.before_commit()
        with self.lock:
            if lines[0]["value"].get("parentCommit", self.head) != self.head:
                return False
            gone = [line["value"]["path"] for line in lines[1:] if line["key"] == "deletedFile"]
            if not self.files.keys() >= set(gone):
                raise FileNotFoundError(gone)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"]), now
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.uploaded[value["oid"]], now
                else:
                    del self.files[value["path"]]
            self.head = secrets.token_hex(20)
            self.commits += 1
            return True


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self, code: int, body: Any = b"", error: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(data)

    def _asked(self) -> tuple[str, str] | None:
        """Return the kind of a request and its path; None if it was refused."""
        found = urlsplit(self.path)
        if found.path.startswith("/upload/"):
            return "upload", found.path.removeprefix("/upload/")
        match = re.fullmatch(
            rf"/(?:api/models/)?{REPOSITORY}(?:\.git/info/lfs/objects)?/([a-z-]+)(?:/main|/[0-9a-f]{{40}})?/?(.*)",
            found.path,
        )
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer(403, {"error": "forbidden"})
        elif match is None:
            self._answer(404, error="RepoNotFound")
        else:
            return match[1], unquote(match[2])
        return None

    def _described(self, path: str) -> dict[str, Any]:
        data, when = self.hub.files[path]
        commit = {"id": self.hub.head, "title": "Put", "date": when}
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid, "lastCommit": commit}

    def do_GET(self) -> None:
        """Answer for the head, a folder or a file."""
        asked = self._asked()
        if asked is None:
            return
        kind, path = asked
        with self.hub.lock:
            if kind == "revision":
                self._answer(200, {"id": REPOSITORY, "sha": self.hub.head})
            elif kind == "tree":
                below = [name for name in self.hub.files if not path or name.startswith(f"{path}/")]
                if below or not path:
                    self._answer(200, [self._described(name) for name in below])
                else:
                    self._answer(404, error="EntryNotFound")
            elif path not in self.hub.files:
                self._answer(404, error="EntryNotFound")
            else:
                self._send(self.hub.files[path][0])

    def _send(self, data: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.hub.sends_parts:
            self._answer(200, data)
        elif int(asked[1]) >= len(data):
            self._answer(416)
        else:
            self._answer(206, data[int(asked[1]) : int(asked[2]) + 1])

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def do_PUT(self) -> None:
        """Take an upload."""
        data = self._body()
        asked = self._asked()
        if asked is not None and hashlib.sha256(data).hexdigest() == asked[1]:
            self.hub.uploaded[asked[1]] = data
            self._answer(200)

    def do_POST(self) -> None:
        """Answer for paths, ways of uploads, and commits."""
        body = self._body()
        asked = self._asked()
        if asked is None:
            return
        kind, _ = asked
        if kind == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            with self.hub.lock:
                self._answer(200, [self._described(path) for path in paths if path in self.hub.files])
        elif kind == "preupload":
            ignored = self.hub.ignored
            self._answer(200, {"files": [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] > _LARGE else "regular",
                 "shouldIgnore": file["path"].startswith(ignored)} for file in json.loads(body)["files"]
            ]})  # fmt: skip
        elif kind == "batch":
            self._answer(200, {"transfer": "basic", "objects": [
                {**item, "actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]})  # fmt: skip
        else:
            self._commit([json.loads(line) for line in body.splitlines()])

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        try:
            is_done = self.hub.commit(lines)
        except FileNotFoundError:
            self._answer(404, {"error": "A file with this name doesn't exist"}, "EntryNotFound")
            return
        if is_done:
            url = f"{self.hub.endpoint}/{REPOSITORY}/commit/{self.hub.head}"
            self._answer(200, {"commitUrl": url, "commitOid": self.hub.head})
        else:
            self._answer(412, {"error": "A commit has happened since."})


@contextmanager
def on_hub(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub for this process's client."""
    pytest.importorskip("huggingface_hub")
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with hub() as made:
        yield made


@contextmanager
def hub() -> Iterator[Hub]:
    """Run a hub during the block."""
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    made.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
