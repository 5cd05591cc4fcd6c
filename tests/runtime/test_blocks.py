"""Arrays whose memory is used again: never while anything of it is held."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckstore import init
from ckstore.runtime import blocks as memory
from ckstore.runtime.blocks import empty
from tools.bench.resident import resident


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "i4", "f4", "f8", "u8"])
@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 70_001, 1 << 18, 1 << 21])
def test_arrays_are_ordinary(dtype: str, count: int) -> None:
    array = empty(count, dtype)
    assert array.shape == (count,)
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
    array[:] = 1
    assert array.sum() == count


def test_memory_is_released_with_the_last_view() -> None:
    # Arrays of this size are rare: no thread of an earlier test takes or gives one during this test. And as much
    # memory as is kept may be free already.
    gc.collect()
    for free in memory._free.values():
        free.clear()
    array = empty(1 << 20, np.uint32)
    place = address(array)
    view = array[1000:].view(np.uint8).data
    del array
    gc.collect()
    assert address(empty(1 << 20, np.uint32)) != place
    del view
    # The memory freed last is used first: it is still in the processor's cache.
    assert address(empty(1 << 20, np.int32)) == place


def kept() -> int:
    return sum(len(free) << size for size, free in memory._free.items())


def test_only_so_much_is_kept() -> None:
    for free in memory._free.values():
        free.clear()
    held = [empty(1 << 20, np.uint8) for _ in range(300)]
    held.clear()
    assert memory._KEPT - (1 << 20) < kept() <= memory._KEPT
    # The memory of a size that is no longer used makes room.
    others = [empty(1 << 23, np.uint8) for _ in range(14)]
    others.clear()
    assert len(memory._free[23]) == 14
    assert kept() <= memory._KEPT


def test_ingests_use_the_memory_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = drifting(4)
    mapped: list[int] = []
    new = memory._new
    with init(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.ingest(state, run="a", step=step, hot=0)
            if step == 1:
                monkeypatch.setattr(memory, "_new", lambda nbytes: (mapped.append(nbytes), new(nbytes))[1])
    # Of 64 MB in each, most of it in objects of 4 MB; how far the threads are ahead of each other differs.
    assert sum(mapped) < 48 << 20


def drifting(count: int) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Return states of 64 MB, each a little away from the one before."""
    random = np.random.default_rng(0)
    state = {f"w{number}": random.standard_normal((1024, 1024), np.float32) for number in range(16)}
    return [{name: array * np.float32(1 + 0.01 * step) for name, array in state.items()} for step in range(count)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deleted_arrays_leave_no_holes_between_others() -> None:
    np.ones(3 << 20)  # After its deletion the C library takes arrays up to this size from its heap.
    for free in memory._free.values():
        free.clear()
    before = resident(os.getpid())
    arrays, others = [], []
    for _ in range(400):
        arrays.append(empty(1 << 20, np.uint8))
        arrays[-1].fill(1)
        others.append(np.ones(1 << 17))
    arrays.clear()
    others_and_kept = 400 * (1 << 20) + memory._KEPT
    assert (resident(os.getpid()) - before) * 1e6 < others_and_kept + (8 << 20)


@pytest.mark.parametrize("size", [memory._MAPPED // 2, memory._MAPPED])
def test_without_another_mapping_the_c_library_gives_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "too many mappings")

    memory._free[(size - 1).bit_length()].clear()
    monkeypatch.setattr(mmap, "mmap", fail)
    array = empty(size, np.uint8)
    array[:] = 1
    assert address(array) % 64 == 0
    assert array.sum() == size


def test_threads_never_share_memory() -> None:
    def work(number: int) -> bool:
        for _ in range(300):
            array = empty(20_000, np.int32)
            array[:] = number
            other = empty(20_000, np.int32)
            other[:] = -number
            if (array != number).any():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(1, 9)))


def test_arrays_that_outlive_the_names_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    array = empty(1 << 18, np.uint8)
    # Python clears the globals of modules at its end.
    monkeypatch.setattr(memory, "_free", None)
    monkeypatch.setattr(memory, "_KEPT", None)
    del array
    gc.collect()
    assert raised == []
