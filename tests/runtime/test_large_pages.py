"""Large pages are a hint: memory keeps its content in any case."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ckstore.runtime import memory

SIZE = 8 << 20


def span(array):
    return array.__array_interface__["data"][0], array.nbytes


def advised(spans, monkeypatch):
    """Return the advice to the system about some spans."""
    said = []
    monkeypatch.setattr(memory, "_advise", lambda first, last, starts: said.append((first, last, starts)))
    memory.use_large_pages(spans)
    return said


def test_values_stay():
    arrays = [np.full(size, number, np.uint8) for number, size in enumerate([SIZE, 100, 0, 3 << 20, 3 << 20, SIZE + 1])]
    memory.use_large_pages(map(span, arrays))
    memory.use_large_pages(map(span, arrays))
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


def large_bytes(address):
    """Return the bytes of large pages in the mapping that begins at an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line) and int(line.split("-")[0], 16) <= address < int(
            line.split("-")[1].split()[0], 16
        ):
            break
    return 1024 * int(next(line for line in lines if line.startswith("AnonHugePages")).split()[1])


def linux():
    return tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])


@pytest.mark.skipif(sys.platform != "linux" or linux() < (6, 1), reason="only Linux 6.1 makes small pages large ones")
def test_pages_become_large_where_an_allocator_has_written_before():
    advise, size = memory._madvise(), memory._large_page()
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if advise is None or not size or "[never]" in enabled.read_text():
        pytest.skip("this system has no large pages")
    for _ in range(5):
        found = large_after(memory._advise, size)
        if found == (2 * size, 3 * size):
            return
        if not can_collapse(advise, size):
            pytest.skip("the kernel has no large page free at this moment")
    raise AssertionError(found)


def large_after(advise, size):
    """Return the bytes in large pages after advice about two written pages, and after a write beyond them."""
    with mmap.mmap(-1, 6 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        pages = np.frombuffer(mapping, np.uint8)
        address, nbytes = span(pages)
        first = -address % size
        notes = [first, first + size + 4096]
        pages[notes] = 7
        assert large_bytes(address) == 0
        advise(address, address + nbytes, [address + note + 16 for note in notes])
        advised = large_bytes(address)
        pages[first + 2 * size] = 7
        written = large_bytes(address)
        assert (pages[[*notes, first + 2 * size]] == 7).all()
        assert np.count_nonzero(pages) == 3
        del pages
    return advised, written


def can_collapse(madvise, size):
    """Return whether the kernel makes large pages of as much memory as the test needs, asked without ckstore."""
    with mmap.mmap(-1, 6 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        pages = np.frombuffer(mapping, np.uint8)
        address, _ = span(pages)
        first = -address % size
        pages[first : first + 3 * size : mmap.PAGESIZE] = 7
        refused = madvise(address + first, 3 * size, memory._MADV_COLLAPSE)
        del pages
    return not refused


def test_without_a_system_that_has_them(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    memory.use_large_pages([(1 << 30, SIZE)])
