"""Large pages are a hint: whatever is asked for, memory holds what it held."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from ckstore import large_pages

SIZE = 8 << 20


def span(array):
    return array.__array_interface__["data"][0], array.nbytes


def advised(spans, monkeypatch):
    """What the system is told of some spans."""
    said = []
    monkeypatch.setattr(large_pages, "_advise", lambda first, last, starts: said.append((first, last, starts)))
    large_pages.use_large_pages(spans)
    return said


def test_values_stay():
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate([SIZE, 100, 0, 3 << 20, 3 << 20, SIZE + 1])]
    large_pages.use_large_pages(map(span, arrays))
    large_pages.use_large_pages(map(span, arrays))
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_arrays_next_to_each_other_are_one_stretch(monkeypatch):
    first, far = 1 << 30, 1 << 40
    spans = [(far, SIZE), (first + 3000, 3 << 20), (first, 1000), (first + 3000 + (3 << 20) + 4096, 5 << 20)]
    last = first + 3000 + (3 << 20) + 4096
    stretch = first, last + (5 << 20), [first, first + 3000, last]
    assert advised(spans, monkeypatch) == [stretch, (far, far + SIZE, [far])]


def test_little_memory_is_not_worth_a_call(monkeypatch):
    assert advised([(1 << 30, 4095), (1 << 35, 1 << 20)], monkeypatch) == []
    assert advised([], monkeypatch) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which pages are large")
def test_pages_become_large_where_an_allocator_has_written_before():
    advise, size = large_pages._madvise()
    if advise is None:
        pytest.skip("this system has no large pages")
    with mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pages = np.frombuffer(memory, np.uint8)
        address, nbytes = span(pages)
        starts = [address + 16, address + size + 5000]
        pages[0] = pages[size + 4096] = 7
        large_pages._advise(address, address + nbytes, starts)
        assert pages[0] == pages[size + 4096] == 7
        pages[1::4096] = 1
        assert pages[0] == pages[size + 4096] == 7
        del pages


def test_without_a_system_that_has_them(monkeypatch):
    monkeypatch.setattr(large_pages, "_madvise", lambda: (None, 0))
    large_pages.use_large_pages([(1 << 30, SIZE)])
