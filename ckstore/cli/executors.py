"""`--executor`: run bulk work on processes of this machine or on the workers of a dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.types import StringParamType

from ckstore.cli.verb import option
from ckstore.errors import UsageError
from ckstore.runtime.background import BackgroundContext, settle

if TYPE_CHECKING:
    from ckstore.runtime.threads import Executor

#: Seconds for a pool to drop cancelled tasks.
_DROPPED = 0.3

#: Seconds for a pool to notice that its processes are dead.
_ENDED = 10

#: Largest number of processes.
_MOST = 1024

#: Seconds for a cluster's scheduler to answer.
_PATIENCE = 10


class ExecutorName(StringParamType):
    """`processes=N` or `dask=HOST:PORT`."""

    name = "executor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text; fail for any other form."""
        kind, _, where = str(value).partition("=")
        host, _, port = where.rpartition(":")
        if kind == "dask":
            fits = bool(host) and port.isascii() and port.isdigit()
        else:
            fits = kind == "processes" and where.isascii() and where.isdigit() and 1 <= int(where) <= _MOST
        if not fits:
            self.fail(f"{value!r} is not of the form processes=N or dask=HOST:PORT", param, ctx)
        return str(value)


executor_option = option(
    "--executor WORKERS",
    "Where to run: processes=N, or dask=HOST:PORT for the workers of a dask scheduler.",
    type=ExecutorName(),
)


@contextmanager
def executor_of(name: str | None) -> Iterator[Executor | None]:
    """Yield the executor of a name; None without a name."""
    if name is None:
        yield None
        return
    kind, _, where = name.partition("=")
    with _processes(int(where)) if kind == "processes" else _dask(where) as executor:
        yield executor


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    pool = ProcessPoolExecutor(count, mp_context=BackgroundContext(), initializer=settle, initargs=(os.getpid(), 0))
    try:
        yield pool
    except BaseException:
        thread = getattr(pool, "_executor_manager_thread", None)  # Later calls of `shutdown` no longer wait for it.
        pool.shutdown(wait=False, cancel_futures=True)
        # The pool's thread drops cancelled tasks; it would fail on them after finding the processes dead.
        time.sleep(_DROPPED)
        for process in multiprocessing.active_children():
            process.kill()
        if thread is not None:  # At the program's end it closes a pipe that Python's exit handler writes to.
            thread.join(_ENDED)
        raise
    finally:
        pool.shutdown()


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--executor dask=… needs the package distributed: pip install 'ckstore[dask]'.") from None
    try:
        client = Client(f"tcp://{address}", timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No scheduler of dask answers at {address}; start one with `dask scheduler`, or name the address of yours."
        ) from error
    with client:
        yield client.get_executor()
