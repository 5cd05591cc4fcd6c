"""The threads that code chunks: their number, results in order, and shared work."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from threading import Lock
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


_most = 16

#: Bytes of a version for which a thread is worth its start.
_LARGE = 1 << 20


def worker_count() -> int:
    """Return the number of coding threads: one a core of this process, at most 16, or the limit of `limit_workers`."""
    return min(_most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def limit_workers(most: int) -> None:
    """Limit the number of coding threads in this process."""
    global _most
    _most = most


class Executor(Protocol):
    """The common interface of `ThreadPoolExecutor`, `ProcessPoolExecutor` and dask's `Client.get_executor()`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Schedule a call of a function."""


class _Caller:
    """Calls each function at once, in this thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def coders(nbytes: int) -> Iterator[Executor]:
    """Yield the threads that code a version of some bytes; at the end of the block none is left."""
    if nbytes < _LARGE:
        yield _Caller()
        return
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Generator[Result, None, None]:
    """Call `work` on each item in a pool, with at most `ahead` in flight; yield results in the order of the items."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def shared(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result, None, None]:
    """Call `work` on each item in this thread and `workers` - 1 others; yield results in any order, in batches.

    Threads do not wait for one another and exchange only items: for small items, handing over results would take longer
    than the work.
    """
    todo = deque(items)
    done: deque[Result] = deque()

    def one() -> bool:
        try:
            item = todo.popleft()
        except IndexError:
            return False
        done.append(work(item))
        return True

    def all_that_is_left() -> None:
        try:
            while one():
                pass
        except BaseException:
            todo.clear()
            raise

    with ThreadPoolExecutor(max(workers - 1, 1), thread_name_prefix="ckstore") as pool:
        try:
            others: list[Future[None]] = []
            with suppress(RuntimeError):  # At the program's end no thread begins, and this one does all.
                others.extend(pool.submit(all_that_is_left) for _ in range(min(workers, len(todo)) - 1))
            while one():
                while done:
                    yield done.popleft()
            for other in others:
                other.result()
            yield from done
        finally:
            todo.clear()


def batches(items: Iterable[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Group items in order, so that the sizes of each group but the last sum up to at least `least`."""
    batch: list[Item] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size(item)
        if filled >= least:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def in_turn(call: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Return a function that several threads may call, one at a time."""
    if call is None:
        return None
    lock = Lock()

    def called(number: int) -> None:
        with lock:
            call(number)

    return called


@contextmanager
def one_ahead(items: Generator[Item, None, None], nbytes: int) -> Iterator[Iterator[Item]]:
    """Yield an iterator over a generator's items that computes the next item in a thread while one is used.

    The first item is started at once. The thread stops at the end of the block. Few bytes in all take no thread.
    """
    with closing(items), ExitStack() as held:
        if nbytes < _LARGE:
            yield items
            return
        pool = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="ckstore-ahead"))
        first = pool.submit(next, items, None)

        def made() -> Iterator[Item]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield made()
