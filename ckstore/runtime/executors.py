"""Bulk work on an executor that the caller provides: processes of this machine, or a cluster."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import closing
from functools import partial
from typing import TypeVar

from ckstore.errors import CkstoreError, UsageError
from ckstore.runtime.threads import Executor, in_order, limit_workers

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Number of tasks submitted whose results have not been taken.
AHEAD = 128

_LOST = (
    "A worker of the executor died: it was killed, lacked memory, or could not import the program, whose work must be "
    'under `if __name__ == "__main__":`; make another executor and repeat the call.'
)


def spread(executor: Executor, work: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """Call `work` on each item with an executor; yield results in the order of the items.

    Each task uses one thread: an executor has as many workers as there are cores for it. Raise `UsageError` if `work`
    cannot be pickled, and `CkstoreError` if a worker died. Errors of `work` are raised as they are.
    """
    if _is_of_processes(executor):
        try:
            pickle.dumps(work)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"The function cannot be sent to another process ({error}); define it at the top level of a module."
            ) from error
    tasks = in_order(executor, partial(_in_one_thread, _here(), work), items, AHEAD)
    with closing(tasks):
        while True:
            try:
                result = next(tasks)
            except StopIteration:
                return
            except Exception as error:
                if isinstance(error, BrokenExecutor | CancelledError) or _is_of_dask(error):
                    raise CkstoreError(_LOST) from error
                raise
            yield result


def _is_of_processes(executor: Executor) -> bool:
    # The maker of such an executor has imported the module; it cannot be imported while the program ends.
    module = sys.modules.get("concurrent.futures.process")
    return module is not None and isinstance(executor, module.ProcessPoolExecutor)


def _here() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _in_one_thread(program: tuple[str, int], work: Callable[[Item], Result], item: Item) -> Result:
    """Call `work`; outside the program itself, with one thread, since the executor provides parallelism."""
    if program != _here():
        limit_workers(1)
    return work(item)


def _is_of_dask(error: Exception) -> bool:
    """Return whether an error comes from the cluster and not from the task."""
    return type(error).__module__.partition(".")[0] == "distributed"
