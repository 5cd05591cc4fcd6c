"""Runs programs in processes that are forked from one which has already imported their modules.

Importing torch takes two seconds of a processor and libraries on top of it up to seven, which is more than tests
then do with it. A forked program is a process like any other: it has an environment, a working directory and streams,
may be killed, and ends with an exit code. An import that a program forgot and its server has made goes unnoticed:
README and tutorial, which run most verbs, are run by real processes.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import pkgutil
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import ckstore
from tests import places, stand_in

REPOSITORY = Path(__file__).resolve().parents[1]

#: The module of each program's `main`.
MODULES = {"ckstore": "ckstore.cli", "torchrun": "torch.distributed.run"}

#: Modules to import before forking, besides all of ckstore; imports that programs would make later are among them.
#: Libraries on top of torch share most of their imports: all of them together take little more than the largest.
BEGINNINGS = {
    "torch": (
        "torch._dynamo", "torch.distributed.run", "tests.distributed", "accelerate", "lightning.pytorch",
        "transformers.trainer", "transformers.models.gpt2.modeling_gpt2",
    ),
    "jax": ("jax", "optax"),
}  # fmt: skip


class Server:
    """A process that has imported some modules, and forks.

    Parameters
    ----------
    modules
        Names of modules that programs begin with.

    Attributes
    ----------
    programs
        Directory for `PATH`: its `ckstore`, `python` and `torchrun` are forked, and are real in all other respects.
    """

    def __init__(self, *modules: str) -> None:
        # Names of sockets may be a hundred bytes long.
        self._directory = tempfile.TemporaryDirectory(prefix="ckstore-", ignore_cleanup_errors=True)
        self.programs = Path(self._directory.name)
        self._socket = str(self.programs / "socket")
        for name in ("ckstore", "python", "torchrun"):
            command = shlex.join([sys.executable, "-IS", stand_in.__file__, sys.executable, self._socket, name])
            (self.programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self.programs / name).chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._socket)
            listener.listen(128)  # Clients that connect during the imports wait.
            # With one thread there is none that a fork would lose.
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(listener.fileno()), *modules],
                cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
                start_new_session=True,
            )  # fmt: skip

    def run(self, script: Path, environments: Sequence[Mapping[str, str]], cwd: Path) -> list[tuple[int, str]]:
        """Run a script in several environments at once; return exit codes and output."""
        with ExitStack() as stack:
            nothing = stack.enter_context(Path(os.devnull).open("rb")).fileno()
            printed = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in environments]
            asked = [
                stack.enter_context(
                    stand_in.ask(self._socket, ["python", str(script)], cwd, environment, [nothing, *[to.fileno()] * 2])
                )
                for environment, to in zip(environments, printed, strict=True)
            ]
            codes = [stand_in.exit_code(one) for one in asked]
            for to in printed:
                to.seek(0)
            return [(code, to.read()) for code, to in zip(codes, printed, strict=True)]

    def end(self) -> None:
        """End the process, and programs that hang."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._directory.cleanup()


@contextmanager
def forking(kind: str) -> Iterator[Server]:
    """The server of a kind, a name in `BEGINNINGS`, which is kept."""
    if importlib.util.find_spec(kind) is None:
        import pytest

        pytest.skip(f"{kind} is not installed")
    server = _servers.pop(kind, None) or Server(*BEGINNINGS[kind])
    try:
        yield server
    except BaseException:
        server.end()
        raise
    _servers[kind] = server


_servers: dict[str, Server] = {}


@atexit.register
def _end_all() -> None:
    """End the servers that are kept for the next programs with the same modules."""
    while _servers:
        _servers.popitem()[1].end()


def run_forked(
    kind: str, script: Path, *environments: Mapping[str, str], cwd: Path = REPOSITORY
) -> list[tuple[int, str]]:
    """Run a script in several environments at once; return exit codes, and stdout and stderr as one text.

    Parameters
    ----------
    kind
        Its modules to import first, a name in `BEGINNINGS`.
    environments
        Variables to add to those of this process.
    """
    path = os.environ["PYTHONPATH"] if places.BUCKET in os.environ else str(REPOSITORY)
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with forking(kind) as server:
        return server.run(script, [{**os.environ, **own, **environment} for environment in environments], cwd)


def of_ranks(world: int) -> list[dict[str, str]]:
    """Return the environment variables that `torchrun` sets for the ranks of one machine."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return [{**meeting, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _begin(modules: Sequence[str]) -> None:
    """Import some modules and all of ckstore."""
    for module in modules:
        with suppress(ImportError):  # A program that needs it says so itself.
            importlib.import_module(module)
    for info in pkgutil.walk_packages(ckstore.__path__, "ckstore."):
        if not info.name.startswith("ckstore.integrations") and not info.name.endswith("__main__"):
            importlib.import_module(info.name)


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each requested program; in a forked process, return its request and its streams."""
    # The end of stdin is that of the process that began this one.
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asking, _ = listener.accept()
        with suppress(ChildProcessError):  # There is none.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            asking.close()
            continue
        # A process that waits for the program, so that several programs may run at once.
        program, streams = stand_in.asked(asking)
        child = os.fork()
        if not child:
            asking.close()
            listener.close()
            return program, streams
        for stream in streams:
            os.close(stream)
        asking.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    sys.exit()


def _become(program: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Turn into a process that runs this program alone."""
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])
    time.tzset()
    if places.BUCKET in os.environ:
        places.let_paths_be_urls()
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    # As they were, they believe to be elsewhere in their files.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    name, *sys.argv = program["arguments"]
    actions = [os.environ.get("PYTHONWARNINGS", "")]
    while sys.argv and sys.argv[0].startswith("-") and name == "python":
        option = sys.argv.pop(0)
        actions += [sys.argv.pop(0)] if option == "-W" else []
    for action in filter(None, actions):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if name == "python":
        main.__file__ = str(Path(sys.argv[0]).resolve())
        sys.path[0] = str(Path(main.__file__).parent)
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), vars(main))
        return
    sys.argv.insert(0, name)
    sys.path[0] = str(Path(sys.executable).parent)
    module = importlib.import_module(MODULES[name])
    sys.exit(module.main())


def _live(program: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Be a process that runs this program alone, and end as one does, but for taking modules apart.

    That touches all imported objects, which are copied for it: a third of a second.
    """
    code: Any = 1
    try:
        _become(program, streams)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    _begin(sys.argv[2:])
    gc.collect()
    gc.freeze()
    _live(*_serve(socket.socket(fileno=int(sys.argv[1]))))
