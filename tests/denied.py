"""Programs that the system denies access: run as another user, also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

#: The user to whom denied files belong where the tests run as root.
OWNER = 65534

_DROP_BOUNDING = 24
#: Root's capabilities to read and write files of others, and to change their modes.
_OVERRIDES = (1, 2, 3)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line on stderr, without its prefix."""
        return self.err.splitlines()[-1].removeprefix("ckstore: ")


def deny(*paths: Path, mode: int = 0) -> None:
    """Give paths a mode, and as root another owner."""
    for path in paths:
        path.chmod(mode)
        if os.geteuid() == 0:
            os.chown(path, OWNER, OWNER)


def _drop() -> None:
    for capability in _OVERRIDES:
        if ctypes.CDLL(None).prctl(_DROP_BOUNDING, capability, 0, 0, 0):
            os._exit(77)


def run(place: Path, arguments: Sequence[object]) -> Done:
    """Run `ckstore` in a directory, in a process that permissions bind."""
    command = [sys.executable, "-m", "ckstore", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=place, capture_output=True, text=True, check=False, preexec_fn=_drop if os.geteuid() == 0 else None
    )
    if done.returncode == 77:
        pytest.skip("root's capabilities cannot be dropped here")
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)
