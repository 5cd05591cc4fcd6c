"""Runs programs in processes that are forked from one which has already imported their modules.

Importing torch takes two seconds of a processor and libraries on top of it up to seven, which is more than tests
then do with it. A forked program is a process like any other: it has an environment, a working directory and streams,
may be killed, and ends with an exit code. An import that a program forgot and its server has made goes unnoticed:
the tutorial, which runs most verbs, is run by real processes. The workers of pytest-xdist share the servers.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib.util
import os
import pkgutil
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
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


class Servers:
    """The servers of a test session, in a directory; they end with the process that makes it, and their programs too.

    Parameters
    ----------
    directory
        That of the servers of another process, which are shared.
    """

    def __init__(self, directory: str | None = None) -> None:
        # Names of sockets may be a hundred bytes long.
        self.directory = Path(directory or tempfile.mkdtemp(prefix="ckstore-"))
        self._end: int | None = None
        if directory is None:
            os.mkfifo(self.directory / "end")
            # Its other ends are the stdin of the servers: the kernel closes this one in any case.
            self._end = os.open(self.directory / "end", os.O_RDWR | os.O_NONBLOCK)

    def server(self, kind: str) -> Server:
        """Return the server of a kind, a name in `BEGINNINGS`; the first call starts it."""
        place = self.directory / kind
        place.mkdir(exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            server = Server(place)
            if not server.programs.is_dir():
                server.start(self.directory / "end", BEGINNINGS[kind])
        return server

    def close(self) -> None:
        """End the servers and their programs, unless they are shared with the process that made them."""
        if self._end is not None:
            os.close(self._end)
            shutil.rmtree(self.directory, ignore_errors=True)


class Server:
    """A process that has imported some modules, and forks.

    Parameters
    ----------
    place
        Its directory.

    Attributes
    ----------
    programs
        Directory for `PATH`: its `ckstore`, `python` and `torchrun` are forked, and are real in all other respects.
    """

    def __init__(self, place: Path) -> None:
        self.programs = place / "bin"
        self._socket = str(place / "socket")

    def start(self, end: Path, modules: Sequence[str]) -> None:
        """Start the process, which ends once no process writes to the pipe `end`."""
        until = os.open(end, os.O_RDONLY | os.O_NONBLOCK)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._socket)
            listener.listen(128)  # Clients that connect during the imports wait.
            listener.set_inheritable(True)
            # With one thread there is none that a fork would lose.
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            arguments = [sys.executable, "-m", "tests.forked", str(listener.fileno()), *modules]
            os.posix_spawn(
                sys.executable, arguments, environment, setsid=True,
                file_actions=[(os.POSIX_SPAWN_DUP2, until, 0)],
            )  # fmt: skip
        os.close(until)
        self.programs.mkdir()
        for name in ("ckstore", "python", "torchrun"):
            command = shlex.join([sys.executable, "-IS", stand_in.__file__, sys.executable, self._socket, name])
            (self.programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (self.programs / name).chmod(0o755)

    def run(self, script: Path, environments: Sequence[Mapping[str, str]], cwd: Path) -> list[tuple[int, str]]:
        """Run a script in several environments at once; return exit codes and output.

        Where that raises, as at a time limit, the programs are killed.
        """
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


_servers: list[Servers] = []


def share(directory: str | None = None) -> str:
    """Share the servers of another process from now on, or offer those of this one; return their directory."""
    if not _servers:
        _servers.append(Servers(directory))
        atexit.register(_servers[0].close)
    return str(_servers[0].directory)


def server_of(kind: str) -> Server:
    """Return the server of a kind, a name in `BEGINNINGS`, which is kept."""
    if importlib.util.find_spec(kind) is None:
        import pytest

        pytest.skip(f"{kind} is not installed")
    share()
    return _servers[0].server(kind)


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
    return server_of(kind).run(script, [{**os.environ, **own, **environment} for environment in environments], cwd)


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
    waiting: set[int] = set()
    # The end of stdin is that of the process whose session this is.
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asking, _ = listener.accept()
        with suppress(ChildProcessError):  # There is none.
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                waiting.discard(ended)
        if waits := os.fork():
            waiting.add(waits)
            asking.close()
            continue
        # A process that waits for the program, so that several programs may run at once, and leads its group.
        os.setpgid(0, 0)
        program, streams = stand_in.asked(asking)
        child = os.fork()
        if not child:
            asking.close()
            listener.close()
            return program, streams
        for stream in streams:
            os.close(stream)
        _wait(child, asking)
    for group in waiting:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _wait(child: int, asking: socket.socket) -> NoReturn:
    """Wait for a program, and report its exit code; kill its group if nobody waits for that."""
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(asking, 0)
    poll.register(woken, select.POLLIN)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if any(event & select.POLLHUP for _, event in poll.poll()):
            os.killpg(0, signal.SIGKILL)
        woken.recv(64)
    asking.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
    os._exit(0)


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
    os.chdir(REPOSITORY)
    _begin(sys.argv[2:])
    gc.collect()
    gc.freeze()
    _live(*_serve(socket.socket(fileno=int(sys.argv[1]))))
