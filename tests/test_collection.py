"""The pause of the garbage collector: nested, across threads, and never left behind."""

from __future__ import annotations

import gc
import threading

import pytest

from ckstore.collection import collection_paused


def test_pauses_nest_and_end() -> None:
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="x"), collection_paused():
        raise ValueError("x")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_of_threads_add_up() -> None:
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=other)
    with collection_paused():
        thread.start()
        begun.wait(10)
    assert not gc.isenabled()
    end.set()
    thread.join()
    assert gc.isenabled()
