"""Arrays whose memory is used again: never while anything of it is held."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

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
    memory._free[22].clear()
    array = empty(1 << 20, np.uint32)
    place = address(array)
    view = array[1000:].view(np.uint8).data
    del array
    gc.collect()
    assert address(empty(1 << 20, np.uint32)) != place
    del view
    # The memory freed last is used first: it is still in the processor's cache.
    assert address(empty(1 << 20, np.int32)) == place


def test_only_so_much_is_kept() -> None:
    held = [empty(1 << 20, np.uint8) for _ in range(64)]
    held.clear()
    assert len(memory._free[20]) << 20 == memory._KEPT
    objects = [empty(1 << size, np.uint8) for size in (23, 24, 25) for _ in range(8)]
    objects.clear()
    kept = {size: len(free) << size for size, free in memory._free.items()}
    assert all(kept[size] <= memory._KEPT for size in kept if size <= memory._CHUNK)
    assert sum(kept[size] for size in (23, 24, 25)) == memory._KEPT_OBJECTS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deleted_arrays_leave_no_holes_between_others() -> None:
    np.ones(3 << 20)  # After its deletion the C library takes arrays up to this size from its heap.
    memory._free[20].clear()
    before = resident(os.getpid())
    arrays, others = [], []
    for _ in range(96):
        arrays.append(empty(1 << 20, np.uint8))
        arrays[-1].fill(1)
        others.append(np.ones(1 << 17))
    arrays.clear()
    others_and_kept = 96 * (1 << 20) + memory._KEPT
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
