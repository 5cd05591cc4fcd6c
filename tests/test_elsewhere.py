"""Systems that are not Linux: names that are missing there, syncs of macOS, and Windows."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckstore.storage import durable

TESTS = Path(__file__).parent
QUICK = ("reading/test_unfinished.py", "storage/test_root.py", "storage/test_storage.py", "writing/test_rebase.py")


@pytest.mark.long
def test_tests_pass_without_the_names_that_only_linux_has() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.without_linux"]
    done = subprocess.run(
        [*command, *(TESTS / name for name in QUICK)], cwd=TESTS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_mac_writes_out_the_memory_of_its_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: calls.append(("fcntl", command)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(("fsync", 0)))
    with (tmp_path / "file").open("wb") as file:
        durable.sync_file(file.fileno())
        durable.sync_contents(file.fileno())
        assert calls == [("fcntl", 51)] * 2

        def refuse(descriptor: int, command: int) -> None:
            raise OSError

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        durable.sync_file(file.fileno())
        assert calls[2:] == [("fsync", 0)]


def test_windows_gets_a_sentence() -> None:
    program = "import os; os.name = 'nt'; import ckstore"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: ckstore runs on Linux and macOS; on Windows, use it in WSL.\n")
