"""Files that threads write in place: hashed while their bytes are in the processor's caches, and synced early."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckstore.objects.file_digest import Bytes, FileDigest, Stretch, stretch_of
from ckstore.runtime.scratch import scratch
from ckstore.runtime.threads import shared, worker_count
from ckstore.storage.writeback import Writeback, syncing_threads

#: Bytes of a file that are hashed at a time.
_BLOCK = 2 << 20

#: Files of at least this many bytes are synced early.
_LARGE = 1 << 20

#: Bytes of a file: its number, the first byte, and where they are in memory: from a byte to before another one.
Part = tuple[int, int, int, int]


class WrittenFiles:
    """Open files by number, each with its size in bytes, that are written once by several threads."""

    def __init__(self, descriptors: Mapping[int, int], sizes: Mapping[int, int]) -> None:
        self._descriptors = descriptors
        self._sizes = sizes
        self._stretches: dict[int, dict[int, tuple[int, Stretch]]] = {number: {} for number in sizes}
        self._threads = syncing_threads(worker_count())  # There may be hundreds of files.
        large = [number for number, size in sizes.items() if size >= _LARGE]
        self._writebacks = {number: Writeback(descriptors[number], self._threads) for number in large}

    def write(self, memory: Bytes, parts: Iterable[Part]) -> dict[int, int]:
        """Write and hash parts of files, given by their places in `memory`; return the bytes written by file."""
        written: dict[int, int] = {}
        for file, first, low, high in _joined(parts):
            data = memory[low:high]
            write_at(self._descriptors[file], data.data, first)
            self._add(file, first, data)
            written[file] = written.get(file, 0) + high - low
        return written

    def note(self, written: Mapping[int, int]) -> int:
        """Start to sync large files in the background; return the sum of the bytes. For one thread alone."""
        for file in written.keys() & self._writebacks.keys():
            self._writebacks[file].wrote(written[file])
        return sum(written.values())

    def digests(self) -> dict[int, str]:
        """Make large files durable, and return the BLAKE3 of each file; read bytes that were not written."""
        for writeback in self._writebacks.values():
            writeback.end()
        gaps = [(file, *gap) for file in self._sizes for gap in self._gaps(file)]
        for _ in shared(self._read, gaps, worker_count()):
            pass
        found = {file: self._digest(file) for file in self._sizes}
        for writeback in self._writebacks.values():
            writeback.finish()
        return found

    def close(self) -> None:
        """Wait for running syncs, and start no other."""
        self._threads.shutdown(cancel_futures=True)

    def _gaps(self, file: int) -> list[tuple[int, int]]:
        """Return the bytes of a file that were not hashed, in blocks, as (first, size)."""
        gaps, position, size = [], 0, self._sizes[file]
        for first, (nbytes, _) in [*sorted(self._stretches[file].items()), (size, (0, None))]:
            gaps += [(start, min(_BLOCK, first - start)) for start in range(position, first, _BLOCK)]
            position = first + nbytes
        return gaps

    def _read(self, gap: tuple[int, int, int]) -> None:
        file, first, nbytes = gap
        data = scratch("unwritten", nbytes, np.uint8)
        read_at(data.data, [(self._descriptors[file], first, nbytes)])
        self._add(file, first, data)

    def _add(self, file: int, first: int, data: Bytes) -> None:
        # The last leaf of a file stays as bytes: no node above it is known before all others.
        rest = data[-1:].tobytes() if first + data.size == self._sizes[file] else b""
        stretch = stretch_of(data[: data.size - len(rest)], first)
        self._stretches[file][first] = data.size, replace(stretch, after=stretch.after + rest)

    def _digest(self, file: int) -> str:
        digest = FileDigest()
        for _, (_, stretch) in sorted(self._stretches[file].items()):
            digest.add_stretch(stretch)
        return digest.hexdigest()


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join parts that follow one another in a file and in memory."""
    joined: list[Part] = []
    for part in parts:
        file, first, low, high = part
        before = joined[-1] if joined else (-1, 0, 0, 0)
        if (file, first, low) == (before[0], before[1] + before[3] - before[2], before[3]):
            joined[-1] = (file, before[1], before[2], high)
        else:
            joined.append(part)
    return joined


def read_at(target: memoryview, parts: Sequence[tuple[int, int, int]]) -> None:
    """Fill memory with parts of open files; a part that a file lacks stays as it is, and a digest tells."""
    for descriptor, first, nbytes in parts:
        part, target = target[:nbytes], target[nbytes:]
        while part and (count := os.preadv(descriptor, [part], first)):
            part, first = part[count:], first + count


def write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Write all bytes from a position of a file on."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
