"""The threads that code chunks: how many, results in order, or work that is shared out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Lock
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


_most = 16


def worker_count() -> int:
    """Threads that code chunks: one a core this process may use, at most 16, or what `limit_workers` said."""
    return min(_most, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def limit_workers(most: int) -> None:
    """Let so many threads at most code chunks in this process from now on."""
    global _most
    _most = most


class Executor(Protocol):
    """What a `ThreadPoolExecutor`, a `ProcessPoolExecutor` and dask's `Client.get_executor()` have in common."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Have a function called, somewhere and some time."""


def in_order(
    pool: Executor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Generator[Result, None, None]:
    """`work` on each item by the pool's workers, results in the order of the items, at most `ahead` under way."""
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
    """`work` on each item, by this thread and `workers` - 1 others, in no order; yields what it returns, now and then.

    Nobody waits for anybody, and nothing is handed from one thread to another but the items: where they are small, that
    takes longer than what is done with them.
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
            others = [pool.submit(all_that_is_left) for _ in range(min(workers, len(todo)) - 1)]
            while one():
                while done:
                    yield done.popleft()
            for other in others:
                other.result()
            yield from done
        finally:
            todo.clear()


def in_turn(call: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """A function that several threads may call: one waits for the other."""
    if call is None:
        return None
    lock = Lock()

    def called(number: int) -> None:
        with lock:
            call(number)

    return called


@contextmanager
def one_ahead(items: Generator[Item, None, None]) -> Iterator[Iterator[Item]]:
    """The items of a generator, of which each is made in a thread of its own while the one before is used.

    The first is begun at once. Nothing is made any more after the block.
    """
    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="ckstore-ahead") as pool:
        first = pool.submit(next, items, None)

        def made() -> Iterator[Item]:
            upcoming = first
            while (item := upcoming.result()) is not None:
                upcoming = pool.submit(next, items, None)
                yield item

        yield made()
