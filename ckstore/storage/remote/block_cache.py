"""The cache of remote packs: checksummed blocks on the local disk, shared by all processes of a user."""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from blake3 import blake3

from ckstore.runtime import forks
from ckstore.runtime.checksum import crc32c
from ckstore.runtime.lru import Lru
from ckstore.storage import durable

#: Bytes of a block; the last one of a pack may be shorter.
BLOCK = 256 << 10
#: Largest number of blocks in one request, and of parallel requests.
_TOGETHER, _REQUESTS = 16, 16
#: Gap in blocks that is fetched instead of starting another request. Requests run in parallel, so that the bytes read
#: bound the time of a restore.
_GAP = 1
#: Blocks kept in memory: most are read several times, for consecutive chunks.
_RECENT = 128
#: Limits of the blocks, in bytes and as a fraction of the free space; also for files of whole packs.
LIMIT, _SHARE = 16 << 30, 4
#: Seconds after which a read marks a block as used again.
_USED = 60.0

#: Seconds for which requests wait for other processes that fetch the same blocks, and between looks.
_PATIENCE, _LOOK = 10.0, 0.005
#: The file whose byte ranges are the locks of blocks: bits of a block's number, below those of the pack's name.
_CLAIMS, _NUMBER_BITS = "claims", 24

#: Reads a range (offset, length) of a pack from the object store.
Fetch = Callable[[str, int, int], bytes]


def allowed(directory: Path) -> int:
    """Return the number of bytes that a cache directory may take, given the free space."""
    return min(LIMIT, shutil.disk_usage(directory).free // _SHARE)


class BlockCache:
    """Blocks of packs, fetched once by all processes of a machine. Safe for threads and processes.

    Beyond `limit` bytes, by default the result of `allowed`, the least recently used blocks are removed first.
    """

    def __init__(self, directory: Path, fetch: Fetch, limit: int | None = None) -> None:
        self._directory = directory
        self._fetch = fetch
        self._limit = limit
        self._claims = -1
        self._start()
        forks.in_child(self._start)
        # Bytes since the last check of the limit, starting at a random fraction of it: otherwise many processes that
        # write little would never check.
        self._written = secrets.randbelow(1 << 20) / (1 << 20)

    def _start(self) -> None:
        """Initialise the state, also in a forked child, which has no threads."""
        self._lock = forks.Lock()
        self._under_way: dict[tuple[str, int], Future[bytes]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._close_claims()
        self._patience = _PATIENCE
        self._recent: Lru[tuple[str, int], bytes] = Lru(_RECENT)
        # Number of times that each pack was forgotten: results of earlier requests are not kept.
        self._forgotten: Counter[str] = Counter()

    def read(self, pack: str, size: int, offset: int, length: int) -> bytes:
        """Return bytes of a pack of `size` bytes; fetch missing blocks."""
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        found = self._blocks(pack, size, range(first, last + 1))
        if first == last:
            start = offset - first * BLOCK
            return found[first][start : start + length]
        whole = b"".join(found[number] for number in range(first, last + 1))
        return whole[offset - first * BLOCK :][:length]

    def prefetch(self, wanted: Iterable[tuple[str, int, int, int]]) -> None:
        """Start fetching parts of packs, given as (pack, size, offset, length) in the order of the reads.

        Parts must end within their packs.
        """
        places: dict[tuple[str, int], dict[int, int]] = {}
        for place, (pack, size, offset, length) in enumerate(wanted):
            end = min(offset + length, size)
            if offset < end:
                blocks = places.setdefault((pack, size), {})
                for number in range(offset // BLOCK, (end - 1) // BLOCK + 1):
                    blocks.setdefault(number, place)
        runs: list[tuple[int, str, int, list[int]]] = []
        for (pack, size), blocks in places.items():
            missing = {number for number in blocks if not self._path(pack, number).exists()}
            for run in _runs(sorted(missing)):
                numbers = [number for number in run if number in missing]
                runs.append((min(blocks[number] for number in numbers), pack, size, numbers))
        for _, pack, size, numbers in sorted(runs):
            self._claim(pack, size, numbers, again=False)

    def at_hand(self, pack: str, number: int, length: int) -> bytes | None:
        """Return a cached block of `length` bytes, or None."""
        recent = self._recent.get((pack, number))
        if recent is not None:
            return recent
        path = self._path(pack, number)
        try:
            data = path.read_bytes()
            if len(data) == length + 4 and crc32c(data[:-4]).to_bytes(4, "little") == data[-4:]:
                if time.time() - path.stat().st_mtime > _USED:
                    os.utime(path)
                return self._recent.put((pack, number), data[:-4])
        except OSError:
            return None
        return None

    def drop(self, pack: str) -> None:
        """Forget a pack; blocks in flight are returned to their readers, but not cached."""
        with self._lock:
            self._forgotten[pack] += 1
            for place in [place for place in self._under_way if place[0] == pack]:
                del self._under_way[place]
        self._remove(pack)

    def _remove(self, pack: str) -> None:
        shutil.rmtree(self._directory / pack, ignore_errors=True)
        for place in self._recent:
            if place[0] == pack:
                self._recent.drop(place)

    def close(self) -> None:
        """Wait for running requests, and cancel queued ones; their readers ask again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self._close_claims()

    def _close_claims(self) -> None:
        if self._claims >= 0:
            forks.close_unshared(self._claims)
        self._claims = -1

    def _blocks(self, pack: str, size: int, numbers: Sequence[int]) -> dict[int, bytes]:
        found = {}
        for number in numbers:
            block = self.at_hand(pack, number, min(BLOCK, size - number * BLOCK))
            if block is not None:
                found[number] = block
        missing = [number for number in numbers if number not in found]
        if missing:
            fetched = self._claim(pack, size, missing)
            for number, future in fetched.items():
                try:
                    found[number] = future.result()
                except CancelledError:
                    found |= self._blocks(pack, size, [number])
        return found

    def _claim(self, pack: str, size: int, missing: Sequence[int], *, again: bool = True) -> dict[int, Future[bytes]]:
        """Return futures of the blocks; blocks that another thread is fetching are shared.

        With `again`, fetch cached blocks too, since they may be damaged.
        """
        if not missing:
            return {}
        with self._lock:
            found = {number: future for number in missing if (future := self._under_way.get((pack, number)))}
            # A block in flight at the first look may have arrived since.
            absent = [number for number in missing if number not in found]
            fresh = {number: Future[bytes]() for number in absent if again or not self._path(pack, number).exists()}
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="ckstore-fetch")
            for run in _runs(sorted(fresh)):
                futures = {number: fresh[number] for number in run if number in fresh}
                # A pool after shutdown accepts no task; nobody waits for its futures.
                task = self._pool.submit(self._fetch_run, pack, size, run, futures, self._forgotten[pack])
                task.add_done_callback(partial(self._give_up, pack, futures))
                self._under_way |= {(pack, number): future for number, future in futures.items()}
        return found | fresh

    def _give_up(self, pack: str, futures: dict[int, Future[bytes]], task: Future[None]) -> None:
        """Cancel the futures that a pool did not start before its shutdown."""
        if task.cancelled():
            self._come(pack, futures)
            for future in futures.values():
                future.cancel()

    def _come(self, pack: str, futures: dict[int, Future[bytes]]) -> None:
        """Remove blocks from those in flight."""
        with self._lock:
            for number, future in futures.items():
                if self._under_way.get((pack, number)) is future:
                    del self._under_way[pack, number]

    def _fetch_run(self, pack: str, size: int, run: range, futures: dict[int, Future[bytes]], forgotten: int) -> None:
        nbytes = 0
        try:
            with self._claimed(pack, run):
                missing = {}
                for number, future in futures.items():  # Another process may have fetched them since.
                    block = self.at_hand(pack, number, min(BLOCK, size - number * BLOCK))
                    if block is None:
                        missing[number] = future
                    else:
                        future.set_result(block)
                for part in _runs([*missing]):
                    data = self._fetch(pack, part.start * BLOCK, min(part.stop * BLOCK, size) - part.start * BLOCK)
                    nbytes += len(data)
                    for number in part:
                        start = (number - part.start) * BLOCK
                        block = data[start : start + BLOCK]
                        if self._forgotten[pack] == forgotten:
                            self._recent.put((pack, number), block)
                        if number in missing:
                            missing[number].set_result(block)
                        if self._forgotten[pack] == forgotten:
                            self._keep(pack, number, block)
            if self._forgotten[pack] != forgotten:
                self._remove(pack)
        except BaseException as error:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            self._come(pack, futures)
        self._trim(nbytes)

    @contextmanager
    def _claimed(self, pack: str, run: range) -> Iterator[None]:
        """Fetch blocks that no other process is fetching: it puts them into the cache.

        A process that is stopped, or has a slow link, is waited for once.
        """
        hashed = int.from_bytes(blake3(pack.encode()).digest(4), "little") << _NUMBER_BITS
        deadline = time.monotonic() + self._patience
        while not (is_free := self._lock_range(hashed + run.start, len(run), "F_WRLCK")):
            if time.monotonic() >= deadline:
                self._patience = 0.0
                break
            time.sleep(_LOOK)
        try:
            yield
        finally:
            if is_free:
                self._lock_range(hashed + run.start, len(run), "F_UNLCK")

    def _lock_range(self, start: int, length: int, kind: str) -> bool:
        """Lock or unlock a range for this process; return False if another one holds a part.

        Without such locks, or on a file system that lacks them, each process fetches for itself.
        """
        try:
            import fcntl

            with self._lock:
                if self._claims < 0:
                    durable.new_directory(self._directory)
                    durable.touch(self._directory / _CLAIMS)
                    self._claims = forks.open_unshared(self._directory / _CLAIMS, os.O_RDWR)
            wanted = struct.pack("hhqqi", getattr(fcntl, kind), os.SEEK_SET, start, length, 0)
            fcntl.fcntl(self._claims, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        except (ImportError, AttributeError, OSError):
            return True
        return True

    def _keep(self, pack: str, number: int, block: bytes) -> None:
        """Write a block to the cache; on a full disk, it is not cached."""
        path = self._path(pack, number)
        with suppress(OSError):
            durable.new_directory(path.parent)
            durable.write_cached(path, block + crc32c(block).to_bytes(4, "little"))

    def _trim(self, written: int) -> None:
        with self._lock:
            limit = self._limit
            if limit is None:
                limit = allowed(self._directory)
            self._written += written / max(limit // 16, 1)
            if self._written < 1:
                return
            self._written = 0.0
        found = []
        for path in self._directory.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in found) - limit
        for _, size, path in sorted(found):
            if over <= 0:
                break
            path.unlink(missing_ok=True)
            over -= size

    def _path(self, pack: str, number: int) -> Path:
        return self._directory / pack / f"{number:08d}"


def _runs(numbers: Sequence[int]) -> Iterable[range]:
    """Return sorted numbers as ranges to fetch, with small gaps included.

    Examples
    --------
    >>> list(_runs([0, 1, 3, 40, 41]))
    [range(0, 4), range(40, 42)]
    """
    run: range | None = None
    for number in numbers:
        if run is not None and number - run.stop <= _GAP and number - run.start < _TOGETHER:
            run = range(run.start, number + 1)
            continue
        if run is not None:
            yield run
        run = range(number, number + 1)
    if run is not None:
        yield run
