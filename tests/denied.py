"""Programs that the system denies access: run as another user, also where the tests run as root."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.cli.program import run as run_verb

#: The user to whom denied files belong where the tests run as root.
OWNER = 65534

#: Root's capabilities to read and write files of others, and to change their modes, as bits.
_OVERRIDES = 1 << 1 | 1 << 2 | 1 << 3

_CAPABILITY_VERSION = 0x20080522

#: Exit code where they cannot be dropped.
_NO_DROP = 77


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


def bind() -> None:
    """Let permissions bind this process, also if it is root's."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted and inheritable ones, of the first 32 capabilities and of the others.
    capabilities = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    if libc.capget(header, capabilities):
        os._exit(_NO_DROP)
    for place in range(3):
        capabilities[place] &= ~_OVERRIDES
    if libc.capset(header, capabilities):
        os._exit(_NO_DROP)


def run(place: Path, arguments: Sequence[object]) -> Done:
    """Run `ckstore` in a directory, in a process that permissions bind."""
    return call(place, run_verb, [*map(str, arguments)])


def call(place: Path, function: Callable[..., int], *arguments: object) -> Done:
    """Call a function, which returns an exit code, in a process that permissions bind, forked from one with imports."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [DupFd(stream.fileno()) for stream in (out, err)]
        process = _forks().Process(target=_call, args=(place, *streams, function, arguments))
        process.start()
        process.join()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    if process.exitcode == _NO_DROP:
        pytest.skip("root's capabilities cannot be dropped here")
    assert process.exitcode is not None
    done = Done(process.exitcode, *texts)
    assert "Traceback" not in done.err, done.err
    return done


@cache
def _forks() -> ForkServerContext:
    context = get_context("forkserver")
    names = [__name__, *(found.name for found in pkgutil.walk_packages(ckstore.__path__, "ckstore."))]
    programs = ("ckstore.integrations", "ckstore.__main__", "ckstore.saving.__main__")
    context.set_forkserver_preload([name for name in names if not name.startswith(programs)])
    with chdir(Path(__file__).parents[1]):  # It imports from its working directory, this module too.
        ensure_running()
    return context


def _call(place: Path, out: Any, err: Any, function: Callable[..., int], arguments: Sequence[object]) -> None:
    os.dup2(out.detach(), 1)
    os.dup2(err.detach(), 2)
    os.chdir(place)
    bind()
    sys.exit(function(*arguments))
