"""The garbage collector while structures are built: seldom at work, never off, and restored afterwards."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from ckstore.runtime.collector import collection_seldom


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_uses_nest_and_end(thresholds: tuple[int, int, int]) -> None:
    with collection_seldom():
        assert gc.get_threshold() == (100_000, *thresholds[1:])
        with collection_seldom():
            assert gc.get_threshold()[0] == 100_000
        assert gc.get_threshold()[0] == 100_000
    assert gc.get_threshold() == thresholds


def test_collection_is_restored_after_an_error(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="x"), collection_seldom():
        raise ValueError("x")
    assert gc.get_threshold() == thresholds


def test_garbage_of_others_is_still_collected() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            Node.alive += 1
            self.me = self

        def __del__(self) -> None:
            Node.alive -= 1

    most = 0
    with collection_seldom():
        for _ in range(500_000):
            Node()
            most = max(most, Node.alive)
    assert most < 150_000


@pytest.mark.parametrize("chosen", [0, 200_000])
def test_a_collector_that_works_less_is_left_alone(chosen: int) -> None:
    gc.set_threshold(chosen)
    with collection_seldom():
        assert gc.get_threshold()[0] == chosen
    assert gc.get_threshold()[0] == chosen


def test_thresholds_set_inside_the_block_stay() -> None:
    with collection_seldom():
        gc.set_threshold(5000)
    assert gc.get_threshold()[0] == 5000


def test_uses_of_threads_add_up(thresholds: tuple[int, int, int]) -> None:
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with collection_seldom():
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=other)
    with collection_seldom():
        thread.start()
        begun.wait(10)
    assert gc.get_threshold()[0] == 100_000
    end.set()
    thread.join()
    assert gc.get_threshold() == thresholds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_begins_as_it_was(thresholds: tuple[int, int, int]) -> None:
    with collection_seldom():
        child = os.fork()
        if child == 0:
            seen = gc.get_threshold()
            with collection_seldom():
                inside = gc.get_threshold()[0]
            os._exit(0 if (seen, inside) == (thresholds, 100_000) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
