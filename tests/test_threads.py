"""Work of several threads: what is made ahead, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from ckstore.threads import in_turn, one_ahead


def counted(made: list[int], last: int) -> Generator[int, None, None]:
    try:
        for number in range(1, last + 1):
            made.append(number)
            yield number
    finally:
        made.append(-1)


def test_items_come_in_order_and_all() -> None:
    made: list[int] = []
    with closing(one_ahead(counted(made, 5))) as items:
        assert list(items) == [1, 2, 3, 4, 5]
    assert made == [1, 2, 3, 4, 5, -1]


def test_one_is_made_while_the_one_before_is_used() -> None:
    asked = threading.Event()

    def numbers() -> Generator[int, None, None]:
        yield 1
        asked.set()
        yield 2

    with closing(one_ahead(numbers())) as items:
        assert next(items) == 1
        assert asked.wait(10)
        assert list(items) == [2]


def test_nothing_is_made_once_it_is_closed() -> None:
    made: list[int] = []
    with closing(one_ahead(counted(made, 100))) as items:
        assert next(items) == 1
    assert made in ([1, -1], [1, 2, -1])


def test_what_goes_wrong_while_an_item_is_made_is_raised_where_it_is_asked_for() -> None:
    def numbers() -> Generator[int, None, None]:
        yield 1
        raise ValueError("torn")

    with closing(one_ahead(numbers())) as items:
        assert next(items) == 1
        with pytest.raises(ValueError, match="torn"):
            next(items)


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
