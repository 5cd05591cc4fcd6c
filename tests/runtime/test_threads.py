"""Work of several threads: results made ahead, and the order of waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from ckstore.runtime.threads import coders, in_turn, one_ahead, shared

#: Bytes that are worth a thread.
LARGE = 1 << 30


def counted(made: list[int], last: int) -> Generator[int, None, None]:
    try:
        for number in range(1, last + 1):
            made.append(number)
            yield number
    finally:
        made.append(-1)


@pytest.mark.parametrize("nbytes", [0, LARGE])
def test_items_come_in_order_and_all(nbytes: int) -> None:
    made: list[int] = []
    with one_ahead(counted(made, 5), nbytes) as items:
        assert list(items) == [1, 2, 3, 4, 5]
    assert made == [1, 2, 3, 4, 5, -1]


def test_one_is_made_while_the_one_before_is_used() -> None:
    asked = threading.Event()

    def numbers() -> Generator[int, None, None]:
        yield 1
        asked.set()
        yield 2

    with one_ahead(numbers(), LARGE) as items:
        assert next(items) == 1
        assert asked.wait(10)
        assert list(items) == [2]


@pytest.mark.parametrize("nbytes", [0, LARGE])
def test_nothing_is_made_once_it_is_closed(nbytes: int) -> None:
    made: list[int] = []
    with one_ahead(counted(made, 100), nbytes) as items:
        assert next(items) == 1
    assert made in ([1, -1], [1, 2, -1])


def test_errors_of_an_item_are_raised_on_its_request() -> None:
    def numbers() -> Generator[int, None, None]:
        yield 1
        raise ValueError("torn")

    with one_ahead(numbers(), LARGE) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="torn"):
            next(items)


@pytest.mark.parametrize("nbytes", [0, LARGE])
def test_coders_keep_results_and_errors_for_their_callers(nbytes: int) -> None:
    with coders(nbytes) as pool:
        done = [pool.submit(divmod, 7, by) for by in (2, 0)]
        assert done[0].result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            done[1].result()


def test_calls_take_turns() -> None:
    inside = most = total = 0

    def note(number: int) -> None:
        nonlocal inside, most, total
        inside += 1
        most = max(most, inside)
        before = total
        threading.Event().wait(0.0001)
        total = before + number
        inside -= 1

    call = in_turn(note)
    assert call is not None
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, [1] * 200))
    assert (most, total) == (1, 200)
    assert in_turn(None) is None


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_shared_items_are_all_worked_on_once(workers: int, count: int) -> None:
    assert sorted(shared(lambda item: 2 * item, range(count), workers)) == [2 * item for item in range(count)]


def test_items_are_shared_between_threads() -> None:
    meeting = threading.Barrier(3)

    def work(item: int) -> int:
        meeting.wait(10)  # Only where all three are at it does it open.
        return threading.get_ident()

    assert len(set(shared(work, range(6), 3))) == 3


def test_an_error_of_any_thread_is_raised_and_the_rest_is_dropped() -> None:
    seen: list[int] = []
    here = threading.get_ident()
    begun = threading.Event()

    def elsewhere(item: int) -> int:
        seen.append(item)
        if threading.get_ident() != here:
            begun.set()
            raise ValueError(item)
        begun.wait(10)
        time.sleep(0.01)
        return item

    with pytest.raises(ValueError):
        list(shared(elsewhere, range(1000), 2))
    assert len(seen) < 10

    def first(item: int) -> int:
        seen.append(item)
        if threading.get_ident() == here:
            raise KeyError(item)
        time.sleep(0.01)
        return item

    seen.clear()
    with pytest.raises(KeyError):
        list(shared(first, range(1000), 3))
    assert len(seen) < 900


def test_shared_work_that_is_left_ends() -> None:
    seen: list[int] = []

    def work(item: int) -> int:
        seen.append(item)
        time.sleep(0.001)
        return item

    with closing(shared(work, range(1000), 2)) as results:
        next(results)
    count = len(seen)
    time.sleep(0.05)
    assert len(seen) == count < 900
