"""Runs programs in processes that are forked from one which has imported what they begin with.

Importing torch takes two seconds of a processor and importing what builds on it up to seven, which is more than tests
then do with it. A forked program is a process like any other: it has an environment and a working directory, may be
killed, and ends with an exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


#: What programs begin with that use these; what they import when they come to it is among it.
BEGINNINGS = {
    "torch": ("torch", "torch._dynamo", "numba"),
    "jax": ("jax", "optax", "numba"),
    "accelerate": ("accelerate", "torch._dynamo", "numba"),
    "lightning": ("lightning.pytorch", "torch._dynamo", "numba"),
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "torch._dynamo", "numba"),
    "ranks": ("tests.distributed", "torch._dynamo", "numba"),
}


class Server:
    """A process that has imported some modules, and forks.

    Parameters
    ----------
    modules
        Names of modules that programs begin with.
    """

    def __init__(self, *modules: str) -> None:
        # With one thread there is none that a fork would lose.
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *modules], cwd=REPOSITORY, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, programs: Sequence[Mapping[str, Any]]) -> list[int]:
        """Run programs at once, and wait for them; their exit codes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(programs) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def end(self) -> None:
        """End the process, and programs that hang."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def _server(kind: str) -> Iterator[Server]:
    """The server of a kind; that of another one is ended, as it takes much memory."""
    server = _servers.pop(kind, None)
    _end_all()
    server = server or Server(*BEGINNINGS[kind])
    try:
        yield server
    except BaseException:
        server.end()
        raise
    _servers[kind] = server


_servers: dict[str, Server] = {}


@atexit.register
def _end_all() -> None:
    """End the server that is kept for whoever asks for the same modules next."""
    while _servers:
        _servers.popitem()[1].end()


def run_forked(
    kind: str, script: Path, *environments: Mapping[str, str], cwd: Path = REPOSITORY
) -> list[tuple[int, str]]:
    """Run a script, at once for each of some environments; exit codes, and what was written to stdout and stderr.

    Parameters
    ----------
    kind
        What it begins with, a name in `BEGINNINGS`.
    environments
        Variables beside those of this process.
    """
    with tempfile.TemporaryDirectory() as directory:
        programs = [
            {
                "script": str(script),
                "cwd": str(cwd),
                "environment": {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment},
                "printed": f"{directory}/{number}",
            }
            for number, environment in enumerate(environments)
        ]
        with _server(kind) as server:
            codes = server.run(programs)
        return [(code, Path(program["printed"]).read_text()) for code, program in zip(codes, programs, strict=True)]


def of_ranks(world: int) -> list[dict[str, str]]:
    """What `torchrun` tells the ranks of one machine, by environment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**meeting, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _serve() -> dict[str, Any] | None:
    """Fork for each program that is asked for; returns what a forked process is to run, None at the end of it all."""
    for line in sys.stdin:
        children = []
        for program in json.loads(line):
            child = os.fork()
            if not child:
                return dict(program)
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return None


def _become(program: Mapping[str, Any]) -> None:
    """Be a process that runs this program alone."""
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])
    printed = os.open(program["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, own in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(old, own)
    os.close(printed)
    os.close(nothing)
    script = program["script"]
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


if __name__ == "__main__":
    for module in sys.argv[1:]:
        with suppress(ImportError):  # A program that needs it says so itself.
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asked = _serve()
    if asked is not None:
        _become(asked)
