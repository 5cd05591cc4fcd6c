"""`ckstore follow`: a directory at the newest version, commands that are told of it, and the end of the service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore as library
from ckstore.following.hooks import Figures, served
from tests.cli.conftest import Ckstore


def marker(directory: str = "local") -> dict[str, object]:
    found: dict[str, object] = json.loads((Path(directory) / ".ckstore-version").read_text())
    return found


def test_once_updates_and_says_so(filled: Path, ckstore: Ckstore) -> None:
    shown = ckstore("follow", "gpt@10", "local", "--once").out
    assert shown.startswith("gpt@10 -> local  ")
    assert (filled / "local" / "step10.pt").read_bytes() == (filled / "in" / "step10.pt").read_bytes()
    assert ckstore("follow", "gpt@10", "local", "--once").out == "gpt@10 -> local  unchanged\n"
    ckstore("follow", "gpt", "local", "--once")
    assert [path.name for path in Path("local").iterdir() if path.suffix == ".pt"] == ["step20.pt"]


def test_a_command_gets_the_version_and_is_retried(filled: Path, ckstore: Ckstore) -> None:
    told = 'cat > told.json; printf "$CKSTORE_STEP $CKSTORE_MODEL_PATH" > told.txt; exit 3'
    result = ckstore("follow", "gpt@10", "local", "--once", "--exec", told, code=1)
    assert result.sentence == f"{told} failed with exit code 3; gpt@10 is not applied."
    facts = json.loads(Path("told.json").read_text())
    assert (facts["step"], facts["run"], facts["model_path"]) == (10, "gpt", str(filled / "local"))
    assert Path("told.txt").read_text() == f"10 {filled / 'local'}"
    assert marker()["state"] == "complete"
    assert marker()["applied"] is None
    ckstore("follow", "gpt@10", "local", "--once", "--exec", "echo told >> told")
    assert marker()["applied"] == marker()["id"]
    # It was applied before this start.
    ckstore("follow", "gpt@10", "local", "--once", "--exec", "echo told >> told")
    assert Path("told").read_text() == "told\n"


def test_a_version_without_a_step_gives_an_empty_variable(filled: Path, ckstore: Ckstore) -> None:
    with library.open(".ckstore") as store:
        store.ingest({"w": np.arange(9)}, run="final")
    ckstore("follow", "final", "local", "--once", "--exec", 'printf "<$CKSTORE_STEP>" > told.txt; cat > told.json')
    assert Path("told.txt").read_text() == "<>"
    assert json.loads(Path("told.json").read_text())["step"] is None


def test_events_are_lines_of_json(filled: Path, ckstore: Ckstore) -> None:
    result = ckstore("follow", "gpt", "local", "--once", "--json", "--exec", "true")
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in events] == ["written", "applied"]
    assert events[0]["step"] == 20
    assert events[0]["written"] > 600_000
    assert events[0]["read"] > 300_000


@contextmanager
def engine(answers: list[tuple[int, bytes]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that gives these answers; yields its URL and the requests that it got."""
    got: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            status, answer = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_engines_get_their_own_requests(filled: Path, ckstore: Ckstore) -> None:
    path = str(filled / "local")
    refused = b'{"success": false, "message": "out of memory"}'
    deep = b"[" * 60_000
    with engine([(200, refused), (500, b""), (200, b'{"success": true, "message": ""}'), (200, deep)]) as (url, got):
        sglang = f"{url}/update_weights_from_disk"
        result = ckstore("follow", "gpt@10", "local", "--once", "--post", sglang, code=1)
        assert result.sentence == f"{sglang} failed (out of memory); gpt@10 is not applied."
        assert "500" in ckstore("follow", "gpt@10", "local", "--once", "--post", sglang, code=1).sentence
        assert marker()["applied"] is None
        ckstore("follow", "gpt@10", "local", "--once", "--post", sglang)
        assert marker()["applied"] == marker()["id"]
        assert got == 3 * [("/update_weights_from_disk", {"model_path": path, "weight_version": "10"})]
        ckstore("follow", "gpt@20", "local", "--once", "--post", f"{url}/collective_rpc")
        assert got[-1] == ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
    assert "failed (" in ckstore("follow", "gpt@10", "local", "--once", "--post", sglang, code=1).sentence
    for wrong in ("localhost:1", "http://[half"):
        assert "no URL of HTTP" in ckstore("follow", "gpt@10", "local", "--post", wrong, code=2).sentence


def test_figures_are_served(filled: Path, ckstore: Ckstore) -> None:
    with library.open(".ckstore", "r") as store:
        (item,) = store.follow("gpt@10", "local", once=True)
    figures = Figures()
    figures.note(item)
    figures.note_failure()
    figures.note(replace(item, bytes_read=12_345_678_901 - item.bytes_read))
    with served(figures, 0) as port:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        with pytest.raises(library.UsageError, match="give another one"), served(figures, port):
            pass
    lines = text.splitlines()
    assert "# TYPE ckstore_follow_updates_total counter" in lines
    assert {"ckstore_follow_updates_total 2", "ckstore_follow_failures_total 1", "ckstore_follow_step 10"} <= set(lines)
    # Of rounded bytes the rate would be 0 for long.
    assert "ckstore_follow_read_bytes_total 12345678901" in lines
    assert ckstore("follow", "gpt@10", "other", "--once", "--metrics-port", "0").code == 0


def test_errors_are_sentences(filled: Path, ckstore: Ckstore) -> None:
    assert "Unknown version nothing" in ckstore("follow", "nothing", "local", "--once", code=13).sentence
    assert "no follower wrote" in ckstore("follow", "gpt", "in", "--once", code=12).sentence
    assert "is not a directory" in ckstore("follow", "gpt", "in/step10.pt", "--once", code=12).sentence


def test_a_service_follows_until_it_is_terminated(filled: Path) -> None:
    command = [sys.executable, "-m", "ckstore", "follow", "late", "local", "--poll", "0.05", "--exec", "cat > told"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            # The run is waited for.
            assert "Unknown version late" in child.stderr.readline()
            with library.open(".ckstore") as store:
                store.ingest("in/step10.pt", run="late", step=1)
            until = time.monotonic() + 60
            while not (Path("told").exists() and Path("told").read_text()):
                assert time.monotonic() < until
                time.sleep(0.02)
            child.send_signal(signal.SIGTERM)
            out, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0
    assert out.startswith("late@1 -> local  ")
