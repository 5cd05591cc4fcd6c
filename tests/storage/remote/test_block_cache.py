"""The block cache: threads that want the same block, a pool that ends, a limit that short processes keep."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckstore.storage.remote import block_cache as cache_module
from ckstore.storage.remote.block_cache import BLOCK, BlockCache


def content(offset: int, length: int) -> bytes:
    return b"".join(bytes([number]) * BLOCK for number in range(offset // BLOCK, (offset + length) // BLOCK))


def settle(cache: BlockCache) -> None:
    """Wait until no request is in flight."""
    deadline = time.monotonic() + 30
    while cache._under_way and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_gap_that_another_thread_is_fetching(directory: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetch(pack: str, offset: int, length: int) -> bytes:
        if (offset, length) == (BLOCK, 3 * BLOCK):
            begun.set()
            assert may_end.wait(30)
        return content(offset, length)

    cache = BlockCache(directory, fetch)
    found: dict[int, object] = {}

    def read(first: int, count: int) -> None:
        try:
            found[first] = cache.read("pack", 8 * BLOCK, first * BLOCK, count * BLOCK)
        except BaseException as error:
            found[first] = error

    cache.prefetch(
        [("pack", 8 * BLOCK, BLOCK, 1), ("pack", 8 * BLOCK, 3 * BLOCK, 1)]
    )  # In one request, with the blocks in between.
    assert begun.wait(30)
    threads = [threading.Thread(target=read, args=part) for part in ((3, 1), (0, 3))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while not (directory / "pack" / f"{2:08d}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    may_end.set()
    for thread in threads:
        thread.join()
    assert found == {0: content(0, 3 * BLOCK), 3: content(3 * BLOCK, BLOCK)}
    cache.close()


def test_blocks_are_fetched_in_reading_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_REQUESTS", 1)
    asked = []

    def fetch(pack: str, offset: int, length: int) -> bytes:
        asked.append((pack, offset // BLOCK, -(-length // BLOCK)))
        return content(offset, length)

    cache = BlockCache(directory, fetch)
    size = 100 * BLOCK + 5
    cache.prefetch(
        [
            ("b", size, 60 * BLOCK, 1), ("a", size, 50 * BLOCK, 2 * BLOCK), ("b", size, 3, 40), ("a", size, 0, 0),
            ("b", size, 61 * BLOCK, 1), ("a", size, 0, 1), ("a", size, 100 * BLOCK, 1 << 40),
        ]
    )  # fmt: skip
    settle(cache)
    cache.close()
    assert asked == [("b", 60, 2), ("a", 50, 2), ("b", 0, 1), ("a", 0, 1), ("a", 100, 1)]


def test_blocks_that_arrive_during_the_look_up_are_not_fetched_again(directory: Path) -> None:
    may_end, asked = threading.Event(), []

    def fetch(pack: str, offset: int, length: int) -> bytes:
        asked.append((offset // BLOCK, length // BLOCK))
        assert may_end.wait(30)
        return content(offset, length)

    class Looking(BlockCache):
        def _claim(self, *arguments: Any, **named: Any) -> Any:
            if self._under_way:  # All was looked for.
                may_end.set()
                while self._under_way:
                    time.sleep(0.001)
            return super()._claim(*arguments, **named)

    cache = Looking(directory, fetch)
    cache.prefetch([("pack", 8 * BLOCK, 0, 4 * BLOCK)])
    cache.prefetch([("pack", 8 * BLOCK, 0, 8 * BLOCK)])
    settle(cache)
    cache.close()
    assert asked == [(0, 4), (4, 4)]


def test_a_cache_that_is_closed_fetches_no_more_than_it_has_begun(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted restore does not wait for the rest; other readers get their blocks."""
    monkeypatch.setattr(cache_module, "_REQUESTS", 2)
    monkeypatch.setattr(cache_module, "_TOGETHER", 1)
    begun, may_end, asked = threading.Event(), threading.Event(), []

    def fetch(pack: str, offset: int, length: int) -> bytes:
        asked.append(offset // BLOCK)
        begun.set()
        assert may_end.wait(30)
        return content(offset, length)

    cache = BlockCache(directory, fetch)
    cache.prefetch([("pack", 100 * BLOCK, 0, 100 * BLOCK)])
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(cache.read("pack", 100 * BLOCK, 90 * BLOCK, BLOCK)))
    reader.start()
    assert begun.wait(30)
    time.sleep(0.05)
    threading.Timer(0.1, may_end.set).start()
    cache.close()
    reader.join(30)
    assert found == [content(90 * BLOCK, BLOCK)]
    assert set(asked) == {0, 1, 90}
    cache.close()
    assert not cache._under_way


def test_blocks_requested_before_a_pack_was_forgotten_are_not_kept(directory: Path) -> None:
    """After forgetting a pack, readers see the bytes in the object store."""
    begun, may_end, asked = threading.Event(), threading.Event(), []

    def fetch(pack: str, offset: int, length: int) -> bytes:
        asked.append(offset)
        data = bytes([len(asked)]) * length
        if len(asked) == 1:
            begun.set()
            assert may_end.wait(30)
        return data

    cache = BlockCache(directory, fetch)
    cache.prefetch([("pack", 2 * BLOCK, 0, 2 * BLOCK)])
    assert begun.wait(30)
    cache.drop("pack")
    assert cache.read("pack", 2 * BLOCK, 0, BLOCK) == b"\2" * BLOCK
    may_end.set()
    cache.close()
    for again in (cache, BlockCache(directory, fetch)):
        assert again.read("pack", 2 * BLOCK, BLOCK, BLOCK)[0] > 1
        again.close()


def test_a_block_that_no_pool_took_is_fetched_by_the_next_one(directory: Path) -> None:
    cache = BlockCache(directory, lambda pack, offset, length: content(offset, length))
    cache.read("pack", 4 * BLOCK, 0, 1)
    assert cache._pool is not None
    cache._pool.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule"):
        cache.read("pack", 4 * BLOCK, BLOCK, 1)
    cache.close()
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(cache.read("pack", 4 * BLOCK, BLOCK, BLOCK)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [content(BLOCK, BLOCK)]
    cache.close()


def test_caches_that_write_little_keep_the_limit(directory: Path) -> None:
    limit = 64 * BLOCK
    for number in range(600):
        cache = BlockCache(directory, lambda pack, offset, length: content(offset, length), limit)
        cache.read(f"pack{number}", BLOCK, 0, BLOCK)
        cache.close()
    assert sum(path.stat().st_size for path in directory.glob("*/*")) < 3 * limit


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="only Linux has such locks")
def test_processes_of_a_machine_fetch_each_block_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches are as two processes: the locks belong to the open file. One that hangs is waited for once."""
    begun, may_end = threading.Event(), threading.Event()
    asked: list[tuple[int, int]] = []

    def hanging(pack: str, offset: int, length: int) -> bytes:
        asked.append((offset // BLOCK, length // BLOCK))
        begun.set()
        assert may_end.wait(30)
        return content(offset, length)

    def fetch(pack: str, offset: int, length: int) -> bytes:
        asked.append((offset // BLOCK, length // BLOCK))
        return content(offset, length)

    first, second = BlockCache(directory, hanging), BlockCache(directory, fetch)
    first.prefetch([("pack", 9 * BLOCK, 0, 4 * BLOCK)])
    assert begun.wait(30)
    second.prefetch([("pack", 9 * BLOCK, 2 * BLOCK, 6 * BLOCK)])
    assert asked == [(0, 4)]
    may_end.set()
    assert second.read("pack", 9 * BLOCK, 0, 8 * BLOCK) == content(0, 8 * BLOCK)
    settle(second)
    assert asked == [(0, 4), (4, 4)]

    monkeypatch.setattr(cache_module, "_PATIENCE", 0.02)
    begun.clear()
    may_end.clear()
    asked.clear()
    first.prefetch([("other", 9 * BLOCK, 0, BLOCK)])
    assert begun.wait(30)
    hasty = BlockCache(directory, fetch)
    assert hasty.read("other", 9 * BLOCK, 0, BLOCK) == content(0, BLOCK)
    assert hasty._patience == 0
    assert asked == [(0, 1), (0, 1)]
    may_end.set()
    for cache in (first, second, hasty):
        cache.close()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="only Linux has such locks")
def test_a_block_of_another_process_between_missing_ones(directory: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hanging(pack: str, offset: int, length: int) -> bytes:
        begun.set()
        assert may_end.wait(30)
        return content(offset, length)

    first, second = BlockCache(directory, hanging), BlockCache(directory, lambda _, *place: content(*place))
    first.prefetch([("pack", 9 * BLOCK, BLOCK, BLOCK)])
    assert begun.wait(30)
    second.prefetch([("pack", 9 * BLOCK, 0, 3 * BLOCK)])
    may_end.set()
    assert second.read("pack", 9 * BLOCK, 0, 3 * BLOCK) == content(0, 3 * BLOCK)
    for cache in (first, second):
        cache.close()
